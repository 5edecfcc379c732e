"""One prefill and one decode vLLM behind our router: the same answers as one vLLM, through aborts and a kill.

The servers are started once per mode and shared. What a test leaves behind must not show in the next one; the kill is last.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest
from vllm_stand import MODEL, VllmStand, both, stand, together

from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError
from kvbaton.launch.vllm import vllm_part
from kvbaton.verify.client import ask
from kvbaton.verify.compare import Verdict, compare
from watching import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (1, 5, 127, 128, 129, 300, 600)


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def servers(request: pytest.FixtureRequest) -> Iterator[VllmStand]:
    with stand(request.param, transfer_timeout=20, defer_timeout=25) as running:
        yield running


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed} {length}")
    return [generator.randrange(1000, 40_000) for _ in range(length)]


def assert_at_rest(servers: VllmStand) -> None:
    for url in (servers.prefill, servers.decode):
        wait_until(lambda url=url: servers.is_idle(url), f"{url} to hold no block for anybody", 90)  # type: ignore[misc]


def test_answers_are_those_of_one_server(servers: VllmStand) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    prompts += [prompts[5][:256] + prompt_of(30, seed=1)]

    async def send(session: aiohttp.ClientSession) -> None:
        replies = await asyncio.gather(*(both(session, servers, prompt) for prompt in prompts))
        for prompt, (single, pair) in zip(prompts, replies, strict=True):
            assert compare(single.answer, pair.answer).verdict is Verdict.EQUAL, f"prompt of {len(prompt)} tokens"
            assert pair.record["handed_off"]
            assert pair.record["bytes_moved"] == pair.record["bytes_planned"] > 0

    together(send)
    assert_at_rest(servers)


async def completion(session: aiohttp.ClientSession, url: str, **fields: object) -> dict[str, object]:
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, **fields}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        return dict(json.loads(text))


def texts(document: dict[str, object]) -> list[object]:
    choices = document["choices"]
    assert isinstance(choices, list)
    return [choice["text"] for choice in choices]


SHAPES: dict[str, dict[str, object]] = {
    "several prompts": {"prompt": [prompt_of(20), prompt_of(150), prompt_of(7)]},
    "several samples": {"prompt": prompt_of(140, seed=2), "n": 2, "temperature": 0.8, "seed": 7},
    "prompt logprobs": {"prompt": prompt_of(40, seed=3), "prompt_logprobs": 1},
    "one token": {"prompt": prompt_of(60, seed=4), "max_tokens": 1},
}


@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_every_shape(servers: VllmStand, name: str) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        single = await completion(session, servers.single, **SHAPES[name])
        pair = await completion(session, servers.router, **SHAPES[name])
        assert texts(pair) == texts(single)

    together(send)
    assert_at_rest(servers)


def test_a_stream_has_the_same_text(servers: VllmStand) -> None:
    async def stream(session: aiohttp.ClientSession, url: str) -> str:
        body = {"model": MODEL, "prompt": prompt_of(200, seed=5), "max_tokens": 8, "temperature": 0, "stream": True}
        found = ""
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    found += json.loads(line[6:])["choices"][0]["text"]
        return found

    async def send(session: aiohttp.ClientSession) -> None:
        assert await stream(session, servers.router) == await stream(session, servers.single) != ""

    together(send)


def test_a_plain_request_to_a_decoder_is_computed_there(servers: VllmStand) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        prompt = tuple(prompt_of(50, seed=6))
        alone = await ask(session, servers.single, MODEL, prompt, 8)
        decoder = await ask(session, servers.decode, MODEL, prompt, 8)
        assert compare(alone.answer, decoder.answer).verdict is Verdict.EQUAL

    together(send)


BAD: tuple[dict[str, object], ...] = (
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "transfer_id": 7},
    {"do_remote_prefill": True, "transfer_id": "tx", "remote_host": "127.0.0.1", "remote_port": 99_999_999},
    {"do_remote_prefill": True, "transfer_id": "tx", "remote_block_ids": [[-1]], "remote_host": "no such host!"},
    {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "tx"},
)


def test_bad_parameters_fail_their_request_and_the_engine_lives(servers: VllmStand) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        for params in BAD:
            body = {"model": MODEL, "prompt": prompt_of(30), "max_tokens": 2, "kv_transfer_params": params}
            async with session.post(f"{servers.decode}/v1/completions", json=body) as response:
                assert response.status >= 400, await response.text()
        single, pair = await both(session, servers, prompt_of(70, seed=7))
        assert compare(single.answer, pair.answer).verdict is Verdict.EQUAL

    together(send)
    assert_at_rest(servers)


def test_an_abort_storm_leaves_nothing_behind(servers: VllmStand) -> None:
    generator = random.Random(1)

    async def one(session: aiohttp.ClientSession, index: int) -> bool:
        asking = ask(session, servers.router, MODEL, tuple(prompt_of(generator.choice((3, 40, 130, 300)), index)), 8)
        patience_s = generator.uniform(0.01, 3.0) if index % 2 else 300.0
        try:
            await asyncio.wait_for(asking, patience_s)
        except TimeoutError:
            return False
        return True

    async def send(session: aiohttp.ClientSession) -> None:
        served = await asyncio.gather(*(one(session, index) for index in range(40)))
        assert all(served[index] for index in range(0, 40, 2)), "those that waited were answered"
        assert not all(served), "some were aborted; else this tests nothing"
        single, pair = await both(session, servers, prompt_of(90, seed=8))
        assert compare(single.answer, pair.answer).verdict is Verdict.EQUAL

    together(send)
    assert_at_rest(servers)


def test_an_idle_source_gives_blocks_back_that_nobody_comes_for(servers: VllmStand) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        order = {"do_remote_decode": True, "transfer_id": "orphan"}
        answer = await completion(session, servers.prefill, prompt=prompt_of(140), max_tokens=1, kv_transfer_params=order)
        assert answer["kv_transfer_params"]

    together(send)
    assert not servers.is_idle(servers.prefill), "they are held for a while"
    assert_at_rest(servers)


def test_the_control_a_decoder_that_receives_nothing_answers_wrongly(servers: VllmStand) -> None:
    """Without the bytes the answers must differ, else equal answers prove nothing."""
    options = replace(servers.options, settings={**servers.options.settings, "drop_writes": True})
    part, url = vllm_part("deaf", "decode", options, servers.ports)
    servers.fleet.start(part)
    servers.fleet.wait_healthy(900)

    async def send(session: aiohttp.ClientSession) -> None:
        prompt = tuple(prompt_of(200, seed=9))
        single = await ask(session, servers.single, MODEL, prompt, 8)
        first = {"do_remote_decode": True, "transfer_id": "control"}
        answer = await completion(session, servers.prefill, prompt=list(prompt), max_tokens=1, kv_transfer_params=first)
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 8, "temperature": 0, "logprobs": 2}
        body |= {"return_tokens_as_token_ids": True, "kv_transfer_params": answer["kv_transfer_params"]}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            document = await response.json()
        tokens = [int(token.removeprefix("token_id:")) for token in document["choices"][0]["logprobs"]["tokens"]]
        assert document["kv_transfer_params"]["kvbaton"]["handed_off"]
        assert tokens != list(single.answer.tokens)

    together(send)
    servers.kill("deaf")


def test_when_the_source_is_killed_its_request_fails_and_the_target_serves_on(servers: VllmStand) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        long = asyncio.create_task(ask(session, servers.router, MODEL, tuple(prompt_of(1500, seed=10)), 8))
        await asyncio.to_thread(wait_until, lambda: not servers.is_idle(servers.prefill), "the prefill to begin", 60)
        servers.kill("prefill")
        with pytest.raises(PeerError):
            await long
        await asyncio.to_thread(wait_until, lambda: servers.is_idle(servers.decode), "the target's blocks to be back", 90)
        plain = tuple(prompt_of(30, seed=11))
        alone = await ask(session, servers.single, MODEL, plain, 8)
        after = await ask(session, servers.decode, MODEL, plain, 8)
        assert compare(alone.answer, after.answer).verdict is Verdict.EQUAL

    together(send)
