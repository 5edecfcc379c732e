"""The address that others use for an instance: the configured one, else where it listens, else what its router sees."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from kvbaton.config import is_loopback
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.discovery.messages import check_http_address
from kvbaton.errors import AddressError, ConfigError

__all__ = ["advertised_host", "is_wildcard", "numeric_host"]

_SOME_PORT = 1


def is_wildcard(host: str) -> bool:
    """Whether listening on `host` means every address of this machine; no peer can dial such an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host in ("", "*")


def numeric_host(host: str, option: str = "--host") -> str:
    """The IP address of `host`, an IPv4 one where it has both kinds. Raises ConfigError, naming `option`."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{option} is {host!r}, for which no address is found ({error}); give an IP address") from error
    addresses = sorted(found, key=lambda entry: entry[0] is not socket.AF_INET)
    return str(addresses[0][4][0])


def advertised_host(host: str, given: str | None = None, routers: Sequence[str] = ()) -> str:
    """Where others reach an instance that listens on `host`: `given`, else `host` itself.

    When that is every address of this machine, it is the one from which the first router that has a route is reached; no
    packet is sent to find out. Raises ConfigError when there is none, or when others could not use what was found.
    """
    if given is not None:
        return _usable(given, "--advertise-host")
    if not is_wildcard(host):
        return _usable(host, "--host")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for router in routers:
        found = _own_address_towards(router, family)
        if found is not None:
            return found
    routes = f"; no route leads from there to {' or '.join(routers)}" if routers else ""
    raise ConfigError(
        f"--host is {host!r}, every address of this machine{routes}; name the one under which others reach it with"
        " --advertise-host"
    )


def _usable(host: str, option: str) -> str:
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if is_wildcard(host):
        raise ConfigError(f"{option} is {host!r}, which others cannot reach; name an address or a host name of this machine")
    try:
        is_control = ControlAddress.parse(str(ControlAddress.of(host, _SOME_PORT))).host == host
    except AddressError:
        is_control = False
    if not is_control or check_http_address(f"{in_url(host)}:{_SOME_PORT}") is not None:
        raise ConfigError(f"{option} is {host!r}, which is no IP address and no host name")
    address = numeric_host(host, option)
    if address != host and is_loopback(address) and not is_loopback(host):
        raise ConfigError(
            f"{option} is {host!r}, which means {address} on this machine, and something else elsewhere; give the IP address"
            " under which others reach it with --advertise-host"
        )
    return address if ":" in address else host


def _own_address_towards(router: str, family: int) -> str | None:
    """The address of this machine that traffic to `router` would come from; None without a route."""
    name, _, port = router.rpartition(":")
    try:
        *_, address = socket.getaddrinfo(name.strip("[]"), int(port), family, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            found = str(probe.getsockname()[0])
    except (OSError, ValueError):
        return None
    return None if is_wildcard(found) else found
