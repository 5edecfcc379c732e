"""The half that transports over other libraries share: marks, an engine and a thread per peer, and a mover over those.

The owner of the target memory reads. Writing is an explicit choice (`unfenced_writes`), because none of these libraries can
take back what a peer was given: whoever was granted blocks can reach them for as long as this side hands its memory out.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.errors import TransportError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Direction,
    Endpoint,
    LateWrites,
    PeerRank,
    Region,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.flights import FlightMover
from kvbaton.transport.ledger import Ledger
from kvbaton.transport.marks import Marks
from kvbaton.transport.peer_flights import LibraryPeer, PeerFlights, ServedEngine
from kvbaton.transport.peer_mover import PeerEngine
from kvbaton.transport.queued import QueuedTransport, detail

__all__ = ["LibraryTransport"]

_TAKES_WRITES = "takes_writes"


class LibraryTransport(QueuedTransport[LibraryPeer]):
    """Reads from engines like its own, and lets them read this rank's region; writes, and is written to, where that was chosen.

    What a library can do is said in class attributes.
    """

    slice_runs = 1024
    """Most runs that one call may have."""

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
        """`let_go_s` is how long a slice may take, at most, until the library or its peer's thread gives it up."""
        self._marks = marks
        self._let_go_s = let_go_s
        ledger: Ledger[LibraryPeer] = Ledger(region, settings)
        flights = PeerFlights(
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

    @property
    def late_writes(self) -> LateWrites:
        """Impossible while peers only read; unfenced where they may write."""
        return LateWrites.UNFENCED if self._settings.unfenced_writes else LateWrites.IMPOSSIBLE

    @property
    def directions(self) -> frozenset[Direction]:
        """Reads; writes too, where that was chosen."""
        return frozenset(Direction) if self._settings.unfenced_writes else frozenset({Direction.READ})

    def endpoint(self) -> Endpoint:
        """Describe this rank's region for its card, and whether it may be written to."""
        told = super().endpoint()
        return Endpoint(told.transport, told.region_bytes, told.details | {_TAKES_WRITES: 1}) if self._takes_writes else told

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        """Start moving `batch`; raises RangeError or TransportError, and then nothing was started."""
        if batch.direction is Direction.WRITE and self._takes_writes:
            endpoint = self._ledger.endpoint_of(batch.peer)
            if endpoint is not None and not endpoint.details.get(_TAKES_WRITES):
                raise TransportError(
                    f"peer {batch.peer.incarnation!r} rank {batch.peer.rank} does not take writes: set unfenced_writes "
                    "(--unfenced-writes) there too, or let it read"
                )
        return super().post(batch, after)

    def _check(self, peer: PeerRank, endpoint: Endpoint) -> None:
        super()._check(peer, endpoint)
        if _TAKES_WRITES in endpoint.details:
            detail(endpoint, _TAKES_WRITES, int)

    @property
    def _takes_writes(self) -> bool:
        return Direction.WRITE in self.directions

    @property
    def _way_out(self) -> str:
        return (
            "the side that holds the target has to read, or set unfenced_writes (--unfenced-writes) on both sides, which lets "
            "peers write without a fence"
        )

    def _library_peer(self, peer: PeerRank, mark: int, make_engine: Callable[[], PeerEngine]) -> LibraryPeer:
        return LibraryPeer(peer, mark, self._marks.take_slot(), make_engine)

    @property
    def _closing_s(self) -> float:
        return self._settings.timeout_s + self._let_go_s

    def _unlink(self, link: LibraryPeer) -> None:
        self._marks.free_slot(link.mark_slot)

    def _release(self) -> None:
        self._marks.withdraw()
