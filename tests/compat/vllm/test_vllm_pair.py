"""One prefill and one decode vLLM behind our router: the same answers as one vLLM, through aborts and a kill.

The servers are started once per mode and shared. What a test leaves behind must not show in the next one.
"""

from __future__ import annotations

import asyncio
import random
import signal

import aiohttp
import pytest
from vllm_handing import Client, assert_equal, prompt_of
from vllm_servers import MODEL
from vllm_stand import DEFER_S, VllmStand, both, together

from kvbaton.errors import PeerError
from kvbaton.verify.client import ask
from kvbaton.verify.compare import Verdict, compare
from watching import wait_until

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (1, 5, 127, 128, 129, 300, 600)


def test_answers_are_those_of_one_server(standing: VllmStand) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    prompts += [prompts[5][:256] + prompt_of(30, seed=1)]

    async def send(session: aiohttp.ClientSession) -> None:
        replies = await asyncio.gather(*(both(session, standing, prompt) for prompt in prompts))
        for prompt, (single, pair) in zip(prompts, replies, strict=True):
            assert compare(single.answer, pair.answer).verdict is Verdict.EQUAL, f"prompt of {len(prompt)} tokens"
            assert pair.record["handed_off"]
            assert pair.record["bytes_moved"] == pair.record["bytes_planned"] > 0

    together(send)
    standing.pair.wait_idle()


@pytest.mark.sampled(1)
def test_an_abort_storm_leaves_nothing_behind(standing: VllmStand) -> None:
    generator = random.Random(1)

    async def one(session: aiohttp.ClientSession, index: int) -> bool:
        asking = ask(session, standing.router, MODEL, tuple(prompt_of(generator.choice((3, 40, 130, 300)), index)), 8)
        timeout_s = generator.uniform(0.01, 3.0) if index % 2 else 300.0
        try:
            await asyncio.wait_for(asking, timeout_s)
        except TimeoutError:
            return False
        return True

    async def send(session: aiohttp.ClientSession) -> None:
        served = await asyncio.gather(*(one(session, index) for index in range(40)))
        assert all(served[index] for index in range(0, 40, 2)), "those that waited were answered"
        assert not all(served), "some were aborted; else this tests nothing"
        single, pair = await both(session, standing, prompt_of(90, seed=8))
        assert compare(single.answer, pair.answer).verdict is Verdict.EQUAL

    together(send)
    standing.pair.wait_idle()


@pytest.mark.sampled(1)
def test_an_idle_source_frees_blocks_that_no_target_fetches(standing: VllmStand) -> None:
    pair = standing.pair

    async def send(session: aiohttp.ClientSession) -> None:
        client = Client(session, pair)
        assert (await client.prefill(prompt_of(140), "orphan", client.header())).params

    together(send)
    wait_until(lambda: not pair.prefill.is_idle(), "them to be held for a while", DEFER_S)
    pair.wait_idle()


def test_the_control_a_decoder_that_receives_nothing_answers_wrongly(standing: VllmStand) -> None:
    """Without the bytes the answers must differ, else equal answers prove nothing."""

    async def send(session: aiohttp.ClientSession) -> None:
        client, prompt = Client(session, standing.pair), prompt_of(100, seed=9)
        with standing.pair.decode.holding("drop"):
            given = await client.hand_off(prompt)
        assert given.record["handed_off"]
        assert given.answer.tokens != (await client.alone(prompt)).answer.tokens

    together(send)
    standing.pair.wait_idle()


@pytest.mark.sampled(1)
def test_when_the_source_is_killed_its_request_fails_and_the_target_serves_on(standing: VllmStand) -> None:
    """After its restart on the same address both sides do a new handshake."""
    prefill, decode = standing.pair.prefill, standing.pair.decode

    async def send(session: aiohttp.ClientSession) -> None:
        client = Client(session, standing.pair)
        long = asyncio.create_task(ask(session, standing.router, MODEL, tuple(prompt_of(1500, seed=10)), 8))
        await client.until(lambda: not prefill.is_idle(), "the prefill to begin")
        prefill.signal(signal.SIGKILL)
        with pytest.raises(PeerError):
            await long
        await asyncio.to_thread(decode.wait_idle)
        plain = prompt_of(30, seed=11)
        assert_equal(await client.alone(plain), await client.alone(plain, url=decode.url))
        prefill.restart()
        await client.assert_serves(prompt_of(140, seed=12))

    together(send)
