"""Push in the engine, with a scripted port: what is announced when, what may start without a grant, what is preempted."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import PUSH, SOURCE, Answer, Bench, FakePort, alone, key_of

from kvbaton.agent.engine_port import HandoffStats, Landed, SourceEnded, SpansReady, TargetEnded
from kvbaton.config import HandoffSettings, OnFailure
from kvbaton.core.handoff import Aux, HandoffKey, Mode, Outcome, Span, span_problem
from kvbaton.core.timeline import Side, Stage
from kvbaton.engines.embedded.request import FinishReason, FromSource, ToTarget
from kvbaton.errors import LocalError

PROMPT = list(range(30, 53))
KEY = key_of("t")
LONG = list(range(30, 57))
RECOMPUTE = HandoffSettings(mode=Mode.PUSH, on_failure=OnFailure.RECOMPUTE)


def pusher(blocks: int = 64, context_tokens: int = 32, **settings: Any) -> Bench:
    """A source that keeps 8 blocks free of work without a grant, unless set otherwise."""
    return Bench(blocks=blocks, port=FakePort(), context_tokens=context_tokens, handoff=PUSH, **settings)


def push(bench: Bench, name: str = "t", prompt: list[int] = PROMPT) -> Answer:
    return bench.submit(prompt, name=name, handoff=ToTarget(key_of(name)))


def announced(bench: Bench, key: HandoffKey = KEY) -> list[tuple[int, int, int, int, int]]:
    spans = bench.port.spans.get(key, [])
    return [(span.number, span.first_token, span.end_token, span.first_layer, span.end_layer) for span in spans]


def test_every_layer_of_every_chunk_is_announced_once_it_is_computed() -> None:
    bench = pusher(step_tokens=10)
    answer = push(bench)
    bench.run(answer)
    assert announced(bench) == [
        (0, 0, 10, 0, 1),
        (1, 0, 10, 1, 2),
        (2, 10, 20, 0, 1),
        (3, 10, 20, 1, 2),
        (4, 20, 23, 0, 1),
        (5, 20, 23, 1, 2),
    ]
    assert span_problem(bench.port.spans[KEY], Span(0, 0, 23, 0, 2)) == ""
    assert bench.port.calls[-1] == ("offer", KEY)
    assert bench.port.offers[KEY].blocks == bench.port.span_blocks[KEY]
    assert answer.token_ids == alone(PROMPT).token_ids[:1]


def test_a_layer_is_announced_before_the_next_one_is_written() -> None:
    bench = pusher()
    seen: list[tuple[int, int]] = []

    def look(layer: int, block: int, slot: int) -> None:
        seen.append((layer, len(bench.port.spans.get(KEY, []))))

    bench.model.on_write = look
    bench.run(push(bench))
    assert set(seen) == {(0, 0), (1, 1)}


def test_what_the_prefix_cache_has_is_announced_once_with_all_layers() -> None:
    bench = pusher()
    bench.run(bench.submit(PROMPT[:9], max_tokens=1))
    answer = push(bench)
    bench.run(answer)
    assert announced(bench) == [(0, 0, 8, 0, 2), (1, 8, 23, 0, 1), (2, 8, 23, 1, 2)]
    assert answer.token_ids == alone(PROMPT).token_ids[:1]


def test_in_pull_nothing_is_announced_before_the_offer() -> None:
    bench = Bench(port=FakePort(), step_tokens=8)
    bench.run(bench.submit(PROMPT, handoff=ToTarget(KEY)))
    assert bench.port.calls == [("offer", KEY)]


def test_one_call_announces_a_layer_of_every_source_in_the_step() -> None:
    batches: list[int] = []

    class CountingPort(FakePort):
        def spans_ready_all(self, ready: Any) -> None:
            batches.append(len(ready))
            super().spans_ready_all(ready)

    bench = Bench(blocks=64, port=CountingPort(), context_tokens=32, handoff=PUSH)
    answers = [push(bench, f"t{i}", [i, i, i]) for i in range(5)]
    plain = bench.submit([9, 9])
    bench.run(*answers, plain)
    assert batches == [5, 5]


class TestGrants:
    """Rule 7: work without a grant leaves enough blocks for the largest request there can be."""

    def test_without_a_grant_the_last_blocks_stay_free(self) -> None:
        bench = pusher(blocks=16)
        first, second = push(bench, "a", [1] * 30), push(bench, "b", [2] * 30)
        bench.run(first)
        for _ in range(5):
            bench.step()
        assert not second.outputs
        assert bench.engine.stats().requests["waiting"] == 1
        bench.port.grant(key_of("b"))
        bench.run(second)
        assert second.token_ids == alone([2] * 30).token_ids[:1]

    def test_in_pull_all_blocks_may_be_taken(self) -> None:
        bench = Bench(blocks=16, port=FakePort(), context_tokens=32)
        bench.run(push(bench, "a", [1] * 30), push(bench, "b", [2] * 30))

    def test_a_source_that_waits_for_a_grant_delays_no_other_request(self) -> None:
        bench = pusher(blocks=8)
        ungranted = [push(bench, f"u{i}", [i] * 8) for i in range(3)]
        granted, plain = push(bench, "g", [7] * 8), bench.submit([8] * 4, max_tokens=2)
        bench.port.grant(key_of("g"))
        bench.run(granted, plain)
        assert not any(answer.outputs for answer in ungranted)

    def test_a_grant_may_come_before_admission_or_after_it(self) -> None:
        bench = pusher(blocks=8, step_tokens=8)
        answer = push(bench)
        bench.step()
        assert not bench.model.steps
        bench.port.grant(KEY)
        bench.step()
        assert bench.model.steps
        bench.port.grant(KEY)
        bench.run(answer)

    def test_grants_bring_the_oldest_first(self) -> None:
        bench = pusher(blocks=8, max_sequences=1)
        answers = [push(bench, f"t{i}", [i] * 8) for i in range(3)]
        bench.step()
        for name in ("t2", "t0", "t1"):
            bench.port.grant(key_of(name))
        order: list[int] = []
        while len(order) < 3:
            bench.step()
            order += [index for index, answer in enumerate(answers) if answer.is_finished and index not in order]
            for key in tuple(bench.port.offers):
                bench.port.end_source(key)
        assert order == [0, 1, 2]

    def test_without_a_grant_for_too_long_it_ends_and_says_so(self) -> None:
        bench = pusher(blocks=8, defer_timeout_s=5.0)
        answers = [push(bench, "a")]
        bench.step()
        bench.clock.now += 1.0
        answers.append(push(bench, "b"))
        while not answers[0].is_finished:
            bench.clock.now += 1.0
            bench.step()
        assert answers[0].last.finish_reason is FinishReason.ERROR
        assert "no grant of a target for 5 s (defer_timeout)" in answers[0].last.error
        assert bench.port.cancelled == [key_of("a")]
        assert not answers[1].is_finished
        bench.port.grant(key_of("b"))
        bench.step()
        bench.clock.now += 60.0
        bench.run(answers[1])
        assert answers[1].last.finish_reason is FinishReason.LENGTH

    def test_those_that_wait_together_for_a_grant_end_together(self) -> None:
        bench = pusher(blocks=8, defer_timeout_s=5.0)
        answers = [push(bench, f"t{i}") for i in range(5)]
        bench.step()
        bench.clock.now += 5.0
        bench.step()
        assert [answer.last.finish_reason for answer in answers] == [FinishReason.ERROR] * 5

    def test_cancelled_while_it_waits_for_a_grant(self) -> None:
        bench = pusher(blocks=8)
        answer = push(bench)
        bench.step()
        bench.cancel("t")
        bench.step()
        assert answer.last.finish_reason is FinishReason.CANCELLED
        bench.step()
        bench.assert_empty()


def crowded() -> tuple[Bench, Answer, Answer]:
    """An old plain request decodes, a source prefills, and the pool has no block left."""
    bench = pusher(blocks=8, context_tokens=64, step_tokens=4)
    old = bench.submit([60, 61, 62], name="old", max_tokens=20)
    bench.step()
    source = push(bench, prompt=LONG)
    bench.port.grant(KEY)
    while not bench.port.retracted and not source.is_finished:
        bench.step()
    assert bench.port.retracted == [KEY]
    return bench, old, source


class TestGivingWay:
    """A source that gives way is retracted; its blocks are free only when it is drained."""

    def test_blocks_stay_untouched_until_drained(self) -> None:
        bench, old, source = crowded()
        blocks = list(bench.port.span_blocks[KEY][0])
        kept, outputs = bench.cache.data[:, :, blocks].copy(), len(old.outputs)
        assert bench.engine.stats().requests["retracting"] == 1
        for _ in range(5):
            assert not bench.step(), "the engine is busy while it can only wait"
        assert (bench.cache.data[:, :, blocks] == kept).all()
        assert (len(old.outputs), len(source.outputs)) == (outputs, 0)
        assert bench.engine.stats().blocks_held == len(blocks)
        bench.port.drain(KEY)
        bench.run(old)
        assert old.token_ids == alone([60, 61, 62], max_tokens=20).token_ids

    def test_it_starts_over_with_a_new_numbering(self) -> None:
        bench, old, source = crowded()
        bench.port.drain(KEY)
        bench.run(old, source)
        assert announced(bench)[0][0] == 0
        assert span_problem(bench.port.spans[KEY], Span(0, 0, 27, 0, 2)) == ""
        assert source.token_ids == alone(LONG).token_ids[:1]
        bench.port.end_source(KEY)
        bench.step()
        bench.assert_empty()

    @pytest.mark.parametrize("is_drained_first", [True, False])
    def test_cancelled_while_it_waits_to_be_drained(self, is_drained_first: bool) -> None:
        bench, old, source = crowded()
        bench.cancel("t")
        bench.step()
        assert source.last.finish_reason is FinishReason.CANCELLED
        assert bench.port.cancelled == [KEY]
        if is_drained_first:
            bench.port.drain(KEY)
        bench.port.news.append(SourceEnded(KEY, Outcome.CANCELLED))
        bench.run(old)
        bench.step()
        bench.assert_empty()
        assert old.token_ids == alone([60, 61, 62], max_tokens=20).token_ids

    def test_its_target_gives_up_while_it_waits_to_be_drained(self) -> None:
        bench, old, source = crowded()
        bench.port.news.append(SourceEnded(KEY, Outcome.FAILED, "the target is gone"))
        bench.run(old, source)
        assert source.last.error == "the target is gone"
        bench.assert_empty()

    def test_no_new_request_takes_the_block_that_was_waited_for(self) -> None:
        bench, old, _ = crowded()
        newcomer = bench.submit([5] * 20, max_tokens=1)
        bench.step()
        bench.port.drain(KEY)
        outputs = len(old.outputs)
        bench.step()
        assert len(old.outputs) == outputs + 1
        bench.run(old)
        assert not newcomer.outputs

    def test_a_source_of_which_nothing_was_announced_is_preempted_at_once(self) -> None:
        bench = Bench(blocks=8, port=FakePort(), context_tokens=64, step_tokens=4)
        old = bench.submit([60, 61, 62], max_tokens=20)
        bench.step()
        source = push(bench, prompt=LONG)
        bench.run(old, source)
        assert bench.engine.stats().preemptions_total > 0
        assert bench.port.retracted == []

    def test_a_held_source_is_never_the_victim(self) -> None:
        bench = pusher(blocks=8, context_tokens=64)
        old = bench.submit([60, 61, 62], max_tokens=20)
        bench.step()
        source = push(bench, prompt=PROMPT[:20])
        bench.port.grant(KEY)
        bench.run(source)
        kept = list(bench.port.offers[KEY].blocks[0])
        before = bench.cache.data[:, :, kept].copy()
        for _ in range(30):
            bench.step()
        assert not old.is_finished
        assert bench.engine.stats().requests["waiting"] == 1
        assert (bench.cache.data[:, :, kept] == before).all()
        bench.port.end_source(KEY)
        bench.run(old)
        assert old.token_ids == alone([60, 61, 62], max_tokens=20).token_ids


class TestEnds:
    """Blocks that were announced come back only with the end of the hand-off."""

    def test_cancelled_in_mid_prefill_its_blocks_wait_for_the_end(self) -> None:
        bench = pusher(step_tokens=8)
        answer = push(bench)
        bench.step()
        bench.cancel("t")
        bench.port.expected_targets.pop(KEY)
        bench.step()
        assert answer.last.finish_reason is FinishReason.CANCELLED
        assert bench.engine.stats().blocks_held == 6
        bench.port.news.append(SourceEnded(KEY, Outcome.CANCELLED))
        bench.step()
        bench.assert_empty()

    def test_a_cancel_that_the_agents_do_not_take_is_sent_again(self) -> None:
        class FullPort(FakePort):
            is_full = True

            def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
                if self.is_full:
                    raise LocalError("the agent has too many commands waiting")
                super().cancel(key, side)

        bench = Bench(port=FullPort(), context_tokens=32, handoff=PUSH, step_tokens=8)
        answers = [push(bench, name) for name in ("a", "b")]
        bench.step()
        bench.cancel("a")
        for _ in range(3):
            bench.step()
        assert answers[0].last.finish_reason is FinishReason.CANCELLED
        assert bench.engine.stats().blocks_held
        bench.run(answers[1])
        bench.port.is_full = False
        bench.step()
        assert bench.port.cancelled == [key_of("a")]
        bench.port.end_source(key_of("b"))
        bench.step()
        bench.step()
        bench.assert_empty()
        assert bench.port.cancelled == [key_of("a")]

    def test_a_failing_model_keeps_announced_blocks_until_the_end(self) -> None:
        bench = pusher(step_tokens=8)
        answer = push(bench)
        bench.step()
        bench.port.expected_targets.pop(KEY)

        def fail() -> None:
            raise RuntimeError("no")

        bench.model.before_step = fail
        bench.step()
        assert answer.last.finish_reason is FinishReason.ERROR
        assert bench.engine.stats().blocks_held == 6
        bench.port.news.append(SourceEnded(KEY, Outcome.CANCELLED))
        bench.step()
        bench.assert_empty()

    def test_agents_that_refuse_a_span_end_the_request(self) -> None:
        class DeafPort(FakePort):
            def spans_ready_all(self, ready: list[SpansReady]) -> None:  # type: ignore[override]
                raise ConnectionError(f"{len(ready)} too many")

        bench = Bench(port=DeafPort(), context_tokens=32, handoff=PUSH)
        answer, plain = push(bench), bench.submit([1, 2])
        bench.run(answer, plain)
        assert answer.last.finish_reason is FinishReason.ERROR
        assert plain.token_ids == alone([1, 2]).token_ids
        bench.step()
        bench.assert_empty()


class TestRecompute:
    """`on_failure: recompute`: a target whose hand-off failed computes the prompt itself."""

    def fetching(self, settings: HandoffSettings = RECOMPUTE, **sampling: Any) -> tuple[Bench, Answer]:
        bench = Bench(port=FakePort(), handoff=settings, poison=True)
        answer = bench.submit(PROMPT, name="t", handoff=FromSource(KEY, SOURCE), **sampling)
        bench.step()
        assert bench.port.pulls[KEY].request.mode is settings.mode
        return bench, answer

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.EXPIRED])
    def test_the_answer_is_that_of_a_single_instance(self, outcome: Outcome) -> None:
        bench, answer = self.fetching(temperature=1.5, seed=4)
        bench.port.end_target(KEY, outcome, "the source is gone")
        bench.run(answer)
        assert answer.token_ids == alone(PROMPT, temperature=1.5, seed=4).token_ids
        record = answer.last.record
        assert record is not None
        assert (record.recomputed, record.handed_off) == (True, False)
        bench.assert_empty()

    def test_without_a_seed_it_is_the_seed_of_the_source(self) -> None:
        bench, answer = self.fetching(temperature=1.5)
        bench.port.end_target(KEY, Outcome.FAILED)
        bench.run(answer)
        source = pusher()
        first = source.submit(PROMPT, handoff=ToTarget(KEY), temperature=1.5)
        source.run(first)
        assert answer.token_ids[:1] == first.token_ids

    def test_before_there_were_blocks(self) -> None:
        bench = Bench(blocks=8, port=FakePort(), handoff=RECOMPUTE)
        other = bench.submit([1] * 20, max_tokens=4)
        bench.step()
        answer = bench.submit(PROMPT, handoff=FromSource(KEY, SOURCE))
        bench.step()
        assert KEY not in bench.port.pulls
        bench.port.news.append(TargetEnded(KEY, Outcome.FAILED, "no"))
        bench.run(other, answer)
        assert answer.token_ids == alone(PROMPT).token_ids

    def test_it_comes_back_first(self) -> None:
        bench, answer = self.fetching()
        later = bench.submit([3] * 200, max_tokens=1)
        bench.port.end_target(KEY, Outcome.FAILED)
        bench.run(answer)
        bench.run(later)
        assert answer.last.record is not None
        assert answer.last.record.recomputed

    def test_cancelled_ends_as_cancelled(self) -> None:
        bench, answer = self.fetching()
        bench.port.end_target(KEY, Outcome.CANCELLED)
        bench.run(answer)
        assert answer.last.finish_reason is FinishReason.CANCELLED

    def test_a_cancelled_request_is_not_computed(self) -> None:
        bench, answer = self.fetching()
        bench.cancel("t")
        bench.step()
        bench.port.end_target(KEY, Outcome.FAILED)
        bench.step()
        assert answer.last.finish_reason is FinishReason.CANCELLED
        assert not bench.model.steps
        bench.assert_empty()

    @pytest.mark.parametrize("settings", [PUSH, RECOMPUTE])
    def test_an_impossible_first_token_follows_the_policy(self, settings: HandoffSettings) -> None:
        bench, answer = self.fetching(settings)
        bench.port.pulls.pop(KEY)
        bench.port.news.append(Landed(KEY, Aux(9999, 0.0), HandoffStats()))
        bench.run(answer)
        if settings is PUSH:
            assert answer.last.finish_reason is FinishReason.ERROR
        else:
            assert answer.token_ids == alone(PROMPT).token_ids
        bench.assert_empty()


class TestDeclined:
    """A request that is refused before admission lets its source go at once."""

    def test_a_second_request_of_the_same_name(self) -> None:
        bench = Bench(port=FakePort())
        bench.submit([1, 2], name="same", max_tokens=30)
        second = bench.submit(PROMPT, name="same", handoff=FromSource(KEY, SOURCE))
        bench.step()
        assert second.last.finish_reason is FinishReason.ERROR
        ((wanted, reason),) = bench.port.declined
        assert (wanted.key, wanted.source, wanted.prompt != "") == (KEY, SOURCE, True)
        assert "under way already" in reason

    def test_a_second_request_of_the_same_handoff_harms_the_first_in_no_way(self) -> None:
        bench = Bench(port=FakePort())
        bench.submit(PROMPT, handoff=FromSource(KEY, SOURCE))
        second = bench.submit(PROMPT, handoff=FromSource(KEY, SOURCE))
        bench.step()
        assert second.last.finish_reason is FinishReason.ERROR
        assert bench.port.declined == []


def test_notes_cover_both_sides() -> None:
    source = pusher(step_tokens=16)
    source.run(push(source))
    stages = [(note.side, note.stage, note.first_token, note.end_token, note.end_layer) for note in source.notes]
    assert stages == [
        (Side.SOURCE, Stage.ARRIVED, 0, 0, 0),
        (Side.SOURCE, Stage.STARTED, 0, 0, 0),
        (Side.SOURCE, Stage.COMPUTED, 0, 16, 2),
        (Side.SOURCE, Stage.COMPUTED, 16, 23, 2),
    ]
    target = Bench(port=FakePort())
    answer = target.submit(PROMPT, handoff=FromSource(KEY, SOURCE))
    target.step()
    target.port.news.append(Landed(KEY, Aux(1, 0.0), HandoffStats()))
    target.run(answer)
    assert [note.stage for note in target.notes] == [Stage.ARRIVED, Stage.ALLOCATED, Stage.FIRST_STEP]
    assert sorted(note.at for note in target.notes) == [note.at for note in target.notes]
