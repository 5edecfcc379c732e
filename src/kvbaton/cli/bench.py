"""`kvbaton bench`: speed, as ratios taken side by side in one run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from kvbaton.cli.options import EngineName, JsonOption, ModelName, TransportName, json_document
from kvbaton.cli.running import end_like_ctrl_c
from kvbaton.config import BUSY_POLL_S
from kvbaton.engines.table import DEFAULT_ENGINE

if TYPE_CHECKING:
    from kvbaton.bench.report import BenchReport, Setting

__all__ = ["bench_app"]

bench_app = App(name="bench", help="Measure speed, as ratios taken side by side in one run.")

_FOUND = 1
_WIRE_TRANSPORT = (
    "`auto`: all that move main memory. `local`: beside a memcpy of the same blocks in one process. `tcp`: beside a plain "
    "socket. `nixl`, `mooncake`: beside the library alone. `cuda`: GPU memory, beside the full-tensor copy on the same GPU."
)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where the results go.

    Parameters
    ----------
    out
        file for the raw results (JSON).
    """

    out: Path | None = None
    json: JsonOption = False


Output = Annotated[OutputOptions, Parameter(name="*")]
_DEFAULT_OUTPUT = OutputOptions()


@bench_app.command
def engine(
    *,
    model: ModelName = "smollm2",
    rounds: int = 7,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """The embedded engine beside the matrix products that its model consists of, in the same shapes.

    Parameters
    ----------
    rounds
        how often each thing is measured; medians are shown, every round is kept.
    """
    from kvbaton.bench.engine import run_engine_bench
    from kvbaton.errors import ConfigError

    _begin(output)
    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; it must be at least 1")
    report = run_engine_bench(model, rounds, _progress)
    return _finish("engine", report, {"model": model, "rounds": rounds}, output)


@bench_app.command
def handoff(
    *,
    concurrency: str = "128,512,1024,4096",
    mode: Literal["push", "pull"] = "push",
    transport: TransportName = "local",
    tokens: int = 64,
    integrity: Literal["off", "sampled", "full", "all"] = "off",
    handoffs: int = 4096,
    rounds: int = 3,
    every_byte: Annotated[bool, Parameter(negative=())] = False,
    idle: float = 6.0,
    peer: Literal["", "nixl"] = "",
    confirmation: Literal["stamp", "message"] = "stamp",
    busy_poll: float = BUSY_POLL_S,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """Many hand-offs at once between two instances without a model, in processes of their own.

    Each level keeps so many hand-offs in flight and measures the same number of them in its steady state. Exits with 1 when
    one did not complete, or a block did not come back.

    Parameters
    ----------
    concurrency
        how many hand-offs are in flight; levels with commas between them. Ratios are to the first.
    mode
        `push`: layers stream while they are computed; `pull`: the target fetches what is complete.
    tokens
        tokens per hand-off.
    integrity
        how much is checked by checksums; `all` measures off, sampled and full beside each other.
    handoffs
        hand-offs that are measured per level and round.
    rounds
        how often each level is measured; medians are shown, every round is kept.
    every_byte
        have the target check every byte of every cache itself, not only a sample.
    idle
        seconds for which the two instances are watched while they have nothing to do.
    peer
        `nixl`: the same hand-offs by raw NIXL agents too, one read and its notifications each, in turns; needs the package.
    confirmation
        `stamp`: targets look at the source's stamps; `message`: they ask for each confirmation, as on another host.
    busy_poll
        seconds for which threads that hand over look for news before they sleep; 0: they sleep at once.
    """
    from kvbaton.bench.handoff import HandoffBench, run_handoff_bench
    from kvbaton.core.handoff import Confirmation, Integrity, Mode

    _begin(output)
    kinds = tuple(Integrity) if integrity == "all" else (Integrity(integrity),)
    bench = HandoffBench(
        _numbers(concurrency, "--concurrency"),
        Mode(mode),
        transport,
        tokens,
        kinds,
        handoffs,
        rounds,
        every_byte,
        idle,
        beside_nixl=bool(peer),
        confirmation=Confirmation(confirmation),
        busy_poll_s=busy_poll,
    )
    return _finish("handoff", run_handoff_bench(bench, _progress), bench.described(), output)


@bench_app.command
def delay(
    *,
    delays: str = "0,1,10,50",
    tokens: int = 512,
    layer_ms: int = 10,
    handoffs: int = 10,
    rounds: int = 3,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """Hand-overs in push over `tcp` between two instances far apart: sources that write beside targets that read.

    Every byte passes a relay that delays it; hand-offs run one at a time. Exits with 1 when a block did not come back.

    Parameters
    ----------
    delays
        milliseconds by which each direction is delayed, with commas between them; the first is 0.
    tokens
        tokens per hand-off, of 512 bytes per layer each.
    layer_ms
        milliseconds that the source takes to compute one of the four layers.
    handoffs
        hand-offs that are measured per delay, kind and round.
    rounds
        how often each is measured; medians are shown, every hand-off is kept.
    """
    from kvbaton.bench.delayed import DelayBench, run_delay_bench

    _begin(output)
    bench = DelayBench(_numbers(delays, "--delays"), tokens, layer_ms, handoffs, rounds)
    return _finish("delay", run_delay_bench(bench, _progress), bench.described(), output)


@bench_app.command
def plan(
    *,
    tokens: int = 8192,
    layers: int = 80,
    rounds: int = 15,
    peers: bool = True,
    vllm: Path | None = None,
    sglang: Path | None = None,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """From block lists to runs, beside the planning code of vLLM and SGLang on the same lists.

    Exits with 1 when more, or less, is planned than the targets need.

    Parameters
    ----------
    tokens
        tokens of the request.
    layers
        layers of the model.
    rounds
        how many turns each subject has, of five plans each; medians are shown, all are kept.
    peers
        measure vLLM and SGLang too; installed on first use (5 GB).
    vllm
        a Python interpreter that has vLLM; without it, and with peers, the one that kvbaton installs.
    sglang
        a Python interpreter that has SGLang; without it, and with peers, the one that kvbaton installs.
    """
    from kvbaton.bench.plan import PlanBench, ensure_plan_peers, run_plan_bench

    _begin(output)
    if peers and not (vllm and sglang):
        own = ensure_plan_peers(_progress)
        vllm, sglang = vllm or own[0], sglang or own[1]
    bench = PlanBench(tokens, layers, rounds, vllm=vllm, sglang=sglang)
    return _finish("plan", run_plan_bench(bench, _progress), bench.described(), output)


@bench_app.command
def streams(
    *,
    engine: EngineName = DEFAULT_ENGINE,
    peer: str = "",
    model: ModelName = "smollm2",
    transport: TransportName = "local",
    mode: Literal["push", "pull"] = "push",
    streams: int = 2,
    stream_tokens: int = 100,
    per_s: float = 20.0,
    prompt_tokens: int = 16,
    rounds: int = 5,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """What hand-offs cost streams that run already: the time between two tokens, beside prefills alone, beside nothing else.

    A router, a prefill and a decode instance of the embedded engine; or servers of another engine, without a router.

    Parameters
    ----------
    peer
        compare with another connector in the same run, such as `nixl` of vLLM; the engine is one that has it then.
    mode
        `push`: layers stream while they are computed; `pull`: the target fetches what is complete.
    streams
        streams that run at the same time.
    stream_tokens
        tokens of each stream.
    per_s
        prompts a second that are asked for meanwhile.
    prompt_tokens
        tokens of every prompt.
    rounds
        how often each kind of load has its turn; medians are shown, every round is kept.
    """
    from kvbaton.bench.streams import StreamsBench, run_server_streams_bench, run_streams_bench
    from kvbaton.core.handoff import Mode
    from kvbaton.engines.table import engine_with_connector, find_engine

    _begin(output)
    plugin = find_engine(engine)
    if peer and peer not in plugin.support.connectors[1:]:
        plugin = engine_with_connector(peer, "--peer")
    bench = StreamsBench(model, transport, Mode(mode), streams, stream_tokens, per_s, prompt_tokens, rounds, peer)
    run = run_streams_bench if plugin.reports_handover else run_server_streams_bench
    described = {"engine": plugin.name, **bench.described(), **plugin.versions(peer)}
    return _finish("streams", run(bench, plugin, _progress), described, output)


@bench_app.command
def serve(
    *,
    engine: EngineName = DEFAULT_ENGINE,
    peer: str = "",
    model: ModelName = "smollm2",
    transport: TransportName = "local",
    requests: int = 40,
    prompt_tokens: int = 128,
    chunk_tokens: int = 128,
    chunks: int = 5,
    mode: Literal["push", "pull", "both"] = "both",
    prefill_shape: str = "tp1",
    decode_shape: str = "tp1",
    lengths: str = "128,512,1500",
    rounds: int = 8,
    device: Literal["cpu", "cuda"] = "cpu",
    cache_dtype: str = "float32",
    engine_arguments: str = "",
    plot: Path | None = None,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """What a hand-off costs a client: hand-over at low load, and the first token beside a prefill with no hand-off at all.

    With another engine than the embedded one: what a pair adds to the first token of one server, what it uses of the
    processors, and where the time of the hand-over goes; with a peer, beside a pair with that connector in the same run.

    Parameters
    ----------
    peer
        compare with another connector of the engine, such as `nixl` of vLLM; the engine is one that has it then.
    requests
        embedded: hand-overs that are measured per mode, one at a time.
    prompt_tokens
        embedded: tokens of a prompt whose hand-over is measured.
    chunk_tokens
        embedded: tokens that the prefill instance computes in one step.
    chunks
        embedded: length, in such steps, of the prompts whose first token is measured; at least 4.
    mode
        other engines: which of kvbaton's modes to measure.
    prefill_shape
        other engines: how the prefill servers are cut into ranks: `tp2`, ...; those of the peer too.
    decode_shape
        other engines: how the decode servers are cut.
    lengths
        other engines: tokens of the prompts, with commas between them.
    rounds
        how often the first token is measured with and without a hand-off, in turns.
    device
        other engines: where they run; `cuda` for vLLM on an NVIDIA GPU that all servers share.
    cache_dtype
        other engines: type of the numbers in weights and caches.
    engine_arguments
        other engines: more arguments for the command line of every server, as one string.
    plot
        other engines: file for a plot, drawn as .png and as .svg.
    """
    from kvbaton.bench.plots import plot_servers_bench
    from kvbaton.bench.serve import ServeBench, run_serve_bench
    from kvbaton.bench.servers import ServersBench, run_servers_bench
    from kvbaton.core.handoff import Mode
    from kvbaton.engines.table import engine_with_connector, find_engine

    _begin(output, plot)
    plugin = find_engine(engine)
    if peer and peer not in plugin.support.connectors[1:]:
        plugin = engine_with_connector(peer, "--peer")
    if plugin.reports_handover:
        alone = ServeBench(model, transport, requests, prompt_tokens, chunk_tokens, chunks, rounds)
        return _finish("serve", run_serve_bench(alone, plugin, _progress), alone.described(), output)
    modes = tuple(Mode) if mode == "both" else (Mode(mode),)
    bench = ServersBench(
        plugin,
        model,
        transport,
        modes,
        peer,
        prefill_shape,
        decode_shape,
        _numbers(lengths, "--lengths"),
        rounds,
        device=device,
        cache_dtype=cache_dtype,
        engine_arguments=tuple(shlex.split(engine_arguments)),
    )
    report = run_servers_bench(bench, _progress)
    if plot is not None:
        for path in plot_servers_bench(report, bench.lengths, bench.variants, plot):
            _progress(f"drawn: {path}")
    return _finish("serve", report, bench.described(), output)


@bench_app.command
def router(
    *,
    clients: str = "1,32,256",
    processes: str = "1,2",
    rounds: int = 5,
    seconds: float = 2.0,
    prompt_bytes: int = 64,
    peers: bool = True,
    plot: Path | None = None,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """The router beside vllm-router and sglang-router, all in front of the same instances without a model; needs a C compiler.

    Parameters
    ----------
    clients
        how many clients ask at once; levels with commas between them.
    processes
        with how many processes our router runs; numbers with commas between them.
    rounds
        how often each thing is measured; medians are shown, every round is kept.
    seconds
        how long each measurement takes.
    prompt_bytes
        length of a prompt.
    peers
        measure vllm-router and sglang-router too; installed on first use.
    plot
        file for a plot, drawn as .png and as .svg.
    """
    from kvbaton.bench.plots import plot_router_bench
    from kvbaton.bench.router import RouterBench, run_router_bench

    _begin(output, plot)
    bench = RouterBench(
        _numbers(clients, "--clients"), _numbers(processes, "--processes"), rounds, seconds, prompt_bytes, peers
    )
    report = run_router_bench(bench, _progress)
    if plot is not None:
        for path in plot_router_bench(report, bench, plot):
            _progress(f"drawn: {path}")
    return _finish("router", report, bench.described(), output)


@bench_app.command
def wire(
    *,
    transport: Annotated[TransportName, Parameter(help=_WIRE_TRANSPORT)] = "auto",
    subject: str = "",
    blocks: str = "4,16,64,1024,4096",
    batch_mib: str = "128",
    turn_mib: int = 128,
    peers: str = "1",
    layout: Literal["scattered", "contiguous"] = "scattered",
    direction: Literal["read", "write"] = "read",
    tokens: int = 4096,
    rounds: int = 5,
    idle: float = 3.0,
    plot: Path | None = None,
    output: Output = _DEFAULT_OUTPUT,
) -> int:
    """Paged bytes between two processes: every transport beside what a user would pick instead, in turns, every byte checked.

    Reads by default: with every transport the owner of the target memory can execute the copy. GB is 1e9 bytes, a rate is that
    of the whole loop. Exits with 1 when a byte was wrong.

    Parameters
    ----------
    subject
        one thing alone, beside what it is compared with and raw NIXL: `mori`, the drop-in for MoRI-IO beside `local` over the
        same memory; or any other name of the table that is printed.
    blocks
        sizes of blocks in KiB, with commas between them (not `cuda`).
    batch_mib
        how much one batch moves, divided among the peers; numbers with commas between them.
    turn_mib
        how much a measured turn moves: as many batches as fit, one after another, at least one.
    peers
        how many other processes take part at once; numbers with commas between them, 1 to 64.
    layout
        `scattered`: random pages with gaps; `contiguous`: pages in order.
    direction
        `read`: this process reads from the others; `write`: it writes to them, over what can (`tcp`, `nixl`, `mooncake`,
        and those libraries alone).
    tokens
        tokens of an 8B Llama whose cache one batch moves (`cuda`; 4,096 are 537 MB).
    rounds
        how often each thing is measured; medians are shown, every round is kept.
    idle
        seconds for which the sources are watched while nothing happens.
    plot
        file for a plot (.png or .svg; without a suffix, both); needs matplotlib.
    """
    from kvbaton.errors import ConfigError

    if plot is not None and plot.suffix not in ("", ".png", ".svg"):
        raise ConfigError(f"--plot is {str(plot)!r}; its suffix must be .png or .svg, or left out for both")
    _begin(output, plot)
    from kvbaton.bench.plots import plot_wire_bench
    from kvbaton.bench.wire.run import WireBench, measure_wire
    from kvbaton.transport.base import Direction

    sizes = tuple(number << 10 for number in _numbers(blocks, "--blocks"))
    batches = tuple(number << 20 for number in _numbers(batch_mib, "--batch-mib"))
    counts = _numbers(peers, "--peers")
    way = Direction(direction)
    asked = WireBench(sizes, batches, counts, layout, rounds=rounds, idle_s=idle, direction=way, turn_bytes=turn_mib << 20)
    report, described = measure_wire(transport, asked, tokens, _progress, subject)
    if plot is not None:
        plot_wire_bench(report, plot)
    return _finish("wire", report, described, output)


def _begin(output: OutputOptions, plot: Path | None = None) -> None:
    """Raise ConfigError when results could not be kept or drawn: better before they are measured than after.

    From now on a signal ends the command as Ctrl-C does.
    """
    from kvbaton.bench.report import check_can_plot
    from kvbaton.errors import ConfigError

    for option, path in (("--out", output.out), ("--plot", plot)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ConfigError(
                f"{option} is {str(path)!r}, which cannot be written; name a file in a directory that you can write"
            )
    if plot is not None:
        check_can_plot()
    end_like_ctrl_c()


def _numbers(text: str, option: str) -> tuple[int, ...]:
    from kvbaton.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; give whole numbers with commas between them") from None


def _progress(line: str) -> None:
    Console(stderr=True).print(f"  {line}", style="dim", highlight=False, soft_wrap=True)


def _finish(name: str, report: BenchReport, settings: Mapping[str, Setting], output: OutputOptions) -> int:
    """Keep the raw results, print, and return the exit code."""
    import msgspec

    facts = {"arguments": sys.argv[1:], "raw": str(output.out or ""), **msgspec.to_builtins(report)}
    document = json_document(f"bench {name}", not report.problems, settings, **facts)
    if output.out is not None:
        output.out.write_bytes(document)
    if output.json:
        sys.stdout.write(document.decode() + "\n")
    else:
        _print_table(name, report)
    return _FOUND if report.problems else 0


def _print_table(name: str, report: BenchReport) -> None:
    table = Table("what", "median", "beside", "ratio", title=f"kvbaton bench {name}")
    for row in report.rows:
        table.add_row(
            row.name, f"{row.value:,.4g} {row.unit}", row.peer, f"{row.ratio:.3g} x" if row.peer or row.ratio != 1 else ""
        )
    console = Console()
    console.print(table)
    for problem in report.problems:
        console.print(problem, style="red", highlight=False)
