"""A client that goes away frees its requests at once, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest
from served import Client, ScriptedEngine, run, serving

from kvbaton.engines.embedded.request import FinishReason, TokenOutput


async def connect(client: Client, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a completion over a bare socket."""
    body = orjson.dumps({"prompt": "hi", **fields})
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
def test_while_waiting_for_the_first_token(stream: bool) -> None:
    engine = ScriptedEngine(None)

    async def work() -> None:
        async with serving(engine) as client:
            _, writer = await connect(client, stream=stream, n=2)
            await engine.until(lambda: len(engine.submitted) == 2)
            writer.close()
            await engine.until(lambda: len(engine.cancelled) == 2)

    run(work())
    assert engine.cancelled == [request.request_id for request in engine.submitted]


@pytest.mark.parametrize("abort", [False, True])
def test_in_the_middle_of_a_stream(abort: bool) -> None:
    engine = ScriptedEngine(None)

    async def work() -> None:
        async with serving(engine) as client:
            reader, writer = await connect(client, stream=True)
            await engine.until(lambda: len(engine.submitted) == 1)
            engine.feed(0, TokenOutput(97, "a"))
            await reader.readuntil(b'"text":"a"')
            if abort:
                writer.transport.abort()
            else:
                writer.close()
            await engine.until(lambda: len(engine.cancelled) == 1)
            engine.feed(0, TokenOutput(98, "b"))
            engine.feed(0, TokenOutput(-1, "", finish_reason=FinishReason.CANCELLED))
            assert (await client.get("/health")).status == 200

    run(work())


def test_in_the_middle_of_a_body_only_the_unfinished_choice_is_cancelled() -> None:
    engine = ScriptedEngine(None)

    async def work() -> None:
        async with serving(engine) as client:
            _, writer = await connect(client, n=2)
            await engine.until(lambda: len(engine.submitted) == 2)
            engine.feed(0, TokenOutput(97, "a", finish_reason=FinishReason.STOP))
            engine.feed(1, TokenOutput(97, "a"))
            writer.close()
            await engine.until(lambda: len(engine.cancelled) >= 1)

    run(work())
    assert engine.cancelled == [engine.submitted[1].request_id]


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_answer_nothing_is_cancelled(stream: bool) -> None:
    engine = ScriptedEngine()

    async def work() -> None:
        async with serving(engine) as client:
            for _ in range(3):
                assert (await client.complete(stream=stream)).status == 200

    run(work())
    assert engine.cancelled == []


def test_half_a_body_never_reaches_the_engine() -> None:
    engine = ScriptedEngine()

    async def work() -> None:
        async with serving(engine) as client:
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt":')
            await writer.drain()
            writer.close()
            assert (await client.complete()).status == 200

    run(work())
    assert len(engine.submitted) == 1


def test_body_that_does_not_arrive_is_given_up() -> None:
    engine = ScriptedEngine()

    async def work() -> bytes:
        async with serving(engine, progress_timeout_s=0.05) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return head

    assert b" 408 " in run(work()).splitlines()[0]


def test_client_that_reads_nothing_is_given_up() -> None:
    text = "x" * 500_000
    engine = ScriptedEngine(lambda r: [TokenOutput(97, text) for _ in range(r.sampling.max_tokens)])

    async def work() -> bytes:
        async with serving(engine, progress_timeout_s=0.3) as client:
            reader, writer = await connect(client, stream=True, max_tokens=62)
            await engine.until(lambda: len(engine.cancelled) == 1)
            received = await reader.read()
            writer.close()
            return received

    received = run(work())
    assert received.startswith(b"HTTP/1.1 200")
    assert len(received) < 62 * len(text)


def test_client_that_does_not_read_a_body_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    text = "x" * 30_000_000
    engine = ScriptedEngine(lambda _: [TokenOutput(97, text, finish_reason=FinishReason.STOP)])
    caplog.set_level(logging.DEBUG, "kvbaton")

    async def work() -> bytes:
        async with serving(engine, progress_timeout_s=0.3) as client:
            reader, writer = await connect(client)
            while "does not read" not in caplog.text:
                await client.get("/health")
            received = await reader.read()
            writer.close()
            return received

    assert len(run(work())) < len(text)
    assert engine.cancelled == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_stop_of_the_server_cancels_what_runs() -> None:
    engine = ScriptedEngine(None)

    async def work() -> None:
        async with serving(engine, shutdown_timeout_s=0.05) as client:
            _, writer = await connect(client)
            await engine.until(lambda: len(engine.submitted) == 1)
        await engine.until(lambda: len(engine.cancelled) == 1)
        writer.close()

    run(work())
