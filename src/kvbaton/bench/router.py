"""How fast the router is: ours and vllm-router in the same run, in front of the same instances, all features on.

A load generator and two instances without a model, both in C, are never the limit. Every contender runs the whole time; each
round visits all of them in turn with the same load. CPU time per request tells what a router costs where other work
disturbs the clock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvbaton.bench.report import BenchReport, BenchRow, Setting, describe_hardware
from kvbaton.bench.router_contenders import SGLANG_ROUTER, Contender, Driven, LoadTool, Running, build_load_tool, running
from kvbaton.discovery.messages import TransferMode
from kvbaton.errors import ConfigError
from kvbaton.launch.router_peers import ensure_router_peers

__all__ = ["RouterBench", "run_router_bench"]

Progress = Callable[[str], None]
Series = dict[str, list[float]]

_PEER = "vllm-router"
_PEERS = {TransferMode.WRITE: (_PEER, SGLANG_ROUTER), TransferMode.READ: (_PEER,)}
"""The other routers; sglang-router calls both instances at once, as in push."""
_FIGURES = (("per second", "1/s"), ("p50 ms", "ms"), ("p99 ms", "ms"), ("CPU us per request", "us"))
_WARM_S = 0.3
_MANY = 2048
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class RouterBench:
    """What to measure: so many rounds of so many seconds each, with so many clients."""

    clients: tuple[int, ...] = (1, 32, 256)
    processes: tuple[int, ...] = (1, 2)
    rounds: int = 3
    seconds: float = 2.0
    prompt_bytes: int = 64
    peers: bool = True

    def __post_init__(self) -> None:
        for name in ("rounds", "seconds", "prompt_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        for name in ("clients", "processes"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"--{name} needs at least one number, all above 0")

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {name: value if isinstance(value := getattr(self, name), int | float) else str(value) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class _Case:
    """One kind of load."""

    kind: str
    clients: int

    def __str__(self) -> str:
        return f"{'JSON' if self.kind == 'json' else 'streams'}, {self.clients} clients"


def run_router_bench(bench: RouterBench, progress: Progress) -> BenchReport:
    """Measure; installs the other routers on first use. Raises KVBatonError when something cannot run."""
    peers = ensure_router_peers(progress) if bench.peers else None
    series: Series = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvbaton-bench-") as directory:
        tool = build_load_tool(Path(directory))
        for mode in TransferMode:
            contenders = [Contender(f"kvbaton, {n} process{'es' * (n > 1)}", mode, n) for n in bench.processes]
            if bench.peers:
                contenders += [Contender(name, mode) for name in _PEERS[mode]]
            progress(f"starting {len(contenders)} routers ({mode.mode})")
            with running(contenders, tool, peers) as routers:
                problems += _measure(bench, tool, routers, series, progress)
                problems += _crowd(bench, tool, routers[len(bench.processes) - 1], series, progress)
    return BenchReport(list(_rows(bench, series)), describe_hardware(), [series], problems)


def _cases(bench: RouterBench) -> list[_Case]:
    return [_Case(kind, clients) for kind in ("json", "stream") for clients in bench.clients]


def _measure(bench: RouterBench, tool: LoadTool, routers: Sequence[Running], series: Series, progress: Progress) -> list[str]:
    problems = []
    for number in range(bench.rounds):
        for case in _cases(bench):
            progress(f"round {number + 1} of {bench.rounds}: {case}")
            for router in routers if number % 2 else reversed(routers):
                tool.drive(router.port, case.clients, _WARM_S, case.kind, bench.prompt_bytes)
                before = router.cpu_s()
                driven = tool.drive(router.port, case.clients, bench.seconds, case.kind, bench.prompt_bytes)
                _note(series, router.contender, case, driven, router.cpu_s() - before)
                if driven.errors and router.contender.processes:
                    problems.append(
                        f"{router.contender.name}, {router.contender.transfer_mode.mode}, {case}: {driven.errors} errors"
                    )
    return problems


def _crowd(bench: RouterBench, tool: LoadTool, router: Running, series: Series, progress: Progress) -> list[str]:
    """Very many streams at once, and what each costs in memory."""
    progress(f"{_MANY} streams at once")
    before = most = router.memory_kib()
    with ThreadPoolExecutor(1) as pool:
        drive = pool.submit(tool.drive, router.port, _MANY, max(2.0, bench.seconds), "stream", bench.prompt_bytes)
        while not drive.done():
            most = max(most, router.memory_kib())
            time.sleep(_LOOK_S)
    driven = drive.result()
    mode = router.contender.transfer_mode.mode
    series[f"streams/s, {_MANY} clients, {mode}"] = [driven.per_second]
    series[f"KiB per stream, {_MANY} clients, {mode}"] = [(most - before) / _MANY]
    return [f"{_MANY} streams, {mode}: {driven.errors} errors"] if driven.errors else []


def _note(series: Series, contender: Contender, case: _Case, driven: Driven, cpu_s: float) -> None:
    name = _name(case, contender)
    series.setdefault(f"{name}, per second", []).append(driven.per_second)
    series.setdefault(f"{name}, p50 ms", []).append(driven.p50_us / 1e3)
    series.setdefault(f"{name}, p99 ms", []).append(driven.p99_us / 1e3)
    series.setdefault(f"{name}, CPU us per request", []).append(1e6 * cpu_s / max(1, driven.requests))


def _name(case: _Case, contender: Contender) -> str:
    return f"{case}, {contender.transfer_mode.mode}, {contender.name}"


def _rows(bench: RouterBench, series: Series) -> Iterator[BenchRow]:
    for mode in TransferMode:
        for case in _cases(bench):
            for count in bench.processes:
                ours = _name(case, Contender(f"kvbaton, {count} process{'es' * (count > 1)}", mode))
                for peer in _PEERS[mode] if bench.peers else (_PEER,):
                    theirs = _name(case, Contender(peer, mode))
                    for what, unit in _FIGURES:
                        yield _row(f"{ours}, {what}", peer, f"{theirs}, {what}", unit, series)
        for name in (f"streams/s, {_MANY} clients, {mode.mode}", f"KiB per stream, {_MANY} clients, {mode.mode}"):
            yield _row(name, "", "", "KiB" if name.startswith("KiB") else "1/s", series)


def _row(name: str, peer: str, theirs: str, unit: str, series: Series) -> BenchRow:
    value = statistics.median(series[name])
    other = statistics.median(series[theirs]) if theirs in series else 0.0
    return BenchRow(name, value, unit, peer if other else "", value / other if other else 0.0, {"rounds": len(series[name])})
