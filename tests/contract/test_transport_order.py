"""One suite that every transport has to pass, second part: events, cancels, queues, and what is left at the end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from transport_peer import POISON
from transport_rig import BIG, KIB, MIB, Rig, Source, Target, assert_quiet, make_runs, wait_until

from kvbaton.errors import QueueFull, TransportError
from kvbaton.transport.base import PeerRank, Ticket

pytest_plugins = ["contract_fixtures"]


# Order of things: after, cancel, close.


pytestmark = pytest.mark.sampled(1)


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
    target, source, completion = rig.interrupted(lambda target, _, ticket: target.transport.cancel(ticket))
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
    def close_twice(target: Target, source: Source, ticket: Ticket) -> None:
        del source, ticket
        target.transport.close()
        target.transport.close()

    target, source, completion = rig.interrupted(close_twice)
    assert "closed" in completion.error
    assert_quiet(target)
    assert target.transport.poll() == []
    with pytest.raises(TransportError, match="closed"):
        target.post(source, make_runs((0, 0, 1)))
    with pytest.raises(TransportError, match="closed"):
        target.transport.connect(PeerRank(source.peer.incarnation, 1), source.endpoint)


def test_close_fails_what_waits_for_its_event(target: Target, source: Source) -> None:
    ticket = target.post(source, make_runs((0, 0, 1)), lambda: False)
    target.transport.close()
    completion = target.transport.poll()[0]
    assert completion.ticket == ticket
    assert "closed" in completion.error
    assert target.holds(source, make_runs())


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


def mapped_segments() -> int:
    """How many pieces of shared memory, its own included, this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:kvbaton")


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))
