"""The engine benchmark on a tiny model: what it reports, not how fast it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.bench.engine import run_engine_bench
from kvbaton.bench.report import describe_hardware


def test_every_row_has_its_peer_and_every_round_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBATON_CACHE", str(tmp_path))
    lines: list[str] = []
    report = run_engine_bench("tiny", 2, lines.append)
    assert [row.name for row in report.rows] == ["prefill 512 tokens", "decode step, batch 1", "decode step, batch 8"]
    assert lines[-1] == "round 2 of 2"
    assert len(report.rounds) == 2
    for row in report.rows:
        assert (row.unit, row.peer) == ("s", "matrix products")
        assert row.value > 0 < row.ratio
        weights, attention = row.settings["weight_products_s"], row.settings["attention_products_s"]
        assert isinstance(weights, float)
        assert isinstance(attention, float)
        assert row.ratio == pytest.approx(row.value / (weights + attention))
        assert all(len(one[row.name]) >= 1 for one in report.rounds)


def test_hardware_names_what_a_reader_needs() -> None:
    hardware = describe_hardware()
    assert hardware["cpu"]
    assert hardware["cores"]
    assert hardware["numpy"]
    assert isinstance(hardware["blas_threads"], int)
