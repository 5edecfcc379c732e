"""The half that transports over other libraries share: marks, lanes per peer, and a mover that starts slices on those lanes.

The owner of the target memory reads. Writing is an explicit choice (`unfenced_writes`), because none of these libraries can
take back what a peer was given: a peer that was granted blocks can reach them for as long as this side hands its memory out.

The mover starts a few slices per peer, keeps deadlines, and is woken by ends. A slice that has begun cannot be called back by
most of these libraries. A cancelled or failed batch is therefore finished only when the library has released its last slice;
until then its memory is not quiet. A library that does not release a slice within another `timeout_s` is shut down altogether:
nothing else is left to make the memory quiet. Where even that fails, the batch is never finished, because its memory would be
given to another request, and `close` raises.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvbaton.errors import KVBatonError, QueueFull, TransportError
from kvbaton.transport.base import (
    Direction,
    Endpoint,
    LateWrites,
    Region,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.lanes import LaneSlice, LibraryPeer, Marks, PeerFlights, ServingEngine
from kvbaton.transport.queued import REVOKED, BatchJob, Ledger, Mover, QueuedTransport, describe, detail

__all__ = ["FlightMover", "LibraryTransport", "MemoryPlace"]

_WINDOW = 2
"""Slices that a peer may have at its lanes: while one is moved, the next is there, and a cancel waits for few."""

_NAP_S = 0.02
_SHORTEST_NAP_S = 0.0005
_BUSY_S = 0.0002
_QUICK_S, _SLOW_S = 0.1, 1.0
_LONGER = 8


@dataclass(slots=True, eq=False)
class _Flight:
    job: BatchJob[LibraryPeer]
    parts: list[LaneSlice]
    wire_bytes: int
    begun: float
    deadline: float
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Ending:
    """How a batch will end once nothing is in flight for it any more."""

    error: str
    cancelled: bool = False


class FlightMover(Mover[LibraryPeer]):
    """One thread that serves the ledger's jobs through a library; ends once the ledger is shut, and shuts the library down."""

    def __init__(self, name: str, ledger: Ledger[LibraryPeer], settings: TransportSettings, library: PeerFlights) -> None:
        self._settings = settings
        self._library = library
        self._flights: list[_Flight] = []
        self._endings: dict[Ticket, _Ending] = {}
        self._forgetting: set[LibraryPeer] = set()
        self._refused: dict[Ticket, float] = {}
        self._slice_bytes: dict[LibraryPeer, int] = {}
        self._nap_s = _SHORTEST_NAP_S
        self._stuck = ""
        super().__init__(name, ledger, settings.timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most `timeout_s`; returns whether it has.

        Raises TransportError while the library does not release memory; what moves is then not finished.
        """
        if not super().join(timeout_s):
            return False
        if self._stuck:
            self._shut_down()
        if self._stuck:
            raise TransportError(self._stuck)
        return True

    def _stop(self) -> set[Ticket]:
        self._shut_down()
        return {flight.job.ticket for flight in self._flights if not self._library.release(flight.parts)}

    def _shut_down(self) -> None:
        try:
            self._library.shut_down()
        except KVBatonError as error:
            self._stuck = str(error)
        else:
            self._stuck = ""

    def _move(self) -> None:
        for flight in list(self._flights):
            self._look_at(flight, time.monotonic())
        has_begun = [self._feed(link) for link in self._schedule.links()]
        if any(has_begun):
            self._ledger.work.wait(_SHORTEST_NAP_S)  # the lane that moves the slice needs the interpreter now
        else:
            self._rest()

    def _rest(self) -> None:
        """Sleep until something ends or is due; a peer that keeps this side busy is served at once, and then more often."""
        started = time.monotonic()
        self._library.progress()
        now = time.monotonic()
        if now - started >= _BUSY_S:
            self._nap_s = _SHORTEST_NAP_S
            return
        self._nap_s = min(2 * self._nap_s, self._library.idle_s)
        longest_s = _NAP_S if self._flights or self._schedule.links() else self._nap_s
        self._ledger.work.wait(min(longest_s, self._nap_s, self._schedule.wait_s(now)))

    def _cancel(self, job: BatchJob[LibraryPeer]) -> None:
        if self._ledger.is_in_flight(job):
            self._end(job, "cancelled", cancelled=True)

    def _revoke(self, link: LibraryPeer) -> None:
        self._forgetting.add(link)
        self._fail_link(link, REVOKED, waiting=True)

    def _feed(self, link: LibraryPeer) -> bool:
        """Start the next slice of a peer, unless enough have begun; returns whether it has."""
        while (job := self._schedule.head(link)) is not None and len(self._of_link(link)) < _WINDOW:
            if job.cursor.remaining_bytes:
                return self._start(job)
            self._schedule.discard(job)
            self._finish(job)
        return False

    def _start(self, job: BatchJob[LibraryPeer]) -> bool:
        size = self._slice_bytes.get(job.link, self._library.slice_bytes)
        runs = job.cursor.peek(size, self._library.slice_runs)
        count = int(runs[:, 2].sum())
        is_first, is_last = not job.cursor.done_bytes, count == job.cursor.remaining_bytes
        try:
            parts = self._library.start(job.link, job.direction, runs, is_first=is_first, is_last=is_last)
        except QueueFull as error:
            self._refuse(job, error)
            return False
        except KVBatonError as error:
            self._fail_link(job.link, describe(error))
            return False
        self._refused.pop(job.ticket, None)
        now = time.monotonic()
        self._flights.append(_Flight(job, parts, count, now, now + self._settings.timeout_s))
        job.cursor.advance(count)
        if not job.cursor.remaining_bytes:
            self._schedule.discard(job)
        return True

    def _refuse(self, job: BatchJob[LibraryPeer], error: QueueFull) -> None:
        """The library takes no more just now: it is asked again, but not for ever."""
        now, timeout_s = time.monotonic(), self._settings.timeout_s
        if now - self._refused.setdefault(job.ticket, now) >= timeout_s:
            self._end(job, f"{describe(error)} (for {timeout_s:g} s)")

    def _look_at(self, flight: _Flight, now: float) -> None:
        if flight not in self._flights:
            return
        try:
            if not flight.failed and not self._library.is_done(flight.parts):
                if now >= flight.deadline:
                    self._give_up(flight)
                return
        except KVBatonError as error:
            flight.failed = True
            self._fail_link(flight.job.link, describe(error))
        self._land(flight, now)

    def _give_up(self, flight: _Flight) -> None:
        link = flight.job.link
        # The libraries report no progress within a slice. A slow link shows it only in slices that end within `timeout_s`.
        self._slice_bytes[link] = max(self._library.slice_bytes // _LONGER, 1)
        self._fail_link(link, f"PeerLost: {link}: no progress within {self._settings.timeout_s:g} s")

    def _land(self, flight: _Flight, now: float) -> None:
        """Take a flight that is over out of the books, once the library releases it."""
        if not self._library.release(flight.parts):
            if now >= flight.deadline:
                raise KVBatonError(f"a transfer to {flight.job.link} could not be stopped; open a new transport")
            return
        self._flights.remove(flight)
        job = flight.job
        # The lanes of a peer move its slices one after another: a slice that waited for this one starts its time now.
        for other in self._of_link(job.link):
            other.deadline = max(other.deadline, now + self._settings.timeout_s)
        if not flight.failed:
            job.moved_bytes += flight.wire_bytes
            self._fit_slices(flight, now)
        if self._of_job(job):
            return
        if job.ticket in self._endings or not job.cursor.remaining_bytes:
            self._finish(job)
        self._forget(job.link)

    def _fit_slices(self, flight: _Flight, now: float) -> None:
        """Longer slices for a quick peer, since each costs the same to start; shorter ones where progress is hard to see."""
        link, took_s = flight.job.link, now - flight.begun
        size = self._slice_bytes.get(link, self._library.slice_bytes)
        if took_s < _QUICK_S and 2 * flight.wire_bytes > size:
            self._slice_bytes[link] = min(2 * size, _LONGER * self._library.slice_bytes)
        elif took_s > _SLOW_S:
            self._slice_bytes[link] = max(size // 2, self._library.slice_bytes // _LONGER, 1)

    def _end(self, job: BatchJob[LibraryPeer], error: str, *, cancelled: bool = False) -> None:
        """Finish a job before its last byte: at once, or when the last of its flights is over."""
        self._schedule.discard(job)
        self._refused.pop(job.ticket, None)
        self._endings.setdefault(job.ticket, _Ending(error, cancelled))
        if not self._of_job(job):
            self._finish(job)

    def _finish(self, job: BatchJob[LibraryPeer]) -> None:
        ending = self._endings.pop(job.ticket, _Ending(""))
        self._ledger.finish(job, ending.error, cancelled=ending.cancelled)

    def _fail_link(self, link: LibraryPeer, error: str, *, waiting: bool = False) -> None:
        """End all that is under way with a peer, and its session; what still moves has so long to stop as the library needs."""
        until = time.monotonic() + max(self._settings.timeout_s, self._library.stop_s)
        for flight in self._of_link(link):
            flight.failed, flight.deadline = True, until
        jobs = {job.ticket: job for job in self._schedule.discard_link(link, waiting=waiting)}
        jobs.update((flight.job.ticket, flight.job) for flight in self._of_link(link))
        self._library.drop(link)
        for job in jobs.values():
            self._end(job, error)
        self._forget(link)

    def _of_link(self, link: LibraryPeer) -> list[_Flight]:
        return [flight for flight in self._flights if flight.job.link is link]

    def _of_job(self, job: BatchJob[LibraryPeer]) -> list[_Flight]:
        return [flight for flight in self._flights if flight.job is job]

    def _forget(self, link: LibraryPeer) -> None:
        if link in self._forgetting and not self._of_link(link):
            self._forgetting.discard(link)
            self._slice_bytes.pop(link, None)
            self._library.drop(link)


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where one side's region and marks begin, and how large the region is."""

    address: int
    region_bytes: int
    mark_address: int


class LibraryTransport(QueuedTransport[LibraryPeer]):
    """Reads from engines like its own, and lets them read this rank's region; writes, and is written to, where that was chosen.

    What the libraries differ in are the named arguments of `PeerFlights`.
    """

    _alternative = (
        "the side that holds the target has to read, or set unfenced_writes (--unfenced-writes) on both sides, which lets "
        "peers write without a fence"
    )
    _write_setting = "unfenced_writes"

    def __init__(
        self, region: Region, settings: TransportSettings, marks: Marks, serving: ServingEngine, **differences: Any
    ) -> None:
        if settings.unfenced_writes:
            self.late_writes, self.directions = LateWrites.UNFENCED, frozenset(Direction)
        self._marks = marks
        ledger: Ledger[LibraryPeer] = Ledger(region, settings)
        self._flights = PeerFlights(self.name, serving, marks, settings, ledger.work.set, **differences)
        super().__init__(region, settings, ledger, FlightMover(self.name, ledger, settings, self._flights))

    def _place_details(self) -> dict[str, str | int]:
        """What a library that moves bytes by address needs to know of this side."""
        return {
            "address": self._region.address,
            "mark_address": self._marks.region.address,
            "mark": self._marks.mark,
        }

    def _places(self, endpoint: Endpoint) -> tuple[MemoryPlace, MemoryPlace]:
        """The memory of the peer, and of this side. Raises TransportError for addresses that no memory can have."""
        address, mark_address = detail(endpoint, "address", int), detail(endpoint, "mark_address", int)
        if min(address, mark_address) <= 0 or max(address, mark_address) + endpoint.region_bytes >= 1 << 64:
            raise TransportError(
                f"{self.name} endpoint: address {address:#x} or mark_address {mark_address:#x} is not usable; "
                "fetch its card again"
            )
        here = MemoryPlace(self._region.address, self._region.region_bytes, self._marks.region.address)
        return MemoryPlace(address, endpoint.region_bytes, mark_address), here

    @property
    def _closing_s(self) -> float:
        return self._settings.timeout_s + self._flights.stop_s

    def _release(self) -> None:
        self._marks.withdraw()
