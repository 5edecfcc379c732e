"""Heartbeats to routers: the links and the loop, and a small program that beats on behalf of another process.

Run as `python -m kvbaton.discovery.beating`, it reads its orders from standard input, one JSON line, and beats until that
is closed; then it says goodbye. Every further byte is a sign that the instance lives. An instance whose interpreter stands
still for a while keeps its registration; one that gave no sign for `stall_s` is taken off, and put back at the next sign.
Imports nothing but the standard library and zmq, so that it starts quickly and stays small.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

__all__ = ["Beats", "main"]

_logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_COMPLAIN_AFTER_S = 5.0
_LINGER_MS = 300
_MAX_ORDERS_BYTES = 1024 * 1024


class _Link:
    """One router: its socket, when the next message is due, and whether it was reached last time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: str, now: float) -> None:
        self.router = router
        self.due = now
        self.away_since: float | None = now
        self.complained = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        self._socket.setsockopt(zmq.SNDHWM, 4)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.IPV6, int(router.startswith("[")))
        self._socket.connect(f"tcp://{router}")

    def send(self, frame: bytes) -> bool:
        """Hand one frame over; False when the router cannot be reached now."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Flush what was sent within the linger time, and close."""
        self._socket.close()


class Beats:
    """Sends `hello` to every router at once and every `heartbeat_s`, and `goodbye` at the end. One thread uses it.

    Each router has its own socket, and a send never waits: a router that is away holds up no other, and nothing stale
    queues up for it.
    """

    def __init__(
        self,
        name: str,
        routers: Sequence[str],
        hello: bytes,
        goodbye: bytes,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._hello = hello
        self._goodbye = goodbye
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._context = zmq.Context(io_threads=1)
        self._links = [_Link(self._context, router, clock()) for router in routers]

    def beat(self) -> float:
        """Send what is due; how long nothing is due after it."""
        for link in self._links:
            try:
                self._beat(link, self._clock())
            except zmq.ZMQError:
                link.due = self._clock() + self._heartbeat_s
                _logger.exception("discovery: heartbeat to router %s failed; trying again", link.router)
        next_due = min((link.due for link in self._links), default=self._clock() + self._heartbeat_s)
        return min(self._heartbeat_s, max(0.0, next_due - self._clock()))

    def say_goodbye(self) -> None:
        """Tell every router that can be reached that the instance leaves; the next beat is due at once."""
        for link in self._links:
            link.send(self._goodbye)
            link.due = self._clock()

    def close(self) -> None:
        """Flush what was sent, and give the sockets back."""
        for link in self._links:
            link.close()
        self._context.term()

    def _beat(self, link: _Link, now: float) -> None:
        if now < link.due:
            return
        if link.send(self._hello):
            link.due = now + self._heartbeat_s
            if link.away_since is not None:
                _logger.info("discovery: %s registers with router %s", self._name, link.router)
            link.away_since, link.complained = None, False
            return
        link.due = now + min(_RETRY_S, self._heartbeat_s)
        link.away_since = now if link.away_since is None else link.away_since
        if not link.complained and now - link.away_since >= _COMPLAIN_AFTER_S:
            link.complained = True
            _logger.warning(
                "discovery: router %s has not been reachable for %.0f s; is it running, and is this its discovery port?"
                " Trying on.",
                link.router,
                now - link.away_since,
            )


def main() -> int:
    """Beat for the process at the other end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    orders = _read_orders()
    beats = Beats(
        orders["name"],
        orders["routers"],
        bytes.fromhex(orders["hello"]),
        bytes.fromhex(orders["goodbye"]),
        orders["heartbeat_s"],
    )
    try:
        _beat_while_it_lives(beats, orders["name"], orders["stall_s"])
        beats.say_goodbye()
    finally:
        beats.close()
    return 0


def _read_orders() -> dict[str, Any]:
    content = b""
    while b"\n" not in content:
        piece = os.read(0, 65536)
        content += piece
        if not piece or len(content) > _MAX_ORDERS_BYTES:
            sys.exit("no orders; this program is started by an instance")
    orders: dict[str, Any] = json.loads(content.partition(b"\n")[0])
    return orders


def _beat_while_it_lives(beats: Beats, name: str, stall_s: float) -> None:
    last_sign, is_stalled = time.monotonic(), False
    while True:
        wait_s = stall_s if is_stalled else beats.beat()
        if select.select([0], [], [], wait_s)[0]:
            if not os.read(0, 65536):
                return
            last_sign, is_stalled = time.monotonic(), False
        elif not is_stalled and time.monotonic() - last_sign >= stall_s:
            is_stalled = True
            _logger.warning("discovery: %s has given no sign of life for %g s and is taken off", name, stall_s)
            beats.say_goodbye()


if __name__ == "__main__":
    sys.exit(main())
