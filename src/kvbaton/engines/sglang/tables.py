"""From the pages and state indices that SGLang passes to a backend to one block list per group of the layout.

SGLang has one list of pages for the cache itself, and for each state component a list of its own: the pages of a sliding
window in a second pool, the slot of a Mamba state, the pages of a sparse index. A source gets those of the components only with
its last chunk, so what is announced before must not need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import FULL, Group
from kvbaton.core.segments import HOLE
from kvbaton.errors import ProtocolError

__all__ = ["PLAIN", "BlockTables", "StateIndices", "BlockTable"]

StateIndices = Sequence[Sequence[int]]
"""What SGLang passes for each state component, as plain numbers."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where the blocks of one group come from: the pages of the cache, or a state component."""

    group: Group
    component: int = -1
    """The number of the component among SGLang's `state_types`; -1 for the pages of the cache."""
    name: str = "the cache"


class BlockTables:
    """The tables of all groups, in the order of the layout; the first one is that of the cache."""

    def __init__(self, page_tokens: int, tables: Sequence[BlockTable]) -> None:
        self._page_tokens = page_tokens
        self._tables = tuple(tables)
        self._components = {table.component: table for table in tables if table.component >= 0}
        self._window = max((table.group.window for table in tables), default=0)

    def check_pages(self, pages: Sequence[int]) -> None:
        """Raise ProtocolError for a page that the cache does not have: neither plans nor messages can hold such a number."""
        held = self._tables[0].group.blocks
        wrong = next((page for page in pages if not 0 <= page < held), None)
        if wrong is not None:
            raise ProtocolError(f"page {wrong} is outside the cache, which has {held} pages")

    def announceable(self, tokens: int) -> int:
        """How many of so many tokens may be announced before the last chunk: those that no window of the prompt reaches."""
        return self._window_start(tokens, self._window) if self._window else tokens

    def check_state(self, state: StateIndices, pages: Sequence[int], tokens: int, cached_tokens: int = 0) -> None:
        """Raise ProtocolError for indices that are not those of so many tokens, or that their pool does not have."""
        if len(state) != len(self._components):
            raise ProtocolError(f"SGLang has indices of {len(state)} state components, its cache has {len(self._components)}")
        for number, table in self._components.items():
            indices = state[number]
            expected = self._count(table.group, tokens, cached_tokens)
            if len(indices) != expected:
                raise ProtocolError(f"SGLang has {len(indices)} indices of {table.name} for {tokens} tokens, not {expected}")
            wrong = next((index for index in indices if not 0 <= index < table.group.blocks), None)
            if wrong is not None:
                raise ProtocolError(f"index {wrong} of {table.name} is outside its pool, which has {table.group.blocks}")
            if not (table.group.window or table.group.is_state) and tuple(indices) != tuple(pages):
                raise ProtocolError(f"the indices of {table.name} are not the pages of the cache, which they go with")

    def lists(self, pages: Sequence[int], state: StateIndices | None, tokens: int) -> BlockLists:
        """One list per group; `pages` begins with the first token. Without `state` (before the last chunk) it has holes."""
        return tuple(self._list(table, tuple(pages), state, tokens) for table in self._tables)

    def _list(self, table: BlockTable, pages: tuple[int, ...], state: StateIndices | None, tokens: int) -> tuple[int, ...]:
        group = table.group
        if group.is_state:
            return () if state is None else tuple(state[table.component])
        if not group.window:
            return pages
        held = () if state is None else tuple(state[table.component])
        return (HOLE,) * (-(-tokens // self._page_tokens) - len(held)) + held

    def _count(self, group: Group, tokens: int, cached_tokens: int) -> int:
        if group.is_state:
            return 1
        first = max(cached_tokens, self._window_start(tokens, group.window) if group.window else 0)
        return -(-tokens // self._page_tokens) - first // self._page_tokens

    def _window_start(self, tokens: int, window: int) -> int:
        """The first token of the page that the window starts in, as SGLang counts it."""
        return max(0, tokens - window) // self._page_tokens * self._page_tokens


PLAIN = BlockTables(1, (BlockTable(Group(FULL, (), 1 << 31, 1, 1, ())),))
"""Of a cache without state whose size does not matter."""
