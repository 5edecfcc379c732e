"""What the mover asks of a library whose calls wait: a `PeerMover` per peer, behind the calls of `Flights`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

from kvbaton.errors import QueueFull, TransportError
from kvbaton.transport.base import Direction, PeerRank, Runs, TransportSettings
from kvbaton.transport.marks import Marks
from kvbaton.transport.peer_mover import MarkCheck, PeerEngine, PeerMover, PeerSlice

__all__ = ["LibraryPeer", "PeerFlights", "ServedEngine"]

_SLICES = 4
"""A library moves so many slices in one go: each peer has a thread of its own, and waits for no other."""


class ServedEngine(Protocol):
    """The engine that hands out this side's memory."""

    def progress(self) -> None:
        """Serve peers, where that needs this process."""

    def close(self) -> None:
        """End it; afterwards nobody reads or writes here through it."""


class LibraryPeer:
    """A peer, its mark and the slot for it; `mover` is None while there is no session."""

    def __init__(self, peer: PeerRank, mark: int, mark_slot: int, make_engine: Callable[[], PeerEngine]) -> None:
        self.peer = peer
        self.mark = mark
        self.mark_slot = mark_slot
        self.make_engine = make_engine
        self.mover: PeerMover | None = None

    def __str__(self) -> str:
        return f"{self.peer.incarnation!r} rank {self.peer.rank}"


class PeerFlights:
    """For the mover's thread, which `wake` wakes. `let_go_s` is how long a slice may take until its peer's thread gives it up.

    `idle_s` is how often peers have to be served, where that needs this process.
    """

    def __init__(
        self,
        name: str,
        served: ServedEngine,
        marks: Marks,
        settings: TransportSettings,
        wake: Callable[[], None],
        *,
        slice_runs: int,
        let_go_s: float,
        idle_s: float = 60.0,
        reads_marks: bool = True,
    ) -> None:
        self.idle_s = idle_s
        self._wake = wake
        self.slice_bytes = _SLICES * settings.slice_bytes
        self.slice_runs = slice_runs
        self.let_go_s = let_go_s
        self._name = name
        self._served: ServedEngine | None = served
        self._marks = marks
        self._settings = settings
        self._reads_marks = reads_marks
        self._movers: list[PeerMover] = []

    def start(self, link: LibraryPeer, direction: Direction, runs: Runs, *, is_first: bool, is_last: bool) -> PeerSlice:
        """Hand a slice to the peer's thread, which looks at the mark where that is due and the library can."""
        writes, mark = direction is Direction.WRITE, None
        if self._reads_marks and (writes or is_last):
            look = functools.partial(self._marks.check, link.mark_slot, link.mark, link)
            mark = MarkCheck(self._marks.run_to(link.mark_slot), look, before=writes and is_first, after=is_last)
        piece = PeerSlice(direction, runs, self._wake, mark)
        if link.mover is None or not link.mover.is_open:
            link.mover = self._new_mover(link)
        link.mover.move(piece)
        return piece

    def is_done(self, flight: PeerSlice) -> bool:
        """Whether every byte is where it belongs. Raises PeerLost."""
        return flight.is_done()

    def release(self, flight: PeerSlice) -> bool:
        """Let go of a slice; False while its bytes still move."""
        return flight.give_up()

    def drop(self, link: LibraryPeer) -> None:
        """End the peer's thread once it has come to the end of what it moves."""
        if link.mover is not None:
            link.mover.close()
            link.mover = None

    def forget(self, link: LibraryPeer) -> None:
        """The same, for good."""
        self.drop(link)
        self._marks.free_slot(link.mark_slot)

    def progress(self) -> None:
        """Serve peers."""
        if self._served is not None:
            self._served.progress()

    def shut_down(self) -> None:
        """End every engine. Raises TransportError when bytes still move after `let_go_s`."""
        for mover in self._movers:
            mover.close()
        until = time.monotonic() + self.let_go_s
        stuck = [mover for mover in self._movers if not mover.wait_quiet(until - time.monotonic())]
        if self._served is not None:
            self._served.close()
            self._served = None
        if stuck:
            raise TransportError(f"{self._name} does not let go of memory; end the process before that is used again")

    def _new_mover(self, link: LibraryPeer) -> PeerMover:
        self._movers = [mover for mover in self._movers if not mover.is_over]
        if len(self._movers) >= 2 * self._settings.max_peers:
            raise QueueFull(f"{len(self._movers)} {self._name} sessions are open or ending (2 x max_peers); try again")
        mover = PeerMover(self._name, link.make_engine, self.slice_runs, self._settings.timeout_s)
        self._movers.append(mover)
        return mover
