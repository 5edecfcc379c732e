"""A few shapes of the matrix, one of each kind, and what is refused.

Every run of the tests has one pair and one control; `make test-matrix` has a sample of the rest, `make test-matrix-full` all.
"""

from __future__ import annotations

import pytest
from shape_cases import check_all_well, verify, verify_text

_SHAPES = (pytest.mark.matrix, pytest.mark.sampled(2, group="a few shapes"))


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "mode"),
    [
        pytest.param("tiny-gqa4", "tp2", "tp4", "push", marks=_SHAPES),
        ("tiny-mamba", "tp2", "pp2", "pull"),
        pytest.param("tiny-swa", "pp2", "tp1", "push", marks=_SHAPES),
    ],
)
def test_every_answer_is_the_same(model: str, prefill: str, decode: str, mode: str) -> None:
    check_all_well(*verify(model, prefill, decode, "--mode", mode, requests=4))


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "drop"),
    [pytest.param("tiny-mamba", "tp2", "tp1", "conv", marks=_SHAPES), ("tiny-gqa8", "tp1", "tp2", "head:5")],
)
def test_a_control_that_leaves_one_thing_out_is_detected(model: str, prefill: str, decode: str, drop: str) -> None:
    code, document = verify(model, prefill, decode, "--drop", drop, requests=4)
    assert code == 1
    assert document["different"] > 0
    assert document["handed_off"] == 4


def _refusal(model: str, prefill: str, decode: str, *more: str) -> str:
    """The error of a verify that could not be run: in one line, whatever the width of the terminal."""
    run = verify_text(model, prefill, decode, *more, requests=2)
    assert run.returncode == 2, run.stdout
    return " ".join(run.stderr.split())


@pytest.mark.matrix
@pytest.mark.sampled(2, group="refusals")
def test_another_type_is_refused_with_both_values() -> None:
    error = _refusal("tiny-gqa2", "tp1", "tp1", "--decode-cache-dtype", "float16")
    assert "layout group 0 (full) plane k dtype is 'float32' here and 'float16' there" in error


@pytest.mark.matrix
@pytest.mark.sampled(2, group="refusals")
def test_a_gap_in_the_layers_is_refused_with_both_values() -> None:
    error = _refusal("tiny-gqa2", "tp1", "pp2", "--decode-lacks", "layer:2", "--mode", "pull")
    assert "no rank holds layers 2: there is a gap in the layers" in error
    assert "'whole'" in error


@pytest.mark.matrix
@pytest.mark.sampled(2, group="refusals")
def test_other_dimensions_of_a_state_are_refused_with_both_values() -> None:
    error = _refusal("tiny-mamba", "tp2", "tp1", "--decode-model", "tiny-mamba@conv_taps=6")
    assert "layout group 1 (conv) plane conv head_size 40' here" in error
    assert "layout group 1 (conv) plane conv head_size 24' there" in error


def test_a_control_that_would_leave_out_nothing_is_refused() -> None:
    assert "tiny-gqa2 has nothing of that kind" in _refusal("tiny-gqa2", "tp1", "tp2", "--drop", "conv")


@pytest.mark.matrix
@pytest.mark.sampled(2, group="refusals")
def test_another_model_is_refused_with_both_values() -> None:
    run = verify_text("tiny-gqa2", "tp1", "tp1", "--decode-model", "tiny-gqa2:1", requests=1)
    assert run.returncode == 2
    assert "incompatible peer: model is" in run.stderr
    assert "tiny-gqa2 (" in run.stderr
    assert "tiny-gqa2:1 (" in run.stderr


@pytest.mark.matrix
@pytest.mark.sampled(2, group="a few shapes")
def test_what_unequal_shapes_move_can_be_checked_by_checksums() -> None:
    check_all_well(*verify("tiny-mamba", "tp2", "tp1", "--integrity", "full", requests=3))


@pytest.mark.matrix
@pytest.mark.sampled(2, group="a few shapes")
def test_a_thing_that_is_left_out_is_found_by_checksums_and_nothing_is_decoded() -> None:
    code, document = verify("tiny-mamba", "tp1", "tp2", "--integrity", "full", "--drop", "conv", requests=3)
    assert code == 1
    assert document["failed"] == 3
    assert all("checksum of span" in row["detail"] for row in document["rows"])


def test_a_model_that_cannot_be_cut_so_is_refused_with_both_values() -> None:
    run = verify_text("tiny-gqa6", "tp4", "tp2")
    assert run.returncode == 2
    assert "6 KV heads and tp is 4" in run.stderr
