"""Turn JUnit files of a full suite into the log that is kept: `python tools/suite_log.py [options] SUITE JUNIT... LOG`.

The log has the results and durations of every test, versions and hardware of the newest run, and one line per earlier run in
`history`: commit, counts, seconds. A run of over an hour may be done in parts: several JUnit files make one run that names
every part with its commit and time. For a test that was run in several parts the last result counts; the earlier ones stay in
the log. `--continue` keeps the parts that the log has already, so that a run can be completed later. `--expected FILE` holds
the lines of `pytest --collect-only`, so that tests that no part has run are listed too; `--note TEXT` adds what a reader has to
know. Exit code 1 when a test failed or was not run, 2 when none was run.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

import kvbaton
from kvbaton.bench.report import describe_hardware
from kvbaton.engines.sglang.setup.environment import SGLANG_VERSION
from kvbaton.engines.vllm.setup.environment import VLLM_VERSION

__all__ = ["log_of", "main"]

_ENDS = ("failure", "error", "skipped")
_SUMMARY = ("began", "commit", "ok", "seconds", "counts")
_HISTORY = 50


def log_of(
    suite: str, junits: list[str], expected: list[str], notes: list[str], begun: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The log of these results, and of the tests that should have been run; `begun` has the parts that came before."""
    roots = [ElementTree.fromstring(junit) for junit in junits]  # noqa: S314 - written by our own pytest
    begun = begun or {"parts": [], "tests": [], "notes": []}
    names = {_short(line) for line in expected}
    # A case that the suite no longer has is no result of it.
    kept = [test for test in begun["tests"] if not names or test["test"] in names]
    tests = _joined(kept, len(begun["parts"]), [[_test(case) for case in _cases(root)] for root in roots])
    parts = [*begun["parts"], *map(_part, roots)]
    notes = list(dict.fromkeys([*begun["notes"], *notes]))
    not_run = sorted(names - {test["test"] for test in tests})
    counts = {end: sum(test["result"] == end for test in tests) for end in ("passed", *_ENDS)}
    return {
        "suite": suite,
        "command": f"make test-{suite}",
        "began": parts[-1]["began"],
        "commit": parts[-1]["commit"],
        "ok": bool(counts["passed"]) and not (counts["failure"] or counts["error"] or not_run),
        "seconds": round(sum(test["seconds"] for test in tests), 1),
        "counts": {**counts, "not run": len(not_run)},
        "version": kvbaton.__version__,
        "vllm": VLLM_VERSION,
        "sglang": SGLANG_VERSION,
        "hardware": describe_hardware(),
        "notes": notes,
        "parts": parts,
        "failures": [test for test in tests if test["result"] in ("failure", "error")],
        "not_run": not_run,
        "tests": tests,
    }


def _joined(kept: list[dict[str, Any]], first: int, parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every test once, as its last part has it; the parts are numbered from `first`."""
    found: dict[str, dict[str, Any]] = {test["test"]: test for test in kept}
    for number, part in enumerate(parts, first):
        for test in part:
            before = found.pop(test["test"], None)
            found[test["test"]] = test | {"part": number}
            if before is not None:
                earlier = {key: before[key] for key in ("part", "result", "message") if key in before}
                found[test["test"]]["earlier"] = [*before.get("earlier", ()), earlier]
    return list(found.values())


def _part(root: ElementTree.Element) -> dict[str, Any]:
    """One run: when, at which commit, and its counts."""
    suite = root.find("testsuite")
    began = "" if suite is None else suite.get("timestamp", "")
    commits = [each.get("value", "") for each in root.iter("property") if each.get("name") == "commit"]
    counts = Counter(_test(case)["result"] for case in _cases(root))
    return {"began": began, "commit": commits[0] if commits else "", "counts": dict(counts)}


def _cases(root: ElementTree.Element) -> list[ElementTree.Element]:
    """Every test; a module that was skipped as a whole, and what an interrupted run leaves open, have no class."""
    return [case for case in root.iter("testcase") if case.get("classname")]


def _short(name: str) -> str:
    """A test by its file's name, without directories."""
    path, _, test = name.strip().partition("::")
    return f"{Path(path).stem}::{test}"


def _test(case: ElementTree.Element) -> dict[str, Any]:
    end = next((name for name in _ENDS if case.find(name) is not None), "passed")
    found = case.find(end)
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    entry: dict[str, Any] = {"test": name, "result": end, "seconds": round(float(case.get("time", 0)), 1)}
    if found is not None:
        entry["message"] = (found.get("message") or "").replace(str(Path.home()), "~")[:500]
    return entry


def _history(before: dict[str, Any]) -> list[dict[str, Any]]:
    """One line for each run that the log has so far, newest first."""
    last = {key: before[key] for key in _SUMMARY if key in before}
    return [last, *before.get("history", [])][:_HISTORY]


def main(arguments: list[str]) -> int:
    """Write the log, and print a line that sums it up."""
    parser = argparse.ArgumentParser(description="turn JUnit files of a full suite into the log that is kept")
    parser.add_argument("--expected", type=Path, help="what pytest --collect-only printed for the suite")
    parser.add_argument("--continue", action="store_true", dest="continues", help="complete the run that the log has")
    parser.add_argument("--note", action="append", default=[], help="what a reader has to know; may be given several times")
    parser.add_argument("suite", help="vllm-full for make test-vllm-full")
    parser.add_argument("junit", type=Path, nargs="+")
    parser.add_argument("log", type=Path)
    given = parser.parse_args(arguments)
    lines = given.expected.read_text().splitlines() if given.expected else []
    junits = [path.read_text() for path in given.junit]
    # A log that cannot be read is an error, not an empty past.
    before = msgspec.json.decode(given.log.read_bytes(), type=dict[str, Any]) if given.log.exists() else None
    expected = [line for line in lines if "::" in line]
    content = log_of(given.suite, junits, expected, given.note, before if given.continues else None)
    content["history"] = [] if before is None else before.get("history", []) if given.continues else _history(before)
    given.log.parent.mkdir(parents=True, exist_ok=True)
    given.log.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    counts = ", ".join(f"{count} {name}" for name, count in content["counts"].items() if count)
    sys.stdout.write(f"{given.log}: {counts or 'no test was run'}, {content['seconds']:g} s\n")
    return 0 if content["ok"] else 1 if content["tests"] else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
