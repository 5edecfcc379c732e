"""How fast the router is: ours and the others in the same run, in front of the same instances, all features on.

A load generator and two instances without a model, both in C, are never the limit. Every contender runs the whole time; each
round visits all of them in turn with the same load, and at the lowest one an instance without a router in front, which shows
what a router adds. CPU time per request shows what a router costs where other work disturbs the clock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvbaton.bench.report import BenchReport, describe_hardware
from kvbaton.bench.router_contenders import Contender, Driven, LoadTool, RunningRouter, build_load_tool, running
from kvbaton.bench.router_rows import MANY, LoadCase, RouterBench, Series, contenders_of, many_name, rows, series_name
from kvbaton.discovery.messages import TransferMode
from kvbaton.launch.router_peers import ensure_router_peers

__all__ = ["RouterBench", "run_router_bench"]

Progress = Callable[[str], None]

_WARM_S = 0.3
_LOOK_S = 0.05


def run_router_bench(bench: RouterBench, progress: Progress) -> BenchReport:
    """Measure; installs the other routers on first use. Raises KVBatonError when something cannot run."""
    peers = ensure_router_peers(progress) if bench.peers else None
    series: Series = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvbaton-bench-") as directory:
        tool = build_load_tool(Path(directory))
        for mode in TransferMode:
            contenders = contenders_of(bench, mode)
            progress(f"starting {len(contenders)} contenders ({mode.mode})")
            with running(contenders, tool, peers) as routers:
                for router in routers:
                    problems += _crowd(bench, tool, router, series, progress)
                problems += _measure(bench, tool, routers, series, progress)
    return BenchReport(list(rows(bench, series)), describe_hardware(), [series], problems)


def _measure(
    bench: RouterBench, tool: LoadTool, routers: Sequence[RunningRouter], series: Series, progress: Progress
) -> list[str]:
    problems = []
    for number in range(bench.rounds):
        for case in bench.cases():
            progress(f"round {number + 1} of {bench.rounds}: {case}")
            for router in routers if number % 2 else reversed(routers):
                if router.contender.is_bare and case.clients > min(bench.clients):
                    continue
                tool.drive(router.port, case.clients, _WARM_S, case.kind, bench.prompt_bytes)
                before = router.cpu_s()
                driven = tool.drive(router.port, case.clients, bench.seconds, case.kind, bench.prompt_bytes)
                _note(series, router.contender, case, driven, router.cpu_s() - before)
                if router.contender.processes:
                    problems += _found_wrong(series_name(case, router.contender), driven)
    return problems


def _crowd(bench: RouterBench, tool: LoadTool, router: RunningRouter, series: Series, progress: Progress) -> list[str]:
    """Very many streams at once, and what each costs in memory: before anything else, which would have made room already."""
    if router.contender.is_bare:
        return []
    progress(f"{MANY} streams at once: {router.contender.name}")
    tool.drive(router.port, 1, _WARM_S, "stream", bench.prompt_bytes)
    before = most = router.memory_kib()
    with ThreadPoolExecutor(1) as pool:
        drive = pool.submit(tool.drive, router.port, MANY, max(2.0, bench.seconds), "stream", bench.prompt_bytes)
        while not drive.done():
            most = max(most, router.memory_kib())
            time.sleep(_LOOK_S)
    driven = drive.result()
    name = many_name(router.contender)
    series[f"{name}, per second"] = [driven.per_second]
    series[f"{name}, KiB per stream"] = [(most - before) / MANY]
    series[f"{name}, errors"] = [float(driven.errors)]
    return _found_wrong(name, driven) if router.contender.processes else []


def _found_wrong(name: str, driven: Driven) -> list[str]:
    """Errors; and silence, which would otherwise pass for an answer within 0 ms."""
    found = [f"{name}: {driven.errors} errors"] if driven.errors else []
    return found if driven.requests else [*found, f"{name}: no request was answered in time; give it more --seconds"]


def _note(series: Series, contender: Contender, case: LoadCase, driven: Driven, cpu_s: float) -> None:
    name = series_name(case, contender)
    figures = {
        "per second": driven.per_second,
        "p50 ms": driven.p50_us / 1e3,
        "p99 ms": driven.p99_us / 1e3,
        "CPU us per request": 1e6 * cpu_s / max(1, driven.requests),
        "errors": float(driven.errors),
    }
    for what, value in figures.items():
        series.setdefault(f"{name}, {what}", []).append(value)
