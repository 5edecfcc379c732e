"""Real vLLM under test: one prefill and one decode server behind our router, and a single one, started once and shared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from vllm_handing import Pair
from vllm_servers import CLUSTER_KEY, MODEL, Server, ServerSpec, servers

from kvbaton.core.handoff import Mode
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.router_peers import ensure_router_peers, vllm_router_part
from kvbaton.verify.client import ServerReply, ask
from watching import wait_until

__all__ = ["DEFER_S", "LIMITS", "VllmStand", "both", "session", "stand", "together"]

DEFER_S = 25
"""How long a source keeps blocks that no target fetches."""
LIMITS = {"transfer_timeout": 20, "defer_timeout": DEFER_S}
"""Of every server of a stand."""

_START_S = 60.0
_REQUEST_S = 600.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class VllmStand:
    """A pair, and the routers in front of it by their base URLs: ours, and the real vllm-router."""

    router: str
    peer_router: str
    pair: Pair


@contextlib.contextmanager
def stand(mode: Mode, single: Server) -> Iterator[VllmStand]:
    """Start a pair in this mode, and both routers, with which it registers; stops them afterwards."""
    ports = PortPicker()
    router_port, discovery_port, peer_port, peer_discovery_port = (ports.pick() for _ in range(4))
    routers = (f"127.0.0.1:{discovery_port}", f"127.0.0.1:{peer_discovery_port}")
    specs = [ServerSpec(role, role, mode, settings=LIMITS, routers=routers, holds=True) for role in ("prefill", "decode")]
    with Fleet() as fleet, servers(*specs) as (prefill, decode):
        fleet.start(router_part("127.0.0.1", router_port, discovery_port, cluster_key=CLUSTER_KEY))
        fleet.start(vllm_router_part(ensure_router_peers(print), peer_port, peer_discovery_port, ports.pick()))
        fleet.wait_healthy(_START_S)
        router, peer = f"http://127.0.0.1:{router_port}", f"http://127.0.0.1:{peer_port}"
        wait_until(lambda: _live(router) == len(specs), "both instances to register", _START_S)
        log = fleet.log_directory / "vllm-router.log"
        wait_until(lambda: _is_taken_in(log.read_text()), "both instances to register with vllm-router", _START_S)
        yield VllmStand(router, peer, Pair(mode, prefill, decode, single))


def _is_taken_in(log: str) -> bool:
    return all(f"Add {role} [HTTP:" in log for role in ("Prefill", "Decode"))


def _live(router: str) -> int:
    with urllib.request.urlopen(f"{router}/instances", timeout=10) as answer:
        return len(json.load(answer)["live"])


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that waits long enough for a slow machine, and no longer."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as opened:
        yield opened


def together(work: Callable[[aiohttp.ClientSession], Awaitable[_T]]) -> _T:
    """Run something with a client."""

    async def run() -> _T:
        async with session() as opened:
            return await work(opened)

    return asyncio.run(run())


async def both(opened: aiohttp.ClientSession, where: VllmStand, prompt: Sequence[int]) -> tuple[ServerReply, ServerReply]:
    """The same request to the single server and to the pair."""
    single = await ask(opened, where.pair.single.url, MODEL, tuple(prompt), 8)
    pair = await ask(opened, where.router, MODEL, tuple(prompt), 8)
    return single, pair
