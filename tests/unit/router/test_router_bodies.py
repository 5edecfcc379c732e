"""The bodies that the two instances are sent: what is changed, what is not, and what is refused before any instance sees it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.errors import BadRequest, ProtocolError
from kvbaton.router.bodies import bootstrap_body, decode_body, parse_body, plain_body, prefill_body, transfer_params
from kvbaton.router.pair_template import PairTemplate

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_OURS = {"kv_transfer_params", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"}
_PARAMS = b'{"transfer_id":"tx-1"}'


def parse(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(prefill_body(parse_body(json.dumps(fields).encode()), _PARAMS))
    return body


def instance(kind: InstanceType, mode: TransferMode, host: str = "10.0.0.1", tp_size: int = 1, dp_size: int = 1) -> Instance:
    address = f"host:{host},handshake:7001,notify:7001"
    message = Registration(
        type=kind,
        http_address="10.0.0.1:80",
        zmq_address=address,
        transfer_mode=mode,
        tp_size=tp_size,
        dp_size=dp_size,
    )
    return Instance(message, 0.0, 0.0)


def params(mode: TransferMode, rank: int | None = None, host: str = "10.0.0.1") -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a prefill instance with tp 2 and of a decode instance with tp 4, in push."""
    prefill = instance(InstanceType.PREFILL, mode, host, tp_size=2, dp_size=4 if rank is not None else 1)
    template = PairTemplate(prefill, instance(InstanceType.DECODE, mode, tp_size=4), rank, None)
    return json.loads(template.prefill_params.under("tx-1")), json.loads(template.push_params.under("tx-1"))


@given(
    st.dictionaries(st.text(max_size=8).filter(lambda k: k not in _OURS and not k.startswith("bootstrap_")), _JSON, max_size=5)
)
def test_what_is_not_ours_arrives_unchanged_on_both_sides(fields: dict[str, Any]) -> None:
    body = parse_body(json.dumps(fields).encode())
    first, second = json.loads(prefill_body(body, _PARAMS)), json.loads(decode_body(body, _PARAMS))
    assert {k: v for k, v in first.items() if k not in _OURS} == fields
    assert {k: v for k, v in second.items() if k not in _OURS} == fields
    assert first["kv_transfer_params"] == second["kv_transfer_params"] == {"transfer_id": "tx-1"}
    assert json.loads(plain_body(body)) == fields


@given(st.dictionaries(st.text(max_size=4), _JSON, max_size=4), st.sampled_from(["", " ", "\n", "\r\n\t "]))
def test_decode_gets_the_bytes_that_the_client_sent(fields: dict[str, Any], gap: str) -> None:
    content = json.dumps({**fields, "prompt": "x"}, indent=2).encode() + gap.encode()
    body = parse_body(content)
    assert plain_body(body) == content
    assert decode_body(body, _PARAMS).startswith(content.rstrip()[:-1])
    assert json.loads(decode_body(body, _PARAMS)) == {**fields, "prompt": "x", "kv_transfer_params": {"transfer_id": "tx-1"}}


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv_transfer_param\\u0073", "bootstrap_room", "bootstrap_host"])
def test_what_chooses_peers_is_taken_out_however_it_is_spelt(name: str) -> None:
    """The control to the test above: such a body does not go on as it came, not even when the name comes twice."""
    body = parse_body(
        b'{"%b":{"transfer_id":"evil"},"prompt":"x","%b":{"transfer_id":"evil"}}' % (name.encode(), name.encode())
    )
    for content in (plain_body(body), decode_body(body, _PARAMS), prefill_body(body, _PARAMS)):
        assert b"evil" not in content
    assert json.loads(decode_body(body, _PARAMS)) == {"prompt": "x", "kv_transfer_params": {"transfer_id": "tx-1"}}


def test_an_empty_object_is_a_body() -> None:
    assert json.loads(decode_body(parse_body(b"{ }"), _PARAMS)) == {"kv_transfer_params": {"transfer_id": "tx-1"}}


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_a_bad_request(content: bytes) -> None:
    with suppress(BadRequest):
        body = parse_body(content)
        json.loads(prefill_body(body, _PARAMS).decode(errors="replace"))
        json.loads(decode_body(body, _PARAMS).decode(errors="replace"))


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


def test_a_prompt_that_is_only_scored_needs_no_answer() -> None:
    """The decode instance is asked as the client asks, the prefill instance for the one token that it has to compute."""
    body = parse_body(b'{"prompt":"x","echo":true,"logprobs":1,"max_tokens":0}')
    assert json.loads(decode_body(body, _PARAMS))["max_tokens"] == 0
    assert json.loads(prefill_body(body, _PARAMS))["max_tokens"] == 1


@pytest.mark.parametrize("content", [b'{"echo":true,"max_tokens":-1}', b'{"echo":false,"max_tokens":0}'])
def test_echo_excuses_nothing_else(content: bytes) -> None:
    with pytest.raises(BadRequest, match="max_tokens is"):
        parse_body(content)


@pytest.mark.parametrize("value", [1, 0, "true", []])
def test_stream_must_be_a_truth_value(value: object) -> None:
    with pytest.raises(BadRequest, match="stream"):
        parse(stream=value)


def test_null_means_absent() -> None:
    body = parse_body(b'{"stream":null,"max_tokens":null}')
    assert not body.stream
    assert json.loads(decode_body(body, _PARAMS))["max_tokens"] is None


@pytest.mark.parametrize(("given_value", "sent"), [(0, 0), (1, 1), (7, 1)])
def test_min_tokens_is_clamped(given_value: int, sent: int) -> None:
    assert parse(min_tokens=given_value)["min_tokens"] == sent


def test_max_completion_tokens_is_only_sent_where_it_was_given() -> None:
    assert "max_completion_tokens" not in parse(prompt="x")
    assert parse(max_completion_tokens=5)["max_completion_tokens"] == 1
    assert parse(max_completion_tokens=5)["max_tokens"] == 1


def test_in_push_both_sides_know_the_transfer_and_the_size_of_the_other_side() -> None:
    first, second = params(TransferMode.WRITE)
    common = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": "tx-1", "remote_dp_size": 1}
    assert first == {"do_remote_decode": True, "do_remote_prefill": False, "remote_tp_size": 4, **common}
    where = {"remote_host": "10.0.0.1", "remote_port": 7001}
    assert second == {"do_remote_decode": False, "do_remote_prefill": True, "remote_tp_size": 2, **where, **common}


def test_in_pull_prefill_gets_no_sizes_of_ranks() -> None:
    assert "remote_tp_size" not in params(TransferMode.READ)[0]


@pytest.mark.parametrize("host", ["::1", "fe80::1", "prefill-0.local", "127.0.0.1"])
def test_in_push_decode_gets_the_address_of_its_source_that_the_request_id_has(host: str) -> None:
    assert params(TransferMode.WRITE, host=host)[1]["remote_host"] == host


def test_what_prefill_answered_goes_to_decode_byte_for_byte() -> None:
    answer = b'{"id":1,"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_dp_size":9,"big":18446744073709551617}}'
    sent = decode_body(parse_body(b'{"prompt":"x"}'), transfer_params(answer, 2))
    assert sent == (
        b'{"prompt":"x","kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_dp_size":2,"big":18446744073709551617}}'
    )


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[1]}'])
def test_an_answer_without_transfer_params_is_a_protocol_error(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        transfer_params(answer, 1)


def test_data_parallel_ranks_are_sent_in_push() -> None:
    first, second = params(TransferMode.WRITE, rank=3)
    assert (first["remote_dp_size"], first["remote_dp_rank"], first["remote_tp_size"]) == (1, 3, 4)
    assert (second["remote_dp_size"], second["remote_dp_rank"], second["remote_tp_size"]) == (4, 3, 2)
    assert "remote_dp_rank" not in params(TransferMode.READ, rank=3)[0]


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
def test_a_batch_is_distinguished_from_a_list_of_tokens(content: bytes, size: int | None) -> None:
    assert parse_body(content).batch_size() == size


def test_a_bootstrap_body_has_a_room_for_each_prompt_and_the_clients_own_rooms_are_gone() -> None:
    body = parse_body(b'{"prompt":["a","b"],"bootstrap_room":7,"bootstrap_host":"evil","max_tokens":5}')
    sent = json.loads(bootstrap_body(body, "10.0.0.1", 8998, [11, 12]))
    assert sent["bootstrap_host"] == ["10.0.0.1"] * 2
    assert sent["bootstrap_port"] == [8998] * 2
    assert sent["bootstrap_room"] == [11, 12]
    assert sent["max_tokens"] == 5
    assert json.loads(bootstrap_body(body, "h", None, 9))["bootstrap_port"] is None


@pytest.mark.parametrize(
    ("content", "priority"),
    [(b"{}", 0), (b'{"priority":-3}', -3), (b'{"priority":"x"}', 0), (b'{"priority":1e400}', 0), (b'{"priority":"\xff"}', 0)],
)
def test_priority(content: bytes, priority: int) -> None:
    assert parse_body(content).priority() == priority


def test_only_single_prompts_have_a_length() -> None:
    assert parse_body(b'{"prompt":"abcd"}').prompt_chars() == 6
    assert parse_body(b'{"messages":[{"content":"x"}]}').prompt_chars() == 17
    assert parse_body(b'{"prompt":["a","b"]}').prompt_chars() is None
    assert parse_body(b"{}").prompt_chars() is None


@pytest.mark.parametrize("params", ['{"a": "}"}', "{}", "{ }", '{"remote_dp_size": 9, "address_proof": "x"}', '{"b": [{}] }'])
@pytest.mark.parametrize("proof", ["", "00ff"])
def test_decode_gets_what_prefill_answered_and_each_added_field_once(params: str, proof: str) -> None:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in found}) == len(found)
        return dict(found)

    given = transfer_params(b'{"kv_transfer_params": %b}' % params.encode(), 2, proof)
    added = {"remote_dp_size": 2} | ({"address_proof": proof} if proof else {})
    assert json.loads(given, object_pairs_hook=pairs) == json.loads(params) | added
