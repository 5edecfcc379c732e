"""Hand-offs of a pair of real vLLMs that stand at every stage at the same time, and what must become of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from vllm_handing import Client, Given, Pair, assert_equal, prompt_of
from vllm_servers import MODEL, Server, ServerSpec, servers

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError

__all__ = ["BEFORE_RELEASE", "BLOCKS", "MOVING", "STAGES", "TOKENS", "Scene", "Stage", "assert_goes_on", "fault_pair"]

BLOCKS = 40
"""That each server has. vLLM keeps one of them for itself."""
TOKENS = 8
LIMITS = {"transfer_timeout": 10, "defer_timeout": 12, "stop_timeout": 2, "retry": 0.5}


@contextmanager
def fault_pair(
    mode: Mode,
    policy: OnFailure,
    caches: bool,
    single: Server,
    *,
    model: str = MODEL,
    shape: str = "tp1",
    vocabulary: int = Pair.vocabulary,
    forks: bool = False,
) -> Iterator[Pair]:
    """Two servers with few blocks, short limits and a connector that holds messages and copies up on command."""
    arguments: tuple[str, ...] = ("--num-gpu-blocks-override", str(BLOCKS))
    if not caches:
        arguments += ("--no-enable-prefix-caching",)
    spec = partial(ServerSpec, settings=LIMITS, arguments=arguments, holds=True, model=model, shape=shape, forks=forks)
    sides = [spec(role, role, mode, policy) for role in ("prefill", "decode")]
    with servers(*sides) as (prefill, decode):
        yield Pair(mode, prefill, decode, single, policy, vocabulary)


@dataclass(frozen=True)
class Stage:
    """Where a hand-off stands. `noted_by` is the side that notes it, `kind` what it notes."""

    name: str
    noted_by: str
    kind: str
    transfer: str = ""


MOVING = Stage("moving", "target", "moving")
BEFORE_RELEASE = Stage("before release", "target", "release", "mute.target.release")
STAGES = (
    Stage("grant lost", "target", "grant", "mute.target.grant"),
    Stage("nothing announced", "source", "announced", "mute.source.announced"),
    Stage("confirming", "source", "confirmed", "mute.source.confirmed"),
    BEFORE_RELEASE,
    MOVING,
)
"""Every stage at which a request has blocks on both sides, in push and in pull."""


class Scene:
    """Hand-offs that stand at every stage of a pair; each asks for so many tokens."""

    def __init__(self, client: Client, seed: object, tokens: int = TOKENS) -> None:
        self.client = client
        self.pair = client.pair
        self._seed = seed
        self._tokens = tokens
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
            self.tasks[stage] = asyncio.create_task(self.client.hand_off(self._prompt(stage), self._tokens, transfer_id))
        for stage, before in counts.items():
            await self.client.until(partial(self._stands, stage, before), f"a hand-off is {stage.name}")

    def _prompt(self, stage: Stage) -> list[int]:
        return prompt_of(60, f"{stage.name} {self._seed}")

    def _stands(self, stage: Stage, before: int) -> bool:
        return self._count(stage) > before

    def _count(self, stage: Stage) -> int:
        return sum(line.startswith(f"{stage.kind} ") for line in self.pair.server(stage.noted_by).held())

    async def leave(self, after_s: float = 0.0) -> None:
        """Every client that has no answer by then goes away."""
        await asyncio.wait(self.tasks.values(), timeout=after_s)
        for task in self.tasks.values():
            task.cancel()
        await asyncio.wait(self.tasks.values(), timeout=60)

    async def ends(self) -> dict[Stage, Given | BaseException]:
        """What became of each."""
        results = await asyncio.wait_for(asyncio.gather(*self.tasks.values(), return_exceptions=True), 120)
        return dict(zip(self.tasks, results, strict=True))

    async def assert_no_wrong_answer(self) -> None:
        """Each has failed, was left by its client, or has the answer of the single server.

        A vLLM that ends of itself says `abort` for what it has not finished, with the tokens that it had by then.
        """
        for stage, end in (await self.ends()).items():
            if isinstance(end, Given):
                alone = await self.client.alone(self._prompt(stage), self._tokens)
                if end.answer.finish_reason == "abort":
                    assert alone.answer.tokens[: len(end.answer.tokens)] == end.answer.tokens, stage
                else:
                    assert_equal(alone, end)
            else:
                assert isinstance(end, PeerError | asyncio.CancelledError), (stage, end)

    async def assert_ends_by_policy(self) -> None:
        """After a fault of the source: what was not delivered has failed or was computed again, by the target's policy."""
        await self.assert_no_wrong_answer()
        is_answered = self.pair.policy is OnFailure.RECOMPUTE
        for stage, end in (await self.ends()).items():
            assert isinstance(end, Given) is (is_answered or stage is BEFORE_RELEASE), (stage, end)
            if isinstance(end, Given):
                assert end.record["recomputed"] is (stage is not BEFORE_RELEASE), (stage, end.record)


async def assert_goes_on(client: Client, survivor: Server, seed: object) -> None:
    """A survivor gets its blocks back, and computes plain requests."""
    await asyncio.to_thread(survivor.wait_idle)
    assert survivor.is_alive()
    prompt = prompt_of(70, f"after {seed}")
    assert_equal(await client.alone(prompt), await client.alone(prompt, url=survivor.url))
