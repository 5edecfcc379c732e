"""Rank processes: a step on several of them is the step of the whole model, and one that dies takes all down by name."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from shaped_rig import BLOCK_TOKENS, BLOCKS, PROMPT, fresh_cache, model_of, span

from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape, instance_problem
from kvbaton.engines.embedded.shaped.rank_group import RankGroup, RankLost, RemoteCache, RemoteModel
from kvbaton.engines.embedded.shaped.rank_messages import GroupSettings, RankTransport
from kvbaton.errors import PeerLost
from kvbaton.transport.base import Batch, Direction, Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.neighbour import start_ticks
from kvbaton.transport.tcp import TcpTransport
from watching import command_line, wait_until

WAIT_S = 60.0


class Lost:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.called = threading.Event()

    def __call__(self, problem: str) -> None:
        self.problems.append(problem)
        self.called.set()


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
def group(lost: Lost) -> Iterator[RankGroup]:
    transport = RankTransport("local", Incarnation("leader"), 5.0, "127.0.0.1", "127.0.0.1")
    made = RankGroup(GroupSettings("tiny-mamba", Shape(pp=2, tp=2), BLOCKS, BLOCK_TOKENS, transport, step_s=WAIT_S), lost)
    yield made
    made.close()
    assert all(rank.process.poll() is not None for rank in made.ranks)


def test_the_ranks_are_the_model(group: RankGroup, lost: Lost) -> None:
    loaded = model_of("tiny-mamba")
    assert not instance_problem(Shape(pp=2, tp=2), [ready.layout for ready in group.ready])
    assert {ready.fingerprint for ready in group.ready} == {loaded.fingerprint}
    cache, model, memory = RemoteCache(loaded.blueprint, group), RemoteModel(group), fresh_cache(loaded)
    cache.poison(range(BLOCKS))
    written: list[int] = []
    for start in range(0, len(PROMPT), 40):
        part = span(PROMPT[start : start + 40], start)
        rows = model.forward([part], cache, written.append)
        np.testing.assert_allclose(rows, loaded.model.forward([part], memory), atol=1e-4)
    assert written == [0, 1, 2, 3] * 2
    assert cache.block_lists([7, 8, 9]) == ((7, 8, 9), (7,), (7,))
    assert not lost.problems


def test_poison_reaches_every_rank(group: RankGroup) -> None:
    """The control of all hand-offs: what is poisoned and not written again changes the answer."""
    loaded = model_of("tiny-mamba")
    cache, model = RemoteCache(loaded.blueprint, group), RemoteModel(group)
    model.forward([span(PROMPT, 0)], cache)
    next_token = span((1,), len(PROMPT))
    before = model.forward([next_token], cache)
    model.forward([span(PROMPT, 0)], cache)
    cache.poison(range(BLOCKS))
    assert np.abs(model.forward([next_token], cache) - before).max() > 0.01


def test_a_rank_that_dies_takes_the_instance_down_by_name(group: RankGroup, lost: Lost) -> None:
    loaded = model_of("tiny-mamba")
    cache, model = RemoteCache(loaded.blueprint, group), RemoteModel(group)
    model.forward([span(PROMPT, 0)], cache)
    group.ranks[3].process.kill()
    assert lost.called.wait(WAIT_S)
    assert "rank pp1,tp1" in lost.problems[0]
    for _ in range(2):
        with pytest.raises(RankLost, match="rank pp1,tp1"):
            model.forward([span((1,), len(PROMPT))], cache)


def test_a_rank_that_fails_in_a_step_is_named(group: RankGroup, lost: Lost) -> None:
    loaded = model_of("tiny-mamba")
    cache, model = RemoteCache(loaded.blueprint, group), RemoteModel(group)
    with pytest.raises(RankLost, match=r"rank pp.,tp. .* failed in a step: .*vocabulary"):
        model.forward([span((10_000,), 0)], cache)
    assert lost.called.wait(WAIT_S)


LEADER = f"""
import sys
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.shaped.rank_group import RankGroup
from kvbaton.engines.embedded.shaped.rank_messages import GroupSettings, RankTransport
transport = RankTransport("local", Incarnation("leader"), 5.0, "127.0.0.1", "127.0.0.1")
group = RankGroup(GroupSettings("tiny-mamba", Shape(tp=2), {BLOCKS}, {BLOCK_TOKENS}, transport), lambda problem: None)
print(*[rank.process.pid for rank in group.ranks], flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_a_leader_that_is_killed_and_one_that_stands_still_when_it_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        ranks = {int(pid): start_ticks(int(pid)) for pid in leader.stdout.readline().split()}
        assert len(ranks) == 2

        def lives(pid: int) -> bool:
            try:
                return start_ticks(pid) == ranks[pid]
            except PeerLost:
                return False

        stopped, other = ranks
        try:
            os.kill(stopped, signal.SIGSTOP)
            leader.kill()
            wait_until(lambda: not lives(other), "a rank ends with its leader", WAIT_S)
            assert lives(stopped), "the control: nothing but the rank itself ends it"
            os.kill(stopped, signal.SIGCONT)
            wait_until(lambda: not lives(stopped), "it ends when it goes on", WAIT_S)
        finally:
            for pid in [each for each in ranks if lives(each)]:
                os.kill(pid, signal.SIGKILL)


def test_every_rank_asks_readers_for_the_cluster_key_and_no_command_line_shows_it(lost: Lost) -> None:
    settings = RankTransport("tcp", Incarnation("leader"), 5.0, "127.0.0.1", "127.0.0.1")
    key = b"0123456789abcdef"
    group = RankGroup(GroupSettings("tiny-mamba", Shape(tp=2), BLOCKS, BLOCK_TOKENS, settings, step_s=WAIT_S), lost, key)
    try:
        for rank, ready in zip(group.ranks, group.ready, strict=True):
            assert "kvbaton" in command_line(rank.process.pid)
            assert key.decode() not in command_line(rank.process.pid)
            assert read_one_byte(ready.endpoint, key) == ""
            assert "cluster key" in read_one_byte(ready.endpoint, b"another key, as long")
    finally:
        group.close()


def read_one_byte(endpoint: Endpoint, key: bytes) -> str:
    """How a reader with this key fares; empty when it got its byte."""
    peer = PeerRank(Incarnation("leader"))
    transport = TcpTransport(Region.of(bytearray(8)), TransportSettings(cluster_key=key))
    try:
        transport.connect(peer, endpoint)
        transport.post(Batch(peer, Direction.READ, np.array([[0, 0, 1]], np.uint64)))
        assert select.select([transport.wakeup_fd], [], [], WAIT_S)[0]
        return transport.poll()[0].error
    finally:
        transport.close()
