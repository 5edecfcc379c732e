"""Registration of a vLLM instance: its worker is ready long before its API, and a registration means "send me requests"."""

from __future__ import annotations

import http.client
import logging
import threading
import time
import urllib.request
from collections.abc import Callable

from kvbaton.discovery.announcer import Announcer

__all__ = ["LateAnnouncer", "answers"]

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_ANSWER_S = 2.0
_JOIN_S = 5.0
_ADVISE_S = 300.0
"""A vLLM that serves a large model may need minutes until its API answers; an answer that never comes needs a word."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks this host itself, whatever proxy the environment names for the world outside."""


def answers(http_address: str) -> bool:
    """Whether the API at this address says that it is healthy."""
    try:
        with _DIRECT.open(f"http://{http_address}/health", timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


class LateAnnouncer:
    """Starts `announcer` once the API at `http_address` answers; looks until then, or until `stop`."""

    def __init__(
        self,
        announcer: Announcer,
        http_address: str,
        is_up: Callable[[str], bool] = answers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._announcer = announcer
        self._http_address = http_address
        self._is_up = is_up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-registration", daemon=True)

    def start(self) -> None:
        """Begin to look; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye to the routers, and end the thread. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._announcer.stop()

    def _run(self) -> None:
        advise_at = self._clock() + _ADVISE_S
        while not self._is_up(self._http_address):
            if self._clock() >= advise_at:
                advise_at = self._clock() + _ADVISE_S
                self._advise()
            if self._stopping.wait(_LOOK_S):
                return
        if not self._stopping.is_set():
            self._announcer.start()

    def _advise(self) -> None:
        log.warning(
            "http://%s/health has not answered for %g s, so this instance is registered with no router and gets no requests"
            " from them; if its API is up, is http_address right, and does it speak HTTP? Routers speak no HTTPS to instances:"
            " start vLLM without --ssl-certfile and --ssl-keyfile, and have what is in front of the router speak it",
            self._http_address,
            _ADVISE_S,
        )
