"""TCP between the instances of a run, for the control sockets of production: sockets, selectors and machines in virtual time.

A connection delivers what was sent whole and in order, or ends. What a link loses, or a cut holds up, is sent again after a
while that doubles each time, as the system does; until then the connection is silent, and nothing is acknowledged. The sockets
of a process that dies are closed by its system. Each direction has its own faults: those of `Network`, which carries frames in
the other runs; that something arrives twice does nothing here.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvbaton.sim.network import Network
from kvbaton.sim.world import World
from kvbaton.wire.lookup import Found

__all__ = ["CONNECT_AGAIN_S", "VirtualMachine", "VirtualSocket", "Wires"]

_WINDOW_BYTES = 256 * 1024
_AGAIN_S = 0.2
"""After how long the system sends again what was not acknowledged."""

CONNECT_AGAIN_S = 1.0
"""After how long it sends again what opens a connection."""

_TCP_INFO = struct.Struct("=24xI28xI")
_NO_FD = -2


@dataclass(slots=True)
class Wires:
    """All connections of a run."""

    world: World
    network: Network
    listeners: dict[str, VirtualSocket] = field(default_factory=dict)
    selectors: dict[int, _VirtualSelector] = field(default_factory=dict)
    """By the number that another selector knows each by."""
    numbers: int = 0

    def number(self) -> int:
        """A number that no other socket or selector has."""
        self.numbers += 1
        return self.numbers

    def carry(self, source: str, target: str, arrive: Callable[[], None], again_s: float = _AGAIN_S) -> None:
        """Have something travel from one address to another, which is sent again as often as it is lost."""
        world, link = self.world, self.network.link(source, target)
        world.use(f"frame {source} {target}")
        if link.cut_until > world.now or link.lose_next > 0 or world.random.random() < link.loss:
            # What follows each other closely is lost together.
            link.lose_next = 0
            world.after(again_s, world.outside, partial(self.carry, source, target, arrive, 2 * again_s))
            return
        delay_s = self.network.delay_s * world.random.uniform(0.5, 1.5)
        if link.delay_next_s:
            delay_s, link.delay_next_s = delay_s + link.delay_next_s, 0.0
        elif link.slow_until > world.now:
            delay_s += world.random.uniform(0.0, link.slow_s)
        elif world.random.random() < link.reorder:
            delay_s *= world.random.choice((5, 50))
        world.at(max(world.now + delay_s, link.clogged_until), world.outside, arrive)

    def corrupted(self, source: str, target: str, data: bytes) -> bytes:
        """What arrives of some bytes: a bit of them may flip where TCP does not notice."""
        link = self.network.link(source, target)
        if not link.corrupt_next:
            return data
        link.corrupt_next -= 1
        flipped = bytearray(data)
        bit = self.world.random.randrange(8 * len(flipped))
        flipped[bit // 8] ^= 1 << bit % 8
        self.world.note(f"FLIPPED a bit of {len(data)} bytes {source} -> {target}")
        return bytes(flipped)


@dataclass(slots=True, eq=False)
class _TcpSegment:
    """What one call has sent; nothing for the end of the stream."""

    data: bytes
    has_arrived: bool = False


class VirtualSocket:
    """One end of a connection, or what listens."""

    def __init__(self, machine: VirtualMachine) -> None:
        self.machine = machine
        self._wires = machine.wires
        self._number = self._wires.number()
        self.peer: VirtualSocket | None = None
        self.incoming = bytearray()
        self._on_way: deque[_TcpSegment] = deque()
        """What was sent and has not arrived in order."""
        self._unacknowledged = 0
        self._acknowledged_at = self._wires.world.now
        self._error = 0
        self.is_closed = self._is_shut = self.has_ended = self.is_connected = False
        self.backlog: deque[VirtualSocket] = deque()
        machine.sockets[self] = None

    def fileno(self) -> int:
        return -1 if self.is_closed else self._number

    def setblocking(self, flag: bool, /) -> None:
        """It never blocks."""

    def setsockopt(self, level: int, optname: int, value: int, /) -> None:
        """Nothing of that matters here."""

    def getsockopt(self, level: int, optname: int, _buflen: int = 0, /) -> Any:
        if (level, optname) == (socket.SOL_SOCKET, socket.SO_ERROR):
            return self._error
        since_s = self._wires.world.now - self._acknowledged_at
        return _TCP_INFO.pack(self._unacknowledged, int(1000 * since_s))

    def connect_ex(self, address: Any, /) -> int:
        host = str(address[0])
        self._wires.carry(self.machine.address, host, partial(self._ask, host), CONNECT_AGAIN_S)
        return errno.EINPROGRESS

    def _ask(self, host: str) -> None:
        """The first segment has arrived: what listens there answers, or the system refuses."""
        listener = self._wires.listeners.get(host)
        answer = self._refuse
        if listener is not None and not self.is_closed:
            self.peer = VirtualSocket(listener.machine)
            self.peer.peer = self
            answer = partial(self._open, listener, self.peer)
        self._wires.carry(host, self.machine.address, answer)

    def _refuse(self) -> None:
        self._error = errno.ECONNREFUSED
        self.machine.wake()

    def _open(self, listener: VirtualSocket, far_end: VirtualSocket) -> None:
        """The answer has come: this end is open, and the other one when that is acknowledged."""
        if self.is_closed:
            far_end.close()
            return
        self.is_connected = True
        self._acknowledged_at = self._wires.world.now
        self.machine.wake()
        self._wires.carry(self.machine.address, self.far, partial(listener.queue, far_end))

    def queue(self, opened: VirtualSocket) -> None:
        """Let a connection wait to be accepted."""
        if opened.is_closed or self.is_closed:
            opened.close()
            if opened.peer is not None:
                self._wires.carry(self.machine.address, opened.far, opened.peer.reset)
            return
        opened.is_connected = True
        self.backlog.append(opened)
        self.machine.wake()

    def accept(self) -> tuple[VirtualSocket, Any]:
        if not self.backlog:
            raise BlockingIOError
        accepted = self.backlog.popleft()
        return accepted, (accepted.far, 1)

    @property
    def far(self) -> str:
        """The address of the other end."""
        return "" if self.peer is None else self.peer.machine.address

    def recv(self, bufsize: int, /) -> bytes:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.incoming:
            was_full = self.peer is not None and self.peer.room <= 0
            data = bytes(self.incoming[:bufsize])
            del self.incoming[:bufsize]
            if was_full and self.peer is not None:
                self.peer.machine.wake()
            return data
        if self._error:
            raise ConnectionResetError(self._error, "Connection reset by peer")
        if self.has_ended:
            return b""
        raise BlockingIOError

    def send(self, data: bytes | bytearray, /) -> int:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self._error:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        room = self.room
        if room <= 0:
            raise BlockingIOError
        self._transmit(bytes(data[:room]))
        return min(room, len(data))

    @property
    def room(self) -> int:
        """How much may be sent before the other end has read something."""
        unread = len(self.peer.incoming) if self.peer is not None else 0
        return _WINDOW_BYTES - unread - sum(len(segment.data) for segment in self._on_way)

    def _transmit(self, data: bytes) -> None:
        segment = _TcpSegment(self._wires.corrupted(self.machine.address, self.far, data) if data else data)
        self._on_way.append(segment)
        self._unacknowledged += 1
        self._wires.carry(self.machine.address, self.far, partial(self._arrived, segment))

    def _arrived(self, segment: _TcpSegment) -> None:
        """A segment is there: the far system takes it, in order, and acknowledges it, even if its process stands still."""
        peer = self.peer
        segment.has_arrived = True
        while self._on_way and self._on_way[0].has_arrived:
            taken = self._on_way.popleft()
            if peer is None or peer.is_closed:
                self._wires.carry(self.far, self.machine.address, self.reset)
                return
            if not peer.has_failed:
                peer.take(taken.data)
        self._wires.carry(self.far, self.machine.address, self._acknowledge)

    @property
    def has_failed(self) -> bool:
        """Whether the connection was refused or reset: nothing arrives any more."""
        return self._error != 0

    def take(self, data: bytes) -> None:
        """Let something arrive; nothing is the end of the stream."""
        self.incoming += data
        self.has_ended = self.has_ended or not data
        self._acknowledged_at = self._wires.world.now  # what comes acknowledges, too
        self.machine.wake()

    def _acknowledge(self) -> None:
        self._unacknowledged -= 1
        self._acknowledged_at = self._wires.world.now

    def reset(self) -> None:
        """The far system has no such connection any more: what has arrived can be read, and no more comes."""
        if not self.is_closed:
            self._error = errno.ECONNRESET
            self.machine.wake()

    def shutdown(self, _how: int, /) -> None:
        if not self._is_shut and self.is_connected:
            self._is_shut = True
            self._transmit(b"")

    def close(self) -> None:
        if self.is_closed:
            return
        if self.is_connected and not self._error:
            if self.incoming and self.peer is not None:
                # With something unread, the system resets the connection; what is on its way comes too late.
                self._on_way.clear()
                self._wires.carry(self.machine.address, self.far, self.peer.reset)
            else:
                self.shutdown(socket.SHUT_WR)
        self.is_closed = True
        self.machine.sockets.pop(self, None)
        for accepted in self.backlog:
            accepted.close()
        if self._wires.listeners.get(self.machine.address) is self:
            del self._wires.listeners[self.machine.address]

    def events(self) -> int:
        """What it is ready for."""
        # What overtakes the answer that opens the connection waits for it.
        is_readable = bool(self.backlog or self._error or (self.is_connected and (self.incoming or self.has_ended)))
        is_writable = bool(self._error or (self.is_connected and self.room > 0))
        return (selectors.EVENT_READ if is_readable else 0) | (selectors.EVENT_WRITE if is_writable else 0)


class _VirtualSelector:
    """What is ready of virtual sockets, and of other selectors; it never waits."""

    def __init__(self, machine: VirtualMachine) -> None:
        self._machine = machine
        self._number = machine.wires.number()
        machine.wires.selectors[self._number] = self
        self._keys: dict[int, selectors.SelectorKey] = {}

    def fileno(self) -> int:
        return self._number

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = _number(fileobj)
        if number < 0:
            raise ValueError(f"{fileobj!r} is closed")
        if number in self._keys:
            raise KeyError(f"{fileobj!r} is registered already")
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(_number(fileobj))

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_number(fileobj)]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = [(key, events) for key in self._keys.values() if (events := key.events & self._events_of(key.fileobj))]
        self._machine.wait_s = 0.0 if ready or timeout is None else timeout
        return ready

    def _events_of(self, fileobj: Any) -> int:
        if isinstance(fileobj, VirtualSocket):
            return fileobj.events()
        nested = self._machine.wires.selectors.get(fileobj)
        return selectors.EVENT_READ if nested is not None and nested.is_ready else 0

    @property
    def is_ready(self) -> bool:
        """Whether something that it waits for is ready."""
        return any(key.events & self._events_of(key.fileobj) for key in self._keys.values())

    def close(self) -> None:
        self._keys.clear()
        self._machine.wires.selectors.pop(self._number, None)


def _number(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())


class _KnownHosts:
    """Every host is known."""

    fd = _NO_FD

    def find(self, host: str, port: int) -> Found | None:
        return Found(socket.AF_INET, (host, port))

    def clear(self) -> None:
        """Nothing was looked up."""

    def close(self) -> None:
        """Nothing to give back."""


class VirtualMachine:
    """The sockets of one process of a run; `wake` is called when one of them is ready for something."""

    def __init__(self, wires: Wires, address: str, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.wires = wires
        self.address = address
        self.now = clock
        self.wake = wake
        self.wait_s = 0.0
        """For how long the last one who asked would have waited."""
        self.sockets: dict[VirtualSocket, None] = {}

    def selector(self) -> _VirtualSelector:
        return _VirtualSelector(self)

    def socket(self, family: int) -> VirtualSocket:
        del family
        return VirtualSocket(self)

    def listen(self, host: str, port: int) -> VirtualSocket:
        del port
        if host in self.wires.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        listener = self.wires.listeners[host] = VirtualSocket(self)
        return listener

    def lookups(self) -> _KnownHosts:
        return _KnownHosts()

    def die(self) -> None:
        """The process is dead: its system closes what it had open."""
        for each in list(self.sockets):
            each.close()
