"""A P/D pair of vLLM on one GPU under stress: many requests at once, clients that leave, servers that are killed.

    gpu_storm.py MODEL [--mode push] [--no-kills]

Every answer is compared with that of one plain vLLM on the same GPU. Afterwards no hand-off may be live, no block held, and no
descriptor, thread or mapping of GPU memory be more than before. Prints one JSON object; exits with 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvbaton.config import HTTP_KEY_HEADER, HandoffSettings, http_token
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import Controls, EngineOptions, pair_parts
from kvbaton.engines.table import find_engine
from kvbaton.errors import KVBatonError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.verify.client import ask
from kvbaton.verify.compare import TokenAnswer, Verdict, compare

SIDES = ("prefill-0", "decode-0")
NAME = "storm"
BATCH = "equal to the single server in another batch"
"""Kernels round differently with the size of a batch, and a large model adds that up to more than the tolerance."""
SAME = ("equal", "near tie", BATCH)
LIVE = ("kvbaton_handoffs_live", "kvbaton_quarantined_blocks", "kv_cache_usage_perc", "num_requests_running")


@dataclass
class Stand:
    """The servers, and what was found."""

    fleet: Fleet
    parts: dict[str, FleetPart]
    router: str
    healthy_s: float
    session: aiohttp.ClientSession
    key: str
    generator: random.Random = field(default_factory=lambda: random.Random(4))
    problems: list[str] = field(default_factory=list)

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """A prompt that was never sent before."""
        return tuple(self.generator.randrange(100, 30_000) for _ in range(tokens))

    async def compared(self, prompt: tuple[int, ...], leave_after_s: float | None = None) -> str:
        """Ask the pair and the single server; the verdict, or what became of the request."""
        pair = asyncio.create_task(ask(self.session, self.router, NAME, prompt, 12))
        if leave_after_s is not None:
            try:
                await asyncio.wait_for(asyncio.shield(pair), leave_after_s)
            except TimeoutError:
                pair.cancel()
                return "left"
            except KVBatonError as error:
                return f"failed: {error}"
        try:
            single, handed = await asyncio.gather(ask(self.session, self.parts["single"].base_url, NAME, prompt, 12), pair)
        except KVBatonError as error:
            return f"failed: {error}"
        comparison = compare(single.answer, handed.answer)
        if comparison.verdict is not Verdict.DIFFERENT and not handed.record.get("handed_off"):
            return "not handed off"
        if comparison.verdict is Verdict.DIFFERENT and await self._agrees_in_another_batch(prompt, handed.answer):
            return BATCH
        return str(comparison.verdict) + (f": {comparison.detail}" if comparison.verdict is Verdict.DIFFERENT else "")

    async def _agrees_in_another_batch(self, prompt: tuple[int, ...], handed: TokenAnswer) -> bool:
        """Whether the single server gives this very answer when other requests share its steps."""
        for together in (1, 2, 4, 8, 16):
            url = self.parts["single"].base_url
            replies = await asyncio.gather(*(ask(self.session, url, NAME, prompt, 12) for _ in range(together)))
            if any(compare(reply.answer, handed).verdict is not Verdict.DIFFERENT for reply in replies):
                return True
        return False

    def metrics(self, name: str) -> dict[str, float]:
        """What a server still has under way."""
        with urllib.request.urlopen(f"{self.parts[name].base_url}/metrics", timeout=10) as answer:  # noqa: S310 - loopback
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if (match := re.match(r"vllm:(\w+)(?:\{.*\})? ([0-9.e+-]+)$", line)) and match[1] in LIVE:
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def resources(self, name: str) -> dict[str, int]:
        """Descriptors, threads and mappings of GPU memory of all processes of a server."""
        total = {"descriptors": 0, "threads": 0, "gpu_mappings": 0}
        for process in session_of(self.fleet.pid(name)):
            try:
                total["descriptors"] += len(list((process / "fd").iterdir()))
                total["threads"] += len(list((process / "task").iterdir()))
                total["gpu_mappings"] += (process / "maps").read_text().count("/dev/nvidia")
            except OSError:
                continue
        return total

    def _asked(self, path: str) -> Any:
        """What the decode server has noted of hand-offs."""
        headers = {HTTP_KEY_HEADER: http_token(self.key.encode())}
        request = urllib.request.Request(f"http://{self.parts['decode-0'].handoffs_address}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - loopback
            return json.loads(answer.read())

    def transfers(self) -> set[str]:
        """Those that the decode server knows."""
        return {each["transfer_id"] for each in self._asked("/handoffs")["handoffs"]}

    def stages(self, transfer: str) -> list[str]:
        """How far one has come there."""
        return [note["stage"] for side in self._asked(f"/handoffs/{transfer}")["sides"] for note in side["notes"]]

    async def quiet(self) -> dict[str, dict[str, float]]:
        """Wait until nothing is under way; an idle server publishes after a step, so it is asked for one now and then."""
        deadline = time.monotonic() + 45
        while True:
            now = {name: self.metrics(name) for name in SIDES}
            if not any(value for each in now.values() for value in each.values()):
                return now
            if time.monotonic() > deadline:
                self.problems.append(f"not quiet: {now}")
                return now
            await self.compared(self.prompt(40))
            await asyncio.sleep(0.5)


def session_of(leader: int) -> list[Path]:
    """The processes in the session of `leader`."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and os.getsid(int(path.name)) == leader:
                found.append(path)
        except OSError:
            continue
    return found


def count(stand: Stand, verdicts: list[str], allowed: tuple[str, ...]) -> dict[str, int]:
    """How often each; what is not allowed is a problem."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        kind = verdict.split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in allowed and len(stand.problems) < 20:
            stand.problems.append(verdict[:300])
    return counts


async def at_once(stand: Stand) -> dict[str, Any]:
    """64 requests in one moment."""
    prompts = [stand.prompt(stand.generator.randrange(16, 480)) for _ in range(64)]
    began = time.monotonic()
    verdicts = await asyncio.gather(*(stand.compared(prompt) for prompt in prompts))
    return {"requests": 64, "seconds": time.monotonic() - began, **count(stand, list(verdicts), SAME)}


async def with_aborts(stand: Stand) -> dict[str, Any]:
    """300 requests, 40 at a time; the clients of a third leave at any moment."""
    gate = asyncio.Semaphore(40)

    async def one() -> str:
        leave = stand.generator.uniform(0.0, 0.6) if stand.generator.random() < 1 / 3 else None
        async with gate:
            return await stand.compared(stand.prompt(stand.generator.randrange(16, 700)), leave)

    verdicts = await asyncio.gather(*(one() for _ in range(300)))
    return {"requests": 300, **count(stand, list(verdicts), (*SAME, "left"))}


STAGES = ("arrived", "announced", "confirmed", "first step")
"""Of a target: the request is there; prefill announces, and caches move; all of it is there; it is decoded."""


async def until_stage(stand: Stand, stage: str, known: set[str]) -> str:
    """Wait until the target of a hand-off that is not `known` has come so far; returns the last stage that it had by then."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for transfer in stand.transfers() - known:
            stages = stand.stages(transfer)
            if stage in stages:
                return stages[-1]
        await asyncio.sleep(0)
    stand.problems.append(f"no hand-off came to {stage!r}")
    return ""


async def killed(stand: Stand, name: str, stage: str) -> dict[str, Any]:
    """Kill one server when a hand-off has come so far; the other answers alone, and both again when it is back."""
    other = SIDES[1 - SIDES.index(name)]
    known = stand.transfers()
    under_way = [asyncio.create_task(stand.compared(stand.prompt(3000))) for _ in range(8)]
    last = await until_stage(stand, stage, known)
    os.killpg(stand.fleet.pid(name), signal.SIGKILL)
    verdicts = list(await asyncio.gather(*under_way))
    prompt = stand.prompt(700)
    single, alone = await asyncio.gather(
        *(ask(stand.session, stand.parts[each].base_url, NAME, prompt, 12) for each in ("single", other))
    )
    survives = compare(single.answer, alone.answer).verdict
    if survives is Verdict.DIFFERENT:
        stand.problems.append(f"{other} answers differently after {name} was killed")
    stand.fleet.restart(name)
    await asyncio.to_thread(stand.fleet.wait_healthy, stand.healthy_s)
    again: list[str] = []
    for _ in range(60):  # the router learns of the new one when it registers
        again = list(await asyncio.gather(*(stand.compared(stand.prompt(700)) for _ in range(6))))
        if not any(each.startswith("failed") for each in again):
            break
        await asyncio.sleep(0.5)
    return {
        "killed": name,
        "at": stage,
        "last_stage_seen": last,
        "under_way": count(stand, verdicts, (*SAME, "failed", "not handed off")),
        "the_other_alone": str(survives),
        "with_the_new_one": count(stand, again, SAME),
    }


async def run(
    fleet: Fleet, parts: dict[str, FleetPart], router: str, healthy_s: float, key: str, *, kills: bool
) -> dict[str, Any]:
    """Everything, in order."""
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        stand = Stand(fleet, parts, router, healthy_s, session, key)
        warm = list(await asyncio.gather(*(stand.compared(stand.prompt(200)) for _ in range(64))))
        report: dict[str, Any] = {"warm_up": count(stand, warm, SAME)}
        await stand.quiet()
        before = {name: stand.resources(name) for name in SIDES}
        report["at_once"] = await at_once(stand)
        report["with_aborts"] = await with_aborts(stand)
        report["left_over"] = await stand.quiet()
        after = {name: stand.resources(name) for name in SIDES}
        report["resources"] = {"before": before, "after": after}
        for name in SIDES:
            if (
                after[name]["gpu_mappings"] > before[name]["gpu_mappings"]
                or after[name]["threads"] > before[name]["threads"] + 2
            ):
                stand.problems.append(f"{name} has more than before: {before[name]}, {after[name]}")
        if kills:
            report["kills"] = [await killed(stand, name, stage) for stage in STAGES for name in SIDES]
            report["left_over_after_kills"] = await stand.quiet()
        return {"ok": not stand.problems, "problems": stand.problems, **report}


def main() -> int:
    """Start the servers, and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--mode", default="push")
    parser.add_argument("--transport", default="cuda")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--engine-arguments", default="--gpu-memory-utilization 0.04")
    chosen = parser.parse_args()
    engine = find_engine("vllm")
    options = EngineOptions(
        chosen.model,
        chosen.transport,
        3,
        HandoffSettings(mode=Mode(chosen.mode)),
        device="cuda",
        served_name=NAME,
        controls=Controls(poison=True),
        arguments=tuple(shlex.split(chosen.engine_arguments)),
    )
    engine.check_support(options)
    prepared = engine.prepare(options, lambda _: None)
    ports = PortPicker()
    router_port, discovery_port = ports.pick(), ports.pick()
    with Fleet() as fleet:
        fleet.start(router_part("127.0.0.1", router_port, discovery_port, cluster_key=options.cluster_key))
        parts = [*pair_parts(prepared, prepared, (1, 1), ports, discovery_port), prepared.part("single", "both", ports)]
        for part in parts:
            fleet.start(part)
        fleet.wait_healthy(engine.healthy_within_s)
        named = {part.name: part for part in parts}
        address = f"http://127.0.0.1:{router_port}"
        report = asyncio.run(
            run(fleet, named, address, engine.healthy_within_s, options.cluster_key, kills=not chosen.no_kills)
        )
    sys.stdout.write(json.dumps({"command": "gpu_storm", "mode": chosen.mode, "transport": chosen.transport, **report}) + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
