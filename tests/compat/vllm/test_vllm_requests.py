"""Requests of every kind through a prefill and a decode vLLM: right answers, or an error for that request alone.

With `--sample`, each kind in one of the two modes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from vllm_handing import Client, Given, assert_equal, is_near_tie, prompt_of
from vllm_servers import BLOCK_TOKENS, MODEL
from vllm_stand import VllmStand, both, together

from kvbaton.core.handoff import Mode
from kvbaton.engines.handoff_params import KVTransferParams
from kvbaton.errors import PeerError
from kvbaton.verify.compare import Verdict, compare
from watching import wait_until

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

END_OF_TEXT = "2"


async def completion(session: aiohttp.ClientSession, url: str, **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, **fields}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        text = await response.text()
        if response.status != 200:
            raise PeerError(f"HTTP {response.status}: {text[:500]}")
        return dict(json.loads(text))


def texts(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in document["choices"]]


def delivered(standing: VllmStand) -> float:
    """How many hand-offs the decode server has seen delivered."""
    return standing.pair.decode.metrics().get('vllm:kvbaton_handoffs_total{outcome="delivered",side="target"}', 0.0)


SHAPES: dict[str, dict[str, object]] = {
    "several prompts": {"prompt": [prompt_of(20), prompt_of(150), prompt_of(7)]},
    "several samples": {"prompt": prompt_of(140, seed=2), "n": 2, "temperature": 0.8, "seed": 7},
    "prompt logprobs": {"prompt": prompt_of(40, seed=3), "prompt_logprobs": 1},
    "one token": {"prompt": prompt_of(60, seed=4), "max_tokens": 1},
    "first token ends the text": {"prompt": prompt_of(60, seed=13), "logit_bias": {END_OF_TEXT: 100}},
    "beam search": {"prompt": prompt_of(70, seed=14), "use_beam_search": True, "n": 3},
    "only scores": {"prompt": prompt_of(70, seed=15), "echo": True, "logprobs": 1, "max_tokens": 0},
}


HANDED_OFF = {"several prompts": 3, "several samples": 2, "first token ends the text": 1}
"""How many hand-offs some of them make at least."""


@pytest.mark.sampled(1, by="name")
@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_every_shape(standing: VllmStand, name: str) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        single = await completion(session, standing.pair.single.url, **SHAPES[name])
        pair = await completion(session, standing.router, **SHAPES[name])
        assert texts(pair) == texts(single)
        await completion(session, standing.pair.decode.url, prompt=prompt_of(5))  # vLLM publishes with its next step

    before = delivered(standing)
    together(send)
    standing.pair.wait_idle()
    wait_until(lambda: delivered(standing) >= before + HANDED_OFF.get(name, 0), f"{name}: each is handed off", 30)


@pytest.mark.sampled(1)
def test_a_stream_has_the_same_text(standing: VllmStand) -> None:
    async def stream(session: aiohttp.ClientSession, url: str) -> str:
        body = {"model": MODEL, "prompt": prompt_of(200, seed=5), "max_tokens": 8, "temperature": 0, "stream": True}
        found = ""
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    found += json.loads(line[6:])["choices"][0]["text"]
        return found

    async def send(session: aiohttp.ClientSession) -> None:
        assert await stream(session, standing.router) == await stream(session, standing.pair.single.url) != ""

    together(send)


@pytest.mark.sampled(1)
def test_a_plain_request_to_either_server_is_computed_there(standing: VllmStand) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        client, prompt = Client(session, standing.pair), prompt_of(50, seed=6)
        alone = await client.alone(prompt)
        for server in (standing.pair.decode, standing.pair.prefill):
            assert_equal(alone, await client.alone(prompt, url=server.url))

    together(send)


@pytest.mark.sampled(1, by="blocks")
@pytest.mark.parametrize("blocks", [1, 2])
def test_what_the_target_has_cached_is_not_sent_again(standing: VllmStand, blocks: int) -> None:
    """A prompt of whole blocks, twice: all but the last block are there the second time, on both sides."""

    async def send(session: aiohttp.ClientSession) -> None:
        prompt = prompt_of(blocks * BLOCK_TOKENS, seed="cached")
        for _ in range(2):
            single, pair = await both(session, standing, prompt)
            assert compare(single.answer, pair.answer).verdict is Verdict.EQUAL
        assert pair.record["handed_off"]
        assert pair.record["cached_tokens"] == (blocks - 1) * BLOCK_TOKENS

    together(send)
    standing.pair.wait_idle()


@pytest.mark.sampled(1)
def test_a_cache_of_another_salt_is_refused(standing: VllmStand) -> None:
    """Two requests that differ in nothing but `cache_salt` are those of two tenants, whatever transfer id joins them."""
    pair = standing.pair
    prompt = prompt_of(140, seed="salt")

    async def once(session: aiohttp.ClientSession, transfer_id: str, *salts: str) -> dict[str, Any]:
        source, target = ({"prompt": prompt, "cache_salt": salt} for salt in salts)
        asked = {**source, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id}}
        prefill = asyncio.create_task(completion(session, pair.prefill.url, **asked))
        params: dict[str, Any] = {"do_remote_prefill": True, "transfer_id": transfer_id}
        params |= {"remote_host": "127.0.0.1", "remote_port": pair.prefill.control_port}
        if pair.mode is Mode.PULL:
            params = (await prefill)["kv_transfer_params"]
        try:
            return await completion(session, pair.decode.url, **target, kv_transfer_params=params)
        finally:
            await asyncio.wait([prefill])

    async def send(session: aiohttp.ClientSession) -> None:
        with pytest.raises(PeerError, match="HTTP 500"):
            await once(session, "another-salt", "one tenant", "another tenant")
        given = await once(session, "same-salt", "one tenant", "one tenant")
        assert given["kv_transfer_params"]["kvbaton"]["handed_off"]

    together(send)
    pair.wait_idle()
    assert "the source has another prompt of that transfer id" in pair.decode.log()


REFUSED: dict[str, dict[str, object]] = {
    "too long": {"prompt": prompt_of(2100)},
    "bad sampling": {"temperature": -1},
    "more logprobs than there are": {"logprobs": 100_000},
    "a token that is none": {"prompt": [1, 2, 49_999_999]},
}


@pytest.mark.sampled(1, by="name")
@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_the_target_refuses_before_admission_frees_its_source(standing: VllmStand, name: str) -> None:
    """The source is notified. vLLM forgets the header then, so the parameters must name the source."""

    async def send(session: aiohttp.ClientSession) -> None:
        client, prompt = Client(session, standing.pair), prompt_of(140, seed=f"refused {name}")
        before = await client.expired()
        header, transfer_id = client.header(), f"refused-{name.replace(' ', '-')}"
        params: dict[str, Any] = {"do_remote_prefill": True, "transfer_id": transfer_id}
        params |= {"remote_host": "127.0.0.1", "remote_port": standing.pair.prefill.control_port}
        prefill = asyncio.create_task(client.prefill(prompt, transfer_id, header))
        if standing.pair.mode is Mode.PULL:
            params = (await prefill).params
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params, **REFUSED[name]}
        async with session.post(
            f"{standing.pair.decode.url}/v1/completions", json=body, headers={"X-Request-Id": header}
        ) as response:
            assert response.status == 400, await response.text()
        await asyncio.wait([prefill])
        await assert_released(client, before)

    together(send)


async def assert_released(client: Client, before: dict[str, float]) -> None:
    """All blocks come back, and not because a lease has expired since."""
    await asyncio.to_thread(client.pair.wait_idle)
    assert await client.expired() == before


VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    1 << 40,
    0.5,
    "",
    "x" * 300,
    "10.255.255.1",
    [[-1]],
    {"a": 1},
)


FLAGS = frozenset({"do_remote_decode", "do_remote_prefill"})
TEXTS = frozenset({"transfer_id", "remote_engine_id", "remote_host", "address_proof"})
NUMBERS = frozenset(KVTransferParams.__struct_fields__) - FLAGS - TEXTS


def wrong_params(side: str) -> Iterator[dict[str, object]]:
    """Every field with every kind of value, in a request for this side."""
    for field in (*KVTransferParams.__struct_fields__, "remote_block_ids", "transfer_mode"):
        for value in VALUES:
            yield {side: True, "transfer_id": "wrong", "remote_host": "127.0.0.1", "remote_port": 1, field: value}
    yield {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "both"}
    yield {side: True}


def is_of_its_kind(field: str, value: object) -> bool:
    """Whether a field that a prefill instance reads may have this value. What only a target uses it does not look into."""
    if value is None or field not in FLAGS | TEXTS | NUMBERS:
        return True
    if field == "transfer_id":
        return isinstance(value, str) and 1 <= len(value) <= 256
    return type(value) is (bool if field in FLAGS else str if field in TEXTS else int)


def must_fail(is_prefill: bool, params: dict[str, object]) -> bool:
    """Whether a server has to fail a request with these, rather than answer it."""
    if not any(params.get(flag) for flag in FLAGS):
        return False
    if params.get("do_remote_prefill") or not is_prefill:
        return True
    return not all(is_of_its_kind(field, value) for field, value in params.items())


def test_what_must_fail_is_known() -> None:
    """No process listens at the source's address, so no hand-off lands; a prefill is computed unless it cannot be read."""
    source, target = ({side: True, "transfer_id": "t", "remote_host": "127.0.0.1"} for side in sorted(FLAGS))
    assert [must_fail(is_prefill, target) for is_prefill in (False, True)] == [True, True]
    assert [must_fail(is_prefill, source) for is_prefill in (False, True)] == [True, False]
    assert must_fail(True, {**source, "remote_port": True})
    assert must_fail(True, {**source, "transfer_id": ""})
    assert not must_fail(True, {**source, "transfer_id": None, "remote_block_ids": [[-1]]})
    assert not must_fail(False, {"do_remote_prefill": None, "transfer_id": 7})


@pytest.mark.sampled(1, by="side")
@pytest.mark.parametrize("side", sorted(FLAGS))
def test_wrong_parameters_fail_their_request_and_the_engine_lives(standing: VllmStand, side: str) -> None:
    """Exactly those that have to fail do; the answer of each other one is that of the single server, but for near ties."""
    pair = standing.pair
    prompt = prompt_of(9, seed=side)

    async def one(client: Client, url: str, params: dict[str, object], index: int) -> Given | PeerError:
        if params.get("transfer_id") == "wrong":
            params = {**params, "transfer_id": f"wrong-{index}"}
        try:
            return await client.send(url, prompt, 2, params)
        except PeerError as error:
            return error

    async def send(session: aiohttp.ClientSession) -> None:
        client, sent = Client(session, pair), list(wrong_params(side))
        alone = await client.alone(prompt, 2)
        for server in (pair.decode, pair.prefill):
            ends = await asyncio.gather(*(one(client, server.url, params, index) for index, params in enumerate(sent)))
            for params, end in zip(sent, ends, strict=True):
                assert isinstance(end, PeerError) is must_fail(server is pair.prefill, params), (params, end)
                if isinstance(end, Given):
                    is_near_tie(alone, end)
        pair.assert_alive()
        await client.assert_serves(prompt_of(70, seed=f"after {side}"))

    together(send)
    pair.wait_idle()


@pytest.mark.sampled(1)
def test_bad_parameters_fail_a_request_with_prompt_logprobs_too(standing: VllmStand) -> None:
    """vLLM loads nothing for such a request, and would answer it."""
    bad = {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "both"}

    async def send(session: aiohttp.ClientSession) -> None:
        for server in (standing.pair.decode, standing.pair.prefill):
            with pytest.raises(PeerError, match="HTTP 500"):
                await completion(session, server.url, prompt=prompt_of(40, seed=8), prompt_logprobs=1, kv_transfer_params=bad)

    together(send)
    standing.pair.wait_idle()


MANY: dict[str, dict[str, object]] = {
    "several prompts": {"prompt": [prompt_of(20, seed=21), prompt_of(150, seed=22), prompt_of(7, seed=23)]},
    "several samples": {"prompt": prompt_of(140, seed=24), "n": 3, "temperature": 0.8, "seed": 7},
}


@pytest.mark.parametrize("name", MANY)
def test_many_sources_without_a_transfer_id_are_handed_over(standing: VllmStand, name: str) -> None:
    """A router that sends no transfer id passes on the one that the prefill instance answers with: one for all of them."""
    if standing.pair.mode is Mode.PUSH:
        pytest.skip("in push both instances are asked at once, and need the transfer id before there is an answer")

    async def send(session: aiohttp.ClientSession) -> None:
        pair, client = standing.pair, Client(session, standing.pair)
        before = await client.expired()
        single = await completion(session, pair.single.url, **MANY[name])
        asked = {**MANY[name], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = (await completion(session, pair.prefill.url, **asked))["kv_transfer_params"]
        given = await completion(session, pair.decode.url, **MANY[name], kv_transfer_params=params)
        assert texts(given) == texts(single)
        assert given["kv_transfer_params"]["kvbaton"]["handed_off"]
        await assert_released(client, before)

    together(send)


@pytest.mark.sampled(1, by="name")
@pytest.mark.parametrize("name", MANY)
def test_a_refused_request_frees_all_of_its_sources(standing: VllmStand, name: str) -> None:
    """vLLM reports it once, however many prompts and samples it has."""

    async def send(session: aiohttp.ClientSession) -> None:
        pair, client = standing.pair, Client(session, standing.pair)
        before = await client.expired()
        transfer_id = f"refused-{name.replace(' ', '-')}-{pair.mode}"
        asked = {**MANY[name], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id}}
        await completion(session, pair.prefill.url, **asked)
        params = {"do_remote_prefill": True, "transfer_id": transfer_id}
        params |= {"remote_host": "127.0.0.1", "remote_port": pair.prefill.control_port}
        with pytest.raises(PeerError, match="HTTP 400"):
            await completion(session, pair.decode.url, **{**MANY[name], "kv_transfer_params": params, "logprobs": 100_000})
        await assert_released(client, before)

    together(send)
