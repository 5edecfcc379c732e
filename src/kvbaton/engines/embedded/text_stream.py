"""Text that arrives token by token, up to a stop string; without a library, as all of the engine but its server."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

__all__ = ["StopFilter", "TextStream", "TokenDecoder"]

_HALF = "\ufffd"
_LONGEST_HALF = 4


class TokenDecoder(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes one token stands for, or None when they depend on its neighbours."""


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


class TextStream:
    """Turns tokens into text as they come: only characters that are complete, each exactly once."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._shown = 0

    def feed(self, token_id: int) -> str:
        """The text that has become complete with this token; may be empty."""
        token_bytes = self._tokenizer.token_bytes(token_id)
        if token_bytes is not None:
            return self._decoder.decode(token_bytes)
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_HALF) and len(self._ids) <= self._shown + _LONGEST_HALF:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """What was still held back."""
        if self._ids:
            return self._advance(self._tokenizer.decode(self._ids))
        return self._decoder.decode(b"", final=True)

    def _advance(self, text: str) -> str:
        """Show what is new in `text`, and keep only the tokens that were just shown as context of the next."""
        new = text[len(self._tokenizer.decode(self._ids[: self._shown])) :]
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return new
