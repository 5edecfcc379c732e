"""`kvbaton verify` as users run it, short: real processes, small models, exit code and JSON."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from kvbaton import __version__
from kvbaton.launch.local import kvbaton_command

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


@pytest.mark.parametrize(("mode", "transport"), [("push", "local"), ("push", "tcp"), ("pull", "tcp")])
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


@pytest.mark.real_model
def test_every_answer_of_the_real_model_is_the_same() -> None:
    _check_all_well(*_verify())


def test_the_table_for_people_says_the_same() -> None:
    command = kvbaton_command("verify", *SHORT, "--model", "tiny")
    wide = {**os.environ, "COLUMNS": "200"}
    run = subprocess.run(command, capture_output=True, timeout=110, text=True, env=wide)
    assert run.returncode == 0, run.stderr
    assert "4 requests: 4 equal" in run.stdout
    assert "4 handed off, 0 recomputed" in run.stdout
    assert "every answer is the same" in run.stdout
