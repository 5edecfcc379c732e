"""Two real engines with both roles, each too small for what it computes for the other: neither waits for the other for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from engine_fakes import PULL, PUSH, SOURCE, Bench, FakePort, key_of
from hypothesis import given
from hypothesis import strategies as st
from pair_rig import EnginePair, Instance, Waiter, alone, assert_equal, prompt_of

from kvbaton.agent.engine_port import TargetEnded
from kvbaton.config import HandoffSettings, Limits, OnFailure
from kvbaton.core.grants import Reserve, may_start_prefill
from kvbaton.core.handoff import Mode, Outcome
from kvbaton.engines.embedded.request import ApiCall, FinishReason, FromSource, TokenOutput, ToTarget

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


def _bench(mode: Mode, blocks: int, **settings: object) -> tuple[Bench, FakePort]:
    """An engine with both roles, whose largest request takes all of its blocks."""
    port, handoff = FakePort(), PUSH if mode is Mode.PUSH else PULL
    return Bench(blocks, port, blocks * 4, handoff=handoff, has_both_roles=True, **settings), port


@MODES
@pytest.mark.parametrize("cached", [0, 16])
def test_one_too_large_to_leave_the_reserve_starts_alone_whatever_is_cached(mode: Mode, cached: int) -> None:
    bench, port = _bench(mode, 10)
    if cached:
        bench.run(bench.submit(range(cached), max_tokens=1))
    handoff = FromSource(key_of("t"), SOURCE) if mode is Mode.PUSH else ToTarget(key_of("t"))
    bench.submit(range(32), handoff=handoff, max_tokens=1)
    for _ in range(10):
        bench.step()
    assert (port.pulls if mode is Mode.PUSH else port.offers).keys() == {key_of("t")}


def test_one_too_large_to_leave_the_reserve_holds_up_no_other() -> None:
    """Sources with a grant keep coming, so that it is never alone; small targets start all the same."""
    bench, port = _bench(Mode.PUSH, 16)
    bench.submit(range(8), handoff=ToTarget(key_of("s")), max_tokens=1)
    bench.step()
    port.grant(key_of("s"))
    bench.step()
    bench.submit(range(44), handoff=FromSource(key_of("large"), SOURCE))
    small = [key_of("one"), key_of("two")]
    for key in small:
        bench.submit([1, 2], handoff=FromSource(key, SOURCE), max_tokens=1)
    for _ in range(3):
        bench.step()
    assert port.pulls.keys() == set(small)
    assert bench.engine.stats().requests["waiting"] == 1


def test_targets_that_step_aside_make_room_in_a_full_queue() -> None:
    bench, _ = _bench(Mode.PUSH, 16, max_waiting=8)
    greedy = ApiCall("greedy", 12)
    crowd = [
        bench.submit(range(number, number + 24), handoff=FromSource(key_of(f"t{number}"), SOURCE), call=greedy)
        for number in range(8)
    ]
    bench.step()
    single = bench.submit([7, 8, 9], call=ApiCall("another"), max_tokens=2)
    bench.step()
    ended = [each for each in crowd if each.is_finished and each.last.finish_reason is FinishReason.CROWDED_OUT]
    assert len(ended) == 1
    bench.run(single)


def test_a_target_that_stepped_aside_is_computed_here_at_once_when_its_source_fails() -> None:
    """As a plain request, not behind those that have to leave blocks."""
    port = FakePort()
    handoff = HandoffSettings(mode=Mode.PUSH, on_failure=OnFailure.RECOMPUTE)
    bench = Bench(16, port, 64, handoff=handoff, has_both_roles=True)
    for name in ("one", "two"):  # the first takes half of the blocks, and there is no room for the second
        bench.submit(range(24), handoff=FromSource(key_of(name), SOURCE))
    last = bench.submit([1, 2, 3], handoff=FromSource(key_of("last"), SOURCE), max_tokens=2)
    bench.step()
    assert port.pulls.keys() == {key_of("one")}
    port.news.append(TargetEnded(key_of("last"), Outcome.FAILED, "its source failed"))
    bench.run(last, most_steps=20)
    assert last.last.finish_reason is FinishReason.LENGTH
