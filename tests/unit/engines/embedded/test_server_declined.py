"""Requests that a target refuses: their sources are notified, whatever was wrong with them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from served import Reply, ScriptedEngine, run, serving

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import HandoffKey, TransferId
from kvbaton.engines.embedded.declined import declined_requests
from kvbaton.engines.embedded.engine import EngineBusy
from kvbaton.engines.embedded.request import FromSource

PARAMS = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": 6301}


def posted(engine: ScriptedEngine, fields: dict[str, Any], path: str = "/v1/completions") -> Reply:
    async def work() -> Reply:
        async with serving(engine, role="decode") as client:
            return await client.post(path, fields)

    return run(work())


def declined_keys(engine: ScriptedEngine) -> list[tuple[int, int]]:
    handoffs = [request.handoff for request, _ in engine.declined]
    assert all(isinstance(handoff, FromSource) for handoff in handoffs)
    return [(handoff.key.prompt_index, handoff.key.sample_index) for handoff in handoffs if handoff is not None]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"prompt": ""},
        {"prompt": "x" * 100},
        {"model": "another"},
        {"stream": "perhaps"},
        {"temperature": -1},
    ],
)
def test_the_source_of_a_bad_request_is_notified(wrong: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    reply = posted(engine, {"prompt": "hi", "kv_transfer_params": PARAMS, **wrong})
    assert reply.status in (400, 404)
    ((request, reason),) = engine.declined
    assert request.handoff == FromSource(HandoffKey(TransferId("t")), ControlAddress.of("127.0.0.1", 6301))
    assert reason
    assert engine.submitted == []


def test_prompt_logprobs_are_refused_by_name() -> None:
    reply = posted(ScriptedEngine(), {"prompt": "hi", "prompt_logprobs": 0})
    assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")


def test_every_choice_is_declined() -> None:
    engine = ScriptedEngine()
    posted(engine, {"prompt": ["a", "b"], "n": 2, "max_tokens": 0, "kv_transfer_params": PARAMS})
    assert declined_keys(engine) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_chat_is_declined() -> None:
    engine = ScriptedEngine()
    posted(engine, {"messages": [], "kv_transfer_params": PARAMS}, "/v1/chat/completions")
    assert declined_keys(engine) == [(0, 0)]


def test_a_full_queue_declines_what_it_does_not_take() -> None:
    """The choices that were taken are cancelled, which notifies their sources too."""
    engine = ScriptedEngine(None, refuse=EngineBusy("full"))
    engine.refuse_after = 1
    reply = posted(engine, {"prompt": "hi", "n": 3, "kv_transfer_params": PARAMS})
    assert reply.status == 429
    assert declined_keys(engine) == [(0, 1), (0, 2)]
    assert engine.cancelled == [engine.submitted[0].request_id]
    assert all(request.prompt_ids for request, _ in engine.declined)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hi", "max_tokens": 0},
        {"prompt": "hi", "max_tokens": 0, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t"}},
        {"prompt": "hi", "kv_transfer_params": {"do_remote_prefill": True}},
        {"prompt": "hi", "kv_transfer_params": {**PARAMS, "remote_port": "x"}},
    ],
)
def test_without_a_source_nothing_is_declined(fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    assert posted(engine, fields).status == 400
    assert engine.declined == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"kv_transfer_params": 7}', b"[" * 100_000])
def test_what_is_no_body_stands_for_nothing(raw: bytes) -> None:
    assert declined_requests(raw, None, 256, lambda _: True) == []


def test_no_body_stands_for_too_many() -> None:
    body = {"prompt": ["x"] * 2000, "n": 10**9, "kv_transfer_params": PARAMS}
    assert len(declined_requests(orjson.dumps(body), None, 256, lambda _: True)) == 256
