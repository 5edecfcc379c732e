"""`cache_salt`, as in vLLM: requests share cached prefixes only if they have the same salt, also over a hand-off."""

from __future__ import annotations

import itertools

import pytest
from pair_rig import BLOCK_TOKENS, EnginePair, Waiter, alone, assert_equal, prompt_of
from served import Reply, ScriptedEngine, run, serving

from kvbaton.core.handoff import Mode, RequestId
from kvbaton.engines.embedded.pool import PrefixDigests
from kvbaton.engines.embedded.request import GenerationRequest, Sampling
from kvbaton.engines.embedded.sequence import prompt_digest

MODES = pytest.mark.parametrize("mode", list(Mode))
SALTS = ("", "a", "b", "ab", "\0", "a\0")


def request(salt: str, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerationRequest:
    return GenerationRequest(RequestId("r"), prompt, Sampling(1), None, salt)


def test_every_salt_has_digests_of_its_own() -> None:
    prompt = prompt_of(40)
    digests = [digest for salt in SALTS for digest in PrefixDigests(BLOCK_TOKENS, salt).of(prompt, 40)]
    assert len(set(digests)) == len(digests)
    assert PrefixDigests(BLOCK_TOKENS, "a").of(prompt, 40) == PrefixDigests(BLOCK_TOKENS, "a").of(prompt, 40)


def test_the_salt_is_part_of_the_prompt_digest() -> None:
    digests = {prompt_digest(request(salt)) for salt in SALTS}
    assert len(digests) == len(SALTS)
    assert prompt_digest(request("a")) == prompt_digest(request("a"))


@MODES
def test_only_the_same_salt_hits_the_cache(mode: Mode) -> None:
    prompt = prompt_of(5 * BLOCK_TOKENS)
    with EnginePair(mode, blocks=128) as pair:

        def cached(salt: str) -> int:
            return pair.target.submit(prompt, cache_salt=salt).wait().record.cached_tokens

        for salt in SALTS:
            assert cached(salt) == 0, f"{salt!r} was never sent before"
        for salt in SALTS:
            assert cached(salt) == 4 * BLOCK_TOKENS
        pair.wait_empty()


@MODES
def test_a_hand_off_keeps_its_salt_on_both_sides(mode: Mode) -> None:
    prompt = prompt_of(5 * BLOCK_TOKENS)
    numbers = itertools.count()
    with EnginePair(mode, blocks=128) as pair:

        def handed(salt: str) -> Waiter:
            return pair.hand_off(prompt, f"t{next(numbers)}", cache_salt=salt)

        for salt in ("a", "b", ""):
            answer = handed(salt)
            assert_equal(answer, alone(prompt))
            assert answer.record.cached_tokens == 0, f"{salt!r} was never handed off before"
            assert handed(salt).record.cached_tokens == len(prompt)
        assert pair.source.engine.stats().cached_tokens_total == 3 * 4 * BLOCK_TOKENS
        pair.wait_empty()


def test_another_salt_does_not_get_a_cache_that_is_held() -> None:
    """Not even with its transfer id and its prompt."""
    prompt = prompt_of(9)
    with EnginePair(Mode.PULL) as pair:
        pair.prefill(prompt, "t", cache_salt="secret").wait()
        thief = pair.decode(prompt, "t", cache_salt="guess").wait()
        assert "another prompt of that transfer id" in thief.last.error


def test_the_field_reaches_every_choice() -> None:
    async def work() -> list[Reply]:
        async with serving(engine) as client:
            return [
                await client.complete(cache_salt="mine", prompt=["a", "b"], n=2, max_tokens=1),
                await client.chat(cache_salt="mine", max_tokens=1),
                await client.complete(max_tokens=1),
            ]

    engine = ScriptedEngine()
    assert [reply.status for reply in run(work())] == [200] * 3
    assert [each.cache_salt for each in engine.submitted] == ["mine"] * 5 + [""]


@pytest.mark.parametrize("salt", ["", 5, ["x"]])
def test_a_bad_salt_is_refused_by_name(salt: object) -> None:
    async def work() -> Reply:
        async with serving(ScriptedEngine()) as client:
            return await client.complete(cache_salt=salt)

    reply = run(work())
    assert reply.status == 400
    assert reply.error["param"] == "cache_salt"
