"""Stop strings in a stream of text: what may be shown now, and whether a stop string has appeared."""

from __future__ import annotations

__all__ = ["StopFilter"]


class StopFilter:
    """Holds back text that could still become a stop string; how the text is cut into pieces makes no difference."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Take the next piece; return what may be shown. From the stop string that ends first on, nothing is."""
        if self.stopped:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text ends here: return what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper beginning of `stop` that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
