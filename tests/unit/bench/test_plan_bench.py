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
    assert {row.ratio for row in report.rows if row.unit == "bytes"} == {1.0}
    assert report.problems == []
    assert len(report.rounds[0]["equal TP"]) == 2
    assert len(said) == 2


@pytest.mark.parametrize(
    ("changes", "words"), [({"tokens": 0}, "--tokens is 0"), ({"layers": 0}, "--layers"), ({"tokens": 10**9}, "hold")]
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PlanBench(tokens=changes.get("tokens", 1), layers=changes.get("layers", 1))


def test_an_interpreter_without_the_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"plan_vllm\.py failed in .*; name an interpreter that has the package"):
        run_plan_bench(PlanBench(tokens=16, layers=1, rounds=1, vllm=Path(sys.executable)), lambda _: None)


def test_what_is_no_interpreter_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot run plan_sglang"):
        run_plan_bench(PlanBench(tokens=16, layers=1, rounds=1, sglang=Path("/nowhere/python")), lambda _: None)
