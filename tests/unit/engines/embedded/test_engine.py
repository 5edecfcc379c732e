"""The engine's doors: what it refuses, how it reports, and what a failing model, sink or caller does to it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_fakes import SOURCE, VOCABULARY, Answer, Bench, FakePort, alone, key_of

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.engine import Engine, EngineBusy, EngineSettings, EngineStopped
from kvbaton.engines.embedded.model import TokenSpan, Written
from kvbaton.engines.embedded.request import FinishReason, FromSource, GenerationRequest, Sampling, Sink, TokenOutput, ToTarget
from kvbaton.engines.embedded.weights import load_model
from kvbaton.errors import BadRequest, ConfigError

WAIT_S = 20.0


@pytest.mark.parametrize(
    ("prompt", "sampling", "field", "message"),
    [
        ([], {}, "prompt", "no tokens"),
        ([1, VOCABULARY], {}, "prompt", f"to {VOCABULARY}; the model has 0 to {VOCABULARY - 1}"),
        ([-1], {}, "prompt", "from -1"),
        ([1], {"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ([1], {"max_tokens": -3}, "max_tokens", "max_tokens is -3"),
        ([1], {"stop": ("x", "")}, "stop", "empty"),
        ([1] * 32, {}, "prompt", "32 tokens .* context is 256 tokens and the cache holds 32; send at most 31"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: list[int], sampling: dict[str, Any], field: str, message: str) -> None:
    bench = Bench(blocks=8)
    with pytest.raises(BadRequest, match=message) as caught:
        bench.submit(prompt, **sampling)
    assert caught.value.field == field
    assert not any(bench.engine.stats().requests.values())


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    bench = Bench(context_tokens=10)
    with pytest.raises(BadRequest, match="10 tokens and needs room for one more; the model's context is 10"):
        bench.submit([1] * 10)
    longest = bench.submit([1] * 9, max_tokens=50)
    bench.run(longest)
    assert len(longest.token_ids) == 1
    assert longest.last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("handoff", [ToTarget(key_of("k")), FromSource(key_of("k"), SOURCE)])
def test_without_agents_there_are_no_handoffs(handoff: ToTarget | FromSource) -> None:
    with pytest.raises(BadRequest, match="takes no part in hand-offs"):
        Bench().submit([1], handoff=handoff)


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_waiting=3, max_sequences=1)
    answers = [bench.submit([token]) for token in (1, 2, 3)]
    with pytest.raises(EngineBusy, match="3 sequences wait already and max_waiting is 3"):
        bench.submit([4])
    bench.step()
    answers.append(bench.submit([4]))
    with pytest.raises(EngineBusy):
        bench.submit([5])
    bench.run(*answers)
    bench.assert_empty()


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="step_tokens is 0"):
        EngineSettings(step_tokens=0)


def test_outputs_carry_logprobs_and_the_last_one_the_record() -> None:
    bench = Bench()
    answer = bench.submit([1, 2, 3], logprobs=2, max_tokens=3)
    bench.run(answer)
    assert [output.record is None for output in answer.outputs] == [True, True, False]
    for output in answer.outputs:
        assert output.top_logprobs[0] == (output.token_id, output.logprob)
        assert -math.inf < output.top_logprobs[1][1] <= output.logprob < 0
    record = answer.last.record
    assert record is not None
    assert record.queue_s > 0
    assert record.prefill_s > 0
    assert record.first_token_s == pytest.approx(record.queue_s + record.prefill_s)
    assert not record.handed_off


def test_a_seed_repeats_an_answer_and_other_seeds_do_not() -> None:
    answers = [alone([1, 2, 3], temperature=2.0, seed=seed).token_ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    assert alone([1, 2, 3], temperature=2.0).token_ids != alone([1, 2, 3], temperature=2.0).token_ids


def test_every_output_draws_anew() -> None:
    def flat(spans: Sequence[TokenSpan], cache: PagedCache, written: Written | None = None) -> npt.NDArray[np.float32]:
        return np.zeros((len(spans), VOCABULARY), np.float32)

    bench = Bench()
    bench.model.forward = flat  # type: ignore[method-assign]
    answer = bench.submit([1, 2, 3], temperature=1.0, seed=1)
    bench.run(answer)
    assert len(set(answer.token_ids)) > 4


def test_statistics_count() -> None:
    bench = Bench(max_sequences=1)
    first, second = bench.submit([1, 2, 3, 4, 5], max_tokens=2), bench.submit([6], max_tokens=4)
    assert bench.engine.stats().requests["waiting"] == 2
    bench.step()
    stats = bench.engine.stats()
    assert stats.requests == {"waiting": 1, "prefilling": 0, "fetching": 0, "decoding": 1, "held": 0, "retracting": 0}
    assert (stats.blocks_in_use, stats.blocks_held, stats.blocks_free) == (2, 0, 62)
    bench.run(first, second)
    stats = bench.engine.stats()
    assert stats.requests_total == {"stop": 0, "length": 2, "cancelled": 0, "crowded_out": 0, "error": 0}
    assert (stats.prompt_tokens_total, stats.generated_tokens_total, stats.steps_total) == (6, 6, 6)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_gives_its_blocks_back(steps: int) -> None:
    bench = Bench(step_tokens=8)
    answer = bench.submit([1] * 15, name="r", max_tokens=50)
    for _ in range(steps):
        bench.step()
    bench.cancel("r")
    bench.cancel("unknown")
    bench.step()
    assert answer.last.finish_reason is FinishReason.CANCELLED
    assert answer.last.token_id == -1
    assert answer.last.record is not None
    bench.assert_empty()
    assert bench.engine.stats().requests_total["cancelled"] == 1


def test_a_cancel_of_a_finished_request_is_ignored() -> None:
    bench = Bench()
    answer = bench.submit([1], name="r")
    bench.run(answer)
    bench.cancel("r")
    bench.step()
    assert answer.last.finish_reason is FinishReason.LENGTH


def test_a_request_cancelled_while_preempted_leaves_the_queue() -> None:
    bench = Bench(blocks=6)
    old = bench.submit([1, 2, 3], max_tokens=15)
    young = bench.submit([4, 5, 6], name="young", max_tokens=15)
    while not bench.engine.stats().preemptions_total:
        bench.step()
    bench.cancel("young")
    bench.run(old, young)
    assert young.last.finish_reason is FinishReason.CANCELLED
    bench.assert_empty()


def test_a_second_request_of_the_same_id_fails_with_the_reason() -> None:
    bench = Bench()
    first, second = bench.submit([1], name="r"), bench.submit([2], name="r")
    bench.run(first, second)
    assert first.last.finish_reason is FinishReason.LENGTH
    assert second.last.finish_reason is FinishReason.ERROR
    assert "r is under way already" in second.last.error


def test_a_failing_model_ends_the_requests_of_that_step_only() -> None:
    bench = Bench(max_sequences=1)
    broken, waiting = bench.submit([1, 2, 3]), bench.submit([4, 5])
    bench.step()

    def fail() -> None:
        bench.model.before_step = lambda: None
        raise FloatingPointError("no luck")

    bench.model.before_step = fail
    bench.step()
    assert broken.last.finish_reason is FinishReason.ERROR
    assert "no luck" in broken.last.error
    bench.run(waiting)
    assert waiting.token_ids == alone([4, 5]).token_ids
    again = bench.submit([1, 2, 3])
    bench.run(again)
    assert again.token_ids == alone([1, 2, 3]).token_ids
    bench.assert_empty()


def test_a_failing_sink_cancels_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    calls: list[TokenOutput] = []

    def sink(output: TokenOutput) -> None:
        calls.append(output)
        raise OSError("the client is gone")

    bench.engine.submit(GenerationRequest(RequestId("bad"), (1,), Sampling(max_tokens=50)), sink)
    good = bench.submit([2, 3])
    with caplog.at_level(logging.ERROR):
        bench.run(good)
    assert len(calls) == 1
    assert "the sink of request bad failed" in caplog.text
    assert good.token_ids == alone([2, 3]).token_ids
    assert bench.engine.stats().requests_total["cancelled"] == 1
    bench.assert_empty()


def test_an_idle_step_does_nothing() -> None:
    bench = Bench()
    assert not bench.step()
    bench.submit([1])
    assert bench.step()


class Waiter(Answer):
    """An answer that another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()

    def __call__(self, output: TokenOutput) -> None:
        super().__call__(output)
        if output.finish_reason is not None:
            self.done.set()


def test_the_thread_serves_what_other_threads_submit() -> None:
    bench = Bench()
    waiters = [Waiter() for _ in range(20)]

    def submit(number: int) -> None:
        for index in range(number, 20, 4):
            request = GenerationRequest(RequestId(f"r{index}"), (index + 1, 2), Sampling(max_tokens=5, ignore_eos=True))
            bench.engine.submit(request, waiters[index])

    with bench.engine:
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert all(waiter.done.wait(WAIT_S) for waiter in waiters)
    for index, waiter in enumerate(waiters):
        assert waiter.token_ids == alone([index + 1, 2], max_tokens=5).token_ids
    bench.assert_empty()


def test_an_idle_engine_wakes_at_once_for_news() -> None:
    port = FakePort()
    seen = threading.Event()

    def events() -> list[Any]:
        seen.set()
        return []

    port.events = events  # type: ignore[method-assign]
    bench = Bench(port=port, idle_wait_s=3600.0)
    with bench.engine:
        for _ in range(3):
            seen.clear()
            bench.engine.wake()
            assert seen.wait(WAIT_S)
        waiter = Waiter()
        bench.engine.submit(GenerationRequest(RequestId("r"), (1,), Sampling(max_tokens=2)), waiter)
        assert waiter.done.wait(WAIT_S)


def test_what_comes_during_an_idle_step_is_not_slept_over() -> None:
    port, waiter = FakePort(), Waiter()
    bench = Bench(port=port, idle_wait_s=3600.0)
    requests = [GenerationRequest(RequestId("r"), (1,), Sampling(max_tokens=2))]

    def events() -> list[Any]:
        while requests:
            bench.engine.submit(requests.pop(), waiter)
        return []

    port.events = events  # type: ignore[method-assign]
    with bench.engine:
        assert waiter.done.wait(WAIT_S)


def test_closing_ends_what_lives_and_refuses_what_comes() -> None:
    bench = Bench(port=FakePort(), max_sequences=1)
    running, waiting = bench.submit([1], max_tokens=50), bench.submit([2])
    bench.step()
    fresh = bench.submit([3])
    bench.engine.close()
    bench.engine.close()
    for answer in (running, waiting, fresh):
        assert answer.last.finish_reason is FinishReason.CANCELLED
        assert answer.last.error == "the engine is stopping"
    with pytest.raises(EngineStopped, match="is refused: the engine is stopping"):
        bench.submit([4])
    with pytest.raises(EngineStopped, match="starts once"):
        bench.engine.start()
    bench.assert_empty()


def test_closing_has_a_deadline() -> None:
    bench = Bench(close_s=0.01)
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        leave.wait(WAIT_S)

    bench.model.before_step = hang
    bench.engine.start()
    answer = bench.submit([1], max_tokens=50)
    assert inside.wait(WAIT_S)
    with pytest.raises(EngineStopped, match=r"not ended in 0\.01 s"):
        bench.engine.close()
    assert not answer.is_finished
    leave.set()
    assert bench.engine._thread is not None
    bench.engine._thread.join(WAIT_S)
    bench.engine.close()
    assert answer.last.error == "the engine is stopping"


def test_a_bug_while_a_request_is_taken_ends_that_request_and_no_other() -> None:
    bench = Bench()
    add = bench.engine._core.add

    def refuse_one(request: GenerationRequest, sink: Sink, submitted_s: float) -> None:
        if request.request_id == "bad":
            raise ZeroDivisionError("taken badly")
        add(request, sink, submitted_s)

    bench.engine._core.add = refuse_one  # type: ignore[method-assign]
    first, bad, last = (bench.submit([1, 2, 3], name=name) for name in ("first", "bad", "last"))
    bench.run(first, bad, last)
    assert bad.last.finish_reason is FinishReason.ERROR
    assert "taken badly" in bad.last.error
    assert last.token_ids == first.token_ids == alone([1, 2, 3]).token_ids
    bench.assert_empty()


def test_a_bug_in_a_step_does_not_kill_the_thread() -> None:
    bench = Bench(idle_wait_s=0.01)
    waiter = Waiter()

    def refuse(*_: object) -> list[object]:
        raise ZeroDivisionError("planned badly")

    plan = bench.engine._core._scheduler.plan
    bench.engine._core._scheduler.plan = refuse  # type: ignore[assignment, method-assign]
    with bench.engine:
        bench.engine.submit(GenerationRequest(RequestId("r"), (1,), Sampling(max_tokens=2)), waiter)
        assert waiter.done.wait(WAIT_S)
        assert waiter.last.finish_reason is FinishReason.ERROR
        bench.engine._core._scheduler.plan = plan  # type: ignore[method-assign]
        second = Waiter()
        bench.engine.submit(GenerationRequest(RequestId("s"), (1,), Sampling(max_tokens=2)), second)
        assert second.done.wait(WAIT_S)
        assert second.last.finish_reason is not FinishReason.ERROR


def test_a_real_model_answers_the_same_whatever_the_batch() -> None:
    loaded = load_model("tiny")
    prompts = [tuple(int(i) for i in np.random.default_rng(n).integers(0, loaded.config.vocab_size, 20 + n)) for n in range(3)]

    def answer(blocks: int, step_tokens: int, asked: list[tuple[int, ...]]) -> list[list[int]]:
        cache = PagedCache(loaded.config, blocks, 4)
        engine = Engine(loaded, cache, None, EngineSettings(step_tokens=step_tokens))
        answers = [Answer() for _ in asked]
        for index, (prompt, one) in enumerate(zip(asked, answers, strict=True)):
            sampling = Sampling(max_tokens=12, ignore_eos=True)
            engine.submit(GenerationRequest(RequestId(str(index)), prompt, sampling), one)
        while engine.step():
            pass
        return [one.token_ids for one in answers]

    expected = [answer(64, 1000, [prompt])[0] for prompt in prompts]
    assert answer(64, 7, prompts) == expected
    assert answer(16, 32, prompts) == expected
