"""Real SGLang with small caches and short limits: queues, aborts in each state, refusals at the door of either side."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import aiohttp
import pytest
from sglang_forked import ForkedServers
from sglang_stand import (
    START_S,
    Answer,
    Grid,
    Trio,
    different,
    generate,
    hand_over,
    new_room,
    noted_at,
    outcome,
    prompt,
    run,
    wait_until_noted,
)

from kvbaton.errors import LocalError
from kvbaton.launch.fleet import FleetPart

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

WAIT_S = 60.0
QUEUE_S = 4.0
HELD_S = 10.0
LIMITS = {"transfer_timeout": HELD_S, "defer_timeout": 300}
"""A side that was not notified would wait for 300 s, which is longer than any test waits; so does a source whose target queues,
however slow the machine is."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Trio]:
    """A prefill with room for 768 tokens, which waits 4 s for a target to come, and a decode with room for 1,024."""
    grid = Grid()
    with grid.fleet:
        made = Trio(
            grid,
            grid.start("single", "both"),
            grid.start("prefill", "prefill", cache_blocks=6, settings={"limits": {**LIMITS, "queue_timeout": QUEUE_S}}),
            grid.start(
                "decode",
                "decode",
                cache_blocks=8,
                settings={"limits": {**LIMITS, "queue_timeout": 300}},
                # So few that answers outgrow the cache, and SGLang retracts requests.
                arguments=("--num-reserved-decode-tokens", "16"),
            ),
        )
        grid.wait_healthy()
        yield made


def test_requests_that_queue_for_pages_at_decode_do_not_use_up_the_limit_of_their_prefill(servers: Trio) -> None:
    """A request whose prefill never comes has most of the cache of decode until it expires, which takes longer than a prefill
    waits for a target to come. The others wait for pages meanwhile.
    """
    prompts, rooms = [prompt(200 + index, 400) for index in range(8)], [new_room() for _ in range(8)]
    blocking = servers.where()

    async def work(session: aiohttp.ClientSession) -> None:
        singles = [await generate(session, servers.single.base_url, ids) for ids in prompts]
        blocker = asyncio.create_task(generate(session, servers.decode.base_url, prompt(199, 900), **blocking))
        await wait_until_noted(servers.decode, blocking["bootstrap_room"], "grant sent")
        asked = (
            hand_over(session, servers.prefill, servers.decode, ids, room=room)
            for ids, room in zip(prompts, rooms, strict=True)
        )
        answers = await asyncio.gather(*asked)
        assert [different(single, decoded) for single, (_, decoded) in zip(singles, answers, strict=True)] == [""] * 8
        expired = await blocker
        assert expired.status == 500
        assert "the target expired" in expired.text

    run(work)
    waits = [noted_at(servers.prefill, room, "granted") - noted_at(servers.prefill, room, "arrived") for room in rooms]
    assert min(waits) > QUEUE_S, "every one of them waited for longer than the limit"
    servers.check_serves(700)


def test_requests_that_decode_retracts_are_answered_as_if_it_had_not(servers: Trio) -> None:
    """Two prompts fit the cache, and their answers do not: one of them is retracted, and goes on when the other is over."""
    prompts = [prompt(300 + index, 440) for index in range(2)]

    async def work(session: aiohttp.ClientSession) -> None:
        singles = [await generate(session, servers.single.base_url, ids, 120) for ids in prompts]
        asked = (hand_over(session, servers.prefill, servers.decode, ids, 120) for ids in prompts)
        for single, (_, decoded) in zip(singles, await asyncio.gather(*asked), strict=True):
            assert different(single, decoded) == ""

    run(work)
    log = (servers.grid.fleet.log_directory / "decode.log").read_text(errors="replace")
    assert "#retracted_reqs" in log, "nothing was retracted"
    servers.check_serves(700)


async def _abort(session: aiohttp.ClientSession, part: FleetPart, room: int) -> None:
    """Through SGLang's own endpoint: it takes seconds to notice a client that has gone."""
    async with session.post(f"{part.base_url}/abort_request", json={"rid": _name(part, room)}) as response:
        assert response.status == 200, await response.text()


def _ask(session: aiohttp.ClientSession, servers: Trio, room: int, *parts: FleetPart) -> list[asyncio.Task[Answer]]:
    """Requests of one prompt to these servers."""
    ids, where = prompt(room, 700), servers.where(room)
    return [asyncio.create_task(generate(session, part.base_url, ids, 200, rid=_name(part, room), **where)) for part in parts]


def _name(part: FleetPart, room: int) -> str:
    return f"{part.name} {room}"


def test_an_abort_at_decode_before_the_prefill_ends_it_when_it_comes(servers: Trio) -> None:
    room = new_room()

    async def work(session: aiohttp.ClientSession) -> None:
        (decoding,) = _ask(session, servers, room, servers.decode)
        await wait_until_noted(servers.decode, room, "grant sent")
        await _abort(session, servers.decode, room)
        await asyncio.wait_for(decoding, WAIT_S)
        assert await asyncio.to_thread(outcome, servers.decode, room) == "cancelled"
        (filling,) = _ask(session, servers, room, servers.prefill)
        answer = await asyncio.wait_for(filling, WAIT_S)
        assert answer.status == 500
        assert "expired" not in answer.text, "it need not wait for its limit"

    run(work)
    servers.check_serves(700)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_while_chunks_stream_ends_the_request_on_the_other_side(servers: Trio, side: str) -> None:
    """The other side is stopped in mid-stream, and goes on when this one has ended the request."""
    parts = (servers.prefill, servers.decode)
    here, there = parts if side == "prefill" else parts[::-1]

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in range(10):
            room = new_room()
            asked = dict(zip((here.name, there.name), _ask(session, servers, room, here, there), strict=True))
            await wait_until_noted(servers.prefill, room, "computed")
            os.killpg(servers.grid.fleet.pid(there.name), signal.SIGSTOP)
            try:
                await _abort(session, here, room)
                await asyncio.wait_for(asked[here.name], WAIT_S)
                ended = await asyncio.to_thread(outcome, here, room)
            finally:
                os.killpg(servers.grid.fleet.pid(there.name), signal.SIGCONT)
            answer = await asyncio.wait_for(asked[there.name], WAIT_S)
            if ended != "delivered":
                # Else everything had arrived before the other side stood still.
                break
        assert ended == "cancelled"
        assert answer.status == 500
        assert "expired" not in answer.text, "it need not wait for its limit"

    run(work)
    servers.check_serves(700)


def test_an_abort_while_decode_answers_frees_the_pages(servers: Trio) -> None:
    room = new_room()

    async def work(session: aiohttp.ClientSession) -> None:
        decoding, filling = _ask(session, servers, room, servers.decode, servers.prefill)
        await wait_until_noted(servers.decode, room, "first step")
        await _abort(session, servers.decode, room)
        assert (await asyncio.wait_for(filling, WAIT_S)).status == 200
        assert len((await asyncio.wait_for(decoding, WAIT_S)).tokens) < 200, "it was not aborted"

    run(work)
    servers.check_serves(700)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_that_is_too_long_for_prefill_alone_ends_at_decode_too(servers: Trio, first: str) -> None:
    """SGLang's prefill refuses it before it has a sender; decode, which has pages for it, must not wait for its limit."""
    where, ids = servers.where(), prompt(900, 900)

    async def work(session: aiohttp.ClientSession) -> None:
        asking = asyncio.create_task(generate(session, servers.decode.base_url, ids, **where)) if first == "decode" else None
        if asking is not None:
            await wait_until_noted(servers.decode, where["bootstrap_room"], "grant sent")
        prefilled = await generate(session, servers.prefill.base_url, ids, **where)
        decoded = await asyncio.wait_for(asking or generate(session, servers.decode.base_url, ids, **where), WAIT_S)
        assert (prefilled.status, decoded.status) == (400, 500), (prefilled, decoded)
        assert "prefill refused it" in decoded.text

    run(work)
    servers.check_serves(700)


def test_a_bootstrap_port_in_use_ends_the_server_with_its_number(servers: Trio) -> None:
    port = servers.bootstrap_port
    with ForkedServers() as fleet:
        servers.grid.start("second", "prefill", fleet=fleet, arguments=("--disaggregation-bootstrap-port", str(port)))
        with pytest.raises(LocalError, match=str(port)):
            fleet.wait_healthy(START_S)
    servers.check_serves(700)
