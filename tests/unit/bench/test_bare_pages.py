"""Tagged pages: every byte that does not belong to a hand-off is counted, wherever it lies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.bench.bare.pages import BarePool, CacheShape, TaggedPages, spans_of
from kvbaton.core.handoff import BlockLists, HandoffKey, TransferId, span_problem
from kvbaton.errors import Bug, ConfigError

SHAPE = CacheShape(layers=2, block_tokens=4, token_bytes=8)
BLOCKS: BlockLists = ((5, 0, 3),)


def key_of(name: str) -> HandoffKey:
    return HandoffKey(TransferId(name))


def landed(key: HandoffKey, tokens: int) -> TaggedPages:
    """A target whose blocks hold exactly the first `tokens` tokens of `key`."""
    source, target = TaggedPages(SHAPE, 8, 12), TaggedPages(SHAPE, 8, 12)
    for span in spans_of(SHAPE, tokens, 4):
        source.write(key, BLOCKS, span)
    target.poison(BLOCKS)
    for token in range(tokens):
        block = BLOCKS[0][token // 4]
        target.data[:, :, block, token % 4] = source.data[:, :, block, token % 4]
    return target


@pytest.mark.parametrize("tokens", [1, 4, 9, 12])
def test_what_belongs_there_is_not_foreign(tokens: int) -> None:
    pages = landed(key_of("a"), tokens)
    assert pages.foreign_bytes(key_of("a"), BLOCKS, tokens) == 0
    assert pages.foreign_sample(key_of("a"), BLOCKS, tokens) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1), st.integers(0, 1), st.sampled_from(BLOCKS[0]), st.integers(0, 3), st.integers(0, 7))
def test_any_flipped_byte_is_found(layer: int, plane: int, block: int, token: int, byte: int) -> None:
    pages = landed(key_of("a"), 10)
    pages.data.view("u1")[layer, plane, block, token, byte] ^= 0xFF
    assert pages.foreign_bytes(key_of("a"), BLOCKS, 10) == 1


def test_another_hand_off_and_missing_writes_are_found() -> None:
    pages = landed(key_of("a"), 12)
    assert pages.foreign_bytes(key_of("b"), BLOCKS, 12) > 12 * SHAPE.token_bytes
    assert pages.foreign_sample(key_of("b"), BLOCKS, 12) > 0
    pages.poison(((3,),))
    assert pages.foreign_bytes(key_of("a"), BLOCKS, 12) > 0
    assert pages.foreign_sample(key_of("a"), BLOCKS, 12) > 0


@pytest.mark.parametrize("missing", BLOCKS[0])
def test_a_sample_that_was_spoiled_shows_what_is_missing(missing: int) -> None:
    pages = landed(key_of("a"), 12)
    pages.poison_sample(((missing,),))
    assert pages.foreign_sample(key_of("a"), BLOCKS, 12) > 0
    assert pages.foreign_bytes(key_of("a"), BLOCKS, 12) <= SHAPE.layers * 2 * SHAPE.token_bytes, "and nothing else was"


def test_spans_are_the_whole_cache_chunk_by_chunk_and_layer_by_layer() -> None:
    spans = spans_of(SHAPE, 10, 8)
    assert [(span.first_token, span.first_layer) for span in spans] == [(0, 0), (0, 1), (8, 0), (8, 1)]
    (whole,) = spans_of(CacheShape(layers=1, block_tokens=16), 10, 16)
    assert span_problem(spans, type(whole)(0, 0, 10, 0, 2)) == ""
    with pytest.raises(ConfigError, match=r"chunk_tokens is 6.*block_tokens \(4\)"):
        spans_of(SHAPE, 10, 6)


def test_the_layout_names_the_bytes_of_the_region() -> None:
    pages = TaggedPages(SHAPE, 8, 12)
    (group,) = pages.layout().groups
    assert group.end == pages.layout().region_bytes == pages.data.nbytes
    assert all(plane.is_channel_contiguous and plane.token_stride == plane.token_bytes for plane in group.planes)


def test_a_shape_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_bytes is 6"):
        CacheShape(token_bytes=6)
    with pytest.raises(ConfigError, match="layers is 0"):
        CacheShape(layers=0)


def test_the_pool_hands_out_what_was_freed_last_and_notices_what_is_freed_twice() -> None:
    pool = BarePool(4)
    first = pool.take(3)
    assert first is not None
    assert pool.take(2) is None
    assert pool.in_use == 3
    pool.give(first)
    assert pool.in_use == 0
    assert set((pool.take(3) or ((),))[0]) == set(first[0])
    with pytest.raises(Bug, match="twice"):
        pool.give(((0, 0),))
