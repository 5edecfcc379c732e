"""Plans of a few pages with the loop in C, where there is one: what `core/plan.py` gives, in less than half of its time.

Most spans are a few blocks of a pair of ranks with equal heads, so that a block of the one is a block of the other. In Python
planning them takes about as long as moving their bytes. Everything else, and whatever is wrong with a list of blocks, is left
to `core/plan.py`, which is the reference and names it.
"""

from __future__ import annotations

import ctypes

from kvbaton.core.handoff import BlockLists
from kvbaton.core.pair import GroupPair, Pair
from kvbaton.core.strips import Runs
from kvbaton.transport.runs import Loops, Pages

__all__ = ["PagePlanner"]

_MOST_RANGES = 256
_MOST_PAGES = 32
"""As in plan_pages.c."""

_SLOT_COUNT_AT = 6
"""Where `struct piece` has the number of its slots."""

_MOST_RUNS = 512
"""What is moved in one call, see move_few.c; more runs are worth no hurry."""


class PagePlanner:
    """The plans of one pair of ranks; made by `of`."""

    def __init__(self, group: GroupPair, loops: Loops) -> None:
        self._group = group
        self._size = group.source.block_tokens
        (self._piece,) = group.pieces
        self._token_bytes = self._piece.first_run[2]
        self._loops = loops
        self._tables: dict[tuple[int, int], ctypes.Array[ctypes.c_int64]] = {}

    @classmethod
    def of(cls, pair: Pair, loops: Loops | None) -> PagePlanner | None:
        """A planner for this pair; None where its plans are no pages, or where there is no loop."""
        if loops is None or len(pair.groups) != 1:
            return None
        (group,) = pair.groups
        is_plain = group.is_page_by_page and len(group.pieces) == 1 and not group.pieces[0].slots_in_block
        # Of these, other tokens are moved than those that were asked for.
        rounds_out = group.target.window or group.target.whole_blocks or group.target.moves_pages
        return cls(group, loops) if is_plain and not rounds_out else None

    def pages(
        self, source_blocks: BlockLists, target_blocks: BlockLists, first: int, end: int, total: int | None, layers: range
    ) -> Pages | None:
        """Tokens `first` up to `end` of these layers, for a loop to plan; None where `core/plan.py` has to plan."""
        if len(source_blocks) != 1 or len(target_blocks) != 1 or (total is not None and end > total):
            return None
        low, high = first // self._size, -(-end // self._size)
        # Only the blocks of these tokens: the lists are those of the whole prompt, and may be long.
        sources, targets = source_blocks[0][low:high], target_blocks[0][low:high]
        if not len(sources) == len(targets) == high - low <= _MOST_PAGES or low < 0:
            return None
        table = self._tables.get((layers.start, layers.stop)) or self._table(layers)
        skipped, wire_bytes = low * self._size, (end - first) * self._token_bytes * table[_SLOT_COUNT_AT]
        return Pages(table, sources, targets, first - skipped, end - skipped, wire_bytes) if wire_bytes > 0 else None

    def plan(self, pages: Pages) -> Runs | None:
        """The runs of pages; None where `core/plan.py` has to plan."""
        most = min(pages.table[_SLOT_COUNT_AT] * len(pages.sources), _MOST_RUNS)
        return self._loops.plan_pages(pages, most)

    def _table(self, layers: range) -> ctypes.Array[ctypes.c_int64]:
        """`struct piece` of plan_pages.c for a range of layers, with its slots behind it."""
        piece, group = self._piece, self._group
        slots = piece.slots_of(layers).starts
        numbers = (
            *(piece.source.block_stride, piece.target.block_stride),
            *(self._token_bytes, self._size),
            *(group.source.blocks, group.target.blocks),
            len(slots),
            *(number for slot in slots for number in slot),
        )
        if len(self._tables) >= _MOST_RANGES:
            self._tables.clear()  # a message may name any layers
        table = self._tables[layers.start, layers.stop] = (ctypes.c_int64 * len(numbers))(*numbers)
        return table
