"""The logs of the full suites: the content that a JUnit file gives them, and the runs that they remember."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PASSED = '<testcase classname="tests.compat.test_a" name="test_one[push]" time="1.5"/>'
FAILED = '<testcase classname="tests.compat.test_a" name="test_two" time="2"><failure message="wrong">x</failure></testcase>'
SKIPPED = '<testcase classname="tests.compat.test_a" name="test_three" time="0"><skipped message="cannot install"/></testcase>'


def run(tmp_path: Path, *cases: str) -> tuple[int, dict[str, Any]]:
    return run_parts(tmp_path, "".join(cases))


def run_parts(tmp_path: Path, *parts: str, expected: str = "", options: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    log, names = tmp_path / "kept" / "log.json", tmp_path / "expected"
    names.write_text(expected)
    files = [tmp_path / f"junit-{index}.xml" for index in range(len(parts))]
    for file, cases in zip(files, parts, strict=True):
        commit = f'<properties><property name="commit" value="of {file.stem}"/></properties>'
        file.write_text(f'<testsuites><testsuite timestamp="then">{commit}{cases}</testsuite></testsuites>')
    tool = [sys.executable, str(ROOT / "tools" / "suite_log.py")]
    command = [*tool, *options, "--expected", str(names), "vllm-full", *map(str, files), str(log)]
    done = subprocess.run(command, check=False)
    return done.returncode, json.loads(log.read_text())


def test_results_durations_versions_and_hardware_are_kept(tmp_path: Path) -> None:
    code, log = run(tmp_path, PASSED, SKIPPED)
    assert code == 0
    assert log["tests"] == [
        {"test": "test_a::test_one[push]", "result": "passed", "seconds": 1.5, "part": 0},
        {"test": "test_a::test_three", "result": "skipped", "seconds": 0.0, "message": "cannot install", "part": 0},
    ]
    assert log["ok"]
    assert (log["suite"], log["command"], log["commit"]) == ("vllm-full", "make test-vllm-full", "of junit-0")
    assert log["vllm"]
    assert log["hardware"]


@pytest.mark.parametrize(("cases", "expected"), [((PASSED, FAILED), 1), ((SKIPPED,), 1), ((), 2)])
def test_it_is_an_error_when_a_test_failed_or_none_was_run(tmp_path: Path, cases: tuple[str, ...], expected: int) -> None:
    code, log = run(tmp_path, *cases)
    assert code == expected
    assert not log["ok"]
    assert [failure["test"] for failure in log["failures"]] == (["test_a::test_two"] if FAILED in cases else [])


def test_of_several_parts_the_last_result_counts_and_the_earlier_ones_stay(tmp_path: Path) -> None:
    fixed = '<testcase classname="tests.compat.test_a" name="test_two" time="3"/>'
    code, log = run_parts(tmp_path, PASSED + FAILED, fixed)
    assert code == 0
    assert [part["commit"] for part in log["parts"]] == ["of junit-0", "of junit-1"]
    assert log["tests"][1] == {
        "test": "test_a::test_two",
        "result": "passed",
        "seconds": 3.0,
        "part": 1,
        "earlier": [{"part": 0, "result": "failure", "message": "wrong"}],
    }


def test_a_test_that_no_part_has_run_is_named(tmp_path: Path) -> None:
    code, log = run_parts(
        tmp_path, PASSED, expected="tests/compat/test_a.py::test_one[push]\ntests/compat/test_a.py::test_two\n"
    )
    assert code == 1
    assert log["not_run"] == ["test_a::test_two"]
    assert not log["ok"]


def test_earlier_runs_stay_as_one_line_each_newest_first(tmp_path: Path) -> None:
    run(tmp_path, FAILED)
    run(tmp_path, PASSED)
    _, log = run(tmp_path, PASSED, PASSED)
    assert [(line["commit"], line["ok"], line["counts"]["failure"]) for line in log["history"]] == [
        ("of junit-0", True, 0),
        ("of junit-0", False, 1),
    ]


def test_a_run_is_completed_later_and_every_test_keeps_its_own_part(tmp_path: Path) -> None:
    names = "tests/compat/test_a.py::test_one[push]\ntests/compat/test_a.py::test_two\n"
    run(tmp_path, SKIPPED)
    run_parts(tmp_path, PASSED, expected=names)
    fixed = '<testcase classname="tests.compat.test_a" name="test_two" time="3"/>'
    code, log = run_parts(tmp_path, FAILED, fixed, expected=names, options=("--continue",))
    assert code == 0
    assert [(test["test"], test["part"]) for test in log["tests"]] == [("test_a::test_one[push]", 0), ("test_a::test_two", 2)]
    assert log["tests"][1]["earlier"] == [{"part": 1, "result": "failure", "message": "wrong"}]
    assert [part["commit"] for part in log["parts"]] == ["of junit-0", "of junit-0", "of junit-1"]
    assert len(log["history"]) == 1, "what is completed is no earlier run"


def test_results_of_tests_that_the_suite_has_no_longer_are_not_continued(tmp_path: Path) -> None:
    run(tmp_path, PASSED)
    _, log = run_parts(tmp_path, FAILED, expected="tests/compat/test_a.py::test_two\n", options=("--continue",))
    assert [test["test"] for test in log["tests"]] == ["test_a::test_two"]
