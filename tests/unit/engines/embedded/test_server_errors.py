"""What the server answers when something is wrong: every error is a JSON object that names what to change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from served import CONTEXT, VOCAB, Reply, ScriptedEngine, run, serving

from kvbaton.engines.embedded.request import FinishReason, GenerationRequest, TokenOutput
from kvbaton.errors import BadRequest, Bug, KVBatonError, LocalError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def replied(engine: ScriptedEngine, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
    async def work() -> Reply:
        async with serving(engine) as client:
            reply = await client.post(path, body, headers)
            assert (await client.get("/health")).status == 200
            return reply

    return run(work())


def test_every_wrong_field_of_a_completion_is_named() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": -5}, "max_tokens", "-5"),
        ({"max_tokens": "many"}, "max_tokens", "str"),
        ({"max_tokens": True}, "max_tokens", "bool"),
        ({"n": 0}, "n", "0"),
        ({"n": 129}, "n", "129"),
        ({"n": 100, "prompt": ["x"] * 11}, "n", "1100"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"temperature": "hot"}, "temperature", "str"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 1.1}, "top_p", "1.1"),
        ({"stop": ["x"] * 17}, "stop", "17"),
        ({"stop": ["x", ""]}, "stop", "entry 1"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": [1]}, "stop[0]", "int"),
        ({"logprobs": 21}, "logprobs", "21"),
        ({"logprobs": -1}, "logprobs", "-1"),
        ({"echo": True}, "echo", "not supported"),
        ({"seed": 2**63}, "seed", str(2**63)),
        ({"seed": 1.5}, "seed", "float"),
        ({"stream": "yes"}, "stream", "str"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "int"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": {"text": "x"}}, "prompt", "object"),
        ({"prompt": [1, "x"]}, "prompt", "entry 1 is a string"),
        ({"prompt": [1.5]}, "prompt[0]", "float"),
        ({"prompt": [[1, "x"]]}, "prompt[0][1]", "str"),
        ({"prompt": [0, VOCAB]}, "prompt", f"prompt[1] is {VOCAB}"),
        ({"prompt": [[0], [-1]]}, "prompt", "prompt[1][0] is -1"),
        ({"prompt": "x" * CONTEXT}, "prompt", f"{CONTEXT} tokens"),
        ({"prompt": "x" * 70}, "prompt", "70 tokens"),
        ({"prompt": ["x"] * 1025}, "prompt", "1025"),
        ({"kv_transfer_params": "push"}, "kv_transfer_params", "str"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "kv_transfer_params.do_remote_decode", "str"),
    ]
    engine = ScriptedEngine()

    async def work() -> None:
        async with serving(engine) as client:
            for fields, param, shown in cases:
                reply = await client.complete(**fields)
                assert reply.status == 400, fields
                assert reply.error["param"] == param, fields
                assert reply.error["type"] == "invalid_request_error"
                assert shown in reply.error["message"], reply.error
                assert param.split("[")[0] in reply.error["message"]
            assert engine.submitted == []
            assert (await client.complete()).status == 200

    run(work())


def test_every_wrong_field_of_a_chat_is_named() -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": []}, "messages", "empty list"),
        ({"messages": "hi"}, "messages", "str"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "null"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "int"),
        ({"messages": [{"role": "user", "content": image}]}, "messages[0].content", "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "no text"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages", str(CONTEXT)),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
        ({"max_tokens": 0, "max_completion_tokens": 1}, "max_tokens", "0"),
        ({"logprobs": 3}, "logprobs", "int"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ]
    engine = ScriptedEngine()

    async def work() -> None:
        async with serving(engine) as client:
            for fields, param, shown in cases:
                reply = await client.chat(**fields)
                assert (reply.status, reply.error["param"]) == (400, param), fields
                assert shown in reply.error["message"], reply.error
            assert engine.submitted == []

    run(work())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "x",}',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "deep": ' + b"[" * 100_000,
    ],
)
def test_malformed_json_is_400(raw: bytes) -> None:
    reply = replied(ScriptedEngine(), COMPLETIONS, raw)
    assert (reply.status, reply.error["param"]) == (400, "body")


def test_body_that_is_not_what_its_headers_say_is_400() -> None:
    reply = replied(ScriptedEngine(), COMPLETIONS, b"no gzip", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error["param"]) == (400, "body")


@pytest.mark.parametrize(("raw", "param"), [(b"[]", "body"), (b"5", "body"), (b"{}", "prompt")])
def test_wrong_shape_of_the_body_is_400(raw: bytes, param: str) -> None:
    reply = replied(ScriptedEngine(), COMPLETIONS, raw)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_unknown_fields_are_tolerated() -> None:
    assert replied(ScriptedEngine(), COMPLETIONS, {"prompt": "x", "vllm_xargs": {"a": 1}, "user": "me"}).status == 200


def test_null_means_default() -> None:
    names = ("model", "n", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "logprobs", "kv_transfer_params")
    assert replied(ScriptedEngine(), COMPLETIONS, {"prompt": "x", **dict.fromkeys(names)}).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model_is_404_and_names_the_served_one(path: str) -> None:
    body = {"model": "gpt-9", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    reply = replied(ScriptedEngine(), path, body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in reply.error["message"]
    assert "'tiny'" in reply.error["message"]


def test_unknown_paths_and_methods() -> None:
    async def work() -> tuple[Reply, Reply, Reply]:
        async with serving(ScriptedEngine()) as client:
            return await client.get("/v1/nope"), await client.post("/nope", {}), await client.get(COMPLETIONS)

    unknown, posted, method = run(work())
    assert unknown.status == posted.status == 404
    assert "/v1/nope" in unknown.error["message"]
    assert posted.error["type"] == "not_found_error"
    assert method.status == 405
    assert method.headers["Allow"] == "POST"
    assert method.error["type"] == "invalid_request_error"


def test_body_over_the_limit_is_413() -> None:
    reply = replied(ScriptedEngine(), COMPLETIONS, b'{"prompt": "' + b"x" * (32 * 1024 * 1024) + b'"}')
    assert reply.status == 413
    assert reply.error["type"] == "invalid_request_error"


def test_large_body_below_the_limit_is_judged_before_it_is_tokenized() -> None:
    engine = ScriptedEngine()
    reply = replied(engine, COMPLETIONS, {"prompt": "x" * 200_000})
    assert reply.status == 400
    assert "200000 bytes" in reply.error["message"]
    assert engine.loaded.tokenizer.added_special == []


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (BadRequest("prompt", "prompt: needs 99 blocks of 10"), 400, "invalid_request_error"),
        (LocalError("the queue is full: 256 requests wait"), 503, "overloaded"),
        (Bug("lost a block"), 500, "server_error"),
        (ZeroDivisionError("oops"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_of_the_engine(refusal: Exception, status: int, kind: str, stream: bool) -> None:
    reply = replied(ScriptedEngine(refuse=refusal), COMPLETIONS, {"prompt": "x", "stream": stream})
    assert (reply.status, reply.error["type"]) == (status, kind)
    assert ("Retry-After" in reply.headers) == (status == 503)
    assert ("oops" in reply.error["message"]) is False
    if isinstance(refusal, KVBatonError):
        assert reply.error["message"] == str(refusal)


def test_refusal_of_a_later_choice_cancels_the_earlier_ones() -> None:
    engine = ScriptedEngine(None, refuse=LocalError("full"))
    engine.refuse_after = 2
    assert replied(engine, COMPLETIONS, {"prompt": "x", "n": 3}).status == 503
    assert engine.cancelled == [request.request_id for request in engine.submitted]
    assert len(engine.cancelled) == 2


def failing(after: int, reason: FinishReason, error: str) -> ScriptedEngine:
    def script(_: GenerationRequest) -> Iterable[TokenOutput]:
        yield from (TokenOutput(97, "a") for _ in range(after))
        yield TokenOutput(-1, "", finish_reason=reason, error=error)

    return ScriptedEngine(script)


FROM_SOURCE = {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_host": "127.0.0.1", "remote_port": 7000}


@pytest.mark.parametrize(
    ("params", "reason", "status", "kind"),
    [
        (None, FinishReason.ERROR, 500, "server_error"),
        (FROM_SOURCE, FinishReason.ERROR, 502, "handoff_failed"),
        ({"do_remote_decode": True}, FinishReason.ERROR, 500, "server_error"),
        (None, FinishReason.CANCELLED, 503, "cancelled"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_byte_is_a_status(
    params: dict[str, Any] | None, reason: FinishReason, status: int, kind: str, stream: bool
) -> None:
    engine = failing(0, reason, "peer lost")
    reply = replied(engine, COMPLETIONS, {"prompt": "x", "stream": stream, "kv_transfer_params": params})
    assert (reply.status, reply.error["type"]) == (status, kind)
    assert "peer lost" in reply.error["message"]
    assert engine.cancelled == []


def test_failure_in_the_middle_of_a_body_is_a_status() -> None:
    assert replied(failing(2, FinishReason.ERROR, "no memory"), COMPLETIONS, {"prompt": "x"}).status == 500


def test_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    reply = replied(failing(2, FinishReason.ERROR, "no memory"), COMPLETIONS, {"prompt": "x", "stream": True})
    assert reply.status == 200
    *events, last = reply.events
    assert [event["choices"][0]["text"] for event in events] == ["a", "a"]
    assert last == {"error": {"message": "no memory", "type": "server_error", "param": None, "code": None}}


def test_failure_of_one_choice_cancels_the_others() -> None:
    engine = ScriptedEngine(None)

    async def work() -> Reply:
        async with serving(engine) as client:
            posted = asyncio.create_task(client.complete(n=2))
            await engine.until(lambda: len(engine.submitted) == 2)
            engine.feed(0, TokenOutput(-1, "", finish_reason=FinishReason.ERROR, error="bad"))
            return await posted

    assert run(work()).status == 500
    assert engine.cancelled == [engine.submitted[1].request_id]


def test_silent_engine_is_given_up() -> None:
    engine = ScriptedEngine(None)

    async def work() -> Reply:
        async with serving(engine, progress_timeout_s=0.05) as client:
            return await client.complete()

    reply = run(work())
    assert (reply.status, reply.error["type"]) == (504, "timeout")
    assert engine.cancelled == [engine.submitted[0].request_id]


def test_request_id_beyond_ascii_is_400() -> None:
    reply = replied(ScriptedEngine(), COMPLETIONS, {"prompt": "x"}, {"X-Request-Id": "ü"})
    assert (reply.status, reply.error["param"]) == (400, "X-Request-Id")
