"""One request in push: both sides at once, the client served by decode alone, and either side given up when the other fails."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Coroutine
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
    until,
    wait_for_ever,
)

from kvbaton.config import CLIENT_HEADER
from kvbaton.core.addresses import ControlAddress, parse_request_id
from kvbaton.discovery.messages import TransferMode
from kvbaton.router.pair_template import client_lines
from kvbaton.router.settings import RouterSettings

KEY = b"a key of more than sixteen bytes"
BODY = {"model": "m", "prompt": "hello", "max_tokens": 16}
WRITE = TransferMode.WRITE


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        asyncio.run(test())

    wrapped.__name__ = test.__name__
    return wrapped


def error_of(content: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(content)["error"]
    return error


async def is_cancelled(instance: FakeInstance) -> None:
    async with asyncio.timeout(20):
        await instance.cancelled.wait()


def once(event: asyncio.Event, then: Behaviour) -> Behaviour:
    """Wait for `event`, then behave."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await event.wait()
        return await then(request, body)

    return behave


async def begin_and_wait(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A stream whose headers come at once, before there is anything to send."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return await wait_for_ever(request, body)


@run
async def test_both_sides_are_sent_what_the_protocol_asks_for_at_once() -> None:
    both_are_there = asyncio.Event()
    p = prefill(once(both_are_there, prefill_well), mode=WRITE, tp_size=2)
    d = decode(once(both_are_there, decode_well), mode=WRITE, tp_size=4)
    async with p, d, routing(p, d) as router:
        request = asyncio.create_task(router.post({**BODY, "min_tokens": 4}))
        await until(lambda: len(p.seen) == len(d.seen) == 1)
        both_are_there.set()
        status, headers, content = await request
    assert (status, content) == (200, b'{"id": "d",  "choices":[{"text":"\\u4f60"}]}')
    transfer_id = headers["x-kvbaton-transfer"]
    common = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": transfer_id, "remote_dp_size": 1}
    (first,), (second,) = p.seen, d.seen
    source = {"do_remote_decode": True, "do_remote_prefill": False, **common, "remote_tp_size": 4}
    where = {"remote_host": "127.0.0.1", "remote_port": p.port}
    target = {"do_remote_decode": False, "do_remote_prefill": True, **common, "remote_tp_size": 2, **where}
    assert first.body == {**BODY, "max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": source}
    assert second.body == {**BODY, "min_tokens": 4, "kv_transfer_params": target}
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    pair = parse_request_id(first.headers["x-request-id"])
    assert pair == (ControlAddress.parse(p.zmq_address), ControlAddress.parse(d.zmq_address))
    assert headers["x-kvbaton-mode"] == "push"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_never_held_back_by_prefills(stream: bool) -> None:
    async def test() -> None:
        async with prefill(wait_for_ever, mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
            async with asyncio.timeout(20):
                status, _, content = await router.post({**BODY, "stream": stream})
            assert status == 200
            assert content.endswith(b"[DONE]\n\n") == stream
            await is_cancelled(p)

    asyncio.run(test())


@run
async def test_the_first_bytes_of_a_stream_come_before_prefill_has_answered_and_it_may_then_fail() -> None:
    go_on = asyncio.Event()

    async def in_steps(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    begun = asyncio.Event()
    p, d = prefill(once(begun, reset_at_once), mode=WRITE), decode(in_steps, mode=WRITE)
    async with p, d, routing(p, d) as router, asyncio.timeout(20):
        answer = await router.client.post("/v1/completions", json={**BODY, "stream": True})
        assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
        begun.set()
        await until(lambda: len(p.seen) == 1 and p.is_idle)
        go_on.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"
    assert not d.cancelled.is_set()


@pytest.mark.parametrize("waits", [wait_for_ever, begin_and_wait])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behave", "status", "expected"),
    [
        (answering(400, '{"error":{"message":"too long"}}'), 400, "too long"),
        (answering(429, '{"error":{"message":"busy"}}'), 429, "busy"),
        (answering(500, "boom"), 502, "answered 500: boom"),
        (reset_at_once, 502, "closed the connection"),
        (reset_in_the_middle, 502, "broke off"),
    ],
)
def test_a_failing_prefill_cancels_decode_and_is_reported(
    behave: Behaviour, status: int, expected: str, stream: bool, waits: Behaviour
) -> None:
    async def test() -> None:
        d = decode(waits, mode=WRITE)
        both_are_there = asyncio.Event()
        async with prefill(once(both_are_there, behave), mode=WRITE) as p, d, routing(p, d) as router:
            request = asyncio.create_task(router.post({**BODY, "stream": stream}))
            await until(lambda: len(d.seen) == 1)
            both_are_there.set()
            got, headers, content = await request
            await is_cancelled(d)
            assert await router.metric("kvbaton_router_prefill_failures_total") == 1
            assert await router.metric("kvbaton_router_decode_failures_total") == 0
            assert await router.metric("kvbaton_router_in_flight_requests") == 0
        assert got == status
        assert expected in error_of(content)["message"]
        assert status < 500 or error_of(content)["code"] == "prefill_failed"
        assert headers["x-kvbaton-prefill"] == p.http_address

    asyncio.run(test())


@run
async def test_a_prefill_instance_that_does_not_listen_gives_decode_up() -> None:
    dead, d = prefill(mode=WRITE), decode(wait_for_ever, mode=WRITE)
    async with d, routing(dead, d) as router:
        status, _, content = await router.post(BODY)
        await until(lambda: d.is_idle)
    assert (status, error_of(content)["code"]) == (502, "prefill_failed")
    assert f"prefill instance {dead.http_address} cannot be reached" in error_of(content)["message"]


@pytest.mark.parametrize(
    ("behave", "status", "expected"),
    [
        (answering(400, '{"error":{"message":"no"}}'), 400, "no"),
        (answering(502, '{"error":{"message":"hand-off failed","code":"handoff_failed"}}'), 502, "hand-off failed"),
        (reset_at_once, 502, "closed the connection"),
    ],
)
def test_a_failing_decode_cancels_prefill_and_is_reported(behave: Behaviour, status: int, expected: str) -> None:
    async def test() -> None:
        both_are_there = asyncio.Event()
        p, d = prefill(wait_for_ever, mode=WRITE), decode(once(both_are_there, behave), mode=WRITE)
        async with p, d, routing(p, d) as router:
            request = asyncio.create_task(router.post(BODY))
            await until(lambda: len(p.seen) == 1)
            both_are_there.set()
            got, _, content = await request
            await is_cancelled(p)
            assert await router.metric("kvbaton_router_decode_failures_total") == 1
        assert got == status
        assert expected in error_of(content)["message"]

    asyncio.run(test())


@run
async def test_decode_that_dies_in_mid_stream_is_reported_as_an_event() -> None:
    async with prefill(mode=WRITE) as p, decode(reset_in_the_middle, mode=WRITE) as d, routing(p, d) as router:
        status, _, content = await router.post({**BODY, "stream": True})
    assert status == 200
    last = content.split(b"\n\n")[-2]
    assert error_of(last.removeprefix(b"data: "))["code"] == "decode_failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_closes_both_calls(stream: bool) -> None:
    async def test() -> None:
        p, d = prefill(wait_for_ever, mode=WRITE), decode(begin_and_wait, mode=WRITE)
        async with p, d, routing(p, d) as router:
            request = asyncio.create_task(router.post({**BODY, "stream": stream}))
            await until(lambda: len(p.seen) == len(d.seen) == 1)
            request.cancel()
            await asyncio.gather(is_cancelled(p), is_cancelled(d))
            closed = 'kvbaton_router_requests_total{path="/v1/completions",status="client_closed"}'
            async with asyncio.timeout(20):
                while await router.metric(closed) != 1:
                    await asyncio.sleep(0.01)
            assert await router.metric("kvbaton_router_in_flight_requests") == 0

    asyncio.run(test())


@run
async def test_a_client_that_leaves_has_both_instances_release_the_hand_off_at_once() -> None:
    """A short prefill is finished by then: closing its call is no news to it, and it would wait for its target."""
    p, d = prefill(mode=WRITE), decode(wait_for_ever, mode=WRITE)
    async with p, d, routing(p, d, cluster_key=KEY) as router:
        request = asyncio.create_task(router.post(BODY))
        await until(lambda: len(p.seen) == len(d.seen) == 1 and p.is_idle)
        request.cancel()
        path = f"/handoffs/{d.seen[0].body['kv_transfer_params']['transfer_id']}"
        await until(lambda: p.released == d.released == [path])
        await is_cancelled(d)


@run
async def test_a_decode_that_fails_has_a_finished_prefill_released() -> None:
    ready = asyncio.Event()
    p, d = prefill(mode=WRITE), decode(once(ready, reset_at_once), mode=WRITE)
    async with p, d, routing(p, d) as router:
        request = asyncio.create_task(router.post(BODY))
        await until(lambda: len(p.seen) == 1 and p.is_idle)
        ready.set()
        assert (await request)[0] == 502
        await until(lambda: len(p.released) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_released_after_an_answer(stream: bool) -> None:
    async def test() -> None:
        p, d = prefill(mode=WRITE), decode(mode=WRITE)
        async with p, d, routing(p, d) as router:
            for _ in range(3):
                assert (await router.post({**BODY, "stream": stream}))[0] == 200
            await until(lambda: p.is_idle and d.is_idle)
            await asyncio.sleep(0.1)
            assert p.released == d.released == []

    asyncio.run(test())


def test_instances_learn_which_requests_are_of_one_client_and_no_more() -> None:
    keyed = RouterSettings(cluster_key=KEY)
    lines = [client_lines(keyed, client) for client in (b"Bearer sk-1", b"Bearer sk-2", b"Bearer sk-1")]
    assert lines[0] == lines[2] != lines[1]
    assert lines[0].startswith(CLIENT_HEADER.encode())
    assert b"sk-1" not in lines[0]
    assert client_lines(RouterSettings(), b"Bearer sk-1") == b"", "an instance takes the name from holders of the key only"


@run
async def test_every_request_to_an_instance_proves_the_cluster_key() -> None:
    p, d = prefill(mode=WRITE), decode(mode=WRITE)
    async with p, d, routing(p, d, cluster_key=KEY) as router:
        await router.post(BODY, headers={"x-kvbaton-key": "forged", CLIENT_HEADER: "forged"})
        await router.get(f"/handoffs/{p.seen[0].body['kv_transfer_params']['transfer_id']}")
        tokens = {seen.headers["x-kvbaton-key"] for seen in (*p.seen, *d.seen)}
        names = {seen.headers[CLIENT_HEADER] for seen in (p.seen[0], d.seen[0])}
    assert len(p.seen) == len(d.seen) == 2
    assert tokens == {hmac.new(KEY, b"kvbaton http", "sha256").hexdigest()}
    assert names == {client_lines(router.settings, b"127.0.0.1").decode().split()[1]}


@run
async def test_a_client_cannot_choose_peers() -> None:
    evil = "___prefill_addr_host:6.6.6.6,handshake:1,notify:1___decode_addr_host:6.6.6.6,handshake:1,notify:1_" + "0" * 32
    params = {"do_remote_prefill": True, "remote_host": "6.6.6.6", "remote_port": 1, "transfer_id": "6.6.6.6"}
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
        status, _, _ = await router.post({**BODY, "kv_transfer_params": params}, headers={"X-Request-Id": evil})
    assert status == 200
    assert len(p.seen) == len(d.seen) == 1
    for seen in (*p.seen, *d.seen):
        assert b"6.6.6.6" not in seen.raw
        assert "6.6.6.6" not in seen.headers["x-request-id"]


@run
async def test_instances_of_both_modes_serve_side_by_side_each_in_its_own() -> None:
    async with (
        prefill() as p_pull,
        decode() as d_pull,
        prefill(mode=WRITE) as p_push,
        decode(mode=WRITE) as d_push,
        routing(p_pull, d_pull, p_push, d_push) as router,
    ):
        headers = [(await router.post(BODY))[1] for _ in range(6)]
    served = {(h["x-kvbaton-mode"], h["x-kvbaton-prefill"], h["x-kvbaton-decode"]) for h in headers}
    assert served == {
        ("pull", p_pull.http_address, d_pull.http_address),
        ("push", p_push.http_address, d_push.http_address),
    }
    assert [len(i.seen) for i in (p_pull, d_pull, p_push, d_push)] == [3, 3, 3, 3]
    assert "remote_host" in d_pull.seen[0].body["kv_transfer_params"]


@run
async def test_many_requests_at_once() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
        answers = await asyncio.gather(*(router.post({**BODY, "stream": bool(i % 2)}) for i in range(64)))
        assert {status for status, _, _ in answers} == {200}
        assert len({headers["x-kvbaton-transfer"] for _, headers, _ in answers}) == 64
        await until(lambda: p.is_idle and d.is_idle)
