"""Checksums leg by leg: both ends sum the same bytes, whatever their shapes, and together all that is moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from caches import Rolled, Side, plan_pieces
from instances import Meet, Memory, draw_meet, hand_off, tagged

from kvbaton.core.checks import LegPart, Pieces
from kvbaton.core.handoff import HandoffKey, Integrity, Span, TransferId
from kvbaton.core.legs import Leg, assign_legs

KEY = HandoffKey(TransferId("tx"))
SUMMED = [Integrity.FULL, Integrity.SAMPLED]


def _spans(meet: Meet) -> Iterator[Span]:
    """Every chunk, layer by layer."""
    chunks = list(itertools.pairwise(meet.cuts))
    layers = max((layer for rank in meet.source.ranks for layer in rank.layout.layers), default=0) + 1
    return (
        Span(number, first, end, layer, layer + 1)
        for number, ((first, end), layer) in enumerate(itertools.product(chunks, range(layers)))
    )


def _pieces(rank: Side, leg: Leg, other: Side, span: Span, total: int, integrity: Integrity) -> Pieces:
    part = LegPart(leg.share, other.layout)
    return plan_pieces(rank.layout, rank.blocks, KEY, span, 0, integrity, total, part)


def _bytes(memory: Memory, pieces: Pieces) -> bytes:
    return b"".join(memory[offset : offset + size].tobytes() for offset, size in pieces.tolist())


@pytest.mark.parametrize("integrity", SUMMED)
@pytest.mark.parametrize("seed", range(60))
def test_both_ends_of_every_leg_sum_the_same_bytes(seed: int, integrity: Integrity) -> None:
    meet = draw_meet(Rolled(seed))
    legs, before = assign_legs(meet.source.layouts, meet.target.layouts), tagged(meet.source, meet.total)
    after, times, _ = hand_off(meet.source, meet.target, legs, meet.cuts, before, meet.total)
    covered = [np.zeros_like(count) for count in times]
    for leg, span in itertools.product(legs.legs, list(_spans(meet))):
        there, here = meet.source.ranks[leg.source], meet.target.ranks[leg.target]
        theirs = _pieces(there, leg, here, span, meet.total, integrity)
        ours = _pieces(here, leg, there, span, meet.total, integrity)
        assert _bytes(before[leg.source], theirs) == _bytes(after[leg.target], ours)
        for offset, size in ours.tolist():
            covered[leg.target][offset : offset + size] += 1
    for summed, moved in zip(covered, times, strict=True):
        assert (summed <= moved).all()
        assert integrity is Integrity.SAMPLED or (summed == moved).all()


def test_control_a_byte_that_changes_is_in_the_sum_of_exactly_one_leg() -> None:
    meet = next(found for seed in range(100) if len(_legs(found := draw_meet(Rolled(seed)))) > 3 and found.total)
    before = tagged(meet.source, meet.total)
    legs = assign_legs(meet.source.layouts, meet.target.layouts)
    after, times, _ = hand_off(meet.source, meet.target, legs, meet.cuts, before, meet.total)
    rank = max(range(len(times)), key=lambda number: int(times[number].sum()))
    for at in np.flatnonzero(times[rank])[:50]:
        touched = [
            (leg.number, span.number)
            for leg in legs.of_target(rank)
            for span in _spans(meet)
            for offset, size in _pieces(
                meet.target.ranks[rank], leg, meet.source.ranks[leg.source], span, meet.total, Integrity.FULL
            ).tolist()
            if offset <= at < offset + size
        ]
        assert len(touched) == 1
    assert any(memory.any() for memory in after)


def _legs(meet: Meet) -> tuple[Leg, ...]:
    return assign_legs(meet.source.layouts, meet.target.layouts).legs
