"""The suite for transports that write where that was chosen: every byte at the peer, nothing else there, and what can go wrong.

What no transport that writes can promise is not asserted: that a write which *failed*, because the peer stood still or the link
was cut, leaves nothing behind. What the library or the kernel had on its way may land when the peer goes on, unless that peer
can fence its writers: `test_transport_fences.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from contract_kinds import WRITE_KINDS, params
from transport_contract_runs import blocks_of_layers, pages, scattered, split_heads
from transport_peer import POISON
from transport_rig import BIG, KIB, MIB, make_runs, wait_until
from write_rig import Holder, Writer, WriteRig

from kvbaton.core.strips import Plan, count_bytes
from kvbaton.errors import QueueFull, RangeError, TransportError
from kvbaton.transport.base import Batch, Direction, LateWrites, PeerRank, Runs, Ticket
from kvbaton.transport.faulty import Faults
from watching import pause

pytestmark = pytest.mark.sampled(1)


@pytest.fixture(params=params(WRITE_KINDS))
def rig(request: pytest.FixtureRequest) -> Iterator[WriteRig]:
    """A fresh rig of each kind."""
    made = WriteRig(request.param)
    try:
        yield made
    finally:
        made.take_down()


@pytest.fixture
def pair(rig: WriteRig) -> tuple[Writer, Holder]:
    """A writer and a holder of 1 MiB, connected."""
    return rig.pair(MIB)


# Bytes.


def test_bytes_arrive_exactly_and_neighbours_stay(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    batches: list[Runs | Plan] = [
        make_runs((0, 0, MIB)),
        make_runs((17, 4099, 5000)),
        make_runs((MIB - 1, 0, 1), (0, MIB - 1, 1)),
        make_runs((100, 0, 64), (100, 64, 64), (100, 128, 64)),
        make_runs((0, 9000, 100), (5000, 200, 300), (0, 700, 100)),
        make_runs(),
        make_runs((5, 5, 0)),
        scattered(64),
        scattered(5000),
        pages(100, 8 * KIB),
        blocks_of_layers(),
        split_heads(),
    ]
    for runs in batches:
        holder.memory[:] = POISON
        completion = writer.write(holder, runs)
        assert (completion.error, completion.cancelled, completion.moved_bytes) == ("", False, count_bytes(runs))
        assert holder.holds(writer.content, runs)
        assert writer.is_untouched


def test_a_large_batch_crosses_many_slices(rig: WriteRig) -> None:
    writer, holder = rig.pair(8 * MIB, slice_bytes=100_001)
    runs = make_runs((MIB, 0, 3 * MIB + 7), (5, 4 * MIB, 2 * MIB))
    assert writer.write(holder, runs).error == ""
    assert holder.holds(writer.content, runs)


def test_what_is_complete_is_there_at_once(rig: WriteRig) -> None:
    """No look at the peer's memory finds less than the completion says, however soon it comes."""
    writer, holder = rig.pair(4 * MIB)
    runs = make_runs((0, 0, 4 * MIB))
    for _ in range(10):
        holder.memory[:] = POISON
        assert writer.write(holder, runs).error == ""
        assert holder.memory[-1] != POISON
        assert np.array_equal(holder.memory, writer.content)


def test_reads_and_writes_with_one_peer_do_not_disturb_each_other(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    there = np.random.default_rng(9).integers(0, POISON, 256 * KIB, dtype=np.uint8)
    holder.memory[512 * KIB : 768 * KIB] = there
    tickets = [writer.post(holder, make_runs((n * KIB, n * KIB, KIB))) for n in range(100)]
    back = Batch(holder.peer, Direction.READ, make_runs((512 * KIB, 768 * KIB, 256 * KIB)))
    tickets.insert(50, writer.transport.post(back))
    assert sorted((c.ticket, c.error) for c in writer.wait(101)) == sorted((ticket, "") for ticket in tickets)
    assert np.array_equal(writer.memory[768 * KIB :], there)
    assert np.array_equal(holder.memory[: 100 * KIB], writer.content[: 100 * KIB])
    assert (holder.memory[100 * KIB : 512 * KIB] == POISON).all()


def test_negative_control_a_transport_that_drops_the_writes_goes_red(rig: WriteRig) -> None:
    writer, holder = rig.writer(MIB, faults=Faults(drop_writes=True)), rig.holder(MIB)
    rig.join(writer, holder)
    runs = scattered(64)
    completion = writer.write(holder, runs)
    assert (completion.error, completion.moved_bytes) == ("", int(runs[:, 2].sum()))
    assert not holder.holds(writer.content, runs)
    assert holder.holds(writer.content, make_runs())


# Ranges, and the choice to write.


def test_ranges_are_those_of_the_source_here_and_the_target_there(rig: WriteRig) -> None:
    writer, holder = rig.writer(MIB), rig.holder(2 * MIB)
    rig.join(writer, holder)
    refused: list[tuple[Runs, str]] = [
        (make_runs((0, 0, 8), (MIB - 7, 0, 8)), f"run 1: source offset {MIB - 7} .* the source region of {MIB} bytes"),
        (make_runs((0, 2 * MIB - 7, 8)), f"run 0: target offset {2 * MIB - 7} .* the target region of {2 * MIB} bytes"),
        (make_runs((2**64 - 8, 0, 16)), "source offset"),
        (make_runs((0, 2**64 - 8, 16)), "target offset"),
        (make_runs((0, 0, 100), (500, 99, 100)), "target runs overlap"),
    ]
    for runs, words in refused:
        with pytest.raises(RangeError, match=words):
            writer.post(holder, runs)
    assert holder.holds(writer.content, make_runs())
    runs = make_runs((MIB - 8, 2 * MIB - 8, 8))
    assert writer.write(holder, runs).error == ""
    assert holder.holds(writer.content, runs)


def test_declares_what_its_entry_promises(rig: WriteRig, pair: tuple[Writer, Holder]) -> None:
    writer, _ = pair
    assert writer.transport.late_writes is rig.kind.entry.promises[Direction.WRITE]
    assert writer.transport.directions == {Direction.READ, Direction.WRITE}


def test_without_the_choice_nothing_is_written_and_the_setting_is_named(rig: WriteRig) -> None:
    cautious, holder = rig.writer(MIB, writes=False), rig.holder(MIB)
    cautious.transport.connect(holder.peer, holder.endpoint)
    assert cautious.transport.late_writes is LateWrites.IMPOSSIBLE
    assert cautious.transport.directions == {Direction.READ}
    with pytest.raises(TransportError, match=r"does not write; .*fenced_writes \(--(un)?fenced-writes\)"):
        cautious.post(holder, make_runs((0, 0, KIB)))
    assert holder.holds(cautious.content, make_runs())


def test_a_peer_that_has_not_chosen_it_is_not_written_to(rig: WriteRig) -> None:
    writer, reader = rig.writer(MIB), rig.holder(MIB, writes=False)
    writer.transport.connect(reader.peer, reader.endpoint)
    with pytest.raises(TransportError, match=r"'holder1' rank 0 does not take writes: set (un)?fenced_writes"):
        writer.post(reader, make_runs((0, 0, KIB)))
    assert reader.holds(writer.content, make_runs())
    completion = writer.transport.post(Batch(reader.peer, Direction.READ, make_runs((0, 0, KIB))))
    assert [(c.ticket, c.error) for c in writer.wait()] == [(completion, "")]


def test_another_incarnation_is_not_written_to(rig: WriteRig) -> None:
    """The endpoint of one that is gone, its memory now another's: mark, or token, is looked at before the first byte."""
    if rig.kind.is_faulty:
        pytest.skip("the same as without faults")
    writer, holder = rig.writer(MIB), rig.holder(MIB)
    details = holder.endpoint.details
    other: dict[str, str | int] = {"mark": int(details["mark"]) ^ 2} if "mark" in details else {"token": "00" * 16}
    writer.transport.connect(holder.peer, type(holder.endpoint)(holder.endpoint.transport, MIB, details | other))
    completion = writer.write(holder, make_runs((0, 0, MIB)))
    assert completion.error.startswith("PeerLost" if "mark" in details else "PeerRefused")
    assert ("its mark is" if "mark" in details else "is not that of this process") in completion.error
    assert holder.holds(writer.content, make_runs())


# What goes wrong.


def test_a_peer_killed_before_the_write_is_an_error(rig: WriteRig) -> None:
    writer, holder = rig.pair(MIB)
    assert writer.write(holder, make_runs((0, 0, KIB))).error == ""
    holder.kill()
    completion = writer.write(holder, make_runs((0, 0, KIB)))
    assert completion.error.startswith("PeerLost")
    assert not completion.cancelled


def test_a_peer_killed_while_it_is_written_to_is_an_error(rig: WriteRig) -> None:
    writer, holder, completion = rig.interrupted(lambda _, holder, __: holder.kill())
    assert completion.error.startswith("PeerLost")
    assert writer.is_untouched
    holder.assert_quiet()


def test_memory_withdrawn_while_it_is_written_to_is_an_error_and_quiet(rig: WriteRig) -> None:
    writer, holder, completion = rig.interrupted(lambda _, holder, __: holder.withdraw())
    assert completion.error.startswith("PeerLost")
    assert writer.is_untouched
    holder.assert_quiet()


def test_a_peer_that_stands_still_is_an_error_in_time_and_harms_no_other(rig: WriteRig) -> None:
    if not rig.kind.has_processes:
        pytest.skip("a peer in this process cannot stand still alone")
    writer, stuck = rig.pair(MIB, timeout_s=1.5)
    other = rig.holder(MIB)
    rig.join(writer, other)
    assert stuck.process is not None
    pause(stuck.process.pid)
    waiting = writer.post(stuck, make_runs((0, 0, 100_000)))
    runs = make_runs((0, 200_000, 100_000))
    later = writer.post(other, runs)
    assert [(c.ticket, c.error) for c in writer.wait()] == [(later, "")]
    assert other.holds(writer.content, runs)
    lost = writer.wait()[0]
    assert lost.ticket == waiting
    assert "no progress within 1.5 s" in lost.error


def test_revoke_stops_a_running_write_then_quiet_at_the_peer(rig: WriteRig) -> None:
    writer, holder, completion = rig.interrupted(lambda writer, holder, _: writer.transport.revoke(holder.peer))
    assert "revoked" in completion.error
    assert completion.moved_bytes < BIG
    holder.assert_quiet()
    with pytest.raises(TransportError, match="revoked"):
        writer.post(holder, make_runs((0, 0, KIB)))
    writer.transport.connect(holder.peer, holder.endpoint)
    runs = make_runs((0, MIB, 2 * MIB))
    assert writer.write(holder, runs).error == ""
    assert holder.holds(writer.content, runs)


def test_cancel_while_running_then_quiet_at_the_peer(rig: WriteRig) -> None:
    writer, holder, completion = rig.interrupted(lambda writer, _, ticket: writer.transport.cancel(ticket))
    assert completion.cancelled
    assert completion.moved_bytes < BIG
    holder.assert_quiet()
    runs = make_runs((0, MIB, 2 * MIB))
    assert writer.write(holder, runs).error == ""
    assert holder.holds(writer.content, runs)


def test_cancel_before_the_event_writes_nothing(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    ticket = writer.post(holder, make_runs((0, 0, KIB)), lambda: False)
    writer.transport.cancel(ticket)
    completion = writer.wait()[0]
    assert (completion.ticket, completion.cancelled, completion.moved_bytes) == (ticket, True, 0)
    assert holder.holds(writer.content, make_runs())


def test_nothing_is_written_before_the_event(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    go = threading.Event()
    held = writer.post(holder, make_runs((0, 0, KIB)), go.is_set)
    assert writer.write(holder, make_runs((0, KIB, KIB))).error == ""
    assert (holder.memory[:KIB] == POISON).all()
    go.set()
    assert [(c.ticket, c.error) for c in writer.wait()] == [(held, "")]
    assert np.array_equal(holder.memory[:KIB], writer.content[:KIB])


def test_close_with_writes_in_flight_then_quiet_at_the_peer(rig: WriteRig) -> None:
    def close(writer: Writer, holder: Holder, ticket: Ticket) -> None:
        del holder, ticket
        writer.transport.close()

    writer, holder, completion = rig.interrupted(close)
    assert "closed" in completion.error
    holder.assert_quiet()
    assert writer.transport.poll() == []
    with pytest.raises(TransportError, match="closed"):
        writer.post(holder, make_runs((0, 0, 1)))


def test_the_queue_is_bounded_and_fair(rig: WriteRig) -> None:
    writer, holder = rig.pair(MIB, max_in_flight=3)
    other = rig.holder(MIB)
    rig.join(writer, other)
    tickets = [writer.post(holder, make_runs((0, n * KIB, KIB)), lambda: False) for n in range(3)]
    with pytest.raises(QueueFull, match="queue full"):
        writer.post(holder, make_runs((0, 0, 1)))
    assert writer.write(other, make_runs((0, 0, KIB))).error == ""
    writer.transport.cancel(tickets[0])
    assert writer.wait()[0].ticket == tickets[0]


def test_lost_peers_and_revokes_leave_nothing(rig: WriteRig) -> None:
    writer, holder = rig.pair(MIB)
    before = (_descriptors(), threading.active_count())
    for _ in range(2):
        assert writer.write(holder, make_runs((0, 0, KIB))).error == ""
        writer.transport.revoke(holder.peer)
        writer.transport.connect(holder.peer, holder.endpoint)
    holder.kill()
    assert writer.write(holder, make_runs((0, 0, KIB))).error
    writer.transport.revoke(holder.peer)
    wait_until(lambda: _descriptors() <= before[0] and threading.active_count() <= before[1])


def test_an_unknown_peer_is_refused(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    with pytest.raises(TransportError, match="not connected"):
        writer.transport.post(Batch(PeerRank(holder.peer.incarnation, 1), Direction.WRITE, make_runs((0, 0, 1))))


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
