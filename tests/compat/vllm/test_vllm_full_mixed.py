"""Two releases of vLLM in one pair, in both directions: a fleet can be upgraded instance by instance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from vllm_handing import Pair, together
from vllm_servers import Server, ServerSpec, starting
from vllm_shaped import LIMITS, VOCABULARY, assert_control_shows, assert_same_answers

from kvbaton.core.handoff import Mode
from kvbaton.engines.vllm.setup.environment import VLLM_VERSION

pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(3600)]

MODEL = "small-llama"
BEFORE = "0.31.0"
DIRECTIONS = [(BEFORE, VLLM_VERSION), (VLLM_VERSION, BEFORE)]
Fleet = dict[tuple[str, str], Server]


@pytest.fixture(scope="module", params=list(Mode), ids=str)
def fleet(request: pytest.FixtureRequest) -> Iterator[tuple[Mode, Fleet]]:
    """A prefill and a decode server of each release, and a plain one of the newer, by role and release."""
    mode: Mode = request.param
    roles = [("single", "both", VLLM_VERSION)]
    roles += [(role, role, release) for release in (BEFORE, VLLM_VERSION) for role in ("prefill", "decode")]
    found: Fleet = {}
    with ExitStack() as kept:
        for name, role, release in roles:
            spec = ServerSpec(name, role, mode, settings=LIMITS, holds=True, model=MODEL, forks=True)
            (found[name, release],) = kept.enter_context(starting(spec, version=release))
        for server in found.values():
            server.wait()
        yield mode, found


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_answers_are_those_of_one_server_and_the_control_shows(fleet: tuple[Mode, Fleet], source: str, target: str) -> None:
    mode, found = fleet
    pair = Pair(mode, found["prefill", source], found["decode", target], found["single", VLLM_VERSION], vocabulary=VOCABULARY)
    assert f"v{source}" in pair.prefill.log()
    assert f"v{target}" in pair.decode.log()
    together(pair, assert_same_answers)
    together(pair, assert_control_shows)
    pair.assert_alive()
