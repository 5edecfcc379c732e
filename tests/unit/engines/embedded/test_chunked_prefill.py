"""Chunked prefill handed over, on two embedded engines with real agents."""

from __future__ import annotations

import pytest
from pair_rig import BLOCK_TOKENS, EnginePair, alone, assert_equal, prompt_of

from kvbaton.core.handoff import Mode
from kvbaton.core.timeline import Stage

MODES = pytest.mark.parametrize("mode", list(Mode))


class TestChunksOfAPrompt:
    """Chunked sends: 1, many, uneven; last chunk with zero pages still delivers aux and status; full prefix hit."""

    @MODES
    @pytest.mark.parametrize(("tokens", "step_tokens", "chunks"), [(21, 100, 1), (20, 4, 5), (23, 10, 3)])
    def test_one_many_and_uneven_chunks(self, mode: Mode, tokens: int, step_tokens: int, chunks: int) -> None:
        prompt = prompt_of(tokens)
        with EnginePair(mode, source={"step_tokens": step_tokens}) as pair:
            answer = pair.hand_off(prompt, "t")
            assert_equal(answer, alone(prompt))
            pair.wait_empty()
            announced = [note for note in pair.source.notes if note.stage is Stage.COMPUTED]
        assert len(announced) == chunks

    @MODES
    def test_uneven_chunks_because_others_run_too(self, mode: Mode) -> None:
        prompts = [prompt_of(9 + 5 * number, number) for number in range(4)]
        with EnginePair(mode, source={"step_tokens": 11}, blocks=128) as pair:
            prefills = [pair.prefill(prompt, f"t{number}") for number, prompt in enumerate(prompts)]
            if mode is Mode.PULL:
                for prefill in prefills:
                    prefill.wait()
            answers = [pair.decode(prompt, f"t{number}") for number, prompt in enumerate(prompts)]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert_equal(answer, alone(prompt))
            pair.wait_empty()

    @MODES
    def test_a_last_chunk_of_which_the_target_needs_nothing(self, mode: Mode) -> None:
        """The target has every block already; first token, logprobs and the end of the hand-off come all the same."""
        prompt = prompt_of(3 * BLOCK_TOKENS)
        with EnginePair(mode, source={"step_tokens": 5}) as pair:
            pair.target.submit(prompt, max_tokens=1).wait()
            answer = pair.hand_off(prompt, "t", logprobs=3)
            assert_equal(answer, alone(prompt, logprobs=3))
            assert answer.outputs[0].top_logprobs
            assert (answer.record.cached_tokens, answer.record.bytes_moved) == (len(prompt), 0)
            pair.wait_empty()

    @MODES
    def test_a_full_hit_on_both_sides(self, mode: Mode) -> None:
        prompt = prompt_of(4 * BLOCK_TOKENS)
        with EnginePair(mode) as pair:
            for name in ("a", "b", "c"):
                assert_equal(pair.hand_off(prompt, name), alone(prompt))
            pair.wait_empty()
