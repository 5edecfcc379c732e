"""Which requests of browsers are refused: those that a page of another site has sent.

A web site can make a visitor's browser send requests to any address that the browser reaches, and can point its own name at
that address to read the answers (DNS rebinding). Both show: the first in `Origin`, the second in `Host`, which then is a name
and not an IP address. Clients that are no browsers send no `Origin`, and any `Host`; so where the router listens on more than
loopback, a `Host` is checked on the page, and with an `Origin`. On loopback it is checked on every request.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from kvbaton.config import is_loopback

__all__ = ["AllowedHosts"]

_MOST_KNOWN = 256


class AllowedHosts:
    """Checks `Host` and `Origin` for a router that listens on `host`; `names` are allowed besides loopback and IP addresses."""

    def __init__(self, host: str, names: Sequence[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in (*names, host))
        self._checks_all = is_loopback(host)
        self.known: set[bytes] = set()
        """Hosts that were allowed: a request with one of them and without an `Origin` needs no other look."""

    def refusal(self, path: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Why a request is refused; None when it is not."""
        origin = headers.get(b"origin")
        host = headers.get(b"host", b"")
        if origin is None and not (self._checks_all or path == "/" or path.startswith("/page/")):
            return None
        if not self._allows(host):
            return f"Host is {host[:100].decode('latin-1')!r}, which this router is not known by; allow it with --allow-host"
        if origin is not None:
            site = origin.partition(b"://")[2]
            if site != host and not self._allows_name(_name_of(site)):
                return f"Origin is {origin[:100].decode('latin-1')!r}, another site; allow its host with --allow-host"
        if len(self.known) < _MOST_KNOWN:
            self.known.add(host)
        return None

    def _allows(self, host: bytes) -> bool:
        name = _name_of(host)
        return not host or _is_address(name) or self._allows_name(name)

    def _allows_name(self, name: str) -> bool:
        return name in self._names or is_loopback(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: bytes) -> str:
    """The name or address in `name:port`."""
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.rpartition(":")[0] if ":" in text else text
    return name.rstrip(".")
