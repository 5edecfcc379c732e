"""The instance's voice: registers with every router, keeps sending heartbeats, and says goodbye. On a thread of its own.

A thread is enough where nothing holds the interpreter for long. Where an engine may, `SteadyAnnouncer` of
`discovery/steady.py` sends from a process of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from kvbaton.core.auth import Seal
from kvbaton.discovery.advice import DEFAULT_ADVISE_AFTER_S, Adviser
from kvbaton.discovery.heartbeats import Errand, Heartbeats
from kvbaton.discovery.messages import Registration, check_http_address, encode_registration
from kvbaton.errors import ConfigError

__all__ = ["Announcer", "DEFAULT_HEARTBEAT_S", "make_errand"]

DEFAULT_HEARTBEAT_S = 1.5
"""Real routers forget an instance 4 to 5 s after its last message; at this interval one lost heartbeat is harmless."""

_LONGEST_HEARTBEAT_S = 3.0
_LOOK_S = 0.25
_JOIN_S = 5.0


def make_errand(
    registration: Registration, routers: Sequence[str], heartbeat_s: float, cluster_key: bytes | None = None
) -> Errand:
    """What heartbeats are to say. Raises ConfigError for a router that is no host:port, or an interval that is too long."""
    for router in routers:
        wrong = check_http_address(router)
        if wrong is not None:
            raise ConfigError(f"router address {router!r} {wrong}; give the router's discovery address as host:port")
    if not 0 < heartbeat_s <= _LONGEST_HEARTBEAT_S:
        raise ConfigError(f"heartbeat_s is {heartbeat_s}; it must be above 0 and at most 3, routers forget silent instances")
    seal = Seal(cluster_key)
    hello = encode_registration(msgspec.structs.replace(registration, answer=True, bye=False), seal)
    goodbye = encode_registration(msgspec.structs.replace(registration, answer=False, bye=True), seal)
    return Errand(hello, goodbye, tuple(dict.fromkeys(routers)), heartbeat_s)


class Announcer:
    """Registers `registration` with every router from `start` on, until `stop`.

    Start it when the engine is healthy: a registration means "send me requests". `has_requests` tells whether any has come.
    """

    def __init__(
        self,
        registration: Registration,
        routers: Sequence[str],
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_requests: Callable[[], bool] | None = None,
        advise_after_s: float = DEFAULT_ADVISE_AFTER_S,
        cluster_key: bytes | None = None,
    ) -> None:
        self._errand = make_errand(registration, routers, heartbeat_s, cluster_key)
        self._adviser = Adviser(registration, has_requests, advise_after_s)
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to register; returns at once, whether or not a router is there."""
        if self._thread is None and self._errand.routers:
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
        clock = self._clock
        with Heartbeats(self._errand, lambda news: self._adviser.hear(news, clock()), clock()) as beats:
            while not self._stopping.is_set():
                due = beats.turn(clock())
                self._adviser.advise(clock())
                self._stopping.wait(min(_LOOK_S, max(0.0, due - clock())))
            beats.say_goodbye(clock())
