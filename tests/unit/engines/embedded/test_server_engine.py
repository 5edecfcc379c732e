"""The HTTP face over the real engine with the tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from served import Reply, run, serving

from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.weights import load_model


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    loaded = load_model("tiny", cache_dir=tmp_path)
    with Engine(loaded, PagedCache(loaded.config, 250, 16), None, EngineSettings()) as engine:
        yield engine


def test_stream_and_body_say_the_same(engine: Engine) -> None:
    async def work() -> tuple[Reply, Reply]:
        async with serving(engine, handoff=None) as client:
            body = await client.complete(prompt="hello", max_tokens=20, temperature=0, ignore_eos=True, logprobs=2)
            stream = await client.complete(
                prompt="hello", max_tokens=20, temperature=0, ignore_eos=True, logprobs=2, stream=True
            )
            return body, stream

    body, stream = run(work())
    assert body.status == stream.status == 200
    *events, _ = stream.events
    choice = body.json["choices"][0]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    tokens = [
        token for event in events if event["choices"][0]["logprobs"] for token in event["choices"][0]["logprobs"]["tokens"]
    ]
    assert tokens == choice["logprobs"]["tokens"]
    assert len(tokens) == body.json["usage"]["completion_tokens"] == 20
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["kvbaton"]["handed_off"] is False


def test_chat_and_metrics(engine: Engine) -> None:
    async def work() -> tuple[Reply, str]:
        async with serving(engine, handoff=None) as client:
            chat = await client.chat(max_tokens=5, n=2, seed=1)
            return chat, (await client.get("/metrics")).raw.decode()

    chat, metrics = run(work())
    assert [choice["message"]["role"] for choice in chat.json["choices"]] == ["assistant"] * 2
    assert len(chat.json["kvbaton"]["records"]) == 2
    assert 'kvbaton_blocks{state="in_use"}' in metrics
    assert "kvbaton_blocks_capacity 250.0" in metrics


def test_prompt_that_cannot_fit_is_refused_with_both_numbers(engine: Engine) -> None:
    async def work() -> tuple[Reply, Reply]:
        async with serving(engine, handoff=None) as client:
            return await client.complete(prompt=[1] * 5000), await client.complete(prompt=[1] * 4050)

    beyond_context, beyond_cache = run(work())
    assert beyond_context.status == beyond_cache.status == 400
    assert "5000" in beyond_context.error["message"]
    assert "4096" in beyond_context.error["message"]
    assert beyond_cache.error["param"] == "prompt"


def test_disconnect_gives_the_blocks_back_under_uvloop(engine: Engine) -> None:
    def blocks_in_use() -> int:
        return engine.stats().blocks_in_use

    async def work() -> None:
        async with serving(engine, handoff=None) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            body = b'{"prompt":"x","max_tokens":4000,"stream":true,"ignore_eos":true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            for _ in range(2):
                await reader.readuntil(b"data: ")
            assert blocks_in_use() > 0
            writer.transport.abort()
            async with asyncio.timeout(10):
                while blocks_in_use():
                    await client.get("/health")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
    assert engine.stats().requests_total["cancelled"] == 1
