"""Many requests at once, some aborted half-way, and the gauges that show whether anything of them was left behind."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from system import Client

__all__ = ["Footprint", "Storm", "gauges_not_zero"]

_GAUGE = re.compile(r"^(kvbaton_(?:blocks|requests|handoffs_live|quarantined_blocks))(\{[^}]*\})? (\S+)$", re.MULTILINE)
_REQUEST_S = 120.0


def gauges_not_zero(port: int) -> dict[str, float]:
    """Every gauge of an instance that must be zero when nothing happens, and is not."""
    text = Client(port).get("/metrics").content.decode()
    found = {f"{name}{labels}": float(value) for name, labels, value in _GAUGE.findall(text)}
    return {name: value for name, value in found.items() if value and 'state="free"' not in name}


@dataclass(frozen=True)
class Footprint:
    """What a process holds of the system: file descriptors, threads, and mapped shared segments."""

    descriptors: int
    threads: int
    segments: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """That of a running process."""
        root = Path(f"/proc/{pid}")
        maps = (root / "maps").read_text()
        return cls(len(list((root / "fd").iterdir())), len(list((root / "task").iterdir())), maps.count("/dev/shm/"))  # noqa: S108


@dataclass
class Storm:
    """Sends requests through a router, so many at a time; a share of them is aborted at a random moment."""

    port: int
    seed: int
    concurrency: int = 32
    aborted_share: float = 0.1

    def run(self, requests: int) -> Counter[str]:
        """Send them all; how many had which fate: an HTTP status, `aborted`, or `broken`."""
        return asyncio.run(self._run(requests))

    async def _run(self, requests: int) -> Counter[str]:
        generator = random.Random(self.seed)
        gate = asyncio.Semaphore(self.concurrency)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            bodies = [self._body(generator) for _ in range(requests)]
            timeouts = [generator.uniform(0, 0.5) if generator.random() < self.aborted_share else None for _ in bodies]
            work = [self._one(session, gate, body, wait) for body, wait in zip(bodies, timeouts, strict=True)]
            return Counter(await asyncio.gather(*work))

    async def _one(
        self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, body: dict[str, Any], timeout_s: float | None
    ) -> str:
        async with gate:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._ask(session, body)
            except TimeoutError:
                return "aborted"
            except aiohttp.ClientError:
                return "broken"

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        async with session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as response:
            content = await response.read()
            return "error in the stream" if b'"error"' in content and response.status == 200 else str(response.status)

    def _body(self, generator: random.Random) -> dict[str, Any]:
        length = generator.randint(4, 200)
        prompt = [generator.randint(0, 255) for _ in range(length)]
        fields = {"prompt": prompt, "max_tokens": generator.randint(1, 12), "temperature": 0}
        return {**fields, "ignore_eos": True, "stream": generator.random() < 0.5}
