"""`kvbaton verify --engine vllm` as users run it: all well when all is well, and found out when nothing is moved."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from vllm_servers import ready

from kvbaton.launch.local import kvbaton_command

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REQUESTS = 4
SHORT = ("--requests", str(REQUESTS), "--longest-prompt", "200", "--max-tokens", "4")


def verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    ready()
    command = kvbaton_command("verify", "--engine", "vllm", *SHORT, "--json", *arguments)
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert run.stdout, run.stderr[-3000:]
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document


def test_every_answer_is_the_same() -> None:
    code, document = verify()
    assert code == 0, document["problems"]
    assert (document["requests"], document["handed_off"], document["recomputed"]) == (REQUESTS, REQUESTS, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0


def test_the_control_that_moves_nothing_is_found_out() -> None:
    code, document = verify("--drop-writes")
    assert code == 1
    assert document["ok"] is False
    assert (document["handed_off"], document["failed"]) == (REQUESTS, 0)
    assert document["different"] > 0
