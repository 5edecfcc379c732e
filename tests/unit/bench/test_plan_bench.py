"""`bench plan`: what is measured, what is refused, and that a peer without its package is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbaton.bench.plan import PlanBench, run_plan_bench
from kvbaton.errors import ConfigError


def test_a_small_run_has_all_rows_and_plans_what_is_needed() -> None:
    said: list[str] = []
    report = run_plan_bench(PlanBench(tokens=100, layers=3, rounds=2), said.append)
    names = [row.name for row in report.rows]
    assert names[:2] == ["equal TP", "TP 8 to 4, heads-major pages"]
    assert {"TP 8 to 4, tokens-major pages, checked", "TP 8 to 4, tokens-major pages, unrolled"} <= set(names)
    assert {row.ratio for row in report.rows if row.unit == "bytes"} == {1.0}
    assert report.problems == []
    assert len(report.rounds[0]["equal TP"]) == 2 * 5
    assert len(said) == 2


@pytest.mark.parametrize(
    ("changes", "words"), [({"tokens": 0}, "--tokens is 0"), ({"layers": 0}, "--layers"), ({"tokens": 10**9}, "hold")]
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PlanBench(tokens=changes.get("tokens", 1), layers=changes.get("layers", 1))


def test_an_interpreter_without_the_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"plan_peers\.py vllm failed in .*; name an interpreter that has the package"):
        run_plan_bench(PlanBench(tokens=16, layers=1, rounds=1, vllm=Path(sys.executable)), lambda _: None)


def test_what_is_no_interpreter_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot run plan_peers\.py sglang"):
        run_plan_bench(PlanBench(tokens=16, layers=1, rounds=1, sglang=Path("/nowhere/python")), lambda _: None)


ANSWERING = """\
import json, os, sys
answers = os.fdopen(int(sys.argv[-1]), "w")
print("importing")
json.loads(sys.stdin.readline())
print(json.dumps({"plans": ["equal"], "version": "9"}), file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": 2.0, "runs": 7}), file=answers, flush=True)
"""
DYING = """\
import os, sys
sys.stdin.readline()
os.write(int(sys.argv[-1]), b'{"plans": ["equal"], "version": "9"}\\n')
sys.stdin.readline()
sys.exit("it broke")
"""


def _interpreter(tmp_path: Path, program: str) -> Path:
    """Something that is called like an interpreter with a script, and runs `program` instead."""
    (tmp_path / "program.py").write_text(program)
    found = tmp_path / "python"
    found.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "program.py"} "$@"\n')
    found.chmod(0o755)
    return found


def test_a_peer_stands_beside_us_in_the_rows_that_it_can_plan(tmp_path: Path) -> None:
    bench = PlanBench(tokens=100, layers=3, rounds=4, vllm=_interpreter(tmp_path, ANSWERING))
    report = run_plan_bench(bench, lambda _: None)
    first, second, *_ = report.rows
    assert first.peer == "vLLM: 2000.0 ms"
    assert first.settings == {"runs": 42, "peer_runs": 7, "peer_version": "9"}
    assert 0 < first.ratio < 0.1
    assert second.peer == ""
    assert report.rounds[0]["vLLM equal"] == [2.0] * 4 * 5


def test_a_peer_that_breaks_is_told_with_its_last_line(tmp_path: Path) -> None:
    bench = PlanBench(tokens=16, layers=1, rounds=1, sglang=_interpreter(tmp_path, DYING))
    with pytest.raises(ConfigError, match=r"plan_peers\.py sglang failed in .*: it broke;"):
        run_plan_bench(bench, lambda _: None)
