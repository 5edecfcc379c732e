"""Real SGLang with small caches and short limits: queues, aborts in each state, refusals at the door of either side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from sglang_forked import ForkedServers
from sglang_stand import START_S, Answer, Grid, different, generate, hand_over, live_handoffs, new_room, noted_at, prompt, run

from kvbaton.core.addresses import ControlAddress
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import FleetPart

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

WAIT_S = 60.0
QUEUE_S = 4.0
LIMITS = {"transfer_timeout": 10, "defer_timeout": 300}
"""A side that was not notified would wait for 300 s, which is longer than any test waits; so does a source whose target queues,
however slow the machine is."""


@dataclass(frozen=True)
class Servers:
    """A prefill with room for 768 tokens, which waits 4 s for a target to come, and a decode with room for 1,024."""

    grid: Grid
    single: FleetPart
    prefill: FleetPart
    decode: FleetPart

    @property
    def bootstrap_port(self) -> int:
        """Where the prefill listens."""
        return ControlAddress.parse(self.prefill.control_address).handshake

    def where(self, room: int) -> dict[str, Any]:
        """The fields that name the prefill and a room there."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}

    def check_at_rest(self) -> None:
        """Both serve, and nothing is held on either side."""
        until = time.monotonic() + WAIT_S
        while any(live_handoffs(part) for part in (self.prefill, self.decode)):
            assert time.monotonic() < until, "hand-offs are left"
            time.sleep(0.1)
        for part in (self.prefill, self.decode):
            assert self.grid.is_alive(part), part.name

        async def work(session: aiohttp.ClientSession) -> None:
            ids = prompt(new_room(), 700)
            single = await generate(session, self.single.base_url, ids)
            assert different(single, (await hand_over(session, self.prefill, self.decode, ids))[1]) == ""

        run(work)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    grid = Grid()
    with grid.fleet:
        made = Servers(
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


def test_requests_that_queue_for_pages_at_decode_do_not_use_up_the_limit_of_their_prefill(servers: Servers) -> None:
    """Two prompts fill the cache of decode; the last ones wait for longer than a prefill waits for a target to come."""
    prompts, rooms = [prompt(200 + index, 400) for index in range(16)], [new_room() for _ in range(16)]

    async def work(session: aiohttp.ClientSession) -> None:
        singles = [await generate(session, servers.single.base_url, ids, 96) for ids in prompts]
        asked = (
            hand_over(session, servers.prefill, servers.decode, ids, 96, room) for ids, room in zip(prompts, rooms, strict=True)
        )
        answers = await asyncio.gather(*asked)
        found = [different(single, decoded) for single, (_, decoded) in zip(singles, answers, strict=True)]
        # Batches of other sizes add numbers in another order, so a near tie may fall the other way.
        problems = [problem for problem in found if problem]
        assert len(problems) <= 1, "\n".join(problems)
        assert all(decoded.status == 200 for _, decoded in answers)

    run(work)
    waits = [noted_at(servers.prefill, room, "granted") - noted_at(servers.prefill, room, "arrived") for room in rooms]
    assert max(waits) > QUEUE_S, "one of them waited for longer than the limit"
    servers.check_at_rest()


def test_requests_that_decode_retracts_are_answered_as_if_it_had_not(servers: Servers) -> None:
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
    servers.check_at_rest()


@pytest.mark.parametrize("state", ["granted", "streaming", "decoding"])
def test_an_abort_at_decode_ends_its_prefill_at_once_and_frees_the_pages(servers: Servers, state: str) -> None:
    room, ids = new_room(), prompt(new_room(), 700)
    where = servers.where(room)

    async def work(session: aiohttp.ClientSession) -> None:
        decoding = asyncio.create_task(generate(session, servers.decode.base_url, ids, 200, **where))
        filling: asyncio.Task[Answer] | None = None
        if state != "granted":
            filling = asyncio.create_task(generate(session, servers.prefill.base_url, ids, 200, **where))
        part, stage = {
            "granted": (servers.decode, "grant sent"),
            "streaming": (servers.prefill, "computed"),
            "decoding": (servers.decode, "first step"),
        }[state]
        until = time.monotonic() + WAIT_S
        while await asyncio.to_thread(noted_at, part, room, stage) < 0:
            assert time.monotonic() < until, f"{part.name} has not noted {stage!r}"
            await asyncio.sleep(0.002)
        decoding.cancel()
        if filling is None:
            # The request that comes behind the abort: its target has gone, and will not come again.
            filling = asyncio.create_task(generate(session, servers.prefill.base_url, ids, 200, **where))
        answer = await asyncio.wait_for(filling, WAIT_S)
        assert answer.status in ({"granted": (500,), "streaming": (200, 500), "decoding": (200,)}[state]), answer.text

    run(work)
    servers.check_at_rest()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_that_is_too_long_for_prefill_alone_ends_at_decode_too(servers: Servers, first: str) -> None:
    """SGLang's prefill refuses it before it has a sender; decode, which has pages for it, must not wait for its limit."""
    parts = [servers.prefill, servers.decode][:: 1 if first == "prefill" else -1]
    where: dict[str, Any] = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": servers.bootstrap_port,
        "bootstrap_room": new_room(),
    }
    ids = prompt(900, 900)

    async def work(session: aiohttp.ClientSession) -> None:
        answers = {}
        if first == "prefill":
            answers["prefill"] = await generate(session, parts[0].base_url, ids, **where)
            answers["decode"] = await asyncio.wait_for(generate(session, parts[1].base_url, ids, **where), WAIT_S)
        else:
            waiting = asyncio.create_task(generate(session, parts[0].base_url, ids, **where))
            until = time.monotonic() + WAIT_S
            while await asyncio.to_thread(noted_at, servers.decode, where["bootstrap_room"], "grant sent") < 0:
                assert time.monotonic() < until, "decode has not granted its pages"
                await asyncio.sleep(0.01)
            answers["prefill"] = await generate(session, parts[1].base_url, ids, **where)
            answers["decode"] = await asyncio.wait_for(waiting, WAIT_S)
        assert (answers["prefill"].status, answers["decode"].status) == (400, 500), answers
        assert "prefill refused it" in answers["decode"].text

    run(work)
    servers.check_at_rest()


def test_a_bootstrap_port_in_use_ends_the_server_with_its_number(servers: Servers) -> None:
    port = servers.bootstrap_port
    with ForkedServers() as fleet:
        servers.grid.start("second", "prefill", fleet=fleet, arguments=("--disaggregation-bootstrap-port", str(port)))
        with pytest.raises(LocalError, match=str(port)):
            fleet.wait_healthy(START_S)
    servers.check_at_rest()
