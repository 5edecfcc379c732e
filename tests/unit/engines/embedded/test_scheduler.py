"""Batching never changes an answer: chunks, shared prefixes and preemption give the tokens of an otherwise idle engine."""

from __future__ import annotations

import random

import pytest
from engine_fakes import BLOCK_TOKENS, Bench, alone
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engines.embedded.request import FinishReason

PROMPT = list(range(30, 53))


def test_the_fake_model_sees_every_token_and_its_place() -> None:
    answers = {tuple(alone(prompt).token_ids) for prompt in ([1, 2, 3], [2, 1, 3], [1, 2, 4], [1, 2], [5, 2, 3])}
    assert len(answers) == 5


@pytest.mark.parametrize("step_tokens", [1, 4, 7, 22, 23, 24])
def test_a_chunked_prefill_gives_the_same_tokens(step_tokens: int) -> None:
    bench = Bench(step_tokens=step_tokens)
    answer = bench.submit(PROMPT)
    bench.run(answer)
    assert answer.token_ids == alone(PROMPT).token_ids
    assert sum(count for step in bench.model.steps for _, count in step) == len(PROMPT) + 7
    assert max(count for step in bench.model.steps for _, count in step) == min(max(step_tokens, BLOCK_TOKENS), len(PROMPT))
    bench.assert_empty()


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    bench = Bench(step_tokens=6)
    short = bench.submit([1, 2], max_tokens=30)
    bench.step()
    bench.submit(PROMPT)
    bench.step()
    bench.step()
    assert bench.model.steps[1:] == [[(2, 1), (0, 5)], [(3, 1), (5, 5)]]
    assert len(short.token_ids) == 3


def test_several_prefills_share_a_step() -> None:
    bench = Bench(step_tokens=10)
    answers = [bench.submit([7, 8, 9, token]) for token in (1, 2, 3)]
    bench.step()
    assert bench.model.steps[0] == [(0, 4), (0, 4), (0, 2)]
    bench.run(*answers)
    assert [answer.token_ids for answer in answers] == [alone([7, 8, 9, token]).token_ids for token in (1, 2, 3)]


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = Bench()
    first, tail = bench.submit(PROMPT), [1, 2, 3]
    bench.run(first)
    bench.model.steps.clear()
    second = bench.submit(PROMPT + tail)
    bench.run(second)
    assert second.token_ids == alone(PROMPT + tail).token_ids
    assert bench.model.steps[0] == [(20, 6)]
    assert second.last.record is not None
    assert second.last.record.cached_tokens == 20
    assert bench.engine.stats().cached_tokens_total == 20


def test_the_last_prompt_token_is_always_computed() -> None:
    bench, prompt = Bench(), PROMPT[:8]
    bench.run(bench.submit(prompt, max_tokens=1))
    again = bench.submit(prompt)
    bench.run(again)
    assert bench.model.steps[1] == [(4, 4)]
    assert again.token_ids == alone(prompt).token_ids


def test_the_answer_of_a_first_turn_is_cached_for_the_second() -> None:
    bench = Bench()
    first = bench.submit(PROMPT, max_tokens=9)
    bench.run(first)
    longer = PROMPT + first.token_ids + [5]
    second = bench.submit(longer)
    bench.run(second)
    assert second.last.record is not None
    assert second.last.record.cached_tokens == 28
    assert second.token_ids == alone(longer).token_ids


def test_preempted_requests_give_the_same_tokens_and_repeat_nothing() -> None:
    bench = Bench(blocks=12)
    prompts = [[token, token + 1, token + 2] for token in (10, 20, 30, 40)]
    answers = [bench.submit(prompt, max_tokens=25, temperature=1.0, seed=3) for prompt in prompts]
    bench.run(*answers)
    assert bench.engine.stats().preemptions_total > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == alone(prompt, max_tokens=25, temperature=1.0, seed=3).token_ids
        assert len(answer.outputs) == 25
    bench.assert_empty()


def test_the_youngest_gives_way() -> None:
    bench = Bench(blocks=6)
    old = bench.submit([1, 2, 3], max_tokens=12)
    young = bench.submit([4, 5, 6], max_tokens=12)
    while not bench.engine.stats().preemptions_total:
        bench.step()
    assert bench.engine.stats().requests["waiting"] == 1
    bench.run(old)
    assert not young.is_finished
    bench.run(young)


def test_who_gave_way_comes_back_first() -> None:
    bench = Bench(blocks=6)
    old = bench.submit([1, 2, 3], max_tokens=12)
    young = bench.submit([4, 5, 6], max_tokens=20)
    youngest = bench.submit([7] * 20, max_tokens=1)
    bench.run(old, young)
    assert bench.engine.stats().preemptions_total > 0
    assert not youngest.is_finished
    bench.run(youngest)


def test_first_come_first_served() -> None:
    bench = Bench(blocks=8, max_sequences=2)
    answers = [bench.submit([token] * 9, max_tokens=3) for token in (1, 2, 3)]
    order: list[int] = []
    while len(order) < 3:
        bench.step()
        order += [index for index, answer in enumerate(answers) if answer.is_finished and index not in order]
    assert order == [0, 1, 2]


def test_no_more_sequences_run_than_allowed() -> None:
    bench = Bench(max_sequences=3)
    answers = [bench.submit([token, token]) for token in range(1, 9)]
    bench.run(*answers)
    assert max(len(step) for step in bench.model.steps) == 3


def test_an_answer_may_fill_the_whole_pool_and_ends_there() -> None:
    bench = Bench(blocks=3)
    answer = bench.submit([1, 2, 3], max_tokens=100)
    bench.run(answer)
    assert len(answer.token_ids) == 3 * BLOCK_TOKENS - 3
    assert answer.last.finish_reason is FinishReason.LENGTH
    exact = bench.submit(list(range(11)), max_tokens=100)
    bench.run(exact)
    assert len(exact.token_ids) == 1


def test_blocks_of_a_growing_sequence_stay_consecutive() -> None:
    bench = Bench(blocks=256)
    answers = [bench.submit([token] * 5, max_tokens=20, ignore_eos=True) for token in (1, 2, 3)]
    seen: set[bool] = set()
    while not all(answer.is_finished for answer in answers):
        bench.step()
        for sequence in bench.engine._core._scheduler._running:
            seen.add(sequence.blocks == list(range(sequence.blocks[0], sequence.blocks[0] + len(sequence.blocks))))
    assert seen == {True}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(8, 24), st.sampled_from([1, 5, 16, 64]), st.integers(1, 5))
def test_any_load_gives_the_answers_of_an_idle_engine(seed: int, blocks: int, step_tokens: int, most: int) -> None:
    chance = random.Random(seed)
    bench = Bench(blocks=blocks, step_tokens=step_tokens, max_sequences=most)
    answers = []
    for _ in range(6):
        prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 20))]
        wanted = chance.randrange(1, 12)
        answers.append((prompt, wanted, bench.submit(prompt, max_tokens=wanted)))
        for _ in range(chance.randrange(4)):
            bench.step()
    bench.run(*(answer for _, _, answer in answers))
    for prompt, wanted, answer in answers:
        assert answer.token_ids == alone(prompt, max_tokens=wanted).token_ids
    bench.assert_empty()
