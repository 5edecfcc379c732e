"""From every shape to every shape, in both modes: the same answers as one instance, and every control detected.

`make test-matrix` runs a sample that changes with the commit, `make test-matrix-full` all of them.
"""

from __future__ import annotations

import pytest
from shape_cases import CONTROLS, OTHERS, SHAPES, VARIANTS, check_all_well, verify

pytestmark = pytest.mark.matrix


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("model", "prefill", "decode"), SHAPES + OTHERS)
def test_every_answer_is_the_same(model: str, prefill: str, decode: str, mode: str) -> None:
    check_all_well(*verify(model, prefill, decode, "--mode", mode))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("model", "prefill", "decode", "drop"), CONTROLS)
def test_a_control_that_leaves_one_thing_out_is_detected(model: str, prefill: str, decode: str, drop: str, mode: str) -> None:
    code, document = verify(model, prefill, decode, "--drop", drop, "--mode", mode)
    assert code == 1
    assert document["different"] > 0
    assert (document["handed_off"], document["failed"]) == (document["requests"], 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "prefill", "decode", "more"), VARIANTS)
def test_other_seeds_sizes_types_and_transports(model: str, prefill: str, decode: str, more: tuple[str, ...]) -> None:
    check_all_well(*verify(model, prefill, decode, *more))
