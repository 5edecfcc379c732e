"""How both ends of a tcp connection set their sockets up."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["tune"]


def tune(sock: socket.socket) -> None:
    """Make `sock` non-blocking, prompt, and aware of hosts that vanish; one that is already broken shows when it is used."""
    sock.setblocking(False)
    # Requests are short and must not wait for an acknowledgement; a host that lost its power sends no FIN.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
