"""How `kv_transfer_params` and X-Request-Id become hand-offs, and what a source answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import INFO, Reply, ScriptedEngine, run, serving

from kvbaton.core.addresses import ControlAddress, make_request_id, parse_request_id
from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.engines.embedded.request import FromSource, ToTarget, handoff_of
from kvbaton.engines.handoff_params import KVTransferParams, SourceParams, TargetParams, answer_params, read_params
from kvbaton.errors import BadRequest

P = ControlAddress.of("127.0.0.1", 6301)
D = ControlAddress.of("127.0.0.1", 7301)
REQUEST_ID = make_request_id(str(P), str(D), "0" * 32)
FOREIGN_ID = make_request_id("127.0.0.1:5555", "127.0.0.1:6666", "0" * 32)


def replied(engine: ScriptedEngine, params: object, request_id: str | None = None, **fields: object) -> Reply:
    async def work() -> Reply:
        async with serving(engine, role="decode") as client:
            headers = {"X-Request-Id": request_id} if request_id else None
            reply = await client.complete(headers, kv_transfer_params=params, **fields)
            assert (await client.complete()).status == 200
            return reply

    return run(work())


def test_source_answers_with_what_the_target_needs() -> None:
    engine = ScriptedEngine()
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "tx-1", "remote_block_ids": None}
    body = replied(engine, params, REQUEST_ID, max_tokens=1).json
    assert body["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "tx-1",
        "remote_engine_id": "inc-p",
        "remote_host": "127.0.0.1",
        "remote_port": 6301,
        "remote_block_ids": None,
        "tp_size": 1,
        "remote_dp_rank": 0,
    }
    assert engine.submitted[0].handoff == ToTarget(HandoffKey(TransferId("tx-1"), 0, 0))
    assert engine.submitted[0].sampling.max_tokens == 1
    assert body["kvbaton"]["handed_off"] is True


@pytest.mark.parametrize("wrapped", ["{}", "cmpl-{}", "chatcmpl-{}-0", "cmpl-{}-0-0123abcd"])
def test_a_source_finds_its_target_in_the_request_id(wrapped: str) -> None:
    params = read_params(KVTransferParams(do_remote_decode=True, transfer_id="tx-1"), wrapped.format(REQUEST_ID))
    assert isinstance(params, SourceParams)
    assert params.target() == parse_request_id(REQUEST_ID)[1]


@pytest.mark.parametrize("request_id", [None, "", "plain", "___prefill_addr_x___decode_addr_y_" + 32 * "0"])
def test_a_source_does_without_an_address(request_id: str | None) -> None:
    params = read_params(KVTransferParams(do_remote_decode=True, transfer_id="tx-1"), request_id)
    assert params == SourceParams(TransferId("tx-1"))
    assert params.target() is None


def test_each_prompt_and_sample_has_its_own_key() -> None:
    engine = ScriptedEngine()
    replied(engine, {"do_remote_decode": True, "transfer_id": "t"}, prompt=["x", "y"], n=2, max_tokens=1)
    keys = [r.handoff.key for r in engine.submitted[:4] if r.handoff]
    assert [(key.transfer_id, key.prompt_index, key.sample_index) for key in keys] == [
        ("t", 0, 0),
        ("t", 0, 1),
        ("t", 1, 0),
        ("t", 1, 1),
    ]


def test_missing_transfer_id_is_made_and_returned() -> None:
    engine = ScriptedEngine()
    made = replied(engine, {"do_remote_decode": True}).json["kv_transfer_params"]["transfer_id"]
    assert made.startswith("auto-")
    assert len(made) == len("auto-") + 32
    assert engine.submitted[0].handoff == ToTarget(HandoffKey(TransferId(made)))


def test_stream_of_a_source_carries_the_params_at_its_end() -> None:
    reply = replied(ScriptedEngine(), {"do_remote_decode": True, "transfer_id": "t"}, stream=True, max_tokens=2)
    first, last, _ = reply.events
    assert "kv_transfer_params" not in first
    assert last["kv_transfer_params"]["transfer_id"] == "t"


@pytest.mark.parametrize("params", [None, {}, {"remote_dp_size": 1}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_without_a_flag_the_request_is_plain(params: object) -> None:
    engine = ScriptedEngine()
    assert "kv_transfer_params" not in replied(engine, params, REQUEST_ID).json
    assert engine.submitted[0].handoff is None


def test_target_takes_the_address_from_the_request_id() -> None:
    engine = ScriptedEngine()
    params = {"do_remote_prefill": True, "transfer_id": "tx", "remote_engine_id": None, "remote_dp_size": 1}
    assert "kv_transfer_params" not in replied(engine, params, REQUEST_ID).json
    assert engine.submitted[0].handoff == FromSource(HandoffKey(TransferId("tx")), P, None)


def test_target_understands_what_a_source_answers() -> None:
    engine = ScriptedEngine()
    params = {**answer_params(SourceParams(TransferId("tx")), INFO), "remote_dp_size": 1}
    assert replied(engine, params, REQUEST_ID).status == 200
    assert engine.submitted[0].handoff == FromSource(HandoffKey(TransferId("tx")), P, Incarnation("inc-p"))


@pytest.mark.parametrize(("size", "is_odd"), [(None, False), (1, False), (2, True), (0, True)])
def test_a_wrong_size_of_a_router_is_logged_and_does_no_harm(
    size: int | None, is_odd: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    params = {"do_remote_prefill": True, "transfer_id": "tx", "remote_dp_size": size}
    assert replied(engine, params, REQUEST_ID).status == 200
    assert ("--intra-node-data-parallel-size 1" in caplog.text) is is_odd


def test_a_rank_that_a_router_makes_up_leaves_the_address_of_its_source_alone() -> None:
    """vllm-router numbers ranks by its own options; an embedded instance has one, at the address in the request id."""
    params = KVTransferParams(do_remote_prefill=True, transfer_id="t", remote_dp_rank=1)
    plain = KVTransferParams(do_remote_prefill=True, transfer_id="t")
    assert read_params(params, REQUEST_ID) == read_params(plain, REQUEST_ID)
    assert read_params(params, REQUEST_ID, has_dp_ranks=True) != read_params(plain, REQUEST_ID, has_dp_ranks=True)


@pytest.mark.parametrize("request_id", [None, "plain-id", FOREIGN_ID])
def test_target_falls_back_to_the_body(request_id: str | None) -> None:
    params = KVTransferParams(do_remote_prefill=True, transfer_id="t", remote_host="::1", remote_port=7)
    assert read_params(params, request_id) == TargetParams(TransferId("t"), ControlAddress.of("::1", 7), None)


def test_two_ports_are_accepted() -> None:
    params = KVTransferParams(
        do_remote_prefill=True, transfer_id="t", remote_host="h", remote_handshake_port=7, remote_notify_port=8
    )
    wish = read_params(params, None)
    assert isinstance(wish, TargetParams)
    assert wish.source == ControlAddress("h", 7, 8)


WRONG: list[tuple[dict[str, object], str | None, str, str]] = [
    ({"do_remote_decode": True, "transfer_id": 5}, None, "transfer_id", "int"),
    ({"do_remote_decode": True, "transfer_id": ""}, None, "transfer_id", "0 characters"),
    ({"do_remote_decode": True, "transfer_id": "x" * 257}, None, "transfer_id", "257"),
    ({"do_remote_decode": True, "do_remote_prefill": True}, None, "do_remote_prefill", "both"),
    ({"do_remote_prefill": True}, REQUEST_ID, "transfer_id", "missing"),
    ({"do_remote_prefill": 1, "transfer_id": "t"}, REQUEST_ID, "do_remote_prefill", "int"),
    ({"do_remote_prefill": True, "transfer_id": "t"}, None, "remote_host", "X-Request-Id"),
    ({"do_remote_prefill": True, "transfer_id": "t"}, "plain-id", "remote_host", "plain-id"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h"}, None, "remote_port", "missing"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "", "remote_port": 1}, None, "remote_host", "''"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "a b", "remote_port": 1}, None, "remote_host", "a b"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "a,b:1", "remote_port": 1}, None, "remote_host", "a,b"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": 5, "remote_port": 1}, None, "remote_host", "int"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": "1"}, None, "remote_port", "str"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": 0}, None, "remote_port", "0"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": 70000}, None, "remote_port", "70000"),
    ({"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": 3}, REQUEST_ID, "remote_engine_id", "int"),
    ({"do_remote_prefill": True, "transfer_id": "t", "tp_size": "2"}, REQUEST_ID, "tp_size", "str"),
    (
        {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "other", "remote_port": 1},
        REQUEST_ID,
        "remote_host",
        "other",
    ),
]


def test_every_wrong_key_is_named_and_the_engine_unharmed() -> None:
    engine = ScriptedEngine()

    async def work() -> None:
        async with serving(engine) as client:
            for params, request_id, key, shown in WRONG:
                headers = {"X-Request-Id": request_id} if request_id else None
                reply = await client.complete(headers, kv_transfer_params=params)
                assert (reply.status, reply.error["param"]) == (400, f"kv_transfer_params.{key}"), params
                assert shown in reply.error["message"], reply.error
            assert engine.submitted == []
            assert (await client.complete()).status == 200

    run(work())


def test_disagreement_names_both_addresses() -> None:
    params = KVTransferParams(do_remote_prefill=True, transfer_id="t", remote_host="127.0.0.1", remote_port=1)
    with pytest.raises(BadRequest, match=r"handshake:1,.*handshake:6301,"):
        read_params(params, REQUEST_ID)


def test_instance_without_hand_off_refuses() -> None:
    async def work() -> Reply:
        async with serving(ScriptedEngine(), handoff=None) as client:
            return await client.complete(kv_transfer_params={"do_remote_decode": True})

    reply = run(work())
    assert (reply.status, reply.error["param"]) == (400, "kv_transfer_params")


@given(
    st.builds(
        KVTransferParams,
        do_remote_decode=st.none() | st.booleans(),
        do_remote_prefill=st.none() | st.booleans(),
        transfer_id=st.none() | st.text(max_size=300),
        remote_engine_id=st.none() | st.text(max_size=5),
        remote_host=st.none() | st.text(max_size=20),
        remote_port=st.none() | st.integers(-1, 70000),
        remote_handshake_port=st.none() | st.integers(),
        remote_notify_port=st.none() | st.integers(),
    ),
    st.none() | st.text(max_size=30) | st.just(REQUEST_ID) | st.just(FOREIGN_ID),
)
def test_whatever_comes_is_understood_or_refused(params: KVTransferParams, request_id: str | None) -> None:
    refusal, wish = None, None
    try:
        wish = read_params(params, request_id)
    except BadRequest as error:
        refusal = error.field
    assert refusal is None or refusal.startswith("kv_transfer_params.")
    if isinstance(wish, TargetParams):
        assert 0 < wish.source.handshake < 65536
        assert handoff_of(wish, 1, 2).key.sample_index == 2
    assert (wish is None and refusal is None) == (not params.do_remote_decode and not params.do_remote_prefill)
