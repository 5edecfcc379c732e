"""Our series as a vLLM shows them at `/metrics`, without a vLLM: its base classes are stand-ins, the rest is our connector."""

from __future__ import annotations

import json
import subprocess
import sys

__all__ = ["vllm_pages"]

_VLLM_SERVER = """
import json, sys, types
from prometheus_client import Counter, Gauge, Histogram, generate_latest

class Base:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self.per_engine_labelvalues = per_engine_labelvalues

name = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
sys.modules[name] = types.SimpleNamespace(KVConnectorPromMetrics=Base, KVConnectorStats=object)

from kvbaton.engines.vllm.metrics import KVBatonMetrics

metrics = KVBatonMetrics(None, {each: each for each in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]})
reported, steps = json.loads(sys.argv[1]), int(sys.argv[2])
for step in range(steps):
    metrics.observe(reported)
    print(generate_latest().decode(), end="\\0")
"""


def vllm_pages(steps: int) -> list[str]:
    """The page after each of so many steps."""
    series = {
        "moved_bytes": [3_000_000],
        "wire_s": [0.02],
        "handover_s": [0.01],
        "source_queue_s": [0.1],
        "target_queue_s": [0.1],
    }
    grown = {"runs": 1, "handshakes": 1, "late_events": 0, "dropped_messages": 0, "checksum_mismatches": 0, "agent_errors": 0}
    grown["certificate_loads"] = grown["failed_certificate_loads"] = 0
    grown["cluster_key_loads"] = grown["failed_cluster_key_loads"] = 0
    gauges = {"live_target": 1, "live_source": 0, "quarantined_blocks": 0, "peers": 1}
    step = {"ended": {"target delivered": 1}, "failures": {}, "grown": grown, "series": series, "gauges": gauges}
    command = [sys.executable, "-c", _VLLM_SERVER, json.dumps(step), str(steps)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")[:-1]
