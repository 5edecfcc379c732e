"""Finding ports that are free now, and stay so until they are used: below those that the kernel hands out for outgoing
connections, and below those on which transports listen, which they choose by themselves.

Between the choice of a port and its use a process is started, which takes seconds. Meanwhile another process may look for
ports too (a second `kvbaton up`, tests), so each is reserved: by a socket bound to a name with the port in it, among the
abstract names of Linux. They belong to a network namespace, as ports do; no file is left behind; and the system drops
those of a process that ends. Other systems have no such names, and reserve within the process only.
"""

from __future__ import annotations

import errno
import random
import socket
import threading
import weakref
from collections.abc import Iterable

from kvbaton.errors import ConfigError

__all__ = ["PortPicker", "check_port", "check_port_free"]

_FIRST, _LAST = 10_000, 19_999
_TRIES = 1000
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104


class _Reservations:
    """The ports that pickers of this process have handed out, kept from pickers of other processes on the same network."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a picker that is collected gives back wherever its thread is
        self._held: dict[int, socket.socket | None] = {}

    def take(self, ports: range) -> bool:
        """Reserve all of these, or none."""
        with self._lock:
            for port in ports:
                if port in self._held or not self._hold(port):
                    self._drop(range(ports.start, port))
                    return False
            return True

    def give_back(self, ports: Iterable[int]) -> None:
        """Let other pickers have them."""
        with self._lock:
            self._drop(ports)

    def _hold(self, port: int) -> bool:
        """Take the name of a port; only a name that is in use refuses it, since a reservation is help, not a promise."""
        name = None
        try:
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            name.bind(f"\0kvbaton-port-{port}")
        except OSError as error:
            if name is not None:
                name.close()
            if error.errno == errno.EADDRINUSE:
                return False
            name = None
        self._held[port] = name
        return True

    def _drop(self, ports: Iterable[int]) -> None:
        for port in ports:
            name = self._held.pop(port, None)
            if name is not None:
                name.close()


_RESERVED = _Reservations()


class PortPicker:
    """Hands out free ports, each at most once, and no two pickers of a network the same while both live."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._random = random.Random()
        weakref.finalize(self, _RESERVED.give_back, self._given)

    def pick(self, count: int = 1) -> int:
        """A port that no process listens on, on any address, and that was not handed out before; the first of `count`."""
        for _ in range(_TRIES):
            port = self._random.randint(_FIRST, _LAST - count + 1)
            ports = range(port, port + count)
            if not _RESERVED.take(ports):
                continue
            if all(map(_is_free, ports)):
                self._given.update(ports)
                return port
            _RESERVED.give_back(ports)
        raise ConfigError(f"no free port between {_FIRST} and {_LAST}; end some servers and try again")


def check_port(port: int, option: str) -> None:
    """Raise ConfigError, naming `option`, when `port` is no port that can be listened on."""
    if not 0 < port < 65536:
        raise ConfigError(f"{option} is {port}; it must be between 1 and 65535")


def check_port_free(host: str, port: int, option: str) -> None:
    """Raise ConfigError, naming `option`, when `port` is no port, or another process listens on it."""
    check_port(port, option)
    try:
        _bind_once(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"port {port} on {host} is in use; stop what listens there or choose another with {option}"
        else:
            advice = f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --host or {option}"
        raise ConfigError(advice) from error


def _is_free(port: int) -> bool:
    """Whether every address of this host has it free: a listener on one of them prevents listening on all."""
    try:
        for host in _EVERYWHERE:
            _bind_once(host, port)
    except OSError as error:
        return error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
    return True


def _bind_once(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
