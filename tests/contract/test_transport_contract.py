"""One suite that every transport has to pass, first part: bytes, ranges, peers. `kvbaton.transport.base` has the promises."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_contract_runs import blocks_of_layers, pages, scattered, split_heads
from transport_rig import BIG, KIB, MIB, Rig, Source, Target, assert_quiet, make_runs

from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import NO_SLOT, Plan, Strip, TokenPattern, unroll
from kvbaton.errors import RangeError, TransportError
from kvbaton.transport.base import Batch, Direction, LateWrites, PeerRank, Runs
from kvbaton.transport.choose import AutoTransport
from kvbaton.transport.faulty import Faults
from kvbaton.transport.table import PeerPart

pytest_plugins = ["contract_fixtures"]


# Bytes.


pytestmark = pytest.mark.sampled(1)


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
        pages(100, 8 * KIB),
    ],
    ids=["whole", "one", "edges", "one source thrice", "unsorted", "64 scattered", "5000 scattered", "pages"],
)
def test_bytes_arrive_exactly_and_neighbours_stay(target: Target, source: Source, runs: Runs) -> None:
    completion = target.read(source, runs)
    assert (completion.error, completion.cancelled, completion.moved_bytes) == ("", False, int(runs[:, 2].sum()))
    assert target.holds(source, runs)


@pytest.mark.parametrize("plan", [blocks_of_layers(), split_heads()], ids=["blocks of layers", "split heads"])
@pytest.mark.parametrize("slice_bytes", [8 * MIB, 10_007])
def test_a_plan_arrives_as_its_runs_do(rig: Rig, plan: Plan, slice_bytes: int) -> None:
    target, source = rig.pair(MIB, slice_bytes=slice_bytes)
    completion = target.read(source, plan)
    moved = int(unroll(plan)[:, 2].sum())
    assert (completion.error, completion.cancelled, completion.moved_bytes) == ("", False, moved)
    assert target.holds(source, plan)


@pytest.mark.parametrize("faults", [Faults(drop_writes=True), Faults(corrupt=True), Faults(drop=lambda runs: runs[1:])])
def test_negative_control_a_plan_that_is_not_moved_whole_is_noticed(rig: Rig, source: Source, faults: Faults) -> None:
    target = rig.target(MIB, faults=faults)
    target.transport.connect(source.peer, source.endpoint)
    assert target.read(source, split_heads()).error == ""
    assert not target.holds(source, split_heads())


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


def test_the_caller_may_reuse_the_arrays_of_its_plan(target: Target, source: Source) -> None:
    plan, go = split_heads(), threading.Event()
    target.post(source, plan, go.is_set)
    for strip in plan.strips:
        strip.places[:] = strip.slots[:] = 2 * MIB
    go.set()
    assert target.wait()[0].error == ""
    assert target.holds(source, split_heads())


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


def _tokens(slot: int, place: int, count: int, item: tuple[int, int, int], steps: tuple[int, int]) -> Plan:
    pattern = TokenPattern(np.array([item]), *steps)
    return Plan((Strip(np.array([[slot, slot, 0]]), np.array([[place, place, count]]), pattern),))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (_tokens(MIB // 2, MIB // 2 - 64, 8, (0, 0, 8), (8, 9)), "target"),
        (_tokens(MIB // 2, MIB // 2 - 64, 8, (0, 0, 8), (9, 8)), "source"),
        (_tokens(-8, 8, 8, (0, 0, 8), (8, 8)), "source"),
        (_tokens(0, 0, 2**62, (0, 0, 8), (8, 8)), "source"),
        (_tokens(0, 0, 3, (0, 0, 8), (2**62, 2**62)), "source"),
        (_tokens(2**63 - 1, 2**63 - 1, 1, (0, 0, 8), (8, 8)), "source"),
        (_tokens(0, 0, 8, (0, 0, 8), (8, 7)), "target runs overlap"),
        (_tokens(0, 0, 8, (0, 0, 8), (8, 0)), "target runs overlap"),
        (Plan(_tokens(0, 0, 8, (0, 0, 8), (8, 8)).strips * 2), "target runs overlap"),
        (Plan((Strip(np.array([[0, 0, 0], [0, 99, 0]]), np.array([[0, 0, 100]])),)), "target runs overlap"),
    ],
)
def test_plans_out_of_range_are_refused_before_anything_starts(target: Target, source: Source, plan: Plan, words: str) -> None:
    with pytest.raises(RangeError, match=words):
        target.post(source, plan)
    assert target.read(source, Plan((Strip(NO_SLOT, np.array([[5, 5, 0]])),))).error == ""
    assert target.holds(source, make_runs())


def test_what_is_no_array_of_runs_is_refused(target: Target, source: Source) -> None:
    wrong: Any
    for wrong in (np.zeros((1, 3), np.int64), np.zeros((3,), np.uint64), np.zeros((1, 2), np.uint64)):
        with pytest.raises(RangeError, match="shape"):
            target.post(source, wrong)


# Peers.


def test_declares_reads_only_and_no_late_writes(rig: Rig, target: Target, source: Source) -> None:
    assert target.transport.late_writes is rig.kind.entry.promises[Direction.READ] is LateWrites.IMPOSSIBLE
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
    for region_bytes in (0, 2**63, 2**64):
        with pytest.raises(TransportError, match=f"region_bytes is {region_bytes}; it must be above 0 and below"):
            connect(other, msgspec.structs.replace(endpoint, region_bytes=region_bytes))
    if isinstance(target.transport, AutoTransport):  # it tries the next one
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
    target, _, completion = rig.interrupted(lambda target, source, _: target.transport.revoke(source.peer))
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
    target, _, completion = rig.interrupted(lambda _, source, __: source.kill())
    assert completion.error.startswith("PeerLost")
    assert_quiet(target)


def test_withdrawn_memory_is_an_error_though_the_process_lives(rig: Rig) -> None:
    if not rig.kind.entry.sees_withdrawal:
        pytest.skip("its entry in the table says that the memory stays readable until the process ends")
    target, source = rig.pair(MIB)
    assert target.read(source, make_runs((0, 0, KIB))).error == ""
    source.withdraw()
    completion = target.read(source, make_runs((0, 0, KIB)))
    assert completion.error.startswith("PeerLost")


def test_memory_withdrawn_while_the_batch_runs_is_an_error(rig: Rig) -> None:
    if not rig.kind.entry.sees_withdrawal:
        pytest.skip("its entry in the table says that the memory stays readable until the process ends")
    target, _, completion = rig.interrupted(lambda _, source, __: source.withdraw())
    assert completion.error.startswith("PeerLost")
    assert_quiet(target)


def test_a_stopped_peer_is_an_error_in_time_or_no_obstacle(rig: Rig) -> None:
    if not rig.kind.has_processes:
        pytest.skip("a peer in this process cannot stand still alone")
    target, source = rig.pair(MIB, timeout_s=1.5)
    other = rig.source(MIB, seed=2)
    target.transport.connect(other.peer, other.endpoint)
    source.stop()
    runs = make_runs((0, 0, 100_000))
    stuck = target.post(source, runs)
    if rig.kind.entry.peer_part is PeerPart.NONE:
        assert target.wait()[0].error == ""
        assert target.holds(source, runs)
        return
    later = target.post(other, make_runs((0, 200_000, 100_000)))
    assert [(c.ticket, c.error) for c in target.wait()] == [(later, "")]
    lost = target.wait()[0]
    assert lost.ticket == stuck
    assert "no progress within 1.5 s" in lost.error


def test_a_peer_that_stops_while_the_batch_runs_cannot_write_later(rig: Rig) -> None:
    if rig.kind.entry.peer_part is not PeerPart.MOVE:
        pytest.skip("the peer need not move")
    target, source, completion = rig.interrupted(lambda _, source, __: source.stop(), timeout_s=0.5)
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
