"""Layers are announced when every rank has computed them: in any order, once, and never after their hand-off has ended."""

from __future__ import annotations

import random

import pytest
from vllm_rig import ScriptedPort, key_of, layer_groups

from kvbaton.core.handoff import Span, span_problem
from kvbaton.engines.vllm.computed_spans import ComputedSpans
from kvbaton.engines.vllm.orders import ComputedChunk

KEY = key_of()
FIRST = ComputedChunk("r", KEY, ((1, 2),), 0, 8)
SECOND = ComputedChunk("r", KEY, ((1, 2, 3),), 8, 11)
TWO_STAGES = {0: 2, 1: 2, 2: 2, 3: 2}
"""Two ranks compute layers 0 and 1, two others layers 2 and 3."""


class Rig:
    def __init__(self) -> None:
        self.port = ScriptedPort()
        self.spans = ComputedSpans(self.port, TWO_STAGES, lambda given: given)

    def announced(self) -> list[Span]:
        return [span for name, argument in self.port.calls if name == "spans_ready" for span in argument[2]]


def test_a_layer_is_announced_by_its_last_rank() -> None:
    rig = Rig()
    rig.spans.begin(1, [FIRST])
    rig.spans.computed(1, [0])
    assert not rig.announced()
    rig.spans.computed(1, [0, 1])
    assert rig.announced() == [Span(0, 0, 8, 0, 1)]
    rig.spans.computed(1, [1])
    assert rig.announced()[1:] == [Span(1, 0, 8, 1, 2)]


def test_a_rank_may_be_ahead_of_the_first_one() -> None:
    rig = Rig()
    rig.spans.computed(1, [0, 1])
    rig.spans.begin(1, [FIRST])
    rig.spans.computed(1, [0, 1])
    assert rig.announced() == [Span(0, 0, 8, 0, 2)]


def test_layers_that_all_of_their_ranks_have_reported_before_the_first_one_begins_are_announced_then() -> None:
    rig = Rig()
    for _ in range(2):
        rig.spans.computed(1, [2, 3])
    assert not rig.announced()
    rig.spans.begin(1, [FIRST])
    assert rig.announced() == [Span(0, 0, 8, 2, 4)]
    rig.spans.complete(KEY)
    assert rig.announced()[1:] == [Span(1, 0, 8, 0, 2)]


def test_layers_of_an_earlier_step_are_announced_with_the_blocks_of_the_newest() -> None:
    """A later stage may be a step behind. The agents believe the block list that comes last: one of an earlier step has too few
    blocks for what the first stage has announced before."""
    rig = Rig()
    rig.spans.begin(1, [FIRST])
    rig.spans.begin(2, [SECOND])
    for step, layers in ((2, [0, 1]), (2, [0, 1]), (1, [2, 3]), (1, [2, 3])):
        rig.spans.computed(step, layers)
    blocks = [argument[1] for name, argument in rig.port.calls if name == "spans_ready"]
    assert blocks == [SECOND.blocks, SECOND.blocks]
    rig.spans.forget(KEY)
    rig.spans.begin(3, [FIRST])
    rig.spans.computed(3, [0])
    rig.spans.computed(3, [0])
    assert rig.port.calls[-1][1][1] == FIRST.blocks, "what was retracted is computed into other blocks"


ORDERS = [
    (1, [0, 1]),
    (1, [0, 1]),
    (2, [0, 1]),
    (2, [0, 1]),
    (1, [2, 3]),
    (1, [2]),
    (1, [3]),
    (2, [2, 3]),
    (2, [2, 3]),
]


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order_everything_is_announced_once(seed: int) -> None:
    rig = Rig()
    reports = random.Random(seed).sample(ORDERS, len(ORDERS))
    rig.spans.begin(1, [FIRST])
    rig.spans.begin(2, [SECOND])
    for step, layers in reports:
        rig.spans.computed(step, layers)
    assert span_problem(rig.announced(), Span(0, 0, 11, 0, 4)) == ""
    assert sorted(span.number for span in rig.announced()) == list(range(len(rig.announced())))


def test_an_offer_does_not_wait_for_reports() -> None:
    rig = Rig()
    rig.spans.begin(1, [FIRST])
    rig.spans.computed(1, [0, 1])
    rig.spans.computed(1, [0])
    rig.spans.complete(KEY)
    assert span_problem(rig.announced(), Span(0, 0, 8, 0, 4)) == ""
    before = rig.announced()
    rig.spans.computed(1, [1, 2, 3])
    assert rig.announced() == before, "a late report announces nothing again"


def test_nothing_is_announced_of_what_was_retracted_and_numbers_start_over() -> None:
    rig = Rig()
    rig.spans.begin(1, [FIRST])
    rig.spans.computed(1, [0])
    rig.spans.computed(1, [0])
    assert rig.spans.forget(KEY)
    rig.spans.computed(1, [1, 2, 3])
    rig.spans.computed(1, [1, 2, 3])
    assert len(rig.announced()) == 1
    assert not rig.spans.forget(KEY)
    rig.spans.begin(2, [FIRST])
    for _ in range(2):
        rig.spans.computed(2, range(4))
    assert rig.announced()[1:] == [Span(0, 0, 8, 0, 4)]


def test_reports_that_come_after_a_retraction_announce_nothing_even_where_nothing_was_announced_before() -> None:
    rig = Rig()
    rig.spans.begin(1, [FIRST])
    rig.spans.computed(1, range(4))
    assert not rig.spans.forget(KEY)
    rig.spans.computed(1, range(4))
    assert not rig.announced()


def test_other_hand_offs_of_a_step_go_on_when_one_ends() -> None:
    rig = Rig()
    other = key_of("tx-2")
    rig.spans.begin(1, [FIRST, ComputedChunk("s", other, ((7,),), 0, 4)])
    rig.spans.computed(1, range(4))
    rig.spans.forget(KEY)
    rig.spans.computed(1, range(4))
    assert [argument[0] for name, argument in rig.port.calls if name == "spans_ready"] == [other]


def test_no_step_is_remembered_for_ever() -> None:
    rig = Rig()
    for step in range(1, 200):
        rig.spans.begin(step, [FIRST])
        rig.spans.computed(step, range(4))
        if step % 3:
            rig.spans.computed(step, range(4))
        rig.spans.forget(KEY)
        rig.spans.computed(step, range(4))
    assert not rig.spans._steps
    assert not rig.spans._numbers


CHUNK = ComputedChunk("r", KEY, ((1, 2),), 0, 8)
"""8 bytes in each layer of `layer_groups`."""


def reports(layers: int, least_bytes: int, order: list[int], chunks: tuple[ComputedChunk, ...] = (CHUNK,)) -> list[list[int]]:
    """What a rank reports of a step whose hooks come in this order, each report, and the rest last."""
    groups = layer_groups(layers, least_bytes)
    groups.begin(chunks)
    found = [list(groups.computed(layer)) for layer in order]
    return [each for each in (*found, list(groups.rest())) if each]


def test_each_report_has_half_of_the_layers_that_are_left() -> None:
    sizes = [len(each) for each in reports(32, 0, list(range(32)))]
    assert sizes == [16, 8, 4, 2, 1, 1]


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32, 61])
@pytest.mark.parametrize("least_bytes", [0, 8, 20, 1 << 20])
def test_every_layer_is_reported_once_whatever_hooks_there_are(layers: int, least_bytes: int) -> None:
    generator = random.Random(f"{layers} {least_bytes}")
    for _ in range(20):
        order = generator.choices(range(-1, layers + 1), k=generator.randrange(2 * layers))
        found = reports(layers, least_bytes, order)
        assert sorted(layer for each in found for layer in each) == list(range(layers))


def test_no_report_but_the_last_is_smaller_than_the_least() -> None:
    found = reports(32, 40, list(range(32)))
    assert [len(each) for each in found] == [16, 8, 5, 3]
    assert len(reports(32, 32 * 8 + 1, list(range(32)))) == 1


def test_a_step_without_chunks_reports_nothing_even_after_one_that_ended_early() -> None:
    groups = layer_groups(4)
    groups.begin((CHUNK,))
    assert list(groups.computed(0)) == []
    groups.begin(())
    assert [list(groups.computed(layer)) for layer in range(4)] == [[]] * 4
    assert list(groups.rest()) == []
