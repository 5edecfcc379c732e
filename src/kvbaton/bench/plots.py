"""The benchmarks as plots: what a pair of servers adds and where that goes, the router beside others, rates over block size.

matplotlib is an extra; before anything is drawn, `check_can_plot` has found it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbaton.bench.report import BenchReport
from kvbaton.bench.router import NO_ROUTER, Contender, LoadCase, RouterBench, contenders_of, median_of, series_name
from kvbaton.bench.servers import SINGLE, Round, added_s, name_of, stage_s
from kvbaton.discovery.messages import TransferMode
from kvbaton.observe.phases import HandoffPhase

__all__ = ["plot_router_bench", "plot_servers_bench", "plot_wire_bench"]

_COLOURS = ("#2a6fbb", "#7fb3e6", "#c4622d", "#8a8a8a")
_STAGE_COLOURS = ("#d9d9d9", "#b3cde3", "#8c96c6", "#88419d", "#fdae61", "#1a9850", "#66bd63", "#a50026")
_ROUTER_COLOURS = {"kvbaton": ("#2a6fbb", "#7fb3e6", "#b3cde3"), "vllm-router": ("#c4622d",), "sglang-router": ("#8a8a8a",)}
_BAR = 0.8


def plot_servers_bench(report: BenchReport, lengths: Sequence[int], variants: Sequence[str], target: Path) -> list[Path]:
    """Draw the report as PNG and as SVG, at `target` with these suffixes."""
    figure = _figure(13, 4.2)
    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    pairs = [name for name in variants if name != SINGLE]
    _draw_added(left, report.rounds, lengths, pairs)
    _draw_stages(middle, report.rounds, lengths, [name for name in pairs if _reports(report.rounds, name, lengths)])
    _draw_idle(right, report.rounds[0], variants)
    return _save(figure, *_both(target))


def _draw_added(axes: Any, rounds: Sequence[Round], lengths: Sequence[int], pairs: Sequence[str]) -> None:
    """Bars to the median, a line on to the 99th percentile."""
    width = _BAR / len(pairs)
    for place, name in enumerate(pairs):
        medians = [added_s(rounds, name, length, 50) * 1e3 for length in lengths]
        tails = [added_s(rounds, name, length, 99) * 1e3 for length in lengths]
        x = _centres(len(lengths), place, width)
        errors = [[0.0] * len(lengths), [max(0.0, tail - median) for tail, median in zip(tails, medians, strict=True)]]
        bars = axes.bar(x, medians, width, label=name, color=_COLOURS[place % len(_COLOURS)], yerr=errors, capsize=3)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(y=0.2)
    axes.set_ylabel("ms")
    axes.set_title("Added to the first token of one server\n(median; line: to p99)", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", ncols=3)


def _draw_stages(axes: Any, rounds: Sequence[Round], lengths: Sequence[int], pairs: Sequence[str]) -> None:
    places = [(name, length) for name in pairs for length in lengths]
    bottoms = [0.0] * len(places)
    for colour, phase in zip(_STAGE_COLOURS, _waited_for(rounds, places), strict=False):
        heights = [stage_s(rounds, name, length, phase) * 1e3 for name, length in places]
        axes.bar(range(len(places)), heights, _BAR, bottom=bottoms, label=str(phase), color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    labels = [f"{name.removeprefix('kvbaton ')}\n{length}" for name, length in places]
    axes.set_xticks(range(len(places)), labels, fontsize=8)
    axes.set_ylabel("ms")
    axes.set_title(
        "kvbaton's hand-over by stage: from the source's\nfirst token to the target's first step (median)", fontsize=10
    )
    axes.margins(y=0.3)
    if places:
        axes.legend(fontsize=8, loc="upper center", ncols=3)


def _draw_idle(axes: Any, first: Mapping[str, list[float]], variants: Sequence[str]) -> None:
    shares = [first[name_of("idle cores", name)][0] * 100 for name in variants]
    bars = axes.barh(range(len(variants)), shares, _BAR, color=[*_COLOURS[-1:], *_COLOURS][: len(variants)])
    axes.bar_label(bars, fmt="%.0f %%", padding=2, fontsize=8)
    axes.set_yticks(range(len(variants)), variants)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("% of a core")
    axes.set_title("Idle: all servers of a variant", fontsize=10)


def _reports(rounds: Sequence[Round], name: str, lengths: Sequence[int]) -> bool:
    return any(name_of("exposed", name, length) in each for each in rounds for length in lengths)


def _waited_for(rounds: Sequence[Round], places: Sequence[tuple[str, int]]) -> list[HandoffPhase]:
    return [phase for phase in HandoffPhase if any(stage_s(rounds, name, length, phase) > 0 for name, length in places)]


def plot_router_bench(report: BenchReport, bench: RouterBench, target: Path) -> list[Path]:
    """Draw the report as PNG and as SVG, at `target` with these suffixes."""
    figure = _figure(13, 7.5)
    series = report.rounds[0]
    busiest = [case for case in bench.cases() if case.clients > 1] or bench.cases()
    for row, mode in enumerate(TransferMode):
        left, middle, right = (figure.add_subplot(2, 3, 3 * row + column) for column in (1, 2, 3))
        routers = [each for each in contenders_of(bench, mode) if each.name != NO_ROUTER]
        _draw_routers(left, series, routers, busiest, "per second", "requests/s")
        _draw_routers(middle, series, routers, busiest, "CPU us per request", "CPU us per request")
        alone = [case for case in bench.cases() if case.clients == min(bench.clients)]
        _draw_routers(right, series, routers, alone, "p50 ms", "p50, ms")
        left.set_title(f"{mode.mode}: requests per second (dots: every round)", fontsize=10)
        middle.set_title(f"{mode.mode}: processor time per request", fontsize=10)
        right.set_yscale("log")
        right.set_title(f"{mode.mode}: median time of an answer", fontsize=10)
        left.legend(fontsize=8)
    return _save(figure, *_both(target))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _draw_routers(
    axes: Any, series: dict[str, list[float]], routers: list[Contender], cases: list[LoadCase], what: str, unit: str
) -> None:
    width = _BAR / len(routers)
    seen: dict[str, int] = {}
    for place, router in enumerate(routers):
        family = router.name.partition(",")[0]
        colours = _ROUTER_COLOURS[family]
        colour = colours[seen.get(family, 0) % len(colours)]
        seen[family] = seen.get(family, 0) + 1
        names = [f"{series_name(case, router)}, {what}" for case in cases]
        x = _centres(len(cases), place, width)
        bars = axes.bar(x, [median_of(series, name) for name in names], width, label=router.name, color=colour)
        axes.bar_label(bars, fmt=_number, padding=2, fontsize=7)
        for at, name in zip(x, names, strict=True):
            axes.scatter([at] * len(series[name]), series[name], s=4, color="black", zorder=3)
    axes.set_xticks(range(len(cases)), [str(case).replace(", ", "\n") for case in cases], fontsize=8)
    axes.margins(y=0.15)
    axes.set_ylabel(unit)


def plot_wire_bench(report: BenchReport, target: Path) -> list[Path]:
    """Draw GB/s over block size, a line per subject, into a .png or .svg file, or both when `target` has no suffix.

    Where several numbers of peers or sizes of batches were measured, the first. What was not measured by size of blocks is not
    drawn.
    """
    if not any("block_bytes" in row.settings for row in report.rows):
        return []
    figure = _figure(8, 5)
    axes: Any = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    first = report.rows[0].settings
    for row in report.rows:
        if row.unit == "GB/s" and all(row.settings[each] == first[each] for each in ("peers", "batch_bytes")):
            lines.setdefault(row.name.rpartition(":")[0], []).append((int(row.settings["block_bytes"]), row.value))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("block size, bytes")
    axes.set_ylabel("GB/s (1e9 bytes), median")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _save(figure, *([target] if target.suffix else _both(target)))


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _centres(count: int, place: int, width: float) -> list[float]:
    """Where the bars of one series stand: one in each of `count` groups."""
    return [index + (place + 0.5) * width - _BAR / 2 for index in range(count)]


def _both(target: Path) -> list[Path]:
    return [target.with_suffix(".png"), target.with_suffix(".svg")]


def _save(figure: Any, *paths: Path) -> list[Path]:
    """Write the figure to these files; the same results make the same files."""
    for path in paths:
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return list(paths)
