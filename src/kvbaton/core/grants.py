"""Rights that end: numbered grants that cannot come back, a memory of what is over, and the watermark against deadlock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import Bug

__all__ = ["GrantWindow", "GrantWindows", "Tombstones", "may_start_prefill"]

_WINDOW = 8192

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class GrantWindow:
    """Which grant numbers of one peer were used: a high-water mark and the numbers just below it.

    A number counts once. Numbers may arrive out of order as long as they are among the last `size` below the mark;
    older ones are refused, however late they come, so the memory is fixed and nothing finished can come back.
    """

    def __init__(self, size: int = _WINDOW) -> None:
        if size < 1:
            raise Bug(f"a window of {size} grants")
        self._size = size
        self._high = 0
        self._used = 0

    def use(self, number: int) -> bool:
        """Use `number` up; false when it was used before, or is too old to tell."""
        if number < 1 or number <= self._high - self._size:
            return False
        if number > self._high:
            step = min(number - self._high, self._size)
            self._used = ((self._used << step) | 1) & ((1 << self._size) - 1)
            self._high = number
            return True
        bit = 1 << (self._high - number)
        fresh = not self._used & bit
        self._used |= bit
        return fresh


class GrantWindows:
    """One window per peer incarnation; beyond `limit` peers the longest silent one is forgotten."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._windows: OrderedDict[Incarnation, GrantWindow] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def use(self, peer: Incarnation, number: int) -> bool:
        """Use `number` of `peer` up; false when it was used before, or is too old to tell."""
        window = self._windows.setdefault(peer, GrantWindow())
        self._windows.move_to_end(peer)
        while len(self._windows) > self._limit:
            self._windows.popitem(last=False)
        return window.use(number)


class Tombstones(Generic[KeyT, ValueT]):
    """How things ended that are over: a bounded memory, oldest forgotten first."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._ends: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._ends)

    def add(self, key: KeyT, end: ValueT) -> None:
        """Remember how `key` ended; a later end of the same key replaces it."""
        self._ends[key] = end
        self._ends.move_to_end(key)
        while len(self._ends) > self._limit:
            self._ends.popitem(last=False)

    def get(self, key: KeyT) -> ValueT | None:
        """How `key` ended, if that is still known."""
        return self._ends.get(key)

    def discard(self, key: KeyT) -> None:
        """Forget `key`: it lives again."""
        self._ends.pop(key, None)


def may_start_prefill(*, free_blocks: int, needed_blocks: int, reserved_blocks: int, has_grant: bool) -> bool:
    """Whether a source may start a prefill now.

    Work without a grant waits for a target that may itself wait for this source: if it could hold the last blocks, two full
    pools would wait for each other for ever. So it leaves `reserved_blocks`, enough for the largest request there can be,
    to work with a grant in hand, which will end and may take all there is.
    """
    left = free_blocks - needed_blocks
    return left >= 0 if has_grant else left >= reserved_blocks
