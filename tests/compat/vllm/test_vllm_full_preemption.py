"""Caches that are far too small, on real vLLM: requests are preempted on either side, and every answer is right.

Blocks are poisoned before each load, so a layer that was announced, overwritten and never retracted would show. Answers are
long, so a near tie of the best two candidates is no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from vllm_handing import Client, Pair, is_near_tie, prompt_of, together
from vllm_servers import Server, ServerSpec, servers

from kvbaton.core.handoff import Mode

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(1800)]

BLOCKS = "20"
LIMITS = {"transfer_timeout": 90, "defer_timeout": 120}


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest, single: Server) -> Iterator[Pair]:
    arguments = ("--num-gpu-blocks-override", BLOCKS, "--no-enable-prefix-caching", "--no-scheduler-reserve-full-isl")
    sides = [
        ServerSpec(role, role, request.param, settings=LIMITS, arguments=arguments, holds=True)
        for role in ("prefill", "decode")
    ]
    with servers(*sides) as (prefill, decode):
        yield Pair(request.param, prefill, decode, single)


def preemptions(server: Server) -> float:
    return server.metrics()["vllm:num_preemptions_total"]


def test_a_target_that_preempts_computes_locally_and_answers_rightly(pair: Pair) -> None:
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


def test_a_source_that_preempts_retracts_and_every_answer_is_right(pair: Pair) -> None:
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


def test_two_full_caches_never_wait_for_each_other(pair: Pair) -> None:
    """The target takes the requests in the opposite order: without room for what it has granted, both would wait for ever."""
    if pair.mode is Mode.PULL:
        pytest.skip("in pull a target never waits for a prefill")

    async def send(client: Client) -> None:
        prompts = [prompt_of(60, f"crossed {index}") for index in range(50)]
        headers = [client.header() for _ in prompts]
        order = range(len(prompts))
        targets = {i: asyncio.create_task(client.decode(prompts[i], f"crossed-{i}", headers[i], 2)) for i in reversed(order)}
        await client.until(lambda: pair.decode.metrics()["vllm:kv_cache_usage_perc"] > 0.8, "the target to be full")
        sources = [asyncio.create_task(client.prefill(prompts[i], f"crossed-{i}", headers[i])) for i in order]
        given = await asyncio.wait_for(asyncio.gather(*(targets[i] for i in order)), 300)
        await asyncio.gather(*sources)
        alone = await asyncio.gather(*(client.alone(prompt, 2) for prompt in prompts))
        for right, each in zip(alone, given, strict=True):
            is_near_tie(right, each)

    together(pair, send)
    pair.wait_idle()
