"""The rounds of the wire benchmark: all subjects in turns, every byte checked, medians as rates and as ratios to a peer.

GB is 1e9 bytes, and a rate is that of the whole loop, from posting until the last byte is in, as nixlbench has it. Where
batches are small, a turn is several of them, one after another and each to places of its own: one alone would show how long a
processor that was idle takes to wake.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from kvbaton.bench.processes import cpu_s
from kvbaton.bench.report import BenchReport, BenchRow, Setting, describe_hardware
from kvbaton.bench.wire.pages import POISON, SPREAD, Bytes, contiguous_runs, is_copied, scattered_runs, stream_places, wipe
from kvbaton.bench.wire.subjects import (
    RAW,
    PeerProcess,
    SingleBlocks,
    WireSubject,
    all_subjects,
    beside_of,
    can_write,
    open_subject,
    our_subjects,
)
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Direction, Runs
from kvbaton.transport.table import AUTO, load, transport_entry

__all__ = ["WireBench", "measure_wire", "run_wire_bench", "subjects_of"]

Progress = Callable[[str], None]

_MOST_PEERS = 64
_MOST_TURN_BYTES = 1 << 34
_SINGLE_BYTES = 8 << 10
_SINGLES, _SINGLE_WARM_UP = 2000, 200
_RAW_NIXL = "raw nixl"


@dataclass(frozen=True, slots=True)
class WireBench:
    """What is measured. Each of `batch_bytes` is divided among the peers; a turn moves as many batches as `turn_bytes` hold."""

    block_bytes: tuple[int, ...] = (4 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20)
    batch_bytes: tuple[int, ...] = (128 << 20,)
    peers: tuple[int, ...] = (1,)
    layout: str = "scattered"
    subjects: tuple[str, ...] = field(default_factory=all_subjects)
    rounds: int = 5
    idle_s: float = 3.0
    direction: Direction = Direction.READ
    turn_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.subjects:
            if name not in all_subjects():
                raise ConfigError(f"unknown subject {name!r}; known are {', '.join(all_subjects())}")
        if self.direction is Direction.WRITE and not any(map(can_write, self.subjects)):
            writers = filter(can_write, all_subjects())
            raise ConfigError(f"{', '.join(self.subjects)}: none of them writes; those that do are {', '.join(writers)}")
        if min(self.block_bytes) < 1 or not 1 <= min(self.peers) <= max(self.peers) <= _MOST_PEERS:
            raise ConfigError(
                f"block_bytes is {', '.join(map(str, self.block_bytes))} and peers is {', '.join(map(str, self.peers))}; "
                f"blocks must have a size above 0, and peers must be 1 to {_MOST_PEERS}"
            )
        if not 0 <= self.turn_bytes <= _MOST_TURN_BYTES:
            raise ConfigError(f"turn_bytes is {self.turn_bytes}; it must be 0 to {_MOST_TURN_BYTES}")
        if self.rounds < 1 or min(self.batch_bytes) < min(self.block_bytes) * max(self.peers):
            raise ConfigError(
                f"rounds is {self.rounds}, the smallest of batch_bytes is {min(self.batch_bytes)}; there must be a round, and "
                f"a block of {min(self.block_bytes)} bytes for each of {max(self.peers)} peers"
            )

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {
            "block_bytes": ",".join(map(str, self.block_bytes)),
            "batch_bytes": ",".join(map(str, self.batch_bytes)),
            "turn_bytes": self.turn_bytes,
            "peers": ",".join(map(str, self.peers)),
            "layout": self.layout,
            "direction": str(self.direction),
            "rounds": self.rounds,
        }


def subjects_of(transport: str) -> tuple[str, ...]:
    """What is measured for one transport: its variants and what each is compared with; `auto` means everything."""
    if transport == AUTO:
        return all_subjects()
    chosen = [name for name, (entry, _) in our_subjects().items() if entry.name == transport]
    if not chosen:
        known = sorted({entry.name for entry, _ in our_subjects().values()})
        raise ConfigError(f"transport {transport!r} is not measured by block size; known are {AUTO}, {', '.join(known)}")
    return tuple(dict.fromkeys((*chosen, *filter(None, map(beside_of, chosen)))))


def measure_wire(
    transport: str, bench: WireBench, tokens: int, progress: Progress, subject: str = ""
) -> tuple[BenchReport, dict[str, Setting]]:
    """Measure one transport beside its peers, `auto` being all, as the table of transports has it. Raises ConfigError.

    `subject` is measured instead of a transport, where it is given. `tokens` is for transports that are not measured by size of
    blocks. Returns the report and the settings it was made with.
    """
    if subject:
        chosen = replace(bench, subjects=tuple(dict.fromkeys(filter(None, (subject, _beside_known(subject), _RAW_NIXL)))))
        return run_wire_bench(chosen, progress), chosen.described()
    entry = transport_entry(transport)
    if entry.bench and bench.direction not in entry.promises:
        raise ConfigError(
            f"--direction is {bench.direction}: transport {entry.name} only reads, the owner of the target memory copies"
        )
    if entry.bench:
        report, described = load(entry.bench)(tokens, bench.rounds, progress)
        return report, described
    bench = replace(bench, subjects=subjects_of(transport))
    return run_wire_bench(bench, progress), bench.described()


def _beside_known(subject: str) -> str:
    return beside_of(subject) if subject in all_subjects() else ""


@dataclass(frozen=True, slots=True)
class _Point:
    """What one rate belongs to: blocks of a size, in batches of a size, from or to so many peers."""

    block_bytes: int
    batch_bytes: int
    peers: int
    names_batch: bool
    batches: int
    """How many of them are a turn."""

    @property
    def bytes_per_peer(self) -> int:
        return self.batch_bytes // self.peers // self.block_bytes * self.block_bytes

    @property
    def turn_bytes(self) -> int:
        return self.batches * self.peers * self.bytes_per_peer

    def key(self, name: str) -> str:
        batch = f" in {_size(self.batch_bytes)}" if self.names_batch else ""
        return f"{name}: {_size(self.block_bytes)}{batch}" + (f" x {self.peers} peers" if self.peers > 1 else "")

    def __str__(self) -> str:
        return f"blocks of {_size(self.block_bytes)} in batches of {_size(self.batch_bytes)}, {self.peers} peers"


@dataclass(slots=True)
class _WireEntrant:
    """One subject with its peers, while it takes part; `direction` is READ for one that cannot write and is compared with."""

    name: str
    subject: WireSubject
    peers: list[PeerProcess]
    direction: Direction
    posted_s: dict[str, list[float]] = field(default_factory=dict)
    processor_s: dict[str, list[float]] = field(default_factory=dict)


def run_wire_bench(bench: WireBench, progress: Progress | None = None) -> BenchReport:
    """Measure every subject that can run here; `progress` is given those that cannot, with the reason.

    Raises ConfigError when there is none.
    """
    report = progress or (lambda _: None)
    rows: list[BenchRow] = []
    rounds: list[dict[str, list[float]]] = [{} for _ in range(bench.rounds)]
    problems: list[str] = []
    for peers, names in itertools.product(bench.peers, _groups(bench.subjects)):
        with _opened(bench, names, peers, report) as entries:
            for point in _points(bench, peers, report) if entries else ():
                report(f"{point}: {', '.join(entry.name for entry in entries)}")
                problems += _measure(bench, point, entries, rounds)
                rows += _rows(bench, point, entries, rounds)
            rows += _singles(bench, entries)
            rows += _idle(bench, peers, entries)
    if not rows:
        raise ConfigError(f"none of {'; '.join(bench.subjects)} could be measured here; the lines above name what each needs")
    return BenchReport(rows, describe_hardware(), rounds, problems)


def _points(bench: WireBench, peers: int, report: Progress) -> Iterator[_Point]:
    for batch_bytes, size in itertools.product(bench.batch_bytes, bench.block_bytes):
        batches = max(1, bench.turn_bytes // batch_bytes)
        point = _Point(size, batch_bytes, peers, len(bench.batch_bytes) > 1, batches)
        if point.bytes_per_peer:
            yield point
        else:
            report(f"{point}: left out, there is no block for each peer")


def _groups(subjects: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What is measured in turns: all that leave others alone, ours next to what they stand beside; each that spins alone."""
    beside = dict.fromkeys(other for name in subjects for other in (name, beside_of(name)))
    spinning = [name for name in subjects if name in RAW and RAW[name].spins]
    calm = tuple(name for name in beside if name in subjects and name not in spinning)
    return [group for group in (calm, *((name,) for name in spinning)) if group]


@contextlib.contextmanager
def _opened(bench: WireBench, names: tuple[str, ...], peers: int, report: Progress) -> Iterator[list[_WireEntrant]]:
    largest = max(bench.turn_bytes, *bench.batch_bytes)
    compared = {beside_of(name) for name in bench.subjects if can_write(name)}
    with contextlib.ExitStack() as stack:
        entries: list[_WireEntrant] = []
        for name in names:
            direction = bench.direction if can_write(name) else Direction.READ
            if direction is not bench.direction and name not in compared:
                report(f"{name} is left out: it only reads, the owner of the target memory copies")
                continue
            processes = [PeerProcess(name, SPREAD * (largest // peers), seed, direction) for seed in range(peers)]
            for process in processes:
                stack.callback(process.close)
            try:
                subject = open_subject(name, SPREAD * largest, processes, direction)
            except ConfigError as error:
                report(f"{name} is left out: {error}")
                continue
            stack.callback(subject.close)
            entries.append(_WireEntrant(name, subject, processes, direction))
        yield entries


def _measure(bench: WireBench, point: _Point, entries: list[_WireEntrant], rounds: list[dict[str, list[float]]]) -> list[str]:
    """Every subject once per round, in turns, there and back, after one round that does not count; returns what went wrong."""
    problems: list[str] = []
    for number in range(-1, bench.rounds):
        for entry in entries if number % 2 else entries[::-1]:
            turn = [_batches(bench, point, entry.direction, number + 1, place) for place in range(point.batches)]
            seconds, posted, processor = _time_one(entry, turn)
            if not _is_right(entry, turn):
                problems.append(f"{entry.name}, {point}, round {number}: wrong bytes")
            if number < 0:
                continue
            key = point.key(entry.name)
            rounds[number][key] = [seconds]
            entry.posted_s.setdefault(key, []).append(posted)
            entry.processor_s.setdefault(key, []).append(processor)
    return problems


def _batches(bench: WireBench, point: _Point, direction: Direction, round_number: int, place: int) -> list[Runs]:
    """A batch per peer; what a turn moves has places of its own in the memory of the peers, and here those of each peer too."""
    make = scattered_runs if bench.layout == "scattered" else contiguous_runs
    size = SPREAD * point.bytes_per_peer
    batches = []
    for peer in range(point.peers):
        runs = make(point.bytes_per_peer, point.block_bytes, 1000 * (place * point.peers + peer) + round_number)
        here, there = (1, 0) if direction is Direction.READ else (0, 1)
        runs[:, there] += runs.dtype.type(place * size)
        runs[:, here] += runs.dtype.type((place * point.peers + peer) * size)
        batches.append(runs)
    return batches


def _time_one(entry: _WireEntrant, turn: list[list[Runs]]) -> tuple[float, float, float]:
    """The seconds of a turn, those for which posting a batch held the caller, and the processor's."""
    for target in [entry.subject.memory] if entry.direction is Direction.READ else [peer.memory for peer in entry.peers]:
        target[:] = POISON
    processor = _processor_s(entry)
    started = time.perf_counter()
    posted = sum(map(entry.subject.move, turn))
    seconds = time.perf_counter() - started
    return seconds, posted / len(turn), _processor_s(entry) - processor


def _is_right(entry: _WireEntrant, turn: list[list[Runs]]) -> bool:
    """Whether every byte is where it belongs, and no other was touched."""
    here, pairs = entry.subject.memory, [pair for batches in turn for pair in zip(batches, entry.peers, strict=True)]
    if entry.name in RAW and RAW[entry.name].is_stream:
        return _is_streamed(here, pairs)
    writes = entry.direction is Direction.WRITE
    moves = [(runs, here, peer.memory) if writes else (runs, peer.content, here) for runs, peer in pairs]
    is_right = all(is_copied(*move) for move in moves)
    for runs, _, target in moves:
        wipe(runs, target)
    targets = [peer.memory for peer in entry.peers] if writes else [here]
    return is_right and all(bool((target == POISON).all()) for target in targets)


def _is_streamed(here: Bytes, pairs: list[tuple[Runs, PeerProcess]]) -> bool:
    is_right = True
    for runs, peer in pairs:
        source, target = stream_places(runs)
        count = int(runs[:, 2].sum())
        is_right &= np.array_equal(here[target : target + count], peer.content[source : source + count])
    return is_right


def _rows(bench: WireBench, point: _Point, entries: list[_WireEntrant], rounds: list[dict[str, list[float]]]) -> list[BenchRow]:
    moved = point.turn_bytes
    rates = {
        entry.name: moved / 1e9 / statistics.median(each[point.key(entry.name)][0] for each in rounds) for entry in entries
    }
    rows = []
    for entry in entries:
        key = point.key(entry.name)
        peer = beside_of(entry.name)
        settings: dict[str, Setting] = {
            "block_bytes": point.block_bytes,
            "batch_bytes": point.batch_bytes,
            "peers": point.peers,
            "layout": bench.layout,
            "direction": str(entry.direction),
            "blocks": moved // point.batches // point.block_bytes,
            "post_ms": round(1e3 * statistics.median(entry.posted_s[key]), 3),
            "cpu_s_per_gb": round(statistics.median(entry.processor_s[key]) / (moved / 1e9), 3),
        }
        if "raw nixl" in rates and entry.name not in RAW:
            settings["ratio_to_raw_nixl"] = round(rates[entry.name] / rates["raw nixl"], 2)
        ratio = rates[entry.name] / rates[peer] if peer in rates else 1.0
        rows.append(BenchRow(key, rates[entry.name], "GB/s", peer if peer in rates else "", ratio, settings))
    return rows


def _singles(bench: WireBench, entries: list[_WireEntrant]) -> list[BenchRow]:
    """How long one small block takes, where users move them one at a time; with the load of the machine, which decides it."""
    rows = []
    for entry in entries:
        if not isinstance(entry.subject, SingleBlocks):
            continue
        taken_s = []
        for _ in range(_SINGLE_WARM_UP + _SINGLES):
            started = time.perf_counter()
            entry.subject.move_one(_SINGLE_BYTES)
            taken_s.append(time.perf_counter() - started)
        p50, p99 = np.percentile(taken_s[_SINGLE_WARM_UP:], (50, 99))
        key = f"{entry.name}: one {bench.direction} of {_size(_SINGLE_BYTES)}"
        load: dict[str, Setting] = {"p99_us": round(1e6 * float(p99), 1), "load_average": round(os.getloadavg()[0], 1)}
        rows.append(BenchRow(key, 1e6 * float(p50), "us", "", 1.0, {"block_bytes": _SINGLE_BYTES, "blocks": _SINGLES, **load}))
    return rows


def _idle(bench: WireBench, peers: int, entries: list[_WireEntrant]) -> list[BenchRow]:
    """The share of a core that each subject's peers use while nothing happens, and that all of this side use together."""
    if bench.idle_s <= 0 or not entries:
        return []
    before = {entry.name: sum(cpu_s(peer.pid) for peer in entry.peers) for entry in entries}
    here = time.process_time()
    time.sleep(bench.idle_s)
    used = 100 * (time.process_time() - here) / bench.idle_s
    rows = [BenchRow(f"{_names(entries)}: idle here", used, "% of a core", "", 1.0, {"peers": peers})]
    for entry in entries:
        used = (sum(cpu_s(peer.pid) for peer in entry.peers) - before[entry.name]) / bench.idle_s / peers
        rows.append(BenchRow(f"{entry.name}: idle source", 100 * used, "% of a core", "", 1.0, {"peers": peers}))
    return rows


def _names(entries: list[_WireEntrant]) -> str:
    return entries[0].name if len(entries) == 1 else f"all {len(entries)} in one process"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _processor_s(entry: _WireEntrant) -> float:
    return time.process_time() + sum(cpu_s(peer.pid) for peer in entry.peers)
