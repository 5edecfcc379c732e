"""Transports of main memory beside the plainest way to move the same bytes, by block size; every byte checked in every round.

`local` stands beside one C `memcpy` per block inside one process, `tcp` beside a socket that streams from one buffer. Blocks
are scattered in the source and in order in the target. Times are on the clock of the target: from `post` to the completion.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.bench.report import BenchReport, BenchRow, Setting, describe_hardware
from kvbaton.bench.wire.host_source import SourceHere, content
from kvbaton.bench.wire.source_process import source_process
from kvbaton.core.handoff import Incarnation
from kvbaton.core.plan import Runs
from kvbaton.errors import ConfigError, LocalError
from kvbaton.transport.base import Batch, Direction, PeerRank, Region, TransportSettings
from kvbaton.transport.choose import open_transport

__all__ = ["HostWireBench", "run_host_wire_bench"]

Progress = Callable[[str], None]

_PEERS = {"local": "memcpy in one process", "tcp": "plain socket"}
_SOURCE = PeerRank(Incarnation("source"))
_CONNECT_S = 10.0
_BATCH_S = 60.0
_KIB = 1 << 10
_UTIME, _STIME = 13, 14


@dataclass(frozen=True, slots=True)
class HostWireBench:
    """What to measure: batches of `batch_bytes` in blocks of each of `block_bytes`."""

    transport: str = "local"
    block_bytes: tuple[int, ...] = (4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, 1024 * _KIB, 4096 * _KIB)
    batch_bytes: int = 64 << 20
    rounds: int = 9

    def __post_init__(self) -> None:
        if self.transport not in _PEERS:
            raise ConfigError(f"--transport is {self.transport!r}; known here are {', '.join(sorted(_PEERS))}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds is {self.rounds}; it must be at least 1")
        for block in self.block_bytes:
            if block < 4 or block % 4 or self.batch_bytes % block:
                raise ConfigError(f"a block of {block} bytes does not divide a batch of {self.batch_bytes} bytes into words")

    def described(self) -> dict[str, Setting]:
        """The settings, for the report."""
        return {"transport": self.transport, "batch_bytes": self.batch_bytes, "rounds": self.rounds}


@dataclass(frozen=True, slots=True)
class _Taken:
    """One round: seconds of the peer, of `post`, of the whole batch, and of processor time on both sides."""

    peer: float
    posting: float
    whole: float
    cpu: float


class _Stand:
    """The target process: its memory, the transport, the plain socket, and the source's content once more."""

    def __init__(self, bench: HostWireBench, here: SourceHere, pid: int, undo: ExitStack) -> None:
        self._bench = bench
        self._pid = pid
        self._source = content(2 * bench.batch_bytes)
        self._target = np.zeros(bench.batch_bytes, np.uint8)
        settings = TransportSettings(incarnation=Incarnation("target"))
        self._transport = open_transport(bench.transport, Region.of(self._target), settings)
        undo.callback(self._transport.close)
        self._transport.connect(_SOURCE, here.endpoint)
        self._socket = undo.enter_context(socket.create_connection(("127.0.0.1", here.port), _CONNECT_S))

    def measure(self, block: int, ids: npt.NDArray[np.int64]) -> _Taken:
        """One round. Raises LocalError when a byte is not what it should be."""
        runs = np.stack([ids * block, np.arange(len(ids)) * block, np.full(len(ids), block)], axis=1).astype(np.uint64)
        peer = self._time_memcpy(block, ids) if self._bench.transport == "local" else self._time_socket()
        self._target[:] = 0
        cpu = self._cpu_s()
        posting, whole = self._time_batch(runs)
        cpu = self._cpu_s() - cpu
        if not self.is_right(block, ids):
            raise LocalError(f"blocks of {block} bytes: bytes in target memory are not the source's")
        return _Taken(peer, posting, whole, cpu)

    def is_right(self, block: int, ids: npt.NDArray[np.int64]) -> bool:
        """Whether target memory is exactly what the batch must leave there."""
        return np.array_equal(self._target.reshape(-1, block), self._source.reshape(-1, block)[ids])

    def spoil(self) -> None:
        """The negative control: change one byte of target memory."""
        self._target[-1] ^= 0xFF

    def _time_memcpy(self, block: int, ids: npt.NDArray[np.int64]) -> float:
        """NumPy's `take` of whole blocks: a loop in C with one copy per block."""
        kind = np.dtype((np.void, block))
        source, target = self._source.view(kind), self._target.view(kind)
        start = time.perf_counter()
        source.take(ids, out=target, mode="clip")
        return time.perf_counter() - start

    def _time_socket(self) -> float:
        view = self._target.data
        start = time.perf_counter()
        self._socket.sendall(len(view).to_bytes(8, "little"))
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise LocalError("the plain socket of the source process was closed")
            view = view[count:]
        return time.perf_counter() - start

    def _time_batch(self, runs: Runs) -> tuple[float, float]:
        start = time.perf_counter()
        self._transport.post(Batch(_SOURCE, Direction.READ, runs))
        posted = time.perf_counter()
        if not select.select([self._transport.wakeup_fd], [], [], _BATCH_S)[0]:
            raise LocalError(f"no completion within {_BATCH_S:g} s")
        completion = self._transport.poll()[0]
        done = time.perf_counter()
        if completion.error:
            raise LocalError(f"a batch of {len(runs)} runs failed: {completion.error}")
        return posted - start, done - start

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[_UTIME - 2]) + int(fields[_STIME - 2])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def run_host_wire_bench(bench: HostWireBench, progress: Progress) -> BenchReport:
    """Measure between this process and one that it starts. Raises LocalError when a byte is wrong or something hangs."""
    report = BenchReport([], describe_hardware(), [{} for _ in range(bench.rounds)])
    taken: dict[int, list[_Taken]] = {block: [] for block in bench.block_bytes}
    random = np.random.default_rng(1)
    with ExitStack() as undo:
        arguments = bench.transport, str(2 * bench.batch_bytes), _SOURCE.incarnation
        line, pid = undo.enter_context(source_process("kvbaton.bench.wire.host_source", *arguments))
        stand = _Stand(bench, msgspec.json.decode(line, type=SourceHere), pid, undo)
        for number in range(1 + bench.rounds):
            progress(f"round {number} of {bench.rounds}" + (" (warm-up)" if not number else ""))
            for block in bench.block_bytes:
                ids = random.permutation(2 * bench.batch_bytes // block)[: bench.batch_bytes // block]
                taken[block].append(stand.measure(block, ids))
                _check_the_check(stand, block, ids, report)
    for block, rounds in taken.items():
        _add(bench, block, rounds[1:], report)
    return report


def _check_the_check(stand: _Stand, block: int, ids: npt.NDArray[np.int64], report: BenchReport) -> None:
    stand.spoil()
    if stand.is_right(block, ids) and not report.problems:
        report.problems.append("a byte that was changed was not noticed, so the check is worth nothing")


def _add(bench: HostWireBench, block: int, rounds: list[_Taken], report: BenchReport) -> None:
    name, peer_name = (
        f"{bench.transport}, {block // _KIB or block} {'KiB' if block >= _KIB else 'B'} blocks",
        _PEERS[bench.transport],
    )
    for kept, one in zip(report.rounds, rounds, strict=True):
        kept[name], kept[f"{name}, {peer_name}"] = [one.whole], [one.peer]
        kept[f"{name}, post"], kept[f"{name}, processor time"] = [one.posting], [one.cpu]
    peer, posting, whole = (statistics.median(getattr(one, field) for one in rounds) for field in ("peer", "posting", "whole"))
    settings: dict[str, Setting] = {
        "blocks": bench.batch_bytes // block,
        "seconds": whole,
        "peer_seconds": peer,
        "post_seconds": posting,
        "cpu_seconds_per_gb": statistics.mean(one.cpu for one in rounds) / bench.batch_bytes * 1e9,
    }
    report.rows.append(BenchRow(name, bench.batch_bytes / 1e9 / whole, "GB/s", peer_name, peer / whole, settings))
