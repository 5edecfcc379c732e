"""Which blocks are free: the simplest pool there is. What was freed last is handed out first: a late write would show."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.core.handoff import BlockLists
from kvbaton.errors import Bug

__all__ = ["BarePool"]


class BarePool:
    """Hands out blocks of one group, last in first out."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = list(range(blocks))
        self._is_free = [True] * blocks

    @property
    def in_use(self) -> int:
        """Blocks that are taken."""
        return self.total - len(self._free)

    def take(self, count: int) -> BlockLists | None:
        """So many blocks, or None when there are not enough."""
        if count > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(count))
        self._mark(taken, False)
        return (taken,)

    def give(self, blocks: BlockLists) -> None:
        """Take blocks back. Raises Bug for one that is free already."""
        for each in blocks:
            self._mark(each, True)
            self._free.extend(each)

    def _mark(self, blocks: Sequence[int], free: bool) -> None:
        for block in blocks:
            if self._is_free[block] is free:
                raise Bug(f"block {block} is {'given back' if free else 'taken'} twice")
            self._is_free[block] = free
