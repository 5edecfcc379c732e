"""The benchmark of a served pair, with the tiny model: what it reports, not how fast it is."""

from __future__ import annotations

import pytest

from kvbaton.bench.serve import ServeBench, run_serve_bench
from kvbaton.engines.table import find_engine
from kvbaton.errors import ConfigError


@pytest.mark.e2e
def test_both_modes_and_both_kinds_of_first_tokens_are_measured() -> None:
    bench = ServeBench("tiny", requests=3, prompt_tokens=20, chunk_tokens=16, chunks=4, rounds=2)
    report = run_serve_bench(bench, find_engine("embedded"), print)
    (series,) = report.rounds
    assert {name: len(values) for name, values in series.items()} == {
        "hand-over, push": 3,
        "hand-over, pull": 3,
        "first token, push": 2,
        "first token, pull": 2,
        "first token without a hand-off, beside push": 2,
        "first token without a hand-off, beside pull": 2,
    }
    names = {row.name for row in report.rows}
    assert {"hand-over p50, push", "hand-over p99, pull", "first token, push, 4 chunks"} <= names
    assert all(value > 0 for name in series if name.startswith("first") for value in series[name])


def test_fewer_than_four_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="--chunks is 3"):
        ServeBench(chunks=3)
