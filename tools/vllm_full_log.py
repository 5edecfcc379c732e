"""Turns the JUnit file of `make test-vllm-full` into the log that is kept: `python tools/vllm_full_log.py JUNIT LOG`.

Results and durations of every test, versions and hardware. Exit code 1 when a test failed, 2 when none was run.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec

import kvbaton
from kvbaton.bench.report import describe_hardware
from kvbaton.launch.vllm_environment import VLLM_VERSION

__all__ = ["log_of", "main"]

_ENDS = ("failure", "error", "skipped")


def log_of(junit: str) -> dict[str, Any]:
    """What the log says of these results."""
    root = ElementTree.fromstring(junit)  # noqa: S314 - written by our own pytest
    tests = [_test(case) for case in root.iter("testcase")]
    counts = {end: sum(test["result"] == end for test in tests) for end in ("passed", *_ENDS)}
    return {
        "command": "make test-vllm-full",
        "version": kvbaton.__version__,
        "vllm": VLLM_VERSION,
        "ok": bool(counts["passed"]) and not counts["failure"] and not counts["error"],
        "seconds": round(sum(test["seconds"] for test in tests), 1),
        "counts": counts,
        "hardware": describe_hardware(),
        "tests": tests,
    }


def _test(case: ElementTree.Element) -> dict[str, Any]:
    end = next((name for name in _ENDS if case.find(name) is not None), "passed")
    found = case.find(end)
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    entry: dict[str, Any] = {"test": name, "result": end, "seconds": round(float(case.get("time", 0)), 1)}
    if found is not None:
        entry["said"] = (found.get("message") or "")[:500]
    return entry


def main(arguments: list[str]) -> int:
    """Write the log, and say in a line what is in it."""
    junit, log = map(Path, arguments)
    content = log_of(junit.read_text())
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    counts = ", ".join(f"{count} {name}" for name, count in content["counts"].items() if count)
    sys.stdout.write(f"{log}: {counts or 'no test was run'}, {content['seconds']:g} s\n")
    return 0 if content["ok"] else 1 if content["tests"] else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
