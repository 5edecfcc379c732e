"""`kvbaton verify` with small models: its controls, each of which leaves one kind of thing out of every hand-off."""

from __future__ import annotations

import pytest
from vllm_shaped import drops_of
from vllm_verifying import verify

from kvbaton.core.handoff import Mode
from kvbaton.engines.vllm.setup.small_models import SMALL_MODELS

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]

REQUESTS = ("--requests", "8", "--longest-prompt", "500", "--max-tokens", "12")

CONTROLS = [
    ("small-llama", "tp2", "heads"),
    ("small-llama", "pp2", "layers"),
    ("small-mla", "tp1", "layers"),
    ("small-gemma3", "tp1", "layers"),
    ("small-granite4", "tp1", "state"),
    ("small-draft", "tp1", "draft"),
    ("small-eagle", "tp1", "draft"),
    ("small-mtp", "tp1", "draft"),
    ("small-llama4", "tp1", "layers"),
]


@pytest.mark.parametrize(("model", "shape", "drop"), CONTROLS)
def test_what_is_left_out_is_noticed(model: str, shape: str, drop: str) -> None:
    code, document = verify("--model", model, "--prefill-shape", shape, "--drop", drop, *REQUESTS)
    assert code == 1, document
    assert document["failed"] == 0, document["problems"]
    if drop == "draft":
        assert document["different"] == 0, "a draft changes no answer"
        assert document["accepted"] < document["accepted_alone"]
    else:
        assert document["different"] > 0


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("model", ["small-draft", "small-mtp"])
def test_a_draft_guesses_as_well_as_without_a_hand_off(model: str, mode: Mode) -> None:
    code, document = verify("--model", model, "--mode", mode, *REQUESTS)
    assert code == 0, document["problems"]
    assert document["accepted"] >= 0.9 * document["accepted_alone"] > 0


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("prefill", "decode"), [("dp2", "tp1"), ("tp1", "dp2")])
def test_requests_reach_the_data_parallel_rank_that_holds_their_cache(prefill: str, decode: str, mode: Mode) -> None:
    shapes = ("--model", "small-llama", "--prefill-shape", prefill, "--decode-shape", decode, "--mode", mode)
    code, document = verify(*shapes, *REQUESTS)
    assert code == 0, document["problems"]
    assert document["handed_off"] == document["requests"]


def test_controls_exist_for_every_kind_of_thing() -> None:
    assert {drop for *_, drop in CONTROLS} == {drop for model in SMALL_MODELS for drop in drops_of(model)}
