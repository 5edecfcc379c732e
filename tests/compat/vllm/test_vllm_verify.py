"""`kvbaton verify --engine vllm`, a few short requests; with `--sample`, one of these and of the stock connector's.

`test_vllm_full_verify.py` has more requests, and the control.
"""

from __future__ import annotations

import pytest
from vllm_verifying import verify

from kvbaton.core.handoff import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REQUESTS = 4


@pytest.mark.sampled(1, group="vllm verify")
@pytest.mark.parametrize("mode", list(Mode))
def test_every_answer_is_the_same(mode: Mode) -> None:
    code, document = verify("--mode", mode, "--requests", str(REQUESTS), "--longest-prompt", "200", "--max-tokens", "4")
    assert code == 0, document["problems"]
    assert (document["requests"], document["handed_off"], document["recomputed"]) == (REQUESTS, REQUESTS, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0
