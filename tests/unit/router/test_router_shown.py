"""What clients see of the instances and of each other in an answer: nothing of the addresses, and of the rest what is set."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_fakes import Behaviour, answering, decode, prefill, reset_at_once, routing, run

from kvbaton.discovery.messages import TransferMode
from kvbaton.router.shown import hide_details, hide_in_events

READ, WRITE = TransferMode.READ, TransferMode.WRITE
BODY = {"model": "m", "prompt": "hello"}
KEYS: dict[str, Any] = {"api_keys": ("key",), "headers": {"Authorization": "Bearer key"}}
USAGE = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0}}


def as_engines_do(*cuts: int) -> Behaviour:
    """An instance that makes its answer's id of the request id; a stream is cut at these places."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = {"id": f"cmpl-{request.headers['x-request-id']}-0", "usage": USAGE, "kvbaton": {"handed_off": True}}
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        content = b"data: %b\n\n" % json.dumps(answer).encode() + b"data: [DONE]\n\n"
        for start, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
            await response.write(content[start:end])
            await asyncio.sleep(0.02)
        return response

    return behave


@pytest.mark.parametrize("mode", [READ, WRITE])
@pytest.mark.parametrize("settings", [{}, KEYS, {**KEYS, "show_details": True}, {"show_details": False}])
@pytest.mark.parametrize("cuts", [None, (), (1,), (18,), (30, 60, 90), (130,), (170, 171, 172, 300)])
def test_an_answer_holds_no_address_and_details_only_where_they_are_shown(
    cuts: tuple[int, ...] | None, settings: dict[str, Any], mode: TransferMode
) -> None:
    async def test() -> None:
        shows = settings.get("show_details", not settings.get("api_keys"))
        p, d = prefill(mode=mode), decode(as_engines_do(*(cuts or ())), mode=mode)
        async with p, d, routing(p, d, **settings) as router:
            status, headers, content = await router.post({**BODY, "stream": cuts is not None})
        assert status == 200
        for address in (b"_addr_", b"handshake", str(p.port).encode(), str(d.port).encode()):
            assert address not in content
        document = json.loads(content.split(b"\n")[0].removeprefix(b"data: "))
        tail = d.seen[0].headers["x-request-id"].rpartition("_")[2]
        assert document["id"] == f"cmpl-{tail}-0"
        assert ("cached_tokens" in document["usage"]["prompt_tokens_details"]) == shows
        assert document["usage"]["prompt_tokens_details"]["audio_tokens"] == 0
        assert ("kvbaton" in document) == shows
        assert ("x-kvbaton-decode" in headers) == shows
        assert ("x-kvbaton-transfer" in headers) == shows
        assert headers["x-request-id"]
        assert cuts is None or content.endswith(b"data: [DONE]\n\n")

    asyncio.run(test())


@pytest.mark.parametrize("behave", [answering(500, "boom"), reset_at_once])
def test_errors_name_no_address_where_details_are_not_shown(behave: Behaviour) -> None:
    async def test() -> None:
        async with prefill(behave) as p, decode() as d, routing(p, d, **KEYS) as router:
            status, _, content = await router.post(BODY)
        assert status == 502
        assert "prefill instance" in json.loads(content)["error"]["message"]
        assert str(p.port).encode() not in content

    asyncio.run(test())


@run
async def test_pages_that_show_instances_are_closed_where_details_are_not_shown() -> None:
    for settings, status in ((KEYS, 403), ({**KEYS, "show_details": True}, 200), ({}, 200)):
        async with routing(**settings) as router:
            assert (await router.get("/instances"))[0] == status
            assert (await router.get("/handoffs"))[0] == status
            assert (await router.get("/handoffs/tx-1"))[0] == (403 if status == 403 else 404)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b'{"id":"a", "usage":null,"kvbaton":1}', {"id": "a", "usage": None}),
        (b'{"meta_info":{"cached_tokens":3,"id":"a"}}', {"meta_info": {"id": "a"}}),
        (b'[{"meta_info":{"cached_tokens":3}},{"text":"b"}]', [{"meta_info": {}}, {"text": "b"}]),
        (b'{"kv_transfer_params":{"remote_host":"10.0.0.1"}}', {}),
        (b'{"choices":[{"text":"\\"cached_tokens\\""}]}', {"choices": [{"text": '"cached_tokens"'}]}),
    ],
)
def test_details_are_found_where_engines_put_them(content: bytes, shown: Any) -> None:
    assert json.loads(hide_details(content)) == shown
    event = hide_in_events(b"event: x\ndata: " + content + b"\n\ndata: [DONE]\n\n")
    assert event.startswith(b"event: x\ndata: ")
    assert event.endswith(b"\n\ndata: [DONE]\n\n")
    assert json.loads(event.split(b"\n")[1].removeprefix(b"data: ")) == shown


@pytest.mark.parametrize("content", [b"", b'"cached_tokens"', b'{"kvbaton":', b"[" * 5000 + b'"kvbaton"'])
def test_what_is_no_answer_stays_as_it_is(content: bytes) -> None:
    assert hide_details(content) == content


@pytest.mark.parametrize(
    "usage", [b"7", b'["cached_tokens"]', b'"cached_tokens"', b'{"prompt_tokens_details":[{"cached_tokens":1}]}']
)
def test_what_cannot_be_cleaned_is_not_shown(usage: bytes) -> None:
    shown = hide_details(b'{"id":"x","usage":' + usage + b',"kvbaton":1}')
    assert json.loads(shown)["id"] == "x"
    assert b"cached_tokens" not in shown
    assert b"kvbaton" not in shown
