"""How both ends of a tcp connection use their sockets: set up alike, and with pieces of memory that are sent or filled in
order, up to a thousand per system call, with no object for each. Over TLS it is one record of 16 KiB per call of OpenSSL, which
encrypts from, and decrypts into, the memory itself where a piece holds a few; smaller pieces pass through a buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

import numpy as np

from kvbaton.transport.base import Runs

__all__ = ["LOW_WATER_BYTES", "TLS_ROOM_BYTES", "TlsCalls", "VectorCalls", "Vectors", "tune", "vectors_of"]

LOW_WATER_BYTES = 1 << 20
"""How much a socket that is sure to bring more is to have before it wakes its thread."""

TLS_ROOM_BYTES = 32 << 10
"""A record that TLS has read in part does not come again: what is left on the wire may be so much less."""

_MAX_PIECES = 1024
_PIECE_BYTES = 16
_RECORD_BYTES = 16 << 10
_ROOM_BYTES = 16 * _RECORD_BYTES
_DIRECT_BYTES = 4 * _RECORD_BYTES
_TLS_TURN_BYTES = 1 << 20
_WRITABLE = 0x200
_NO_PIECES = np.empty((0, 2), np.uint64)
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


class Vectors:
    """`pieces` has the shape (n, 2): address and bytes. The maker keeps the memory alive, and passes `keep` for that."""

    def __init__(self, pieces: Runs, keep: object = None) -> None:
        # A copy in any case: the next piece is shortened in place.
        self._pieces = pieces.copy() if pieces[:, 1].all() else pieces[pieces[:, 1] > 0]
        self._first = int(self._pieces.ctypes.data)
        self._keep = keep
        self._ends = self._pieces.view(np.int64)[:, 1].cumsum()
        self._index = 0
        self._done_bytes = 0
        self.total_bytes = int(self._ends[-1]) if len(self._ends) else 0

    @property
    def remaining_bytes(self) -> int:
        """Bytes that are still to be moved."""
        return self.total_bytes - self._done_bytes

    def head(self) -> tuple[int, int]:
        """Where the next pieces are described, and how many of them one call takes."""
        return self._first + self._index * _PIECE_BYTES, min(len(self._pieces) - self._index, _MAX_PIECES)

    def first(self) -> tuple[int, int]:
        """Address and bytes of the next piece."""
        address, size = self._pieces[self._index].tolist()
        return address, size

    def peek(self, most_bytes: int) -> list[list[int]]:
        """Address and bytes of the next pieces, the last one cut where they would be more than `most_bytes`."""
        left, at, found = min(most_bytes, self.remaining_bytes), self._index, []
        while left:
            # As many as there are if the others are as long as the first: making lists of all that follow would cost more.
            taken = self._pieces[at : at + 1 + left // int(self._pieces[at, 1])].tolist()
            at += len(taken)
            for address, size in taken:
                found.append([address, min(size, left)])
                left -= found[-1][1]
                if not left:
                    break
        return found

    def advance(self, count: int) -> None:
        """Leave the next `count` bytes behind."""
        self._done_bytes += count
        self._index = int(np.searchsorted(self._ends, self._done_bytes, side="right"))
        if self._index < len(self._pieces):
            left = np.uint64(int(self._ends[self._index]) - self._done_bytes)
            piece = self._pieces[self._index]
            piece[0] += piece[1] - left
            piece[1] = left


def vectors_of(head: bytes, pieces: Runs = _NO_PIECES, keep: object = None) -> Vectors:
    """A head and the pieces of memory that follow it."""
    kept = np.frombuffer(head, np.uint8)
    first = np.array([[kept.ctypes.data, len(kept)]], np.uint64)
    return Vectors(np.concatenate([first, pieces]) if len(pieces) else first, (kept, keep))


class VectorCalls:
    """`sendmsg` and `recvmsg` of the C library, bound once; for one thread."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._head = _MessageHead()
        self._calls = (libc.sendmsg, libc.recvmsg)
        for call in self._calls:
            call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
            call.restype = ctypes.c_ssize_t

    def send(self, sock: socket.socket, vectors: Vectors) -> int:
        """Send as much as the socket takes now; returns how many bytes. Raises OSError, BlockingIOError when it takes none."""
        return self._move(0, sock, vectors)

    def receive(self, sock: socket.socket, vectors: Vectors) -> int:
        """Fill as much as has come; 0 when the other end has closed. Raises OSError, BlockingIOError when nothing has come."""
        return self._move(1, sock, vectors)

    def _move(self, which: int, sock: socket.socket, vectors: Vectors) -> int:
        self._head.pieces, self._head.piece_count = vectors.head()
        count: int = self._calls[which](sock.fileno(), ctypes.addressof(self._head), _FLAGS)
        if count < 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EINTR):
                raise BlockingIOError(code, os.strerror(code))
            raise OSError(code, os.strerror(code))
        vectors.advance(count)
        return count


class TlsCalls(VectorCalls):
    """The same over TLS sockets that do not block; for one thread.

    A piece that holds a few records is encrypted from where it lies, and decrypted to where it belongs. A record that OpenSSL
    could not send must be offered again with the same bytes: what is gathered depends on the place in `vectors` alone.
    """

    def __init__(self) -> None:
        super().__init__()
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
