"""The bodies that the two instances are sent: what is changed, what is not, and what is refused before any instance sees it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import BadRequest, ProtocolError
from kvbaton.router.bodies import Peer, bootstrap_body, decode_body, parse_body, prefill_body, push_params, transfer_params

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_OURS = {"kv_transfer_params", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"}


def parse(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(prefill_body(parse_body(json.dumps(fields).encode()), "tx-1", Peer(), in_push=False))
    return body


@given(
    st.dictionaries(st.text(max_size=8).filter(lambda k: k not in _OURS and not k.startswith("bootstrap_")), _JSON, max_size=5)
)
def test_what_is_not_ours_arrives_unchanged_on_both_sides(fields: dict[str, Any]) -> None:
    body = parse_body(json.dumps(fields).encode())
    first, second = json.loads(prefill_body(body, "tx-1", Peer(), in_push=False)), json.loads(decode_body(body, {}, Peer()))
    assert {k: v for k, v in first.items() if k not in _OURS} == fields
    assert {k: v for k, v in second.items() if k not in _OURS} == fields
    assert second["kv_transfer_params"] == {"remote_dp_size": 1}


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_a_bad_request(content: bytes) -> None:
    with suppress(BadRequest):
        json.loads(prefill_body(parse_body(content), "tx-1", Peer(), in_push=True).decode(errors="replace"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"a":tru}', b'{"a":' + b"[" * 100_000, b"\xff"])
def test_what_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(BadRequest, match="body"):
        parse_body(content)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_an_answer_of_no_tokens_is_refused_before_anything_is_computed(name: str, value: int) -> None:
    with pytest.raises(BadRequest, match=f"{name} is {value}") as caught:
        parse(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("value", [1, 0, "true", []])
def test_stream_must_be_a_truth_value(value: object) -> None:
    with pytest.raises(BadRequest, match="stream"):
        parse(stream=value)


def test_null_means_absent() -> None:
    body = parse_body(b'{"stream":null,"max_tokens":null}')
    assert not body.stream
    assert json.loads(decode_body(body, {}, Peer()))["max_tokens"] is None


@pytest.mark.parametrize(("given_value", "sent"), [(0, 0), (1, 1), (7, 1)])
def test_min_tokens_is_clamped(given_value: int, sent: int) -> None:
    assert parse(min_tokens=given_value)["min_tokens"] == sent


def test_max_completion_tokens_is_only_sent_where_it_was_given() -> None:
    assert "max_completion_tokens" not in parse(prompt="x")
    assert parse(max_completion_tokens=5)["max_completion_tokens"] == 1
    assert parse(max_completion_tokens=5)["max_tokens"] == 1


def test_in_push_both_sides_know_the_transfer_and_the_size_of_the_other_side() -> None:
    body = parse_body(b'{"prompt":"x"}')
    first = json.loads(prefill_body(body, "tx-1", Peer(tp_size=4), in_push=True))["kv_transfer_params"]
    second = json.loads(decode_body(body, push_params("tx-1", Peer(tp_size=2)), Peer(tp_size=2)))["kv_transfer_params"]
    common = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": "tx-1", "remote_dp_size": 1}
    assert first == {"do_remote_decode": True, "do_remote_prefill": False, "remote_tp_size": 4, **common}
    assert second == {"do_remote_decode": False, "do_remote_prefill": True, "remote_tp_size": 2, **common}


def test_what_prefill_answered_goes_to_decode_byte_for_byte() -> None:
    params = transfer_params(b'{"id":1,"kv_transfer_params":{"remote_block_ids":[[1,2]],"big":18446744073709551617}}')
    sent = decode_body(parse_body(b'{"prompt":"x"}'), params, Peer())
    assert b'{"remote_block_ids":[[1,2]],"big":18446744073709551617,"remote_dp_size":1}' in sent


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[1]}'])
def test_an_answer_without_transfer_params_is_a_protocol_error(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        transfer_params(answer)


def test_data_parallel_ranks_are_told_in_push() -> None:
    body, peer = parse_body(b'{"prompt":"x"}'), Peer(dp_size=4, tp_size=2, prefill_dp_rank=3)
    for content in (prefill_body(body, "tx-1", peer, in_push=True), decode_body(body, push_params("tx-1", peer), peer)):
        params = json.loads(content)["kv_transfer_params"]
        assert (params["remote_dp_size"], params["remote_dp_rank"], params["remote_tp_size"]) == (4, 3, 2)
    assert "remote_dp_rank" not in json.loads(prefill_body(body, "tx-1", peer, in_push=False))["kv_transfer_params"]


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (b'{"prompt":"x"}', None),
        (b'{"prompt":[1,2,3]}', None),
        (b'{"prompt":["a","b","c"]}', 3),
        (b'{"prompt":[[1],[2]]}', 2),
        (b'{"text":["a","b"]}', 2),
        (b'{"input_ids":[[1,2]]}', 1),
        (b'{"prompt":[]}', None),
        (b'{"messages":[{}]}', None),
    ],
)
def test_a_batch_is_told_from_a_list_of_tokens(content: bytes, size: int | None) -> None:
    assert parse_body(content).batch_size() == size


def test_a_bootstrap_body_has_a_room_for_each_prompt_and_the_clients_own_rooms_are_gone() -> None:
    body = parse_body(b'{"prompt":["a","b"],"bootstrap_room":7,"bootstrap_host":"evil","max_tokens":5}')
    sent = json.loads(bootstrap_body(body, "10.0.0.1", 8998, [11, 12]))
    assert sent["bootstrap_host"] == ["10.0.0.1"] * 2
    assert sent["bootstrap_port"] == [8998] * 2
    assert sent["bootstrap_room"] == [11, 12]
    assert sent["max_tokens"] == 5
    assert json.loads(bootstrap_body(body, "h", None, 9))["bootstrap_port"] is None


@pytest.mark.parametrize(("content", "priority"), [(b"{}", 0), (b'{"priority":-3}', -3), (b'{"priority":"x"}', 0)])
def test_priority(content: bytes, priority: int) -> None:
    assert parse_body(content).priority() == priority


def test_only_single_prompts_have_a_length() -> None:
    assert parse_body(b'{"prompt":"abcd"}').prompt_chars() == 6
    assert parse_body(b'{"messages":[{"content":"x"}]}').prompt_chars() == 17
    assert parse_body(b'{"prompt":["a","b"]}').prompt_chars() is None
    assert parse_body(b"{}").prompt_chars() is None
