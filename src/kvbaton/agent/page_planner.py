"""Plans of a few pages with the loop in C, where there is one: what `core/plan.py` gives, in a third of its time.

Most spans are a few whole blocks of a pair of ranks with equal heads, so that a block of the one is a block of the other. In
Python planning them takes longer than their bytes. Everything else, and whatever is wrong with a list of blocks, is left to
`core/plan.py`, which is the reference and names it.
"""

from __future__ import annotations

import ctypes

from kvbaton.core.handoff import BlockLists
from kvbaton.core.pair import GroupPair, Pair
from kvbaton.core.strips import Runs
from kvbaton.transport.runs import Loops

__all__ = ["PagePlanner"]

_MOST_RANGES = 256


class PagePlanner:
    """The plans of one pair of ranks; made by `of`."""

    def __init__(self, group: GroupPair, loops: Loops) -> None:
        self._group = group
        self._loops = loops
        self._tables: dict[tuple[int, int], ctypes.Array[ctypes.c_int64]] = {}
        """By range of layers: `struct piece` of plan_pages.c, and behind it the slots."""

    @classmethod
    def of(cls, pair: Pair, loops: Loops | None) -> PagePlanner | None:
        """A planner for this pair; None where its plans are no pages, or where there is no loop."""
        if loops is None or len(pair.groups) != 1:
            return None
        (group,) = pair.groups
        is_plain = group.is_page_by_page and len(group.pieces) == 1 and not group.pieces[0].slots_in_block
        moves_rest = group.target.window or group.target.whole_blocks or group.target.moves_pages
        return cls(group, loops) if is_plain and not moves_rest else None

    def plan(
        self, source_blocks: BlockLists, target_blocks: BlockLists, first: int, end: int, total: int | None, layers: range
    ) -> tuple[Runs, int] | None:
        """The runs of tokens `first` up to `end` of these layers, and their bytes; None where `core/plan.py` has to plan."""
        if len(source_blocks) != 1 or len(target_blocks) != 1 or (total is not None and end > total):
            return None
        table = self._tables.get((layers.start, layers.stop))
        if table is None:
            table = self._table(layers)
        return self._loops.plan_pages(table, source_blocks[0], target_blocks[0], first, end)

    def _table(self, layers: range) -> ctypes.Array[ctypes.c_int64]:
        (piece,), group = self._group.pieces, self._group
        slots = piece.slots_of(layers).starts
        source_offset, target_offset, token_bytes = piece.first_run
        numbers = (
            *(piece.source.block_stride, piece.target.block_stride),
            *(source_offset, target_offset),
            *(token_bytes, group.source.block_tokens),
            *(group.source.blocks, group.target.blocks),
            len(slots),
            *(number for slot in slots for number in slot),
        )
        if len(self._tables) >= _MOST_RANGES:
            self._tables.clear()  # a message may name any layers
        table = self._tables[layers.start, layers.stop] = (ctypes.c_int64 * len(numbers))(*numbers)
        return table
