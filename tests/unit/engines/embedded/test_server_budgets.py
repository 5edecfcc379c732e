"""What a request may hold is checked before anything of it is tokenized; a refusal names the limit and both values."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import aiohttp
import orjson
import pytest
from served import CONTEXT, Client, Reply, ScriptedEngine, run, serving

from kvbaton.engines.embedded.engine import EngineBusy
from kvbaton.engines.embedded.settings import HttpSettings
from kvbaton.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT_BYTES = 4 * CONTEXT
"""The context times the longest token of the test's tokenizer."""


def asked(path: str, body: object, settings: HttpSettings | None = None) -> tuple[Reply, ScriptedEngine]:
    async def work() -> Reply:
        async with serving(engine, settings=settings or HttpSettings()) as client:
            return await client.post(path, body)

    engine = ScriptedEngine()
    return run(work()), engine


TOO_LONG: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "one prompt": (COMPLETIONS, {"prompt": "x" * (PROMPT_BYTES + 1)}, ("prompt", "257 bytes", "256")),
    "one prompt of few characters": (COMPLETIONS, {"prompt": "\U0001f600" * 65}, ("prompt", "260 bytes", "256")),
    "one of several": (COMPLETIONS, {"prompt": ["x", "x" * 300]}, ("prompt[1]", "300 bytes", "256")),
    "several together": (COMPLETIONS, {"prompt": ["x" * 250] * 5}, ("prompt", "1250 bytes", "1024", "max_request_bytes")),
    "token ids": (COMPLETIONS, {"prompt": [1] * 100_000}, ("prompt", "100000 tokens", "64")),
    "token ids of one of several": (COMPLETIONS, {"prompt": [[1], [1] * 70]}, ("prompt[1]", "70 tokens", "64")),
    "very many prompts": (COMPLETIONS, {"prompt": ["x"] * 200_000}, ("prompt", "200000", "256", "max_request_sequences")),
    "a stop string": (COMPLETIONS, {"prompt": "x", "stop": ["a", "b" * 257]}, ("stop", "257", "256")),
    "one message": (CHAT, {"messages": [{"role": "user", "content": "x" * 257}]}, ("messages[0].content", "257", "256")),
    "a role": (CHAT, {"messages": [{"role": "x" * 999, "content": "x"}]}, ("messages[0].role", "999", "256")),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 300}]},
        ("messages[0].content", "300 bytes", "256"),
    ),
    "a conversation": (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 100}] * 3},
        ("messages", "312 bytes", "256", "max_prompt_bytes"),
    ),
    "many messages": (CHAT, {"messages": [{"role": "", "content": ""}] * 65}, ("messages", "65 entries", "64")),
    "a salt": (COMPLETIONS, {"prompt": "x", "cache_salt": "s" * 1025}, ("cache_salt", "1025", "1024")),
}


@pytest.mark.parametrize(("path", "body", "texts"), TOO_LONG.values(), ids=TOO_LONG.keys())
def test_what_is_too_long_is_refused_before_it_is_tokenized(path: str, body: dict[str, Any], texts: tuple[str, ...]) -> None:
    reply, engine = asked(path, body)
    assert reply.status == 400
    for text in texts:
        assert text in reply.error["message"]
    assert engine.loaded.tokenizer.added_special == []
    assert engine.submitted == []


def test_what_fits_is_served() -> None:
    """The control: a prompt of the largest size passes the budget, and is judged by its tokens."""
    assert asked(COMPLETIONS, {"prompt": "x" * (CONTEXT - 1), "max_tokens": 1})[0].status == 200
    reply, _ = asked(COMPLETIONS, {"prompt": "x" * PROMPT_BYTES})
    assert f"{PROMPT_BYTES} tokens" in reply.error["message"]


def test_limits_are_settings() -> None:
    settings = HttpSettings(max_prompt_bytes=10, max_request_bytes=15)
    assert "11 bytes" in asked(COMPLETIONS, {"prompt": "x" * 11}, settings)[0].error["message"]
    assert "16 bytes together" in asked(COMPLETIONS, {"prompt": ["x" * 8] * 2}, settings)[0].error["message"]
    with pytest.raises(ConfigError, match="max_prompt_bytes is -1"):
        HttpSettings(max_prompt_bytes=-1)
    with pytest.raises(ConfigError, match="max_request_sequences is 0"):
        HttpSettings(max_request_sequences=0)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_a_413_with_both_values(is_chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(10):
            yield b" " * 200

    async def work() -> tuple[int, Any]:
        async with serving(engine, settings=HttpSettings(max_body_bytes=1000)) as client:
            url = f"http://127.0.0.1:{client.port}{COMPLETIONS}"
            data = pieces() if is_chunked else io.BytesIO(b" " * 2000)
            async with aiohttp.ClientSession() as session, session.post(url, data=data) as reply:
                return reply.status, orjson.loads(await reply.read())

    engine = ScriptedEngine()
    status, body = run(work())
    assert status == 413
    assert "max_body_bytes" in body["error"]["message"]
    assert "1000" in body["error"]["message"]
    assert ("2000" if not is_chunked else "bytes or more") in body["error"]["message"]


def test_the_bytes_of_all_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client that sends half of a body keeps its bytes; another one is refused as long as both are too many."""
    monkeypatch.setattr("kvbaton.engines.embedded.server._MAX_BODIES_BYTES", 50_000)

    async def work() -> tuple[Reply, Reply]:
        async with serving(ScriptedEngine()) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: here\r\nContent-Length: 90000\r\n\r\n".encode()
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(head + b" " * 45_000)
            await writer.drain()
            body = b'{"prompt": "hi"}' + b" " * 20_000
            while (refused := await client.post(COMPLETIONS, body)).status == 200:
                await asyncio.sleep(0.01)
            assert (await client.complete()).status == 200, "a small body always passes"
            writer.close()
            await writer.wait_closed()
            while (served := await client.post(COMPLETIONS, body)).status == 429:
                await asyncio.sleep(0.01)
            return refused, served

    refused, served = run(work())
    assert refused.status == 429
    assert refused.error["code"] == "too_many_bytes"
    assert "50000" in refused.error["message"]
    assert served.status == 200


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"prompt": ["x"] * 5}, "5"), ({"prompt": ["x"] * 3, "n": 2}, "6"), ({"prompt": "x", "n": 5}, "5")],
)
def test_a_request_is_bounded_in_sequences(fields: dict[str, Any], count: str) -> None:
    reply, engine = asked(COMPLETIONS, fields, HttpSettings(max_request_sequences=4))
    assert reply.status == 400
    assert "max_request_sequences" in reply.error["message"]
    assert count in reply.error["message"]
    assert "4" in reply.error["message"]
    assert engine.submitted == []


def test_sequences_up_to_the_limit_are_served() -> None:
    reply, engine = asked(COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "max_tokens": 1}, HttpSettings(max_request_sequences=4))
    assert reply.status == 200
    assert len(engine.submitted) == 4


def test_a_full_queue_is_a_429_that_names_the_limit() -> None:
    async def work() -> Reply:
        async with serving(ScriptedEngine(refuse=EngineBusy("7 sequences wait already and max_waiting is 7"))) as client:
            return await client.complete()

    reply = run(work())
    assert reply.status == 429
    assert reply.error["code"] == "too_many_sequences"
    assert "max_waiting is 7" in reply.error["message"]
    assert "Retry-After" in reply.headers


def test_an_error_does_not_repeat_a_long_value() -> None:
    async def work(client: Client) -> Reply:
        return await client.complete(model="m" * 100_000)

    async def served() -> Reply:
        async with serving(ScriptedEngine()) as client:
            return await work(client)

    reply = run(served())
    assert reply.status == 404
    assert len(reply.raw) < 3000
