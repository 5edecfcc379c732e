"""Rewrites the table of shapes in docs/vllm.md from the log of `make test-vllm-shapes`: `tools/shapes_table.py [--check]`.

A case works when both of its tests passed: equal answers, and the control. Exit code 1 with `--check` when the page differs
from the log, 0 otherwise.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
from table_diagrams import put_diagram

__all__ = ["LOG", "PAGE", "regenerated"]

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "vllm.md"
LOG = _ROOT / "benchmarks" / "vllm-shapes" / "aarch64-2core.json"

_CASE = re.compile(r"^test_vllm_shapes::(test_\w+)\[([\w-]+?)-((?:tp|pp|dp)[\dtpd,]*)-((?:tp|pp|dp)[\dtpd,]*)-(push|pull)\]$")
_PARTS = 2
"""Tests of one case."""


def regenerated(text: str, log: dict[str, Any]) -> str:
    """The page with its table made anew."""
    results = {test["test"]: test["result"] for test in log["tests"]} | dict.fromkeys(log["not_run"], "not run")
    cases: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for name, result in sorted(results.items()):
        if found := _CASE.match(name):
            _, model, prefill, decode, mode = found.groups()
            cases.setdefault((model, prefill, decode), {}).setdefault(mode, []).append(result)
    rows = [
        f"| `small-{model}` | `{prefill}` → `{decode}` | {_state(modes['push'])} | {_state(modes['pull'])} |"
        for (model, prefill, decode), modes in sorted(cases.items(), key=lambda case: (case[0][0] != "llama", case[0]))
    ]
    return put_diagram(text, "shapes", "\n".join(["| model | prefill → decode | push | pull |", "|---|---|---|---|", *rows]))


def _state(results: list[str]) -> str:
    if results == ["passed"] * _PARTS:
        return "**works**"
    return "**fails**" if {"failure", "error"} & set(results) else "*not run*"


def main(arguments: list[str]) -> int:
    """Rewrite the page, or only compare it."""
    before = PAGE.read_text(encoding="utf-8")
    after = regenerated(before, msgspec.json.decode(LOG.read_bytes()))
    if arguments == ["--check"]:
        if before != after:
            sys.stderr.write(f"{PAGE.name} differs from {LOG.name}; run: python tools/shapes_table.py\n")
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
