"""256 requests at once, and requests whose clients leave, between real vLLMs of two ranks each: as with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from vllm_handing import Pair
from vllm_loading import assert_control_shows_at_load, assert_many_at_once, assert_nothing_grows
from vllm_shaped import ShapeCase, Singles, shaped_pair

from kvbaton.core.handoff import Mode

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    case = ShapeCase("small-llama", "tp2", "tp2", request.param)
    with ExitStack() as kept, shaped_pair(case, Singles(kept).of(case.model)) as running:
        yield running


def test_after_300_requests_of_which_a_tenth_is_aborted_nothing_has_grown(pair: Pair) -> None:
    assert_nothing_grows(pair)


def test_256_at_once_are_all_answered_as_by_one_server(pair: Pair) -> None:
    assert_many_at_once(pair, 256)


def test_the_control_at_this_load_wrong_bytes_show(pair: Pair) -> None:
    assert_control_shows_at_load(pair)
