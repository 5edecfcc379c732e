"""Keys and spans: which keys can be handed off under, and which spans are a whole cache, against a model of cells."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.handoff import MAX_TRANSFER_ID, HandoffKey, Span, TransferId, key_problem, span_problem

spans = st.builds(Span, st.integers(0, 9), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
WHOLE = Span(0, 0, 4, 0, 3)


def _cells(span: Span) -> list[tuple[int, int]]:
    return list(product(range(span.first_token, span.end_token), range(span.first_layer, span.end_layer)))


@given(st.lists(spans, max_size=5))
def test_spans_without_a_problem_are_every_cell_exactly_once(parts: list[Span]) -> None:
    if not span_problem(parts, WHOLE):
        assert sorted(cell for part in parts for cell in _cells(part)) == sorted(_cells(WHOLE))


@pytest.mark.parametrize(
    "parts",
    [
        [Span(0, 0, 4, 0, 2), Span(1, 0, 4, 2, 1), Span(2, 0, 4, 1, 3)],
        [Span(0, 0, 3, 0, 3), Span(1, 3, 1, 0, 3), Span(2, 1, 4, 0, 3)],
        [Span(0, 0, 4, 3, 0), Span(1, 0, 4, 0, 3)],
        [Span(0, 4, 0, 0, 3), Span(1, 0, 4, 0, 3)],
    ],
    ids=["layers", "tokens", "layers beside the whole", "tokens beside the whole"],
)
def test_spans_that_run_backwards_are_not_whole(parts: list[Span]) -> None:
    assert span_problem(parts, WHOLE)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_cache_cut_into_chunks_and_layers_is_whole_in_any_order(tokens: int, chunk: int, layers: int, random: Random) -> None:
    starts = range(0, tokens, chunk)
    cuts = [(first, layer) for first in starts for layer in range(layers)]
    parts = [Span(n, first, min(first + chunk, tokens), layer, layer + 1) for n, (first, layer) in enumerate(cuts)]
    whole = Span(0, 0, tokens, 0, layers)
    assert span_problem(parts, whole) == ""
    for index, part in enumerate(parts):
        # In the order in which they are computed, with one that is too short or too long.
        for other in (
            Span(part.number, part.first_token, part.end_token + 1, part.first_layer, part.end_layer),
            Span(part.number, part.first_token, part.end_token, part.first_layer, part.end_layer + 1),
        ):
            assert span_problem([*parts[:index], other, *parts[index + 1 :]], whole)
    random.shuffle(parts)
    assert span_problem(parts, whole) == ""
    for missing in parts:
        assert span_problem([part for part in parts if part is not missing], whole)
    assert span_problem([*parts, parts[0]], whole)


def test_a_problem_says_where_it_is() -> None:
    assert "layer 2 ends at token 0 of 4" in span_problem([Span(0, 0, 4, 0, 2)], WHOLE)
    assert "no such layer" in span_problem([Span(7, 0, 4, 0, 1 << 62)], WHOLE)
    assert "span 7 starts at token 2 of layer 0" in span_problem([Span(7, 2, 4, 0, 3)], WHOLE)


@pytest.mark.parametrize("length", [1, MAX_TRANSFER_ID])
def test_a_transfer_id_of_a_possible_length_is_fine(length: int) -> None:
    assert key_problem(HandoffKey(TransferId("x" * length), 3, 4)) == ""


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (HandoffKey(TransferId("")), "has 0 characters"),
        (HandoffKey(TransferId("x" * 257)), "has 257 characters; 1 to 256"),
        (HandoffKey(TransferId("x"), -1), "prompt index -1"),
        (HandoffKey(TransferId("x"), 0, -1), "sample index -1"),
    ],
)
def test_an_impossible_key_is_refused_with_the_value(key: HandoffKey, problem: str) -> None:
    assert problem in key_problem(key)


def test_prompts_and_samples_of_one_request_have_keys_of_their_own() -> None:
    keys = {HandoffKey(TransferId("x"), prompt, sample) for prompt in range(3) for sample in range(2)}
    assert len(keys) == 6
    assert len({str(key) for key in keys}) == 6
