"""How both ends of a tcp connection use their sockets: set up alike, and with pieces of memory that are sent or filled in
order, up to a thousand per system call, with no object for each. Over TLS it is one record of 16 KiB per call of OpenSSL, which
encrypts from, and decrypts into, the memory itself where a piece holds a few; smaller pieces pass through a buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import socket
import ssl
from collections.abc import Callable
from typing import NoReturn, cast

from kvbaton.transport.base import Region
from kvbaton.transport.runs import MAX_SLICE_RUNS, Loops
from kvbaton.transport.tcp import wire
from kvbaton.transport.tcp.vectors import LoopVectors, Vectors

__all__ = ["LOW_WATER_BYTES", "TLS_ROOM_BYTES", "TlsCalls", "VectorCalls", "tune"]

LOW_WATER_BYTES = 1 << 20
"""How much a socket that is sure to bring more is to have before it wakes its thread."""

TLS_ROOM_BYTES = 32 << 10
"""A record that TLS has read in part does not come again: what is left on the wire may be so much less."""

_RECORD_BYTES = 16 << 10
_ROOM_BYTES = 16 * _RECORD_BYTES
_DIRECT_BYTES = 4 * _RECORD_BYTES
_TLS_TURN_BYTES = 1 << 20
_WRITABLE = 0x200
_SENDS, _RECEIVES = 0, 1
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def tune(sock: socket.socket) -> None:
    """Make `sock` non-blocking, prompt, and aware of hosts that vanish; one that is already broken shows when it is used."""
    sock.setblocking(False)
    # Requests are short and must not wait for an acknowledgement; a host that lost its power sends no FIN.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class _MessageHead(ctypes.Structure):
    """`struct msghdr` of Linux on 64 bits."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class VectorCalls:
    """`sendmsg` and `recvmsg` of the C library, bound once; for one thread. `loops` lay out what is sent and filled."""

    _sees_bytes = True
    """Whether the system's calls bring what the peer has sent, which a loop in C may look at."""

    def __init__(self, loops: Loops | None = None) -> None:
        self.loops = loops
        libc = ctypes.CDLL(None, use_errno=True)
        self._head = _MessageHead()
        self._calls = (libc.sendmsg, libc.recvmsg)
        for call in self._calls:
            call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
            call.restype = ctypes.c_ssize_t

    def send(self, sock: socket.socket, vectors: Vectors) -> int:
        """Send as much as the socket takes now; returns how many bytes. Raises OSError, BlockingIOError when it takes none."""
        return self._move(_SENDS, sock, vectors)

    def receive(self, sock: socket.socket, vectors: Vectors) -> int:
        """Fill as much as has come; 0 when the other end has closed. Raises OSError, BlockingIOError when nothing has come."""
        return self._move(_RECEIVES, sock, vectors)

    def answer_read(self, sock: socket.socket, region: Region, kept: LoopVectors | None) -> tuple[int, LoopVectors] | None:
        """Take the next request off a socket, if it is a whole one to read pieces of `region`, and begin to send the reply.

        Returns how many bytes it had, and the reply, in `kept` where there is room for it. None, with nothing taken, where the
        request is anything else, and where there is no loop to look. Raises ConnectionAbortedError.
        """
        if self.loops is None or not self._sees_bytes:
            return None
        reply = LoopVectors(self.loops, MAX_SLICE_RUNS) if kept is None else kept
        given = (wire.MAX_PIECES, wire.MAX_PAYLOAD_BYTES, region.address, region.region_bytes)
        taken = self.loops.answer_read(sock.fileno(), self._scratch, *given, reply.place, reply.most_pieces)
        if -wire.MAX_PIECES <= taken < 0:
            reply = LoopVectors(self.loops, -taken)
            taken = self.loops.answer_read(sock.fileno(), self._scratch, *given, reply.place, reply.most_pieces)
        if taken < 0:
            raise ConnectionAbortedError("a request that was there could not be taken")
        return (taken, reply) if taken else None

    def begin_reply(self, sock: socket.socket, target: Vectors) -> int:
        """Take the head of the reply that `target` was laid out for, and fill as much as has come; the bytes of both.

        0, with nothing taken, where the head is another or not whole, and where there is no loop to look. Raises OSError,
        BlockingIOError when nothing has come.
        """
        if not self._sees_bytes or not isinstance(target, LoopVectors):
            return 0
        count = int(target.loops.begin_reply(sock.fileno(), target.place))
        return count if count >= 0 else _raise(-count)

    @functools.cached_property
    def _scratch(self) -> ctypes.Array[ctypes.c_char]:
        """Room for the largest request."""
        return (ctypes.c_char * (wire.REQUEST_BYTES + wire.MAX_PIECES * wire.PIECE_BYTES))()

    def _move(self, which: int, sock: socket.socket, vectors: Vectors) -> int:
        if isinstance(vectors, LoopVectors):
            count = int(vectors.loops.move_vectors(sock.fileno(), vectors.place, which == _SENDS))
            return count if count >= 0 else _raise(-count)
        self._head.pieces, self._head.piece_count = vectors.head()
        count = int(self._calls[which](sock.fileno(), ctypes.addressof(self._head), _FLAGS))
        if count < 0:
            _raise(ctypes.get_errno())
        vectors.advance(count)
        return count


def _raise(code: int) -> NoReturn:
    if code in (errno.EAGAIN, errno.EINTR):
        raise BlockingIOError(code, os.strerror(code))
    raise OSError(code, os.strerror(code))


class TlsCalls(VectorCalls):
    """The same over TLS sockets that do not block; for one thread.

    A piece that holds a few records is encrypted from where it lies, and decrypted to where it belongs. A record that OpenSSL
    could not send must be offered again with the same bytes: what is gathered depends on the place in `vectors` alone.
    """

    _sees_bytes = False

    def __init__(self, loops: Loops | None = None) -> None:
        super().__init__(loops)
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._room_address = ctypes.addressof((ctypes.c_char * _ROOM_BYTES).from_buffer(self._room))

    def send(self, sock: socket.socket, vectors: Vectors) -> int:
        """Send as much as the socket takes now, within a turn; the errors are those of a plain socket, or SSLError."""
        assert isinstance(sock, ssl.SSLSocket)  # noqa: S101
        moved, is_blocked = 0, False
        while vectors.remaining_bytes and moved < _TLS_TURN_BYTES and not is_blocked:
            address, size = vectors.first()
            is_direct = size >= _DIRECT_BYTES
            data = _memory(address, min(size, _TLS_TURN_BYTES)) if is_direct else self._gather(vectors)
            count, is_blocked = _repeat(sock.write, data)
            if is_blocked and not count and not moved:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            vectors.advance(count)
            moved += count
        return moved

    def receive(self, sock: socket.socket, vectors: Vectors) -> int:
        """Fill as much as has come, within a turn; 0 when the other end has closed."""
        assert isinstance(sock, ssl.SSLSocket)  # noqa: S101

        def read(part: memoryview) -> int:
            # Given a buffer, it returns the number of bytes, which its declaration does not show.
            return cast(int, sock.read(len(part), part))

        moved, is_blocked, count = 0, False, 1
        while vectors.remaining_bytes and moved < _TLS_TURN_BYTES and count and not is_blocked:
            address, size = vectors.first()
            is_direct = size >= _DIRECT_BYTES
            whole = _memory(address, min(size, _TLS_TURN_BYTES)) if is_direct else self._room
            room = whole if is_direct else whole[: min(_ROOM_BYTES, vectors.remaining_bytes)]
            count, is_blocked = _repeat(read, room)
            if is_blocked and not count and not moved:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if not is_direct:
                self._scatter(vectors, count)
            vectors.advance(count)
            moved += count
        return moved

    def _gather(self, vectors: Vectors) -> memoryview:
        at = 0
        for address, size in vectors.peek(_ROOM_BYTES):
            ctypes.memmove(self._room_address + at, address, size)
            at += size
        return self._room[:at]

    def _scatter(self, vectors: Vectors, count: int) -> None:
        at = 0
        for address, size in vectors.peek(count):
            ctypes.memmove(address, self._room_address + at, size)
            at += size


def _repeat(call: Callable[[memoryview], int], data: memoryview) -> tuple[int, bool]:
    """Send, or fill, `data` record by record; returns the bytes, and whether the socket would have blocked."""
    at, size = 0, len(data)
    try:
        while at < size:
            count = call(data[at:] if at else data)
            if not count:
                break
            at += count
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return at, True
    return at, False


_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memory_view.restype = ctypes.py_object


def _memory(address: int, size: int) -> memoryview:
    """Memory as Python's sockets take it; the maker of the `Vectors` keeps it alive."""
    view: memoryview = _memory_view(address, size, _WRITABLE)
    return view
