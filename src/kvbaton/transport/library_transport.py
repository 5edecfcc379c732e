"""The half that transports over other libraries share: marks, lanes per peer, and a mover over those.

The owner of the target memory reads. Writing is an explicit choice (`unfenced_writes`), because none of these libraries can
take back what a peer was given: a peer that was granted blocks can reach them for as long as this side hands its memory out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from kvbaton.transport.peer_flights import LibraryPeer, PeerFlights, ServingEngine
from kvbaton.transport.queued import QueuedTransport, detail

__all__ = ["LibraryTransport", "MemoryPlace"]

_TAKES_WRITES = "takes_writes"


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

    def __init__(
        self, region: Region, settings: TransportSettings, marks: Marks, serving: ServingEngine, **differences: Any
    ) -> None:
        self._marks = marks
        ledger: Ledger[LibraryPeer] = Ledger(region, settings)
        self._flights = PeerFlights(self.name, serving, marks, settings, ledger.work.set, **differences)
        super().__init__(region, settings, ledger, FlightMover(self.name, ledger, settings, self._flights))

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
        endpoint = super().endpoint()
        if not self._takes_writes:
            return endpoint
        return Endpoint(endpoint.transport, endpoint.region_bytes, endpoint.details | {_TAKES_WRITES: 1})

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
    def _alternative(self) -> str:
        return (
            "the side that holds the target has to read, or set unfenced_writes (--unfenced-writes) on both sides, which lets "
            "peers write without a fence"
        )

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
