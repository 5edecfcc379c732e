"""What an instance's owner should hear of its routers: who was reached, who refuses, and what to look at when nobody asks.

Real routers never answer a registration, so an instance that they refuse cannot know it. The sign is that no request comes;
then the owner is told once, in words, what usually is the matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvbaton.discovery.heartbeats import News, NewsKind
from kvbaton.discovery.messages import Registration

__all__ = ["DEFAULT_ADVISE_AFTER_S", "Adviser"]

_logger = logging.getLogger(__name__)

DEFAULT_ADVISE_AFTER_S = 60.0
"""So long after its registration an instance that nobody has asked anything says so."""


class Adviser:
    """Logs the news of one instance's routers, and gives advice when `is_used` stays false. Belongs to one thread."""

    def __init__(
        self,
        registration: Registration,
        is_used: Callable[[], bool] | None = None,
        advise_after_s: float = DEFAULT_ADVISE_AFTER_S,
    ) -> None:
        self._name = f"{registration.type.word} instance {registration.http_address}"
        self._registration = registration
        self._is_used = is_used
        self._advise_after_s = advise_after_s
        self._silent_since: dict[str, float] = {}

    def hear(self, news: News, now: float) -> None:
        """Log it, and remember which routers say nothing."""
        match news.kind:
            case NewsKind.REACHED:
                _logger.info("discovery: %s registers with router %s", self._name, news.router)
                self._silent_since.setdefault(news.router, now)
            case NewsKind.AWAY:
                _logger.warning(
                    "discovery: router %s has not been reachable for %s; is it running, and is this its discovery port?"
                    " Trying on.",
                    news.router,
                    news.detail,
                )
            case NewsKind.WELCOME:
                self._silent_since.pop(news.router, None)
                _logger.info("discovery: router %s has taken %s in", news.router, self._name)
            case NewsKind.REFUSED:
                self._silent_since.pop(news.router, None)
                _logger.warning("discovery: router %s refuses %s: %s", news.router, self._name, news.detail)

    def advise(self, now: float) -> None:
        """Speak up, once, for each router that has said nothing and sent nothing for too long."""
        late = [r for r, since in self._silent_since.items() if now - since >= self._advise_after_s]
        if self._is_used is None or not late:
            return
        for router in late:
            del self._silent_since[router]
        if self._is_used():
            return
        mode = self._registration.transfer_mode
        _logger.warning(
            "discovery: %s has registered with router %s for %g s, and no request has come. Nobody may have asked yet. If"
            " somebody has: this instance registers with transfer_mode %s (--mode %s); a router that runs with the other mode"
            " drops it without a word, and vllm-router keeps the mode of its first instance until it is restarted. See the"
            " router's log, whether it reaches %s, and whether the other side (%s) is registered too.",
            self._name,
            " and ".join(late),
            self._advise_after_s,
            mode,
            mode.mode,
            self._registration.http_address,
            "decode" if self._registration.type.word == "prefill" else "prefill",
        )
