"""What the benchmark of the router measures, under which names, and the rows that are made of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from kvbaton.bench.report import BenchRow, Setting
from kvbaton.bench.router_contenders import NO_ROUTER, SGLANG_ROUTER, Contender
from kvbaton.discovery.messages import TransferMode
from kvbaton.errors import ConfigError

__all__ = [
    "LoadCase",
    "MANY",
    "PEERS",
    "RouterBench",
    "Series",
    "VLLM_ROUTER",
    "best_of_ours",
    "contenders_of",
    "many_name",
    "median_of",
    "ours",
    "rows",
    "series_name",
]

Series = dict[str, list[float]]
"""Every measurement, by name, in the order taken."""

VLLM_ROUTER = "vllm-router"
"""The name of the contender that ours is compared with."""
PEERS = {TransferMode.WRITE: (VLLM_ROUTER, SGLANG_ROUTER), TransferMode.READ: (VLLM_ROUTER,)}
"""The other routers; sglang-router calls both instances at once, as in push."""
MANY = 2048
"""So many streams at once are very many."""

_FIGURES = (("per second", "1/s"), ("p50 ms", "ms"), ("p99 ms", "ms"), ("CPU us per request", "us"))
_GOALS = {("json", TransferMode.WRITE): 1.0, ("json", TransferMode.READ): 0.9, ("stream", TransferMode.WRITE): 1.5}
_STREAM_GOAL = 1.5
_ADDED_GOAL_MS = 0.4


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One kind of load."""

    kind: str
    clients: int

    def __str__(self) -> str:
        return f"{'JSON' if self.kind == 'json' else 'streams'}, {self.clients} clients"


@dataclass(frozen=True, slots=True)
class RouterBench:
    """What to measure: so many rounds of so many seconds each, with so many clients."""

    clients: tuple[int, ...] = (1, 32, 256)
    processes: tuple[int, ...] = (1, 2)
    rounds: int = 5
    seconds: float = 2.0
    prompt_bytes: int = 64
    peers: bool = True

    def __post_init__(self) -> None:
        for name in ("rounds", "seconds", "prompt_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        for name in ("clients", "processes"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"--{name} needs at least one number, all above 0")

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {name: value if isinstance(value := getattr(self, name), int | float) else str(value) for name in self.__slots__}

    def cases(self) -> list[LoadCase]:
        """Every kind of load."""
        return [LoadCase(kind, clients) for kind in ("json", "stream") for clients in self.clients]


def contenders_of(bench: RouterBench, mode: TransferMode) -> list[Contender]:
    """The contenders of one mode."""
    found = [*ours(bench, mode), Contender(NO_ROUTER, mode)]
    return found + [Contender(name, mode) for name in PEERS[mode]] if bench.peers else found


def ours(bench: RouterBench, mode: TransferMode) -> list[Contender]:
    """Our router, with each number of processes."""
    return [Contender(f"kvbaton, {n} process{'es' * (n > 1)}", mode, n) for n in bench.processes]


def series_name(case: LoadCase, contender: Contender) -> str:
    """What the measurements of one contender under one load are called."""
    return f"{case}, {contender.transfer_mode.mode}, {contender.name}"


def many_name(contender: Contender) -> str:
    """What the measurements under very many streams are called."""
    return f"{MANY} streams at once, {contender.transfer_mode.mode}, {contender.name}"


def median_of(series: Series, name: str) -> float:
    """The median of all rounds; 0 when there is none."""
    return statistics.median(series[name]) if name in series else 0.0


def best_of_ours(bench: RouterBench, case: LoadCase, mode: TransferMode, series: Series) -> float:
    """Requests per second of our router, with the number of processes that is best."""
    return max(median_of(series, f"{series_name(case, each)}, per second") for each in ours(bench, mode))


def rows(bench: RouterBench, series: Series) -> Iterator[BenchRow]:
    """What is aimed at first, then everything that was measured."""
    yield from _goals(bench, series)
    for mode in TransferMode:
        for case in bench.cases():
            for each in ours(bench, mode):
                name = series_name(case, each)
                for peer in PEERS[mode] if bench.peers else ("",):
                    theirs = series_name(case, Contender(peer, mode))
                    for what, unit in _FIGURES:
                        yield _row(f"{name}, {what}", peer, f"{theirs}, {what}", unit, series)
        for each in ours(bench, mode):
            name, theirs = many_name(each), many_name(Contender(VLLM_ROUTER, mode))
            for what, unit in (("per second", "1/s"), ("KiB per stream", "KiB")):
                yield _row(f"{name}, {what}", VLLM_ROUTER, f"{theirs}, {what}", unit, series)


def _goals(bench: RouterBench, series: Series) -> Iterator[BenchRow]:
    """The rows that have a figure to reach: best of ours beside vllm-router, and what a router adds to one client's wait."""
    for mode in TransferMode:
        for case in bench.cases():
            if case.clients > 1:
                goal = _GOALS.get((case.kind, mode), _STREAM_GOAL)
                value = best_of_ours(bench, case, mode, series)
                theirs = median_of(series, f"{series_name(case, Contender(VLLM_ROUTER, mode))}, per second")
                yield _goal(f"{case}, {mode.mode}, best of ours, per second", value, "1/s", theirs, f"at least {goal:g} x")
        if 1 in bench.clients:
            case, each = LoadCase("json", 1), ours(bench, mode)[0]
            bare = median_of(series, f"{series_name(case, Contender(NO_ROUTER, mode))}, p50 ms")
            added = median_of(series, f"{series_name(case, each)}, p50 ms") - bare
            theirs = median_of(series, f"{series_name(case, Contender(VLLM_ROUTER, mode))}, p50 ms") - bare
            name = f"{case}, {mode.mode}, {each.name}, added p50 ms"
            yield _goal(name, added, "ms", theirs if bench.peers else 0.0, f"at most {_ADDED_GOAL_MS:g} ms")


def _goal(name: str, value: float, unit: str, theirs: float, goal: str) -> BenchRow:
    return BenchRow(name, value, unit, VLLM_ROUTER if theirs else "", value / theirs if theirs else 0.0, {"goal": goal})


def _row(name: str, peer: str, theirs: str, unit: str, series: Series) -> BenchRow:
    value, other = median_of(series, name), median_of(series, theirs)
    return BenchRow(name, value, unit, peer if other else "", value / other if other else 0.0, {"rounds": len(series[name])})
