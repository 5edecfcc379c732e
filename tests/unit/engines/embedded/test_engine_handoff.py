"""Hand-offs between two engines whose ports really copy blocks, and every way in which one can end."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fakes import EOS, SOURCE, VOCABULARY, Answer, Bench, FakePort, Pair, alone, key_of

from kvbaton.agent.engine_port import Allocation, HandoffStats, Landed, Offer, SourceEnded
from kvbaton.core.handoff import Aux, Outcome
from kvbaton.engines.embedded.cache import POISON_BYTE
from kvbaton.engines.embedded.request import FinishReason, FromSource, ToTarget

PROMPT = list(range(30, 53))
KEY = key_of("t")


def offered(bench: Bench, prompt: list[int] = PROMPT) -> Answer:
    answer = bench.submit(prompt, name="s", handoff=ToTarget(KEY))
    bench.run(answer)
    return answer


def fetching(bench: Bench, prompt: list[int] = PROMPT, max_tokens: int = 8) -> Answer:
    answer = bench.submit(prompt, name="t", handoff=FromSource(KEY, SOURCE), max_tokens=max_tokens)
    bench.step()
    assert bench.engine.stats().requests["fetching"] == 1
    return answer


def land(bench: Bench, token_id: int = 5) -> None:
    bench.port.pulls.pop(KEY)
    bench.port.news.append(Landed(KEY, Aux(token_id, -0.5), HandoffStats()))
    bench.step()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 23])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_handed_off_request_answers_as_one_engine_would(tokens: int, temperature: float) -> None:
    pair, prompt = Pair(), PROMPT[:tokens]
    pair.source.run(pair.source.submit([9] * 6))
    prefill, decode = pair.hand_off(prompt, "a", temperature=temperature, seed=11)
    expected = alone(prompt, temperature=temperature, seed=11).token_ids
    assert decode.token_ids == expected
    assert prefill.token_ids == expected[:1]
    pair.source.assert_empty()
    pair.target.assert_empty()
    assert len(pair.target.model.steps) == 7
    assert all(count == 1 for step in pair.target.model.steps for _, count in step)


def test_without_the_copy_the_poison_shows() -> None:
    _, decode = Pair().hand_off(PROMPT, "a", copies=False)
    expected = alone(PROMPT).token_ids
    assert decode.token_ids[0] == expected[0]
    assert decode.token_ids[1:] != expected[1:]


def test_without_a_seed_both_sides_use_the_same_one() -> None:
    pair = Pair()
    _, decode = pair.hand_off(PROMPT, "a", temperature=2.0)
    _, again = Pair().hand_off(PROMPT, "a", temperature=2.0)
    _, other = Pair().hand_off(PROMPT, "b", temperature=2.0)
    assert decode.token_ids == again.token_ids != other.token_ids


def test_the_record_reports_what_happened() -> None:
    prefill, decode = Pair().hand_off(PROMPT, "a")
    source, target = prefill.last.record, decode.last.record
    assert source is not None
    assert target is not None
    assert not source.handed_off
    assert target.handed_off
    assert not target.recomputed
    assert (target.queue_s, target.prefill_s) == (source.queue_s, source.prefill_s)
    assert (target.bytes_planned, target.bytes_moved) == (23, 23)
    assert (target.handover_s, target.transport) == (0.5, "fake")
    assert 0 < target.handoff_s < target.first_token_s


def test_logprobs_of_the_first_token_travel() -> None:
    prefill, decode = Pair().hand_off(PROMPT, "a", logprobs=2)
    assert decode.outputs[0].top_logprobs == prefill.outputs[0].top_logprobs != ()
    assert decode.outputs[0].logprob == prefill.outputs[0].logprob < 0


def test_the_aux_record_has_a_logprob_even_if_not_requested() -> None:
    bench = Bench(port=FakePort())
    offered(bench)
    assert bench.port.offers[KEY].aux.logprob < 0
    assert bench.port.offers[KEY].aux.top_logprobs == ()


@pytest.mark.parametrize("poison", [True, False])
def test_only_fresh_blocks_are_poisoned_and_only_if_wanted(poison: bool) -> None:
    bench = Bench(port=FakePort(), poison=poison)
    bench.run(bench.submit(PROMPT[:8], max_tokens=1))
    before = bench.cache.data.copy()
    fetching(bench)
    blocks = list(bench.port.pulls[KEY].blocks[0])
    assert bench.port.pulls[KEY].cached_tokens == 8
    filled = bench.cache.data[:, :, blocks[2:]].view(np.uint8) == POISON_BYTE
    assert filled.all() if poison else not filled.any()
    assert (bench.cache.data[:, :, blocks[:2]] == before[:, :, blocks[:2]]).all()


def test_only_what_the_target_lacks_is_asked_for() -> None:
    pair = Pair()
    pair.hand_off(PROMPT, "a")
    _, decode = pair.hand_off([*PROMPT, 1, 2], "b")
    assert decode.last.record is not None
    assert decode.last.record.cached_tokens == 20
    assert decode.last.record.bytes_moved == 5
    assert decode.token_ids == alone([*PROMPT, 1, 2]).token_ids


def test_a_prompt_of_full_blocks_may_be_cached_altogether() -> None:
    pair, prompt = Pair(), PROMPT[:8]
    pair.hand_off(prompt, "a")
    _, decode = pair.hand_off(prompt, "b")
    assert decode.last.record is not None
    assert (decode.last.record.cached_tokens, decode.last.record.bytes_moved) == (8, 0)
    assert decode.token_ids == alone(prompt).token_ids


def test_offered_blocks_are_held_until_the_source_has_ended() -> None:
    bench = Bench(port=FakePort())
    answer = offered(bench)
    offer = bench.port.offers[KEY]
    assert (offer.tokens, len(offer.blocks[0])) == (23, 6)
    assert answer.last.finish_reason is FinishReason.LENGTH
    assert len(answer.outputs) == 1
    stats = bench.engine.stats()
    assert (stats.blocks_held, stats.blocks_in_use, stats.requests["held"]) == (6, 0, 1)
    kept = bench.cache.data[:, :, list(offer.blocks[0])].copy()
    bench.run(*(bench.submit([token] * 30, max_tokens=30) for token in range(1, 8)))
    assert (bench.cache.data[:, :, list(offer.blocks[0])] == kept).all()
    bench.port.end_source(KEY)
    bench.step()
    bench.assert_empty()
    assert bench.engine.stats().handoffs_total == {("source", "delivered"): 1}


def test_a_source_whose_first_token_ends_the_answer_says_so() -> None:
    prompt = next([token, 7] for token in range(VOCABULARY) if alone([token, 7], max_tokens=1).token_ids == [EOS])
    bench = Bench(port=FakePort())
    answer = bench.submit(prompt, handoff=ToTarget(KEY), ignore_eos=False)
    bench.run(answer)
    assert answer.last.finish_reason is FinishReason.STOP
    assert bench.port.offers[KEY].aux.token_id == EOS


@pytest.mark.parametrize("token_id", [EOS, 5])
def test_a_target_may_end_with_its_first_token(token_id: int) -> None:
    bench = Bench(port=FakePort())
    answer = bench.submit(PROMPT, name="t", handoff=FromSource(KEY, SOURCE), max_tokens=1, ignore_eos=False)
    bench.step()
    land(bench, token_id)
    assert answer.last.finish_reason is (FinishReason.STOP if token_id == EOS else FinishReason.LENGTH)
    assert answer.token_ids == [token_id]
    bench.assert_empty()


def test_others_go_on_while_one_fetches() -> None:
    bench = Bench(port=FakePort(), max_sequences=1)
    fetching(bench)
    other = bench.submit([1, 2])
    bench.run(other)
    assert other.token_ids == alone([1, 2]).token_ids
    assert bench.engine.stats().blocks_held == 6


def test_what_lands_waits_for_a_place_among_the_running() -> None:
    bench = Bench(port=FakePort(), max_sequences=1)
    answer = fetching(bench)
    other = bench.submit([1, 2], max_tokens=20)
    bench.step()
    land(bench)
    assert len(answer.token_ids) == 1
    assert bench.engine.stats().requests["decoding"] == 2
    bench.run(other, answer)
    assert max(len(step) for step in bench.model.steps) == 1
    bench.assert_empty()


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.FAILED, FinishReason.ERROR),
        (Outcome.EXPIRED, FinishReason.ERROR),
        (Outcome.CANCELLED, FinishReason.CANCELLED),
    ],
)
def test_a_failed_handoff_ends_the_request_and_caches_nothing(outcome: Outcome, reason: FinishReason) -> None:
    bench = Bench(port=FakePort())
    answer = fetching(bench)
    bench.port.end_target(KEY, outcome, "the source is gone")
    bench.step()
    assert (answer.last.finish_reason, answer.last.error) == (reason, "the source is gone")
    assert answer.last.record is not None
    assert not answer.last.record.handed_off
    bench.assert_empty()
    assert bench.engine.stats().blocks_cached == 0
    assert bench.engine.stats().handoffs_total == {("target", outcome.value): 1}


def test_cached_blocks_stay_while_a_handoff_counts_on_them() -> None:
    bench = Bench(blocks=16, port=FakePort())
    bench.run(bench.submit(PROMPT, max_tokens=1))
    fetching(bench)
    pinned = list(bench.port.pulls[KEY].blocks[0][:5])
    kept = bench.cache.data[:, :, pinned].copy()
    assert bench.port.pulls[KEY].cached_tokens == 20
    bench.run(*(bench.submit([token] * 20, max_tokens=10) for token in range(1, 6)))
    assert (bench.cache.data[:, :, pinned] == kept).all()
    bench.port.end_target(KEY, Outcome.FAILED, "no")
    bench.step()
    bench.assert_empty()


def test_a_source_cancelled_before_its_offer_is_simply_freed() -> None:
    bench = Bench(port=FakePort(), step_tokens=8)
    answer = bench.submit(PROMPT, name="s", handoff=ToTarget(KEY))
    bench.step()
    bench.cancel("s")
    bench.step()
    assert answer.last.finish_reason is FinishReason.CANCELLED
    assert bench.port.offers == {}
    bench.assert_empty()


def test_a_source_cancelled_after_its_offer_waits_for_the_end() -> None:
    bench = Bench(port=FakePort())
    offered(bench)
    bench.cancel("s")
    bench.step()
    assert bench.port.cancelled == [KEY]
    assert bench.engine.stats().blocks_held == 6
    bench.port.end_source(KEY, Outcome.CANCELLED)
    bench.step()
    bench.assert_empty()


def test_a_target_cancelled_while_fetching_waits_for_the_end() -> None:
    bench = Bench(port=FakePort())
    answer = fetching(bench)
    bench.cancel("t")
    bench.step()
    assert answer.last.finish_reason is FinishReason.CANCELLED
    assert bench.port.cancelled == [KEY]
    assert bench.engine.stats().blocks_held == 6
    bench.port.end_target(KEY, Outcome.CANCELLED)
    bench.step()
    bench.assert_empty()


def test_a_target_cancelled_too_late_is_dropped_when_it_lands() -> None:
    bench = Bench(port=FakePort())
    answer = fetching(bench)
    bench.cancel("t")
    bench.step()
    land(bench)
    assert answer.token_ids == []
    bench.assert_empty()
    assert not bench.step()


def test_a_target_cancelled_while_decoding_is_freed_at_once() -> None:
    bench = Bench(port=FakePort())
    answer = fetching(bench)
    land(bench)
    bench.cancel("t")
    bench.step()
    assert answer.last.finish_reason is FinishReason.CANCELLED
    assert bench.port.cancelled == []
    bench.assert_empty()


def test_a_preempted_target_is_computed_again_and_says_so() -> None:
    pair = Pair(blocks=12)
    prompt = PROMPT[:10]
    pair.target.submit([60, 61, 62], name="old", max_tokens=45)
    prefill = pair.source.submit(prompt, handoff=ToTarget(KEY))
    pair.source.run(prefill)
    answer = fetching(pair.target, prompt, max_tokens=20)
    pair.move(KEY)
    pair.target.run(answer)
    assert pair.target.engine.stats().preemptions_total > 0
    assert answer.token_ids == alone(prompt, max_tokens=20).token_ids
    assert answer.last.record is not None
    assert answer.last.record.recomputed
    assert answer.last.record.handed_off


def test_an_impossible_first_token_is_refused_without_harm() -> None:
    bench = Bench(port=FakePort())
    answer, other = fetching(bench), bench.submit([1, 2])
    land(bench, VOCABULARY)
    assert answer.last.finish_reason is FinishReason.ERROR
    assert f"names token {VOCABULARY};" in answer.last.error
    bench.run(other)
    assert other.token_ids == alone([1, 2]).token_ids
    bench.assert_empty()


def test_events_of_unknown_handoffs_are_ignored() -> None:
    bench = Bench(port=FakePort(), max_sequences=1)
    running = bench.submit([1, 2])
    bench.step()
    queued = bench.submit([3, 4], handoff=ToTarget(KEY))
    bench.port.news.append(SourceEnded(key_of("other"), Outcome.FAILED))
    bench.port.news.append(Landed(KEY, Aux(1, 0.0), HandoffStats()))
    bench.run(running, queued)
    assert queued.last.finish_reason is FinishReason.LENGTH


def test_a_prefill_whose_target_gave_up_ends_while_it_waits() -> None:
    bench = Bench(port=FakePort(), max_sequences=1)
    running = bench.submit([1, 2])
    bench.step()
    queued = bench.submit([3, 4], handoff=ToTarget(KEY))
    bench.step()
    bench.port.news.append(SourceEnded(KEY, Outcome.CANCELLED, "the target cancelled"))
    bench.run(running, queued)
    assert queued.last.finish_reason is FinishReason.CANCELLED
    assert queued.last.error == "the target cancelled"
    bench.assert_empty()


def test_a_second_request_for_a_handoff_fails_with_the_reason() -> None:
    bench = Bench(port=FakePort())
    offered(bench)
    second = bench.submit(PROMPT, handoff=ToTarget(KEY))
    bench.run(second)
    assert second.last.finish_reason is FinishReason.ERROR
    assert "hand-off t/0.0 is under way already" in second.last.error
    bench.port.end_source(KEY)
    bench.step()
    third = bench.submit(PROMPT, handoff=ToTarget(KEY))
    bench.run(third)
    assert third.last.finish_reason is FinishReason.LENGTH


class BrokenPort(FakePort):
    """Agents that refuse everything."""

    def offer(self, offer: Offer) -> None:
        raise ConnectionError(f"no offer of {offer.key}")

    def allocated(self, allocation: Allocation) -> None:
        raise ConnectionError(f"no allocation of {allocation.key}")


def test_a_port_that_fails_leaks_nothing() -> None:
    bench = Bench(port=BrokenPort())
    source = bench.submit(PROMPT, handoff=ToTarget(key_of("s")))
    target = bench.submit(PROMPT, handoff=FromSource(key_of("t"), SOURCE))
    bench.run(source, target)
    assert target.last.finish_reason is FinishReason.ERROR
    bench.assert_empty()


def test_closing_gives_handoffs_up() -> None:
    bench = Bench(port=FakePort())
    source = bench.submit(PROMPT, handoff=ToTarget(key_of("s")))
    target = bench.submit(PROMPT, handoff=FromSource(key_of("t"), SOURCE))
    bench.run(source)
    bench.engine.close()
    assert target.last.error == "the engine is stopping"
    assert set(bench.port.cancelled) == {key_of("s"), key_of("t")}
