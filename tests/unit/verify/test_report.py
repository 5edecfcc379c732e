"""A verification's verdict: every single problem alone flips it, and the numbers add up."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from kvbaton import __version__
from kvbaton.verify.report import Report, RequestRow, make_report

GOOD = RequestRow(
    request=0,
    prompt_tokens=10,
    output_tokens=4,
    verdict="equal",
    detail="",
    handed_off=True,
    recomputed=False,
    cached_tokens=0,
    bytes_planned=100,
    bytes_moved=100,
    handoff_s=0.02,
    handover_s=0.01,
    largest_difference=0.0,
)


def _with(changed: int, among: int = 100, **changes: Any) -> Report:
    bad = msgspec.structs.replace(GOOD, **changes)
    return make_report({"model": "tiny"}, [bad] * changed + [GOOD] * (among - changed))


def test_all_well() -> None:
    report = _with(0, 40)
    assert report.ok
    assert report.problems == []
    assert (report.requests, report.equal, report.handed_off, report.recomputed) == (40, 40, 40, 0)
    assert (report.bytes_planned, report.bytes_moved) == (4000, 4000)


PROBLEMS: dict[str, dict[str, Any]] = {
    "1 answers differ": {"verdict": "different"},
    "1 requests failed": {"verdict": "failed", "handed_off": False, "bytes_planned": 0, "bytes_moved": 0},
    "1 answers were not handed off": {"handed_off": False},
    "1 answers were recomputed": {"recomputed": True},
    "1 hand-offs moved other bytes": {"bytes_moved": 99},
    "hand-offs moved other bytes": {"bytes_moved": 101},
}


@pytest.mark.parametrize(("text", "changes"), PROBLEMS.items())
def test_each_problem_alone_flips_the_verdict_and_is_named(text: str, changes: dict[str, Any]) -> None:
    report = _with(1, **changes)
    assert not report.ok
    assert len(report.problems) == 1
    assert text in report.problems[0]


def test_too_many_and_too_few_bytes_do_not_cancel_out() -> None:
    more, fewer = (msgspec.structs.replace(GOOD, bytes_moved=moved) for moved in (101, 99))
    report = make_report({}, [more, fewer])
    assert report.bytes_moved == report.bytes_planned
    assert not report.ok


@pytest.mark.parametrize(
    ("ties", "among", "ok"), [(0, 40, True), (1, 40, False), (1, 50, True), (2, 50, False), (2, 100, True)]
)
def test_near_ties_are_told_apart_and_tolerated_up_to_two_percent(ties: int, among: int, ok: bool) -> None:
    report = _with(ties, among, verdict="near tie")
    assert (report.near_ties, report.equal, report.different) == (ties, among - ties, 0)
    assert report.ok is ok
    assert all("near ties" in problem for problem in report.problems)


def test_percentiles_are_of_what_was_handed_off() -> None:
    rows = [msgspec.structs.replace(GOOD, handover_s=s) for s in (0.01, 0.02, 0.03)]
    rows.append(msgspec.structs.replace(GOOD, handover_s=99.0, handed_off=False))
    spread = make_report({}, rows).handover_seconds
    assert spread.p50 == pytest.approx(0.02)
    assert 0.02 < spread.p99 <= 0.03


def test_a_run_in_which_nothing_worked_can_still_be_told() -> None:
    report = _with(3, 3, verdict="failed", handed_off=False)
    assert (report.failed, report.handed_off, report.handover_seconds.p99) == (3, 0, 0.0)
    assert not report.ok


def test_the_json_has_the_promised_fields() -> None:
    document = json.loads(msgspec.json.encode(_with(1, 2, verdict="different", largest_difference=math.inf)))
    promised = {"command", "version", "ok", "settings", "requests", "equal", "near_ties", "different", "failed"}
    promised |= {"handed_off", "recomputed", "bytes_planned", "bytes_moved", "handover_seconds", "rows"}
    assert promised <= set(document)
    assert (document["command"], document["version"], document["ok"]) == ("verify", __version__, False)
    assert set(document["handover_seconds"]) == {"p50", "p99"}
    assert [row["verdict"] for row in document["rows"]] == ["different", "equal"]
