"""Failures before the first byte: the other side is given up at once, and the request tried elsewhere, under new ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_fakes import (
    Behaviour,
    FakeInstance,
    answering,
    decode,
    decode_well,
    prefill,
    prefill_well,
    reset_at_once,
    reset_in_the_middle,
    routing,
    run,
    until,
    wait_for_ever,
)

from kvbaton.discovery.messages import TransferMode

READ, WRITE = TransferMode.READ, TransferMode.WRITE
BODY = {"model": "m", "prompt": "hello", "max_tokens": 16}


def transfer_of(instance: FakeInstance, number: int = -1) -> str:
    return str(instance.seen[number].body["kv_transfer_params"]["transfer_id"])


def transfers_of(instance: FakeInstance) -> set[str]:
    return {transfer_of(instance, number) for number in range(len(instance.seen))}


FAILURES: list[Behaviour] = [answering(500, "boom"), answering(503, "busy"), reset_at_once, answering(200, "no json")]


@pytest.mark.parametrize("mode", [READ, WRITE])
@pytest.mark.parametrize("behave", FAILURES[:3])
def test_a_failing_prefill_is_replaced_and_decode_gets_a_new_transfer(behave: Behaviour, mode: TransferMode) -> None:
    async def test() -> None:
        slow = decode_after(0.3) if mode is WRITE else decode_well
        async with (
            prefill(behave, mode=mode) as bad,
            prefill(mode=mode) as good,
            decode(slow, mode=mode) as d,
            routing(bad, good, d) as router,
        ):
            for _ in range(2):
                status, headers, content = await router.post(BODY)
                assert status == 200, content
                assert headers["x-kvbaton-prefill"] == good.http_address
                assert headers["x-kvbaton-transfer"] == transfer_of(good)
                assert headers["x-kvbaton-transfer"] in transfers_of(d)
            await until(lambda: d.is_idle)
            assert len(bad.seen) >= 1
            assert not transfers_of(bad) & transfers_of(good)
            assert await router.metric("kvbaton_router_retries_total") >= len(bad.seen)
            assert await router.metric("kvbaton_router_in_flight_requests") == 0

    asyncio.run(test())


def decode_after(seconds: float) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await decode_well(request, body)

    return behave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", [READ, WRITE])
@pytest.mark.parametrize("behave", FAILURES[:3])
def test_a_failing_decode_is_replaced_with_a_new_transfer(behave: Behaviour, mode: TransferMode, stream: bool) -> None:
    async def test() -> None:
        async with (
            prefill(mode=mode) as p,
            decode(behave, mode=mode) as bad,
            decode(mode=mode) as good,
            routing(p, bad, good) as router,
        ):
            for _ in range(2):
                status, headers, _ = await router.post({**BODY, "stream": stream})
                assert (status, headers["x-kvbaton-decode"]) == (200, good.http_address)
            transfers = [transfer_of(p, n) for n in range(len(p.seen))]
            assert len(set(transfers)) == len(transfers)
            assert not transfers_of(bad) & transfers_of(good)

    asyncio.run(test())


@run
async def test_attempts_are_bounded() -> None:
    async with (
        prefill(answering(500, "1")) as a,
        prefill(answering(500, "2")) as b,
        prefill(answering(500, "3")) as c,
        decode() as d,
        routing(a, b, c, d, max_attempts=2) as router,
    ):
        status, _, content = await router.post(BODY)
        assert (status, json.loads(content)["error"]["code"]) == (502, "prefill_failed")
        assert sum(len(i.seen) for i in (a, b, c)) == 2
        assert d.seen == []


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 501])
def test_what_another_instance_would_answer_too_is_not_tried_again(status: int) -> None:
    async def test() -> None:
        refusing = answering(status, '{"error":{"message":"no"}}')
        async with prefill(refusing) as a, prefill(refusing) as b, decode() as d, routing(a, b, d) as router:
            got, _, content = await router.post(BODY)
            assert len(a.seen) + len(b.seen) == 1
            assert got == (status if status < 500 else 502)
            assert b"no" in content

    asyncio.run(test())


@run
async def test_nothing_is_tried_again_after_the_first_byte() -> None:
    async with (
        prefill(mode=WRITE) as p,
        decode(reset_in_the_middle, mode=WRITE) as a,
        decode(reset_in_the_middle, mode=WRITE) as b,
        routing(p, a, b) as router,
    ):
        status, _, content = await router.post({**BODY, "stream": True})
        assert status == 200
        assert b'"decode_failed"' in content
        assert len(a.seen) + len(b.seen) == 1
        assert content.count(b'{"text":"one"}') == 1


@run
async def test_an_instance_that_cannot_be_reached_is_put_aside_and_shown_so() -> None:
    dead = prefill()
    async with prefill() as good, decode() as d, routing(dead, good, d) as router:
        for _ in range(6):
            assert (await router.post(BODY))[0] == 200
        assert len(good.seen) == 6
        assert await router.metric("kvbaton_router_quarantines_total") >= 1
        shown = json.loads((await router.get("/instances"))[2])["live"]
        assert {i["http_address"] for i in shown if i["strikes"] > 0} == {dead.http_address}


@run
async def test_connections_to_instances_are_kept() -> None:
    peers: set[Any] = set()

    def noting(then: Behaviour) -> Behaviour:
        async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            assert request.transport is not None
            peers.add(request.transport.get_extra_info("peername"))
            return await then(request, body)

        return behave

    async with (
        prefill(noting(prefill_well), mode=WRITE) as p,
        decode(noting(decode_well), mode=WRITE) as d,
        routing(p, d) as router,
    ):
        for number in range(10):
            assert (await router.post({**BODY, "stream": bool(number % 2)}))[0] == 200
    assert len(peers) == 2


@run
async def test_a_kept_connection_that_the_instance_has_closed_costs_the_client_nothing() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
        assert (await router.post(BODY))[0] == 200
        for instance in (p, d):
            await instance.drop_idle()
        statuses = [(await router.post(BODY))[0] for _ in range(4)]
        assert statuses == [200] * 4


@pytest.mark.parametrize("mode", [READ, WRITE])
def test_a_client_that_leaves_while_both_wait_frees_both(mode: TransferMode) -> None:
    async def test() -> None:
        async with prefill(wait_for_ever, mode=mode) as p, decode(wait_for_ever, mode=mode) as d, routing(p, d) as router:
            request = asyncio.create_task(router.post(BODY))
            await until(lambda: len(p.seen) == 1)
            request.cancel()
            await until(lambda: p.is_idle and d.is_idle)

    asyncio.run(test())


@run
async def test_what_prefill_holds_is_released_when_no_target_will_fetch_it() -> None:
    """Pull, and no decode instance can be reached: the blocks need not wait for their lease."""
    dead = decode()
    async with prefill(key="theirs") as p, routing(p, dead, instance_api_key="theirs") as router:
        status, headers, _ = await router.post(BODY)
        assert status == 502
        await until(lambda: p.released == [f"/handoffs/{headers['x-kvbaton-transfer']}"])


@run
async def test_nothing_is_released_that_decode_has_taken() -> None:
    async with prefill() as p, decode() as d, routing(p, d) as router:
        for number in range(4):
            assert (await router.post({**BODY, "stream": bool(number % 2)}))[0] == 200
        assert p.released == []
