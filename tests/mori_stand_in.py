"""A stand-in for `mori.io` in one process. Every behaviour follows MoRI's own text; what it follows is quoted where it is.

"Guide" is docs/MORI-IO-GUIDE.md of github.com/ROCm/mori at commit 624002c, "source" the C++ of the same commit. What neither
says is not played: no timing, no routing between backends, no notifications (they are switched off, and tests insist).
"""

from __future__ import annotations

import ctypes
import enum
import queue
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.mori import MoriTransport

__all__ = ["MoriWorld", "open_on_stand_in"]


class BackendType(enum.Enum):
    """Guide, "Enums": `Unknown`, `XGMI`, `RDMA`, `TCP`."""

    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3


class MemoryLocationType(enum.Enum):
    """Guide, "Enums": `Unknown`, `CPU`, `GPU`."""

    Unknown = 0
    CPU = 1
    GPU = 2


class StatusCode(enum.Enum):
    """Guide, "Enums": the codes by name."""

    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class PollCqMode(enum.Enum):
    """Guide, "Enums": `POLLING`, `EVENT`."""

    POLLING = 0
    EVENT = 1


@dataclass
class IOEngineConfig:
    """Guide, "Core classes": `host` (str), `port` (int)."""

    host: str = ""
    port: int = 0


@dataclass
class RdmaBackendConfig:
    """Guide, "Environment & Configuration": names and defaults of the settings."""

    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = 1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True


@dataclass
class XgmiBackendConfig:
    """Guide, "Core classes": `num_streams` (default 64), `num_events` (default 64)."""

    num_streams: int = 64
    num_events: int = 64


class _Packed(msgspec.Struct, frozen=True):
    def pack(self) -> bytes:
        """Source, pybind_io.cpp: descriptors have `pack` and a static `unpack`, which invert each other."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Any:
        return msgspec.msgpack.decode(data, type=cls)


class EngineDesc(_Packed, frozen=True):
    """Source, pybind_io.cpp: `key`, `host`, `port` among others."""

    key: str
    host: str
    port: int


class MemoryDesc(_Packed, frozen=True):
    """Source, pybind_io.cpp: `engine_key`, `id`, `device_id`, `data`, `size` among others."""

    engine_key: str
    id: int
    device_id: int
    data: int
    size: int


class TransferStatus:
    """Guide, "TransferStatus methods"."""

    def __init__(self) -> None:
        self._state: tuple[StatusCode, str] = (StatusCode.INIT, "")

    def update(self, code: StatusCode, message: str = "") -> None:
        self._state = (code, message)

    def InProgress(self) -> bool:  # noqa: N802 - the names are MoRI's
        return self._state[0] is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:  # noqa: N802
        return self._state[0] is StatusCode.SUCCESS

    def Failed(self) -> bool:  # noqa: N802
        return self._state[0].name.startswith("ERR")

    def Code(self) -> StatusCode:  # noqa: N802
        return self._state[0]

    def Message(self) -> str:  # noqa: N802
        return self._state[1]


@dataclass
class MoriWorld:
    """All engines of a test. `send_queue` is how many reads or writes a queue pair takes at once."""

    send_queue: int = 4096
    engines: dict[str, IOEngine] = field(default_factory=dict)
    backends: list[RdmaBackendConfig | XgmiBackendConfig] = field(default_factory=list)

    def api(self) -> SimpleNamespace:
        """What `import mori.io` would give."""
        return SimpleNamespace(
            BackendType=BackendType,
            MemoryLocationType=MemoryLocationType,
            StatusCode=StatusCode,
            PollCqMode=PollCqMode,
            IOEngineConfig=IOEngineConfig,
            RdmaBackendConfig=RdmaBackendConfig,
            XgmiBackendConfig=XgmiBackendConfig,
            EngineDesc=EngineDesc,
            MemoryDesc=MemoryDesc,
            IOEngine=lambda key, config: IOEngine(self, key, config),
        )


class IOEngine:
    """Guide, "IOEngine methods"."""

    def __init__(self, world: MoriWorld, key: str, config: IOEngineConfig) -> None:
        self._world = world
        self._desc = EngineDesc(key, config.host, config.port or 1024 + len(world.engines))
        self._memories: dict[int, MemoryDesc] = {}
        self._known: set[str] = set()
        self._made = 0
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        world.engines[key] = self

    def get_engine_desc(self) -> EngineDesc:
        return self._desc

    def create_backend(self, _kind: BackendType, config: RdmaBackendConfig | XgmiBackendConfig) -> None:
        """Guide, "Backend": it must be created before any data transfer can occur over that medium."""
        self._world.backends.append(config)
        self._worker = threading.Thread(target=self._transfer, daemon=True)
        self._worker.start()

    def remove_backend(self, _kind: BackendType) -> None:
        """Guide, "IOEngine methods": remove a backend. What moves, and what is reachable, ends with it."""
        assert self._worker is not None
        self._work.put(None)
        self._worker.join()
        self._worker = None
        self._world.engines.pop(self._desc.key, None)

    def register_remote_engine(self, desc: EngineDesc) -> None:
        self._known.add(desc.key)

    def register_memory(self, ptr: int, size: int, device_id: int, _mem_loc: MemoryLocationType) -> MemoryDesc:
        self._made += 1
        self._memories[self._made] = MemoryDesc(self._desc.key, self._made, device_id, ptr, size)
        return self._memories[self._made]

    def deregister_memory(self, desc: MemoryDesc) -> None:
        del self._memories[desc.id]

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> _Session | None:
        """Guide, "Engine Registration": before two engines can communicate, the remote engine must be registered.

        Source, BuildRdmaConn: an engine that is not registered, or does not answer, is a std::runtime_error.
        """
        if remote.engine_key not in self._known or remote.engine_key not in self._world.engines:
            raise RuntimeError(f"BuildRdmaConn: remote engine {remote.engine_key} is not registered")
        if self._worker is None:
            return None
        return _Session(self, local, remote)

    def holds(self, desc: MemoryDesc) -> bool:
        """Guide, "Memory Registration": memory must be registered before it can take part."""
        return self._worker is not None and self._memories.get(desc.id) == desc

    def post(self, job: Any) -> None:
        self._work.put(job)

    def moves(self, operation: str, local: MemoryDesc, remote: MemoryDesc, sizes: list[int]) -> str:
        """Why a read or a write fails; empty when it does not.

        Source, common.cpp: the message of a full queue names the operation.
        """
        owner = self._world.engines.get(remote.engine_key)
        if owner is None or not owner.holds(remote) or not self.holds(local):
            return "transport retry counter exceeded"
        if len(sizes) > self._world.send_queue:
            return f"SQ full ({operation}): ep=0 depth=0 requested={len(sizes)} max={self._world.send_queue}"
        return ""

    def _transfer(self) -> None:
        while (job := self._work.get()) is not None:
            job()


class _Session:
    """Guide, "Session": a pre-established transfer context between a pair of MemoryDesc objects."""

    def __init__(self, engine: IOEngine, local: MemoryDesc, remote: MemoryDesc) -> None:
        self._engine = engine
        self._local = local
        self._remote = remote
        self._uids = 0

    def allocate_transfer_uid(self) -> int:
        self._uids += 1
        return self._uids

    def batch_read(self, local_offsets: list[int], remote_offsets: list[int], sizes: list[int], _uid: int) -> TransferStatus:
        """Guide, "Read/Write": one-sided, the target takes no part; "Architecture": transfers are initiated asynchronously.

        Source, common.cpp: a queue that stays full fails the transfer with a message that begins with "SQ full"; what was
        posted before may still arrive.
        """
        status = TransferStatus()
        status.update(StatusCode.IN_PROGRESS)
        self._engine.post(lambda: self._move("read", status, list(zip(local_offsets, remote_offsets, sizes, strict=True))))
        return status

    def batch_write(self, local_offsets: list[int], remote_offsets: list[int], sizes: list[int], _uid: int) -> TransferStatus:
        """Guide, "IOEngine methods": one-sided write (local to remote), and its batched form; "Read/Write": as for reads.

        Source, python/mori/io/engine.py: a session's `batch_write` takes what its `batch_read` takes, in the same order;
        common.cpp: RdmaBatchReadWrite does both, this one with IBV_WR_RDMA_WRITE, and fails alike when a queue stays full.
        """
        status = TransferStatus()
        status.update(StatusCode.IN_PROGRESS)
        self._engine.post(lambda: self._move("write", status, list(zip(local_offsets, remote_offsets, sizes, strict=True))))
        return status

    def _move(self, operation: str, status: TransferStatus, runs: list[tuple[int, int, int]]) -> None:
        problem = self._engine.moves(operation, self._local, self._remote, [size for _, _, size in runs])
        if problem and not problem.startswith("SQ full"):
            status.update(StatusCode.ERR_RDMA_OP, problem)
            return
        for here, there, size in runs[: len(runs) // 2 if problem else None]:
            assert 0 <= here <= self._local.size - size
            assert 0 <= there <= self._remote.size - size
            ends = (self._local.data + here, self._remote.data + there)
            ctypes.memmove(*(ends if operation == "read" else ends[::-1]), size)
        status.update(StatusCode.ERR_RDMA_OP if problem else StatusCode.SUCCESS, problem)


_WORLD = MoriWorld()


def open_on_stand_in(region: Region, settings: TransportSettings) -> MoriTransport:
    """Transport mori over the stand-in; all that are opened so are in one world."""
    return MoriTransport(region, settings, _WORLD.api())
