"""How both ends of a tcp connection use their sockets: set up alike, and with pieces of memory that are sent or filled in
order, up to a thousand per system call, with no object for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket

import numpy as np

from kvbaton.transport.base import Runs

__all__ = ["VectorCalls", "Vectors", "tune"]

_MAX_PIECES = 1024
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
        self._pieces = np.ascontiguousarray(pieces[pieces[:, 1] > 0])
        self._keep = keep
        self._ends = np.cumsum(self._pieces[:, 1], dtype=np.int64)
        self._index = 0
        self._done_bytes = 0
        self.total_bytes = int(self._ends[-1]) if len(self._ends) else 0

    @property
    def remaining_bytes(self) -> int:
        """Bytes that are still to be moved."""
        return self.total_bytes - self._done_bytes

    def head(self) -> tuple[int, int]:
        """Where the next pieces are described, and how many of them one call takes."""
        return int(self._pieces[self._index :].ctypes.data), min(len(self._pieces) - self._index, _MAX_PIECES)

    def advance(self, count: int) -> None:
        """Leave the next `count` bytes behind."""
        self._done_bytes += count
        self._index = int(np.searchsorted(self._ends, self._done_bytes, side="right"))
        if self._index < len(self._pieces):
            left = np.uint64(int(self._ends[self._index]) - self._done_bytes)
            piece = self._pieces[self._index]
            piece[0] += piece[1] - left
            piece[1] = left


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
