"""A few of the shapes of `test_vllm_shapes.py`, for every commit: one of them with `--sample`."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from vllm_handing import together
from vllm_shaped import ShapeCase, Singles, assert_control_shows, assert_same_answers, shaped_pair

from kvbaton.core.handoff import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CASES = (
    ShapeCase("small-llama", "tp2", "tp1", Mode.PULL),
    ShapeCase("small-llama", "tp1", "tp2", Mode.PUSH),
    ShapeCase("small-gptoss", "tp1", "tp1", Mode.PUSH),
    ShapeCase("small-falcon-h1", "tp1", "tp1", Mode.PULL),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_answer_is_that_of_one_plain_server_and_the_control_shows(case: ShapeCase) -> None:
    with ExitStack() as kept, shaped_pair(case, Singles(kept).of(case.model)) as pair:
        together(pair, assert_same_answers)
        together(pair, assert_control_shows)
