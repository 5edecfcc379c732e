"""The connector's series with several API server processes, as `vllm serve --api-server-count` has them; needs no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SERVER = """
import json, sys, types
from prometheus_client import Counter, Gauge, Histogram

class Base:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self.per_engine_labelvalues = per_engine_labelvalues

name = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
sys.modules[name] = types.SimpleNamespace(KVConnectorPromMetrics=Base, KVConnectorStats=object)

from kvbaton.engines.vllm.metrics import KVBatonMetrics

told = KVBatonMetrics(None, {each: each for each in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]})
told.observe(json.loads(sys.argv[1]))
"""
_SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
_SERIES: dict[str, list[float]] = {
    name: [] for name in ("moved_bytes", "handover_s", "wire_s", "source_queue_s", "target_queue_s")
}


def _run(directory: Path, script: str, *arguments: str) -> str:
    variables = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `/metrics` says after one server was told of four blocks in quarantine, and then another of none."""
    directory = tmp_path_factory.mktemp("series")
    for blocks in (4, 0):
        gauges = {"live_target": blocks, "quarantined_blocks": blocks, "peers": 1}
        ended = {"target delivered": 1, "target failed": 2, "target expired": 1, "source expired": 3, "source failed": 9}
        series = _SERIES | {"wire_s": [0.02], "moved_bytes": [3000]}
        told = {"ended": ended, "failures": {}, "grown": {"runs": 5}, "series": series, "gauges": gauges}
        _run(directory, _SERVER, json.dumps(told))
    return [line for line in _run(directory, _SCRAPE).splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("vllm:kvbaton_quarantined_blocks", 'vllm:kvbaton_quarantined_blocks{engine="0"} 0.0'),
        ("vllm:kvbaton_handoffs_live", 'vllm:kvbaton_handoffs_live{engine="0",side="target"} 0.0'),
        ("vllm:kvbaton_peers", 'vllm:kvbaton_peers{engine="0"} 1.0'),
    ],
)
def test_what_is_so_now_is_told_once_and_as_it_was_told_last(scraped: list[str], name: str, line: str) -> None:
    assert [each for each in scraped if each.startswith(name)] == [line]


def test_what_is_counted_is_added_up(scraped: list[str]) -> None:
    assert 'vllm:kvbaton_runs_total{engine="0"} 10.0' in scraped
    assert 'vllm:kvbaton_handoffs_total{engine="0",outcome="delivered",side="target"} 2.0' in scraped


@pytest.mark.parametrize(
    "line",
    [
        'vllm:kvbaton_xfer_time_seconds_count{engine="0"} 2.0',
        'vllm:kvbaton_xfer_time_seconds_bucket{engine="0",le="0.025"} 2.0',
        'vllm:kvbaton_bytes_transferred_sum{engine="0"} 6000.0',
        'vllm:kvbaton_bytes_transferred_bucket{engine="0",le="2048.0"} 0.0',
        'vllm:kvbaton_num_failed_transfers_total{engine="0"} 6.0',
        'vllm:kvbaton_num_kv_expired_reqs_total{engine="0"} 6.0',
    ],
)
def test_series_read_as_those_of_nixl(scraped: list[str], line: str) -> None:
    assert line in scraped
