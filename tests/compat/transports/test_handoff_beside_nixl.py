"""`bench handoff` beside raw NIXL agents: every hand-off lands whole in both, and a byte that goes wrong is found."""

from __future__ import annotations

import importlib.util

import pytest

from kvbaton.bench.bare.instance import BareSettings, Task
from kvbaton.bench.bare.process import Relay
from kvbaton.bench.bare.raw_nixl import RawNixlProcess
from kvbaton.bench.handoff import HandoffBench, run_handoff_bench
from kvbaton.core.handoff import Mode

pytestmark = [
    pytest.mark.compat,
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="THE PACKAGE nixl IS NOT INSTALLED: not tried"),
]


@pytest.mark.parametrize("mode", Mode)
def test_the_same_hand_offs_land_over_nixl(mode: Mode) -> None:
    bench = HandoffBench((1, 8), mode, tokens=32, handoffs=30, rounds=1, idle_s=0.1, every_byte=True, beside_nixl=True)
    report = run_handoff_bench(bench, print)
    assert report.problems == []
    rows = {row.name: row for row in report.rows}
    row = rows["throughput, 8 in flight, beside NIXL"]
    assert row.peer == "raw NIXL"
    theirs = 30 / report.rounds[0]["seconds, 8 in flight, raw NIXL"][0]
    assert row.ratio == pytest.approx(row.value / theirs)


def test_bytes_beyond_the_tokens_are_found() -> None:
    """The control: raw NIXL moves whole blocks, so that where the tokens end within one, its tail is foreign."""
    settings = BareSettings(blocks=32, most_tokens=64)
    with RawNixlProcess("source", settings) as source, RawNixlProcess("target", settings) as target:
        relay = Relay([source, target])
        task = Task("tail", Mode.PUSH, 4, 2, 20, 16)
        relay.begin(task, source, target)
        ends = [relay.ends["tail", process.name] for process in (source, target)]
        relay.wait(lambda: all(len(side) == 4 for side in ends), "all are over", 60.0)
        assert target.gauges().foreign_bytes > 0
