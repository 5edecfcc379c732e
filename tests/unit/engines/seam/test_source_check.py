"""An address in a request is dialled only if a router with the cluster key has paired it, or the allow-list has it."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvbaton.config import Trust, parse_trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import AddressProof, RoomProof
from kvbaton.core.handoff import Incarnation, TransferId
from kvbaton.discovery.messages import Dispatch, InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.engines.handoff_params import (
    HandoffInfo,
    KVTransferParams,
    SourceCheck,
    SourceParams,
    TargetParams,
    answer_params,
    read_params,
)
from kvbaton.router.bodies import parse_body
from kvbaton.router.pair_request import Digits, new_pair_request
from kvbaton.router.policy import InstancePair

KEY, OTHER = b"a key of the cluster", b"the key of another one"
P, D = ControlAddress.of("10.0.0.1", 7001), ControlAddress.of("10.0.0.2", 7002)
CHECK = SourceCheck(Trust(KEY), D)


def routed(mode: TransferMode, key: bytes | None = KEY) -> tuple[KVTransferParams, str]:
    """What our router sends to the decode instance of a pair: its `kv_transfer_params`, and the request id."""
    prefill, decode = (
        Instance(Registration(type=kind, http_address="10.0.0.9:80", zmq_address=str(at), transfer_mode=mode), 0.0, 0.0)
        for kind, at in ((InstanceType.PREFILL, P), (InstanceType.DECODE, D))
    )
    pair = InstancePair(prefill, decode, cluster_key=key)
    request = new_pair_request("/v1/completions", parse_body(b'{"prompt":"x"}'), pair, b"", Digits())
    if mode is TransferMode.WRITE:
        sent = request.push_payload()
    else:
        answered = answer_params(SourceParams(TransferId(request.transfer_id)), HandoffInfo(P, Incarnation("p1")))
        sent = request.pull_payload(msgspec.json.encode({"kv_transfer_params": answered}))
    head, _, body = sent.partition(b"\r\n\r\n")
    request_id = next(line for line in head.decode().split("\r\n") if line.startswith("X-Request-Id: "))
    return msgspec.convert(json.loads(body)["kv_transfer_params"], KVTransferParams), request_id.partition(": ")[2]


def refusal(check: SourceCheck, params: KVTransferParams, request_id: str | None) -> str | None:
    asked = read_params(params, request_id)
    assert isinstance(asked, TargetParams)
    return check.refusal(asked)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("has_id", [True, False], ids=["request id", "no request id"])
def test_what_a_router_with_the_key_has_paired_is_dialled(mode: TransferMode, has_id: bool) -> None:
    """Also where the engine has lost the request id: the parameters name the source, and the instance knows itself."""
    params, request_id = routed(mode)
    assert refusal(CHECK, params, f"cmpl-{request_id}-0" if has_id else None) is None


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("key", [None, OTHER], ids=["no key", "another key"])
def test_what_another_router_has_paired_is_not(mode: TransferMode, key: bytes | None) -> None:
    params, request_id = routed(mode, key)
    problem = refusal(CHECK, params, request_id)
    assert problem is not None
    for part in ("address_proof", str(P), "--allow", "missing" if key is None else "does not fit"):
        assert part in problem


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_host": "10.6.6.6"},
        {"remote_port": 22},
        {"remote_notify_port": 22},
        {"transfer_id": "tx-another"},
        {"address_proof": "0" * 32},
        {"address_proof": "ä"},
        {"address_proof": ""},
        {"address_proof": None},
    ],
    ids=str,
)
def test_a_client_can_change_nothing_of_it(changed: dict[str, object]) -> None:
    params, _ = routed(TransferMode.WRITE)
    assert refusal(CHECK, params, None) is None
    assert refusal(CHECK, msgspec.structs.replace(params, **changed), None) is not None


def test_a_proof_for_another_instance_is_none() -> None:
    params, _ = routed(TransferMode.WRITE)
    assert refusal(SourceCheck(Trust(KEY), ControlAddress.of("10.0.0.3", 7002)), params, None) is not None


def test_the_allow_list_vouches_without_a_proof() -> None:
    """vllm-router has no key, so behind it operators name the hosts of their peers."""
    listed = Trust(KEY, parse_trust(allow=["10.0.0.0/24"]).allowed)
    params, request_id = routed(TransferMode.WRITE, None)
    assert refusal(SourceCheck(listed, D), params, request_id) is None
    elsewhere = msgspec.structs.replace(params, remote_host="10.0.1.1")
    problem = refusal(SourceCheck(listed, D), elsewhere, None)
    assert problem is not None
    assert "10.0.0.0/24" in problem


def test_without_a_key_the_agents_decide() -> None:
    params, request_id = routed(TransferMode.WRITE, None)
    assert refusal(SourceCheck(Trust(), D), params, request_id) is None


def test_a_proof_of_one_pair_costs_one_short_digest_per_transfer() -> None:
    """The router keeps one object per pair: it must give every transfer its own proof, in any order."""
    proof = AddressProof(KEY, P, D)
    first, second = proof.of("tx-1"), proof.of("tx-2")
    assert first != second
    assert proof.of("tx-1") == first == AddressProof(KEY, P, D).of("tx-1")


# Rooms of SGLang.

SGLANG_P = ControlAddress.of("10.0.0.9", 8998)


def rooms_for(body: bytes, key: bytes | None = KEY, bootstrap_port: int = 8998) -> list[int]:
    """The rooms that our router sends to the SGLang decode instance of a pair."""
    dispatch = {"dispatch": Dispatch.BOOTSTRAP}
    prefill, decode = (
        Instance(
            Registration(type=kind, http_address="10.0.0.9:80", zmq_address=str(at), transfer_mode=TransferMode.WRITE, **more),
            0.0,
            0.0,
        )
        for kind, at, more in (
            (InstanceType.PREFILL, P, {**dispatch, "bootstrap_port": bootstrap_port} if bootstrap_port else {}),
            (InstanceType.DECODE, D, dispatch),
        )
    )
    pair = InstancePair(prefill, decode, cluster_key=key)
    request = new_pair_request("/generate", parse_body(body), pair, b"", Digits())
    sent = json.loads(request.bootstrap_payload(decode).partition(b"\r\n\r\n")[2])
    rooms = sent["bootstrap_room"]
    return rooms if isinstance(rooms, list) else [rooms]


@pytest.mark.parametrize(("port", "source"), [(8998, SGLANG_P), (0, ControlAddress.of(P.host, P.handshake))])
@pytest.mark.parametrize("body", [b'{"text":"x"}', b'{"text":["x","y","z"]}'])
def test_rooms_of_a_router_with_the_key_prove_the_source(body: bytes, port: int, source: ControlAddress) -> None:
    rooms = rooms_for(body, bootstrap_port=port)
    assert all(0 < room < 1 << 63 for room in rooms)
    assert [CHECK.room_refusal(source, room) for room in rooms] == [None] * len(rooms)


@pytest.mark.parametrize("source", [P, D, ControlAddress.of("10.0.0.9", 8999), ControlAddress.of("10.0.0.10", 8998)])
def test_a_room_proves_no_other_source(source: ControlAddress) -> None:
    refusal = CHECK.room_refusal(source, rooms_for(b'{"text":"x"}')[0])
    assert refusal is not None
    assert source.host in refusal
    assert "--allow" in refusal


def test_a_room_of_another_router_of_a_client_or_for_another_decode_instance_is_refused() -> None:
    (room,) = rooms_for(b'{"text":"x"}')
    wrong = [
        1,
        5,
        (1 << 63) - 1,
        room + 1,
        room ^ (1 << 40),
        *rooms_for(b'{"text":"x"}', OTHER),
        *rooms_for(b'{"text":"x"}', None),
    ]
    assert all(CHECK.room_refusal(SGLANG_P, each) for each in wrong)
    assert SourceCheck(Trust(KEY), P).room_refusal(SGLANG_P, room) is not None


def test_the_allow_list_or_no_key_lets_every_room_pass() -> None:
    assert (
        SourceCheck(parse_trust(None, {"KVBATON_CLUSTER_KEY": KEY.decode()}, ["10.0.0.9"]), D).room_refusal(SGLANG_P, 5) is None
    )
    assert SourceCheck(Trust(), D).room_refusal(SGLANG_P, 5) is None


def test_rooms_are_not_used_twice() -> None:
    digits, proof = Digits(), RoomProof(KEY, P, D)
    assert len({proof.room(number) for number in range(1, 5000)}) == 4999
    prefill, decode = (
        Instance(Registration(type=kind, http_address="h:80", zmq_address=str(at), transfer_mode=TransferMode.WRITE), 0.0, 0.0)
        for kind, at in ((InstanceType.PREFILL, P), (InstanceType.DECODE, D))
    )
    template = InstancePair(prefill, decode, cluster_key=KEY).template
    assert len({digits.room(template) for _ in range(5000)}) == 5000
