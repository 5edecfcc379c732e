"""`kvbaton verify` in full, with the real model: every answer the same over every transport, and the control found out."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from kvbaton.launch.local import kvbaton_command

pytestmark = [pytest.mark.e2e, pytest.mark.real_model]


def _verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = kvbaton_command("verify", "--requests", "40", "--concurrency", "8", "--json", *arguments)
    run = subprocess.run(command, capture_output=True, timeout=850, text=True)
    assert run.stdout, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_every_answer_is_the_same(transport: str) -> None:
    code, document = _verify("--transport", transport)
    assert (code, document["problems"]) == (0, [])
    assert (document["handed_off"], document["recomputed"], document["failed"]) == (40, 0, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0
    assert max(row["prompt_tokens"] for row in document["rows"]) > 500
    assert any(row["cached_tokens"] > 0 for row in document["rows"])


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_the_control_that_moves_nothing_is_found_out(transport: str) -> None:
    code, document = _verify("--transport", transport, "--drop-writes")
    assert code == 1
    assert document["different"] > 20
    assert (document["handed_off"], document["recomputed"], document["failed"]) == (40, 0, 0)


def test_several_instances_on_each_side() -> None:
    code, document = _verify("--prefill", "2", "--decode", "2", "--longest-prompt", "300")
    assert (code, document["problems"]) == (0, [])
    assert (document["handed_off"], document["recomputed"]) == (40, 0)
