"""Real vLLM under test: one prefill, one decode and one single server behind our router, started once and shared."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
import pytest

from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.vllm import VllmOptions, vllm_part
from kvbaton.launch.vllm_ready import ready_vllm
from kvbaton.verify.client import Reply, ask

__all__ = ["MODEL", "STEP_TOKENS", "VllmStand", "both", "ready", "session", "stand", "together"]

MODEL = "smollm2"
STEP_TOKENS = 256
"""Long prompts take several steps, and vLLM publishes its metrics after each."""

_START_S = 900.0
_REQUEST_S = 600.0
_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)

_T = TypeVar("_T")


@dataclass(frozen=True)
class VllmStand:
    """The servers, by their base URLs."""

    fleet: Fleet
    options: VllmOptions
    ports: PortPicker
    discovery_port: int
    router: str
    prefill: str
    decode: str
    single: str

    def kill(self, name: str) -> None:
        """End a server and everything it started, at once."""
        os.killpg(self.fleet.pid(name), signal.SIGKILL)

    def is_idle(self, url: str) -> bool:
        """Whether a server holds no block for anybody, and has nothing to do."""
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        values = [float(value) for value in (*_USAGE.findall(text), *_REQUESTS.findall(text))]
        assert len(values) >= 3, "vLLM's metrics have other names now"
        return not any(values)


def ready(handoff: HandoffSettings = DEFAULT_HANDOFF, settings: dict[str, Any] | None = None) -> VllmOptions:
    """vLLM, installed if need be; the only reason for which these tests are skipped."""
    try:
        return ready_vllm(MODEL, MODEL, "local", 3, handoff, print, settings or {})
    except LocalError as error:
        pytest.skip(f"NOTHING IS TESTED WITH VLLM, because it cannot be installed here: {error}")


@contextlib.contextmanager
def stand(mode: Mode, **settings: Any) -> Iterator[VllmStand]:
    """Start everything in this mode; `settings` go into `kv_connector_extra_config`. Stops everything afterwards."""
    ports = PortPicker()
    installed = ready(HandoffSettings(mode=mode), {"poison": True, **settings})
    options = replace(installed, arguments=("--max-num-batched-tokens", str(STEP_TOKENS)))
    router_port, discovery_port = ports.pick(), ports.pick()
    routers = [f"127.0.0.1:{discovery_port}"]
    with Fleet() as fleet:
        fleet.start(router_part("127.0.0.1", router_port, discovery_port))
        urls = []
        for name, role in (("prefill", "prefill"), ("decode", "decode"), ("single", "both")):
            part, url = vllm_part(name, role, options, ports, routers)
            fleet.start(part)
            urls.append(url)
        fleet.wait_healthy(_START_S)
        yield VllmStand(fleet, options, ports, discovery_port, f"http://127.0.0.1:{router_port}", *urls)


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that waits long enough for a slow machine, and no longer."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as opened:
        yield opened


def together(work: Callable[[aiohttp.ClientSession], Awaitable[_T]]) -> _T:
    """Run something with a client."""

    async def run() -> _T:
        async with session() as opened:
            return await work(opened)

    return asyncio.run(run())


async def both(opened: aiohttp.ClientSession, where: VllmStand, prompt: Sequence[int]) -> tuple[Reply, Reply]:
    """The same request to the single server and to the pair."""
    single = await ask(opened, where.single, MODEL, tuple(prompt), 8)
    pair = await ask(opened, where.router, MODEL, tuple(prompt), 8)
    return single, pair
