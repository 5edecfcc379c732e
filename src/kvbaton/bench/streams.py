"""What hand-offs cost the streams that a decode instance serves already: the time between two tokens, as their clients see it.

A few long streams run through a router to a pair. Meanwhile nothing else is asked for, or so many short prompts a second: of
the prefill instance alone, which hands nothing over, or of the pair. The three take turns. Prefills alone are the peer of
hand-offs: they take the same processors for the same prompts, so that what differs is the hand-off and one step of decode.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import numpy as np

from kvbaton.bench.asking import AskedPrompt, post, token_times
from kvbaton.bench.report import BenchReport, BenchRow, Setting, check_at_least_one, describe_hardware, ratio
from kvbaton.bench.serve import start_pair
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import EnginePlugin, Progress
from kvbaton.errors import ConfigError, LocalError
from kvbaton.launch.fleet import Fleet

__all__ = ["Arriving", "StreamsBench", "gaps_between", "run_streams_bench"]

_REQUEST_S = 300.0
_BYTES = range(3, 250)
_CHUNK_TOKENS = 128
_HANDED_OFF_TOKENS = 2
_MOST_PENDING = 64


class Arriving(enum.StrEnum):
    """What is asked for while the streams run."""

    NOTHING = "nothing else"
    PREFILLS = "prefills alone"
    HANDOFFS = "hand-offs"


@dataclass(frozen=True, slots=True)
class StreamsBench:
    """What to measure: `streams` at a time, of `stream_tokens` tokens each, beside `per_s` prompts a second."""

    model: str = "smollm2"
    transport: str = "local"
    mode: Mode = Mode.PUSH
    streams: int = 2
    stream_tokens: int = 100
    per_s: float = 20.0
    prompt_tokens: int = 16
    rounds: int = 5

    def __post_init__(self) -> None:
        check_at_least_one(self, "streams", "prompt_tokens", "rounds")
        if self.stream_tokens < 3:
            raise ConfigError(f"--stream-tokens is {self.stream_tokens}; the time between two needs at least 3")
        if not 0 < self.per_s <= 1000:
            raise ConfigError(f"--per-s is {self.per_s:g}; it must be above 0, and 1000 at most")

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "mode": self.mode.value}


def run_streams_bench(bench: StreamsBench, engine: EnginePlugin, progress: Progress) -> BenchReport:
    """Measure; every time between two tokens is kept, by round. Raises KVBatonError when instances or requests fail."""
    progress(f"starting a router, a prefill and a decode instance ({bench.mode})")
    with Fleet() as fleet:
        urls = start_pair(fleet, bench.model, bench.transport, bench.mode, _CHUNK_TOKENS, engine, progress)
        rounds = asyncio.run(_measure(bench, *urls, progress))
    return BenchReport(_rows(bench, rounds), describe_hardware(), rounds)


async def _measure(bench: StreamsBench, pair_url: str, prefill_url: str, progress: Progress) -> list[dict[str, list[float]]]:
    generator = random.Random(bench.mode.value)
    rounds: list[dict[str, list[float]]] = []
    kinds = tuple(Arriving)
    connector = aiohttp.TCPConnector(limit=bench.streams + _MOST_PENDING)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        ask = {
            Arriving.PREFILLS: lambda: post(session, prefill_url, _body(generator, bench.prompt_tokens, 1)),
            Arriving.HANDOFFS: lambda: post(session, pair_url, _body(generator, bench.prompt_tokens, _HANDED_OFF_TOKENS)),
        }
        await ask[Arriving.HANDOFFS]()
        for index in range(bench.rounds):
            taken: dict[str, list[float]] = {}
            for kind in (*kinds[index % 3 :], *kinds[: index % 3]):
                progress(f"round {index + 1} of {bench.rounds}: {bench.streams} streams beside {kind}")
                bodies = [_body(generator, bench.prompt_tokens, bench.stream_tokens) for _ in range(bench.streams)]
                running = asyncio.gather(*(token_times(session, pair_url, body) for body in bodies))
                began = time.perf_counter()
                answered = 0 if kind is Arriving.NOTHING else await _ask_while(running, ask[kind], bench.per_s)
                taken[kind.value] = gaps_between(await running)
                taken[f"{kind} answered per second"] = [answered / (time.perf_counter() - began)]
            rounds.append(taken)
    return rounds


async def _ask_while(running: asyncio.Future[list[list[float]]], ask: Callable[[], Awaitable[object]], per_s: float) -> int:
    """Ask so many times a second until the streams have ended, and wait for every answer; how many there were by that end.

    Where answers do not keep up, no more than a bounded number is waited for at a time.
    """
    pending: set[asyncio.Future[object]] = set()
    answered, next_at = 0, time.perf_counter()
    while not running.done():
        done = {each for each in pending if each.done()}
        pending -= done
        answered += len([each.result() for each in done])
        if len(pending) < _MOST_PENDING:
            pending.add(asyncio.ensure_future(ask()))
        next_at = max(next_at + 1 / per_s, time.perf_counter())
        await asyncio.wait({running}, timeout=next_at - time.perf_counter())
    await asyncio.gather(*pending)
    return answered


def gaps_between(times: list[list[float]]) -> list[float]:
    """The time between each two tokens of a stream, while all of them ran. Raises LocalError when they never did together."""
    since, until = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    gaps = [
        after - before for stream in times for before, after in itertools.pairwise(stream) if before >= since and after <= until
    ]
    if not gaps:
        raise LocalError("the streams did not run at the same time; ask for longer ones with --stream-tokens")
    return gaps


def _body(generator: random.Random, tokens: int, max_tokens: int) -> dict[str, object]:
    return AskedPrompt("", tuple(generator.choices(_BYTES, k=tokens)), max_tokens).body()


def _rows(bench: StreamsBench, rounds: list[dict[str, list[float]]]) -> list[BenchRow]:
    rows = []
    for kind, peer in ((Arriving.PREFILLS, Arriving.NOTHING), (Arriving.HANDOFFS, Arriving.PREFILLS)):
        reached = float(np.median([one[f"{kind} answered per second"][0] for one in rounds]))
        settings = {**bench.described(), "answered_per_s": round(reached, 1)}
        for percent in (50, 99):
            value, beside = (_percentile(rounds, each, percent) for each in (kind, peer))
            rows.append(BenchRow(f"between tokens p{percent}, {kind}", value * 1e3, "ms", peer, ratio(value, beside), settings))
    return rows


def _percentile(rounds: list[dict[str, list[float]]], kind: Arriving, percent: int) -> float:
    """The median over the rounds of this percentile in each."""
    return float(np.median([np.percentile(one[kind.value], percent) for one in rounds]))
