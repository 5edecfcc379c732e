"""What makes a hand-off impossible before anything is moved: a bad key, spans that are not the whole, absurd grant numbers."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.grants import GrantWindow
from kvbaton.core.handoff import MAX_TRANSFER_ID, HandoffKey, Span, TransferId, key_problem, span_problem


@pytest.mark.parametrize("length", [1, MAX_TRANSFER_ID])
def test_a_key_that_can_be_used(length: int) -> None:
    key = HandoffKey(TransferId("x" * length), 7, 3)
    assert key_problem(key) == ""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(key), type=HandoffKey) == key


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (HandoffKey(TransferId("")), "0 characters"),
        (HandoffKey(TransferId("x" * (MAX_TRANSFER_ID + 1))), f"{MAX_TRANSFER_ID + 1} characters"),
        (HandoffKey(TransferId("x"), -1), "prompt index -1"),
        (HandoffKey(TransferId("x"), 0, -2), "sample index -2"),
    ],
    ids=["empty", "long", "prompt", "sample"],
)
def test_a_key_that_cannot_is_refused_here_and_on_the_wire(key: HandoffKey, names: str) -> None:
    assert names in key_problem(key)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(key), type=HandoffKey)


@st.composite
def _cut(draw: st.DrawFn) -> tuple[Span, list[Span]]:
    """A whole, and the spans that an engine reports of it: chunk by chunk, each in its own bands of layers."""
    tokens, layers, first_layer = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    whole = Span(0, 0, tokens, first_layer, first_layer + layers)
    spans: list[Span] = []
    for start, end in _bands(draw, 0, tokens):
        for low, high in _bands(draw, first_layer, first_layer + layers):
            spans.append(Span(len(spans), start, end, low, high))
    return whole, spans


def _bands(draw: st.DrawFn, first: int, end: int) -> list[tuple[int, int]]:
    cuts = sorted({first, end, *draw(st.lists(st.integers(first, end), max_size=4))})
    return list(itertools.pairwise(cuts))


@given(_cut(), st.randoms(use_true_random=False))
def test_a_whole_cut_in_any_way_and_told_in_any_order_is_whole(cut: tuple[Span, list[Span]], random: object) -> None:
    whole, spans = cut
    random.shuffle(spans)  # type: ignore[attr-defined]
    assert span_problem(spans, whole) == ""


@given(_cut(), st.data())
def test_a_whole_with_a_span_too_few_or_too_many_is_not(cut: tuple[Span, list[Span]], data: st.DataObject) -> None:
    whole, spans = cut
    index = data.draw(st.integers(0, len(spans) - 1))
    assert span_problem(spans[:index] + spans[index + 1 :], whole)
    assert span_problem([*spans, spans[index]], whole)
    beyond = msgspec.structs.replace(spans[index], first_layer=whole.end_layer, end_layer=whole.end_layer + 1)
    assert "no such layer" in span_problem([*spans, beyond], whole)


def test_the_largest_grant_number_there_is_costs_no_memory() -> None:
    window = GrantWindow(64, reach=1 << 62)
    assert window.use(1)
    assert window.use(1 << 62)
    assert not window.use(1 << 62)
    assert not window.use(2)
    assert window.use((1 << 62) - 63)
    assert not window.use((1 << 62) - 64)
