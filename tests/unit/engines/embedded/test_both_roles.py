"""Two real engines with both roles, each too small for what it computes for the other: neither waits for the other for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from engine_fakes import key_of
from hypothesis import given
from hypothesis import strategies as st
from pair_rig import EnginePair, Instance, Waiter, alone, assert_equal, prompt_of

from kvbaton.config import Limits
from kvbaton.core.grants import Reserve, may_start_prefill
from kvbaton.core.handoff import Mode
from kvbaton.engines.embedded.request import FinishReason, FromSource, TokenOutput, ToTarget

MODES = pytest.mark.parametrize("mode", list(Mode))
BLOCKS = 16
"""Of four tokens: two prompts of six blocks fit, and then nothing else."""
PROMPTS = [prompt_of(24, seed) for seed in range(6)]
OUTPUTS = 4


class _Router(Waiter):
    """Waits for a prefill, and then asks its target, as a router does in pull."""

    def __init__(self, ask_target: Callable[[], object]) -> None:
        super().__init__()
        self._ask_target = ask_target

    def __call__(self, output: TokenOutput) -> None:
        super().__call__(output)
        if output.finish_reason is FinishReason.LENGTH:
            self._ask_target()


def _cross(pair: EnginePair) -> list[Waiter]:
    """Half of the prompts go one way and half the other; all that can begin begins before anything has ended."""
    instances, answers = (pair.source, pair.target), [Waiter() for _ in PROMPTS]

    def decode(source: Instance, target: Instance, number: int) -> None:
        handoff = FromSource(key_of(f"t{number}"), source.driver.address)
        target.submit(PROMPTS[number], handoff, answers[number], max_tokens=OUTPUTS)

    for number, prompt in enumerate(PROMPTS):
        source, target = instances[number % 2], instances[1 - number % 2]
        waiter = Waiter()
        if pair.mode is Mode.PUSH:
            decode(source, target, number)
        else:
            waiter = _Router(partial(decode, source, target, number))
        source.submit(prompt, ToTarget(key_of(f"t{number}")), waiter, max_tokens=1)
    return answers


@MODES
def test_neither_waits_for_the_other_for_ever(mode: Mode) -> None:
    roles = {"has_both_roles": True, "blocks": BLOCKS}
    pair = EnginePair(mode, source=dict(roles), target=dict(roles))
    answers = _cross(pair)
    with pair:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert_equal(answer, alone(prompt, max_tokens=OUTPUTS))
            assert answer.record.handed_off
        pair.wait_empty()


def test_control_without_the_reserve_they_wait_until_a_limit_ends_it() -> None:
    """Each of the first two was computed, and its target has no memory: it is full of what the other has not fetched."""
    limits = Limits(transfer_timeout=0.5, defer_timeout=1.0, queue_timeout=1.0, retry=0.1)
    pair = EnginePair(Mode.PULL, blocks=BLOCKS, limits=limits)
    answers = _cross(pair)
    with pair:
        ended = [answers[number].wait().last for number in range(2)]
        assert any(output.finish_reason is FinishReason.ERROR for output in ended), ended


@given(st.data(), st.sampled_from(Mode), st.integers(1, 20))
def test_whatever_waits_leaves_room_for_what_it_waits_for(data: st.DataObject, mode: Mode, largest: int) -> None:
    """However sources without a grant and targets fill an instance, what waits for nothing fits when the rest has ended."""
    total = data.draw(st.integers(2 * largest, 4 * largest))
    reserve = Reserve.of(mode, largest=largest, total=total, both_roles=True)
    waiting = {"source": 0, "target": 0}
    for kind, needed in data.draw(st.lists(st.tuples(st.sampled_from(["source", "target"]), st.integers(1, largest)))):
        if kind == "target" and mode is Mode.PULL:
            continue  # Its source is complete: it ends by itself.
        left, free = getattr(reserve, kind), total - sum(waiting.values())
        if may_start_prefill(free_blocks=free, needed_blocks=needed, reserved_blocks=left, has_grant=False):
            waiting[kind] += needed
    assert total - sum(waiting.values()) >= largest, "a source with a grant, in pull a target, has room"
    assert total - waiting["source"] >= largest + reserve.target, "beside sources a target has room, and what it leaves"
