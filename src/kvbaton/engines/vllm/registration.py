"""Registration of a vLLM instance: its worker is ready long before its API, and a registration means "send me requests"."""

from __future__ import annotations

import http.client
import logging
import threading
import urllib.request
from collections.abc import Callable

from kvbaton.discovery.announcer import Announcer

__all__ = ["LateAnnouncer", "answers"]

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_ANSWER_S = 2.0
_JOIN_S = 5.0

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

    def __init__(self, announcer: Announcer, http_address: str, is_up: Callable[[str], bool] = answers) -> None:
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
        while not self._is_up(self._http_address):
            if self._stopping.wait(_LOOK_S):
                return
        if not self._stopping.is_set():
            self._announcer.start()
