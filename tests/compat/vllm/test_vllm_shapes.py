"""Real vLLMs of unequal shapes, with small models of every kind of cache: the answers are those of one plain vLLM.

Every pair has a control on the same servers: with nothing copied, answers differ. Controls that leave out one kind of thing
(`kvbaton verify --drop`) are in `test_vllm_shapes_controls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from vllm_handing import Pair, together
from vllm_shaped import KIND_CASES, LLAMA_CASES, Servers, ShapeCase, Singles, assert_control_shows, assert_same_answers

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def singles() -> Iterator[Singles]:
    with ExitStack() as kept:
        yield Singles(kept)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as kept:
        yield Servers(kept)


@pytest.fixture(scope="module", params=[*LLAMA_CASES, *KIND_CASES], ids=str)
def pair(request: pytest.FixtureRequest, servers: Servers, singles: Singles) -> Pair:
    case: ShapeCase = request.param
    return servers.pair(case, singles.of(case.model))


def test_every_answer_is_that_of_one_plain_server(pair: Pair) -> None:
    together(pair, assert_same_answers)
    pair.assert_alive()


def test_control_nothing_copied_shows(pair: Pair) -> None:
    together(pair, assert_control_shows)
