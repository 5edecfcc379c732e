"""`kvbaton verify --engine vllm`, a few short requests: exit code 0 when all is well, and 1 when nothing is moved."""

from __future__ import annotations

import pytest
from vllm_verifying import verify

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REQUESTS = 4
SHORT = ("--requests", str(REQUESTS), "--longest-prompt", "200", "--max-tokens", "4")


def test_every_answer_is_the_same() -> None:
    code, document = verify(*SHORT)
    assert code == 0, document["problems"]
    assert (document["requests"], document["handed_off"], document["recomputed"]) == (REQUESTS, REQUESTS, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0


def test_the_control_that_moves_nothing_is_detected() -> None:
    code, document = verify(*SHORT, "--drop-writes")
    assert code == 1
    assert document["ok"] is False
    assert (document["handed_off"], document["failed"]) == (REQUESTS, 0)
    assert document["different"] > 0
