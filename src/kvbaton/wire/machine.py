"""What connections need of the machine that they are made on: time, sockets, a selector, and where hosts are.

The simulator passes a virtual machine: then the code that production runs with is what a run of it is about.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvbaton.wire.lookup import Found, Lookups

__all__ = ["THIS_MACHINE", "HostLookups", "Machine", "StreamSelector", "StreamSocket", "ThisMachine", "listen_on"]

_BACKLOG = 512


class StreamSocket(Protocol):
    """A TCP socket that does not block, as far as it is used here; those of the system are such."""

    def fileno(self) -> int:
        """The number that a selector knows it by."""

    def setblocking(self, flag: bool, /) -> None:
        """Whether its calls wait."""

    @property
    def setsockopt(self) -> Callable[..., None]:
        """Set an option, of a level and a name."""

    @property
    def getsockopt(self) -> Callable[..., Any]:
        """An option, of a level and a name: a number, or bytes where their length is given."""

    def connect_ex(self, address: Any, /) -> int:
        """Begin to connect: 0, or the number of an error."""

    def accept(self) -> tuple[StreamSocket, Any]:
        """The next connection, and the address that it comes from. Raises OSError."""

    def recv(self, bufsize: int, /) -> bytes:
        """What has arrived, at most so much; nothing at the end. Raises OSError."""

    def send(self, data: bytes | bytearray, /) -> int:
        """Send as much as there is room for, and return how much that is. Raises OSError."""

    def shutdown(self, how: int, /) -> None:
        """Send no more. Raises OSError."""

    def close(self) -> None:
        """Give it back. Idempotent."""


class StreamSelector(Protocol):
    """A selector that another one can wait for."""

    def fileno(self) -> int:
        """The number that another selector knows it by."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Wait for events of it, too. Raises KeyError for what is registered, ValueError for what cannot be."""

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Wait for it no longer. Raises KeyError."""

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Wait for other events of it. Raises KeyError."""

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """How it is registered. Raises KeyError."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready, after a wait of at most `timeout`."""

    def close(self) -> None:
        """Give it back. Idempotent."""


class HostLookups(Protocol):
    """Finds hosts, without a wait."""

    @property
    def fd(self) -> int:
        """The descriptor that is readable when a lookup has ended."""

    def find(self, host: str, port: int) -> Found | None:
        """Where `host` is; None while that is being looked up."""

    def clear(self) -> None:
        """Make `fd` unreadable again."""

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""


class Machine(Protocol):
    """The machine that connections are made on."""

    def now(self) -> float:
        """Monotonic seconds."""

    def selector(self) -> StreamSelector:
        """A selector of its sockets."""

    def socket(self, family: int) -> StreamSocket:
        """A new socket. Raises OSError."""

    def listen(self, host: str, port: int) -> StreamSocket:
        """A listening socket that does not block. Raises OSError or UnicodeError."""

    def lookups(self) -> HostLookups:
        """What finds hosts."""


class ThisMachine:
    """The system's own."""

    def now(self) -> float:
        return time.monotonic()

    def selector(self) -> StreamSelector:
        return selectors.DefaultSelector()

    def socket(self, family: int) -> StreamSocket:
        return socket.socket(family, socket.SOCK_STREAM)

    def listen(self, host: str, port: int) -> StreamSocket:
        return listen_on(host, port)

    def lookups(self) -> HostLookups:
        return Lookups()


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket that does not block. Raises OSError or UnicodeError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


THIS_MACHINE: Machine = ThisMachine()
"""The one that this process runs on."""
