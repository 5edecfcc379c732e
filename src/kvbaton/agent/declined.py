"""Requests that a target declined before the source's engine asked for them: what a source remembers of decline notices.

The router sends a request to both instances at once. A target that refuses it may do so before the source's engine has even
admitted its half; without a memory of that, the source would compute a cache that no target fetches and hold it for
`defer_timeout`. A decline counts for one request only: when the same key is used again, by a request that the target does take,
an old decline must not end it. So each is used up when it ends something, and withdrawn when the target shows interest again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import HandoffKey, TransferId

__all__ = ["DeclinedRequests"]

_MAX_REMEMBERED = 4096
_MAX_EXCEPT = 1024


@dataclass(frozen=True, slots=True)
class _DeclineRecord:
    """Why, about which prompt (of one key), except for which keys (of a whole transfer id), and how long it counts."""

    reason: str
    until: float
    prompt: str = ""
    except_for: set[HandoffKey] = field(default_factory=set)


class DeclinedRequests:
    """Declines of single hand-offs, by key and prompt, and of whole requests, by transfer id."""

    def __init__(self) -> None:
        self._single: BoundedMap[HandoffKey, _DeclineRecord] = BoundedMap(_MAX_REMEMBERED)
        self._whole: BoundedMap[TransferId, _DeclineRecord] = BoundedMap(_MAX_REMEMBERED)

    def add(self, key: HandoffKey, prompt: str, reason: str, until: float) -> None:
        """A target declined the hand-off `key` of this prompt."""
        self._single[key] = _DeclineRecord(reason, until, prompt)

    def add_whole(
        self, transfer_id: TransferId, reason: str, until: float, now: float, except_for: Iterable[HandoffKey]
    ) -> None:
        """A target declined every hand-off of a transfer id, present and future, but those in `except_for`.

        The keys that an earlier decline of the same id has used up stay used up: a notice is repeated until it is answered,
        and a repeated one must not end what was submitted anew in the meantime.
        """
        earlier = self._whole.get(transfer_id)
        used = set() if earlier is None or earlier.until < now else earlier.except_for
        self._whole[transfer_id] = _DeclineRecord(reason, until, except_for=used | set(except_for))

    def use_up(self, key: HandoffKey, prompt: str, now: float) -> str | None:
        """The reason why a target declined this hand-off, used up by asking; None when none did."""
        single, whole = self._single.get(key), self._whole.get(key.transfer_id)
        if single is not None and single.prompt == prompt and now <= single.until:
            del self._single[key]
            return single.reason
        if whole is not None and key not in whole.except_for and now <= whole.until and len(whole.except_for) < _MAX_EXCEPT:
            whole.except_for.add(key)
            return whole.reason
        return None

    def withdraw(self, key: HandoffKey) -> bool:
        """A target asks for `key` after all: what it declined does not count for `key` any more; whether it had."""
        single, whole = self._single.pop(key, None), self._whole.get(key.transfer_id)
        if whole is not None and len(whole.except_for) < _MAX_EXCEPT:
            whole.except_for.add(key)
        return single is not None or whole is not None
