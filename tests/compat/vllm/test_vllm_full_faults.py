"""Signals and aborts on real vLLM, with hand-offs at every stage at the same time: the survivor goes on serving.

In push the decode server fails requests whose load failed, and both servers cache prefixes; in pull it computes them itself,
and nothing is cached, so that blocks are used again at once. `test_vllm_full_policies.py` has the policies the other way round.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from vllm_handing import Client, Given, Pair, assert_equal, prompt_of, together
from vllm_leaving import LEAVE_CASES, RUNNING, Halves, LeaveCase, leave, strike_queued
from vllm_scenes import BLOCKS, STAGES, TOKENS, Scene, assert_goes_on, fault_pair
from vllm_servers import Server

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest, single: Server) -> Iterator[Pair]:
    is_push = request.param is Mode.PUSH
    policy = OnFailure.FAIL if is_push else OnFailure.RECOMPUTE
    with fault_pair(request.param, policy, caches=is_push, single=single) as running:
        yield running


def struck_first(pair: Pair, side: str) -> tuple[Server, Server]:
    """The server that a fault strikes, and the other one."""
    return (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)


@pytest.mark.parametrize("case", LEAVE_CASES, ids=str)
def test_a_client_that_leaves_frees_both_sides(pair: Pair, case: LeaveCase) -> None:
    if pair.mode not in case.modes:
        pytest.skip(f"in {pair.mode} a {case.side} has answered by then, or never waits there")
    together(pair, lambda client: leave(client, case))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_stands_still_for_longer_than_every_deadline(pair: Pair, side: str) -> None:
    """Its blocks come back when it goes on; what the other side freed meanwhile is used again, and never served."""

    async def send(client: Client) -> None:
        stopped, survivor = struck_first(pair, side)
        scene = Scene(client, f"pause {side}")
        await scene.begin(*STAGES)
        stopped.signal(signal.SIGSTOP)
        try:
            await assert_goes_on(client, survivor, f"pause {side}")
            await client.write_to_blocks(survivor, BLOCKS)
        finally:
            stopped.signal(signal.SIGCONT)
        await (scene.assert_ends_by_policy() if side == "prefill" else scene.assert_no_wrong_answer())
        await asyncio.to_thread(pair.wait_idle, 60)
        pair.assert_alive()
        await client.assert_serves(prompt_of(140, f"after a pause of {side}"))

    together(pair, send)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_is_killed_in_mid_prefill_and_while_tokens_stream(pair: Pair, side: str) -> None:
    async def send(client: Client) -> None:
        ending, survivor = struck_first(pair, side)
        async with AsyncExitStack() as reached:
            halves = [(case.side, await reached.enter_async_context(case.reach(client))) for case in RUNNING]
            standing = [each.tasks[case_side].done() for case_side, each in halves]
            ending.signal(signal.SIGKILL)
        assert not any(standing), "one has ended before the kill; this tests less than its name"
        for _, each in halves:
            await assert_all_are_right_or_failed(client, each)
        await assert_goes_on(client, survivor, f"a kill of {side} in between")
        ending.restart()
        await client.assert_serves(prompt_of(140, f"after {side} was killed in between"))
        await asyncio.to_thread(pair.wait_idle)

    together(pair, send)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("queued", ["source", "target"])
def test_one_side_is_killed_while_a_request_waits_for_blocks(pair: Pair, queued: str, side: str) -> None:
    async def send(client: Client) -> None:
        ending, survivor = struck_first(pair, side)
        struck: list[bool] = []

        def strike() -> None:
            ending.signal(signal.SIGKILL)
            struck.append(True)

        halves = await strike_queued(client, queued, strike, f"killed {side}")
        assert struck, "it never came so far"
        await assert_all_are_right_or_failed(client, halves)
        await assert_goes_on(client, survivor, f"a kill of {side}, queued {queued}")
        ending.restart()
        await client.assert_serves(prompt_of(140, f"after {side} was killed, queued {queued}"))
        await asyncio.to_thread(pair.wait_idle)

    together(pair, send)


async def assert_all_are_right_or_failed(client: Client, halves: Halves) -> None:
    """A stream has only to end, in time. A whole answer is the right one."""
    ends = await asyncio.wait_for(asyncio.gather(*halves.tasks.values(), return_exceptions=True), 120)
    for side, end in zip(halves.tasks, ends, strict=True):
        if side == "target" and isinstance(end, Given):
            assert_equal(await client.alone(halves.prompt, TOKENS), end)
        else:
            assert end is None or isinstance(end, Given | PeerError | aiohttp.ClientError), (side, end)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["killed", "asked to end"])
def test_one_side_ends(pair: Pair, side: str, how: str) -> None:
    async def send(client: Client) -> None:
        ending, survivor = struck_first(pair, side)
        scene = Scene(client, f"{how} {side}")
        await scene.begin(*STAGES)
        if how == "killed":
            ending.signal(signal.SIGKILL)
        else:
            await asyncio.to_thread(ending.ask_to_end)
            if side == "decode":
                await scene.leave()
            await asyncio.to_thread(ending.wait_ended)
        is_lost = side == "prefill" and how == "killed"
        await (scene.assert_ends_by_policy() if is_lost else scene.assert_no_wrong_answer())
        await assert_goes_on(client, survivor, f"{how} {side}")
        ending.restart()
        await client.assert_serves(prompt_of(140, f"after {side} was {how}"), prompt_of(20, f"after {side} was {how}"))
        await asyncio.to_thread(pair.wait_idle)

    together(pair, send)
