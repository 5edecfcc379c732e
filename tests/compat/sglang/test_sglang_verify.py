"""`kvbaton verify --engine sglang`, as users run it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from sglang_stand import ready

from kvbaton.core.handoff import Mode
from kvbaton.launch.local import kvbaton_command

pytestmark = [pytest.mark.timeout(1800)]


def verify(*arguments: str, engine: tuple[str, ...] = ("--engine", "sglang")) -> tuple[int, dict[str, Any]]:
    """Its exit code and its report."""
    ready()
    command = kvbaton_command("verify", *engine, "--json", *arguments)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert ran.stdout, ran.stderr[-12_000:]
    document: dict[str, Any] = json.loads(ran.stdout)
    return ran.returncode, document


@pytest.mark.sglang
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", list(Mode))
def test_every_answer_is_the_same(mode: Mode) -> None:
    code, document = verify("--mode", mode, "--requests", "4", "--longest-prompt", "200", "--max-tokens", "4")
    assert code == 0, document["problems"]
    assert (document["requests"], document["handed_off"]) == (4, 4)
    assert document["bytes_moved"] > 0


@pytest.mark.sglang_full
@pytest.mark.parametrize("mode", list(Mode))
def test_20_of_20_are_equal(mode: Mode) -> None:
    code, document = verify("--mode", mode, "--requests", "20", "--longest-prompt", "1000", "--concurrency", "4")
    assert code == 0, document["problems"]
    assert document["equal"] + document["near_ties"] == 20


@pytest.mark.sglang_full
def test_the_control_finds_a_cache_that_never_arrived() -> None:
    code, document = verify("--requests", "6", "--longest-prompt", "300", "--drop-writes")
    assert code == 1
    assert document["different"] > 0
