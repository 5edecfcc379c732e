"""The rates of a wire benchmark as a picture."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kvbaton.bench.report import BenchReport
from kvbaton.errors import ConfigError

__all__ = ["draw"]


def draw(report: BenchReport, path: Path) -> None:
    """Draw GB/s over block size, a line per subject, into a .png or .svg file, or both when `path` has no suffix.

    Where several numbers of peers or sizes of batches were measured, the first. What was not measured by size of blocks is not
    drawn. Raises ConfigError without matplotlib.
    """
    if not any("block_bytes" in row.settings for row in report.rows):
        return
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(8, 5))
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
    for file in [path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".svg")]:
        figure.savefig(file, dpi=120, bbox_inches="tight")
