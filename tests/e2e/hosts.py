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
    device: str
    ipv4: str
    ipv6: str

    def address(self, is_ipv6: bool = False) -> str:
        """Its address of one kind."""
        return self.ipv6 if is_ipv6 else self.ipv4

    def command(self, *arguments: str) -> list[str]:
        """A command, to be run on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments] if self.namespace else list(arguments)

    def named_command(self, *arguments: str) -> list[str]:
        """The same, with a host name of its own: processes of hosts with different names do not take each other for neighbours.

        Every step becomes the next one, so that the command has the id of the process that is started.
        """
        name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.device]
        return self.command(*name, *arguments)


class Switch(Link):
    """Carries packets between any of several descriptors, by their addresses."""

    def __init__(self, addresses: Mapping[bytes, int]) -> None:
        # Before the thread of the link starts, which reads them.
        self._addresses = dict(addresses)
        self._apart: set[tuple[int | None, int | None]] = set()
        self.stopped_total = 0
        """Packets that were lost because their hosts were separated."""
        first, *_ = fds = sorted(set(addresses.values()))
        super().__init__((first, first))
        self._other = dict.fromkeys(fds, first)

    def separate(self, one: Host, other: Host) -> None:
        """Carry nothing between two hosts."""
        self.stop(one, other)
        self.stop(other, one)

    def stop(self, sender: Host, receiver: Host) -> None:
        """Carry nothing from one host to another."""
        # A new set: the thread of the link reads the old one meanwhile.
        self._apart = self._apart | {(self._at(sender), self._at(receiver))}

    def join(self) -> None:
        """Carry packets between all hosts again."""
        self._apart = set()

    def move(self, address: str, source: Host, target: Host) -> None:
        """Give an IPv4 address of one host to another, as a virtual address moves; connections to it are not notified."""
        _run(*source.command("ip", "address", "del", f"{address}/24", "dev", source.device))
        _run(*target.command("ip", "address", "add", f"{address}/24", "dev", target.device))
        self._addresses[ipaddress.ip_address(address).packed] = self._addresses[ipaddress.ip_address(target.ipv6).packed]

    def _at(self, host: Host) -> int | None:
        return self._addresses.get(ipaddress.ip_address(host.ipv6).packed)

    def _towards(self, fd: int, packet: bytes) -> int | None:
        version = packet[0] >> 4 if packet else 0
        if version not in (_IPV4, _IPV6):
            return None
        to = self._addresses.get(packet[16:20] if version == _IPV4 else packet[24:40])
        if (fd, to) in self._apart:
            self.stopped_total += 1
            return None
        return to


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
            device = f"kvb{token}{index}"
            host = Host(f"kvb-{token}-{index}" if index else "", device, f"{net}.{index + 1}", ipv6)
            if index:
                _run("ip", "netns", "add", host.namespace)
                parts.callback(_run, "ip", "netns", "del", host.namespace)
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
