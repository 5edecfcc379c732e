"""The wire benchmark: its batches are what it says, its check can fail, and it runs over real processes."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from kvbaton.bench.wire.cuda import CudaWireBench, run_cuda_wire_bench
from kvbaton.bench.wire.host import HostWireBench, run_host_wire_bench
from kvbaton.bench.wire.host_source import content
from kvbaton.bench.wire.patterns import PLANES, TOKEN_BYTES, patterns
from kvbaton.errors import ConfigError, LocalError
from kvbaton.transport import choose
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.runs import check_runs

KIB = 1 << 10


def quiet(line: str) -> None:
    """Progress that nobody reads."""


class TestPatterns:
    def test_every_batch_moves_the_same_bytes_inside_both_regions(self) -> None:
        for pattern in patterns(64):
            assert pattern.wire_bytes == 64 * TOKEN_BYTES * PLANES
            assert len(check_runs(pattern.runs, pattern.source_bytes, pattern.target_bytes)) == len(pattern.runs)
            assert not (pattern.runs % np.uint64(pattern.run_bytes)).any()

    def test_blocks_are_not_in_order(self) -> None:
        for pattern in patterns(256):
            assert (np.diff(pattern.runs[:, 0].astype(np.int64)) < 0).any()
            assert (np.diff(pattern.runs[:, 1].astype(np.int64)) < 0).any()

    def test_half_a_block_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--tokens is 24"):
            patterns(24)


def test_the_content_tells_places_apart() -> None:
    words = content(1 << 20).view(np.uint32)
    assert words.all()
    assert len(np.unique(words)) > 0.45 * len(words)


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_every_block_size_has_its_row_and_all_rounds_are_kept(transport: str) -> None:
    bench = HostWireBench(transport, (4 * KIB, 64 * KIB), 1 << 20, rounds=2)
    report = run_host_wire_bench(bench, quiet)
    assert report.problems == []
    assert [row.name for row in report.rows] == [f"{transport}, 4 KiB blocks", f"{transport}, 64 KiB blocks"]
    assert all(row.value > 0 and row.ratio > 0 for row in report.rows)
    assert len(report.rounds) == 2
    assert all(len(kept) == 8 for kept in report.rounds)


def test_control_bytes_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_dropping(region: Region, settings: TransportSettings) -> Transport:
        return FaultyTransport(LocalTransport(region, settings), region, Faults(drop_writes=True))

    monkeypatch.setitem(choose.TRANSPORTS, "local", open_dropping)
    with pytest.raises(LocalError, match="not the source's"):
        run_host_wire_bench(HostWireBench("local", (4 * KIB,), 1 << 20, rounds=1), quiet)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"transport": "pigeon"}, "local, tcp"), ({"rounds": 0}, "--rounds"), ({"block_bytes": (3 * KIB,)}, "does not divide")],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HostWireBench(**settings)  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_without_torch_the_cuda_part_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"kvbaton\[cuda\]"):
        run_cuda_wire_bench(CudaWireBench(16, 1), quiet)
