"""Keeps a flood of equal log lines out of a log."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["LogLimit", "shown"]


class LogLimit:
    """Lets one line per key and `every_s` through, and at most `burst` lines in all in that time. Time is an argument."""

    def __init__(self, every_s: float = 10.0, burst: int = 50, max_keys: int = 1024) -> None:
        self._every_s = every_s
        self._burst = burst
        self._max_keys = max_keys
        self._last: OrderedDict[Hashable, float] = OrderedDict()
        self._window_start = float("-inf")
        self._window_lines = 0
        self._suppressed = 0

    def allow(self, key: Hashable, now: float) -> int | None:
        """How many lines were held back since the last one that went through, or None when this one is held back too."""
        if not self.is_due(key, now):
            self._suppressed += 1
            return None
        if now - self._window_start >= self._every_s:
            self._window_start, self._window_lines = now, 0
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > self._max_keys:
            self._last.popitem(last=False)
        self._window_lines += 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed

    def is_due(self, key: Hashable, now: float) -> bool:
        """Whether a line with this key would go through."""
        is_full = self._window_lines >= self._burst and now - self._window_start < self._every_s
        return not is_full and now - self._last.get(key, float("-inf")) >= self._every_s


def shown(text: str, limit: int = 300) -> str:
    """A text of a peer as it may stand in a log: without line breaks or control characters, and not too long."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    return short if short.isprintable() else short.encode("unicode_escape").decode("ascii")
