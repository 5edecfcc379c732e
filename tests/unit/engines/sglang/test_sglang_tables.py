"""Which blocks the groups of a layout get: of pages, of the pages of a window, of the slot of a state."""

from __future__ import annotations

import pytest

from kvbaton.core.layout import FULL, INDEX, SLIDING_PAGES, Group
from kvbaton.core.segments import HOLE
from kvbaton.engines.sglang.tables import PLAIN, BlockTable, BlockTables
from kvbaton.errors import ProtocolError

PAGE, WINDOW = 4, 6


def _group(kind: str, blocks: int = 16, block_tokens: int = PAGE, window: int = 0) -> Group:
    return Group(kind, (0,), blocks, block_tokens, block_tokens, (), window=window)


CACHE = BlockTable(_group(FULL))
WINDOWS = BlockTables(PAGE, (CACHE, BlockTable(_group(SLIDING_PAGES, 8, window=WINDOW), 0, "windows")))
STATES = BlockTables(PAGE, (CACHE, BlockTable(_group("state", 4, 0), 0, "states")))
SPARSE = BlockTables(PAGE, (CACHE, BlockTable(_group(INDEX), 0, "index")))


@pytest.mark.parametrize(("tokens", "announceable"), [(1, 0), (6, 0), (9, 0), (10, 4), (21, 12), (22, 16), (100, 92)])
def test_what_a_window_reaches_is_announced_with_the_last_chunk(tokens: int, announceable: int) -> None:
    assert WINDOWS.announceable(tokens) == announceable
    assert STATES.announceable(tokens) == SPARSE.announceable(tokens) == PLAIN.announceable(tokens) == tokens


@pytest.mark.parametrize(
    ("tokens", "cached", "count"),
    [(1, 0, 1), (6, 0, 2), (9, 0, 3), (10, 0, 2), (21, 0, 3), (21, 16, 2), (22, 0, 2), (22, 20, 1)],
)
def test_a_window_has_the_pages_that_sglang_counts(tokens: int, cached: int, count: int) -> None:
    pages = list(range(1, 2 + (tokens - 1) // PAGE))
    indices = list(range(1, 1 + count))
    WINDOWS.check_state([indices], pages, tokens, cached)
    assert WINDOWS.lists(pages, [indices], tokens) == (tuple(pages), (HOLE,) * (len(pages) - count) + tuple(indices))
    for wrong in (indices[1:], [*indices, 7]):
        with pytest.raises(ProtocolError, match=f"{len(wrong)} indices of windows for {tokens} tokens, not {count}"):
            WINDOWS.check_state([wrong], pages, tokens, cached)


def test_before_the_last_chunk_there_are_no_state_indices() -> None:
    assert WINDOWS.lists([5, 6], None, 10) == ((5, 6), (HOLE,) * 3)
    assert STATES.lists([5, 6], None, 10) == ((5, 6), ())
    assert SPARSE.lists([5, 6], None, 10) == ((5, 6), (5, 6))
    assert PLAIN.lists([5, 6], None, 10) == ((5, 6),)


@pytest.mark.parametrize(
    ("tables", "state", "named"),
    [
        (STATES, [[]], "0 indices of states"),
        (STATES, [[1, 2]], "2 indices of states"),
        (STATES, [[4]], "index 4 of states is outside its pool, which has 4"),
        (STATES, [[-1]], "index -1 of states"),
        (STATES, [], "indices of 0 state components, its cache has 1"),
        (SPARSE, [[5, 6, 8]], "not the pages of the cache"),
        (PLAIN, [[1]], "indices of 1 state components, its cache has 0"),
    ],
)
def test_indices_that_do_not_fit_are_refused_by_name(tables: BlockTables, state: list[list[int]], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        tables.check_state(state, [5, 6, 7], 10)


def test_pages_outside_the_cache_are_refused_by_name() -> None:
    WINDOWS.check_pages([0, 15])
    for page in (-1, 16, 1 << 40):
        with pytest.raises(ProtocolError, match=f"page {page} is outside the cache, which has 16 pages"):
            WINDOWS.check_pages([3, page])
