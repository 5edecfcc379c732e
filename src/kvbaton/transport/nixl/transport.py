"""The nixl transport: this side's mover reads from the peer's registered memory, and writes there where that was chosen.

NIXL registers memory so that every process that has its metadata could write there too. Without `unfenced_writes` no kvbaton
peer does: only reads are posted, by the owner of the target memory. A batch is not finished before NIXL has released its last
transfer. The metadata travels in the card, which only admitted peers are sent.
"""

from __future__ import annotations

from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.library_transport import LibraryTransport
from kvbaton.transport.marks import Marks
from kvbaton.transport.nixl.library import NixlAgent, NixlPeer, has_many_files_left
from kvbaton.transport.peer_flights import LibraryPeer
from kvbaton.transport.queued import bytes_detail, detail
from kvbaton.transport.runs import MAX_SLICE_RUNS

__all__ = ["NixlTransport"]

_MARGIN_S = 5.0
_LANE_STEPS = 3
"""What a lane waits for at most before it ends a slice: the mark, the slice, and the mark again."""

_WORTH_SHARING = 2


class NixlTransport(LibraryTransport):
    """Moves bytes between this rank's region and those of other NIXL agents."""

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        lanes = settings.of_library("nixl_lanes", int)
        marks = Marks(settings.max_peers, lanes)
        serving = NixlAgent(settings, (region, marks.region))
        self._metadata = serving.metadata
        super().__init__(
            region,
            settings,
            marks,
            serving,
            slice_runs=64 * MAX_SLICE_RUNS,
            stop_s=_LANE_STEPS * settings.timeout_s + _MARGIN_S,
            idle_s=0.008,  # over TCP, UCX serves a peer's reads only when this process makes progress
            most_lanes=lanes,
            shared_bytes=_WORTH_SHARING * settings.slice_bytes,
            may_add_lane=has_many_files_left,
        )

    @property
    def name(self) -> str:
        """`nixl`."""
        return "nixl"

    def _details(self) -> dict[str, str | int]:
        return {"metadata": self._metadata.hex(), **self._place_details()}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> LibraryPeer:
        there, here = self._places(endpoint)
        metadata, mark = bytes_detail(endpoint, "metadata"), detail(endpoint, "mark", int)

        def make_engine() -> NixlPeer:
            agent = NixlAgent(self._settings, (self._region, self._marks.region))
            return NixlPeer(agent, metadata, there, here)

        return LibraryPeer(peer, mark, make_engine)
