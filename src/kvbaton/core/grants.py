"""Grants: numbers that are used once and cannot come back, and the reserve that keeps two full instances from deadlock.

A target numbers its grants, and its source uses each number up. The control channel may delay a grant, or deliver it twice:
without the numbers a grant that arrives when its hand-off is over would start that hand-off again, and the source would write
into blocks that the target has long given to another request.
"""

from __future__ import annotations

from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import Incarnation
from kvbaton.errors import Bug

__all__ = ["GrantWindow", "GrantWindows", "may_start_prefill"]

_WINDOW = 8192


class GrantWindow:
    """Which grant numbers of one peer were used: a high-water mark and one bit for each of the `size` numbers below it.

    A number counts once. Numbers may arrive out of order as long as they are among the last `size` below the mark. Older ones
    are refused although they may never have been used: the target then takes a new number (a stale grant), which costs one
    round trip, whereas to accept a used one would cost a foreign byte. So the memory is fixed and nothing finished comes back.
    """

    def __init__(self, size: int = _WINDOW) -> None:
        if size < 1:
            raise Bug(f"a window of {size} grants")
        self._size = size
        self._high = 0
        self._used = 0

    def use(self, number: int) -> bool:
        """Use `number` up; false when it was used before, or is too old to know."""
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
    """One window per peer incarnation; beyond `limit` peers the one that sent no grant for longest is forgotten."""

    def __init__(self, limit: int = 1024) -> None:
        self._windows: BoundedMap[Incarnation, GrantWindow] = BoundedMap(limit)

    def __len__(self) -> int:
        return len(self._windows)

    def use(self, peer: Incarnation, number: int) -> bool:
        """Use `number` of `peer` up; false when it was used before, or is too old to know."""
        window = self._windows.setdefault(peer, GrantWindow())
        self._windows.touch(peer)
        return window.use(number)


def may_start_prefill(*, free_blocks: int, needed_blocks: int, reserved_blocks: int, has_grant: bool) -> bool:
    """Whether a source may start a prefill now.

    A prefill without a grant waits for a target, and that target may wait for another prefill of this source: if prefills
    without a grant could hold the last blocks, two full pools would wait for each other for ever. So they leave
    `reserved_blocks`, enough for the largest request there can be, to prefills that have a grant. Those may take every block:
    their target has blocks for them, so they end.
    """
    left = free_blocks - needed_blocks
    return left >= 0 if has_grant else left >= reserved_blocks
