"""Asking a server for one completion: what is read out of the answer, and that a bad answer is told in words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvbaton.errors import PeerError, PeerLost, ProtocolError
from kvbaton.launch.ports import PortPicker
from kvbaton.verify.client import ServerReply, ask


def _document(**logprobs: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tokens": ["token_id:5", "token_id:9"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -0.75}, {"token_id:9": -1.5}],
    }
    return {"choices": [{"finish_reason": "length", "logprobs": fields | logprobs}], "kvbaton": {"handed_off": True}}


def _ask(status: int, body: bytes) -> tuple[ServerReply, dict[str, Any]]:
    """The reply to what a server answers, and what that server was sent."""

    async def run() -> tuple[ServerReply, dict[str, Any]]:
        sent: dict[str, Any] = {}

        async def handle(request: web.Request) -> web.Response:
            sent.update(await request.json())
            return web.Response(status=status, body=body, content_type="application/json")

        app = web.Application()
        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        port = PortPicker().pick()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with aiohttp.ClientSession() as session:
                return await ask(session, f"http://127.0.0.1:{port}", "tiny", (1, 2, 3), 2), sent
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_an_answer_is_read_token_by_token() -> None:
    reply, sent = _ask(200, json.dumps(_document()).encode())
    assert reply.answer.tokens == (5, 9)
    assert reply.answer.logprobs == (-0.5, -1.5)
    assert reply.answer.gaps == (0.25, float("inf"))
    assert reply.answer.finish_reason == "length"
    assert reply.record == {"handed_off": True}
    assert sent == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def test_token_ids_beside_an_answer_are_those_that_count() -> None:
    """SGLang writes the texts of tokens into the logprobs."""
    document = _document()
    document["choices"][0]["token_ids"] = [7, 8]
    document["choices"][0]["logprobs"]["tokens"] = [" a", " b"]
    reply, _ = _ask(200, json.dumps(document).encode())
    assert reply.answer.tokens == (7, 8)


def test_an_error_is_told_with_its_status_and_text() -> None:
    with pytest.raises(PeerError, match=r"HTTP 503: .*no live decode instance"):
        _ask(503, b'{"error": "no live decode instance"}')


def test_an_error_object_is_told_with_its_kind_and_message() -> None:
    content = {"error": {"message": "hand-off t failed: checksum", "type": "handoff_failed", "param": None, "code": None}}
    with pytest.raises(PeerError, match=r"^HTTP 502: handoff_failed: hand-off t failed: checksum$"):
        _ask(502, json.dumps(content).encode())


WRONG: dict[str, Any] = {
    "no choices": {"choices": []},
    "no logprobs": {"choices": [{"finish_reason": "length", "logprobs": None}]},
    "a list": [],
    "tokens as text": _document(tokens=[" Paris", "."]),
    "a null logprob": _document(token_logprobs=[None, -1.0]),
    "a logprob missing": _document(token_logprobs=[-1.0]),
    "candidates missing": _document(top_logprobs=[]),
}


@pytest.mark.parametrize("document", WRONG.values(), ids=WRONG.keys())
def test_an_answer_in_another_form_is_a_protocol_error(document: Any) -> None:
    with pytest.raises(ProtocolError, match="no logprobs in the expected form"):
        _ask(200, json.dumps(document).encode())


def test_an_answer_that_is_no_json_is_a_peer_error() -> None:
    with pytest.raises(PeerError):
        _ask(200, b"<html>")


def test_nobody_there_is_peer_lost() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            await ask(session, f"http://127.0.0.1:{PortPicker().pick()}", "tiny", (1,), 1)

    with pytest.raises(PeerLost):
        asyncio.run(run())
