"""This benchmark as a plot: what each variant adds to the first token, where that goes, and what idle servers use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbaton.bench.report import BenchReport, check_can_plot
from kvbaton.bench.servers.rows import Round, added_s, name_of, stage_s
from kvbaton.bench.servers.variants import SINGLE
from kvbaton.observe.phases import HandoffPhase

__all__ = ["plot_servers_bench"]

_COLOURS = ("#2a6fbb", "#7fb3e6", "#c4622d", "#8a8a8a")
_STAGE_COLOURS = ("#d9d9d9", "#b3cde3", "#8c96c6", "#88419d", "#fdae61", "#1a9850", "#66bd63", "#a50026")
_BAR = 0.8


def plot_servers_bench(report: BenchReport, lengths: Sequence[int], variants: Sequence[str], target: Path) -> tuple[Path, Path]:
    """Draw the report as PNG and as SVG, at `target` with these suffixes. Raises ConfigError without matplotlib."""
    check_can_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    pairs = [name for name in variants if name != SINGLE]
    _draw_added(left, report.rounds, lengths, pairs)
    _draw_stages(middle, report.rounds, lengths, [name for name in pairs if _reports(report.rounds, name, lengths)])
    _draw_idle(right, report.rounds[0], variants)
    paths = target.with_suffix(".png"), target.with_suffix(".svg")
    for path in paths:
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw_added(axes: Any, rounds: Sequence[Round], lengths: Sequence[int], pairs: Sequence[str]) -> None:
    """Bars to the median, a line on to the 99th percentile."""
    width = _BAR / len(pairs)
    for place, name in enumerate(pairs):
        medians = [added_s(rounds, name, length, 50) * 1e3 for length in lengths]
        tails = [added_s(rounds, name, length, 99) * 1e3 for length in lengths]
        x = [index + (place + 0.5) * width - _BAR / 2 for index in range(len(lengths))]
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
