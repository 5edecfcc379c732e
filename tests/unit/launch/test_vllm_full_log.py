"""The log of `make test-vllm-full`: what becomes of a JUnit file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PASSED = '<testcase classname="tests.compat.test_a" name="test_one[push]" time="1.5"/>'
FAILED = '<testcase classname="tests.compat.test_a" name="test_two" time="2"><failure message="wrong">x</failure></testcase>'
SKIPPED = '<testcase classname="tests.compat.test_a" name="test_three" time="0"><skipped message="cannot install"/></testcase>'


def run(tmp_path: Path, *cases: str) -> tuple[int, dict[str, object]]:
    junit, log = tmp_path / "junit.xml", tmp_path / "kept" / "log.json"
    junit.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "vllm_full_log.py"), str(junit), str(log)], check=False)
    return done.returncode, json.loads(log.read_text())


def test_results_durations_versions_and_hardware_are_kept(tmp_path: Path) -> None:
    code, log = run(tmp_path, PASSED, SKIPPED)
    assert code == 0
    assert log["tests"] == [
        {"test": "test_a::test_one[push]", "result": "passed", "seconds": 1.5},
        {"test": "test_a::test_three", "result": "skipped", "seconds": 0.0, "said": "cannot install"},
    ]
    assert log["ok"]
    assert log["vllm"]
    assert log["hardware"]


@pytest.mark.parametrize(("cases", "expected"), [((PASSED, FAILED), 1), ((SKIPPED,), 1), ((), 2)])
def test_it_is_an_error_when_a_test_failed_or_none_was_run(tmp_path: Path, cases: tuple[str, ...], expected: int) -> None:
    code, log = run(tmp_path, *cases)
    assert code == expected
    assert not log["ok"]
