"""A request that an instance died of does not end the others in turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_fakes import (
    DEADLINE_S,
    FakeInstance,
    decode,
    dying,
    prefill,
    prefill_well,
    reset_at_once,
    routing,
    run,
    wait_for_ever,
)

from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import TransferMode
from kvbaton.router.deaths import DeathBook

READ, WRITE = TransferMode.READ, TransferMode.WRITE
BODY = {"model": "m", "prompt": "hello", "max_tokens": 16}


def error_of(content: bytes) -> dict[str, Any]:
    return dict(json.loads(content)["error"])


def mortal(make: Any, mode: TransferMode) -> FakeInstance:
    instance: FakeInstance = make(mode=mode)
    instance.behave = dying(instance)
    return instance


@pytest.mark.parametrize("mode", [READ, WRITE])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_it_is_not_tried_on_another_instance_and_refused_after_two_deaths(victim: str, mode: TransferMode) -> None:
    async def test() -> None:
        make, other = (prefill, decode(wait_for_ever, mode=mode)) if victim == "prefill" else (decode, prefill(mode=mode))
        one, two, three = (mortal(make, mode) for _ in range(3))
        async with one, two, three, other, routing(one, two, three, other) as router:
            for deaths in (1, 2):
                status, headers, content = await router.post(BODY)
                assert (status, error_of(content)["code"]) == (502, "instance_died")
                assert "not tried on another instance" in error_of(content)["message"]
                assert headers["x-should-retry"] == "false"
                assert sum(len(i.seen) for i in (one, two, three)) == deaths
            status, headers, content = await router.post(BODY)
            assert (status, error_of(content)["code"]) == (422, "instances_died")
            assert headers["x-should-retry"] == "false"
            assert sum(len(i.seen) for i in (one, two, three)) == 2
            assert await router.metric("kvbaton_router_instance_deaths_total") == 2
            assert await router.metric("kvbaton_router_suspected_requests_total") == 1
            assert await router.metric("kvbaton_router_in_flight_requests") == 0

    asyncio.run(test())


@run
async def test_other_bodies_are_served_meanwhile() -> None:
    async def fragile(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        victim = next(p for p in (one, two, three) if p.port == request.url.port)
        return await (dying(victim) if body["prompt"] == "poison" else prefill_well)(request, body)

    one, two, three = (prefill(fragile) for _ in range(3))
    async with one, two, three, decode() as d, routing(one, two, three, d) as router:
        for _ in range(5):
            assert (await router.post({**BODY, "prompt": "poison"}))[0] in (502, 422)
            assert (await router.post(BODY))[0] == 200
        assert sum(seen.body["prompt"] == "poison" for p in (one, two, three) for seen in p.seen) == 2


@run
async def test_a_connection_that_breaks_while_the_instance_lives_is_tried_again() -> None:
    async with prefill(reset_at_once) as bad, prefill() as good, decode() as d, routing(bad, good, d) as router:
        for _ in range(4):
            assert (await router.post(BODY))[0] == 200
        assert bad.seen


@run
async def test_an_instance_that_is_stopped_while_it_has_a_request_is_no_death() -> None:
    """It has sent its goodbye, and does not finish within its limit."""
    cut = asyncio.Event()

    async def stopped(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not cut.is_set():
            await asyncio.to_thread(router.announcers[one.port].stop)
            await asyncio.sleep(0.1)
            await one.stop_listening()
            cut.set()
            return await reset_at_once(request, body)
        return await prefill_well(request, body)

    async with prefill(stopped) as one, decode() as d, prefill() as two, routing(one, two, d) as router:
        while not cut.is_set():
            assert (await router.post(BODY))[0] == 200
        assert await router.metric("kvbaton_router_instance_deaths_total") == 0


@run
async def test_an_answer_clears_the_suspicion() -> None:
    """The instance was killed by something else while it had the request."""
    one, two, good = mortal(prefill, READ), mortal(prefill, READ), prefill()

    async def until_status(wanted: int) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                status, _, content = await router.post(BODY)
                assert status in (200, 502)
                if status == wanted:
                    return content

    async with one, two, good, decode() as d, routing(one, good, d) as router:
        await until_status(502)
        await until_status(200)
        with ThreadAnnouncer(two.registration(), [f"127.0.0.1:{router.settings.discovery_port}"], heartbeat_s=0.3):
            assert "(1 of 2 deaths" in error_of(await until_status(502))["message"]


def test_the_memory_is_bounded_and_forgets() -> None:
    book = DeathBook()
    assert [book.note("/v1/completions", b"a", now) for now in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert book.count("/v1/completions", b"a", 600.0) == 3
    assert book.count("/v1/chat/completions", b"a", 600.0) == 0
    assert book.count("/v1/completions", b"a", 602.0) == 0
    for number in range(5000):
        book.note("/v1/completions", b"%d" % number, 700.0)
    assert len(book.bodies) == 1024


def test_what_other_processes_have_seen_counts() -> None:
    seen: list[bytes] = []
    one, other = DeathBook(seen.append), DeathBook()
    one.note("/v1/completions", b"a", 0.0)
    for digest in seen:
        other.add(digest, 0.0)
    assert other.count("/v1/completions", b"a", 0.0) == 1
    other.clear("/v1/completions", b"a")
    assert not other.bodies
