"""`kvbaton verify`: is every answer of a P/D pair the same as one instance's?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvbaton.cli.options import EngineName, HandoffOptions, TransportName, handoff_settings
from kvbaton.cli.running import end_like_ctrl_c

if TYPE_CHECKING:
    from kvbaton.verify.report import Report, RequestRow
    from kvbaton.verify.run import VerifySettings

__all__ = ["verify"]

_DEFAULT_HANDOFF = HandoffOptions()
_FOUND = 1


def verify(
    *,
    engine: EngineName = "embedded",
    requests: int = 40,
    concurrency: int = 8,
    transport: TransportName = "local",
    model: str = "smollm2",
    prefill: int = 1,
    decode: int = 1,
    max_tokens: int = 16,
    longest_prompt: int = 1500,
    seed: int = 0,
    drop_writes: bool = False,
    prefill_shape: str = "tp1",
    decode_shape: str = "tp1",
    drop: str = "",
    decode_model: str = "",
    cache_dtype: str = "float32",
    decode_cache_dtype: str = "",
    decode_lacks: str = "",
    handoff: Annotated[HandoffOptions, Parameter(name="*")] = _DEFAULT_HANDOFF,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Send the same requests through a P/D pair and through one instance, and compare every token and logprob.

    Exits with 0 when all answers are equal and every one was handed off, with 1 when not, with 2 when it could not be run.

    Parameters
    ----------
    engine
        `embedded`, or `vllm`: real vLLM servers on this machine's CPUs, installed on first use.
    requests
        how many requests.
    concurrency
        how many at a time.
    transport
        how cache bytes travel: `local`, `tcp`, `auto`, ...; `kvbaton doctor` tells what works here.
    model
        `smollm2`, `tiny`, a .gguf file, a directory of Hugging Face safetensors, or a small model such as `tiny-mamba`; see
        `kvbaton serve --help`.
    prefill
        how many prefill instances.
    decode
        how many decode instances.
    max_tokens
        tokens per answer, at least 2: the first one says nothing of the cache that was handed over.
    longest_prompt
        prompt lengths are drawn from 1 to this many tokens, log-uniformly.
    seed
        of the prompts.
    drop_writes
        the control: move no bytes, leave the poison in. Must exit with 1.
    prefill_shape
        how the prefill instances are cut: `tp2`, `pp2,tp2`, ...; for the small models only.
    decode_shape
        how the decode instances are cut.
    drop
        a control: leave one thing out of every hand-off, and the poison in: `conv`, `ssm`, `sliding`, `index`, `mla`,
        `full`, `layer:N` or `head:N`. Must exit with 1.
    decode_model
        a control: another model for the decode instances, or other sizes of it as in `tiny-mamba@conv_taps=6`. They must
        refuse, with exit code 2.
    cache_dtype
        type of the numbers in all caches: `float32`, or `float16` for the small models.
    decode_cache_dtype
        a control: another type for the decode instances. They must refuse, with exit code 2.
    decode_lacks
        a control: what the cards of the decode instances leave out: `layer:N` or `rank:N`. They must be refused, with exit
        code 2.
    json
        print one JSON object instead of a table.
    """
    from kvbaton.errors import ConfigError
    from kvbaton.verify.run import VerifySettings

    numbers = {"requests": requests, "concurrency": concurrency, "prefill": prefill, "decode": decode}
    numbers |= {"max-tokens": max_tokens, "longest-prompt": longest_prompt}
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1")
    settings = VerifySettings(
        engine=engine,
        model=model,
        transport=transport,
        requests=requests,
        concurrency=concurrency,
        prefill=prefill,
        decode=decode,
        max_tokens=max_tokens,
        longest_prompt=longest_prompt,
        seed=seed,
        drop_writes=drop_writes,
        prefill_shape=prefill_shape,
        decode_shape=decode_shape,
        drop=drop,
        decode_model=decode_model,
        cache_dtype=cache_dtype,
        decode_cache_dtype=decode_cache_dtype,
        decode_lacks=decode_lacks,
        handoff=handoff_settings(handoff),
    )
    end_like_ctrl_c()
    report = _run(settings)
    if json:
        _print_json(report)
    else:
        _print_report(Console(), report)
    return 0 if report.ok else _FOUND


def _run(settings: VerifySettings) -> Report:
    """Do it, with progress on standard error."""
    from kvbaton.verify.run import run_verify

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing", total=settings.requests)

        def on_row(row: RequestRow) -> None:
            del row
            progress.advance(task)

        def say(line: str) -> None:
            console.print(f"  {line}", style="dim", highlight=False, soft_wrap=True)

        return run_verify(settings, say, on_row)


def _print_json(report: Report) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def _print_report(console: Console, report: Report) -> None:
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
            _size(row.bytes_moved),
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
        f"{_size(report.bytes_moved)} moved, {_size(report.bytes_planned)} planned; hand-over p50 "
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


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
