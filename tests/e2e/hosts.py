"""Several hosts on one machine: a network namespace each, joined by a switch that can delay, lose and stop packets.

Like `tests/contract/two_hosts.py`, whose link carries the packets here too; a switch sends each to the host that has its
address. This process is a host itself. Every host has an IPv4 and an IPv6 address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from two_hosts import _MTU, Link, _run, _tun, can_have_two_hosts

__all__ = ["Host", "Switch", "can_have_two_hosts", "hosts"]

_IPV4, _IPV6 = 4, 6


@dataclass(frozen=True)
class Host:
    """One host, with its addresses."""

    namespace: str
    ipv4: str
    ipv6: str

    def address(self, is_ipv6: bool = False) -> str:
        """Its address of one kind."""
        return self.ipv6 if is_ipv6 else self.ipv4

    def command(self, *arguments: str) -> list[str]:
        """A command, to be run on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments] if self.namespace else list(arguments)


class Switch(Link):
    """Carries packets between any of several descriptors, by their addresses."""

    def __init__(self, addresses: Mapping[bytes, int]) -> None:
        self._addresses = dict(addresses)
        first, *_ = fds = sorted(set(addresses.values()))
        super().__init__((first, first))
        self._other = dict.fromkeys(fds, first)

    def _towards(self, fd: int, packet: bytes) -> int | None:  # noqa: ARG002
        version = packet[0] >> 4 if packet else 0
        if version == _IPV4:
            return self._addresses.get(packet[16:20])
        return self._addresses.get(packet[24:40]) if version == _IPV6 else None


@contextmanager
def hosts(count: int) -> Iterator[tuple[Switch, list[Host]]]:
    """This host and so many others, joined by a switch."""
    token, net = secrets.token_hex(3), f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250) + 1}"
    prefix = f"fd{secrets.token_hex(1)}:{secrets.token_hex(2)}:{secrets.token_hex(2)}"
    made, addresses = [], {}
    with ExitStack() as parts:
        for index in range(count + 1):
            # As others print it: a random group may begin with a 0.
            ipv6 = str(ipaddress.ip_address(f"{prefix}::{index + 1}"))
            host = Host(f"kvb-{token}-{index}" if index else "", f"{net}.{index + 1}", ipv6)
            if index:
                _run("ip", "netns", "add", host.namespace)
                parts.callback(_run, "ip", "netns", "del", host.namespace)
            device = f"kvb{token}{index}"
            fd = _tun(device)
            parts.callback(os.close, fd)
            if index:
                _run("ip", "link", "set", device, "netns", host.namespace)
                _run(*host.command("ip", "link", "set", "lo", "up"))
            _run(*host.command("ip", "address", "add", f"{host.ipv4}/24", "dev", device))
            _run(*host.command("ip", "-6", "address", "add", f"{host.ipv6}/64", "dev", device, "nodad"))
            _run(*host.command("ip", "link", "set", device, "mtu", str(_MTU), "up"))
            for address in (host.ipv4, host.ipv6):
                addresses[ipaddress.ip_address(address).packed] = fd
            made.append(host)
        switch = Switch(addresses)
        try:
            yield switch, made
        finally:
            with contextlib.suppress(OSError):
                switch.close()
