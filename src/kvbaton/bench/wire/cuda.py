"""Transport cuda beside the full-tensor copy of the same GPU: two processes, and every byte checked in every round.

Each round measures three things in turn: the copy of one contiguous tensor inside this process (the peer), the kernel of a
batch between the two processes, and the batch through the transport, from `post` to its completion, on the host's clock. The
first two are timed with events on the GPU, behind a fill of other memory that hides how long the host takes to launch; the
kernel's time includes reading its table from memory of the host.
"""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.bench.report import BenchReport, BenchRow, Setting, describe_hardware
from kvbaton.bench.wire.gpu_content import POISON, expected_target
from kvbaton.bench.wire.patterns import PLANES, TOKEN_BYTES, Pattern, patterns
from kvbaton.bench.wire.source_process import source_process
from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, LocalError
from kvbaton.transport.base import Batch, Direction, Endpoint, PeerRank, TransportSettings
from kvbaton.transport.cuda import CudaTransport, DeviceRegion
from kvbaton.transport.cuda.copier import GpuCopier
from kvbaton.transport.cuda.driver import CudaDriver
from kvbaton.transport.cuda.mapping import Mapping, open_parts, read_parts
from kvbaton.transport.cuda.placement import Placement, Segment
from kvbaton.transport.cuda.tables import Launch, launches_for

__all__ = ["CudaWireBench", "measure_cuda", "run_cuda_wire_bench"]

Progress = Callable[[str], None]

_PEER = PeerRank(Incarnation("source"))
_BATCH_S = 30.0
_WARM_UP = 3
_CURTAIN_BYTES = 1 << 30
_FULL = "full-tensor copy"
_POST = "post"


@dataclass(frozen=True, slots=True)
class CudaWireBench:
    """What to measure: batches of the cache of `tokens` tokens."""

    tokens: int = 4096
    rounds: int = 20

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds is {self.rounds}; it must be at least 1")

    def described(self) -> dict[str, Setting]:
        """The settings, for the report."""
        return {"transport": "cuda", "tokens": self.tokens, "rounds": self.rounds}


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds of one round."""

    full: float
    on_gpu: float
    posting: float
    whole: float


class _Stand:
    """The target process: memory, the transport over it, and the parts of that transport for times on the GPU alone."""

    def __init__(self, torch: Any, endpoint: Endpoint, target_bytes: int, wire_bytes: int, undo: ExitStack) -> None:
        self._torch = torch
        self.target = torch.empty(target_bytes, dtype=torch.uint8, device="cuda:0")
        self._full = [torch.full((wire_bytes,), fill, dtype=torch.uint8, device="cuda:0") for fill in (1, 2)]
        self._curtain = torch.empty(_CURTAIN_BYTES, dtype=torch.uint8, device="cuda:0")
        region = DeviceRegion.of_tensors(self.target)
        self._transport = CudaTransport(region, TransportSettings(incarnation=Incarnation("target")))
        undo.callback(self._transport.close)
        self._transport.connect(_PEER, endpoint)
        driver = CudaDriver(0)
        undo.callback(driver.close)
        self._mapping: Mapping = open_parts(read_parts(str(endpoint.details["parts"]), endpoint.region_bytes), driver)
        undo.callback(self._mapping.close, driver)
        self._copier = GpuCopier(0)
        undo.callback(self._copier.close)
        self._placement = Placement([Segment(0, region.region_bytes, region.address)])

    def measure(self, pattern: Pattern, expected: Any) -> _Taken:
        """One round. Raises LocalError when a byte is not what it should be."""
        full = self._time_full()
        on_gpu = self._time_kernel(pattern)
        self.check(pattern, expected, "the kernel alone")
        posting, whole = self._time_batch(pattern)
        self.check(pattern, expected, "the transport")
        return _Taken(full, on_gpu, posting, whole)

    def is_right(self, pattern: Pattern, expected: Any) -> bool:
        """Whether target memory is exactly what the batch must leave there."""
        self._torch.cuda.synchronize()
        return bool(self._torch.equal(self.target[: pattern.target_bytes], expected))

    def check(self, pattern: Pattern, expected: Any, method: str) -> None:
        """Raise LocalError unless every byte is right."""
        if not self.is_right(pattern, expected):
            raise LocalError(f"{pattern.name}: {method} left bytes in target memory that are not the source's")

    def copy_all_but_one(self, pattern: Pattern) -> None:
        """The negative control: everything but the last run."""
        launches = launches_for(pattern.runs[:-1], self._mapping.placement, self._placement)
        self._run_kernel(launches, self.target)

    def _time_full(self) -> float:
        source, target = self._full
        return self._between_events(lambda: target.copy_(source, non_blocking=True), target)

    def _time_kernel(self, pattern: Pattern) -> float:
        launches = launches_for(pattern.runs, self._mapping.placement, self._placement)
        return self._run_kernel(launches, self.target[: pattern.target_bytes])

    def _run_kernel(self, launches: list[Launch], target: Any) -> float:
        tables = self._copier.stage(launches)
        floors = self._mapping.placement.floor, self._placement.floor
        return self._between_events(lambda: self._copier.queue(launches, tables, *floors), target)

    def _between_events(self, work: Callable[[], object], target: Any) -> float:
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._torch.cuda.stream(self._copier.stream):
            target.fill_(POISON)
            self._curtain.fill_(POISON)
            first.record()
            work()
            last.record()
        deadline = time.monotonic() + _BATCH_S
        while not last.query():
            if time.monotonic() > deadline:
                raise LocalError(f"a copy on the GPU did not end within {_BATCH_S:g} s")
        return float(first.elapsed_time(last)) / 1e3

    def _time_batch(self, pattern: Pattern) -> tuple[float, float]:
        """Seconds until `post` returned, and until the completion was there."""
        self.target[: pattern.target_bytes].fill_(POISON)
        self._torch.cuda.synchronize()
        start = time.perf_counter()
        self._transport.post(Batch(_PEER, Direction.READ, pattern.runs))
        posted = time.perf_counter()
        if not select.select([self._transport.wakeup_fd], [], [], _BATCH_S)[0]:
            raise LocalError(f"{pattern.name}: no completion within {_BATCH_S:g} s")
        completion = self._transport.poll()[0]
        done = time.perf_counter()
        if completion.error or completion.moved_bytes != pattern.wire_bytes:
            raise LocalError(f"{pattern.name}: {completion.moved_bytes} of {pattern.wire_bytes} bytes: {completion.error}")
        return posted - start, done - start


def measure_cuda(tokens: int, rounds: int, progress: Progress) -> tuple[BenchReport, dict[str, Setting]]:
    """What `kvbaton bench wire` does for transport cuda; returns the report and the settings that it was made with."""
    bench = CudaWireBench(tokens, rounds)
    return run_cuda_wire_bench(bench, progress), bench.described()


def run_cuda_wire_bench(bench: CudaWireBench, progress: Progress) -> BenchReport:
    """Measure on GPU 0. Raises ConfigError without `kvbaton[cuda]` or a GPU, LocalError when a byte is wrong."""
    torch = _torch()
    batches = patterns(bench.tokens)
    report = BenchReport([], _hardware(torch), [{} for _ in range(bench.rounds)])
    with ExitStack() as undo:
        arguments = str(max(pattern.source_bytes for pattern in batches)), _PEER.incarnation
        line, _ = undo.enter_context(source_process("kvbaton.bench.wire.gpu_source", *arguments))
        endpoint = msgspec.json.decode(line, type=Endpoint)
        target_bytes = max(pattern.target_bytes for pattern in batches)
        stand = _Stand(torch, endpoint, target_bytes, batches[0].wire_bytes, undo)
        for pattern in batches:
            progress(f"{pattern.name}: {len(pattern.runs):,} runs, {pattern.wire_bytes / 1e6:,.0f} MB")
            _measure(torch, stand, pattern, bench, report)
    _add_full(report, bench)
    return report


def _measure(torch: Any, stand: _Stand, pattern: Pattern, bench: CudaWireBench, report: BenchReport) -> None:
    expected = expected_target(torch, pattern, stand.target.device)
    taken = [stand.measure(pattern, expected) for _ in range(_WARM_UP + bench.rounds)][_WARM_UP:]
    stand.copy_all_but_one(pattern)
    if stand.is_right(pattern, expected):
        report.problems.append(f"{pattern.name}: a run that was left out was not noticed, so the check is worth nothing")
    for kept, one in zip(report.rounds, taken, strict=True):
        kept.setdefault(_FULL, []).append(one.full)
        kept[pattern.name] = [one.on_gpu]
        kept[f"{pattern.name}, {_POST}"] = [one.posting]
        kept[f"{pattern.name}, post to completion"] = [one.whole]
    full, on_gpu, posting, whole = (
        statistics.median(getattr(one, field) for one in taken) for field in ("full", "on_gpu", "posting", "whole")
    )
    settings: dict[str, Setting] = {"runs": len(pattern.runs), "wire_bytes": pattern.wire_bytes, "run_bytes": pattern.run_bytes}
    rate = pattern.wire_bytes / 1e9
    kernel = settings | {"seconds": on_gpu}
    through = settings | {"seconds": whole, "post_seconds": posting}
    report.rows.append(BenchRow(f"{pattern.name}: on the GPU", rate / on_gpu, "GB/s", _FULL, full / on_gpu, kernel))
    report.rows.append(BenchRow(f"{pattern.name}: post to completion", rate / whole, "GB/s", _FULL, full / whole, through))


def _add_full(report: BenchReport, bench: CudaWireBench) -> None:
    seconds = statistics.median(one for kept in report.rounds for one in kept[_FULL])
    wire_bytes = bench.tokens * TOKEN_BYTES * PLANES
    settings: dict[str, Setting] = {"seconds": seconds, "wire_bytes": wire_bytes}
    report.rows.insert(0, BenchRow(_FULL, wire_bytes / 1e9 / seconds, "GB/s", _FULL, 1.0, settings))


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            f"bench wire --transport cuda needs torch and Triton ({error}); pip install 'kvbaton[cuda]'"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError("bench wire --transport cuda needs an NVIDIA GPU; torch sees none here")
    return torch


def _hardware(torch: Any) -> dict[str, Setting]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    gpu: dict[str, Setting] = {
        "gpu": str(properties.name),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": int(properties.multi_processor_count),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
    }
    return describe_hardware() | gpu
