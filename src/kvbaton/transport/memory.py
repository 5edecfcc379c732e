"""Two ranks in one process: the transport of tests and simulations, and the shortest example of the contract."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.queued import Ledger, QueuedTransport, SliceMover, detail
from kvbaton.transport.runs import RunCursor

__all__ = ["MemoryHub", "MemoryTransport"]


class MemoryHub:
    """Where the ranks of one process find each other's regions. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._last_seat = 0

    def join(self, region: Region) -> int:
        """Let others reach `region`; returns the seat it is found under."""
        with self._lock:
            self._last_seat += 1
            self._regions[self._last_seat] = region
            return self._last_seat

    def leave(self, seat: int) -> None:
        """Withdraw the region of `seat`."""
        with self._lock:
            self._regions.pop(seat, None)

    def region(self, seat: int) -> Region:
        """The region of `seat`; raises PeerLost when it has left."""
        with self._lock:
            if seat not in self._regions:
                raise PeerLost(f"seat {seat} of the hub is empty: the peer has closed its transport")
            return self._regions[seat]


@dataclass(frozen=True, slots=True, eq=False)
class _Seat:
    number: int


class _HubReach:
    def __init__(self, region: Region, hub: MemoryHub) -> None:
        self._region = region
        self._hub = hub

    def copy(self, link: _Seat, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        theirs, mine = self._hub.region(link.number).view, self._region.view
        moved = 0
        for source, target, count in cursor.peek(most_bytes, most_runs).tolist():
            mine[target : target + count] = theirs[source : source + count]
            moved += count
        return moved

    def confirm(self, link: _Seat) -> None:
        # Raises when the peer has left during the copy.
        self._hub.region(link.number)

    def release(self, link: _Seat) -> None:
        """Nothing to release: the hub has the region."""


class MemoryTransport(QueuedTransport[_Seat]):
    """Reads from ranks that share `hub`; closing it is this rank's death as far as its peers can see."""

    name = "memory"

    def __init__(self, region: Region, hub: MemoryHub, settings: TransportSettings) -> None:
        ledger: Ledger[_Seat] = Ledger(region, settings)
        super().__init__(region, settings, ledger, SliceMover("memory", ledger, settings, _HubReach(region, hub)))
        self._hub = hub
        self._seat = hub.join(region)

    def _details(self) -> dict[str, str | int]:
        return {"seat": self._seat}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> _Seat:
        seat = detail(endpoint, "seat", int)
        try:
            self._hub.region(seat)
        except PeerLost as error:
            raise TransportError(f"peer {peer.incarnation!r} rank {peer.rank} cannot be reached: {error}") from error
        return _Seat(seat)

    def _release(self) -> None:
        self._hub.leave(self._seat)
