"""One rank of a real vLLM of several ranks dies, is asked to end, or stands still, with hand-offs at every stage at once.

vLLM ends an instance that has lost a worker. The other instance ends the hand-offs as `docs/promises.md` has it, gets its
blocks back and serves on; the restarted one serves again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from vllm_handing import Client, Pair, prompt_of, together
from vllm_scenes import BLOCKS, STAGES, Scene, assert_goes_on, fault_pair
from vllm_servers import Server
from vllm_shaped import VOCABULARY, Singles

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Mode
from watching import wait_until

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]

MODEL = "small-llama"
SIDES = ("prefill", "decode")
RANKS = {"first rank": 0, "last rank": -1}
SIGNALS = {"killed": signal.SIGKILL, "asked to end": signal.SIGTERM}
PAIRS = [(shape, mode) for shape in ("tp2", "pp2") for mode in Mode]


@pytest.fixture(scope="module")
def singles() -> Iterator[Singles]:
    with ExitStack() as kept:
        yield Singles(kept)


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def pair(request: pytest.FixtureRequest, singles: Singles) -> Iterator[Pair]:
    shape, mode = request.param
    is_push = mode is Mode.PUSH
    policy = OnFailure.FAIL if is_push else OnFailure.RECOMPUTE
    single = singles.of(MODEL)
    with fault_pair(mode, policy, is_push, single, model=MODEL, shape=shape, vocabulary=VOCABULARY, forks=True) as running:
        yield running


def struck_first(pair: Pair, side: str) -> tuple[Server, Server]:
    """The server that a fault strikes, and the other one."""
    return (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)


@pytest.mark.parametrize("which", RANKS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("how", SIGNALS)
def test_one_rank_is_lost(pair: Pair, side: str, how: str, which: str) -> None:
    async def send(client: Client) -> None:
        ending, survivor = struck_first(pair, side)
        seed = f"{which} of {side} {how}"
        ranks = ending.ranks()
        assert len(ranks) == 2, "both ranks have processes of their own"
        scene = Scene(client, seed)
        await scene.begin(*STAGES)
        os.kill(ranks[RANKS[which]], SIGNALS[how])
        await asyncio.to_thread(wait_until, lambda: not ending.has_engine(), f"vLLM's engine to end without the {which}", 120)
        # vLLM's API may wait for clients whose requests get no answer any more.
        await scene.leave(20.0)
        await asyncio.to_thread(wait_until, lambda: not ending.is_alive(), f"vLLM to end without the {which}", 120)
        await scene.assert_no_wrong_answer()
        await assert_goes_on(client, survivor, seed)
        ending.restart()
        await client.assert_serves(prompt_of(140, f"after {seed}"), prompt_of(20, f"after {seed}"))
        await asyncio.to_thread(pair.wait_idle)

    together(pair, send)


@pytest.mark.parametrize("which", RANKS)
@pytest.mark.parametrize("side", SIDES)
def test_one_rank_stands_still_for_longer_than_every_deadline(pair: Pair, side: str, which: str) -> None:
    """Its instance goes on when the rank does; what the other side freed meanwhile is used again, and never served."""

    async def send(client: Client) -> None:
        stopped, survivor = struck_first(pair, side)
        seed = f"pause of the {which} of {side}"
        scene = Scene(client, seed)
        await scene.begin(*STAGES)
        rank = stopped.ranks()[RANKS[which]]
        os.kill(rank, signal.SIGSTOP)
        try:
            await assert_goes_on(client, survivor, seed)
            await client.write_to_blocks(survivor, BLOCKS)
        finally:
            os.kill(rank, signal.SIGCONT)
        await scene.assert_no_wrong_answer()
        await asyncio.to_thread(pair.wait_idle, 60)
        pair.assert_alive()
        await client.assert_serves(prompt_of(140, f"after the {seed}"))

    together(pair, send)
