"""Instances of P2pNcclConnector: three fields, no mode and no parameters of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.router.bodies import parse_body
from kvbaton.router.pair_request import Digits, PairRequest, new_pair_request
from kvbaton.router.policy import InstancePair


def _instance(kind: InstanceType, host: str, mode: TransferMode) -> Instance:
    message = Registration(type=kind, http_address=f"{host}:8100", zmq_address=f"{host}:21001", transfer_mode=mode)
    return Instance(message, 0.0, 0.0)


def _request(mode: TransferMode) -> PairRequest:
    pair = InstancePair(_instance(InstanceType.PREFILL, "10.0.0.1", mode), _instance(InstanceType.DECODE, "10.0.0.2", mode))
    return new_pair_request("/v1/completions", parse_body(b'{"prompt": "x"}'), pair, b"", Digits())


def _body(payload: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(payload.partition(b"\r\n\r\n")[2])
    return content


@pytest.mark.parametrize("mode", TransferMode)
def test_both_addresses_are_in_the_request_id_as_they_were_registered(mode: TransferMode) -> None:
    request = _request(mode)
    assert b"X-Request-Id: ___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:21001_" in request.prefill_payload()
    assert b"X-Request-Id: ___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:21001_" in request.push_payload()


def test_in_pull_an_answer_without_parameters_will_do() -> None:
    request = _request(TransferMode.READ)
    body = _body(request.pull_payload(b'{"id": "x", "choices": []}'))
    assert body["kv_transfer_params"]["remote_host"] == "10.0.0.1"
    assert body["kv_transfer_params"]["remote_port"] == 21001
    assert _body(request.prefill_payload())["max_tokens"] == 1
