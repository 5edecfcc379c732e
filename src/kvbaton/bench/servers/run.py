"""What a hand-off between two servers costs, beside one server alone and beside another connector, in one run.

All servers are up all the time, with the same model, threads and settings; those that are not being measured are paused
(SIGSTOP), because an idle server of some connectors keeps a core busy. Variants take turns within a round, in a changing
order, with the same prompts. A prompt is new in every round, so that no prefix is in a cache.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from dataclasses import dataclass

import aiohttp

from kvbaton.bench.report import BenchReport, Setting, describe_hardware
from kvbaton.bench.servers.asking import AskedPrompt
from kvbaton.bench.servers.processes import available_memory_bytes
from kvbaton.bench.servers.rows import Round, name_of, rows_of
from kvbaton.bench.servers.variants import SINGLE, Variant, Variants
from kvbaton.core.handoff import Mode, Outcome
from kvbaton.core.timeline import Side
from kvbaton.engines.base import OWN_CONNECTOR, EngineOptions, EnginePlugin, Progress
from kvbaton.errors import ConfigError, LocalError, PeerError
from kvbaton.observe.transfer_report import HandoffReport

__all__ = ["ServersBench", "run_servers_bench"]

_SERVED = "bench"
_TOKEN_IDS = range(1000, 40_000)
_CACHE_BLOCKS = 64
_SETTLE_S = 1.0
_REQUEST_S = 300.0
_MAX_DIFFERENT = 0.02
_THREADS_FOR = 2
"""Servers that share the cores at a time: each has the threads that it would have in a pair, the single one too."""


@dataclass(frozen=True, slots=True)
class ServersBench:
    """What to measure: prompts of these lengths, `rounds` of each in each variant, one at a time."""

    engine: EnginePlugin
    model: str = "smollm2"
    transport: str = "local"
    modes: tuple[Mode, ...] = (Mode.PUSH, Mode.PULL)
    peer: str = ""
    """Another connector of the engine to compare with."""
    lengths: tuple[int, ...] = (128, 512, 1500)
    rounds: int = 10
    max_tokens: int = 4
    idle_s: float = 6.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds is {self.rounds}; it must be at least 1")
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError(f"--lengths is {self.lengths}; prompts have at least 1 token")

    @property
    def ours(self) -> dict[str, Mode]:
        """Kvbaton's pairs by their names."""
        return {f"{OWN_CONNECTOR} {mode}": mode for mode in self.modes}

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of what is measured, in order."""
        return (SINGLE, *self.ours, *((self.peer,) if self.peer else ()))

    @property
    def servers(self) -> int:
        """How many servers are up at once."""
        return 1 + 2 * (len(self.modes) + bool(self.peer))

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {
            "engine": self.engine.name,
            "model": self.model,
            "transport": self.transport,
            "modes": ",".join(self.modes),
            "peer": self.peer or "none",
            "lengths": ",".join(map(str, self.lengths)),
            "rounds": self.rounds,
            "max_tokens": self.max_tokens,
            **self.engine.versions(self.peer),
        }


def run_servers_bench(bench: ServersBench, progress: Progress) -> BenchReport:
    """Install, start, measure and stop. Raises LocalError when there is too little memory, KVBatonError when servers fail."""
    options = EngineOptions(bench.model, bench.transport, _THREADS_FOR, cache_blocks=_CACHE_BLOCKS, served_name=_SERVED)
    context = bench.engine.check(options, options, progress).context_tokens
    if max(bench.lengths) > context - bench.max_tokens:
        raise ConfigError(f"--lengths is {bench.lengths}; from 1 to {context - bench.max_tokens} tokens are possible")
    _check_memory(bench)
    with ExitStack() as kept:
        start = Variants(bench.engine, options, kept, progress)
        variants = [start.single(), *(start.pair(name, mode, OWN_CONNECTOR) for name, mode in bench.ours.items())]
        if bench.peer:
            variants.append(start.pair(bench.peer, Mode.PULL, bench.peer))
        rounds, problems = asyncio.run(_Measurement(bench, variants, progress).run())
    rows = list(rows_of(bench.lengths, bench.variants, rounds, bench.peer or SINGLE))
    return BenchReport(rows, _hardware(), rounds, problems)


def _check_memory(bench: ServersBench) -> None:
    needed, there = bench.servers * bench.engine.server_bytes, available_memory_bytes()
    if needed > there:
        raise LocalError(
            f"{bench.servers} {bench.engine.title} servers at once need about {needed / 1e9:.0f} GB of memory, "
            f"{there / 1e9:.0f} GB are free; end other programs, or measure one mode with --mode"
        )


def _hardware() -> dict[str, Setting]:
    return {name: value for name, value in describe_hardware().items() if name != "blas_threads"}


class _Measurement:
    def __init__(self, bench: ServersBench, variants: list[Variant], progress: Progress) -> None:
        self._bench = bench
        self._variants = variants
        self._progress = progress
        self._answers: dict[tuple[int, int, str], str] = {}
        self._problems: list[str] = []

    async def run(self) -> tuple[list[Round], list[str]]:
        """Warm up, look at the idle servers, then measure round by round."""
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            idle: Round = {}
            for variant in self._variants:
                idle |= await self._warm_up(session, variant)
            rounds = [await self._round(session, index) for index in range(self._bench.rounds)]
        rounds[0] |= idle
        asked = self._bench.rounds * len(self._bench.lengths) * len(self._bench.modes)
        if (different := self._different()) > _MAX_DIFFERENT * asked:
            self._problems.append(f"{different} of {asked} answers were not those of {SINGLE}")
        return rounds, self._problems

    async def _warm_up(self, session: aiohttp.ClientSession, variant: Variant) -> Round:
        """The first requests make the handshakes and touch the memory; then nothing happens for a while."""
        variant.processes.resume()
        try:
            for length in self._bench.lengths:
                await variant.asking.ask(session, self._prompt(-1, length))
            await asyncio.sleep(2 * _SETTLE_S)
            before = variant.processes.cpu_s()
            await asyncio.sleep(self._bench.idle_s)
            share = (variant.processes.cpu_s() - before) / self._bench.idle_s
        finally:
            variant.processes.pause()
        self._progress(f"{variant.name}, {variant.servers} idle: {share * 100:.0f} % of a core")
        return {name_of("idle cores", variant.name): [share]}

    async def _round(self, session: aiohttp.ClientSession, index: int) -> Round:
        turn = index % len(self._variants)
        taken: Round = {}
        for variant in (*self._variants[turn:], *self._variants[:turn]):
            variant.processes.resume()
            try:
                await asyncio.sleep(_SETTLE_S)
                for length in self._bench.lengths:
                    taken |= await self._one(session, variant, index, length)
            finally:
                variant.processes.pause()
        self._progress(f"round {index + 1} of {self._bench.rounds}: {self._line(taken)}")
        return taken

    async def _one(self, session: aiohttp.ClientSession, variant: Variant, index: int, length: int) -> Round:
        cpu = variant.processes.cpu_s()
        answered = await variant.asking.ask(session, self._prompt(index, length))
        await asyncio.sleep(_SETTLE_S / 2)
        used = variant.processes.cpu_s() - cpu
        self._answers[index, length, variant.name] = answered.text
        taken = {
            name_of("first token", variant.name, length): [answered.first_token_s],
            name_of("prefill answered", variant.name, length): [answered.prefill_s],
            name_of("total", variant.name, length): [answered.total_s],
            name_of("cpu", variant.name, length): [used],
        }
        try:
            story = await asyncio.to_thread(variant.story, answered.transfer_id)
        except PeerError as error:
            self._problems.append(f"{variant.name}, {length} tokens: {error}")
            return taken
        return taken if story is None else taken | self._stages(variant, length, story)

    def _stages(self, variant: Variant, length: int, story: HandoffReport) -> Round:
        end = next(end for end in story.ends if end.side is Side.TARGET)
        if end.outcome is not Outcome.DELIVERED or story.exposed_s is None:
            self._problems.append(f"{variant.name}, {length} tokens: not handed over ({story.sentence})")
            return {}
        taken = {name_of(f"stage {wait.phase}", variant.name, length): [wait.seconds] for wait in story.waits}
        taken[name_of("exposed", variant.name, length)] = [story.exposed_s]
        taken[name_of("hidden wire", variant.name, length)] = [story.hidden_s]
        return taken

    def _different(self) -> int:
        """How many answers of our pairs differ from the single server's."""
        ours = [key for key in self._answers if key[2] in self._bench.ours]
        return sum(self._answers[key] != self._answers[key[0], key[1], SINGLE] for key in ours)

    def _prompt(self, index: int, length: int) -> AskedPrompt:
        generator = random.Random(f"{index} {length}")
        return AskedPrompt(_SERVED, tuple(generator.choices(_TOKEN_IDS, k=length)), self._bench.max_tokens)

    def _line(self, taken: Round) -> str:
        parts = []
        for variant in self._variants:
            seconds = [taken[name_of("first token", variant.name, length)][0] for length in self._bench.lengths]
            parts.append(f"{variant.name} {' / '.join(f'{each * 1e3:,.0f}' for each in seconds)} ms")
        return "; ".join(parts)
