"""Faults of the source on real vLLM under the policies that `test_vllm_full_faults.py` does not try: push with `recompute`, and
pull with `fail`.

A policy is what a target does that has lost its source. So the source alone is left, killed and stopped here, with hand-offs at
every stage; that takes a third of the time that all of those tests would take.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest
from vllm_handing import Client, Pair, prompt_of, together
from vllm_leaving import LEAVE_CASES, LeaveCase, leave
from vllm_scenes import BLOCKS, STAGES, Scene, assert_goes_on, fault_pair
from vllm_servers import Server

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Mode

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest, single: Server) -> Iterator[Pair]:
    is_push = request.param is Mode.PUSH
    policy = OnFailure.RECOMPUTE if is_push else OnFailure.FAIL
    with fault_pair(request.param, policy, caches=not is_push, single=single) as running:
        yield running


@pytest.mark.parametrize("pair", [Mode.PUSH], indirect=True, ids=str)
@pytest.mark.parametrize("case", [case for case in LEAVE_CASES if case.side == "source"], ids=str)
def test_a_target_whose_source_was_left_follows_its_policy(pair: Pair, case: LeaveCase) -> None:
    """In push: in pull there is no target yet while a source can be left."""
    together(pair, lambda client: leave(client, case))


def test_a_target_whose_source_stands_still_follows_its_policy(pair: Pair) -> None:
    """Blocks that it freed are used again before the source goes on."""

    async def send(client: Client) -> None:
        scene = Scene(client, "pause")
        await scene.begin(*STAGES)
        pair.prefill.signal(signal.SIGSTOP)
        try:
            await assert_goes_on(client, pair.decode, "pause")
            await client.write_to_blocks(pair.decode, BLOCKS)
        finally:
            pair.prefill.signal(signal.SIGCONT)
        await scene.assert_ends_by_policy()
        await asyncio.to_thread(pair.wait_idle, 60)
        pair.assert_alive()
        await client.assert_serves(prompt_of(140, "after a pause"))

    together(pair, send)


def test_a_target_whose_source_was_killed_follows_its_policy(pair: Pair) -> None:
    async def send(client: Client) -> None:
        scene = Scene(client, "killed")
        await scene.begin(*STAGES)
        pair.prefill.signal(signal.SIGKILL)
        await scene.assert_ends_by_policy()
        await assert_goes_on(client, pair.decode, "killed")
        pair.prefill.restart()
        await client.assert_serves(prompt_of(140, "after a kill"), prompt_of(20, "after a kill"))
        await asyncio.to_thread(pair.wait_idle)

    together(pair, send)
