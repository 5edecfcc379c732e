"""Caches that are far too small, on real vLLM: requests are preempted on either side, and every answer is right.

Blocks are poisoned before each load, so a layer that was announced, overwritten and never retracted would show. Answers are
long, so a near tie of the best two candidates is no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from vllm_handing import Client, Pair, is_near_tie, prompt_of, together
from vllm_preempting import assert_a_source_retracts, assert_a_target_computes_locally
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


def test_a_target_that_preempts_computes_locally_and_answers_rightly(pair: Pair) -> None:
    assert_a_target_computes_locally(pair)


def test_a_source_that_preempts_retracts_and_every_answer_is_right(pair: Pair) -> None:
    assert_a_source_retracts(pair)


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
