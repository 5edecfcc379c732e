"""What hand-offs cost the streams that a decode instance serves already: the time between two tokens, as their clients see it.

A few long streams run through a router to a pair. Meanwhile nothing else is asked for, or so many short prompts a second: of
the prefill instance alone, which hands nothing over, or of the pair. The three take turns. Prefills alone are the peer of
hand-offs: they take the same processors for the same prompts, so that what differs is the hand-off and one step of decode.

With servers of another engine there is no router: the streams are asked of the decode server, which computes their prompts, and
the client asks for hand-offs as it does in `bench/servers.py`. A pair with another connector can take turns with ours; the pair
whose turn it is not stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from kvbaton.bench.asking import AskedPrompt, post, token_times
from kvbaton.bench.report import BenchReport, BenchRow, Setting, check_at_least_one, describe_hardware, ratio
from kvbaton.bench.serve import start_pair
from kvbaton.bench.servers import SERVED_NAME, SETTLE_S, THREADS_FOR, Variant, Variants, check_memory
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import OWN_CONNECTOR, EngineOptions, EnginePlugin, Progress
from kvbaton.errors import ConfigError, LocalError
from kvbaton.launch.fleet import Fleet

__all__ = ["Arriving", "StreamsBench", "gaps_between", "rows_beside", "run_server_streams_bench", "run_streams_bench"]

_REQUEST_S = 300.0
_BYTES = range(3, 250)
_CHUNK_TOKENS = 128
_HANDED_OFF_TOKENS = 2
_MOST_PENDING = 64
_CACHE_BLOCKS = 256

Round = dict[str, list[float]]
Ask = Callable[[], Awaitable[object]]


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
    peer: str = ""
    """Another connector of the engine to compare with, where servers are measured."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "streams", "prompt_tokens", "rounds")
        if self.stream_tokens < 3:
            raise ConfigError(f"--stream-tokens is {self.stream_tokens}; the time between two needs at least 3")
        if not 0 < self.per_s <= 1000:
            raise ConfigError(f"--per-s is {self.per_s:g}; it must be above 0, and 1000 at most")

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "mode": self.mode.value, "peer": self.peer or "none"}


def run_streams_bench(bench: StreamsBench, engine: EnginePlugin, progress: Progress) -> BenchReport:
    """Measure; every time between two tokens is kept, by round. Raises KVBatonError when instances or requests fail."""
    progress(f"starting a router, a prefill and a decode instance ({bench.mode})")
    with Fleet() as fleet:
        urls = start_pair(fleet, bench.model, bench.transport, bench.mode, _CHUNK_TOKENS, engine, progress)
        rounds = asyncio.run(_measure(bench, *urls, progress))
    return BenchReport(_rows(bench, rounds), describe_hardware(), rounds)


async def _measure(bench: StreamsBench, pair_url: str, prefill_url: str, progress: Progress) -> list[Round]:
    generator = random.Random(bench.mode.value)
    rounds: list[Round] = []
    async with _session(bench) as session:
        ask: dict[Arriving, Ask] = {
            Arriving.PREFILLS: lambda: post(session, prefill_url, _body(generator, bench.prompt_tokens, 1)),
            Arriving.HANDOFFS: lambda: post(session, pair_url, _body(generator, bench.prompt_tokens, _HANDED_OFF_TOKENS)),
        }
        await ask[Arriving.HANDOFFS]()
        for index in range(bench.rounds):
            taken: Round = {}
            for kind in _in_turn(index):
                progress(f"round {index + 1} of {bench.rounds}: {bench.streams} streams beside {kind}")
                bodies = [_body(generator, bench.prompt_tokens, bench.stream_tokens) for _ in range(bench.streams)]
                taken |= await _beside(session, pair_url, bodies, kind, ask, bench.per_s)
            rounds.append(taken)
    return rounds


def _session(bench: StreamsBench) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=bench.streams + 2 * _MOST_PENDING)  # a pair of servers is asked twice
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_S), connector=connector)


def _in_turn(index: int) -> tuple[Arriving, ...]:
    kinds = tuple(Arriving)
    return (*kinds[index % len(kinds) :], *kinds[: index % len(kinds)])


async def _beside(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[dict[str, object]],
    kind: Arriving,
    ask: Mapping[Arriving, Ask],
    per_s: float,
) -> Round:
    """The times between tokens of these streams beside one kind of load, and how many answers that had per second."""
    running = asyncio.gather(*(token_times(session, url, body) for body in bodies))
    began = time.perf_counter()
    answered = 0 if kind is Arriving.NOTHING else await _ask_while(running, ask[kind], per_s)
    gaps = gaps_between(await running)
    return {kind.value: gaps, f"{kind} answered per second": [answered / (time.perf_counter() - began)]}


async def _ask_while(running: asyncio.Future[list[list[float]]], ask: Ask, per_s: float) -> int:
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


def _rows(bench: StreamsBench, rounds: list[Round]) -> list[BenchRow]:
    rows = []
    for kind, peer in ((Arriving.PREFILLS, Arriving.NOTHING), (Arriving.HANDOFFS, Arriving.PREFILLS)):
        reached = float(np.median([one[f"{kind} answered per second"][0] for one in rounds]))
        settings = {**bench.described(), "answered_per_s": round(reached, 1)}
        for percent in (50, 99):
            value, beside = (_percentile(rounds, each, percent) for each in (kind, peer))
            rows.append(BenchRow(f"between tokens p{percent}, {kind}", value * 1e3, "ms", peer, ratio(value, beside), settings))
    return rows


def _percentile(rounds: list[Round], kind: str, percent: int) -> float:
    """The median over the rounds of this percentile in each."""
    return float(np.median([np.percentile(one[kind], percent) for one in rounds]))


def run_server_streams_bench(bench: StreamsBench, engine: EnginePlugin, progress: Progress) -> BenchReport:
    """Measure servers of another engine than the embedded one, and beside them a pair with the peer's connector.

    Raises KVBatonError when servers or requests fail, or where there is too little memory.
    """
    if engine.meets_in_rooms:
        raise ConfigError(f"--engine is {engine.name}: its decode servers answer nothing without a prefill server; choose vllm")
    options = EngineOptions(
        bench.model, bench.transport, THREADS_FOR, cache_blocks=_CACHE_BLOCKS, cache_dtype="float32", served_name=SERVED_NAME
    )
    engine.check_support(options)
    token_ids = engine.check(options, options, progress).token_ids
    check_memory(engine, 4 if bench.peer else 2, "measure without --peer")
    with contextlib.ExitStack() as kept:
        start = Variants(engine, (options, options), kept, progress)
        variants = [start.pair(f"{OWN_CONNECTOR} {bench.mode}", bench.mode, OWN_CONNECTOR)]
        if bench.peer:
            variants.append(start.pair(bench.peer, Mode.PULL, bench.peer))
        rounds = asyncio.run(_measure_servers(bench, variants, token_ids, progress))
    return BenchReport(rows_beside(bench, [each.name for each in variants], rounds), describe_hardware(), rounds)


async def _measure_servers(bench: StreamsBench, variants: list[Variant], token_ids: range, progress: Progress) -> list[Round]:
    generator = random.Random(bench.mode.value)
    rounds: list[Round] = []

    def prompt(max_tokens: int) -> AskedPrompt:
        return AskedPrompt(SERVED_NAME, tuple(generator.choices(token_ids, k=bench.prompt_tokens)), max_tokens)

    async with _session(bench) as session:
        for index in range(bench.rounds + 1):  # the first is to warm up
            taken: Round = {}
            for variant in variants if index % 2 else reversed(variants):
                variant.processes.resume()
                try:
                    await asyncio.sleep(SETTLE_S)
                    for kind in _in_turn(index):
                        progress(f"round {index} of {bench.rounds}: {variant.name}, {bench.streams} streams beside {kind}")
                        measured = await _beside_pair(session, bench, variant, kind, prompt)
                        taken |= {f"{variant.name}, {name}": values for name, values in measured.items()}
                finally:
                    variant.processes.pause()
            rounds.append(taken)
    return rounds[1:]


async def _beside_pair(
    session: aiohttp.ClientSession,
    bench: StreamsBench,
    variant: Variant,
    kind: Arriving,
    prompt: Callable[[int], AskedPrompt],
) -> Round:
    prefill, decode = variant.urls
    ask: dict[Arriving, Ask] = {
        Arriving.PREFILLS: lambda: post(session, prefill, prompt(1).body()),
        Arriving.HANDOFFS: lambda: variant.asking.ask(session, prompt(_HANDED_OFF_TOKENS)),
    }
    bodies = [prompt(bench.stream_tokens).body() for _ in range(bench.streams)]
    used = variant.processes.cpu_s()
    taken = await _beside(session, decode, bodies, kind, ask, bench.per_s)
    return {**taken, f"{kind} processor seconds": [variant.processes.cpu_s() - used]}


def rows_beside(bench: StreamsBench, names: Sequence[str], rounds: list[Round]) -> list[BenchRow]:
    """Every kind of load of every pair; hand-offs of ours beside those of the peer, where there is one."""
    rows = []
    for name, kind, percent in itertools.product(names, Arriving, (50, 99)):
        key = f"{name}, {kind}"
        peer = f"{name}, {Arriving.NOTHING if kind is Arriving.PREFILLS else Arriving.PREFILLS}"
        if kind is Arriving.NOTHING:
            peer = key
        elif kind is Arriving.HANDOFFS and name != names[-1]:
            peer = f"{names[-1]}, {kind}"
        value, beside = (_percentile(rounds, each, percent) for each in (key, peer))
        reached = float(np.median([one[f"{key} answered per second"][0] for one in rounds]))
        used = float(np.median([one[f"{key} processor seconds"][0] for one in rounds]))
        settings = {**bench.described(), "answered_per_s": round(reached, 1), "processor_s": round(used, 2)}
        rows.append(BenchRow(f"between tokens p{percent}, {key}", value * 1e3, "ms", peer, ratio(value, beside), settings))
    return rows
