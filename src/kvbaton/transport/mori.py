"""The mori transport: this side's mover reads from the peer's registered memory, and writes there where that was chosen.

Written against MoRI-IO's documented Python API, and tested against a stand-in that follows it: it has not been run on
hardware.
"""

from __future__ import annotations

import importlib
import secrets
from typing import Any

from kvbaton.errors import ConfigError, PeerLost, QueueFull, TransportError
from kvbaton.transport.base import Direction, Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.lanes import LibraryPeer, Marks
from kvbaton.transport.library_transport import LibraryTransport
from kvbaton.transport.queued import bytes_detail, detail
from kvbaton.transport.runs import MAX_SLICE_RUNS

__all__ = ["MoriTransport", "load_mori"]

MoriApi = Any
"""The module `mori.io`, or a stand-in for it."""

_SQ_FULL = "SQ full"

_MARGIN_S = 5.0


def load_mori() -> MoriApi:
    """Import MoRI-IO. Raises ConfigError, with what to do, where there is none."""
    try:
        found = importlib.import_module("mori.io")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"transport mori needs MoRI on a machine with ROCm; mori.io cannot be imported ({error}): "
            "install it as github.com/ROCm/mori describes, or choose another transport"
        ) from error
    if hasattr(found, "__kvbaton__"):
        # The drop-in runs on our transports: on top of it, this transport would move bytes over itself.
        raise ConfigError(
            "transport mori needs MoRI on a machine with ROCm; the mori that is installed here is kvbaton's own: "
            "choose local, tcp or auto"
        )
    return found


class MoriEngine:
    """One engine with its backend, over this rank's region and, with RDMA, its marks. Raises ConfigError."""

    def __init__(self, api: MoriApi, settings: TransportSettings, region: Region, marks: Region) -> None:
        self._api = api
        backend, device = settings.of_library("mori_backend", str), settings.of_library("mori_device", int)
        self._is_rdma = backend == "rdma"
        place = api.MemoryLocationType.GPU if device >= 0 else api.MemoryLocationType.CPU
        config = api.IOEngineConfig(host=settings.advertise_host or settings.host, port=0)
        try:
            self.engine = api.IOEngine(f"kvbaton-{secrets.token_hex(8)}", config)
            self._backend = api.BackendType.RDMA if self._is_rdma else api.BackendType.XGMI
            self.engine.create_backend(self._backend, _backend_config(api, settings))
            self.memory = self.engine.register_memory(region.address, region.region_bytes, device, place)
            self.marks = self._register_marks(marks)
        except Exception as error:
            raise ConfigError(f"transport mori cannot start with {backend}: {_words(error)}") from error

    def describe(self) -> dict[str, str | int]:
        """What a peer has to know of it."""
        described = {"engine": self.engine.get_engine_desc(), "memory": self.memory, "marks": self.marks}
        return {name: desc.pack().hex() if desc is not None else "" for name, desc in described.items()}

    def progress(self) -> None:
        """Nothing: the library's own threads serve peers."""

    def close(self) -> None:
        """Withdraw the memory and end the backend; afterwards nothing moves. Raises TransportError."""
        engine, self.engine = self.engine, None
        if engine is None:
            return
        try:
            engine.remove_backend(self._backend)
            for memory in (self.memory, self.marks):
                if memory is not None:
                    engine.deregister_memory(memory)
        except Exception as error:
            raise TransportError(f"MoRI does not give the memory back: {_words(error)}") from error

    def _register_marks(self, marks: Region) -> Any:
        if not self._is_rdma:
            return None
        return self.engine.register_memory(marks.address, marks.region_bytes, -1, self._api.MemoryLocationType.CPU)


class MoriPeer:
    """An engine that moves bytes between this side and one peer, over sessions.

    `described` is what the peer's `MoriEngine.describe` returned.
    """

    is_bound = True

    def __init__(self, api: MoriApi, engine: MoriEngine, described: dict[str, bytes]) -> None:
        self._api = api
        self._engine = engine
        self._described = described
        self._region: Any = None
        self._marks: Any = None
        self._status: Any = None

    def open(self) -> None:
        engine, there = self._engine, self._described
        try:
            engine.engine.register_remote_engine(self._api.EngineDesc.unpack(there["engine"]))
            self._region = engine.engine.create_session(engine.memory, self._api.MemoryDesc.unpack(there["memory"]))
            if engine.marks is not None and there["marks"]:
                self._marks = engine.engine.create_session(engine.marks, self._api.MemoryDesc.unpack(there["marks"]))
        except Exception as error:
            raise PeerLost(f"MoRI cannot open a session: {_words(error)}") from error
        if self._region is None or (engine.marks is not None and self._marks is None):
            raise PeerLost("MoRI opens no session: no backend can move bytes between these memories")

    def start(self, direction: Direction, runs: Runs) -> None:
        self._start(direction, self._region, runs)

    def start_mark(self, runs: Runs) -> None:
        self._start(Direction.READ, self._marks, runs)

    def is_done(self) -> bool:
        status = self._status
        if status.Succeeded():
            self._status = None
            return True
        if not status.Failed():
            return False
        message = status.Message()
        if message.startswith(_SQ_FULL):
            raise QueueFull(f"MoRI: {message}")
        raise PeerLost(f"MoRI reports {status.Code()}: {message}")

    def close(self) -> None:
        self._region = self._marks = self._status = None
        self._engine.close()

    def _start(self, direction: Direction, session: Any, runs: Runs) -> None:
        sources, targets, lengths = runs.T.tolist()
        try:
            uid = session.allocate_transfer_uid()
            if direction is Direction.READ:
                self._status = session.batch_read(targets, sources, lengths, uid)
            else:
                self._status = session.batch_write(sources, targets, lengths, uid)
        except RuntimeError as error:
            raise PeerLost(f"MoRI failed: {_words(error)}") from error


def _backend_config(api: MoriApi, settings: TransportSettings) -> Any:
    if settings.of_library("mori_backend", str) != "rdma":
        return api.XgmiBackendConfig()
    return api.RdmaBackendConfig(
        qp_per_transfer=settings.of_library("mori_queue_pairs", int),
        post_batch_size=settings.of_library("mori_post_batch", int),
        num_worker_threads=settings.of_library("mori_workers", int),
        poll_cq_mode=api.PollCqMode.EVENT,
        enable_notification=False,
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class MoriTransport(LibraryTransport):
    """Moves bytes between this rank's region and those of other MoRI engines."""

    name = "mori"

    def __init__(self, region: Region, settings: TransportSettings, api: MoriApi = None) -> None:
        """`api` is the module `mori.io`; None imports it."""
        self._api = load_mori() if api is None else api
        marks, is_rdma = Marks(settings.max_peers), settings.of_library("mori_backend", str) == "rdma"
        serving = MoriEngine(self._api, settings, region, marks.region)
        self._described = serving.describe()
        stop_s = settings.timeout_s + _MARGIN_S
        super().__init__(region, settings, marks, serving, slice_runs=MAX_SLICE_RUNS, stop_s=stop_s, reads_marks=is_rdma)

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
