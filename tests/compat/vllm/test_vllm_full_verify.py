"""`kvbaton verify --engine vllm` with 20 requests of its own lengths, in both modes, and its control."""

from __future__ import annotations

import pytest
from vllm_verifying import verify

from kvbaton.core.handoff import Mode

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(1800)]

REQUESTS = 20


@pytest.mark.parametrize("mode", list(Mode))
def test_every_answer_is_the_same(mode: Mode) -> None:
    code, document = verify("--mode", mode, "--requests", str(REQUESTS))
    assert code == 0, document["problems"]
    assert (document["requests"], document["handed_off"], document["recomputed"]) == (REQUESTS, REQUESTS, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0


@pytest.mark.parametrize("mode", list(Mode))
def test_the_control_that_moves_nothing_is_detected(mode: Mode) -> None:
    code, document = verify("--mode", mode, "--requests", str(REQUESTS), "--drop-writes")
    assert code == 1
    assert document["ok"] is False
    assert document["different"] > 0
