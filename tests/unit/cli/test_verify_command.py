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


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_every_answer_is_the_same(transport: str) -> None:
    code, document = _verify("--model", "tiny", "--transport", transport)
    _check_all_well(code, document)
    assert set(document) >= PROMISED
    assert (document["command"], document["version"]) == ("verify", __version__)
    assert document["settings"]["transport"] == transport
    assert set(document["handover_seconds"]) == {"p50", "p99"}
    assert [row["request"] for row in document["rows"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_the_control_that_moves_nothing_is_found_out(transport: str) -> None:
    code, document = _verify("--model", "tiny", "--transport", transport, "--drop-writes")
    assert code == 1
    assert document["ok"] is False
    assert document["different"] > 0
    assert document["handed_off"] == 4
    assert document["failed"] == 0


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
