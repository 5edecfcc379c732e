"""Frames between two processes of one instance, over a socket pair that no other process can reach.

Both ends belong to the same program, so frames are trusted; they are bounded all the same, and neither end waits for the other
without a deadline.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable

from kvbaton.errors import LocalError

__all__ = ["MAX_FRAME_BYTES", "Channel", "ChannelClosed", "ChannelStuck", "channel_pair"]

MAX_FRAME_BYTES = 1 << 30
"""No frame may be larger."""

_HEADER = struct.Struct("<Q")
_BUFFER_BYTES = 4 << 20
_FRAME_S = 60.0


class ChannelClosed(LocalError):
    """The other end is gone."""


class ChannelStuck(LocalError):
    """The other end did not take or finish a frame in time."""


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets with room for many small frames; each can be given to another process."""
    pair = socket.socketpair()
    for each in pair:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return pair


class Channel:
    """One end. Belongs to one thread at a time. `peer` names the other end in errors."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.peer = peer

    def fileno(self) -> int:
        """Readable when a frame has begun to arrive, or the other end is gone."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other one notices. Idempotent."""
        self._socket.close()

    def send(self, frame: bytes | memoryview, timeout_s: float, meanwhile: Callable[[], object] | None = None) -> None:
        """Send one frame. `meanwhile` is called while ours must wait and the other end has sent something.

        Raises ChannelClosed, or ChannelStuck when the other end takes nothing for `timeout_s`.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise ChannelStuck(f"a frame of {len(frame)} bytes for {self.peer}; at most {MAX_FRAME_BYTES} are possible")
        for part in (memoryview(_HEADER.pack(len(frame))), memoryview(frame)):
            left = part
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    self._wait_to_send(timeout_s, meanwhile)
                except OSError as error:
                    raise ChannelClosed(f"{self.peer} is gone: {error}") from error

    def receive(self, timeout_s: float) -> bytearray | None:
        """The next frame; None when none has begun to arrive in that time. Raises ChannelClosed or ChannelStuck."""
        if not self._wait_ready(select.POLLIN, timeout_s):
            return None
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        if size > MAX_FRAME_BYTES:
            raise ChannelStuck(f"a frame of {size} bytes from {self.peer}; at most {MAX_FRAME_BYTES} are possible")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytearray:
        frame = bytearray(size)
        left, until = memoryview(frame), time.monotonic() + _FRAME_S
        while left:
            try:
                count = self._socket.recv_into(left)
            except BlockingIOError:
                if not self._wait_ready(select.POLLIN, until - time.monotonic()):
                    raise ChannelStuck(f"{self.peer} began a frame and did not end it in {_FRAME_S:g} s") from None
                continue
            except OSError as error:
                raise ChannelClosed(f"{self.peer} is gone: {error}") from error
            if not count:
                raise ChannelClosed(f"{self.peer} is gone: it closed its end")
            left = left[count:]
        return frame

    def _wait_to_send(self, timeout_s: float, meanwhile: Callable[[], object] | None) -> None:
        events = select.POLLOUT | (select.POLLIN if meanwhile is not None else 0)
        ready = self._wait_ready(events, timeout_s)
        if not ready:
            raise ChannelStuck(f"{self.peer} has taken nothing for {timeout_s:g} s")
        if meanwhile is not None and ready & select.POLLIN:
            meanwhile()

    def _wait_ready(self, events: int, timeout_s: float) -> int:
        poll = select.poll()
        poll.register(self._socket, events)
        ready = poll.poll(max(0.0, timeout_s) * 1000)
        return ready[0][1] if ready else 0
