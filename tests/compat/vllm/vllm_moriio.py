"""Two stock vLLM servers with vLLM's own MoRIIOConnector on the drop-in for MoRI, and the routers that can be in front of them.

The servers register at one port. Routers take turns there: a stock instance repeats its registration every three seconds, and
does not notice that another router receives it.

vllm-router is asked without logprobs: with them it parses an answer, prints it again and keeps the old Content-Length, so a
client waits for ever for the byte that is missing where a number comes out shorter (`-1.2e-07` as `-1.2e-7`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from vllm_forked import FORKING, ForkedFleet
from vllm_handing import prompt_of
from vllm_servers import MODEL, ready
from vllm_toy_proxy import has_registered, toy_proxy_part

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.engines.vllm.setup.environment import ensure_msgpack
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.router_peers import ensure_router_peers, vllm_router_part
from kvbaton.verify.client import ask
from kvbaton.verify.compare import TokenAnswer, Verdict, compare
from kvbaton.verify.stored import StoredCounts
from watching import wait_until

__all__ = ["FRONTS", "StockStand", "prompts_of", "stock_stand"]

_START_S = 900.0
_FRONT_S = 300.0
_REQUEST_S = 500.0
_HOST = "127.0.0.1"
FRONTS = ("vllm-router", "toy proxy", "kvbaton")


@dataclass(frozen=True)
class StockStand:
    """The two servers, a plain one, and where the two register."""

    mode: Mode
    fleets: dict[str, ForkedFleet]
    single: str
    discovery_port: int
    ports: PortPicker
    counts: StoredCounts

    def log(self, name: str) -> str:
        """What one of the servers has printed."""
        return (self.fleets[name].log_directory / f"{name}.log").read_text(errors="replace")

    @contextmanager
    def behind(self, front: str) -> Iterator[str]:
        """Put a router in front of the servers; its URL."""
        port = self.ports.pick()
        with Fleet() as fleet:
            part = self._front(front, port)
            fleet.start(part)
            fleet.wait_healthy(_FRONT_S)
            url, log = f"http://{_HOST}:{port}", fleet.log_directory / f"{part.name}.log"
            wait_until(lambda: _is_ready(front, url, log), f"both servers to register with {front}", 60)
            yield url

    def _front(self, front: str, port: int) -> FleetPart:
        if front == "kvbaton":
            return router_part(_HOST, port, self.discovery_port)
        if front == "toy proxy":
            return toy_proxy_part(port, self.discovery_port)
        return vllm_router_part(ensure_router_peers(print), port, self.discovery_port, self.ports.pick())

    def verdicts(self, url: str, prompts: Sequence[list[int]], tokens: int, front: str = "kvbaton") -> list[str]:
        """Send all at once to the pair, then to the plain server; what came of each: a verdict, or why it failed.

        The toy proxy takes a token off the limit of a client.
        """

        async def send() -> list[str]:
            timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
                limit = tokens + (front == "toy proxy")
                ask_pair = _tokens_alone if front == "vllm-router" else _answer
                given = await asyncio.gather(*(ask_pair(session, url, each, limit) for each in prompts))
                alone = await asyncio.gather(*(_answer(session, self.single, each, tokens) for each in prompts))
            return [_verdict(one, other) for one, other in zip(alone, given, strict=True)]

        return asyncio.run(send())


def prompts_of(count: int, longest: int, seed: object) -> list[list[int]]:
    """Prompts of all lengths up to `longest`."""
    return [prompt_of(3 + index * 37 % longest, f"{seed} {index}") for index in range(count)]


async def _answer(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> TokenAnswer | str:
    try:
        return (await ask(session, url, MODEL, tuple(prompt), tokens)).answer
    except Exception as error:  # noqa: BLE001 - shown in the verdict
        return f"{type(error).__name__}: {error}"


async def _tokens_alone(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> TokenAnswer | str:
    """An answer without logprobs: no number in it has a fraction."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            document = await response.json()
            choice = document["choices"][0]
            return TokenAnswer(tuple(choice["token_ids"]), (), (), choice["finish_reason"])
    except Exception as error:  # noqa: BLE001 - shown in the verdict
        return f"{type(error).__name__}: {error}"


def _verdict(alone: TokenAnswer | str, given: TokenAnswer | str) -> str:
    if isinstance(alone, str) or isinstance(given, str):
        return f"failed: alone {alone if isinstance(alone, str) else 'ok'}, pair {given if isinstance(given, str) else 'ok'}"
    found = compare(alone, given if given.logprobs else replace(given, logprobs=alone.logprobs, gaps=alone.gaps))
    return "equal" if found.verdict in (Verdict.EQUAL, Verdict.NEAR_TIE) else f"different: {found.detail}"


def _is_ready(front: str, url: str, log: Path) -> bool:
    if front == "kvbaton":
        with urllib.request.urlopen(f"{url}/instances", timeout=10) as answer:
            return len(json.load(answer)["live"]) == 2
    text = log.read_text(errors="replace")
    return has_registered(text) if front == "toy proxy" else all(f"Add {role} [HTTP:" in text for role in ("Prefill", "Decode"))


@contextmanager
def stock_stand(mode: Mode) -> Iterator[StockStand]:
    """Start the three servers, and wait until they are healthy."""
    prepared = ready()
    ensure_msgpack(prepared.environment, print)
    ports, counts = PortPicker(), StoredCounts()
    discovery_port = ports.pick()
    handoff = HandoffSettings(mode=mode)
    options = replace(prepared.options, connector="moriio", handoff=handoff, counts_directory=counts.directory)
    servers = replace(prepared, options=options)
    with contextlib.ExitStack() as started:
        fleets: dict[str, ForkedFleet] = {}

        def start(part: FleetPart) -> FleetPart:
            path = os.pathsep.join((part.environment["PYTHONPATH"], str(FORKING)))
            fleets[part.name] = ForkedFleet()
            started.callback(fleets[part.name].stop)
            fleets[part.name].start(replace(part, environment=part.environment | {"PYTHONPATH": path}))
            return part

        for role in ("prefill", "decode"):
            start(servers.part(role, role, ports, [f"{_HOST}:{discovery_port}"]))
        single = start(servers.part("single", "both", ports))
        for fleet in fleets.values():
            fleet.wait_healthy(_START_S)
        yield StockStand(mode, fleets, single.base_url, discovery_port, ports, counts)
    counts.close()
