"""Clients that leave a hand-off on real vLLM: a table of sides and stages, and how a hand-off is brought to each.

A `LeaveCase` brings one hand-off to its stage and checks that it is there. Where a request has to wait for blocks, plain
requests hold them; none of those may have ended when the client leaves, else the waiting request might have had their blocks.

A client can leave a source only until it has answered. So in pull no client leaves a source while blocks move. A source whose
blocks no target fetches is tested in `test_vllm_pair.py::test_an_idle_source_frees_blocks_that_no_target_fetches`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_handing import Client, Given, assert_equal, prompt_of
from vllm_scenes import BEFORE_RELEASE, BLOCKS, STAGES, TOKENS, Scene, Stage
from vllm_servers import BLOCK_TOKENS, Server

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError

__all__ = ["LEAVE_CASES", "LEAVE_CASES_ANYWHERE", "RUNNING", "Halves", "LeaveCase", "leave", "strike_queued"]

_PROMPT_TOKENS = 600
_LONG_TOKENS = 1400
_FULL = BLOCKS - 4
"""So many blocks in use leave no room for the prompt."""
_NEARLY_FULL = BLOCKS - 18
"""So many leave room for the prompt, but not for the largest one besides."""
_LASTING_TOKENS = BLOCK_TOKENS - 8
_MANY_TOKENS = 400


class Halves:
    """The two requests of one hand-off. In pull the source has answered before the target is asked."""

    def __init__(self, client: Client, name: str, prompt_tokens: int = _PROMPT_TOKENS, prefix: str = "tx") -> None:
        self.client = client
        self.prompt = prompt_of(prompt_tokens, name)
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.transfer_id = f"{prefix}.{name}".replace(" ", "-")
        self._header = client.header()
        self._params: dict[str, Any] | None = None

    async def prepare(self, side: str) -> None:
        """Let everything be over that comes before this side is asked."""
        if side == "target" and self.client.pair.mode is Mode.PULL:
            self._params = (await self.client.prefill(self.prompt, self.transfer_id, self._header)).params

    def ask(self, side: str) -> None:
        """Ask this side; in push, the other one too."""
        sides = (side,) if self.client.pair.mode is Mode.PULL else ("source", "target")
        for each in sides:
            if each not in self.tasks:
                self._start(each, self._source() if each == "source" else self._target())

    async def stream(self, side: str) -> None:
        """Let this side stream many tokens, and the other be asked as usual; wait for the first one."""
        begun = asyncio.Event()
        self._start(side, self._streamed(side, begun))
        self.ask(side)
        first = asyncio.create_task(begun.wait())
        await asyncio.wait([first, self.tasks[side]], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        assert begun.is_set(), f"no token came from the {side}"

    def _start(self, side: str, request: Coroutine[Any, Any, object]) -> None:
        self.tasks[side] = asyncio.create_task(request)

    async def _source(self) -> Given:
        return await self.client.prefill(self.prompt, self.transfer_id, self._header)

    async def _target(self) -> Given:
        return await self.client.decode(self.prompt, self.transfer_id, self._header, TOKENS, self._params)

    async def _streamed(self, side: str, begun: asyncio.Event) -> None:
        if side == "source":
            await self.client.stream_prefill(self.prompt, self.transfer_id, self._header, _MANY_TOKENS, begun)
        else:
            await self.client.stream_decode(self.prompt, self.transfer_id, self._header, _MANY_TOKENS, begun, self._params)


Reach = Callable[[Client], AbstractAsyncContextManager[Halves]]


@dataclass(frozen=True)
class LeaveCase:
    """The client of `side` leaves at a stage; `reach` brings a hand-off there, in these modes.

    The other side is notified and need not wait for a timeout. `expires` names a side that may not be notified, because the
    message that would reach it, or that names its address, is lost. With `surely` it is never notified.
    """

    side: str
    stage: str
    reach: Reach
    modes: tuple[Mode, ...] = (Mode.PUSH, Mode.PULL)
    expires: str = ""
    surely: bool = False

    def __str__(self) -> str:
        return f"{self.side}-{self.stage}"


async def leave(client: Client, case: LeaveCase) -> None:
    """Let the client leave at that stage. The other half ends as it must, no block stays in use, and both sides serve on."""
    before = await client.expired()
    async with case.reach(client) as halves:
        leaving = halves.tasks[case.side]
        assert not leaving.done(), "it has ended; its client cannot leave any more"
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    assert leaving.cancelled()
    if case.side == "source" and "target" in halves.tasks:
        await _assert_lost(client, halves)
    await asyncio.wait_for(asyncio.gather(*halves.tasks.values(), return_exceptions=True), 60)
    await asyncio.to_thread(client.pair.wait_idle, 60)
    client.pair.assert_alive()
    await client.assert_serves(prompt_of(140, f"after {case}"))
    after = await client.expired()
    expired = {side for side in after if after[side] > before[side]}
    assert expired <= {case.expires}, f"these were not notified that the client has left: {expired}"
    assert not case.surely or expired, f"no message can have reached the {case.expires}, and it has not expired"


async def _assert_lost(client: Client, halves: Halves) -> None:
    """A target that has lost its source fails, or computes all of it, as its policy states."""
    (end,) = await asyncio.wait_for(asyncio.gather(halves.tasks["target"], return_exceptions=True), 60)
    if client.pair.policy is OnFailure.FAIL:
        assert isinstance(end, PeerError), end
        return
    assert isinstance(end, Given), end
    assert end.record["recomputed"], end.record
    assert_equal(await client.alone(halves.prompt, TOKENS), end)


@asynccontextmanager
async def _crowded(client: Client, server: Server, blocks: int) -> AsyncIterator[None]:
    """Plain requests hold so many blocks of a server meanwhile, one each."""
    prompts = [prompt_of(3, f"crowd {index}") for index in range(blocks)]
    crowd = [asyncio.create_task(client.alone(prompt, _LASTING_TOKENS, server.url)) for prompt in prompts]
    try:
        await client.until(lambda: _used_blocks(server) == blocks, "plain requests hold their blocks")
        yield
        assert not any(each.done() for each in crowd), "a plain request gave its block back too early; this tests nothing"
    finally:
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


def _used_blocks(server: Server) -> int:
    return round(server.metrics()["vllm:kv_cache_usage_perc"] * (BLOCKS - 1))


def _queue(server: Server) -> float:
    return server.metrics()["vllm:num_requests_waiting"]


@asynccontextmanager
async def _queued(side: str, client: Client) -> AsyncIterator[Halves]:
    """It has no blocks, because there are none."""
    halves, server = Halves(client, f"queued {side}"), client.pair.server(side)
    await halves.prepare(side)
    async with _crowded(client, server, _FULL):
        await _wait_in_queue(halves, side)
        yield halves
        await client.until(lambda: _queue(server) == 0, f"the {side} to leave the queue")


async def _wait_in_queue(halves: Halves, side: str) -> None:
    server = halves.client.pair.server(side)
    halves.ask(side)
    await halves.client.until(lambda: _queue(server) == 1, f"the {side} to wait for blocks")
    assert _used_blocks(server) == _FULL


async def strike_queued(client: Client, side: str, strike: Callable[[], None], seed: str) -> Halves:
    """Strike while this side waits for blocks. What else waited for that server has failed, or goes away afterwards."""
    halves = Halves(client, f"queued {side} {seed}")
    await halves.prepare(side)
    with contextlib.suppress(AssertionError):  # the crowd may die with its server
        async with _crowded(client, client.pair.server(side), _FULL):
            await _wait_in_queue(halves, side)
            strike()
    return halves


@asynccontextmanager
async def _without_grant(client: Client) -> AsyncIterator[Halves]:
    """There is room for its blocks, but it may have them only with a grant, and that was lost."""
    halves, prefill = Halves(client, "without grant", prefix="mute.target.grant"), client.pair.prefill
    async with _crowded(client, prefill, _NEARLY_FULL):
        halves.ask("source")
        lost = f"grant {halves.transfer_id}"
        await client.until(lambda: lost in client.pair.decode.held(), "the grant to be lost")
        await client.until(lambda: _queue(prefill) == 1, "the source to wait for its grant")
        assert _used_blocks(prefill) == _NEARLY_FULL
        yield halves
        await client.until(lambda: _queue(prefill) == 0, "the source to leave the queue")


@asynccontextmanager
async def _in_mid_prefill(client: Client) -> AsyncIterator[Halves]:
    """Some of its prompt is computed."""
    halves = Halves(client, "mid prefill", _LONG_TOKENS)
    halves.ask("source")
    await client.until(lambda: client.pair.prefill.metrics()["vllm:kv_cache_usage_perc"] > 0, "the prefill to begin")
    yield halves


@asynccontextmanager
async def _moving_in_mid_prefill(client: Client) -> AsyncIterator[Halves]:
    """The target reads the first of its blocks while it computes the last."""
    halves, decode = Halves(client, "streams blocks", _LONG_TOKENS), client.pair.decode
    before = len(decode.held())
    with decode.holding("stall"):
        halves.ask("source")
        await client.until(lambda: len(decode.held()) > before, "the first blocks to move")
        yield halves


@asynccontextmanager
async def _streaming(side: str, client: Client) -> AsyncIterator[Halves]:
    """Its client has tokens already. That of a source asked for more than one; in push everything is announced by then."""
    halves = Halves(client, f"streaming {side}")
    await halves.prepare(side)
    await halves.stream(side)
    yield halves


@asynccontextmanager
async def _standing(stage: Stage, client: Client) -> AsyncIterator[Halves]:
    """It has blocks, and stands at one of the stages that a fault may strike."""
    scene, halves = Scene(client, "abort", _MANY_TOKENS), Halves(client, stage.name)
    await scene.begin(stage)
    halves.tasks["target"] = scene.tasks[stage]
    yield halves


LEAVE_CASES = (
    LeaveCase("target", "queued", partial(_queued, "target")),
    *(LeaveCase("target", stage.name, partial(_standing, stage)) for stage in STAGES if stage is not BEFORE_RELEASE),
    LeaveCase("target", BEFORE_RELEASE.name, partial(_standing, BEFORE_RELEASE), expires="source", surely=True),
    LeaveCase("target", "streaming", partial(_streaming, "target")),
    LeaveCase("source", "queued", partial(_queued, "source")),
    LeaveCase("source", "without grant", _without_grant, (Mode.PUSH,), expires="target"),
    LeaveCase("source", "streaming", partial(_streaming, "source")),
    LeaveCase("source", "moving", _moving_in_mid_prefill, (Mode.PUSH,)),
    LeaveCase("source", "mid prefill", _in_mid_prefill),
)
"""Every side and stage at which a client can leave."""

LEAVE_CASES_ANYWHERE = tuple(
    case for case in LEAVE_CASES if len(case.modes) == len(Mode) and case.stage not in ("queued", BEFORE_RELEASE.name)
)
"""Those of both modes that need neither a full cache nor an expired lease, so that any pair of servers will do."""

RUNNING = tuple(case for case in LEAVE_CASES if case.stage in ("streaming", "mid prefill"))
"""Those that can be reached side by side, and beside those of `STAGES`; the shortest comes last."""
