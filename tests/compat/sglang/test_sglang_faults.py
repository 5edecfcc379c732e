"""Real SGLang servers that are killed, stopped or terminated while they hand over: the other side serves on."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
import pytest
from sglang_stand import SglangStand, StandSpec, different, prompt, stand
from test_sglang_pair import run

from kvbaton.launch.fleet import FleetPart

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

LIMITS = {"limits": {"transfer_timeout": 6, "defer_timeout": 12, "stop_timeout": 1, "queue_timeout": 30}}


async def _strike(pair: SglangStand, session: aiohttp.ClientSession, victim: FleetPart, number: int) -> None:
    """Requests are under way when `victim` gets the signal; every one of them gets an answer, and the other server lives."""
    requests = [asyncio.create_task(pair.pair(session, prompt(seed, 900), 32)) for seed in range(4)]
    await asyncio.sleep(1.0)
    if number == signal.SIGTERM:
        os.kill(pair.fleet.pid(victim.name), number)
    else:
        pair.signal(victim, number)
    survivor = 1 if victim is pair.prefill else 0
    for request in requests:
        try:
            answers = await asyncio.wait_for(request, 120)
        except aiohttp.ClientError:
            continue
        assert answers[survivor].status in (200, 500)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "terminate"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_that_ends_takes_no_other_with_it_and_comes_back(side: str, number: int) -> None:
    with stand(StandSpec(settings=LIMITS)) as pair:
        victim, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)

        async def strike(session: aiohttp.ClientSession) -> None:
            await _strike(pair, session, victim, number)

        async def again(session: aiohttp.ClientSession) -> None:
            ids = prompt(77, 120)
            single = await pair.generate(session, pair.single.base_url, ids)
            assert different(single, (await pair.pair(session, ids))[1]) == ""

        run(strike)
        assert pair.health(other) == 200
        pair.fleet.restart(victim.name)
        pair.fleet.wait_healthy(600)
        run(again)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_that_is_stopped_fails_its_requests_and_serves_when_it_goes_on(side: str) -> None:
    with stand(StandSpec(settings=LIMITS)) as pair:
        victim = pair.prefill if side == "prefill" else pair.decode

        async def work(session: aiohttp.ClientSession) -> None:
            request = asyncio.create_task(pair.pair(session, prompt(5, 900), 32))
            await asyncio.sleep(0.5)
            pair.signal(victim, signal.SIGSTOP)
            await asyncio.sleep(15)
            pair.signal(victim, signal.SIGCONT)
            answers = await asyncio.wait_for(request, 120)
            assert all(answer.status in (200, 500) for answer in answers)
            ids = prompt(78, 120)
            single = await pair.generate(session, pair.single.base_url, ids)
            assert different(single, (await pair.pair(session, ids))[1]) == ""

        run(work)
