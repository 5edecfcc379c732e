"""What a hand-off costs a client: hand-over at low load, and the first token of push beside a prefill without any hand-off.

Hand-over is the time from the source having sampled its first token until the target's first decode step begins, wire time
taken off. For the first token the same instance answers both kinds of requests, in turns, with the same threads: through the
router with a hand-off behind it, and asked directly for one token. All prompts differ, so that no prefix is in a cache.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp
import numpy as np

from kvbaton.bench.asking import AskedPrompt, post, stream
from kvbaton.bench.report import BenchReport, BenchRow, Setting, check_at_least_one, describe_hardware
from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import EngineOptions, EnginePlugin, Progress, pair_parts
from kvbaton.errors import ConfigError, ProtocolError
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker

__all__ = ["ServeBench", "run_serve_bench", "start_pair"]

Series = dict[str, list[float]]

_REQUEST_S = 300.0
_BYTES = range(3, 250)
_ENGINES = 2


@dataclass(frozen=True, slots=True)
class ServeBench:
    """What to measure: so many requests of each kind, one at a time."""

    model: str = "smollm2"
    transport: str = "local"
    requests: int = 40
    prompt_tokens: int = 128
    chunk_tokens: int = 128
    chunks: int = 5
    rounds: int = 8
    max_tokens: int = 4

    def __post_init__(self) -> None:
        check_at_least_one(self, "requests", "prompt_tokens", "chunk_tokens", "rounds", "max_tokens")
        if self.chunks < 4:
            raise ConfigError(f"--chunks is {self.chunks}; the promise about the first token is for prompts of 4 and more")

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {name: getattr(self, name) for name in self.__slots__}


def run_serve_bench(bench: ServeBench, engine: EnginePlugin, progress: Progress) -> BenchReport:
    """Measure; writes no files but cached weights. Raises KVBatonError when instances or requests fail."""
    series: Series = {}
    for mode in Mode:
        progress(f"starting a router, a prefill and a decode instance ({mode})")
        with Fleet() as fleet:
            urls = start_pair(fleet, bench.model, bench.transport, mode, bench.chunk_tokens, engine, progress)
            series |= asyncio.run(_measure(bench, mode, *urls, progress))
    return BenchReport(_rows(bench, series), describe_hardware(), [series])


def start_pair(
    fleet: Fleet, model: str, transport: str, mode: Mode, step_tokens: int, engine: EnginePlugin, progress: Progress
) -> tuple[str, str]:
    """The URLs of the router and of the prefill instance alone, once all are healthy."""
    ports = PortPicker()
    router_port, discovery_port = ports.pick(), ports.pick()
    handoff = HandoffSettings(mode=mode)
    options = EngineOptions(model, transport, _ENGINES, handoff, step_tokens=step_tokens)
    engine.check_support(options)
    side = engine.prepare(options, progress)
    fleet.start(router_part("127.0.0.1", router_port, discovery_port, cluster_key=options.cluster_key))
    parts = pair_parts(side, side, (1, 1), ports, discovery_port)
    for part in parts:
        fleet.start(part)
    fleet.wait_healthy(engine.healthy_within_s)
    return f"http://127.0.0.1:{router_port}", parts[0].base_url


async def _measure(bench: ServeBench, mode: Mode, pair_url: str, prefill_url: str, progress: Progress) -> Series:
    generator = random.Random(mode.value)
    taken: Series = {_handover(mode): [], _pair(mode): [], _alone(mode): []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_S)) as session:
        await post(session, pair_url, _body(generator, bench.prompt_tokens, bench.max_tokens))
        progress(f"{bench.requests} hand-overs, one at a time")
        for _ in range(bench.requests):
            document = await post(session, pair_url, _body(generator, bench.prompt_tokens, bench.max_tokens))
            taken[_handover(mode)].append(_handover_s(document))
        tokens = bench.chunks * bench.chunk_tokens
        for index in range(bench.rounds):
            progress(f"first token of {tokens} tokens with and without a hand-off: {index + 1} of {bench.rounds}")
            kinds = [(_pair(mode), pair_url, bench.max_tokens), (_alone(mode), prefill_url, 1)]
            for name, url, wanted in kinds if index % 2 else reversed(kinds):
                answered = await stream(session, url, _body(generator, tokens, wanted), time.perf_counter())
                taken[name].append(answered.first_token_s)
    return taken


def _body(generator: random.Random, tokens: int, max_tokens: int) -> dict[str, object]:
    return AskedPrompt("", tuple(generator.choices(_BYTES, k=tokens)), max_tokens).body()


def _handover_s(document: dict[str, object]) -> float:
    record = document.get("kvbaton")
    if not isinstance(record, dict) or not record.get("handed_off"):
        raise ProtocolError(f"the answer was not handed off: {record!r}")
    return float(record["handover_s"])


def _rows(bench: ServeBench, series: Series) -> list[BenchRow]:
    settings = bench.described()
    rows = []
    for mode in Mode:
        values = series[_handover(mode)]
        for percent in (50, 99):
            value = float(np.percentile(values, percent))
            other = float(np.percentile(series[_handover(Mode.PULL)], percent))
            name = f"hand-over p{percent}, {mode}"
            rows.append(BenchRow(name, value * 1e3, "ms", "pull", value / other if other else 1.0, settings))
    for mode in Mode:
        pair, alone = (float(np.median(series[name])) for name in (_pair(mode), _alone(mode)))
        name = f"first token, {mode}, {bench.chunks} chunks"
        rows.append(BenchRow(name, pair, "s", "the same prefill without a hand-off", pair / alone, settings))
    return rows


def _handover(mode: Mode) -> str:
    return f"hand-over, {mode}"


def _pair(mode: Mode) -> str:
    return f"first token, {mode}"


def _alone(mode: Mode) -> str:
    return f"first token without a hand-off, beside {mode}"
