"""Logs for an instance's operator which routers were reached, which refuse it, and what to check when no request arrives.

Real routers never answer a registration, so an instance that they refuse cannot know it. The only sign is that no request
arrives; one warning then lists the usual causes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.discovery.heartbeats import RouterEvent, RouterEventKind
from kvbaton.discovery.messages import Registration
from kvbaton.wire.log_limit import shown

__all__ = ["DEFAULT_ADVISE_AFTER_S", "Adviser"]

_logger = logging.getLogger(__name__)

DEFAULT_ADVISE_AFTER_S = 60.0
"""An instance that has received no request logs advice so long after its registration."""


@dataclass(eq=False, repr=False)
class Adviser:
    """Logs the events of one instance's routers, and gives advice when `is_used` stays false. Belongs to one thread."""

    _registration: Registration
    _is_used: Callable[[], bool] | None = None
    _advise_after_s: float = DEFAULT_ADVISE_AFTER_S

    def __post_init__(self) -> None:
        self._name = f"{self._registration.type.word} instance {self._registration.http_address}"
        self._silent_since: dict[str, float] = {}

    def on_event(self, event: RouterEvent, now: float) -> None:
        """Log the event, and remember which routers have not answered."""
        match event.kind:
            case RouterEventKind.REACHED:
                _logger.info("discovery: %s registers with router %s", self._name, event.router)
                self._silent_since.setdefault(event.router, now)
            case RouterEventKind.AWAY:
                _logger.warning(
                    "discovery: router %s has not been reachable for %s; is it running, and is this its discovery port?"
                    " Trying on.",
                    event.router,
                    event.detail,
                )
            case RouterEventKind.WELCOME:
                self._silent_since.pop(event.router, None)
                _logger.info("discovery: router %s has taken %s in", event.router, self._name)
            case RouterEventKind.REFUSED:
                self._silent_since.pop(event.router, None)
                # The reason is what the router has sent: it must not write lines of its own into the log.
                _logger.warning("discovery: router %s refuses %s: %s", event.router, self._name, shown(event.detail))

    def advise(self, now: float) -> None:
        """Warn once about each router that has neither answered nor sent a request for too long."""
        late = [r for r, since in self._silent_since.items() if now - since >= self._advise_after_s]
        if self._is_used is None or not late:
            return
        for router in late:
            del self._silent_since[router]
        if self._is_used():
            return
        mode = self._registration.transfer_mode
        _logger.warning(
            "discovery: %s has registered with router %s for %g s, and no request has come. If clients have sent some: this"
            " instance registers with transfer_mode %s (--mode %s); a router that runs with the other mode drops it without an"
            " answer, and vllm-router keeps the mode of its first instance until it is restarted. See the router's log,"
            " whether it reaches %s, and whether the other side (%s) is registered too.",
            self._name,
            " and ".join(late),
            self._advise_after_s,
            mode,
            mode.mode,
            self._registration.http_address,
            "decode" if self._registration.type.word == "prefill" else "prefill",
        )
