"""The block pool keeps its books under any order of calls, and shares exactly what is equal."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvbaton.engines.embedded.pool import BlockPool, PrefixDigests
from kvbaton.errors import Bug, ConfigError


def digests(*token_ids: int, block_tokens: int = 2) -> list[bytes]:
    return PrefixDigests(block_tokens).of(token_ids, len(token_ids))


def test_equal_prefixes_have_equal_digests_and_others_do_not() -> None:
    one, other = digests(1, 2, 3, 4, 5), digests(1, 2, 3, 9)
    assert len(one) == len(other) == 2
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert digests(3, 4)[0] != one[1]


def test_digests_grow_with_the_tokens() -> None:
    growing, token_ids = PrefixDigests(2), [1, 2, 3]
    assert growing.of(token_ids, 3) == digests(1, 2)
    token_ids += [4, 5, 6]
    assert growing.of(token_ids, 6) == digests(1, 2, 3, 4, 5, 6)
    assert growing.of(token_ids, 5) == digests(1, 2, 3, 4)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 blocks"):
        BlockPool(0, 16)


def test_fresh_blocks_are_consecutive_and_grow_where_they_end() -> None:
    pool = BlockPool(16, 2)
    first = pool.allocate(4)
    pool.release(pool.allocate(3))
    assert first == [0, 1, 2, 3]
    assert pool.allocate(1, after=first[-1]) == [4]


def test_the_smallest_run_that_fits_is_taken() -> None:
    pool = BlockPool(10, 2)
    blocks = pool.allocate(10)
    pool.release([*blocks[1:3], *blocks[5:9]])
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(3) == [5, 6, 7]


def test_many_small_runs_make_one_allocation() -> None:
    pool = BlockPool(8, 2)
    pool.allocate(8)
    pool.release([0, 2, 3, 6])
    assert sorted(pool.allocate(4)) == [0, 2, 3, 6]
    assert pool.free == 0


def test_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(Bug, match="3 blocks requested with 2 free"):
        BlockPool(2, 2).allocate(3)


def test_released_blocks_stay_matched_until_they_are_needed() -> None:
    pool = BlockPool(4, 2)
    blocks, names = pool.allocate(3), digests(1, 2, 3, 4)
    pool.register(blocks[:2], names)
    pool.release(blocks)
    assert (pool.free, pool.cached) == (4, 2)
    assert pool.match_prefix(names) == blocks[:2]
    pool.allocate(2)
    assert pool.match_prefix(names) == blocks[:2], "uncached blocks go first"
    pool.allocate(1)
    assert pool.match_prefix(names) == blocks[:1], "the end of a prefix goes before its beginning"


def test_the_prefix_used_last_is_dropped_last() -> None:
    pool = BlockPool(2, 2)
    for token in (1, 3):
        block = pool.allocate(1)
        pool.register(block, digests(token, token))
        pool.release(block)
    older = pool.match_prefix(digests(1, 1))
    pool.acquire(older)
    pool.release(older)
    pool.allocate(1)
    assert pool.match_prefix(digests(1, 1)) == older
    assert pool.match_prefix(digests(3, 3)) == []


def test_an_acquired_block_is_not_given_out() -> None:
    pool = BlockPool(2, 2)
    block = pool.allocate(1)
    pool.register(block, digests(1, 2))
    pool.release(block)
    assert pool.can_allocate(2)
    assert pool.free_beside(block) == 1
    pool.acquire(block, held=True)
    assert (pool.free, pool.in_use, pool.held) == (1, 0, 1)
    assert pool.allocate(1) != block


def test_a_shared_block_counts_once_and_is_held_while_a_handoff_needs_it() -> None:
    pool = BlockPool(4, 2)
    block = pool.allocate(1)
    pool.acquire(block, held=True)
    assert (pool.in_use, pool.held) == (0, 1)
    pool.release(block)
    assert (pool.in_use, pool.held) == (0, 1)
    pool.use(block)
    assert (pool.in_use, pool.held) == (1, 0)
    pool.hold(block)
    pool.release(block, held=True)
    assert pool.free == 4


def test_wrong_releases_are_bugs() -> None:
    pool = BlockPool(2, 2)
    block = pool.allocate(1)
    with pytest.raises(Bug, match="no hold"):
        pool.release(block, held=True)
    pool.release(block)
    with pytest.raises(Bug, match="no use"):
        pool.release(block)
    with pytest.raises(Bug, match="neither cached nor referenced"):
        pool.acquire(block)
    with pytest.raises(Bug, match="is free"):
        pool.register(block, digests(1, 2))


def test_a_known_prefix_keeps_its_first_block() -> None:
    pool = BlockPool(2, 2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first, digests(1, 2))
    pool.register(second, digests(1, 2))
    assert pool.match_prefix(digests(1, 2)) == first
    pool.release(second)
    pool.check_integrity()


def test_room_to_grow_is_left_alone_while_there_is_other_room() -> None:
    pool = BlockPool(128, 2)
    first = pool.allocate(2, room=4)
    second = pool.allocate(2, room=4)
    assert (first, second) == ([0, 1], [6, 7])
    for _ in range(4):
        first += pool.allocate(1, after=first[-1])
    assert first == list(range(6))
    pool.release(second)
    assert pool.allocate(122) == list(range(6, 128)), "the room of a released block is anybody's"


def test_room_is_a_wish_and_no_claim() -> None:
    pool = BlockPool(128, 2)
    pool.allocate(120, room=4)
    assert sorted(pool.allocate(8)) == list(range(120, 128))


class Books(RuleBasedStateMachine):
    """Random owners with a list of blocks each, held or not; the pool's counts must agree with theirs."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(40, 2)
        self.live: dict[int, tuple[list[int], bool]] = {}
        self.names = 0

    def _own(self, blocks: list[int], held: bool) -> int:
        self.names += 1
        self.live[self.names] = (blocks, held)
        return self.names

    @rule(target=owners, token_ids=st.lists(st.integers(0, 1), max_size=12), held=st.booleans(), room=st.integers(0, 3))
    def admit(self, token_ids: list[int], held: bool, room: int) -> object:
        names = digests(*token_ids)
        cached = self.pool.match_prefix(names)
        missing = self.pool.blocks_for(len(token_ids)) - len(cached)
        if self.pool.free_beside(cached) < missing:
            return multiple()
        self.pool.acquire(cached, held=held)
        fresh = self.pool.allocate(missing, held=held, room=room)
        assert not set(fresh) & {block for blocks, _ in self.live.values() for block in blocks}, "given out twice"
        blocks = cached + fresh
        self.pool.register(blocks[: len(names)], names)
        return self._own(blocks, held)

    @rule(target=owners, owner=consumes(owners))
    def grow(self, owner: int) -> int:
        blocks, held = self.live.pop(owner)
        if self.pool.can_allocate(1):
            blocks = blocks + self.pool.allocate(1, after=blocks[-1] if blocks else None, held=held)
        return self._own(blocks, held)

    @rule(target=owners, owner=consumes(owners))
    def turn(self, owner: int) -> int:
        blocks, held = self.live.pop(owner)
        (self.pool.use if held else self.pool.hold)(blocks)
        return self._own(blocks, not held)

    @rule(owner=consumes(owners))
    def release(self, owner: int) -> None:
        blocks, held = self.live.pop(owner)
        self.pool.release(blocks, held=held)

    @invariant()
    def counts_agree(self) -> None:
        held = {block for blocks, is_held in self.live.values() if is_held for block in blocks}
        used = {block for blocks, _ in self.live.values() for block in blocks}
        assert (self.pool.held, self.pool.in_use) == (len(held), len(used - held))
        self.pool.check_integrity()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
