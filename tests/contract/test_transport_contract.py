"""One suite that every transport has to pass; see the text of `kvbaton.transport.base` for what is promised."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gpu_memory import has_gpu
from transport_peer import POISON
from transport_rig import Rig, Source, Target, has_mooncake, make_runs, wait_until

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import QueueFull, RangeError, TransportError
from kvbaton.transport.base import Batch, Direction, LateWrites, PeerRank, Runs, Ticket
from kvbaton.transport.faulty import Faults

KINDS = (
    "memory",
    "local",
    "shared",
    "tcp",
    "faulty",
    "auto",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(not find_spec("nixl"), reason="needs the package nixl; see make test-compat")
    ),
    pytest.param("mooncake", marks=pytest.mark.skipif(not has_mooncake(), reason="needs Mooncake; see make test-compat")),
    "mori",
    pytest.param("cuda", marks=pytest.mark.skipif(not has_gpu(), reason="needs kvbaton[cuda] and an NVIDIA GPU")),
)
KIB, MIB = 1 << 10, 1 << 20
BIG = 32 * MIB
WHOLE = make_runs((0, 0, BIG))


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A fresh rig of each kind."""
    made = Rig(request.param)
    try:
        yield made
    finally:
        made.take_down()


@pytest.fixture(scope="module")
def shared_rigs() -> Iterator[dict[str, tuple[Rig, Source]]]:
    """Sources that no test harms, one per kind, made when first needed."""
    made: dict[str, tuple[Rig, Source]] = {}
    try:
        yield made
    finally:
        for shared, _ in made.values():
            shared.take_down()


@pytest.fixture
def source(rig: Rig, shared_rigs: dict[str, tuple[Rig, Source]]) -> Source:
    """A source of 1 MiB that the test leaves alive."""
    if rig.kind not in shared_rigs:
        shared = Rig(rig.kind)
        shared_rigs[rig.kind] = (shared, shared.source(MIB))
    rig.hub, rig.mori = shared_rigs[rig.kind][0].hub, shared_rigs[rig.kind][0].mori
    return shared_rigs[rig.kind][1]


@pytest.fixture
def target(rig: Rig, source: Source) -> Target:
    """A target of 1 MiB, connected to `source`."""
    made = rig.target(MIB)
    made.transport.connect(source.peer, source.endpoint)
    return made


def scattered(count: int, seed: int = 7) -> Runs:
    """Runs of odd sizes in free order on both sides, some of them empty, with gaps around each in target memory."""
    random = np.random.default_rng(seed)
    cell = MIB // count
    lengths = random.integers(0, cell - 1, count)
    return np.stack([random.permutation(count) * cell, random.permutation(count) * cell + 1, lengths], axis=1).astype(np.uint64)


# Bytes.


@pytest.mark.parametrize(
    "runs",
    [
        make_runs((0, 0, MIB)),
        make_runs((17, 4099, 5000)),
        make_runs((MIB - 1, 0, 1), (0, MIB - 1, 1)),
        make_runs((100, 0, 64), (100, 64, 64), (100, 128, 64)),
        make_runs((0, 9000, 100), (5000, 200, 300), (0, 700, 100)),
        scattered(64),
        scattered(5000),
    ],
    ids=["whole", "one", "edges", "one source thrice", "unsorted", "64 scattered", "5000 scattered"],
)
def test_bytes_arrive_exactly_and_neighbours_stay(target: Target, source: Source, runs: Runs) -> None:
    completion = target.read(source, runs)
    assert (completion.error, completion.cancelled, completion.moved_bytes) == ("", False, int(runs[:, 2].sum()))
    assert target.holds(source, runs)


def test_large_batch_crosses_many_slices(rig: Rig) -> None:
    target, source = rig.pair(8 * MIB, slice_bytes=100_001)
    runs = make_runs((MIB, 0, 3 * MIB + 7), (5, 4 * MIB, 2 * MIB))
    assert target.read(source, runs).error == ""
    assert target.holds(source, runs)


@pytest.mark.parametrize("runs", [make_runs(), make_runs((5, 5, 0)), make_runs((MIB, MIB, 0), (0, 0, 0))])
def test_a_batch_without_bytes_succeeds(target: Target, source: Source, runs: Runs) -> None:
    completion = target.read(source, runs)
    assert (completion.error, completion.moved_bytes) == ("", 0)
    assert target.holds(source, make_runs())


def test_the_caller_may_reuse_its_runs_array(target: Target, source: Source) -> None:
    runs = make_runs((0, 0, KIB))
    go = threading.Event()
    target.post(source, runs, go.is_set)
    runs[:] = MIB * 2
    go.set()
    assert target.wait()[0].error == ""
    assert target.holds(source, make_runs((0, 0, KIB)))


@pytest.mark.parametrize("faults", [Faults(drop_writes=True), Faults(corrupt=True)])
def test_negative_control_the_byte_check_goes_red(rig: Rig, source: Source, faults: Faults) -> None:
    target = rig.target(MIB, faults=faults)
    target.transport.connect(source.peer, source.endpoint)
    runs = scattered(64)
    completion = target.read(source, runs)
    assert (completion.error, completion.moved_bytes) == ("", int(runs[:, 2].sum()))
    assert not target.holds(source, runs)


# Ranges.


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (make_runs((0, 0, 8), (MIB - 7, 0, 8)), "run 1: source offset"),
        (make_runs((0, MIB - 7, 8)), "run 0: target offset"),
        (make_runs((MIB + 1, 0, 0)), "source offset"),
        (make_runs((2**64 - 8, 0, 16)), "source offset"),
        (make_runs((0, 2**64 - 8, 16)), "target offset"),
        (make_runs((8, 8, 2**64 - 8)), "source offset"),
        (make_runs((0, 0, MIB + 1)), "source offset"),
        (make_runs((0, 0, 100), (500, 99, 100)), "target runs overlap"),
        (make_runs((0, 500, 100), (0, 0, 10), (500, 401, 100)), "target runs overlap"),
    ],
)
def test_runs_out_of_range_are_refused_before_anything_starts(target: Target, source: Source, runs: Runs, words: str) -> None:
    with pytest.raises(RangeError, match=words):
        target.post(source, runs)
    assert target.read(source, make_runs()).error == ""
    assert target.holds(source, make_runs())


def test_what_is_no_array_of_runs_is_refused(target: Target, source: Source) -> None:
    wrong: Any
    for wrong in (np.zeros((1, 3), np.int64), np.zeros((3,), np.uint64), np.zeros((1, 2), np.uint64)):
        with pytest.raises(RangeError, match="shape"):
            target.post(source, wrong)


# Peers.


def test_declares_reads_only_and_no_late_writes(target: Target, source: Source) -> None:
    assert target.transport.late_writes is LateWrites.IMPOSSIBLE
    assert target.transport.directions == {Direction.READ}
    with pytest.raises(TransportError, match="does not write"):
        target.transport.post(Batch(source.peer, Direction.WRITE, make_runs((0, 0, 1))))


def test_an_unknown_peer_is_refused(target: Target, source: Source) -> None:
    with pytest.raises(TransportError, match="not connected"):
        target.transport.post(Batch(PeerRank(source.peer.incarnation, 1), Direction.READ, make_runs((0, 0, 1))))


def test_connect_checks_the_endpoint(target: Target, source: Source) -> None:
    connect, endpoint = target.transport.connect, source.endpoint
    connect(source.peer, endpoint)
    with pytest.raises(TransportError, match="connected already"):
        connect(source.peer, msgspec.structs.replace(endpoint, region_bytes=1))
    with pytest.raises(TransportError, match="'source1', not to 'other'"):
        connect(PeerRank(Incarnation("other")), endpoint)
    other = PeerRank(source.peer.incarnation, 1)
    with pytest.raises(TransportError, match="'pigeon'"):
        connect(other, msgspec.structs.replace(endpoint, transport="pigeon"))
    with pytest.raises(TransportError, match="region_bytes is 0"):
        connect(other, msgspec.structs.replace(endpoint, region_bytes=0))
    if endpoint.transport == "auto":
        return
    for field in set(endpoint.details) - {"incarnation"}:
        with pytest.raises(TransportError, match=field):
            connect(other, msgspec.structs.replace(endpoint, details=endpoint.details | {field: 1.5}))


def test_peers_are_bounded(rig: Rig, source: Source) -> None:
    target = rig.target(MIB, max_peers=1)
    target.transport.connect(source.peer, source.endpoint)
    with pytest.raises(TransportError, match="max_peers"):
        target.transport.connect(PeerRank(source.peer.incarnation, 1), source.endpoint)


def test_revoke_fails_what_is_in_flight_and_refuses_more(target: Target, source: Source) -> None:
    waiting = target.post(source, make_runs((0, 0, KIB)), lambda: False)
    target.transport.revoke(source.peer)
    target.transport.revoke(source.peer)
    completion = target.wait()[0]
    assert completion.ticket == waiting
    assert "revoked" in completion.error
    with pytest.raises(TransportError, match="revoked"):
        target.post(source, make_runs((0, 0, KIB)))
    target.transport.connect(source.peer, source.endpoint)
    assert target.read(source, make_runs((0, 0, KIB))).error == ""


def test_revoke_stops_a_running_batch(rig: Rig) -> None:
    target, source = rig.pair(BIG, slice_bytes=4 * KIB)
    target.post(source, WHOLE)
    wait_until(lambda: target.memory[0] != POISON)
    target.transport.revoke(source.peer)
    completion = target.wait()[0]
    assert "revoked" in completion.error
    assert completion.moved_bytes < BIG
    assert_quiet(target)


def test_a_peer_killed_before_the_batch_is_an_error(rig: Rig) -> None:
    target, source = rig.pair(MIB)
    assert target.read(source, make_runs((0, 0, KIB))).error == ""
    source.kill()
    completion = target.read(source, make_runs((0, 0, KIB)))
    assert completion.error.startswith("PeerLost")
    assert not completion.cancelled


def test_a_peer_killed_while_the_batch_runs_is_an_error(rig: Rig) -> None:
    target, source = rig.pair(BIG, slice_bytes=4 * KIB)
    target.post(source, WHOLE)
    wait_until(lambda: target.memory[0] != POISON)
    source.kill()
    completion = target.wait()[0]
    assert completion.error.startswith("PeerLost")
    assert completion.moved_bytes < BIG
    assert_quiet(target)


def test_withdrawn_memory_is_an_error_though_the_process_lives(rig: Rig) -> None:
    if rig.kind == "cuda":
        pytest.skip("memory that was opened through CUDA IPC stays readable until the process ends")
    target, source = rig.pair(MIB)
    assert target.read(source, make_runs((0, 0, KIB))).error == ""
    source.withdraw()
    completion = target.read(source, make_runs((0, 0, KIB)))
    assert completion.error.startswith("PeerLost")


def test_memory_withdrawn_while_the_batch_runs_is_an_error(rig: Rig) -> None:
    if rig.kind == "cuda":
        pytest.skip("memory that was opened through CUDA IPC stays readable until the process ends")
    target, source = rig.pair(BIG, slice_bytes=4 * KIB)
    target.post(source, WHOLE)
    wait_until(lambda: target.memory[0] != POISON)
    source.withdraw()
    completion = target.wait()[0]
    assert completion.error.startswith("PeerLost")
    assert_quiet(target)


def test_a_stopped_peer_is_an_error_in_time_or_no_obstacle(rig: Rig) -> None:
    if not rig.has_processes:
        pytest.skip("a peer in this process cannot stand still alone")
    target, source = rig.pair(MIB, timeout_s=1.5)
    other = rig.source(MIB, seed=2)
    target.transport.connect(other.peer, other.endpoint)
    source.stop()
    runs = make_runs((0, 0, 100_000))
    stuck = target.post(source, runs)
    if rig.kind in ("local", "shared", "cuda", "auto"):
        assert target.wait()[0].error == ""
        assert target.holds(source, runs)
        return
    later = target.post(other, make_runs((0, 200_000, 100_000)))
    assert [(c.ticket, c.error) for c in target.wait()] == [(later, "")]
    lost = target.wait()[0]
    assert lost.ticket == stuck
    assert "no progress within 1.5 s" in lost.error


def test_a_peer_that_stops_while_the_batch_runs_cannot_write_later(rig: Rig) -> None:
    if rig.kind not in ("tcp", "mooncake"):
        pytest.skip("the peer need not move")
    target, source = rig.pair(BIG, slice_bytes=4 * KIB, timeout_s=0.5)
    target.post(source, WHOLE)
    wait_until(lambda: target.memory[0] != POISON)
    source.stop()
    completion = target.wait()[0]
    assert "no progress within 0.5 s" in completion.error
    source.resume()
    assert_quiet(target)


def test_a_lost_peer_harms_no_other(rig: Rig) -> None:
    target, dead = rig.pair(MIB)
    alive = rig.source(MIB, seed=2)
    target.transport.connect(alive.peer, alive.endpoint)
    dead.kill()
    tickets = {target.post(peer, make_runs((0, n * KIB, KIB))): peer for n, peer in enumerate([dead, alive] * 50)}
    for completion in target.wait(100):
        assert bool(completion.error) == (tickets[completion.ticket] is dead)


# Order of things: after, cancel, close.


def test_nothing_moves_before_the_event(target: Target, source: Source) -> None:
    go = threading.Event()
    runs = make_runs((0, 0, KIB))
    held = target.post(source, runs, go.is_set)
    assert target.read(source, make_runs()).error == ""
    assert target.read(source, make_runs((0, KIB, KIB))).error == ""
    assert (target.memory[:KIB] == POISON).all()
    go.set()
    completion = target.wait()[0]
    assert (completion.ticket, completion.error, completion.moved_bytes) == (held, "", KIB)


def test_an_event_that_raises_fails_its_batch_only(target: Target, source: Source) -> None:
    def broken() -> bool:
        raise OSError("the stream is gone")

    target.post(source, make_runs((0, 0, KIB)), broken)
    completion = target.wait()[0]
    assert "the stream is gone" in completion.error
    assert target.holds(source, make_runs())
    assert target.read(source, make_runs((0, 0, KIB))).error == ""


def test_an_event_that_never_comes_fails_its_batch(rig: Rig, source: Source) -> None:
    target = rig.target(MIB, timeout_s=0.2)
    target.transport.connect(source.peer, source.endpoint)
    target.post(source, make_runs((0, 0, KIB)), lambda: False)
    assert "did not come within 0.2 s" in target.wait()[0].error
    assert target.holds(source, make_runs())


def test_cancel_before_the_start(target: Target, source: Source) -> None:
    ticket = target.post(source, make_runs((0, 0, KIB)), lambda: False)
    target.transport.cancel(ticket)
    target.transport.cancel(ticket)
    completion = target.wait()[0]
    assert (completion.ticket, completion.cancelled, completion.moved_bytes) == (ticket, True, 0)
    assert completion.error
    assert target.holds(source, make_runs())


def test_cancel_while_running_then_quiet(rig: Rig) -> None:
    target, source = rig.pair(BIG, slice_bytes=4 * KIB)
    ticket = target.post(source, WHOLE)
    wait_until(lambda: target.memory[0] != POISON)
    target.transport.cancel(ticket)
    completion = target.wait()[0]
    assert completion.cancelled
    assert completion.moved_bytes < BIG
    assert_quiet(target)
    runs = make_runs((0, MIB, 2 * MIB))
    assert target.read(source, runs).error == ""
    assert target.holds(source, runs)


def test_cancel_of_unknown_and_finished_tickets_is_ignored(target: Target, source: Source) -> None:
    ticket = target.post(source, make_runs((0, 0, KIB)))
    assert target.wait()[0].error == ""
    target.transport.cancel(ticket)
    target.transport.cancel(Ticket(123456))
    assert target.read(source, make_runs()).error == ""


def test_close_with_work_in_flight(rig: Rig) -> None:
    target, source = rig.pair(BIG, slice_bytes=4 * KIB)
    tickets = {target.post(source, WHOLE), target.post(source, make_runs((0, 0, 1)), lambda: False)}
    wait_until(lambda: target.memory[0] != POISON)
    target.transport.close()
    target.transport.close()
    assert_quiet(target)
    completions = target.transport.poll()
    assert {completion.ticket for completion in completions} == tickets
    assert all("closed" in completion.error for completion in completions)
    assert target.transport.poll() == []
    with pytest.raises(TransportError, match="closed"):
        target.post(source, make_runs((0, 0, 1)))
    with pytest.raises(TransportError, match="closed"):
        target.transport.connect(PeerRank(source.peer.incarnation, 1), source.endpoint)


def test_close_gives_everything_back(rig: Rig) -> None:
    source = rig.source(MIB)
    target = rig.target(MIB)
    target.transport.close()
    before = (open_descriptors(), threading.active_count())
    for _ in range(3):
        target = rig.again(target)
        target.transport.connect(source.peer, source.endpoint)
        assert target.read(source, make_runs((0, 0, KIB))).error == ""
        target.transport.close()
    assert (open_descriptors(), threading.active_count()) == before


def test_revoke_and_lost_peers_leave_no_descriptor(rig: Rig) -> None:
    target, source = rig.pair(MIB)
    before = (open_descriptors(), threading.active_count(), mapped_segments())
    for _ in range(3):
        assert target.read(source, make_runs((0, 0, KIB))).error == ""
        target.transport.revoke(source.peer)
        target.transport.connect(source.peer, source.endpoint)
    source.kill()
    assert target.read(source, make_runs((0, 0, KIB))).error
    target.transport.revoke(source.peer)
    wait_until(
        lambda: open_descriptors() <= before[0] and threading.active_count() <= before[1] and mapped_segments() <= before[2]
    )


# Queues and completions.


def test_the_queue_is_bounded(rig: Rig, source: Source) -> None:
    target = rig.target(MIB, max_in_flight=3)
    target.transport.connect(source.peer, source.endpoint)
    tickets = [target.post(source, make_runs((0, n * KIB, KIB)), lambda: False) for n in range(3)]
    with pytest.raises(QueueFull, match="queue full") as refusal:
        target.post(source, make_runs((0, 0, 1)))
    assert refusal.value.retryable
    target.transport.cancel(tickets[0])
    assert target.wait()[0].ticket == tickets[0]
    target.post(source, make_runs((0, 0, 1)))
    assert target.wait()[0].error == ""


def test_a_queue_that_one_peer_has_filled_still_takes_a_batch_of_another(rig: Rig) -> None:
    target, slow, other = rig.target(MIB, max_in_flight=3), rig.source(MIB), rig.source(MIB, seed=2)
    for peer in (slow, other):
        target.transport.connect(peer.peer, peer.endpoint)
    for n in range(3):
        target.post(slow, make_runs((0, n * KIB, KIB)), lambda: False)
    for n in range(3, 6):
        assert target.read(other, make_runs((0, n * KIB, KIB))).error == ""
    target.post(other, make_runs((0, 6 * KIB, KIB)), lambda: False)
    with pytest.raises(QueueFull, match="queue full"):
        target.post(other, make_runs((0, 7 * KIB, KIB)))


def test_each_ticket_is_handed_out_once_whoever_posts(target: Target, source: Source) -> None:
    tickets: list[list[Ticket]] = [[] for _ in range(4)]

    def post(lane: int) -> None:
        for n in range(lane, 1000, 4):
            tickets[lane].append(target.post(source, make_runs((n * KIB, n * KIB, KIB))))

    threads = [threading.Thread(target=post, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    completions = target.wait(1000)
    for thread in threads:
        thread.join(10)
    assert sorted(completion.ticket for completion in completions) == sorted(ticket for lane in tickets for ticket in lane)
    assert len({completion.ticket for completion in completions}) == 1000
    assert not any(completion.error for completion in completions)
    assert target.transport.poll() == []
    assert target.holds(source, make_runs((0, 0, 1000 * KIB)))


def test_the_wakeup_is_readable_exactly_while_there_is_something(target: Target, source: Source) -> None:
    assert not target.is_readable()
    for n in range(3):
        target.post(source, make_runs((0, n, 1)))
    wait_until(target.is_readable)
    assert target.is_readable()
    seen = 0
    while seen < 3:
        wait_until(target.is_readable)
        seen += len(target.transport.poll())
    assert not target.is_readable()


def assert_quiet(target: Target) -> None:
    """Nobody writes to target memory any more: poison that is put there now stays."""
    target.memory[:] = POISON
    for _ in range(5):
        assert (target.memory == POISON).all()


def mapped_segments() -> int:
    """How many pieces of shared memory, its own included, this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:kvbaton")


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))
