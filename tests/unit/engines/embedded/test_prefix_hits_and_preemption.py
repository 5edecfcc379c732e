"""Prefix hits, odd prompt lengths, preemption and early release, on two embedded engines with real agents."""

from __future__ import annotations

import threading

import pytest
from engine_fakes import key_of
from pair_rig import BLOCK_TOKENS, EnginePair, PausingWaiter, alone, assert_equal, prompt_of

from kvbaton.core.handoff import Mode
from kvbaton.core.timeline import Stage
from kvbaton.engines.embedded.request import FromSource
from kvbaton.errors import BadRequest
from kvbaton.transport.faulty import Faults
from watching import wait_until

MODES = pytest.mark.parametrize("mode", list(Mode))
LENGTHS = pytest.mark.parametrize("tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 1])


class TestPrefixHitsAndLengths:
    """READ: full local hit (release only), partial hit, prompt < 1 block, exactly k blocks, 1-token prompt. Push alike."""

    @MODES
    @LENGTHS
    def test_prompts_of_every_kind_of_length(self, mode: Mode, tokens: int) -> None:
        prompt = prompt_of(tokens, tokens)
        with EnginePair(mode) as pair:
            answer = pair.hand_off(prompt, "t")
            assert_equal(answer, alone(prompt))
            assert answer.record.handed_off
            assert answer.record.bytes_moved == answer.record.bytes_planned > 0
            pair.wait_empty()

    @MODES
    @LENGTHS
    def test_control_without_the_copies(self, mode: Mode, tokens: int) -> None:
        prompt = prompt_of(tokens, tokens)
        with EnginePair(mode) as pair:
            pair.target.transport.set_faults(Faults(drop_writes=True))
            assert pair.hand_off(prompt, "t").token_ids != alone(prompt).token_ids

    @MODES
    def test_a_full_hit_moves_nothing_and_releases_the_source(self, mode: Mode) -> None:
        prompt = prompt_of(4 * BLOCK_TOKENS)
        with EnginePair(mode) as pair:
            assert_equal(pair.hand_off(prompt, "a"), alone(prompt))
            again = pair.hand_off(prompt, "b")
            assert_equal(again, alone(prompt))
            assert (again.record.cached_tokens, again.record.bytes_moved) == (len(prompt), 0)
            assert again.record.handed_off
            pair.wait_empty()

    @MODES
    def test_a_partial_hit_moves_the_rest(self, mode: Mode) -> None:
        prompt = prompt_of(4 * BLOCK_TOKENS)
        longer = [*prompt, *prompt_of(7, 1)]
        with EnginePair(mode) as pair:
            whole = pair.hand_off(prompt, "a").record.bytes_moved
            answer = pair.hand_off(longer, "b")
            assert_equal(answer, alone(longer))
            assert answer.record.bytes_moved == whole * 7 // len(prompt)
            pair.wait_empty()

    @MODES
    def test_only_the_target_has_the_beginning(self, mode: Mode) -> None:
        """The source computes everything, the target takes what it lacks."""
        prompt = prompt_of(18)
        with EnginePair(mode, source={"step_tokens": 6}) as pair:
            pair.target.submit(prompt[:13], max_tokens=1).wait()
            answer = pair.hand_off(prompt, "t")
            assert_equal(answer, alone(prompt))
            assert answer.record.cached_tokens == 3 * BLOCK_TOKENS
            pair.wait_empty()

    @MODES
    def test_only_the_source_has_the_beginning(self, mode: Mode) -> None:
        """What the source had cached is handed over like what it computed."""
        prompt = prompt_of(18)
        with EnginePair(mode, source={"step_tokens": 6}) as pair:
            pair.source.submit(prompt[:13], max_tokens=1).wait()
            answer = pair.hand_off(prompt, "t")
            assert_equal(answer, alone(prompt))
            assert answer.record.cached_tokens == 0
            pair.wait_empty()


class TestChunksAndPreemption:
    """Chunked prefill with a last chunk that allocates no block; preempted and resumed P."""

    @MODES
    @pytest.mark.parametrize("step_tokens", [BLOCK_TOKENS, 7, 14])
    def test_a_last_chunk_within_a_block_that_is_begun(self, mode: Mode, step_tokens: int) -> None:
        prompt = prompt_of(15)
        with EnginePair(mode, source={"step_tokens": step_tokens}) as pair:
            assert_equal(pair.hand_off(prompt, "t"), alone(prompt))
            pair.wait_empty()

    @MODES
    def test_preempted_and_resumed(self, mode: Mode) -> None:
        """An older plain request takes the source's blocks in mid-prefill; the answer is right, and nothing old is in it."""
        prompt, other = prompt_of(24, 1), prompt_of(3, 2)
        with EnginePair(mode, source={"blocks": 8, "step_tokens": 1}, target={"blocks": 64}) as pair:
            go = threading.Event()
            plain = PausingWaiter(go.is_set, lambda: mode is Mode.PULL or pair.source.has_noted(Stage.GRANTED))
            pair.source.submit(other, waiter=plain, max_tokens=20)
            wait_until(lambda: bool(plain.outputs), "the plain request decodes")
            prefill = pair.prefill(prompt, "t")
            if mode is Mode.PULL:
                go.set()
                prefill.wait()
            answer = pair.decode(prompt, "t")
            go.set()
            assert_equal(answer, alone(prompt))
            assert_equal(plain, alone(other, max_tokens=20))
            pair.wait_empty()
            retracted = [note for note in pair.source.notes if note.stage is Stage.RETRACTED]
            started = [note for note in pair.source.notes if note.stage is Stage.STARTED]
            stats = pair.source.engine.stats()
        assert stats.preemptions_total > 0
        assert len(started) == 1 + stats.preemptions_total
        assert bool(retracted) == (mode is Mode.PUSH)


class TestPreemptionAfterLanding:
    """D preempted after the load: computed again locally, the same tokens. A plain request to a decoder: local prefill."""

    @MODES
    def test_preempted_after_the_load(self, mode: Mode) -> None:
        prompt, other = prompt_of(12, 1), prompt_of(3, 2)
        with EnginePair(mode, source={"blocks": 64}, target={"blocks": 12}) as pair:
            target = pair.target
            paused = PausingWaiter(lambda: target.engine.stats().requests["waiting"] > 0, lambda: target.has_noted(Stage.ENDED))
            older = target.submit(other, waiter=paused, max_tokens=44)
            wait_until(lambda: bool(paused.outputs), "the older request decodes")
            answer = pair.hand_off(prompt, "t", max_tokens=24)
            assert_equal(answer, alone(prompt, max_tokens=24))
            assert_equal(older, alone(other, max_tokens=44))
            assert pair.target.engine.stats().preemptions_total > 0
            assert (answer.record.handed_off, answer.record.recomputed) == (True, True)
            pair.wait_empty()

    @MODES
    def test_a_plain_request_to_a_decoder(self, mode: Mode) -> None:
        prompt = prompt_of(12)
        with EnginePair(mode) as pair:
            answer = pair.target.submit(prompt).wait()
            assert_equal(answer, alone(prompt))
            assert (answer.record.handed_off, answer.record.recomputed) == (False, False)
            pair.wait_empty()


class TestEarlyRelease:
    """Full prefix hit, request rejected before admission: P released at once."""

    @MODES
    def test_a_full_hit_releases_the_source_before_the_answer_ends(self, mode: Mode) -> None:
        prompt = prompt_of(4 * BLOCK_TOKENS)
        with EnginePair(mode, blocks=128) as pair:
            pair.hand_off(prompt, "a")
            prefill = pair.prefill(prompt, "b")
            if mode is Mode.PULL:
                prefill.wait()
            answer = pair.decode(prompt, "b", max_tokens=400)
            prefill.wait()
            pair.source.wait_empty()
            assert not answer.is_finished
            answer.wait()
            pair.wait_empty()

    @MODES
    def test_a_request_that_is_too_long_for_the_target(self, mode: Mode) -> None:
        """The target refuses it before admission, and the source has its blocks back long before its timeout."""
        prompt = prompt_of(40)
        with EnginePair(mode, source={"blocks": 2000}, target={"blocks": 8}) as pair:
            pair.prefill(prompt, "t").wait()
            wait_until(lambda: pair.source.engine.stats().requests["held"] == 1, "the source holds its blocks")
            with pytest.raises(BadRequest, match="40 tokens") as refused:
                pair.decode(prompt, "t")
            request = pair.target.requests[-1]
            assert request.handoff == FromSource(key_of("t"), pair.source.driver.address)
            pair.target.engine.decline(request, str(refused.value))
            pair.wait_empty()
