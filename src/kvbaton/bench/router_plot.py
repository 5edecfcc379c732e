"""The router's benchmark as a plot: requests per second, what a request costs, and how long one client waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbaton.bench.report import BenchReport, check_can_plot
from kvbaton.bench.router_contenders import NO_ROUTER, Contender
from kvbaton.bench.router_rows import LoadCase, RouterBench, contenders_of, median_of, series_name
from kvbaton.discovery.messages import TransferMode

__all__ = ["plot_router_bench"]

_COLOURS = {"kvbaton": ("#2a6fbb", "#7fb3e6", "#b3cde3"), "vllm-router": ("#c4622d",), "sglang-router": ("#8a8a8a",)}
_BAR = 0.8


def plot_router_bench(report: BenchReport, bench: RouterBench, target: Path) -> tuple[Path, Path]:
    """Draw the report as PNG and as SVG, at `target` with these suffixes. Raises ConfigError without matplotlib."""
    check_can_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    series = report.rounds[0]
    busiest = [case for case in bench.cases() if case.clients > 1] or bench.cases()
    for row, mode in enumerate(TransferMode):
        left, middle, right = (figure.add_subplot(2, 3, 3 * row + column) for column in (1, 2, 3))
        routers = [each for each in contenders_of(bench, mode) if each.name != NO_ROUTER]
        _draw(left, series, routers, busiest, "per second", "requests/s")
        _draw(middle, series, routers, busiest, "CPU us per request", "CPU us per request")
        alone = [case for case in bench.cases() if case.clients == min(bench.clients)]
        _draw(right, series, routers, alone, "p50 ms", "p50, ms")
        left.set_title(f"{mode.mode}: requests per second (dots: every round)", fontsize=10)
        middle.set_title(f"{mode.mode}: processor time per request", fontsize=10)
        right.set_yscale("log")
        right.set_title(f"{mode.mode}: median time of an answer", fontsize=10)
        left.legend(fontsize=8)
    paths = target.with_suffix(".png"), target.with_suffix(".svg")
    for path in paths:
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _draw(
    axes: Any, series: dict[str, list[float]], routers: list[Contender], cases: list[LoadCase], what: str, unit: str
) -> None:
    width = _BAR / len(routers)
    seen: dict[str, int] = {}
    for place, router in enumerate(routers):
        family = router.name.partition(",")[0]
        colours = _COLOURS[family]
        colour = colours[seen.get(family, 0) % len(colours)]
        seen[family] = seen.get(family, 0) + 1
        names = [f"{series_name(case, router)}, {what}" for case in cases]
        x = [index + (place + 0.5) * width - _BAR / 2 for index in range(len(cases))]
        bars = axes.bar(x, [median_of(series, name) for name in names], width, label=router.name, color=colour)
        axes.bar_label(bars, fmt=_number, padding=2, fontsize=7)
        for at, name in zip(x, names, strict=True):
            axes.scatter([at] * len(series[name]), series[name], s=4, color="black", zorder=3)
    axes.set_xticks(range(len(cases)), [str(case).replace(", ", "\n") for case in cases], fontsize=8)
    axes.margins(y=0.15)
    axes.set_ylabel(unit)
