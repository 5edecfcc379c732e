"""Two hosts on one machine: this network namespace and another, joined by a link that is a thread of the tests.

Both ends are TUN devices, so what crosses the link is real IP packets, which the link can hold up, lose, or stop altogether.
Needs root, `ip`, `tc` and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

__all__ = ["Link", "TwoHosts", "can_have_two_hosts"]

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 9000
_MOST_WAITING = 4096


def can_have_two_hosts() -> bool:
    """Whether this process may make namespaces and devices."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and bool(shutil.which("ip")) and bool(shutil.which("tc"))


class Link:
    """Carries packets between two descriptors, each `delay_s` later; loses a part of them; carries none while `is_cut`."""

    def __init__(self, ends: tuple[int, int], seed: int = 1) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self.is_cut = False
        self.carried_total = 0
        self.lost_total = 0
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._stop_fds = os.pipe()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        os.write(self._stop_fds[1], b"x")
        self._thread.join(10)
        for fd in self._stop_fds:
            os.close(fd)

    def _run(self) -> None:
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else 1.0
            ready, _, _ = select.select([*self._other, self._stop_fds[0]], [], [], wait_s)
            if self._stop_fds[0] in ready:
                return
            for fd in ready:
                self._take(fd)
            self._deliver(time.monotonic())

    def _take(self, fd: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(fd, _MTU + 64)
            except BlockingIOError:
                return
            if self.is_cut or self._random.random() < self.loss or len(self._waiting) >= _MOST_WAITING:
                self.lost_total += 1
                continue
            to = self._towards(fd, packet)
            if to is not None:
                heapq.heappush(self._waiting, (time.monotonic() + self.delay_s, next(self._numbers), to, packet))

    def _towards(self, fd: int, packet: bytes) -> int | None:  # noqa: ARG002 - a switch needs it
        """The descriptor at which a packet leaves; None for one that goes nowhere."""
        return self._other[fd]

    def _deliver(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self._waiting)
            if not self.is_cut:
                with contextlib.suppress(OSError):
                    os.write(fd, packet)
                    self.carried_total += 1


class TwoHosts:
    """This host at `here` and another at `there`, with a `link` between them; both call the device to it `device`."""

    def __init__(self) -> None:
        token = secrets.token_hex(3)
        net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250) + 1}"
        self.here, self.there = f"{net}.1", f"{net}.2"
        self.namespace = f"kvb-{token}"
        self.device, moving = f"kvb{token}0", f"kvb{token}1"
        _run("ip", "netns", "add", self.namespace)
        try:
            self._fds = (_tun(self.device), _tun(moving))
            _run("ip", "link", "set", moving, "netns", self.namespace, "name", self.device)
            _run(*self.command("ip", "link", "set", "lo", "up"))
            self._set_up((), self.here, self.there)
            self._set_up(self.command(), self.there, self.here)
        except BaseException:
            _run("ip", "netns", "del", self.namespace)
            raise
        self.link = Link(self._fds)

    def command(self, *arguments: str) -> tuple[str, ...]:
        """A command, to be run on the other host."""
        return ("ip", "netns", "exec", self.namespace, *arguments)

    def limit_rate(self, rate: str) -> None:
        """Let the other host send no faster than `rate`, such as `40mbit`, with a token bucket."""
        bucket = ("rate", rate, "burst", "64kb", "latency", "200ms")
        _run(*self.command("tc", "qdisc", "replace", "dev", self.device, "root", "tbf", *bucket))

    def mend(self) -> None:
        """Make the link fast, whole and near again."""
        self.link.delay_s, self.link.loss, self.link.is_cut = 0.0, 0.0, False
        _run(*self.command("tc", "qdisc", "replace", "dev", self.device, "root", "pfifo"))

    def close(self) -> None:
        """Take everything down."""
        self.link.close()
        for fd in self._fds:
            os.close(fd)
        _run("ip", "netns", "del", self.namespace)

    def _set_up(self, prefix: tuple[str, ...], address: str, peer: str) -> None:
        _run(*prefix, "ip", "address", "add", address, "peer", peer, "dev", self.device)
        _run(*prefix, "ip", "link", "set", self.device, "mtu", str(_MTU), "up")


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
