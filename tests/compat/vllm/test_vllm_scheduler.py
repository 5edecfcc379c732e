"""The connector under vLLM's own scheduler: what vLLM's unit tests ask of every connector, asked of ours.

Here both halves take part; in vLLM's own tests (`test_vllm_full_peer_tests.py`) it is the scheduler's half, and the test states
what a worker would report. They look at the same behaviours as these of vLLM's tests: remote decode life cycle (`source_…`),
remote prefill life cycle and preemption (`target_…`), load failure recovery and error propagation
(`target_whose_load_failed_…`), cache pollution prevention (`nothing_of_a_failed_load_…`), rejection before admission
(`a_request_refused_…`), the bookkeeping of finished ids (`in_any_order_…`, and `the_same_with_steps_that_overlap` for
async_scheduling), and MultiConnector (`statistics_…`). They run in vLLM's environment, without a server or a model; see
`inside/scheduler_checks.py`.
"""

from __future__ import annotations

import pytest
from vllm_checks import CHECKS, run_checks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run_checks()


@pytest.mark.parametrize("check", CHECKS)
def test_under_vllms_scheduler(found: dict[str, str], check: str) -> None:
    assert found[check] == "", found[check]


def test_every_check_is_listed(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)
    assert len(CHECKS) > 10
