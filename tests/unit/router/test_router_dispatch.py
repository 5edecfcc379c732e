"""One request through two instances, over real sockets: what each side is sent, what the client gets, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web
from router_fakes import (
    Behaviour,
    answering,
    decode,
    decode_well,
    prefill,
    reset_at_once,
    reset_in_the_middle,
    routing,
    until,
    wait_for_ever,
)

from kvbaton.core.addresses import ControlAddress, parse_request_id

BODY = {"model": "m", "prompt": "hello", "max_tokens": 16}

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        asyncio.run(test())

    wrapped.__name__ = test.__name__
    return wrapped


def error_of(content: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@run
async def test_both_sides_are_sent_what_the_protocol_asks_for() -> None:
    async with prefill() as p, decode() as d, routing(p, d) as router:
        body = {**BODY, "min_tokens": 4, "stream_options": {"include_usage": True}, "max_completion_tokens": 9}
        status, headers, content = await router.post(body, headers={"X-Request-Id": "mine", "traceparent": TRACEPARENT})
    assert status == 200
    assert content == b'{"id": "d",  "choices":[{"text":"\\u4f60"}]}'
    transfer_id = headers["x-kvbaton-transfer"]
    assert transfer_id.startswith("tx-")
    assert len(transfer_id) == 3 + 32
    (first,), (second,) = p.seen, d.seen
    assert first.body == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 1,
        "min_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": transfer_id,
            "remote_dp_size": 1,
        },
    }
    params = second.body.pop("kv_transfer_params")
    assert second.body == body
    assert params["transfer_id"] == transfer_id
    assert params["remote_dp_size"] == 1
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    pair = parse_request_id(first.headers["x-request-id"])
    assert pair == (ControlAddress.parse(p.zmq_address), ControlAddress.parse(d.zmq_address))
    assert (headers["x-request-id"], headers["x-kvbaton-prefill"]) == ("mine", p.http_address)
    assert headers["x-kvbaton-decode"] == d.http_address
    assert second.headers["traceparent"] == TRACEPARENT


@run
async def test_a_client_cannot_choose_peers() -> None:
    evil = "___prefill_addr_host:6.6.6.6,handshake:1,notify:1___decode_addr_host:6.6.6.6,handshake:1,notify:1_" + "0" * 32
    async with prefill() as p, decode() as d, routing(p, d) as router:
        body = {**BODY, "kv_transfer_params": {"remote_host": "6.6.6.6"}, "bootstrap_host": "6.6.6.6"}
        _, headers, _ = await router.post(body, headers={"X-Request-Id": evil, "x-data-parallel-rank": "7"})
    for seen in (*p.seen, *d.seen):
        assert b"6.6.6.6" not in seen.raw
        assert "6.6.6.6" not in seen.headers["x-request-id"]
        assert "x-data-parallel-rank" not in seen.headers
    assert headers["x-request-id"] == evil


@run
async def test_values_the_router_does_not_need_keep_their_bytes() -> None:
    raw = b'{"prompt":"\\u4f60","seed":18446744073709551617,"x":1.50,"messages":[{"content":[{"type":"video_url","v":1e2}]}]}'
    async with prefill() as p, decode() as d, routing(p, d) as router:
        assert (await router.post(raw, "/v1/chat/completions"))[0] == 200
    for seen in (*p.seen, *d.seen):
        assert seen.path == "/v1/chat/completions"
        assert seen.raw.startswith(raw[:-1])


@run
async def test_a_stream_is_passed_on_piece_by_piece() -> None:
    go_on = asyncio.Event()

    async def in_steps(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with prefill() as p, decode(in_steps) as d, routing(p, d) as router:
        async with asyncio.timeout(20), router.client.post("/v1/completions", json={**BODY, "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            go_on.set()
            assert await answer.content.read() == b"data: [DONE]\n\n"
        assert await router.metric("kvbaton_router_ttft_seconds_count") == 1


@run
async def test_a_stream_of_nothing_is_an_empty_answer() -> None:
    async with prefill() as p, decode(answering(200, "", "text/event-stream")) as d, routing(p, d) as router:
        for _ in range(3):
            status, _, content = await router.post({**BODY, "stream": True})
            assert (status, content) == (200, b"")


@run
async def test_requests_go_round_the_instances() -> None:
    async with prefill() as p1, prefill() as p2, decode() as d1, decode() as d2, routing(p1, p2, d1, d2) as router:
        headers = [(await router.post(BODY))[1] for _ in range(8)]
    pairs = [(h["x-kvbaton-prefill"], h["x-kvbaton-decode"]) for h in headers]
    assert {pairs.count(pair) for pair in pairs} == {2}
    assert [len(i.seen) for i in (p1, p2, d1, d2)] == [4, 4, 4, 4]


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_a_missing_side_is_named(missing: str) -> None:
    async def test() -> None:
        present = decode() if missing == "prefill" else prefill()
        async with present, routing(present) as router:
            status, headers, content = await router.post(BODY)
            assert status == 503
            assert int(headers["retry-after"]) > 0
            assert f"no live {missing} instance" in error_of(content)["message"]
            assert (await router.get("/health"))[0] == 503
            assert present.seen == []

    asyncio.run(test())


@run
async def test_a_client_error_of_the_prefill_side_is_the_clients() -> None:
    async with prefill(answering(400, '{"error":{"message":"too long"}}')) as p, decode() as d, routing(p, d) as router:
        status, headers, content = await router.post(BODY)
        assert await router.metric("kvbaton_router_prefill_failures_total") == 1
    assert (status, content) == (400, b'{"error":{"message":"too long"}}')
    assert headers["x-kvbaton-prefill"] == p.http_address
    assert d.seen == []


@pytest.mark.parametrize(
    ("behave", "expected"),
    [
        (answering(500, "boom"), "answered 500: boom"),
        (answering(302, "elsewhere"), "answered 302"),
        (reset_at_once, "closed the connection"),
        (reset_in_the_middle, "broke off"),
        (wait_for_ever, "did not answer in time"),
        (answering(200, "no json"), "no JSON object"),
        (answering(200, '{"choices":[]}'), "no kv_transfer_params"),
        (answering(200, '{"kv_transfer_params":null}'), "is no object"),
        (answering(200, '"%s"' % ("x" * 5000)), "more than 4000 bytes"),
    ],
)
def test_a_failing_prefill_is_a_502_with_the_reason_and_decode_is_left_alone(behave: Behaviour, expected: str) -> None:
    async def test() -> None:
        limits: dict[str, Any] = {"prefill_timeout_s": 0.5, "max_answer_bytes": 4000}
        async with prefill(behave) as p, decode() as d, routing(p, d, **limits) as router:
            status, headers, content = await router.post(BODY)
            assert await router.metric("kvbaton_router_prefill_failures_total") == 1
        error = error_of(content)
        assert (status, error["code"]) == (502, "prefill_failed")
        assert expected in error["message"]
        assert headers["x-kvbaton-transfer"].startswith("tx-")
        assert d.seen == []

    asyncio.run(test())


@run
async def test_an_instance_that_registered_but_does_not_listen_is_named() -> None:
    dead = prefill()
    async with decode() as d, routing(dead, d) as router:
        status, _, content = await router.post(BODY)
    assert status == 502
    assert f"prefill instance {dead.http_address} cannot be reached" in error_of(content)["message"]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_an_error_of_the_decode_side_keeps_its_status_and_body(status: int) -> None:
    async def test() -> None:
        async with prefill() as p, decode(answering(status, "because", "text/plain")) as d, routing(p, d) as router:
            got, headers, content = await router.post({**BODY, "stream": True})
            assert await router.metric("kvbaton_router_decode_failures_total") == 1
        assert (got, content) == (status, b"because")
        assert headers["content-type"].startswith("text/plain")

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behave", [reset_at_once, wait_for_ever])
def test_decode_that_fails_before_its_first_byte_is_a_502(behave: Behaviour, stream: bool) -> None:
    async def test() -> None:
        async with prefill() as p, decode(behave) as d, routing(p, d, decode_timeout_s=0.5) as router:
            status, _, content = await router.post({**BODY, "stream": stream})
        assert (status, error_of(content)["code"]) == (502, "decode_failed")
        assert d.http_address in error_of(content)["message"]

    asyncio.run(test())


@run
async def test_decode_that_dies_in_mid_stream_is_reported_as_an_event() -> None:
    async with prefill() as p, decode(reset_in_the_middle) as d, routing(p, d) as router:
        status, headers, content = await router.post({**BODY, "stream": True})
        assert await router.metric("kvbaton_router_decode_failures_total") == 1
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    *_, last, end = content.split(b"\n\n")
    assert end == b""
    error = error_of(last.removeprefix(b"data: "))
    assert error["code"] == "decode_failed"
    assert "broke off" in error["message"]
    assert b"[DONE]" not in content


@run
async def test_decode_that_dies_in_a_whole_answer_is_a_502() -> None:
    async with prefill() as p, decode(reset_in_the_middle) as d, routing(p, d) as router:
        status, _, content = await router.post(BODY)
    assert (status, error_of(content)["code"]) == (502, "decode_failed")


@run
async def test_a_client_that_leaves_during_prefill_closes_that_call() -> None:
    async with prefill(wait_for_ever) as p, decode() as d, routing(p, d) as router:
        request = asyncio.create_task(router.post({**BODY, "stream": True}))
        await until(lambda: len(p.seen) == 1)
        request.cancel()
        async with asyncio.timeout(20):
            await p.cancelled.wait()
        await _idle(router.metric)
        closed = 'kvbaton_router_requests_total{path="/v1/completions",status="client_closed"}'
        assert await router.metric(closed) == 1
    assert d.seen == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_decode_closes_that_call(stream: bool) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not stream:
            return await wait_for_ever(request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        return await wait_for_ever(request, body)

    async def test() -> None:
        async with prefill() as p, decode(endless) as d, routing(p, d) as router:
            request = asyncio.create_task(router.post({**BODY, "stream": stream}))
            await until(lambda: len(d.seen) == 1)
            request.cancel()
            async with asyncio.timeout(20):
                await d.cancelled.wait()
            await _idle(router.metric)

    asyncio.run(test())


def test_a_client_that_leaves_in_mid_stream_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: x\n\n")
            await asyncio.sleep(0)

    async def test() -> None:
        async with prefill() as p, decode(flood) as d, routing(p, d) as router:
            reader, writer = await asyncio.open_connection("127.0.0.1", router.settings.port)
            content = json.dumps({**BODY, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            await reader.readuntil(b"data: x")
            writer.transport.abort()
            await _idle(router.metric)

    asyncio.run(test())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@run
async def test_a_client_that_does_not_read_is_given_up() -> None:
    async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async with prefill() as p, decode(flood) as d, routing(p, d, client_timeout_s=0.5) as router:
        _, writer = await asyncio.open_connection("127.0.0.1", router.settings.port, limit=1024)
        content = json.dumps({**BODY, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        await until(lambda: len(d.seen) == 1)
        async with asyncio.timeout(20):
            await d.cancelled.wait()
        await _idle(router.metric)
        writer.close()


@run
async def test_requests_beyond_the_limit_get_a_time_to_retry_after() -> None:
    async with prefill(wait_for_ever) as p, decode() as d, routing(p, d, max_in_flight=1) as router:
        first = asyncio.create_task(router.post(BODY))
        await until(lambda: len(p.seen) == 1)
        status, headers, content = await router.post(BODY)
        assert (status, error_of(content)["code"]) == (503, "overloaded")
        assert "retry-after" in headers
        first.cancel()


@run
async def test_many_requests_at_once() -> None:
    async with prefill() as p, decode(decode_well) as d, routing(p, d) as router:
        answers = await asyncio.gather(*(router.post({**BODY, "stream": bool(i % 2)}) for i in range(64)))
        assert {status for status, _, _ in answers} == {200}
        assert len({headers["x-kvbaton-transfer"] for _, headers, _ in answers}) == 64
        assert all(content.endswith(b"[DONE]\n\n") for _, _, content in answers[1::2])
        await _idle(router.metric)


async def _idle(metric: Callable[[str], Coroutine[Any, Any, float]]) -> None:
    async with asyncio.timeout(20):
        while await metric("kvbaton_router_in_flight_requests") != 0:
            await asyncio.sleep(0.01)
