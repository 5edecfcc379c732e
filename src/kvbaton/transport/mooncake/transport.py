"""The mooncake transport: this side's mover reads from the peer's registered memory, and writes there where that was chosen.

Mooncake lets every process that reaches its port read and write registered memory. Without `unfenced_writes` no kvbaton peer
writes, and only admitted peers are sent the port, but Mooncake authenticates no connection: use it on trusted networks only.
"""

from __future__ import annotations

from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.library_transport import LibraryTransport
from kvbaton.transport.marks import Marks
from kvbaton.transport.mooncake.library import MooncakeEngine, MooncakePeer, check_acknowledges, is_over_tcp, stop_s
from kvbaton.transport.peer_flights import LibraryPeer
from kvbaton.transport.queued import detail

__all__ = ["MooncakeTransport"]

_SLICE_RUNS = 1024
"""Mooncake's TCP takes so many at a time for one peer, and rejects what is beyond."""


class MooncakeTransport(LibraryTransport):
    """Moves bytes between this rank's region and those of other Mooncake engines."""

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        marks, ends_in_s = Marks(settings.max_peers), stop_s(settings)
        if settings.unfenced_writes:
            check_acknowledges(settings)
        serving = MooncakeEngine(settings, (region, marks.region))
        self._serving_name = serving.name
        super().__init__(region, settings, marks, serving, slice_runs=_SLICE_RUNS, stop_s=ends_in_s)

    @property
    def name(self) -> str:
        """`mooncake`."""
        return "mooncake"

    def _details(self) -> dict[str, str | int]:
        return {"engine": self._serving_name, **self._place_details()}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> LibraryPeer:
        there, here = self._places(endpoint)
        engine, mark = detail(endpoint, "engine", str), detail(endpoint, "mark", int)

        def make_engine() -> MooncakePeer:
            # Over TCP Mooncake needs no registration of local memory; RDMA needs one per engine.
            local = () if is_over_tcp(self._settings) else (self._region, self._marks.region)
            return MooncakePeer(MooncakeEngine(self._settings, local), engine, there, here)

        return LibraryPeer(peer, mark, make_engine)
