"""Many hand-offs at once: two bare instances in real processes, and how speed changes with the number in flight.

For each level so many hand-offs are kept in flight. The first `level` completions warm it up, the next `handoffs` are measured,
and the load stays on until the last of those is in: what is measured is a steady state, of the same number of hand-offs of the
same size at each level. Levels, kinds of integrity and the peer, raw NIXL, take turns within a round.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvbaton.bench.bare.instance import BareSettings, HandoffEnd, Task
from kvbaton.bench.bare.pages import SMALL
from kvbaton.bench.bare.process import BareProcess, Relay
from kvbaton.bench.bare.raw_nixl import RawNixlProcess
from kvbaton.bench.report import BenchReport, BenchRow, Setting, check_at_least_one, describe_hardware
from kvbaton.config import BUSY_POLL_S, HandoffSettings
from kvbaton.core.handoff import Confirmation, Integrity, Mode, Outcome
from kvbaton.engines.base import Progress
from kvbaton.errors import ConfigError, LocalError
from kvbaton.transport.nixl import check_nixl

__all__ = ["HandoffBench", "run_handoff_bench"]

Round = dict[str, list[float]]

_CHUNKS = 2
_ROUND_S = 300.0
_REPORT_S = 0.05
_CORE = "one core"
_RAW_NIXL = "raw NIXL"


@dataclass(frozen=True, slots=True)
class HandoffBench:
    """What to measure. With `beside_nixl`, the same hand-offs by raw NIXL agents too; they move whole blocks.

    With `confirmation` by message, targets ask for each, as they have to on another host. `busy_poll_s` is that of both sides.
    """

    levels: tuple[int, ...] = (128, 512, 1024, 4096)
    mode: Mode = Mode.PUSH
    transport: str = "local"
    tokens: int = 64
    integrity: tuple[Integrity, ...] = (Integrity.OFF,)
    handoffs: int = 4096
    rounds: int = 3
    every_byte: bool = False
    idle_s: float = 6.0
    beside_nixl: bool = False
    confirmation: Confirmation = Confirmation.STAMP
    busy_poll_s: float = BUSY_POLL_S

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1:
            raise ConfigError(f"--concurrency is {self.levels}; give numbers from 1 up, with commas between them")
        check_at_least_one(self, "tokens", "handoffs", "rounds")
        if not 0 < self.idle_s < _ROUND_S:
            raise ConfigError(f"--idle is {self.idle_s:g}; it must be above 0 and below {_ROUND_S:g}")
        if self.beside_nixl and self.tokens % SMALL.block_tokens:
            raise ConfigError(f"--tokens is {self.tokens}; with --peer nixl it must be a multiple of {SMALL.block_tokens}")

    @property
    def cases(self) -> tuple[_HandoffCase, ...]:
        """Every kind of integrity at every level."""
        return tuple(itertools.starmap(_HandoffCase, itertools.product(self.integrity, self.levels)))

    @property
    def peer_cases(self) -> tuple[_HandoffCase, ...]:
        """Raw NIXL at every level, if it is measured."""
        return tuple(_HandoffCase(None, level) for level in self.levels) if self.beside_nixl else ()

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk of a prefill: whole blocks, about half of the prompt."""
        return max(1, SMALL.blocks_for(self.tokens) // _CHUNKS) * SMALL.block_tokens

    def bare_settings(self, integrity: Integrity | None) -> BareSettings:
        """The settings of both instances of a pair."""
        return BareSettings(
            blocks=max(self.levels) * SMALL.blocks_for(self.tokens),
            most_tokens=self.tokens,
            transport=self.transport,
            handoff=HandoffSettings(
                mode=self.mode,
                integrity=integrity or Integrity.OFF,
                confirmation=self.confirmation,
                busy_poll_s=self.busy_poll_s,
            ),
            # Nothing waits for one report: one for each end would wake this process as often as the agents, on the same cores.
            report_s=_REPORT_S,
        )

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {
            "concurrency": ",".join(map(str, self.levels)),
            "mode": self.mode.value,
            "transport": self.transport,
            "tokens": self.tokens,
            "integrity": ",".join(self.integrity),
            "handoffs": self.handoffs,
            "rounds": self.rounds,
            "bytes_per_handoff": SMALL.cache_bytes(self.tokens),
            "peer": "nixl" if self.beside_nixl else "",
            "confirmation": self.confirmation.value,
            "busy_poll_s": self.busy_poll_s,
        }


@dataclass(frozen=True, slots=True)
class _HandoffCase:
    """A kind of integrity, or None for raw NIXL, at a level."""

    integrity: Integrity | None
    level: int

    def series(self, what: str) -> str:
        """The name under which a round holds a measurement of this case."""
        return f"{what}, {self.level} in flight, {_named(self.integrity)}"


class _BarePair:
    """A source and a target with the same settings."""

    def __init__(self, bench: HandoffBench, integrity: Integrity | None, parts: ExitStack) -> None:
        settings, kind = bench.bare_settings(integrity), RawNixlProcess if integrity is None else BareProcess
        self._bench = bench
        self.source = parts.enter_context(kind(f"source ({_named(integrity)})", settings))
        self.target = parts.enter_context(kind(f"target ({_named(integrity)})", settings))
        self._relay = Relay([self.source, self.target])

    def wait_until_up(self) -> None:
        """Wait until both run, so that nothing of their start is measured."""
        for process in (self.source, self.target):
            if process.here.pid != process.pid:
                raise LocalError(
                    f"{process.name} runs as process {process.here.pid}, not as {process.pid}; something is between"
                )

    def measure(self, name: str, level: int) -> Round:
        """Keep `level` hand-offs in flight; the measured completions, and what was wrong besides."""
        bench = self._bench
        count = bench.handoffs + 2 * level
        task = Task(name, bench.mode, count, level, bench.tokens, bench.chunk_tokens, bench.every_byte)
        before = self._cpu()
        self._relay.begin(task, self.source, self.target)
        ends = [self._relay.ends[name, process.name] for process in (self.source, self.target)]
        self._relay.wait(lambda: all(len(side) == count for side in ends), f"{count} hand-offs at {level} in flight", _ROUND_S)
        spent = {name: (seconds - before[name]) / count for name, seconds in self._cpu().items()}
        measured = ends[1][level : level + bench.handoffs]
        return {
            "seconds": [measured[-1].at - ends[1][level - 1].at],
            "latencies": [round(end.seconds, 5) for end in measured],
            "incomplete": [float(_not_delivered(ends[0]) + _not_delivered(ends[1]))],
            **{name: [seconds] for name, seconds in spent.items()},
        }

    def _cpu(self) -> dict[str, float]:
        """Processor seconds of each side so far, and what of them its stand-in for an engine used."""
        sides = {"source": self.source, "target": self.target}
        return {f"{name}_cpu": side.cpu_s() for name, side in sides.items()} | {
            f"{name}_engine_cpu": side.engine_cpu_s() for name, side in sides.items()
        }

    def problems(self) -> Iterator[str]:
        """What must not be left over when all is done."""
        for process in (self.source, self.target):
            gauges = process.gauges()
            if gauges.blocks_in_use:
                yield f"{process.name} still has {gauges.blocks_in_use} blocks in use"
            if gauges.live:
                yield f"{process.name} still has {gauges.live} live hand-offs"
            if gauges.foreign_bytes:
                yield f"{process.name} found {gauges.foreign_bytes} bytes in landed caches that do not belong there"

    def idle_cores(self, seconds: float) -> list[float]:
        """How much of a core each instance uses while nothing happens."""
        before = [process.cpu_s() for process in (self.source, self.target)]
        time.sleep(seconds)
        after = [process.cpu_s() for process in (self.source, self.target)]
        return [(end - start) / seconds for start, end in zip(before, after, strict=True)]


def run_handoff_bench(bench: HandoffBench, progress: Progress) -> BenchReport:
    """Measure; values are medians over the rounds. Raises LocalError when hand-offs hang or an instance dies."""
    rounds: list[Round] = []
    problems: list[str] = []
    if bench.beside_nixl:
        check_nixl()
    with ExitStack() as parts:
        kinds = (*bench.integrity, None) if bench.beside_nixl else bench.integrity
        pairs = {integrity: _BarePair(bench, integrity, parts) for integrity in kinds}
        for pair in pairs.values():
            pair.wait_until_up()
        rounds.extend(_round(bench, pairs, index, progress) for index in range(bench.rounds))
        progress(f"idle for {bench.idle_s:g} s")
        rounds[-1]["idle"] = pairs[bench.integrity[0]].idle_cores(bench.idle_s)
        for pair in pairs.values():
            problems.extend(pair.problems())
    incomplete = int(sum(sum(values) for one in rounds for name, values in one.items() if name.startswith("incomplete")))
    if incomplete:
        problems.append(f"{incomplete} sides of hand-offs did not end as delivered")
    return BenchReport(list(_rows(bench, rounds)), describe_hardware(), rounds, problems)


def _round(bench: HandoffBench, pairs: dict[Integrity | None, _BarePair], index: int, progress: Progress) -> Round:
    taken: Round = {}
    cases = (*bench.cases, *bench.peer_cases)
    for case in (*cases[index % len(cases) :], *cases[: index % len(cases)]):
        measured = pairs[case.integrity].measure(f"{index}.{_named(case.integrity)}.{case.level}", case.level)
        rate = bench.handoffs / measured["seconds"][0]
        cpu = ", ".join(f"{side} {measured[f'{side}_cpu'][0] * 1e6:,.0f} us of CPU each" for side in ("source", "target"))
        progress(f"round {index + 1} of {bench.rounds}: {rate:,.0f} hand-offs/s, {case.series(bench.mode.value)}; {cpu}")
        taken |= {case.series(what): values for what, values in measured.items()}
    return taken


def _rows(bench: HandoffBench, rounds: list[Round]) -> Iterator[BenchRow]:
    first = bench.cases[0]
    for case in bench.cases:
        peer = _HandoffCase(case.integrity, first.level) if len(bench.levels) > 1 else first
        settings = _settings(bench, case, rounds)
        suffix = f"{case.level} in flight" + (f", integrity {case.integrity}" if len(bench.integrity) > 1 else "")
        rate, peer_rate = _rate(bench, case, rounds), _rate(bench, peer, rounds)
        beside = f"{peer.level} in flight" if len(bench.levels) > 1 else f"integrity {peer.integrity}"
        yield BenchRow(f"throughput, {suffix}", rate, "hand-offs/s", beside, rate / peer_rate, settings)
        gigabytes = rate * SMALL.cache_bytes(bench.tokens) / 1e9
        yield BenchRow(f"bytes, {suffix}", gigabytes, "GB/s", beside, rate / peer_rate, settings)
        for percent in (50, 99):
            value, other = _latency(case, rounds, percent), _latency(peer, rounds, percent)
            yield BenchRow(f"latency p{percent}, {suffix}", value * 1e3, "ms", beside, value / other, settings)
    if len(bench.integrity) > 1:
        yield from _integrity_rows(bench, rounds)
    yield from _peer_rows(bench, rounds)
    for side, share in zip(("source", "target"), rounds[-1]["idle"], strict=True):
        yield BenchRow(f"idle {side}", share * 100, "% of a core", _CORE, share, {"seconds": bench.idle_s})


def _integrity_rows(bench: HandoffBench, rounds: list[Round]) -> Iterator[BenchRow]:
    """What checksums cost: each kind beside the first one, at each level."""
    for level, integrity in itertools.product(bench.levels, bench.integrity[1:]):
        case, peer = _HandoffCase(integrity, level), _HandoffCase(bench.integrity[0], level)
        rate, peer_rate = _rate(bench, case, rounds), _rate(bench, peer, rounds)
        name = f"throughput with integrity {integrity}, {level} in flight"
        yield BenchRow(
            name, rate, "hand-offs/s", f"integrity {peer.integrity}", rate / peer_rate, _settings(bench, case, rounds)
        )


def _peer_rows(bench: HandoffBench, rounds: list[Round]) -> Iterator[BenchRow]:
    """The first kind of integrity beside raw NIXL, at each level."""
    for peer in bench.peer_cases:
        case = _HandoffCase(bench.integrity[0], peer.level)
        suffix, settings = f"{case.level} in flight, beside NIXL", _settings(bench, case, rounds)
        rate = _rate(bench, case, rounds)
        yield BenchRow(f"throughput, {suffix}", rate, "hand-offs/s", _RAW_NIXL, rate / _rate(bench, peer, rounds), settings)
        for percent in (50, 99):
            value, other = _latency(case, rounds, percent), _latency(peer, rounds, percent)
            yield BenchRow(f"latency p{percent}, {suffix}", value * 1e3, "ms", _RAW_NIXL, value / other, settings)
        for side in ("source", "target"):
            value, other = _cpu_us(case, rounds, side), _cpu_us(peer, rounds, side)
            yield BenchRow(f"processor time, {side}, {suffix}", value, "us", _RAW_NIXL, value / other, settings)


def _rate(bench: HandoffBench, case: _HandoffCase, rounds: list[Round]) -> float:
    return float(np.median([bench.handoffs / one[case.series("seconds")][0] for one in rounds]))


def _latency(case: _HandoffCase, rounds: list[Round], percent: int) -> float:
    return float(np.median([np.percentile(one[case.series("latencies")], percent) for one in rounds]))


def _settings(bench: HandoffBench, case: _HandoffCase, rounds: list[Round]) -> dict[str, Setting]:
    sides = ("source", "target", "source_engine", "target_engine")
    cpu = {f"{side}_cpu_us": _cpu_us(case, rounds, side) for side in sides}
    return {**bench.described(), "concurrency": case.level, "integrity": str(case.integrity), **cpu}


def _cpu_us(case: _HandoffCase, rounds: list[Round], side: str) -> float:
    """Processor time of one side per hand-off."""
    return round(float(np.median([one[case.series(f"{side}_cpu")][0] for one in rounds])) * 1e6, 1)


def _named(integrity: Integrity | None) -> str:
    return _RAW_NIXL if integrity is None else f"integrity {integrity}"


def _not_delivered(ends: list[HandoffEnd]) -> int:
    outcomes = Counter(end.outcome for end in ends)
    return outcomes.total() - outcomes[Outcome.DELIVERED.value]
