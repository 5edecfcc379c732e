"""Under which address an instance is known: given, bound, or found on the route to its router; and what no peer could use."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from kvbaton.discovery.advertise import advertised_host, is_wildcard, numeric_host
from kvbaton.errors import ConfigError

NAMES = {"pd.example": ["2001:db8::7", "10.0.0.7"], "six.example": ["2001:db8::6"], "debian": ["127.0.1.1"]}
WILDCARDS = ["0.0.0.0", "::"]  # noqa: S104


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few names that mean the same on every machine."""
    real = socket.getaddrinfo

    def find(host: str, *arguments: Any, **named: Any) -> list[Any]:
        if host not in NAMES:
            return list(real(host, *arguments, **named))
        return [found for address in NAMES[host] for found in real(address, *arguments, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", find)


def test_the_given_address_wins_and_else_it_is_where_it_listens() -> None:
    assert advertised_host("127.0.0.1") == "127.0.0.1"
    assert advertised_host("10.1.2.3", "10.9.9.9") == "10.9.9.9"
    assert advertised_host("0.0.0.0", "127.0.0.1", ["10.0.0.1:8001"]) == "127.0.0.1"  # noqa: S104
    assert advertised_host("localhost") == "localhost"
    assert advertised_host("::1") == advertised_host("::", "[::1]") == "::1"


def test_a_name_stays_a_name_unless_only_ipv6_knows_it() -> None:
    assert advertised_host("10.0.0.7", "pd.example") == "pd.example"
    assert numeric_host("pd.example") == "10.0.0.7"
    assert advertised_host("::", "six.example") == "2001:db8::6"


@pytest.mark.parametrize("host", [*WILDCARDS, "[::]", "", "*"])
def test_a_wildcard_address_cannot_be_advertised(host: str) -> None:
    assert is_wildcard(host)
    with pytest.raises(ConfigError, match="name the one under which others reach it with --advertise-host"):
        advertised_host(host)
    with pytest.raises(ConfigError, match=r"--advertise-host is .* others cannot reach"):
        advertised_host("127.0.0.1", host)


def test_the_route_to_a_router_decides_which_address_of_this_machine_it_is() -> None:
    assert advertised_host("0.0.0.0", None, ["127.0.0.1:8001"]) == "127.0.0.1"  # noqa: S104
    with pytest.raises(ConfigError, match=r"no route leads from there to no\.such\.name\.invalid:1 or \[::1\]:2;"):
        advertised_host("0.0.0.0", None, ["no.such.name.invalid:1", "[::1]:2"])  # noqa: S104


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="THIS MACHINE HAS NO IPv6: not tried")
def test_the_route_to_a_router_on_ipv6_decides_too_and_one_on_ipv4_cannot() -> None:
    assert advertised_host("::", None, ["127.0.0.1:8001", "[::1]:8001"]) == "::1"
    with pytest.raises(ConfigError, match="no route leads"):
        advertised_host("::", None, ["127.0.0.1:8001"])


def test_finding_out_sends_no_packet() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as router:
        router.bind(("127.0.0.1", 0))
        router.setblocking(False)
        assert advertised_host("0.0.0.0", None, [f"127.0.0.1:{router.getsockname()[1]}"]) == "127.0.0.1"  # noqa: S104
        with pytest.raises(BlockingIOError):
            router.recv(1)


@pytest.mark.parametrize("host", ["a b", "a,b:1", "h___h/", "http://h", "::1%eth0", "no.such.name.invalid", "x" * 300])
def test_what_is_no_host_is_refused_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--advertise-host is "):
        advertised_host("127.0.0.1", host)


def test_a_name_that_only_this_machine_takes_for_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--advertise-host is 'debian', which means 127\.0\.1\.1 on this machine"):
        advertised_host("0.0.0.0", "debian")  # noqa: S104
    with pytest.raises(ConfigError, match=r"--host is 'debian'.*--advertise-host"):
        advertised_host("debian")
