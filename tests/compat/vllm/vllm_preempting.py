"""Caches that are far too small: what must become of requests that are preempted on either side, whatever the pair."""

from __future__ import annotations

import asyncio

from vllm_handing import Client, Pair, is_near_tie, prompt_of, together
from vllm_servers import Server

from kvbaton.core.handoff import Mode

__all__ = ["assert_a_source_retracts", "assert_a_target_computes_locally"]


def preemptions(server: Server) -> float:
    return server.metrics()["vllm:num_preemptions_total"]


def assert_a_target_computes_locally(pair: Pair) -> None:
    """Eight answers that outgrow the cache together."""

    async def send(client: Client) -> None:
        before = preemptions(pair.decode)
        prompts = [prompt_of(125, f"grows {index}") for index in range(8)]
        given = await asyncio.gather(*(client.hand_off(prompt, 280) for prompt in prompts))
        assert preemptions(pair.decode) > before, "else this tests nothing"
        alone = await asyncio.gather(*(client.alone(prompt, 280) for prompt in prompts))
        for right, each in zip(alone, given, strict=True):
            is_near_tie(right, each)

    together(pair, send)
    pair.wait_idle()


def assert_a_source_retracts(pair: Pair) -> None:
    """Plain answers leave no room for the last blocks of a long prefill, which is streamed until then."""
    assert together(pair, squeeze) > 0, "nothing was preempted; else this tests nothing"
    retracted = [line for line in pair.prefill.held() if line.startswith("retracted")]
    assert bool(retracted) is (pair.mode is Mode.PUSH), "in pull nothing is announced before a prefill is complete"
    pair.wait_idle()


async def squeeze(client: Client) -> float:
    """Two prefills of eight blocks into a cache of 19, of which plain answers have 13; how many preemptions there were."""
    prefill = client.pair.prefill
    before = preemptions(prefill)
    plain = [prompt_of(100 + index, "plain") for index in range(13)]
    prompts = [prompt_of(1000, f"pushed out {index}") for index in range(2)]
    alone = asyncio.gather(*(client.alone(prompt, 60, prefill.url) for prompt in plain))
    await client.until(lambda: prefill.metrics()["vllm:num_requests_running"] >= 10, "the plain answers to run", 120)
    given = [*await asyncio.gather(*(client.hand_off(prompt, 8) for prompt in prompts)), *await alone]
    asked = zip([*prompts, *plain], given, strict=True)
    right = await asyncio.gather(*(client.alone(prompt, len(each.answer.tokens)) for prompt, each in asked))
    for one, each in zip(right, given, strict=True):
        is_near_tie(one, each)
    return preemptions(prefill) - before
