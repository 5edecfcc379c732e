"""The instance's voice: one thread that registers with every router, keeps sending heartbeats, and says goodbye.

A thread of its own, so that a busy event loop or engine step costs no heartbeat. Each router has its own socket, and a
send never waits: a router that is away holds up no other, and nothing stale queues up for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec
import zmq

from kvbaton.discovery.messages import Registration, check_http_address, encode_registration
from kvbaton.errors import ConfigError

__all__ = ["Announcer", "DEFAULT_HEARTBEAT_S"]

_logger = logging.getLogger(__name__)

DEFAULT_HEARTBEAT_S = 1.5
"""Real routers forget an instance 4 to 5 s after its last message; at this interval one lost heartbeat is harmless."""

_RETRY_S = 0.1
_COMPLAIN_AFTER_S = 5.0
_LINGER_MS = 300
_JOIN_S = 5.0


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


class Announcer:
    """Registers `registration` with every router from `start` on, until `stop`.

    Start it when the engine is healthy: a registration means "send me requests".
    """

    def __init__(
        self,
        registration: Registration,
        routers: Sequence[str],
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for router in routers:
            wrong = check_http_address(router)
            if wrong is not None:
                raise ConfigError(f"router address {router!r} {wrong}; give the router's discovery address as host:port")
        if not 0 < heartbeat_s <= 3:
            raise ConfigError(
                f"heartbeat_s is {heartbeat_s}; it must be above 0 and at most 3, routers forget silent instances"
            )
        self._hello = encode_registration(msgspec.structs.replace(registration, bye=False))
        self._goodbye = encode_registration(msgspec.structs.replace(registration, bye=True))
        self._name = f"{registration.type.word} instance {registration.http_address}"
        self._routers = tuple(routers)
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to register; returns at once, whether or not a router is there."""
        if self._thread is None and self._routers:
            self._thread = threading.Thread(target=self._run, name="kvbaton-announcer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Say goodbye to every router that can be reached, and end the thread. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    @property
    def is_alive(self) -> bool:
        """Whether heartbeats are being sent."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        with zmq.Context(io_threads=1) as context:
            links = [_Link(context, router, self._clock()) for router in self._routers]
            try:
                self._beat_until_stopped(links)
                for link in links:
                    link.send(self._goodbye)
            finally:
                for link in links:
                    link.close()

    def _beat_until_stopped(self, links: list[_Link]) -> None:
        while not self._stopping.is_set():
            for link in links:
                try:
                    self._beat(link, self._clock())
                except zmq.ZMQError:
                    link.due = self._clock() + self._heartbeat_s
                    _logger.exception("discovery: heartbeat to router %s failed; trying again", link.router)
            next_due = min(link.due for link in links)
            self._stopping.wait(min(self._heartbeat_s, max(0.0, next_due - self._clock())))

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
