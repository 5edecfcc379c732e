"""Signals and aborts on real vLLM, with hand-offs standing at every stage at the same time: who survives serves on.

In push the decode server fails requests whose load failed, and both servers cache prefixes; in pull it computes them itself,
and nothing is cached, so that blocks are used again at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from vllm_handing import Client, Given, Pair, assert_equal, prompt_of, together
from vllm_servers import Server, Wanted, servers

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.usefixtures("noted_commit"), pytest.mark.timeout(1800)]

LIMITS = {"transfer_timeout": 10, "defer_timeout": 12, "stop_timeout": 2, "retry": 0.5}
BLOCKS = 40
TOKENS = 8


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    mode = request.param
    policy = OnFailure.FAIL if mode is Mode.PUSH else OnFailure.RECOMPUTE
    arguments: tuple[str, ...] = ("--num-gpu-blocks-override", str(BLOCKS))
    if mode is Mode.PULL:
        arguments += ("--no-enable-prefix-caching",)
    sides = [
        Wanted(role, role, mode, policy, settings=LIMITS, arguments=arguments, holds=True) for role in ("prefill", "decode")
    ]
    with servers(*sides, Wanted("single", "both")) as (prefill, decode, single):
        yield Pair(mode, prefill, decode, single)


@dataclass(frozen=True)
class Stage:
    """Where a hand-off stands. `noted_by` is the side that tells so, `kind` what it notes."""

    name: str
    noted_by: str
    kind: str
    transfer: str = ""


MOVING = Stage("moving", "decode", "moving")
STAGES = (
    Stage("grant lost", "decode", "grant", "mute.target.grant"),
    Stage("nothing announced", "prefill", "announced", "mute.source.announced"),
    Stage("confirming", "prefill", "confirmed", "mute.source.confirmed"),
    Stage("before release", "decode", "release", "mute.target.release"),
    MOVING,
)


def prompt_at(stage: Stage, seed: object) -> list[int]:
    return prompt_of(60, f"{stage.name} {seed}")


class Scene:
    """Hand-offs that stand at every stage of a pair."""

    def __init__(self, client: Client, seed: object) -> None:
        self.client = client
        self.pair = client.pair
        self._seed = seed
        self.tasks: dict[Stage, asyncio.Task[Given]] = {}

    async def begin(self, *stages: Stage) -> None:
        """Bring one hand-off to each of these stages."""
        if MOVING in stages:
            with self.pair.decode.holding("stall"):
                await self._begin(MOVING)
        await self._begin(*(stage for stage in stages if stage is not MOVING))

    async def _begin(self, *stages: Stage) -> None:
        counts = {stage: self._count(stage) for stage in stages}
        for stage in stages:
            transfer_id = f"{stage.transfer or 'tx'}.{stage.name} {self._seed}".replace(" ", "-")
            self.tasks[stage] = asyncio.create_task(self.client.hand_off(prompt_at(stage, self._seed), TOKENS, transfer_id))
        for stage, before in counts.items():
            await self.client.until(partial(self._stands, stage, before), f"a hand-off is {stage.name}")

    def _stands(self, stage: Stage, before: int) -> bool:
        return self._count(stage) > before

    def _count(self, stage: Stage) -> int:
        server = self.pair.prefill if stage.noted_by == "prefill" else self.pair.decode
        return sum(line.startswith(f"{stage.kind} ") for line in server.held())

    async def ends(self) -> dict[Stage, Given | BaseException]:
        """What became of each."""
        results = await asyncio.wait_for(asyncio.gather(*self.tasks.values(), return_exceptions=True), 120)
        return dict(zip(self.tasks, results, strict=True))

    async def assert_no_wrong_answer(self) -> None:
        """Each has failed, or has the answer of the single server."""
        for stage, end in (await self.ends()).items():
            if isinstance(end, Given):
                assert_equal(await self.client.alone(prompt_at(stage, self._seed), TOKENS), end)
            else:
                assert isinstance(end, PeerError), (stage, end)


async def assert_goes_on(client: Client, survivor: Server, seed: object) -> None:
    """A survivor gets its blocks back, and computes plain requests."""
    await asyncio.to_thread(survivor.wait_idle)
    assert survivor.is_alive()
    prompt = prompt_of(70, f"after {seed}")
    assert_equal(await client.alone(prompt), await client.alone(prompt, url=survivor.url))


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_client_that_leaves_its_target_frees_both_sides(pair: Pair, stage: Stage) -> None:
    async def send(client: Client) -> None:
        scene = Scene(client, "abort")
        await scene.begin(stage)
        scene.tasks[stage].cancel()
        await asyncio.gather(scene.tasks[stage], return_exceptions=True)
        await asyncio.to_thread(pair.wait_idle, 60)
        pair.assert_alive()
        await client.assert_serves(prompt_of(140, f"after {stage.name}"))

    together(pair, send)


def test_a_client_that_leaves_its_source_in_mid_prefill_frees_both_sides(pair: Pair) -> None:
    async def send(client: Client) -> None:
        prompt, header = prompt_of(1400, "left"), client.header()
        source = asyncio.create_task(client.prefill(prompt, "tx-left", header))
        halves = [source]
        if pair.mode is Mode.PUSH:
            halves.append(asyncio.create_task(client.decode(prompt, "tx-left", header, TOKENS)))
        await client.until(lambda: pair.prefill.metrics()["vllm:kv_cache_usage_perc"] > 0, "the prefill to begin")
        source.cancel()
        ends = await asyncio.wait_for(asyncio.gather(*halves, return_exceptions=True), 60)
        assert all(isinstance(end, PeerError | asyncio.CancelledError) for end in ends), ends
        await asyncio.to_thread(pair.wait_idle, 60)
        await client.assert_serves(prompt_of(140, "after a source was left"))

    together(pair, send)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_stands_still_for_longer_than_every_deadline(pair: Pair, side: str) -> None:
    """Its blocks come back when it goes on; what the other side freed meanwhile is used again, and nobody serves it."""

    async def send(client: Client) -> None:
        stopped, survivor = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
        scene = Scene(client, f"pause {side}")
        await scene.begin(*STAGES)
        stopped.signal(signal.SIGSTOP)
        try:
            await assert_goes_on(client, survivor, f"pause {side}")
            await client.write_to_blocks(survivor, BLOCKS)
        finally:
            stopped.signal(signal.SIGCONT)
        await scene.assert_no_wrong_answer()
        await asyncio.to_thread(pair.wait_idle, 60)
        pair.assert_alive()
        await client.assert_serves(prompt_of(140, f"after a pause of {side}"))

    together(pair, send)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["killed", "asked to end"])
def test_one_side_ends(pair: Pair, side: str, how: str) -> None:
    async def send(client: Client) -> None:
        ending, survivor = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
        scene = Scene(client, f"{how} {side}")
        await scene.begin(*STAGES)
        if how == "killed":
            ending.signal(signal.SIGKILL)
        else:
            await asyncio.to_thread(ending.ask_to_end)
        await scene.assert_no_wrong_answer()
        await assert_goes_on(client, survivor, f"{how} {side}")
        ending.restart()
        await client.assert_serves(prompt_of(140, f"after {side} was {how}"), prompt_of(20, f"after {side} was {how}"))
        await asyncio.to_thread(pair.wait_idle)

    together(pair, send)
