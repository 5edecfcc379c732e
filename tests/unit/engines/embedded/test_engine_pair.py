"""Two real engines hand over through real agents, in push and in pull: the answers are those of one engine."""

from __future__ import annotations

import pytest
from pair_rig import BLOCK_TOKENS, EnginePair, alone, assert_equal, prompt_of

from kvbaton.config import Limits, OnFailure
from kvbaton.core.handoff import Mode
from kvbaton.core.timeline import Side, Stage
from kvbaton.engines.embedded.request import FinishReason
from kvbaton.transport.faulty import Faults

MODES = pytest.mark.parametrize("mode", list(Mode))
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4


@MODES
def test_many_at_once_are_all_equal(mode: Mode) -> None:
    prompts = [prompt_of(5 + 3 * number, number) for number in range(12)]
    with EnginePair(mode, blocks=128, source={"step_tokens": 16}) as pair:
        prefills = [pair.prefill(prompt, f"t{number}") for number, prompt in enumerate(prompts)]
        if mode is Mode.PULL:
            for prefill in prefills:
                prefill.wait()
        answers = [pair.decode(prompt, f"t{number}") for number, prompt in enumerate(prompts)]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_equal(answer, alone(prompt))
            assert answer.record.handed_off
            assert not answer.record.recomputed
            assert answer.record.bytes_moved == answer.record.bytes_planned == len(prompt) * TOKEN_BYTES
        pair.wait_empty()


@MODES
def test_without_the_copies_the_poison_shows(mode: Mode) -> None:
    """Negative control of every test of this kind."""
    prompt = prompt_of(30)
    with EnginePair(mode) as pair:
        pair.target.transport.set_faults(Faults(drop_writes=True))
        answer = pair.hand_off(prompt, "t")
        assert answer.token_ids != alone(prompt).token_ids
        pair.wait_empty()


def test_in_push_layers_leave_before_the_prefill_is_complete() -> None:
    prompt = prompt_of(40)
    with EnginePair(Mode.PUSH, source={"step_tokens": 8}) as pair:
        assert_equal(pair.hand_off(prompt, "t"), alone(prompt))
        pair.wait_empty()
        notes = [note for note in pair.source.notes if note.side is Side.SOURCE]
    computed = [note.end_token for note in notes if note.stage is Stage.COMPUTED]
    assert computed == [8, 16, 24, 32, 40]
    order = [note.stage for note in sorted(notes, key=lambda note: note.at)]
    assert order.index(Stage.ANNOUNCED) < order.index(Stage.PREFILLED)


@MODES
def test_a_failed_copy_is_computed_here_if_the_settings_say_so(mode: Mode) -> None:
    prompt = prompt_of(20)
    with EnginePair(mode, on_failure=OnFailure.RECOMPUTE) as pair:
        pair.target.transport.set_faults(Faults(fail_after=0))
        answer = pair.hand_off(prompt, "t", temperature=1.0, seed=3)
        assert_equal(answer, alone(prompt, temperature=1.0, seed=3))
        assert (answer.record.recomputed, answer.record.handed_off) == (True, False)
        pair.wait_empty()


@MODES
def test_a_failed_copy_fails_the_request_by_default(mode: Mode) -> None:
    with EnginePair(mode) as pair:
        pair.target.transport.set_faults(Faults(fail_after=0))
        answer = pair.hand_off(prompt_of(20), "t")
        assert answer.last.finish_reason is FinishReason.ERROR
        pair.wait_empty()


def test_both_pools_tiny_and_full() -> None:
    """Rule 7: more requests than fit on either side, and neither waits for the other for ever."""
    prompts = [prompt_of(5 + 2 * number, number) for number in range(10)]
    with EnginePair(Mode.PUSH, blocks=8, source={"step_tokens": 6}) as pair:
        for number, prompt in enumerate(reversed(prompts)):
            pair.prefill(prompt, f"t{len(prompts) - 1 - number}")
        answers = [pair.decode(prompt, f"t{number}", max_tokens=4) for number, prompt in enumerate(prompts)]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_equal(answer, alone(prompt, max_tokens=4))
        pair.wait_empty()


def test_a_source_without_a_target_ends_after_its_timeout() -> None:
    with EnginePair(Mode.PUSH, blocks=8, limits=Limits(transfer_timeout=0.5, defer_timeout=1.0, retry=0.2)) as pair:
        waiter = pair.prefill(prompt_of(3 * BLOCK_TOKENS), "t").wait()
        assert waiter.last.finish_reason is FinishReason.ERROR
        assert "no grant of a target for 1 s (defer_timeout)" in waiter.last.error
        pair.source.wait_empty()
