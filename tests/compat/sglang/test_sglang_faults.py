"""Real SGLang servers that are killed, terminated or stopped at each stage of a hand-off: the other side serves on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import aiohttp
import pytest
from sglang_stand import (
    Answer,
    SglangStand,
    StandSpec,
    different,
    generate,
    health,
    new_room,
    prompt,
    run,
    stand,
    wait_at_rest,
    wait_until_noted,
)

from kvbaton.launch.fleet import FleetPart

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

LIMITS = {"limits": {"transfer_timeout": 6, "defer_timeout": 12, "stop_timeout": 1, "queue_timeout": 30}}
LONG, OUTPUT = 1900, 96
WAIT_S = 90.0
STAGES = {
    "granted": ("decode", "grant sent", 1),
    "streaming": ("prefill", "computed", 3),
    "decoding": ("decode", "first step", 1),
}
"""When the fault strikes: as soon as this side has noted this stage so often. Up to the grant, decode alone has the request."""


@pytest.fixture(scope="module")
def pair() -> Iterator[SglangStand]:
    """Decode has two ranks: one that falls takes the other with it."""
    with stand(StandSpec(settings=LIMITS, decode_shape="tp2")) as running:
        yield running


async def _wait_for(pair: SglangStand, room: int, stage: str) -> None:
    side, noted, count = STAGES[stage]
    await wait_until_noted(pair.prefill if side == "prefill" else pair.decode, room, noted, count)


async def _answer(asking: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer, for a bounded time; status 0 when the server has gone."""
    try:
        return await asyncio.wait_for(asking, WAIT_S)
    except aiohttp.ClientError as error:
        return Answer(status=0, text=str(error))


def _strike(pair: SglangStand, victim: FleetPart, number: int) -> None:
    if number == signal.SIGTERM:
        # To the server alone, as a supervisor sends it; SGLang ends its other processes itself.
        os.kill(pair.fleet.pid(victim.name), number)
    else:
        pair.signal(victim, number)


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["kill", "terminate", "stop"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_falls_and_the_other_serves_on(pair: SglangStand, side: str, number: int, stage: str) -> None:
    victim, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    ids, room = prompt(LONG, LONG)[new_room() % 500 :], new_room()
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.bootstrap_port, "bootstrap_room": room}

    async def work(session: aiohttp.ClientSession) -> None:
        single = await generate(session, pair.single.base_url, ids, OUTPUT)

        def ask(part: FleetPart) -> asyncio.Task[Answer]:
            return asyncio.create_task(_answer(generate(session, part.base_url, ids, OUTPUT, **where)))

        asked = {part.name: ask(part) for part in (pair.decode, *([] if stage == "granted" else [pair.prefill]))}
        await _wait_for(pair, room, stage)
        _strike(pair, victim, number)
        if stage == "granted" and other is pair.prefill:
            # Its client is as late as can be: the grant has come, and its target has fallen since.
            asked[other.name] = ask(other)
        answers = {other.name: await asked[other.name]}
        assert await asyncio.to_thread(health, other) == 200
        if number == signal.SIGSTOP:
            pair.signal(victim, signal.SIGCONT)
        for name, task in asked.items():
            answers[name] = await task
        assert answers[other.name].status in (200, 500), answers[other.name].text
        decoded = answers["decode"]
        assert decoded.status != 200 or different(single, decoded) == ""
        if number != signal.SIGTERM:
            # What had landed is decoded; what had not fails. A server that is asked to end may finish its requests first.
            expected = 200 if stage == "decoding" else 500
            assert answers[other.name].status == expected, answers[other.name].text

    async def again(session: aiohttp.ClientSession) -> None:
        later = prompt(new_room(), 120)
        single = await generate(session, pair.single.base_url, later)
        assert different(single, (await pair.pair(session, later))[1]) == ""

    run(work)
    if number != signal.SIGSTOP:
        _restart(pair, victim)
    run(again)
    wait_at_rest(pair.prefill, pair.decode)


def _restart(pair: SglangStand, victim: FleetPart) -> None:
    until = time.monotonic() + WAIT_S
    while all(death.name != victim.name for death in pair.fleet.deaths()):
        assert time.monotonic() < until, f"{victim.name} has not ended"
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        pair.signal(victim, signal.SIGKILL)
    pair.fleet.restart(victim.name)
    pair.fleet.wait_healthy(600)
