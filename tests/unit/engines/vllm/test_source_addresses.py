"""A vLLM with a cluster key dials the source that its router has paired with it, or that is on its allow-list, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_rig import BLOCK_TOKENS, D, P, Request, Rig, Status, target_params

from kvbaton.config import Trust, parse_trust
from kvbaton.core.auth import AddressProof
from kvbaton.engines.vllm.requests import SourceCheck

KEY = b"a key of the cluster"
NO_ID = "cmpl-of-a-client-0-1a2b3c4d"
PROOF = {"address_proof": AddressProof(KEY, P, D).of("tx-1")}
SOURCE = {"remote_host": P.host, "remote_port": P.handshake}
CALLED = {False: "expect_source", True: "decline"}


def asked(trust: Trust, request: Request) -> list[str]:
    """What the agents of a decode instance are asked for; the request is over afterwards, and nothing is left of it."""
    rig = Rig(is_source=False, sources=SourceCheck(trust, D))
    rig.scheduler.begin(request)
    rig.step()
    called = rig.port.names()
    if not request.abort_immediately:
        matched = rig.scheduler.matched_tokens(request, 0)
        assert matched == (request.num_prompt_tokens if called else BLOCK_TOKENS), "a load that can only fail takes one block"
        rig.scheduler.allocated(request, ((1, 2, 3),), matched)
        assert rig.step().failed == (set() if called else {request.request_id})
    request.status = Status.FINISHED_ERROR
    rig.scheduler.finish(request, ((1, 2, 3),))
    rig.step()
    assert rig.scheduler.live == 0
    return called


@pytest.mark.parametrize("refused", [False, True], ids=["admitted", "refused by vLLM"])
@pytest.mark.parametrize("more", [{}, {"request_id": NO_ID}], ids=["request id", "lost request id"])
def test_a_source_is_dialled_with_the_proof_of_the_router_only(refused: bool, more: dict[str, Any]) -> None:
    for proof, called in ((PROOF, [CALLED[refused]]), ({}, []), ({"address_proof": "0" * 32}, [])):
        request = Request({**target_params(), **SOURCE, **proof}, abort_immediately=refused, **more)
        assert asked(Trust(KEY), request) == called


@pytest.mark.parametrize("host", ["10.6.6.6", "localhost"])
def test_a_client_cannot_name_another_address_under_a_proof(host: str) -> None:
    params = {**target_params(), **SOURCE, **PROOF, "remote_host": host}
    assert asked(Trust(KEY), Request(params, request_id=NO_ID)) == []


@pytest.mark.parametrize(("network", "called"), [("127.0.0.0/8", ["expect_source"]), ("10.0.0.0/8", [])])
def test_behind_a_router_without_the_key_the_allow_list_decides(network: str, called: list[str]) -> None:
    assert asked(Trust(KEY, parse_trust(allow=[network]).allowed), Request(target_params())) == called


def test_without_a_key_nothing_is_required() -> None:
    assert asked(Trust(), Request(target_params())) == ["expect_source"]
