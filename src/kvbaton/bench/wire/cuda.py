"""Transport cuda beside the full-tensor copy of the same GPU: two processes, and every byte checked in every round.

Each round measures three things in turn: the copy of one contiguous tensor inside this process (the peer), the kernel of a
batch between the two processes, and the batch through the transport, from `post` to its completion, on the host's clock. The
first two are timed with events on the GPU, behind a fill of other memory that hides how long the host takes to launch; the
kernel's time includes reading its table from memory of the host. Batches are runs as hand-offs have them: pages of an 8B Llama,
slices of pages between unequal shapes, and slots in no order at all.

`main` is the source: a process of its own, with memory in which every word identifies its place.
"""

from __future__ import annotations

import os
import select
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvbaton.bench.report import BenchReport, BenchRow, Setting, describe_hardware
from kvbaton.bench.wire.pages import POISON
from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import Plan, Runs, Strip, TokenPattern, unroll
from kvbaton.errors import ConfigError, LocalError
from kvbaton.transport.base import Batch, Completion, Direction, Endpoint, PeerRank, TransportSettings
from kvbaton.transport.cuda import CudaTransport, DeviceRegion
from kvbaton.transport.cuda.copier import AnyLaunch, GpuCopier
from kvbaton.transport.cuda.driver import CudaDriver
from kvbaton.transport.cuda.launch import Placement, Segment, launches_for
from kvbaton.transport.cuda.region import Mapping, open_parts, read_parts
from kvbaton.transport.cuda.strip_launch import strip_launches
from kvbaton.transport.source_process import SourceProcess

__all__ = ["PLANES", "TOKEN_BYTES", "Pattern", "expected_target", "main", "measure_cuda", "patterns"]

Progress = Callable[[str], None]

PLANES = 64
"""Keys and values of 32 layers."""

TOKEN_BYTES = 2048
"""One token in one plane: 8 heads of 128 channels in 16 bits."""

_PEER = PeerRank(Incarnation("source"))
_START_S = 120.0
_BATCH_S = 30.0
_WARM_UP = 3
_CURTAIN_BYTES = 1 << 30
_FULL = "full-tensor copy"
_POST = "post"
_BLOCK_TOKENS = 16
_SPARE = 1.25
_WORD = 4
_CHUNK_WORDS = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """One batch: runs of one length, whose offsets are multiples of it on both sides; `posted` as an agent would post them."""

    name: str
    run_bytes: int
    source_bytes: int
    target_bytes: int
    posted: Runs | Plan
    runs: Runs

    @property
    def wire_bytes(self) -> int:
        """What it moves."""
        return self.run_bytes * len(self.runs)


def patterns(tokens: int, seed: int = 1) -> list[Pattern]:
    """Batches that move the cache of `tokens` tokens each, in runs of 32 KiB, 1 KiB and 256 bytes. Raises ConfigError."""
    if tokens < _BLOCK_TOKENS or tokens % _BLOCK_TOKENS:
        raise ConfigError(f"--tokens is {tokens}; it must be a multiple of {_BLOCK_TOKENS}, the tokens of a block")
    random = np.random.default_rng(seed)
    wire_bytes = tokens * TOKEN_BYTES * PLANES
    found = [_pages("32 KiB blocks", tokens, TOKEN_BYTES, random)]
    for name, run_bytes in (("1 KiB", 1024), ("256 B", 256)):
        found.append(_pages(f"{name} slices of pages", tokens, run_bytes, random))
        found.append(_slots(f"{name} runs in no order", wire_bytes, run_bytes, random))
    return found


def _pages(name: str, tokens: int, slice_bytes: int, random: np.random.Generator) -> Pattern:
    """A slice of every token, from pages of all heads to pages of fewer; the same blocks in every plane."""
    blocks = tokens * (TOKEN_BYTES // slice_bytes) // _BLOCK_TOKENS
    pool = int(blocks * _SPARE)
    source_page, target_page = _BLOCK_TOKENS * TOKEN_BYTES, _BLOCK_TOKENS * slice_bytes
    is_whole = slice_bytes == TOKEN_BYTES
    source, target = random.permutation(pool)[:blocks], np.sort(random.permutation(pool)[:blocks])  # plans are in this order
    planes, count = np.arange(PLANES), np.full(blocks, target_page if is_whole else _BLOCK_TOKENS)
    places = np.stack([source * source_page, target * target_page, count], axis=1)
    slots = np.stack([planes * (pool * source_page), planes * (pool * target_page), planes * 0], axis=1)
    token = None if is_whole else TokenPattern(np.array([[0, 0, slice_bytes]]), TOKEN_BYTES, slice_bytes)
    plan = Plan((Strip(slots, places, token),))
    sizes = PLANES * pool * source_page, PLANES * pool * target_page
    return Pattern(name, target_page if is_whole else slice_bytes, *sizes, plan, unroll(plan))


def _slots(name: str, wire_bytes: int, run_bytes: int, random: np.random.Generator) -> Pattern:
    """Slots of `run_bytes` anywhere, to anywhere."""
    count = wire_bytes // run_bytes
    pool = int(count * _SPARE)
    source, target = (random.permutation(pool)[:count] * run_bytes for _ in range(2))
    runs = np.stack([source, target, np.full(count, run_bytes)], axis=1).astype(np.uint64)
    return Pattern(name, run_bytes, pool * run_bytes, pool * run_bytes, runs, runs)


def _fill_source(torch: Any, source: Any) -> None:
    """Give every word of a tensor of bytes the value that belongs to its place."""
    words = source.view(torch.int32)
    for start in range(0, len(words), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        chunk.copy_(_words(torch, torch.arange(start, start + len(chunk), device=source.device)))


def expected_target(torch: Any, pattern: Pattern, device: Any) -> Any:
    """What the target must hold after the batch, poison between the runs included; made without the code that is measured."""
    words = pattern.run_bytes // _WORD
    expected = torch.full((pattern.target_bytes,), POISON, dtype=torch.uint8, device=device)
    slots = expected.view(torch.int32).view(-1, words)
    runs = torch.from_numpy(pattern.runs.astype("int64")).to(device)
    column = torch.arange(words, device=device)
    step = max(1, _CHUNK_WORDS // words)
    for start in range(0, len(runs), step):
        part = runs[start : start + step]
        slots[part[:, 1] // pattern.run_bytes] = _words(torch, (part[:, :1] // _WORD) + column)
    return expected


def _words(torch: Any, places: Any) -> Any:
    """What belongs to these places; the highest bit is never set, so that no word looks like poison."""
    mixed = (places * 2654435761) ^ (places >> 7)
    return (mixed & 0x7FFFFFFF).to(torch.int32)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds of one round."""

    full: float
    on_gpu: float
    posting: float
    whole: float


class _CudaStand:
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
        self._run_kernel([*launches], self.target)

    def _time_full(self) -> float:
        source, target = self._full
        return self._between_events(lambda: target.copy_(source, non_blocking=True), target)

    def _time_kernel(self, pattern: Pattern) -> float:
        places = self._mapping.placement, self._placement
        launches: list[AnyLaunch] = []
        if isinstance(pattern.posted, Plan):
            launches += strip_launches(pattern.posted, *places) or ()
        return self._run_kernel(launches or [*launches_for(pattern.runs, *places)], self.target[: pattern.target_bytes])

    def _run_kernel(self, launches: list[AnyLaunch], target: Any) -> float:
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
        self._transport.post(Batch(_PEER, Direction.READ, pattern.posted))
        posted = time.perf_counter()
        completions: list[Completion] = []
        while not completions:  # it may be woken shortly before the end
            if not select.select([self._transport.wakeup_fd], [], [], _BATCH_S)[0]:
                raise LocalError(f"{pattern.name}: no completion within {_BATCH_S:g} s")
            completions = self._transport.poll()
        completion = completions[0]
        done = time.perf_counter()
        if completion.error or completion.moved_bytes != pattern.wire_bytes:
            raise LocalError(f"{pattern.name}: {completion.moved_bytes} of {pattern.wire_bytes} bytes: {completion.error}")
        return posted - start, done - start


def measure_cuda(tokens: int, rounds: int, progress: Progress) -> tuple[BenchReport, dict[str, Setting]]:
    """What `kvbaton bench wire` does for transport cuda, on GPU 0; returns the report and the settings that it was made with.

    Raises ConfigError without `kvbaton[cuda]` or a GPU, LocalError when a byte is wrong.
    """
    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; it must be at least 1")
    torch = _torch()
    batches = patterns(tokens)
    report = BenchReport([], _hardware(torch), [{} for _ in range(rounds)])
    with ExitStack() as undo:
        arguments = str(max(pattern.source_bytes for pattern in batches)), _PEER.incarnation
        command = (sys.executable, "-m", "kvbaton.bench.wire.cuda", *arguments)
        source = undo.enter_context(closing(SourceProcess(command)))
        endpoint = msgspec.json.decode(source.line(_START_S), type=Endpoint)
        target_bytes = max(pattern.target_bytes for pattern in batches)
        stand = _CudaStand(torch, endpoint, target_bytes, batches[0].wire_bytes, undo)
        for pattern in batches:
            progress(f"{pattern.name}: {len(pattern.runs):,} runs, {pattern.wire_bytes / 1e6:,.0f} MB")
            _measure(torch, stand, pattern, rounds, report)
    _add_full(report, tokens)
    return report, {"transport": "cuda", "tokens": tokens, "rounds": rounds}


def _measure(torch: Any, stand: _CudaStand, pattern: Pattern, rounds: int, report: BenchReport) -> None:
    expected = expected_target(torch, pattern, stand.target.device)
    taken = [stand.measure(pattern, expected) for _ in range(_WARM_UP + rounds)][_WARM_UP:]
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


def _add_full(report: BenchReport, tokens: int) -> None:
    seconds = statistics.median(one for kept in report.rounds for one in kept[_FULL])
    wire_bytes = tokens * TOKEN_BYTES * PLANES
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


def main() -> None:
    """Serve one region of so many bytes; its endpoint goes to the descriptor that is the last argument, as one line of JSON."""
    torch = _torch()
    region_bytes, incarnation = int(sys.argv[1]), Incarnation(sys.argv[2])
    memory = torch.empty(region_bytes, dtype=torch.uint8, device="cuda:0")
    _fill_source(torch, memory)
    torch.cuda.synchronize()
    transport = CudaTransport(DeviceRegion.of_tensors(memory), TransportSettings(incarnation=incarnation))
    os.write(int(sys.argv[3]), msgspec.json.encode(transport.endpoint()) + b"\n")
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main()
