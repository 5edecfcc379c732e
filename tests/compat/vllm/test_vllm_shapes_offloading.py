"""Beside vLLM's own offloading connector, in its `MultiConnector`, at TP 2 on both sides.

Caches are so small that prompts which come again have lost their blocks, and are loaded from main memory: a source hands over
what another connector has loaded, and a target offloads what was handed over, and computes from that later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from vllm_handing import Client, Pair, assert_equal, prompt_of, together
from vllm_servers import BLOCK_TOKENS, Server, ServerSpec, servers
from vllm_shaped import LIMITS, VOCABULARY, Singles, assert_control_shows, assert_same_answers

from kvbaton.core.handoff import Mode

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]

SMALL = "small-llama"
BLOCKS = 24
"""Of a rank's cache."""
LENGTH = 4 * BLOCK_TOKENS + 50
PROMPTS = 8
"""So many of this length do not fit together."""
HITS = "vllm:external_prefix_cache_hits_total"
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "host_offloading",
        "cpu_bytes_to_use": 1 << 28,
    },
}


@pytest.fixture(scope="module", params=list(Mode), ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as kept:
        single = Singles(kept).of(SMALL)
        arguments = ("--enable-prefix-caching", "--num-gpu-blocks-override", str(BLOCKS))
        spec = ServerSpec("", "", request.param, settings=LIMITS, arguments=arguments, holds=True, model=SMALL, shape="tp2")
        spec = replace(spec, beside=(OFFLOADING,), forks=True)
        roles = [replace(spec, name=role, role=role) for role in ("prefill", "decode")]
        prefill, decode = kept.enter_context(servers(*roles))
        yield Pair(request.param, prefill, decode, single, vocabulary=VOCABULARY)


def _loaded(server: Server) -> float:
    return server.metrics().get(HITS, 0.0)


def _prompts() -> list[list[int]]:
    return [prompt_of(LENGTH, f"offloaded {number}") for number in range(PROMPTS)]


def test_every_answer_is_that_of_one_plain_server(pair: Pair) -> None:
    together(pair, assert_same_answers)
    pair.assert_alive()


def test_a_source_hands_over_what_it_loaded_from_main_memory(pair: Pair) -> None:
    async def send(client: Client) -> None:
        for prompt in _prompts():
            await client.assert_serves(prompt)
        before = _loaded(pair.prefill)
        for prompt in _prompts():
            given = await client.hand_off(prompt)
            assert given.record["handed_off"], given.record
            assert_equal(await client.alone(prompt), given)
        # Each was stored whole but for its last block.
        assert _loaded(pair.prefill) - before >= PROMPTS * BLOCK_TOKENS

    together(pair, send)
    pair.wait_idle()


def test_a_target_computes_from_what_was_handed_over_and_offloaded(pair: Pair) -> None:
    async def send(client: Client) -> None:
        for prompt in _prompts():
            await client.hand_off(prompt)
        before = _loaded(pair.decode)
        for prompt in _prompts():
            assert_equal(await client.alone(prompt), await client.alone(prompt, url=pair.decode.url))
        assert _loaded(pair.decode) - before >= PROMPTS * BLOCK_TOKENS

    together(pair, send)
    pair.wait_idle()


def test_control_nothing_copied_shows(pair: Pair) -> None:
    together(pair, assert_control_shows)
