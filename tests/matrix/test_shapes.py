"""A few shapes of the matrix, one of each kind, for every run of the tests; `make test-matrix` runs them all."""

from __future__ import annotations

import pytest
from shape_cases import check_all_well, verify, verify_text


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "mode"),
    [
        ("tiny-gqa4", "tp2", "tp4", "push"),
        ("tiny-mamba", "tp2", "pp2", "pull"),
        ("tiny-swa", "pp2", "tp1", "push"),
    ],
)
def test_every_answer_is_the_same(model: str, prefill: str, decode: str, mode: str) -> None:
    check_all_well(*verify(model, prefill, decode, "--mode", mode, requests=4))


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "drop"), [("tiny-mamba", "tp2", "tp1", "conv"), ("tiny-gqa8", "tp1", "tp2", "head:5")]
)
def test_a_control_that_leaves_one_thing_out_is_found_out(model: str, prefill: str, decode: str, drop: str) -> None:
    code, document = verify(model, prefill, decode, "--drop", drop, requests=4)
    assert code == 1
    assert document["different"] > 0
    assert document["handed_off"] == 4


def test_another_model_is_refused_with_both_values() -> None:
    run = verify_text("tiny-gqa2", "tp1", "tp1", "--decode-model", "tiny-gqa2:1", requests=1)
    assert run.returncode == 2
    assert "incompatible peer: model is" in run.stderr
    assert "tiny-gqa2 (" in run.stderr
    assert "tiny-gqa2:1 (" in run.stderr


def test_checksums_need_equal_shapes() -> None:
    check_all_well(*verify("tiny-mamba", "tp2", "tp2", "--integrity", "full", requests=3))
    run = verify_text("tiny-gqa2", "tp2", "tp1", "--integrity", "full", requests=1)
    assert run.returncode == 2
    assert "is 'tp1' here and 'tp2' there" in run.stderr


def test_a_model_that_cannot_be_cut_so_is_refused_with_both_values() -> None:
    run = verify_text("tiny-gqa6", "tp4", "tp2")
    assert run.returncode == 2
    assert "6 KV heads and tp is 4" in run.stderr
