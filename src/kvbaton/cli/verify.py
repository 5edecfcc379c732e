"""`kvbaton verify`: is every answer of a P/D pair the same as one instance's?"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvbaton.cli.options import EngineName, HandoffOptions, JsonOption, TransportName, set_up_tls
from kvbaton.cli.running import end_like_ctrl_c
from kvbaton.config import DEFAULT_HANDOFF
from kvbaton.engines.table import DEFAULT_ENGINE
from kvbaton.verify.settings import VerifySettings

if TYPE_CHECKING:
    from kvbaton.verify.report import Report, RequestRow
    from kvbaton.verify.run import VerifiedPair

__all__ = ["verify"]

_DEFAULT_SETTINGS = VerifySettings()
_FOUND = 1


def verify(
    *,
    engine: EngineName = DEFAULT_ENGINE,
    prefill_engine: str = "",
    decode_engine: str = "",
    transport: TransportName = "local",
    settings: Annotated[VerifySettings, Parameter(name="*")] = _DEFAULT_SETTINGS,
    handoff: HandoffOptions = DEFAULT_HANDOFF,
    encrypt: bool = False,
    json: JsonOption = False,
) -> int:
    """Send the same requests through a P/D pair and through one instance, and compare every token and logprob.

    Exits with 0 when all answers are equal and every one was handed off, with 1 when not, with 2 when it could not be run.

    Parameters
    ----------
    prefill_engine
        the engine of the prefill instances and of the single one, where it is not that of the decode instances.
    decode_engine
        the engine of the decode instances. Two engines compute with different kernels: answers are equal when their tokens
        are, and their logprobs within 1e-3.
    encrypt
        encrypt every connection between the parts, with the certificates of KVBATON_TLS_DIR if it is set, else with new ones.
    """
    from kvbaton.config import parse_trust
    from kvbaton.verify.run import VerifiedPair

    tls_dir = set_up_tls(parse_trust(None, os.environ), encrypt=encrypt)
    pair = VerifiedPair(prefill_engine or engine, transport, handoff, decode_engine or engine, tls_dir)
    end_like_ctrl_c()
    report = _run(pair, settings)
    if json:
        _print_json(report)
    else:
        _print_report(Console(), report)
    return 0 if report.ok else _FOUND


def _run(pair: VerifiedPair, settings: VerifySettings) -> Report:
    """Do it, with progress on standard error."""
    from kvbaton.verify.run import run_verify

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing", total=settings.requests)

        def on_row(row: RequestRow) -> None:
            del row
            progress.advance(task)

        def show(line: str) -> None:
            console.print(f"  {line}", style="dim", highlight=False, soft_wrap=True)

        return run_verify(pair, settings, show, on_row)


def _print_json(report: Report) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def _print_report(console: Console, report: Report) -> None:
    from kvbaton.observe.transfer_report import size

    table = Table(
        "request", "prompt", "output", "cached", "moved", "hand-off", "verdict", title="P/D pair against one instance"
    )
    for row in report.rows:
        style = {"equal": "green", "near tie": "yellow"}.get(row.verdict, "red")
        table.add_row(
            str(row.request),
            f"{row.prompt_tokens} tok",
            f"{row.output_tokens} tok",
            f"{row.cached_tokens} tok",
            size(row.bytes_moved),
            f"{row.handoff_s * 1000:.1f} ms",
            f"[{style}]{row.verdict}[/] {row.detail[:60]}",
        )
    console.print(table)
    console.print(
        f"{report.requests} requests: {report.equal} equal, {report.near_ties} near ties, {report.different} different, "
        f"{report.failed} failed; {report.handed_off} handed off, {report.recomputed} recomputed",
        highlight=False,
    )
    console.print(
        f"{size(report.bytes_moved)} moved, {size(report.bytes_planned)} planned; hand-over p50 "
        f"{report.handover_seconds.p50 * 1000:.1f} ms, p99 {report.handover_seconds.p99 * 1000:.1f} ms (wire time taken off)",
        highlight=False,
    )
    if report.source_writes:
        console.print(
            f"{report.source_writes} hand-offs were written by their source; their bytes are not counted", highlight=False
        )
    if report.ok:
        console.print("[bold green]every answer is the same[/]")
    for problem in report.problems:
        console.print(f"[bold red]{problem}[/]", highlight=False)
