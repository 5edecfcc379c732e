"""The benchmark of the router: what it reports, not how fast it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvbaton.bench.plots import plot_router_bench
from kvbaton.bench.processes import Processes
from kvbaton.bench.report import BenchReport
from kvbaton.bench.router import (
    Driven,
    LoadTool,
    RouterBench,
    RunningRouter,
    _measure,
    contenders_of,
    many_name,
    rows,
    run_router_bench,
    series_name,
)
from kvbaton.discovery.messages import TransferMode
from kvbaton.errors import ConfigError


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_every_mode_and_kind_is_measured_without_an_error() -> None:
    report = run_router_bench(RouterBench((2,), (1,), rounds=1, seconds=2.0, peers=False), print)
    (series,) = report.rounds
    assert report.problems == []
    for mode in ("push", "pull"):
        for kind in ("JSON", "streams"):
            (rate,) = series[f"{kind}, 2 clients, {mode}, kvbaton, 1 process, per second"]
            assert rate > 0
            (bare,) = series[f"{kind}, 2 clients, {mode}, no router, per second"]
            assert bare > 0
        assert series[f"2048 streams at once, {mode}, kvbaton, 1 process, per second"][0] > 0
    assert {row.ratio for row in report.rows} == {0.0}


def made_up(bench: RouterBench) -> dict[str, list[float]]:
    """Every measurement there can be: two rounds, the second of them twice the first."""
    series: dict[str, list[float]] = {}
    for mode in TransferMode:
        for number, each in enumerate(contenders_of(bench, mode), 1):
            names = [series_name(case, each) for case in bench.cases()] + [many_name(each)]
            for name in names:
                for what in ("per second", "p50 ms", "p99 ms", "CPU us per request", "KiB per stream"):
                    series[f"{name}, {what}"] = [10.0 * number, 20.0 * number]
    return series


def test_goals_take_the_better_of_ours_and_what_is_added_to_a_bare_instance() -> None:
    """Contenders have 15, 30, 45 (no router), 60 (vllm-router) and 75 of everything."""
    bench = RouterBench()
    found = {row.name: row for row in rows(bench, made_up(bench))}
    best = found["JSON, 32 clients, push, best of ours, per second"]
    assert (best.value, best.peer, best.ratio, best.settings["goal"]) == (30.0, "vllm-router", 0.5, "at least 1 x")
    added = found["JSON, 1 clients, pull, kvbaton, 1 process, added p50 ms"]
    assert (added.value, added.ratio) == (-30.0, -2.0)
    assert found["streams, 256 clients, push, kvbaton, 2 processes, p99 ms"].peer == "sglang-router"
    assert found["2048 streams at once, pull, kvbaton, 2 processes, KiB per stream"].ratio == 0.5


def test_a_router_that_answers_nobody_is_a_problem_and_not_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = RouterBench((1,), (1,), rounds=1)
    ours = next(each for each in contenders_of(bench, TransferMode.READ) if each.processes)
    monkeypatch.setattr(LoadTool, "drive", lambda *_: Driven(0, 0, 1.0, 0.0, 0.0, 0.0))
    problems = _measure(bench, LoadTool(Path("nothing")), [RunningRouter(ours, 1, Processes([]))], {}, print)
    assert len(problems) == len(list(bench.cases()))
    assert all("no request was answered" in problem for problem in problems)


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are not tested: matplotlib is not installed")
    bench = RouterBench()
    series = made_up(bench)
    report = BenchReport(list(rows(bench, series)), {}, [series])
    png, svg = plot_router_bench(report, bench, tmp_path / "router.json")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "sglang-router" in svg.read_text() or svg.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"rounds": 0}, "--rounds"),
        ({"clients": ()}, "--clients"),
        ({"processes": (0,)}, "--processes"),
        ({"seconds": float("nan")}, "--seconds"),
        ({"seconds": float("inf")}, "--seconds"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        RouterBench(**settings)  # type: ignore[arg-type]
