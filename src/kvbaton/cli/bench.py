"""`kvbaton bench`: speed, as ratios taken side by side in one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvbaton.bench.report import BenchReport

__all__ = ["bench_app"]

bench_app = App(name="bench", help="Measure speed, as ratios taken side by side in one run.")


@bench_app.command
def engine(
    *,
    model: str = "smollm2",
    rounds: int = 7,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """The embedded engine beside the matrix products that its model consists of, in the same shapes.

    Parameters
    ----------
    model
        `smollm2`, `tiny`, a .gguf file, or a directory of Hugging Face safetensors.
    rounds
        how often each thing is measured; medians are shown, every round is kept.
    out
        file for the raw results (JSON).
    json
        print one JSON object instead of a table.
    """
    from kvbaton.bench.engine import run_engine_bench
    from kvbaton.errors import ConfigError

    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; it must be at least 1")
    console = Console(stderr=True)
    report = run_engine_bench(
        model, rounds, lambda line: console.print(f"  {line}", style="dim", highlight=False, soft_wrap=True)
    )
    document = _document(report, {"model": model, "rounds": rounds}, out)
    if out is not None:
        out.write_bytes(document)
    if json:
        sys.stdout.write(document.decode() + "\n")
    else:
        _print_table(report)
    return 0


def _document(report: BenchReport, settings: dict[str, str | int], out: Path | None) -> bytes:
    import msgspec

    from kvbaton import __version__

    head = {"command": "bench engine", "version": __version__, "ok": True, "settings": settings, "raw": str(out or "")}
    return msgspec.json.encode(head | msgspec.to_builtins(report))


def _print_table(report: BenchReport) -> None:
    table = Table("what", "median", "all its matrix products", "ratio", "ratio to weights alone", title="embedded engine")
    for row in report.rows:
        products_s = row.value / row.ratio
        alone = float(row.settings["ratio_to_weight_products"])
        table.add_row(
            row.name, f"{row.value:.4f} {row.unit}", f"{products_s:.4f} {row.unit}", f"{row.ratio:.2f} x", f"{alone:.2f} x"
        )
    Console().print(table)
