"""Finding ports that are free now, below the range that the kernel hands out for outgoing connections."""

from __future__ import annotations

import errno
import random
import socket

from kvbaton.errors import ConfigError

__all__ = ["PortPicker", "check_port", "check_port_free"]

_FIRST, _LAST = 10_000, 32_767
_TRIES = 1000
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104


class PortPicker:
    """Hands out free ports, each at most once."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._random = random.Random()

    def pick(self, count: int = 1) -> int:
        """A port that no process listens on, on any address, and that was not handed out before; the first of `count`."""
        for _ in range(_TRIES):
            port = self._random.randint(_FIRST, _LAST - count + 1)
            ports = range(port, port + count)
            if self._given.isdisjoint(ports) and all(map(_is_free, ports)):
                self._given.update(ports)
                return port
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
