"""The release of vLLM before the one that the connector is made for: the same answers as one server of that release."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_checks import run_checks
from vllm_handing import Client, Pair, prompt_of, together
from vllm_servers import ServerSpec, servers

from kvbaton.core.handoff import Mode

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(5400)]

RELEASE = "0.31.0"
LENGTHS = (1, 5, 127, 128, 129, 300, 600)


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    sides = [ServerSpec(role, role, request.param, holds=True) for role in ("prefill", "decode")]
    with servers(*sides, ServerSpec("single", "both"), version=RELEASE) as (prefill, decode, single):
        yield Pair(request.param, prefill, decode, single)


def test_answers_are_those_of_one_server(pair: Pair) -> None:
    together(pair, lambda client: client.assert_serves(*(prompt_of(length) for length in LENGTHS)))
    pair.wait_idle()
    assert f"v{RELEASE}" in pair.decode.log()


def test_the_control_a_decoder_that_receives_nothing_answers_wrongly(pair: Pair) -> None:
    async def send(client: Client) -> None:
        prompt = prompt_of(200, "control")
        with pair.decode.holding("drop"):
            given = await client.hand_off(prompt)
        assert given.answer.tokens != (await client.alone(prompt)).answer.tokens

    together(pair, send)
    pair.wait_idle()


def test_the_connector_under_the_scheduler_of_that_release() -> None:
    found = run_checks(RELEASE)
    assert found
    assert not {check: problem for check, problem in found.items() if problem}
