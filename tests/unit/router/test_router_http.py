"""The router's HTTP on raw sockets: framing, pipelining, old clients, slow ones, and bytes that try to be two requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from router_fakes import (
    FakeInstance,
    Router,
    decode,
    decode_well,
    free_port,
    prefill,
    prefill_well,
    routing,
    run,
    until,
    wait_for_ever,
)

from kvbaton.discovery.messages import InstanceType, TransferMode

WRITE = TransferMode.WRITE
BODY = b'{"prompt":"hello"}'
START = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HEAD = START + b"Content-Length: %d\r\n" % len(BODY)
REQUEST = HEAD + b"\r\n" + BODY


@asynccontextmanager
async def raw(router: Router) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.settings.port)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One whole answer with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(head[0].split()[1]), headers, body


async def exchange(router: Router, content: bytes) -> tuple[int, dict[str, str], bytes]:
    async with raw(router) as (reader, writer):
        writer.write(content)
        return await answer(reader)


@run
async def test_requests_on_one_connection_are_answered_in_order() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router, raw(router) as (reader, writer):
        writer.write(REQUEST + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + REQUEST)
        statuses = [await answer(reader) for _ in range(3)]
        assert [status for status, _, _ in statuses] == [200, 200, 200]
        assert b'"status":"ok"' in statuses[1][2]
        writer.write(REQUEST)
        assert (await answer(reader))[0] == 200


@run
async def test_a_request_that_is_half_in_stays_whole_while_earlier_ones_are_served() -> None:
    gate = asyncio.Event()

    async def hold(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await gate.wait()
        return await decode_well(request, body)

    p, d = prefill(mode=WRITE), decode(hold, mode=WRITE)
    key = b"Authorization: Bearer key\r\n\r\n"
    settings: dict[str, Any] = {"api_keys": ("key",), "headers": {"Authorization": "Bearer key"}}
    async with p, d, routing(p, d, **settings) as router, raw(router) as (reader, writer):
        writer.write((HEAD + key + BODY) * 2 + HEAD + key + BODY[:5])
        await until(lambda: d.running == 1)
        gate.set()
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]
        writer.write(BODY[5:])
        assert (await answer(reader))[0] == 200
        assert d.seen[2].body["prompt"] == "hello"


@run
async def test_a_request_may_come_byte_by_byte_and_in_chunks() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router, raw(router) as (reader, writer):
        for byte in REQUEST:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await answer(reader))[0] == 200
        chunked = START + b"Transfer-Encoding: chunked\r\n\r\n"
        writer.write(
            chunked + b"%x\r\n%b\r\n%x;extension=1\r\n%b\r\n0\r\nTrailer: 1\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])
        )
        assert (await answer(reader))[0] == 200
        assert p.seen[1].body["prompt"] == "hello"


@run
async def test_old_clients_get_a_stream_that_ends_with_the_connection() -> None:
    body = b'{"prompt":"hello","stream":true}'
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router, raw(router) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        content = await reader.read()
    assert b"transfer-encoding" not in content.lower()
    assert content.partition(b"\r\n\r\n")[2].startswith(b'data: {"text":"one"}')
    assert content.endswith(b"data: [DONE]\n\n")


@run
async def test_a_client_that_asks_first_gets_100_continue() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router, raw(router) as (reader, writer):
        writer.write(HEAD + b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await answer(reader))[0] == 200
        old = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Expect: 100-continue\r\n\r\n" + BODY
        assert (await exchange(router, old))[0] == 200, "HTTP/1.0 knows no interim answer"


@run
async def test_closing_is_respected() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router, raw(router) as (reader, writer):
        writer.write(HEAD + b"Connection: close\r\n\r\n" + BODY)
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""


SMUGGLING = {
    "two framings": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 3\r\n\r\n" + BODY,
    "the same length twice": HEAD + HEAD.split(b"\r\n")[-2] + b"\r\n\r\n" + BODY,
    "a negative length": START + b"Content-Length: -1\r\n\r\n",
    "a signed length": START + b"Content-Length: +18\r\n\r\n" + BODY,
    "a length in hex": START + b"Content-Length: 0x12\r\n\r\n" + BODY,
    "an enormous length": START + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a space before the colon": START + b"Content-Length : 18\r\n\r\n" + BODY,
    "a folded header": START + b"A: b\r\n c\r\nContent-Length: 18\r\n\r\n" + BODY,
    "bare line feeds": b"POST /v1/completions HTTP/1.1\nContent-Length: 18\n\n" + BODY,
    "a strange encoding": START + b"Transfer-Encoding: xchunked\r\n\r\n" + BODY,
    "chunked not last": START + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a bad chunk": START + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "a null in a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\x00c\r\n\r\n",
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03hello",
    "another version": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an upgrade": b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "a tunnel": b"CONNECT evil:443 HTTP/1.1\r\nHost: evil\r\n\r\n",
}


@pytest.mark.parametrize("content", SMUGGLING.values(), ids=SMUGGLING.keys())
def test_bytes_that_could_be_two_requests_are_refused_and_the_connection_closed(content: bytes) -> None:
    async def test() -> None:
        async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
            async with raw(router) as (reader, writer):
                writer.write(content)
                status, headers, body = await answer(reader)
                assert status in (400, 403, 404, 405, 413)
                if status in (400, 413):
                    assert headers["connection"] == "close"
                assert "error" in json.loads(body)
            assert p.seen == d.seen == []
            assert (await router.get("/health"))[0] == 200

    asyncio.run(test())


@run
async def test_long_heads_are_refused_whether_in_one_line_or_in_many() -> None:
    async with routing(max_head_bytes=8192) as router:
        for head in (b"A: " + b"x" * 20000, b"\r\n".join(b"H%d: y" % n for n in range(3000)), b"A: " + b"z" * 200_000):
            status, _, body = await exchange(router, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
            assert status == 431
            assert "8192" in json.loads(body)["error"]["message"]
        assert (await exchange(router, b"GET /" + b"u" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 431


@pytest.mark.parametrize("piece", [1000, 100_000])
def test_a_head_is_as_long_in_pieces_as_it_is_in_one(piece: int) -> None:
    heads = {200: b"A: " + b"x" * 7900, 431: b"A: " + b"x" * 8200}

    async def test() -> None:
        async with routing(max_head_bytes=8192) as router:
            for status, head in heads.items():
                content = b"GET /instances HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n"
                async with raw(router) as (reader, writer):
                    for start in range(0, len(content), piece):
                        writer.write(content[start : start + piece])
                        await writer.drain()
                        await asyncio.sleep(0)
                    assert (await answer(reader))[0] == status

    asyncio.run(test())


@run
async def test_the_next_head_may_begin_in_the_same_piece_as_a_long_body() -> None:
    body = b'{"prompt":"%b"}' % (b"x" * 60000)
    long = START + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    p, d = prefill(mode=WRITE), decode(mode=WRITE)
    async with p, d, routing(p, d, max_head_bytes=8192) as router, raw(router) as (reader, writer):
        writer.write(long + REQUEST[:30])
        assert (await answer(reader))[0] == 200
        writer.write(REQUEST[30:])
        assert (await answer(reader))[0] == 200


@run
async def test_a_trailer_without_end_is_refused() -> None:
    chunked = START + b"Transfer-Encoding: chunked\r\n\r\n"
    async with routing(max_head_bytes=8192) as router, raw(router) as (reader, writer):
        writer.write(chunked + b"%x\r\n%b\r\n0\r\nTrailer: " % (len(BODY), BODY))
        for _ in range(50):
            writer.write(b"x" * 10_000)
            await writer.drain()
        assert (await answer(reader))[0] == 431


@run
async def test_large_bodies_are_refused_before_and_while_they_come() -> None:
    async with routing(max_body_bytes=1000) as router:
        status, _, _ = await exchange(router, START + b"Content-Length: 1001\r\n\r\n")
        assert status == 413
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
        status, _, _ = await exchange(router, START + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        assert status == 413
        compressed = START + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
        assert (await exchange(router, compressed))[0] == 415


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost:",
        HEAD + b"\r\n" + BODY[:5],
        START + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
    ids=["nothing", "half a head", "half a body", "half a chunk"],
)
def test_slow_clients_are_sent_away(content: bytes) -> None:
    async def test() -> None:
        async with routing(head_timeout_s=0.4, client_timeout_s=0.4) as router, raw(router) as (reader, writer):
            writer.write(content)
            received = await reader.read()
            assert received == b"" if not content else received.startswith(b"HTTP/1.1 408 ")

    asyncio.run(test())


@run
async def test_connections_beyond_the_limit_are_closed_and_idle_ones_too() -> None:
    async with routing(max_connections=3, keep_alive_s=0.5) as router, raw(router) as (reader, writer):
        writer.write(b"GET /instances HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await answer(reader))[0] == 200
        async with raw(router) as (_, _), raw(router) as (more, _):
            assert await more.read() == b""
        assert await reader.read() == b""


@run
async def test_a_flood_ahead_of_its_answers_is_cut() -> None:
    async with prefill(wait_for_ever, mode=WRITE) as p, decode(wait_for_ever, mode=WRITE) as d, routing(p, d) as router:
        async with raw(router) as (_, writer):
            writer.write(REQUEST * 50)
            await until(lambda: len(p.seen) == 1)
        await until(lambda: p.is_idle and d.is_idle)
        assert len(p.seen) == 1


@run
async def test_a_slow_reader_holds_decode_back_and_memory_stays_bounded() -> None:
    written = 0

    async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2000):
            await response.write(b"data: " + b"x" * 65530 + b"\n\n")
            written += 65538
        return response

    body = b'{"prompt":"hello","stream":true}'
    async with prefill(mode=WRITE) as p, decode(flood, mode=WRITE) as d, routing(p, d) as router:
        async with raw(router) as (reader, writer):
            writer.write(START + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            await reader.readuntil(b"data: ")
            before = -1
            while before != written:
                before = written
                await asyncio.sleep(0.3)
            assert written < 40_000_000, "more was taken than buffers of sockets hold"
            taken = 0
            while taken < 50_000_000:
                taken += len(await reader.read(1 << 20))
            assert written > 20_000_000
        await until(lambda: d.is_idle)


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_client_that_has_not_read_its_last_answer_holds_the_next_one_back(mode: TransferMode) -> None:
    written = 0

    async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal written
        if not body.get("stream"):
            return web.Response(body=b"x" * 16_000_000)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"data: " + b"x" * 65530 + b"\n\n")
            written += 65538
        return response

    async def test() -> None:
        body = b'{"prompt":"hello","stream":true}'
        async with prefill(mode=mode) as p, decode(flood, mode=mode) as d, routing(p, d) as router:
            async with raw(router) as (reader, writer):
                writer.write(REQUEST + START + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                await until(lambda: len(d.seen) == 2)
                before = -1
                while before != written:
                    before = written
                    await asyncio.sleep(0.3)
                assert written < 20_000_000, "more was taken than buffers of sockets hold"
                taken = 0
                while taken < 60_000_000:
                    taken += len(await reader.read(1 << 20))
            await until(lambda: d.is_idle)

    asyncio.run(test())


@run
async def test_noise_never_kills_it() -> None:
    """Random bytes, and requests with random bytes in them: an answer below 500 or a closed connection, and all else works."""
    generator = random.Random(7)
    async with (
        prefill(mode=WRITE) as p,
        decode(mode=WRITE) as d,
        routing(p, d, head_timeout_s=1.0, client_timeout_s=1.0) as router,
    ):

        async def one(number: int) -> None:
            content = bytearray(REQUEST * generator.randint(1, 3))
            for _ in range(generator.randint(1, 8)):
                place = generator.randrange(len(content))
                content[place : place + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 3))
            if number % 5 == 0:
                content = bytearray(generator.randbytes(200))
            async with raw(router) as (reader, writer):
                writer.write(bytes(content))
                writer.write_eof()
                try:
                    received = await reader.read()
                except ConnectionError:
                    return
                assert not received.startswith(b"HTTP/1.1 5"), (bytes(content), received)

        for start in range(0, 300, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
        assert (await router.post({"prompt": "x"}))[0] == 200
        assert await router.metric("kvbaton_router_in_flight_requests") == 0


ANSWERS = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 25\r\n\r\n{"kv_transfer_params":{}}',
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: x\n\n\r\n0\r\n\r\n",
)


@run
async def test_instances_that_answer_noise_fail_requests_and_nothing_else() -> None:
    """Answers with random bytes in them, or cut short: a client gets 200, or a 4xx or 5xx that the router can vouch for."""
    generator = random.Random(11)

    async def noisy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            content = bytearray(generator.choice(ANSWERS))
            for _ in range(generator.choice((0, 0, 1, 2, 4))):
                place = generator.randrange(len(content))
                content[place : place + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 3))
            writer.write(bytes(content[: generator.randint(1, 2 * len(content))]))
            await writer.drain()
        writer.close()

    ports = [free_port() for _ in range(2)]
    servers = [await asyncio.start_server(noisy, "127.0.0.1", port) for port in ports]
    noise = FakeInstance(InstanceType.PREFILL, prefill_well, ports[0]), FakeInstance(InstanceType.DECODE, decode_well, ports[1])
    async with routing(*noise, max_attempts=2, prefill_timeout_s=1.0, decode_timeout_s=1.0) as router:
        replies = await asyncio.gather(*(router.post({"prompt": "x", "stream": bool(n % 2)}) for n in range(300)))
        assert {status for status, _, _ in replies} >= {200, 502}
        assert {status // 100 for status, _, _ in replies} <= {2, 3, 4, 5}
        assert await router.metric("kvbaton_router_in_flight_requests") == 0
        assert (await router.get("/health"))[0] == 200
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "content",
    [
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"x","max_tokens":1e400}',
        b'{"prompt":"x","max_tokens":99999999999999999999999999}',
        b'{"prompt":"\\ud800","stream":"yes"}',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"{'prompt':1}",
    ],
    ids=range(8),
)
def test_strange_json_is_a_client_error_or_passed_on(content: bytes) -> None:
    async def test() -> None:
        async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
            status, _, _ = await router.post(content)
            assert status in (200, 400)
            assert (await router.post({"prompt": "x"}))[0] == 200

    asyncio.run(test())
