"""What else vLLM can be asked to do, at TP 2 on both sides, all of it at once: answers are those of one plain vLLM.

`MultiConnector` with another connector beside ours, async scheduling, priority scheduling, prefix caching on both sides,
chunked prefill (prompts of several steps), structured output, several samples. vLLM's offloading connector refuses CPUs, so the
connector beside ours is the one that vLLM ships as an example, which stores every layer on disk. Preemption has small caches
of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from vllm_handing import Client, Pair, assert_equal, prompt_of, together
from vllm_preempting import assert_a_source_retracts, assert_a_target_computes_locally
from vllm_servers import BLOCK_TOKENS, ServerSpec, servers
from vllm_shaped import LIMITS, VOCABULARY, Singles, assert_control_shows, assert_same_answers

from kvbaton.core.handoff import Mode

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]

SMALL = "small-llama"
TOGETHER = ("--async-scheduling", "--scheduling-policy", "priority", "--enable-prefix-caching")
MULTI = ("--disable-hybrid-kv-cache-manager",)
"""What the connector beside ours needs."""
TIGHT = (
    "--num-gpu-blocks-override",
    "20",
    "--no-enable-prefix-caching",
    "--no-scheduler-reserve-full-isl",
    "--async-scheduling",
)


@pytest.fixture(scope="module")
def singles() -> Iterator[Singles]:
    with ExitStack() as kept:
        yield Singles(kept)


def _specs(mode: Mode, arguments: tuple[str, ...]) -> list[ServerSpec]:
    spec = ServerSpec("", "", mode, settings=LIMITS, arguments=arguments, holds=True, model=SMALL, shape="tp2", forks=True)
    return [replace(spec, name=role, role=role) for role in ("prefill", "decode")]


@pytest.fixture(scope="module", params=list(Mode), ids=str)
def pair(request: pytest.FixtureRequest, singles: Singles) -> Iterator[Pair]:
    single = singles.of(SMALL)
    with ExitStack() as kept:
        specs = []
        for spec in _specs(request.param, (*TOGETHER, *MULTI)):
            disk = kept.enter_context(tempfile.TemporaryDirectory(prefix="kvbaton-beside-"))
            example = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": disk}}
            specs.append(replace(spec, beside=(example,)))
        prefill, decode = kept.enter_context(servers(*specs))
        yield Pair(request.param, prefill, decode, single, vocabulary=VOCABULARY)


def test_every_answer_is_that_of_one_plain_server(pair: Pair) -> None:
    together(pair, assert_same_answers)
    pair.assert_alive()


def test_control_nothing_copied_shows(pair: Pair) -> None:
    together(pair, assert_control_shows)


def test_what_the_target_has_cached_is_not_sent_again(pair: Pair) -> None:
    async def send(client: Client) -> None:
        prompt = prompt_of(2 * BLOCK_TOKENS, "cached twice")
        alone = await client.alone(prompt)
        for _ in range(2):
            given = await client.hand_off(prompt)
            assert_equal(alone, given)
        assert given.record["cached_tokens"] == BLOCK_TOKENS

    together(pair, send)
    pair.wait_idle()


FIELDS: dict[str, dict[str, Any]] = {
    "priority": {"priority": 3},
    # Without a seed: on CPUs vLLM 0.32 ends with "CPU Generator does not use offset" when a prompt of several steps has one.
    "several samples": {"n": 3, "temperature": 0.8, "top_k": 1},
    "a choice": {"structured_outputs": {"choice": ["yes indeed", "no"]}, "max_tokens": 12},
    "a pattern": {"structured_outputs": {"regex": "[0-9]{4}-[a-f]{3}"}, "max_tokens": 12},
}


@pytest.mark.parametrize("name", FIELDS)
def test_requests_of_every_kind(pair: Pair, name: str) -> None:
    async def send(client: Client) -> None:
        prompts = [prompt_of(length, name) for length in (20, 140, 300)]
        given = await asyncio.gather(*(client.hand_off_with(prompt, FIELDS[name]) for prompt in prompts))
        alone = await asyncio.gather(*(client.alone_with(prompt, FIELDS[name]) for prompt in prompts))
        assert [sorted(each) for each in given] == [sorted(each) for each in alone]
        assert all(text for each in given for text in each)

    together(pair, send)
    pair.wait_idle()


@pytest.fixture(scope="module", params=list(Mode), ids=str)
def tight(request: pytest.FixtureRequest, singles: Singles) -> Iterator[Pair]:
    """Caches that are far too small."""
    single = singles.of(SMALL)
    with servers(*_specs(request.param, TIGHT)) as (prefill, decode):
        yield Pair(request.param, prefill, decode, single, vocabulary=VOCABULARY)


def test_a_target_that_preempts_computes_locally_and_answers_rightly(tight: Pair) -> None:
    assert_a_target_computes_locally(tight)


def test_a_source_that_preempts_retracts_and_every_answer_is_right(tight: Pair) -> None:
    assert_a_source_retracts(tight)
