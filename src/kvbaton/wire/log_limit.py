"""Keeps a flood of equal log lines out of a log."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["LogLimit", "PacedLines", "shown"]


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
        if now - self._window_start >= self._every_s:
            self._window_start, self._window_lines = now, 0
        too_soon = now - self._last.get(key, float("-inf")) < self._every_s
        if too_soon or self._window_lines >= self._burst:
            self._suppressed += 1
            return None
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > self._max_keys:
            self._last.popitem(last=False)
        self._window_lines += 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class PacedLines:
    """Lines that are logged at most once per second and cause, and once per `every_s` and key; a few of the others later.

    Those that come too soon wait: of two mistakes at the same moment both show, although no third one comes. Of a flood, the
    last line of each of the first `most` keys shows, and the rest is counted. Time is an argument.
    """

    def __init__(self, every_s: float = 10.0, cause_s: float = 1.0, most: int = 16) -> None:
        self._every_s = every_s
        self._cause_s = cause_s
        self._most = most
        self._waiting: dict[tuple[Hashable, Hashable], tuple[str, int]] = {}
        self._by_cause: dict[Hashable, float] = {}
        self._by_key: OrderedDict[Hashable, float] = OrderedDict()
        self._dropped = 0

    def __bool__(self) -> bool:
        """Whether lines wait."""
        return bool(self._waiting)

    def add(self, cause: Hashable, key: Hashable, text: str, now: float) -> None:
        """A line that `due` returns when its time has come; `now`, if no other of its cause or key was logged before."""
        self._forget(now)
        known = self._waiting.get((cause, key))
        if known is None and len(self._waiting) >= self._most:
            self._dropped += 1
        else:
            self._waiting[cause, key] = (text, 1 if known is None else known[1] + 1)

    def due(self, now: float) -> list[str]:
        """The lines to log now, each with how many like it were held back."""
        lines = []
        for name, (text, count) in tuple(self._waiting.items()):
            cause, _ = name
            is_late = now - self._by_cause.get(cause, float("-inf")) >= self._cause_s
            if is_late and now - self._by_key.get(name, float("-inf")) >= self._every_s:
                del self._waiting[name]
                self._by_key.pop(name, None)
                self._by_cause[cause] = self._by_key[name] = now
                held_back, self._dropped = count - 1 + self._dropped, 0
                lines.append(f"{text} ({held_back} similar lines held back)" if held_back else text)
        return lines

    def _forget(self, now: float) -> None:
        """What was logged long ago limits nothing any more; keys come from outside, and are many."""
        while self._by_key and now - next(iter(self._by_key.values())) >= self._every_s:
            self._by_key.popitem(last=False)


def shown(text: str, limit: int = 300) -> str:
    """A text of a peer as it may stand in a log: without line breaks or control characters, and not too long."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    return short if short.isprintable() else short.encode("unicode_escape").decode("ascii")
