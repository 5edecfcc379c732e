"""What a vLLM request wants: keys from its id, the source from its id or its parameters, a digest of its prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm_rig import EXTERNAL_ID, Request, source_params, target_params

from kvbaton.core.handoff import Mode
from kvbaton.engines.vllm.requests import indices, named, prompt_digest, read_wish

IDS = {
    f"cmpl-{EXTERNAL_ID}-0-1a2b3c4d": (0, 0),
    f"cmpl-{EXTERNAL_ID}-3-12345678": (3, 0),
    f"cmpl-{EXTERNAL_ID}-3": (3, 0),
    f"2_cmpl-{EXTERNAL_ID}-1-1a2b3c4d": (1, 2),
    f"11_chatcmpl-{EXTERNAL_ID}-1a2b3c4d": (0, 11),
    f"chatcmpl-{EXTERNAL_ID}-12345678": (0, 0),
    f"chatcmpl-{EXTERNAL_ID}": (0, 0),
    "": (0, 0),
}


@pytest.mark.parametrize("request_id", IDS)
def test_prompt_and_sample_come_from_the_id(request_id: str) -> None:
    assert indices(request_id) == IDS[request_id]


def test_both_sides_have_the_same_key_although_vllm_renames_them() -> None:
    source = read_wish(Request(source_params(), request_id=f"1_cmpl-{EXTERNAL_ID}-2-aaaaaaaa"), Mode.PUSH)
    target = read_wish(Request(target_params(), request_id=f"1_cmpl-{EXTERNAL_ID}-2-bbbbbbbb"), Mode.PUSH)
    assert source is not None
    assert target is not None
    assert source.key == target.key
    assert target.wanted is not None
    assert prompt_digest(Request(None)) == target.wanted.prompt


def test_the_digest_sees_tokens_images_and_adapters() -> None:
    plain = Request(None)
    other = Request(None, prompt_token_ids=(1, 2))
    image, adapter = Request(None), Request(None)
    image.mm_features = [SimpleNamespace(identifier="cat")]  # type: ignore[attr-defined]
    adapter.lora_request = SimpleNamespace(lora_name="poet")  # type: ignore[attr-defined]
    assert len({prompt_digest(request) for request in (plain, other, image, adapter)}) == 4
    assert prompt_digest(plain) == prompt_digest(Request(None))


def test_a_prompt_without_token_ids_cannot_be_handed_off() -> None:
    wish = read_wish(Request(source_params(), prompt_token_ids=None), Mode.PUSH)
    assert wish is not None
    assert "without token ids" in wish.problem


def test_log_lines_name_the_transfer() -> None:
    assert named(Request(source_params("tx-9"), request_id="r")) == "request r (transfer tx-9)"
    assert named(Request({"transfer_id": 7}, request_id="r")) == "request r (no transfer id)"
    assert len(named(Request(source_params("x" * 10_000), request_id="r"))) < 400
