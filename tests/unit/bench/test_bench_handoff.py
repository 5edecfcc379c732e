"""The hand-off benchmark on a small scale: what it reports, not how fast it is."""

from __future__ import annotations

import json

import pytest

from kvbaton.bench.handoff import HandoffBench, run_handoff_bench
from kvbaton.cli.main import make_app
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.errors import ConfigError


def test_each_level_measures_the_same_number_of_hand_offs() -> None:
    lines: list[str] = []
    bench = HandoffBench((4, 16), Mode.PULL, tokens=20, handoffs=30, rounds=2, idle_s=0.1, every_byte=True)
    report = run_handoff_bench(bench, lines.append)
    assert report.problems == []
    assert len(report.rounds) == 2
    for one in report.rounds:
        assert {len(values) for name, values in one.items() if name.startswith("latencies")} == {30}
    rows = {row.name: row for row in report.rows}
    first, second = rows["throughput, 4 in flight"], rows["throughput, 16 in flight"]
    assert first.ratio == 1.0
    assert second.ratio == pytest.approx(second.value / first.value)
    assert second.settings["concurrency"] == 16
    assert rows["latency p99, 16 in flight"].value >= rows["latency p50, 16 in flight"].value > 0
    assert rows["idle source"].unit == "% of a core"
    assert any("round 2 of 2" in line for line in lines)


def test_kinds_of_integrity_are_measured_beside_each_other() -> None:
    kinds = (Integrity.OFF, Integrity.FULL)
    report = run_handoff_bench(HandoffBench((4,), integrity=kinds, tokens=20, handoffs=20, rounds=1, idle_s=0.1), print)
    assert report.problems == []
    (row,) = [row for row in report.rows if row.name == "throughput with integrity full, 4 in flight"]
    assert row.peer == "integrity off"


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "bench handoff --concurrency 2,4 --handoffs 5 --rounds 1 --tokens 16 --idle 0.1 --json".split()
    with pytest.raises(SystemExit) as end:
        make_app()(arguments)
    assert end.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "bench handoff"
    assert document["ok"] is True
    assert document["settings"]["concurrency"] == "2,4"
    assert {"name", "value", "unit", "peer", "ratio", "settings"} <= set(document["rows"][0])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"levels": (0,)}, "--concurrency"),
        ({"tokens": 0}, "--tokens"),
        ({"tokens": 20, "beside_nixl": True}, "--tokens"),
    ],
)
def test_settings_that_make_no_sense_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HandoffBench(**wrong)  # type: ignore[arg-type]
