"""The mover over a library that the test plays: deadlines, refusals, late failures, and memory that is not released."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import PeerLost, QueueFull, TransportError
from kvbaton.transport import library_transport
from kvbaton.transport.base import Batch, Completion, Direction, Endpoint, PeerRank, Region, Runs, Ticket, TransportSettings
from kvbaton.transport.lanes import LibraryPeer, PeerFlights
from kvbaton.transport.library_transport import FlightMover
from kvbaton.transport.queued import Ledger
from watching import wait_until

PEER = PeerRank(Incarnation("peer"))
TIMEOUT_S = 0.4


@dataclass(eq=False)
class Slice:
    """A slice that is on its way until the test ends it."""

    runs: Runs
    is_over: bool = False
    error: str = ""
    releases: bool = True


@dataclass
class Library:
    """Notes what it was asked."""

    idle_s: float = 0.01
    slice_bytes: int = 4
    slice_runs: int = 10
    stop_s: float = 0.1
    is_full: bool = False
    is_quick: bool = False
    is_stuck: bool = False
    slices: list[Slice] = field(default_factory=list)
    dropped: int = 0

    def start(self, link: str, direction: Direction, runs: Runs, *, is_first: bool, is_last: bool) -> Slice:
        del link, direction, is_first, is_last
        if self.is_full:
            raise QueueFull("the library is full")
        self.slices.append(Slice(runs))
        return self.slices[-1]

    def is_done(self, flight: Slice) -> bool:
        if flight.error:
            raise PeerLost(flight.error)
        return flight.is_over or self.is_quick

    def release(self, flight: Slice) -> bool:
        return flight.releases

    def drop(self, link: str) -> None:
        del link
        self.dropped += 1

    def progress(self) -> None:
        pass

    def shut_down(self) -> None:
        if self.is_stuck:
            raise TransportError("the library does not release it")


@dataclass
class Stand:
    """A ledger with one peer, and the mover that serves it."""

    library: Library
    ledger: Ledger[LibraryPeer]
    mover: FlightMover
    done: list[Completion] = field(default_factory=list)

    def post(self, size: int) -> Ticket:
        runs = np.array([[0, 0, size]], np.uint64)
        return self.ledger.admit(Batch(PEER, Direction.READ, runs), None)

    def wait(self, count: int) -> list[Completion]:
        def came() -> bool:
            self.done += self.ledger.take_completions()
            return len(self.done) >= count

        wait_until(came, f"{count} completions")
        return self.done

    def wait_slices(self, count: int) -> list[Slice]:
        wait_until(lambda: len(self.library.slices) >= count, f"{count} slices")
        return self.library.slices


@pytest.fixture
def stand() -> Iterator[Stand]:
    settings = TransportSettings(timeout_s=TIMEOUT_S)
    ledger: Ledger[LibraryPeer] = Ledger(Region.of(bytearray(64)), settings)
    ledger.add_peer(PEER, Endpoint("test", 64, {}), cast("LibraryPeer", "the peer"))
    library = Library()
    made = Stand(library, ledger, FlightMover("test", ledger, settings, cast("PeerFlights", library)))
    yield made
    library.is_stuck = False
    ledger.shut("the test is over")
    assert made.mover.join(10)
    ledger.close()


def test_a_batch_is_over_when_its_last_slice_is(stand: Stand) -> None:
    ticket = stand.post(10)
    for number in range(3):
        stand.wait_slices(number + 1)[number].is_over = True
    assert stand.wait(1) == [Completion(ticket, 10)]


def test_a_slice_that_waits_for_its_turn_has_its_whole_time_from_then_on(stand: Stand) -> None:
    """Both slices are queued at once; the first takes most of the time that is allowed without progress."""
    stand.post(8)
    first, second = stand.wait_slices(2)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 0.7 * TIMEOUT_S, "most of the time is over")
    first.is_over = True
    wait_until(lambda: time.monotonic() - begun > 1.3 * TIMEOUT_S, "more than all of it is over")
    assert stand.ledger.take_completions() == []
    second.is_over = True
    assert stand.wait(1)[0].error == ""


def test_after_a_slice_that_was_given_up_the_next_are_short(stand: Stand) -> None:
    stand.library.slice_bytes = 32
    stand.post(32)
    assert "no progress" in stand.wait(1)[0].error
    stand.library.is_quick = True
    stand.post(32)
    assert stand.wait(2)[1].error == ""
    assert int(stand.library.slices[1].runs[:, 2].sum()) == 4


def test_a_quick_peer_is_given_longer_slices_and_a_slow_one_shorter_ones(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.library.is_quick = True
    stand.post(64)
    assert stand.wait(1)[0].error == ""
    assert [int(each.runs[:, 2].sum()) for each in stand.library.slices] == [4, 8, 16, 32, 4]
    stand.library.slices.clear()
    monkeypatch.setattr(library_transport, "_QUICK_S", -1.0)
    monkeypatch.setattr(library_transport, "_SLOW_S", -1.0)
    stand.post(64)
    assert stand.wait(2)[1].error == ""
    assert [int(each.runs[:, 2].sum()) for each in stand.library.slices] == [32, 16, 8, 4, 2, 1, 1]


def test_no_progress_at_all_is_an_error(stand: Stand) -> None:
    stand.post(8)
    assert "no progress within 0.4 s" in stand.wait(1)[0].error


def test_a_library_that_takes_nothing_is_asked_again_but_not_for_ever(stand: Stand) -> None:
    stand.library.is_full = True
    stand.post(4)
    assert stand.wait(1)[0].error == "QueueFull: the library is full (for 0.4 s)"
    stand.library.is_full = False
    stand.post(4)
    stand.wait_slices(1)[0].is_over = True
    assert stand.wait(2)[1].error == ""


def test_a_late_failure_of_an_old_session_harms_no_new_batch(stand: Stand) -> None:
    old = stand.post(8)
    first, second = stand.wait_slices(2)
    second.releases = False
    first.error = "the peer hiccups"
    wait_until(lambda: stand.library.dropped == 1, "the session is ended")
    new = stand.post(4)
    third = stand.wait_slices(3)[2]
    second.error, second.releases = "the old session has ended", True
    third.is_over = True
    found = {completion.ticket: completion.error for completion in stand.wait(2)}
    assert found == {old: "PeerLost: the peer hiccups", new: ""}
    assert stand.library.dropped == 1


def test_memory_that_is_not_released_is_not_called_quiet(stand: Stand) -> None:
    moving, waiting = stand.post(4), stand.post(4)
    stuck = stand.wait_slices(2)[0]
    stuck.releases = False
    stand.library.is_stuck = True
    stand.ledger.shut("closed")
    with pytest.raises(TransportError, match="does not release it"):
        stand.mover.join(10)
    assert [completion.ticket for completion in stand.wait(1)] == [waiting]
    stuck.releases, stand.library.is_stuck = True, False
    assert stand.mover.join(10)
    stand.ledger.finish_all()
    assert [completion.ticket for completion in stand.wait(2)] == [waiting, moving]
