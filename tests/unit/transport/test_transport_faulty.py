"""The decorator that fails on command."""

from __future__ import annotations

import select
from collections.abc import Iterator

import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import QueueFull, RangeError, TransportError
from kvbaton.transport.base import (
    Batch,
    Completion,
    Direction,
    FencingTransport,
    PeerRank,
    Region,
    TransportSettings,
    fencing_of,
)
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from kvbaton.transport.mori import MoriTransport
from kvbaton.transport.tcp import TcpTransport
from mori_stand_in import MoriWorld

PEER = PeerRank(Incarnation("p"))
BATCH = Batch(PEER, Direction.READ, np.array([[0, 0, 0], [0, 8, 8]], np.uint64))
SETTINGS = TransportSettings(timeout_s=0.1)


class Pair:
    """A faulty target beside a source full of ones."""

    def __init__(self) -> None:
        hub = MemoryHub()
        self.memory = bytearray(16)
        region = Region.of(self.memory)
        self.source = MemoryTransport(Region.of(bytearray(b"\1" * 16)), hub, SETTINGS)
        self.faulty = FaultyTransport(MemoryTransport(region, hub, SETTINGS), region, Faults())
        self.faulty.connect(PEER, self.source.endpoint())

    def wait(self) -> Completion:
        assert select.select([self.faulty.wakeup_fd], [], [], 10)[0]
        return self.faulty.poll()[0]

    def close(self) -> None:
        self.faulty.close()
        self.source.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_dropped_writes_look_like_success(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(drop_writes=True))
    pair.faulty.post(BATCH)
    completion = pair.wait()
    assert (completion.error, completion.moved_bytes, bytes(pair.memory)) == ("", 8, bytes(16))


def test_checks_are_made_whatever_is_dropped(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(drop_writes=True))
    with pytest.raises(RangeError):
        pair.faulty.post(Batch(PEER, Direction.READ, np.array([[0, 9, 8]], np.uint64)))
    with pytest.raises(TransportError, match="not connected"):
        pair.faulty.post(Batch(PeerRank(Incarnation("q")), Direction.READ, BATCH.runs))


def test_fail_after_counts_batches(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(fail_after=2))
    completions = []
    for _ in range(4):
        pair.faulty.post(BATCH)
        completions.append(pair.wait())
    assert ["on command" in completion.error for completion in completions] == [False, False, True, True]
    assert [completion.moved_bytes for completion in completions] == [8, 8, 0, 0]
    assert [completion.ticket for completion in completions] == [1, 2, 3, 4]


def test_refuse_posts_counts_posts_and_starts_nothing(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(refuse_posts=2))
    for _ in range(2):
        with pytest.raises(QueueFull, match="refuse_posts"):
            pair.faulty.post(BATCH)
    assert pair.faulty.poll() == []
    assert pair.faulty.post(BATCH) == 1
    assert (pair.wait().error, bytes(pair.memory)) == ("", bytes(8) + b"\1" * 8)


def test_corrupt_flips_one_byte_of_what_was_moved(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(corrupt=True))
    pair.faulty.post(BATCH)
    assert pair.wait().error == ""
    assert bytes(pair.memory) == bytes(8) + b"\xfe" + b"\1" * 7


def test_delay_only_delays(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(delay_s=0.02))
    pair.faulty.post(BATCH)
    assert (pair.wait().error, bytes(pair.memory)) == ("", bytes(8) + b"\1" * 8)


def test_a_stall_outlasts_the_inner_deadline_and_ends_with_cancel(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(stall=True))
    ticket = pair.faulty.post(BATCH)
    for _ in range(2):
        assert select.select([pair.faulty.wakeup_fd], [], [], 10)[0]
        assert pair.faulty.poll() == []
    pair.faulty.cancel(ticket)
    completion = pair.wait()
    assert (completion.ticket, completion.cancelled) == (ticket, True)
    assert bytes(pair.memory) == bytes(16)


def test_a_stall_ends_with_revoke_and_close(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(stall=True))
    pair.faulty.post(BATCH)
    pair.faulty.revoke(PEER)
    assert "revoked" in pair.wait().error
    pair.faulty.connect(PEER, pair.source.endpoint())
    pair.faulty.post(BATCH)
    pair.faulty.close()
    assert ["closed" in completion.error for completion in pair.faulty.poll()] == [True]


def test_a_stall_that_is_cancelled_when_the_inner_deadline_has_just_passed_ends_too(pair: Pair) -> None:
    pair.faulty.set_faults(Faults(stall=True))
    ticket = pair.faulty.post(BATCH)
    assert select.select([pair.faulty.wakeup_fd], [], [], 10)[0]
    pair.faulty.cancel(ticket)
    completion = pair.wait()
    assert completion.ticket == ticket
    assert completion.error


def test_what_is_dropped_of_a_write_is_named_by_its_place_on_this_side() -> None:
    world, settings = MoriWorld(), TransportSettings(unfenced_writes=True)
    here, there = bytearray(range(16)), bytearray(16)
    region = Region.of(here)
    target = MoriTransport(Region.of(there), settings, world.api())
    faults = Faults(drop=lambda runs: runs[runs[:, 1] != 4])
    source = FaultyTransport(MoriTransport(region, settings, world.api()), region, faults)
    source.connect(PEER, target.endpoint())
    source.post(Batch(PEER, Direction.WRITE, np.array([[0, 4, 4], [4, 12, 4]], np.uint64)))
    assert select.select([source.wakeup_fd], [], [], 10)[0]
    assert source.poll()[0].error == ""
    assert bytes(there) == bytes([0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0])
    source.close()
    target.close()


def test_writers_are_fenced_through_a_wrapper_where_its_inner_one_can_and_nowhere_else() -> None:
    """One that reset nothing and looked as if it had would free blocks that a peer still writes to."""
    region = Region.of(np.zeros(8, np.uint8))
    fenced = TcpTransport(region, TransportSettings(incarnation=Incarnation("owner"), fenced_writes=True))
    try:
        wrapped = FaultyTransport(FaultyTransport(fenced, region, Faults()), region, Faults())
        assert fencing_of(wrapped) is fencing_of(fenced) is fenced
        assert not isinstance(wrapped, FencingTransport)
    finally:
        fenced.close()
    plain = MemoryTransport(region, MemoryHub(), TransportSettings(incarnation=Incarnation("plain")))
    try:
        assert fencing_of(FaultyTransport(plain, region, Faults())) is None
    finally:
        plain.close()
