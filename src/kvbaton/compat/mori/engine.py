"""Engines and sessions: MoRI's calls, translated into registrations and transfers of an exchange.

An engine finds a local memory by its number and a remote one by what its descriptor holds, never by identity: users pack and
unpack their own descriptors too. What a call gets wrong is a failed status, as with MoRI; exceptions are for wrong types, and
for sessions that cannot be made.
"""

from __future__ import annotations

import array
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.compat.mori.descriptors import IPC_HANDLE_BYTES, EngineDesc, MemoryDesc
from kvbaton.compat.mori.names import BackendType, MemoryLocationType, StatusCode
from kvbaton.compat.mori.settings import (
    LOG,
    BackendConfig,
    IOEngineConfig,
    RdmaBackendConfig,
    auto_xgmi,
    chosen_paths,
    drops_stores,
    kept_counts,
    node_id,
    set_log_level_of_environment,
    sq_backoff_s,
)
from kvbaton.compat.mori.status import TransferStatus, failed_status, pending_status, wait_all
from kvbaton.core.card import Endpoint
from kvbaton.core.plan import Runs
from kvbaton.errors import KVBatonError, PeerError, QueueFull, RangeError, TransportError
from kvbaton.transport.base import Direction, TransportSettings
from kvbaton.transport.exchange.base import MemoryHandle, TransferRequest
from kvbaton.transport.exchange.channel import ExchangeChannel, Transit
from kvbaton.transport.exchange.service import MemoryExchange

__all__ = ["IOEngine", "IOEngineSession"]

Offsets = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Offsets or sizes of the runs of a batch: any sequence of whole numbers."""

_MAX_REQUEST_BYTES = 1 << 32
_UIDS = 1 << 32
_HANDSHAKE_S = 5.0
_REDIAL_S = 1.0
_BACKOFF_STEP_S = 0.0002
_IN_FLIGHT = 8192
_LOCATION_OF = {"cpu": MemoryLocationType.CPU, "cuda": MemoryLocationType.GPU}
_NO_BACKEND = "No available backend found, create backend first"
_OUT_OF_RANGE = "length out of range"


class _RefusedCall(Exception):
    """A call that MoRI answers with a failed status."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class IOEngine:
    """Registers memory, reaches peers, and is reached; ends with its last reference."""

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        if not isinstance(key, str) or not isinstance(config, IOEngineConfig):
            raise TypeError(f"IOEngine(key: str, config: IOEngineConfig), not ({type(key).__name__}, {type(config).__name__})")
        self._key = key
        self._node_id = node_id()
        self._host = config.host or _own_address()
        settings = TransportSettings(host=self._host, port=config.port, max_in_flight=_IN_FLIGHT)
        self._exchange = MemoryExchange(key, settings, chosen_paths(), listens=False, counts=kept_counts())
        self._backends: dict[BackendType, BackendConfig | None] = {}
        self._notifies = False
        self._remotes: dict[str, EngineDesc] = {}
        self._memories: dict[int, tuple[MemoryDesc, MemoryHandle]] = {}
        self._next_memory = 0
        self._next_uid = 0
        self._lock = threading.Lock()
        self.backoff_s = sq_backoff_s()
        set_log_level_of_environment()

    def get_engine_desc(self) -> EngineDesc:
        """What peers need to know of this engine."""
        endpoint = self._exchange.endpoint()
        return EngineDesc(
            self._key, self._node_id, socket.gethostname(), self._host, self._exchange.port, os.getpid(), endpoint
        )

    def create_backend(self, type: BackendType, config: BackendConfig | None = None) -> None:  # noqa: A002 - MoRI's name
        """Serve and reach peers from now on. Raises RuntimeError for settings or a port that cannot be used."""
        if not isinstance(type, BackendType) or not isinstance(config, BackendConfig | None):
            raise TypeError("create_backend(type: BackendType, config: BackendConfig = None)")
        if type not in (BackendType.RDMA, BackendType.XGMI):
            raise NotImplementedError(f"backend {type.name} is not implemented here; use RDMA or XGMI")
        if type in self._backends:
            LOG.warning("engine %s has a backend %s already; the second one is ignored", self._key, type.name)
            return
        if type is BackendType.RDMA:
            config = config if isinstance(config, RdmaBackendConfig) else RdmaBackendConfig()
            config = config.overridden()
            config.check()
            self._notifies = config.enable_notification
        try:
            self._exchange.listen(keeps_notices=self._notifies)
        except KVBatonError as error:
            raise RuntimeError(f"engine {self._key} cannot listen: {error}") from error
        self._backends[type] = config
        if type is BackendType.RDMA and auto_xgmi():
            self._backends.setdefault(BackendType.XGMI, None)
        LOG.info("engine %s: backend %s, port %d", self._key, type.name, self._exchange.port)

    def remove_backend(self, type: BackendType) -> None:  # noqa: A002 - MoRI's name
        """Stop using a backend; unknown ones are ignored."""
        self._backends.pop(type, None)

    def register_remote_engine(self, desc: EngineDesc) -> None:
        """Make a peer known under its key; the last one wins."""
        if not isinstance(desc, EngineDesc):
            raise TypeError(f"register_remote_engine takes an EngineDesc, not {type(desc).__name__}")
        self._remotes[desc.key] = desc

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        """Forget a peer; sessions with it go on."""
        self._remotes.pop(desc.key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        """Let peers reach `size` bytes at `ptr`. Raises ValueError for a null pointer or size."""
        for name, value in (("ptr", ptr), ("size", size), ("device_id", device_id)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"register_memory: {name} is {value!r}; it must be a whole number")
        if not isinstance(mem_loc, MemoryLocationType):
            raise TypeError(f"register_memory: mem_loc is {mem_loc!r}; it must be a MemoryLocationType")
        try:
            handle = self._exchange.register(int(ptr), int(size), max(0, int(device_id)))
        except KVBatonError as error:
            label = f" (labelled GPU {device_id})" if mem_loc is MemoryLocationType.GPU else ""
            raise ValueError(f"register_memory{label}: {error}") from error
        if drops_stores(mem_loc):
            self._exchange.drop_stores(handle)
        is_gpu = mem_loc is MemoryLocationType.GPU
        with self._lock:
            number, self._next_memory = self._next_memory, self._next_memory + 1
            desc = MemoryDesc(
                engine_key=self._key,
                id=number,
                device_id=int(device_id),
                device_bus_id=f"kvbaton:{device_id}" if is_gpu else "",
                data=int(ptr),
                size=int(size),
                loc=mem_loc,
                ipc_handle=_ipc_handle(handle) if BackendType.XGMI in self._backends else bytes(IPC_HANDLE_BYTES),
                handle=handle,
            )
            self._memories[number] = (desc, handle)
        return desc

    def register_torch_tensor(self, tensor: Any) -> MemoryDesc:
        """Let peers reach the memory of a contiguous tensor."""
        if not tensor.is_contiguous():
            raise RuntimeError("input tensor must be contiguous")
        device = tensor.device
        index = -1 if device.index is None else device.index
        return self.register_memory(
            tensor.data_ptr(), tensor.nelement() * tensor.element_size(), index, _LOCATION_OF[device.type]
        )

    def deregister_memory(self, desc: MemoryDesc) -> None:
        """End all use of a memory: when this returns, not one byte of it changes any more. Unknown ones are ignored."""
        if not isinstance(desc, MemoryDesc):
            raise TypeError(f"deregister_memory takes a MemoryDesc, not {type(desc).__name__}")
        if desc.engine_key != self._key:
            return
        with self._lock:
            known = self._memories.pop(desc.id, None)
        if known is not None:
            self._exchange.withdraw(known[1])

    def allocate_transfer_uid(self) -> int:
        """A number for a transfer."""
        with self._lock:
            uid, self._next_uid = self._next_uid, (self._next_uid + 1) % _UIDS
        return uid

    def read(self, *args: Any) -> TransferStatus:
        """(local, local_offset, remote, remote_offset, size, uid): fill local memory."""
        return self._single(Direction.READ, *args)

    def write(self, *args: Any) -> TransferStatus:
        """(local, local_offset, remote, remote_offset, size, uid): fill remote memory."""
        return self._single(Direction.WRITE, *args)

    def batch_read(self, *args: Any) -> list[TransferStatus]:
        """(locals, local_offsets, remotes, remote_offsets, sizes, uids), lists of lists: a status for each pair of memories."""
        return self._batches(Direction.READ, *args)

    def batch_write(self, *args: Any) -> list[TransferStatus]:
        """(locals, local_offsets, remotes, remote_offsets, sizes, uids), lists of lists: a status for each pair of memories."""
        return self._batches(Direction.WRITE, *args)

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession | None:
        """A session between two memories; None when no backend can serve them.

        Raises RuntimeError when the peer does not answer, or has not registered its memory.
        """
        try:
            session = IOEngineSession(self, *self._pair(local, remote))
        except _RefusedCall as error:
            if error.code is StatusCode.ERR_BAD_STATE:
                return None
            raise RuntimeError(str(error)) from error
        session.open()
        return session

    def pop_inbound_transfer_status(self, remote_key: str, uid: int) -> TransferStatus | None:
        """SUCCESS once the notice of a peer's transfer is here."""
        if self._exchange.has_notice(remote_key, int(uid)):
            return failed_status(StatusCode.SUCCESS, "")
        return None

    def wait_all(self, statuses: Iterable[TransferStatus | None], timeout_ms: int = -1) -> StatusCode:
        """Wait for all of them; see `wait_all`."""
        return wait_all(statuses, timeout_ms)

    def link(self, endpoint: Endpoint) -> ExchangeChannel:
        """The connection to a peer. Raises KVBatonError."""
        return self._exchange.connect(endpoint)

    def notifies(self, local: MemoryDesc, remote: MemoryDesc) -> bool:
        """Whether a transfer between these leaves a notice: XGMI, which is preferred for two memories of GPUs, never does."""
        gpus = local.loc is remote.loc is MemoryLocationType.GPU
        by_xgmi = BackendType.XGMI in self._backends and gpus
        return self._notifies and BackendType.RDMA in self._backends and not by_xgmi

    def refused(self, code: StatusCode, message: str) -> TransferStatus:
        """The status of a transfer that fails at the call."""
        self._exchange.count_refused()
        return failed_status(code, message)

    def stats(self) -> dict[str, int]:
        """What the exchange counted; an addition of kvbaton's."""
        return dict(self._exchange.stats())

    def _single(self, direction: Direction, *args: Any) -> TransferStatus:
        local, local_offset, remote, remote_offset, size, uid = _arguments(args)
        return self._post(direction, local, [local_offset], remote, [remote_offset], [size], uid)

    def _batches(self, direction: Direction, *args: Any) -> list[TransferStatus]:
        lists = _arguments(args)
        lengths = {len(each) for each in lists}
        if len(lengths) != 1:
            return [self.refused(StatusCode.ERR_INVALID_ARGS, "batch: lists of unequal length") for _ in range(max(lengths))]
        return [self._post(direction, *each) for each in zip(*lists, strict=True)]

    def _post(self, direction: Direction, *args: Any) -> TransferStatus:
        local, local_offsets, remote, remote_offsets, sizes, uid = args
        try:
            session = IOEngineSession(self, *self._pair(local, remote))
        except _RefusedCall as error:
            return self.refused(error.code, str(error))
        session.open(is_probed=False)
        return session.post(direction, local_offsets, remote_offsets, sizes, uid, notifies_empty=False)

    def _pair(
        self, local: MemoryDesc, remote: MemoryDesc
    ) -> tuple[MemoryDesc, MemoryHandle, MemoryDesc, MemoryHandle, Endpoint]:
        if not isinstance(local, MemoryDesc) or not isinstance(remote, MemoryDesc):
            raise TypeError("local and remote must be MemoryDesc")
        if not self._backends:
            raise _RefusedCall(StatusCode.ERR_BAD_STATE, _NO_BACKEND)
        mine = self._memories.get(local.id) if local.engine_key == self._key else None
        if mine is None:
            raise _RefusedCall(
                StatusCode.ERR_NOT_FOUND, f"local memory {local.id} of {local.engine_key!r} is not registered here"
            )
        if remote.engine_key == self._key:
            endpoint: Endpoint | None = self._exchange.endpoint()
        elif remote.engine_key in self._remotes:
            endpoint = self._remotes[remote.engine_key].endpoint
        else:
            raise _RefusedCall(StatusCode.ERR_BAD_STATE, _NO_BACKEND)
        if endpoint is None or remote.handle is None:
            raise _RefusedCall(
                StatusCode.ERR_NOT_FOUND, f"engine {remote.engine_key!r} is not one of kvbaton's: use its own mori here"
            )
        return (*mine, remote, remote.handle, endpoint)


class IOEngineSession:
    """Transfers between one local and one remote memory."""

    def __init__(
        self,
        engine: IOEngine,
        local: MemoryDesc,
        own: MemoryHandle,
        remote: MemoryDesc,
        handle: MemoryHandle,
        endpoint: Endpoint,
    ) -> None:
        self._engine = engine
        self._own, self._handle, self._endpoint = own, handle, endpoint
        self._notifies = engine.notifies(local, remote)
        self._link: ExchangeChannel | None = None
        self._dialled_at = 0.0

    def allocate_transfer_uid(self) -> int:
        """A number for a transfer; the engine's."""
        return self._engine.allocate_transfer_uid()

    def read(self, local_offset: int, remote_offset: int, size: int, uid: int) -> TransferStatus:
        """Fill local memory."""
        return self._post_one(Direction.READ, local_offset, remote_offset, size, uid)

    def write(self, local_offset: int, remote_offset: int, size: int, uid: int) -> TransferStatus:
        """Fill remote memory."""
        return self._post_one(Direction.WRITE, local_offset, remote_offset, size, uid)

    def batch_read(self, local_offsets: Offsets, remote_offsets: Offsets, sizes: Offsets, uid: int) -> TransferStatus:
        """Fill local memory, many runs as one."""
        return self.post(Direction.READ, local_offsets, remote_offsets, sizes, uid)

    def batch_write(self, local_offsets: Offsets, remote_offsets: Offsets, sizes: Offsets, uid: int) -> TransferStatus:
        """Fill remote memory, many runs as one."""
        return self.post(Direction.WRITE, local_offsets, remote_offsets, sizes, uid)

    def alive(self) -> bool:
        """Whether it can be used: always, as with MoRI; transfers over a lost connection fail."""
        return True

    def open(self, *, is_probed: bool = True) -> None:
        """Connect, and ask whether the remote memory is registered. Raises RuntimeError."""
        try:
            self._dialled_at = time.monotonic()
            self._link = self._engine.link(self._endpoint)
            if is_probed:
                self._link.probe(self._handle, _HANDSHAKE_S)
        except RangeError as error:
            raise RuntimeError(f"remote memory size mismatch: expected={self._handle.memory_bytes} got=0 ({error})") from error
        except (TransportError, PeerError) as error:
            raise RuntimeError(f"no session with the peer: {error}") from error

    def _post_one(self, direction: Direction, local_offset: int, remote_offset: int, size: int, uid: int) -> TransferStatus:
        link = self._link
        is_plain = type(local_offset) is type(remote_offset) is type(size) is int and local_offset >= 0 <= remote_offset
        if link is not None and is_plain:
            run = (remote_offset, local_offset, size) if direction is Direction.READ else (local_offset, remote_offset, size)
            try:
                pending = link.post_run(direction, self._own, self._handle, run, int(uid) if self._notifies else None)
            except (RangeError, QueueFull):
                pending = None  # `post` meets it again, and answers as for any other
            if pending is not None:
                return pending_status(pending)
        return self.post(direction, [local_offset], [remote_offset], [size], uid)

    def post(
        self,
        direction: Direction,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        sizes: Offsets,
        uid: int,
        *,
        notifies_empty: bool = True,
    ) -> TransferStatus:
        """Start a transfer; never raises for what a peer does."""
        tag = int(uid) if self._notifies and (notifies_empty or len(sizes)) else None
        columns = (remote_offsets, local_offsets) if direction is Direction.READ else (local_offsets, remote_offsets)
        try:
            request = TransferRequest(direction, self._own, self._handle, _runs(*columns, sizes), tag)
            return pending_status(self._started(request))
        except _RefusedCall as error:
            return self._engine.refused(error.code, str(error))
        except RangeError as error:
            return self._engine.refused(StatusCode.ERR_INVALID_ARGS, f"{_OUT_OF_RANGE}: {error}")
        except QueueFull as error:
            counts = f"ep=0 depth={_IN_FLIGHT} requested={len(sizes)} max={_IN_FLIGHT}"
            return self._engine.refused(StatusCode.ERR_RDMA_OP, f"SQ full (batch): {counts} ({error})")
        except (TransportError, PeerError) as error:
            return self._engine.refused(StatusCode.ERR_RDMA_OP, str(error))

    def _started(self, request: TransferRequest) -> Transit:
        """Post it. A queue that is full is waited for, as long as MoRI would; raises QueueFull after that."""
        link, deadline = self._linked(), 0.0
        while True:
            try:
                return link.post(request)
            except QueueFull:
                deadline = deadline or time.monotonic() + self._engine.backoff_s
                if time.monotonic() >= deadline:
                    raise
            link.look()
            time.sleep(_BACKOFF_STEP_S)

    def _linked(self) -> ExchangeChannel:
        """The connection; one that broke is tried again, but not more often than a caller can bear to wait for."""
        link = self._link
        if link is None or (link.failure and time.monotonic() - self._dialled_at > _REDIAL_S):
            self._dialled_at = time.monotonic()
            link = self._link = self._engine.link(self._endpoint)
        return link


def _own_address() -> str:
    """The address of this host under which it knows itself."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _ipc_handle(handle: MemoryHandle) -> bytes:
    """Something that is not zero, and differs from memory to memory."""
    return hashlib.blake2b(f"{handle.slot} {handle.stamp}".encode(), digest_size=IPC_HANDLE_BYTES).digest()


def _arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(args) != 6:
        raise TypeError(f"6 arguments are needed (local, local offset, remote, remote offset, size, uid), not {len(args)}")
    return args


def _runs(sources: Offsets, targets: Offsets, sizes: Offsets) -> Runs:
    """The runs of a request. Raises TypeError, and _RefusedCall for lists of unequal length and for runs that are too long."""
    if not len(sources) == len(targets) == len(sizes):
        raise _RefusedCall(StatusCode.ERR_INVALID_ARGS, "offsets and sizes have unequal lengths")
    runs = np.empty((len(sizes), 3), np.uint64, order="F")
    for column, values in enumerate((sources, targets, sizes)):
        runs[:, column] = _numbers(values)
    if len(runs) and int(runs[:, 2].max()) >= _MAX_REQUEST_BYTES:
        raise _RefusedCall(
            StatusCode.ERR_INVALID_ARGS, f"one request has {int(runs[:, 2].max())} bytes; below 2^32 are allowed"
        )
    return runs


def _numbers(values: Any) -> Any:
    """Whole numbers of at least 0, as an array. Raises TypeError for anything else."""
    try:
        # Three times as quick for a list as NumPy, which looks at every item twice; and it takes whole numbers only.
        numbers = values if isinstance(values, np.ndarray) else np.frombuffer(array.array("Q", values), np.uint64)
    except (ValueError, OverflowError, TypeError) as error:
        raise TypeError(f"offsets and sizes must be whole numbers of at least 0: {error}") from error
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or (numbers.dtype.kind == "i" and (numbers < 0).any()):
        raise TypeError("offsets and sizes must be whole numbers of at least 0")
    return numbers
