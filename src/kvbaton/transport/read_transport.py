"""The half that transports over other libraries share: marks, a reader per peer, and a mover over those."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.transport.base import PeerRank, Region, TransportSettings
from kvbaton.transport.flights import FlightMover
from kvbaton.transport.ledger import Ledger
from kvbaton.transport.marks import Marks
from kvbaton.transport.queued import QueuedTransport
from kvbaton.transport.reader import ReadEngine
from kvbaton.transport.reader_flights import ReaderFlights, ReadPeer, ServedEngine

__all__ = ["ReadTransport"]


class ReadTransport(QueuedTransport[ReadPeer]):
    """Reads from engines like its own; lets them read this rank's region. What a library can do is said in class attributes."""

    slice_runs = 1024
    """Most runs that one read may have."""

    idle_s = 60.0
    """How often peers have to be served, where that needs this process."""

    def __init__(
        self,
        region: Region,
        settings: TransportSettings,
        marks: Marks,
        served: ServedEngine,
        let_go_s: float,
        *,
        reads_marks: bool,
    ) -> None:
        """`let_go_s` is how long a read may take, at most, until the library or its reader gives it up."""
        self._marks = marks
        self._let_go_s = let_go_s
        ledger: Ledger[ReadPeer] = Ledger(region, settings)
        flights = ReaderFlights(
            self.name,
            served,
            marks,
            settings,
            ledger.work.set,
            slice_runs=self.slice_runs,
            let_go_s=let_go_s,
            idle_s=self.idle_s,
            reads_marks=reads_marks,
        )
        super().__init__(region, settings, ledger, FlightMover(self.name, ledger, settings, flights))

    def _read_peer(self, peer: PeerRank, mark: int, make_engine: Callable[[], ReadEngine]) -> ReadPeer:
        return ReadPeer(peer, mark, self._marks.take_slot(), make_engine)

    @property
    def _closing_s(self) -> float:
        return self._settings.timeout_s + self._let_go_s

    def _unlink(self, link: ReadPeer) -> None:
        self._marks.free_slot(link.mark_slot)

    def _release(self) -> None:
        self._marks.withdraw()
