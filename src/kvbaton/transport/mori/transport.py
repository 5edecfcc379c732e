"""The mori transport: this side's mover reads from the peer's registered memory, and writes there where that was chosen.

Written against MoRI-IO's documented Python API, and tested against a stand-in that follows it: it has not been run on hardware.
"""

from __future__ import annotations

from kvbaton.errors import TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.library_transport import LibraryTransport
from kvbaton.transport.marks import Marks
from kvbaton.transport.mori.library import MoriApi, MoriEngine, MoriPeer, load_mori
from kvbaton.transport.peer_flights import LibraryPeer
from kvbaton.transport.queued import bytes_detail, detail
from kvbaton.transport.runs import MAX_SLICE_RUNS

__all__ = ["MoriTransport"]

_MARGIN_S = 5.0


class MoriTransport(LibraryTransport):
    """Moves bytes between this rank's region and those of other MoRI engines."""

    def __init__(self, region: Region, settings: TransportSettings, api: MoriApi = None) -> None:
        """`api` is the module `mori.io`; None imports it."""
        self._api = load_mori() if api is None else api
        marks, is_rdma = Marks(settings.max_peers), settings.of_library("mori_backend", str) == "rdma"
        serving = MoriEngine(self._api, settings, region, marks.region)
        self._described = serving.describe()
        stop_s = settings.timeout_s + _MARGIN_S
        super().__init__(region, settings, marks, serving, slice_runs=MAX_SLICE_RUNS, stop_s=stop_s, reads_marks=is_rdma)

    @property
    def name(self) -> str:
        """`mori`."""
        return "mori"

    def _details(self) -> dict[str, str | int]:
        return {**self._described, "backend": self._settings.of_library("mori_backend", str), "mark": self._marks.mark}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> LibraryPeer:
        backend = detail(endpoint, "backend", str)
        here = self._settings.of_library("mori_backend", str)
        if backend != here:
            raise TransportError(f"mori endpoint: backend is {backend!r}, here it is {here!r}; set the same")
        described = {field: bytes_detail(endpoint, field) for field in ("engine", "memory", "marks")}
        mark = detail(endpoint, "mark", int)

        def make_engine() -> MoriPeer:
            engine = MoriEngine(self._api, self._settings, self._region, self._marks.region)
            return MoriPeer(self._api, engine, described)

        return LibraryPeer(peer, mark, make_engine)
