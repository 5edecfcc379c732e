"""Host names to socket addresses, looked up on threads: a name server that does not answer must hold up no control message."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Found", "Lookups"]

_MOST_AT_ONCE = 8
_MOST_KEPT = 256
_KEEP_S = 10.0

Address = tuple[str | int, ...]
_NOWHERE: Address = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Where a host is: the family and the address to connect to, or the error that the lookup ended with."""

    family: int
    address: Address
    error: str = ""


class Lookups:
    """Finds hosts. `fd` is readable when a lookup has ended; belongs to one thread, apart from the lookups themselves."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._was_used = False
        self._found: OrderedDict[str, tuple[float, int, Address, str]] = OrderedDict()

    @property
    def fd(self) -> int:
        """The descriptor to wait on."""
        return self._near.fileno()

    def find(self, host: str, port: int) -> Found | None:
        """Where `host` is; None while that is being looked up, or too much else is."""
        if (literal := _literal(host, port)) is not None:
            return literal
        with self._lock:
            known = self._found.get(host)
            if known is not None and time.monotonic() - known[0] < _KEEP_S:
                _, family, address, error = known
                return Found(family, (address[0], port, *address[2:]) if address else (), error)
            if host not in self._running and len(self._running) < _MOST_AT_ONCE:
                self._running.add(host)
                self._was_used = True
                threading.Thread(target=self._look_up, args=(host,), name="kvbaton-lookup", daemon=True).start()
        return None

    def clear(self) -> None:
        """Make `fd` unreadable again."""
        if self._was_used:
            with contextlib.suppress(OSError):
                while self._near.recv(64):
                    pass

    def close(self) -> None:
        """Give the descriptors back. Lookups that run end by themselves. Idempotent."""
        with self._lock:
            self._near.close()
            self._far.close()

    def _look_up(self, host: str) -> None:
        family, address, error = 0, _NOWHERE, ""
        try:
            # Where a name has both kinds of addresses, IPv4, as libzmq does.
            found = min(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), key=lambda each: each[0] != socket.AF_INET)
            family, address = int(found[0]), _address_of(found[4])
        except (OSError, UnicodeError) as failure:
            error = str(failure)
        with self._lock:
            self._running.discard(host)
            self._found[host] = (time.monotonic(), family, address, error)
            self._found.move_to_end(host)
            while len(self._found) > _MOST_KEPT:
                self._found.popitem(last=False)
            with contextlib.suppress(OSError):
                self._far.send(b"\0")


def _literal(host: str, port: int) -> Found | None:
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    if version == 4:
        return Found(socket.AF_INET, (host, port))
    # A link-local address has a zone, which only the system can turn into a number; that needs no name server.
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, socket.AF_INET6, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return Found(socket.AF_INET6, _address_of(found[0][4]))
    return Found(socket.AF_INET6, (), "no such zone")


def _address_of(found: Iterable[object]) -> Address:
    """An address as the system has returned it: a host, a port, and two numbers more in IPv6."""
    return tuple(part for part in found if isinstance(part, str | int))
