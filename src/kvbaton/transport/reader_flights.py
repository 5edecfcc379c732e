"""What the mover asks of a library whose calls wait: readers, one per peer, behind the calls of `Flights`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

from kvbaton.errors import QueueFull, TransportError
from kvbaton.transport.base import PeerRank, Runs, TransportSettings
from kvbaton.transport.marks import Marks
from kvbaton.transport.reader import PeerReader, ReadEngine, Reading

__all__ = ["ReadPeer", "ReaderFlights", "ServedEngine"]

_SLICES = 4
"""A library moves so many slices in one go: each peer has a thread of its own, and waits for no other."""


class ServedEngine(Protocol):
    """The engine that hands out this side's memory."""

    def progress(self) -> None:
        """Serve peers, where that needs this process."""

    def close(self) -> None:
        """End it; afterwards nobody reads here."""


class ReadPeer:
    """A peer, its mark and the slot for it; `reader` is None while there is no session."""

    def __init__(self, peer: PeerRank, mark: int, mark_slot: int, make_engine: Callable[[], ReadEngine]) -> None:
        self.peer = peer
        self.mark = mark
        self.mark_slot = mark_slot
        self.make_engine = make_engine
        self.reader: PeerReader | None = None

    def __str__(self) -> str:
        return f"{self.peer.incarnation!r} rank {self.peer.rank}"


class ReaderFlights:
    """For the mover's thread, which `wake` wakes. `let_go_s` is how long a read may take until its reader gives it up.

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
        self._readers: list[PeerReader] = []

    def start(self, link: ReadPeer, runs: Runs, *, is_last: bool) -> Reading:
        """Hand a slice to the peer's reader, which reads the mark after the last one where the library can."""
        if not is_last or not self._reads_marks:
            return self._read(link, Reading(runs, self._wake))
        check = functools.partial(self._marks.check, link.mark_slot, link.mark, link)
        return self._read(link, Reading(runs, self._wake, self._marks.run_to(link.mark_slot), check))

    def is_done(self, flight: Reading) -> bool:
        """Whether every byte is in. Raises PeerLost."""
        return flight.is_done()

    def release(self, flight: Reading) -> bool:
        """Let go of a reading; False while its bytes still move."""
        return flight.give_up()

    def drop(self, link: ReadPeer) -> None:
        """End the peer's reader once it has come to the end of what it moves."""
        if link.reader is not None:
            link.reader.close()
            link.reader = None

    def forget(self, link: ReadPeer) -> None:
        """The same, for good."""
        self.drop(link)
        self._marks.free_slot(link.mark_slot)

    def progress(self) -> None:
        """Serve peers."""
        if self._served is not None:
            self._served.progress()

    def shut_down(self) -> None:
        """End every engine. Raises TransportError when bytes still move after `let_go_s`."""
        for reader in self._readers:
            reader.close()
        until = time.monotonic() + self.let_go_s
        stuck = [reader for reader in self._readers if not reader.wait_quiet(until - time.monotonic())]
        if self._served is not None:
            self._served.close()
            self._served = None
        if stuck:
            raise TransportError(f"{self._name} does not let go of memory; end the process before that is used again")

    def _read(self, link: ReadPeer, reading: Reading) -> Reading:
        if link.reader is None or not link.reader.is_open:
            link.reader = self._new_reader(link)
        link.reader.read(reading)
        return reading

    def _new_reader(self, link: ReadPeer) -> PeerReader:
        self._readers = [reader for reader in self._readers if not reader.is_over]
        if len(self._readers) >= 2 * self._settings.max_peers:
            raise QueueFull(f"{len(self._readers)} {self._name} sessions are open or ending (2 x max_peers); try again")
        reader = PeerReader(self._name, link.make_engine, self.slice_runs, self._settings.timeout_s)
        self._readers.append(reader)
        return reader
