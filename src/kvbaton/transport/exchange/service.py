"""An exchange over this process's memory: one thread that owns the port, serves peers, and ends what callers left in flight.

The thread runs four things: connections of peers (`OwnerSide`), a step each when their socket is ready; reads of this side that
are too large for the thread that posted them (`ReadJob`), a slice each in turns; channels with something in flight that no
thread waits for; and time limits. It keeps no reference to the `MemoryExchange`, so one that is dropped ends its thread, its
port and its connections.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.card import Endpoint
from kvbaton.errors import ConfigError, KVBatonError, PeerLost, TransportError
from kvbaton.transport.base import TransportSettings
from kvbaton.transport.exchange.base import MemoryHandle
from kvbaton.transport.exchange.channel import ExchangeChannel, InFlight, ReadJob
from kvbaton.transport.exchange.flow import Flow
from kvbaton.transport.exchange.gpu import ExchangeGpu, open_gpu
from kvbaton.transport.exchange.memories import MemoryTable, NoticeTable, check_place
from kvbaton.transport.exchange.owner import COUNTS, ExchangeState, OwnerSide
from kvbaton.transport.exchange.reach import CopyHelpers, ReadableProcess
from kvbaton.transport.neighbour import Neighbour, ProcessMemory, explain_limits, is_readable
from kvbaton.transport.queued import bytes_detail, detail
from kvbaton.transport.shared_memory import shared_place
from kvbaton.transport.tcp.server import listen
from kvbaton.transport.tcp.sockets import tune
from kvbaton.transport.tcp.wire import TOKEN_BYTES, Secret
from kvbaton.transport.wakeup import Wakeup

__all__ = ["ExchangePaths", "MemoryExchange", "open_local", "open_tcp"]

_log = logging.getLogger("kvbaton.transport")

_HANDSHAKE_S = 5.0
_MAX_UNKNOWN = 128
_TICK_S = 1.0
_IDLE_S = 60.0
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class ExchangePaths:
    """How bytes may go: out of the memory of processes of this host (`local`), over the connection (`tcp`), or as it comes."""

    local: bool = True
    tcp: bool = True

    @classmethod
    def named(cls, name: str) -> ExchangePaths:
        """Those that `local`, `tcp` or `auto` mean. Raises ConfigError."""
        known = {"local": cls(tcp=False), "tcp": cls(local=False), "auto": cls()}
        if name not in known:
            raise ConfigError(f"paths {name!r} are unknown; choose local, tcp or auto")
        return known[name]


class _Accepted:
    """A connection of a peer, as the loop sees it."""

    def __init__(self, sock: socket.socket, owner: OwnerSide, deadline: float) -> None:
        self.owner = owner
        self.flow = Flow(sock, owner.steps())
        self.deadline: float | None = deadline
        self.events = 0


class _Service:
    """The thread and all that it owns."""

    def __init__(self, state: ExchangeState, settings: TransportSettings) -> None:
        self.state = state
        self.garbage_total = 0
        self.refused_total = 0
        self._settings = settings
        self._listener = listen(settings)
        self.host, self.port = self._listener.getsockname()[:2]
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        self._accepted: dict[int, _Accepted] = {}
        self._channels: dict[int, ExchangeChannel] = {}
        self._jobs: deque[ReadJob] = deque()
        self._turns: deque[_Accepted] = deque()
        self._is_closed = False
        self._expires_at = 0.0
        self._epoll.register(self._wakeup.fd, select.EPOLLIN)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="kvbaton-exchange", daemon=True)
        self._thread.start()

    def adopt(self, channel: ExchangeChannel) -> None:
        """Watch a new channel. Raises TransportError when the exchange is closed."""
        with self._lock:
            if self._is_closed:
                raise TransportError("the exchange is closed; open a new one")
            fd = channel.sock.fileno()
            self._channels[fd] = channel
            self._epoll.register(fd, 0)
        self._wakeup.set()  # the thread may sleep for long while it has no channel whose time it watches

    def arm(self, channel: ExchangeChannel, wants_to_send: bool) -> None:
        """Wake the thread once when something arrives for `channel` (or there is room to send)."""
        events = select.EPOLLIN | select.EPOLLONESHOT | (select.EPOLLOUT if wants_to_send else 0)
        with self._lock, contextlib.suppress(OSError, ValueError):
            if not self._is_closed and self._channels.get(fd := channel.sock.fileno()) is channel:
                self._epoll.modify(fd, events)

    def queue(self, job: ReadJob) -> None:
        """Have a read carried out."""
        self._jobs.append(job)
        self._wakeup.set()

    def close(self) -> None:
        """End the thread, and everything in flight with an error. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._wakeup.set()
        # A finalizer runs in whichever thread drops the last reference, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except Exception:  # noqa: BLE001 - the last resort: what is in flight must not wait for a thread that is dead
            _log.exception("the thread of an exchange failed; its peers are lost")
        finally:
            self._end()

    def _turn(self) -> None:
        busy = bool(self._jobs or self._turns)
        for fd, _ in self._epoll.poll(0 if busy else self._wait_s()):
            if fd == self._wakeup.fd:
                self._wakeup.clear()
            elif fd == self._listener.fileno():
                self._accept()
            elif (accepted := self._accepted.get(fd)) is not None:
                self._serve(accepted)
            elif (channel := self._channels.get(fd)) is not None:
                self._tend(channel)
        if busy or self._jobs or self._turns:
            self._take_turns()
        if (now := time.monotonic()) >= self._expires_at:
            self._expires_at = now + _TICK_S / 10
            self._expire(now)

    def _take_turns(self) -> None:
        for accepted in [self._turns.popleft() for _ in range(len(self._turns))]:
            if self._accepted.get(accepted.flow.sock.fileno()) is accepted:
                self._serve(accepted)
        if self._jobs:
            job = self._jobs.popleft()
            if job.step():
                self._jobs.append(job)

    def _wait_s(self) -> float:
        # Also for channels that are idle now: another thread can post at any time, and does not wake this one.
        if self._channels:
            return _TICK_S
        for accepted in self._accepted.values():
            if accepted.deadline is not None:
                return _TICK_S
        return _IDLE_S

    def _accept(self) -> None:
        try:
            sock, source = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            if not self._drop_unknown():
                time.sleep(0.05)  # no descriptor is left, and none can be had: the listener stays readable
            return
        admits = self._settings.admits
        if admits is not None and not admits(str(source[0]).removeprefix("::ffff:")):
            self.refused_total += 1
            sock.close()
            return
        if sum(not accepted.owner.is_admitted for accepted in self._accepted.values()) >= _MAX_UNKNOWN:
            self._drop_unknown()
        tune(sock)
        accepted = _Accepted(sock, OwnerSide(self.state, self._why_full), time.monotonic() + _HANDSHAKE_S)
        self._accepted[sock.fileno()] = accepted
        self._epoll.register(sock.fileno(), 0)
        self._serve(accepted)

    def _why_full(self) -> str:
        admitted = sum(accepted.owner.is_admitted for accepted in self._accepted.values())
        if admitted < self._settings.max_peers:
            return ""
        return f"{admitted} peers are connected, the limit (max_peers); try again when some have left"

    def _drop_unknown(self) -> bool:
        """End the oldest connection that has not authenticated; returns whether there was one."""
        for accepted in self._accepted.values():
            if not accepted.owner.is_admitted:
                self._drop(accepted)
                return True
        return False

    def _serve(self, accepted: _Accepted) -> None:
        flow = accepted.flow
        try:
            flow.advance()
        except (PeerLost, OSError, StopIteration):
            self.refused_total += not accepted.owner.is_admitted
            self._drop(accepted)
            return
        except Exception as error:  # noqa: BLE001 - what a peer sends costs its own connection, never this thread
            self.garbage_total += 1
            _log.debug("port %d: a connection is closed: %s", self.port, error)
            self._drop(accepted)
            return
        if flow.is_between_messages:
            events = select.EPOLLIN
            accepted.deadline = None if accepted.owner.is_admitted else accepted.deadline
        else:
            if accepted.owner.is_admitted:
                accepted.deadline = time.monotonic() + self._settings.timeout_s
            if flow.wants_turn:
                self._turns.append(accepted)
            events = 0 if flow.wants_turn else select.EPOLLOUT if flow.wants_to_send else select.EPOLLIN
        if events != accepted.events:
            accepted.events = events
            self._epoll.modify(flow.sock.fileno(), events)

    def _tend(self, channel: ExchangeChannel) -> None:
        channel.on_event(self._settings.timeout_s)
        if channel.failure:
            self._forget(channel)

    def _forget(self, channel: ExchangeChannel) -> None:
        with self._lock:
            for fd in [fd for fd, known in self._channels.items() if known is channel]:
                del self._channels[fd]
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(fd)
        channel.fail(channel.failure or "TransportError: the exchange is closed")

    def _expire(self, now: float) -> None:
        for accepted in [each for each in self._accepted.values() if each.deadline is not None and each.deadline <= now]:
            self._drop(accepted)
        for channel in list(self._channels.values()):
            if channel.failure or now - channel.progress_at > self._settings.timeout_s:
                self._tend(channel)

    def _drop(self, accepted: _Accepted) -> None:
        self._accepted.pop(accepted.flow.sock.fileno(), None)
        accepted.flow.close()

    def _end(self) -> None:
        with self._lock:
            self._is_closed = True
        for accepted in list(self._accepted.values()):
            self._drop(accepted)
        for channel in list(self._channels.values()):
            self._forget(channel)
        while self._jobs:
            self._jobs.popleft().abandon("TransportError: the exchange is closed")
        self._listener.close()
        self._epoll.close()
        self._wakeup.close()
        self.state.helpers.close()


class MemoryExchange:
    """See `ExchangeContract`. Ends with its last reference, or by `close`."""

    def __init__(
        self,
        name: str,
        settings: TransportSettings,
        paths: ExchangePaths | None = None,
        *,
        listens: bool = True,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`name` is what peers find its notices under.

        Listens on `host` and `port` of the settings; without `listens` only when `listen` is called, and peers are served and
        connected to from then on. `counts` is where the numbers that `COUNTS` names are kept, if not inside.
        Raises ConfigError, or TransportError when no path works here.
        """
        self._settings = settings
        self._paths = paths or ExchangePaths()
        self._state = ExchangeState(
            name=name,
            secret=Secret(secrets.token_bytes(TOKEN_BYTES), settings.cluster_key, settings.incarnation or secrets.token_hex(8)),
            table=MemoryTable(settings.timeout_s),
            notices=NoticeTable(),
            keeps_notices=True,
            slice_bytes=settings.slice_bytes * max(1, settings.copy_threads),
            here=Neighbour.here(),
            process_memory=self._process_memory(),
            helpers=CopyHelpers(settings.copy_threads),
            counts=np.zeros(len(COUNTS), np.int64) if counts is None else counts,
        )
        self._counter = InFlight(settings.max_in_flight, self._state.counts.data[2:])
        self._links: dict[bytes, ExchangeChannel] = {}
        self._connecting = threading.Lock()
        self._service: _Service | None = None
        self._finalizer = weakref.finalize(self, _close, None, self._state)
        if listens:
            self.listen(keeps_notices=True)

    @property
    def port(self) -> int:
        """Where it listens; before `listen`, where it shall."""
        return int(self._service.port) if self._service is not None else self._settings.port

    def listen(self, *, keeps_notices: bool) -> None:
        """Serve peers from now on; again: change whether notices are kept. Raises ConfigError when the port cannot be had."""
        self._state.keeps_notices = keeps_notices
        if self._service is None:
            self._service = _Service(self._state, self._settings)
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _close, self._service, self._state)

    def register(self, address: int, memory_bytes: int, device: int = 0) -> MemoryHandle:
        """See `ExchangeContract.register`."""
        check_place(address, memory_bytes)
        if is_readable(address, memory_bytes):
            shared = shared_place(address, memory_bytes) if self._state.process_memory is not None else None
            return self._state.table.register(address, memory_bytes, shared=shared)
        try:
            gpu, parts = self._shared(address, memory_bytes, device)
        except KVBatonError as error:
            raise ConfigError(
                f"memory at {address:#x} with {memory_bytes} bytes cannot be registered: the processor cannot read it, so it is"
                f" memory of a device, or it is not mapped. It cannot be used as memory of GPU {device} either: {error}"
            ) from error
        handle = self._state.table.register(address, memory_bytes, is_listed=False)
        gpu.adopt(self._state.table, handle)
        return msgspec.structs.replace(handle, gpu_owner=gpu.owner, gpu_parts=parts)

    def drop_stores(self, handle: MemoryHandle) -> None:
        """For negative controls: transfers into this memory succeed from now on, and nothing is stored."""
        self._state.dropped.add(handle.stamp)

    def withdraw(self, handle: MemoryHandle) -> None:
        """See `ExchangeContract.withdraw`."""
        self._state.dropped.discard(handle.stamp)
        try:
            self._state.table.withdraw(handle.slot, handle.stamp)
        finally:
            if self._state.gpu is not None:
                self._state.gpu.forget(handle.stamp)

    def endpoint(self) -> Endpoint:
        """See `ExchangeContract.endpoint`."""
        state = self._state
        details: dict[str, str | int] = {
            "host": self._settings.advertise_host or self._settings.host,
            "port": self.port,
            "token": state.secret.token.hex(),
            "incarnation": state.secret.incarnation,
            "board_address": state.table.board_address if state.process_memory is not None else 0,
            **state.here.details(),
        }
        return Endpoint("exchange", 0, details)

    def connect(self, endpoint: Endpoint) -> ExchangeChannel:
        """See `ExchangeContract.connect`. The same endpoint again is the same channel, while that works."""
        secret = Secret(bytes_detail(endpoint, "token"), self._settings.cluster_key, detail(endpoint, "incarnation", str))
        with self._connecting:
            known = self._links.get(secret.token)
            if known is not None:
                known.look()  # while nothing is in flight, no thread notices that the peer has ended
                if not known.failure:
                    return known
            if known is None and len(self._links) >= self._settings.max_peers:
                raise TransportError(f"{len(self._links)} peers are known, the limit (max_peers); use another exchange")
            channel = self._dial(endpoint, secret)
            self._links[secret.token] = channel
            return channel

    def count_refused(self) -> None:
        """Count a transfer that the caller of this exchange refused before it was posted."""
        self._counter.refuse()

    def has_notice(self, initiator: str, tag: int) -> bool:
        """See `ExchangeContract.has_notice`."""
        return self._state.notices.has(initiator, tag)

    def stats(self) -> Mapping[str, int]:
        """See `ExchangeContract.stats`."""
        served = {f"{kind.name.lower()}_served_total": count for kind, count in self._state.served.items()}
        return {
            **dict(zip(COUNTS, self._state.counts.tolist(), strict=True)),
            "memories": len(self._state.table),
            "in_flight": len(self._counter),
            "notices": len(self._state.notices),
            "notices_dropped_total": self._state.notices.dropped_total,
            "garbage_total": self._service.garbage_total if self._service else 0,
            "refused_total": self._service.refused_total if self._service else 0,
            **served,
        }

    def check(self) -> None:
        """Assert that what the parts know agrees."""
        self._state.table.check()

    def close(self) -> None:
        """See `ExchangeContract.close`."""
        self._finalizer()

    def _shared(self, address: int, memory_bytes: int, device: int) -> tuple[ExchangeGpu, str]:
        """The GPU that holds this memory, and how peers open it. Raises KVBatonError."""
        with self._connecting:
            gpu = self._state.gpu
            if gpu is None:
                here = self._state.here
                gpu = open_gpu(address, device, f"{here.host} {here.pid} {here.ticks}", self._settings.timeout_s)
                self._state.gpu = gpu
        if gpu.device != device:
            raise ConfigError(f"memories of this exchange are on GPU {gpu.device}; use another exchange for GPU {device}")
        return gpu, gpu.share(address, memory_bytes)

    def _dial(self, endpoint: Endpoint, secret: Secret) -> ExchangeChannel:
        host, port = detail(endpoint, "host", str), detail(endpoint, "port", int)
        if self._settings.admits is not None and not self._settings.admits(host):
            raise TransportError(f"the peer's address {host} is not on the allow-list")
        limit = min(self._settings.timeout_s, _HANDSHAKE_S)
        service = self._service
        if service is None:
            raise TransportError("the exchange does not listen yet; call listen first")
        channel = ExchangeChannel(self._state, secret, (host, port), limit, self._counter, service.arm, service.queue)
        try:
            self._choose_path(channel, endpoint)
            service.adopt(channel)
        except BaseException:
            channel.fail("TransportError: the connection was not used")
            raise
        return channel

    def _choose_path(self, channel: ExchangeChannel, endpoint: Endpoint) -> None:
        """Find out whether the two processes can read each other. Raises TransportError when they must, and cannot."""
        problem, memory = "", self._state.process_memory
        try:
            neighbour, board = Neighbour.of(endpoint), detail(endpoint, "board_address", int)
            if memory is None or not board:
                problem = "one of the two reads no other process"
            elif neighbour.host != self._state.here.host:
                problem = f"it is on another host (host_id {neighbour.host!r}, here {self._state.here.host!r})"
            else:
                channel.peer_process = ReadableProcess(memory, neighbour, board, self._state.helpers)
        except KVBatonError as error:
            problem = str(error)
        problem = problem or channel.why_not_read
        if problem and not self._paths.tcp:
            raise TransportError(f"the peer cannot be reached by local: {problem}; choose auto or tcp")

    def _process_memory(self) -> ProcessMemory | None:
        if not self._paths.local:
            return None
        try:
            memory = ProcessMemory()
            memory.allow_readers()
            trouble = explain_limits(memory)
            if trouble:
                raise TransportError(trouble)
        except TransportError:
            if not self._paths.tcp:
                raise
            return None
        return memory


def open_local(name: str, settings: TransportSettings) -> MemoryExchange:
    """An exchange between processes of this host that read each other's memory."""
    return MemoryExchange(name, settings, ExchangePaths.named("local"))


def open_tcp(name: str, settings: TransportSettings) -> MemoryExchange:
    """An exchange whose bytes go over TCP."""
    return MemoryExchange(name, settings, ExchangePaths.named("tcp"))


def _close(service: _Service | None, state: ExchangeState) -> None:
    """End an exchange: the memories first, so that nothing that is still on its way finds one."""
    try:
        state.table.withdraw_all()
    finally:
        if service is not None:
            service.close()
        if state.gpu is not None:
            state.gpu.close()
