"""`kvbaton verify` as users run it, short: real processes, the tiny model, exit code and JSON.

Every mode over every transport, and the real model, are in `tests/e2e/test_verify_in_full.py`.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from kvbaton import __version__
from kvbaton.cli.main import make_app
from kvbaton.launch.local import kvbaton_command
from kvbaton.verify.report import RequestRow, make_report

SHORT = ("--requests", "4", "--longest-prompt", "60", "--max-tokens", "4")
PROMISED = {"command", "version", "ok", "settings", "requests", "equal", "near_ties", "different", "failed", "handed_off"}
PROMISED |= {"recomputed", "bytes_planned", "bytes_moved", "handover_seconds", "rows"}


def _verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    run = subprocess.run(kvbaton_command("verify", *SHORT, "--json", *arguments), capture_output=True, timeout=110, text=True)
    assert run.stdout, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document


def _check_all_well(code: int, document: dict[str, Any]) -> None:
    assert code == 0, document["problems"]
    assert document["ok"] is True
    assert (document["requests"], document["handed_off"], document["recomputed"]) == (4, 4, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0
    assert document["equal"] + document["near_ties"] == 4


@pytest.mark.parametrize(("mode", "transport"), [("push", "local"), ("pull", "tcp")])
def test_every_answer_is_the_same(mode: str, transport: str) -> None:
    code, document = _verify("--model", "tiny", "--mode", mode, "--transport", transport)
    _check_all_well(code, document)
    assert document["settings"]["mode"] == mode
    assert (document["settings"]["integrity"], document["settings"]["aux_channel"]) == ("off", "control")
    assert document["settings"]["on_failure"] == "fail"
    assert set(document) >= PROMISED
    assert (document["command"], document["version"]) == ("verify", __version__)
    assert document["settings"]["transport"] == transport
    assert set(document["handover_seconds"]) == {"p50", "p99"}
    assert [row["request"] for row in document["rows"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(("mode", "transport"), [("push", "tcp"), ("pull", "local")])
def test_the_control_that_moves_nothing_is_found_out(mode: str, transport: str) -> None:
    code, document = _verify("--model", "tiny", "--mode", mode, "--transport", transport, "--drop-writes")
    assert code == 1
    assert document["ok"] is False
    assert document["different"] > 0
    assert document["handed_off"] == 4
    assert document["failed"] == 0


def test_with_checksums_the_control_fails_instead_of_answering_wrong() -> None:
    code, document = _verify("--model", "tiny", "--integrity", "full", "--drop-writes")
    assert code == 1
    assert (document["failed"], document["different"], document["handed_off"]) == (4, 0, 0)
    assert document["settings"]["integrity"] == "full"
    assert all("handoff_failed" in row["detail"] and "checksum" in row["detail"] for row in document["rows"])


def test_an_answer_that_was_computed_anew_is_right_and_counted_and_a_failure_of_the_check() -> None:
    code, document = _verify("--model", "tiny", "--integrity", "full", "--drop-writes", "--on-failure", "recompute")
    assert code == 1
    assert (document["recomputed"], document["failed"], document["different"]) == (4, 0, 0)
    assert "4 answers were recomputed locally" in document["problems"]


def test_the_table_for_people_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = RequestRow(0, 10, "equal", "", handed_off=True, bytes_planned=100, bytes_moved=100, handoff_s=0.02, handover_s=0.01)
    monkeypatch.setattr("kvbaton.verify.run.run_verify", lambda *_: make_report({}, [row] * 4))
    monkeypatch.setenv("COLUMNS", "200")
    assert make_app()(["verify", *SHORT, "--model", "tiny"], result_action="return_value") == 0
    printed = capsys.readouterr().out
    assert "4 requests: 4 equal" in printed
    assert "4 handed off, 0 recomputed" in printed
    assert "every answer is the same" in printed
