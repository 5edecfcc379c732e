"""What the server answers when all is well: bodies, streams, choices, usage, logprobs, models, health, metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from served import MODEL, Client, ScriptedEngine, run, serving

from kvbaton.engines.embedded.request import FinishReason, GenerationRequest, RequestRecord, TokenOutput


def answered(engine: ScriptedEngine, path: str, body: dict[str, object], headers: dict[str, str] | None = None) -> Any:
    async def work() -> Any:
        async with serving(engine) as client:
            reply = await client.post(path, body, headers)
            assert reply.status == 200, reply.raw
            if body.get("stream"):
                assert reply.headers["Content-Type"] == "text/event-stream"
                return reply.events
            assert reply.headers["Content-Type"] == "application/json"
            assert b'": ' not in reply.raw
            return reply.json

    return run(work())


def complete(engine: ScriptedEngine, **fields: object) -> Any:
    return answered(engine, "/v1/completions", {"prompt": "hi", **fields})


def chat(engine: ScriptedEngine, **fields: object) -> Any:
    return answered(engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})


def test_completion_has_text_usage_and_record() -> None:
    engine = ScriptedEngine()
    body = complete(engine, model=MODEL, max_tokens=3)
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert body["kvbaton"]["handed_off"] is False
    assert body["kvbaton"]["queue_s"] == 0.123457
    assert "records" not in body["kvbaton"]
    assert "kv_transfer_params" not in body
    assert engine.cancelled == []


def test_defaults_of_a_completion() -> None:
    engine = ScriptedEngine()
    complete(engine)
    assert engine.loaded.tokenizer.added_special == [True]
    sampling = engine.submitted[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (16, 1.0, 1.0, None)
    assert (sampling.stop, sampling.logprobs, sampling.ignore_eos) == ((), None, False)
    assert engine.submitted[0].handoff is None


def test_choices_are_prompt_major_and_seeds_count_up() -> None:
    engine = ScriptedEngine(lambda r: [TokenOutput(r.prompt_ids[0], chr(r.prompt_ids[0]), finish_reason=FinishReason.STOP)])
    body = complete(engine, prompt=["x", "y"], n=2, seed=7)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "x"), (1, "x"), (2, "y"), (3, "y")]
    assert [r.sampling.seed for r in engine.submitted] == [7, 8, 7, 8]
    assert len({r.request_id for r in engine.submitted}) == 4
    assert body["usage"]["prompt_tokens"] == 2
    assert "kvbaton" not in body


def test_records_are_listed_for_several_choices() -> None:
    body = complete(ScriptedEngine(), n=2, max_tokens=1)
    assert len(body["kvbaton"]["records"]) == 2
    assert body["kvbaton"]["queue_s"] == body["kvbaton"]["records"][0]["queue_s"]


def test_response_id_comes_from_the_header_or_is_random() -> None:
    headers = {"X-Request-Id": "abc-1"}
    assert answered(ScriptedEngine(), "/v1/completions", {"prompt": "x"}, headers)["id"] == "cmpl-abc-1"
    messages = [{"role": "user", "content": "x"}]
    assert answered(ScriptedEngine(), "/v1/chat/completions", {"messages": messages}, headers)["id"] == "chatcmpl-abc-1"
    first, second = complete(ScriptedEngine())["id"], complete(ScriptedEngine())["id"]
    assert first != second
    assert first.startswith("cmpl-")


def test_two_requests_with_one_header_are_two_requests_to_the_engine() -> None:
    engine = ScriptedEngine()

    async def work() -> None:
        async with serving(engine) as client:
            for _ in range(2):
                await client.complete({"X-Request-Id": "same"})

    run(work())
    assert engine.submitted[0].request_id != engine.submitted[1].request_id


def test_completion_logprobs() -> None:
    body = complete(ScriptedEngine(), max_tokens=2, logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }


def test_tokens_can_be_shown_as_ids() -> None:
    logprobs = complete(ScriptedEngine(), max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97"]
    assert logprobs["top_logprobs"] == [{"token_id:97": -0.5}]


def test_impossible_candidates_stay_valid_json() -> None:
    engine = ScriptedEngine(lambda _: [TokenOutput(97, "a", -0.5, ((98, float("-inf")),), FinishReason.STOP)])
    assert complete(engine, logprobs=1)["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -9999.0, "a": -0.5}]


def test_stream_of_a_completion() -> None:
    *events, done = complete(ScriptedEngine(), max_tokens=3, stream=True, logprobs=0)
    assert done == "[DONE]"
    assert [event["choices"][0]["text"] for event in events] == ["a", "b", "c"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [1], [2]]
    assert len({event["id"] for event in events}) == 1
    assert ["kvbaton" in event for event in events] == [False, False, True]
    assert not any("usage" in event for event in events)


def test_stream_ends_with_usage_when_asked() -> None:
    *events, usage, done = complete(ScriptedEngine(), max_tokens=2, stream=True, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert [event["usage"] for event in events] == [None, None]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


def test_stream_leaves_out_outputs_with_nothing_to_show() -> None:
    outputs = [TokenOutput(1, ""), TokenOutput(2, "é"), TokenOutput(-1, "", finish_reason=FinishReason.STOP)]
    *events, _ = complete(ScriptedEngine(lambda _: outputs), stream=True)
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in events] == [("é", None), ("", "stop")]


def test_stream_of_several_choices_has_the_records_in_its_last_event() -> None:
    *events, _ = complete(ScriptedEngine(), n=2, max_tokens=2, stream=True)
    for index in range(2):
        assert "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index) == "ab"
    assert ["kvbaton" in event for event in events] == [False, False, False, True]
    assert len(events[-1]["kvbaton"]["records"]) == 2


def test_text_beyond_ascii_is_not_escaped() -> None:
    engine = ScriptedEngine(lambda _: [TokenOutput(1, "你", finish_reason=FinishReason.STOP)])

    async def work() -> bytes:
        async with serving(engine) as client:
            return (await client.complete()).raw

    assert "你".encode() in run(work())


def test_chat_answer() -> None:
    engine = ScriptedEngine()
    body = chat(engine, max_tokens=2)
    assert body["object"] == "chat.completion"
    said = {"role": "assistant", "content": "ab"}
    assert body["choices"] == [{"index": 0, "message": said, "logprobs": None, "finish_reason": "length"}]
    assert bytes(engine.submitted[0].prompt_ids) == b"<user>hi<>"
    assert engine.loaded.tokenizer.added_special == [False]


def test_chat_fills_the_context_by_default() -> None:
    engine = ScriptedEngine(lambda _: [TokenOutput(1, "x", finish_reason=FinishReason.STOP)])
    chat(engine)
    assert engine.submitted[0].sampling.max_tokens == 64 - len(b"<user>hi<>")


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(ScriptedEngine(), max_tokens=5, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


def test_chat_content_may_be_text_parts() -> None:
    engine = ScriptedEngine()
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    chat(engine, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert bytes(engine.submitted[0].prompt_ids) == b"<user>xy<>"


def test_chat_logprobs() -> None:
    body = chat(ScriptedEngine(), max_tokens=1, logprobs=True, top_logprobs=1)
    token = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert body["choices"][0]["logprobs"] == {"content": [{**token, "top_logprobs": [token]}]}
    assert chat(ScriptedEngine(), max_tokens=1, logprobs=False)["choices"][0]["logprobs"] is None


def test_stream_of_a_chat() -> None:
    *events, done = chat(ScriptedEngine(), max_tokens=2, stream=True)
    assert done == "[DONE]"
    assert [event["object"] for event in events] == ["chat.completion.chunk"] * 2
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": "a"}, {"content": "b"}]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["kvbaton"]["transport"] == ""


def test_max_tokens_beyond_the_context_is_cut_to_it() -> None:
    engine = ScriptedEngine()
    complete(engine, max_tokens=10**9)
    assert engine.submitted[0].sampling.max_tokens == 62


def test_record_of_an_earlier_output_is_kept() -> None:
    def script(_: GenerationRequest) -> Iterable[TokenOutput]:
        yield TokenOutput(1, "x", record=RequestRecord(bytes_moved=5))
        yield TokenOutput(-1, "", finish_reason=FinishReason.STOP)

    assert complete(ScriptedEngine(script))["kvbaton"]["bytes_moved"] == 5


def test_models_and_health() -> None:
    async def work() -> tuple[Any, Any]:
        async with serving(ScriptedEngine(), role="prefill") as client:
            return (await client.get("/v1/models")).json, (await client.get("/health")).json

    models, health = run(work())
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [(MODEL, "model", 64)]
    assert health == {"status": "ok", "role": "prefill", "model": MODEL}


def test_metrics() -> None:
    async def work() -> tuple[str, str]:
        async with serving(ScriptedEngine()) as client:
            reply = await client.get("/metrics")
            return reply.headers["Content-Type"], reply.raw.decode()

    kind, text = run(work())
    assert kind.startswith("text/plain; version=0.0.4")
    lines = text.splitlines()
    for line in (
        'kvbaton_blocks{state="free"} 7.0',
        'kvbaton_blocks{state="held"} 1.0',
        'kvbaton_blocks{state="in_use"} 2.0',
        "kvbaton_blocks_capacity 10.0",
        "kvbaton_blocks_cached 3.0",
        'kvbaton_requests{state="waiting"} 4.0',
        'kvbaton_requests_finished_total{finish_reason="stop"} 6.0',
        'kvbaton_handoffs_total{outcome="delivered",side="source"} 8.0',
        "kvbaton_prompt_tokens_total 100.0",
        "kvbaton_generated_tokens_total 200.0",
        "kvbaton_cached_tokens_total 50.0",
        "kvbaton_preemptions_total 9.0",
        "kvbaton_steps_total 300.0",
    ):
        assert line in lines


def test_two_apps_live_side_by_side() -> None:
    async def health(client: Client) -> int:
        return (await client.get("/metrics")).status

    async def work() -> None:
        async with serving(ScriptedEngine()) as one, serving(ScriptedEngine()) as two:
            assert await health(one) == await health(two) == 200

    run(work())
