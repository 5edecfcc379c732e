"""The connector under vLLM's own scheduler: what vLLM's unit tests ask of every connector, asked of ours.

They stand for these of vLLM's tests, which look at the same behaviours with other connectors: remote decode life cycle
(`source_…`), remote prefill life cycle and preemption (`target_…`), load failure recovery and error propagation
(`target_whose_load_failed_…`), cache pollution prevention (`nothing_of_a_failed_load_…`), rejection before admission
(`a_request_refused_…`), and the bookkeeping of finished ids (`whatever_happens_…`). They run in vLLM's environment, without a
server or a model; see `inside/scheduler_checks.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from vllm_servers import ready

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_SCRIPT = Path(__file__).parent / "inside" / "scheduler_checks.py"
_RIG = Path(__file__).parents[2] / "unit" / "engines" / "vllm"
CHECKS = re.findall(r"^    (\w+),$", _SCRIPT.read_text().partition("\nCHECKS")[2], re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    options = ready()
    variables = options.environment.variables()
    path = os.pathsep.join((variables["PYTHONPATH"], str(_RIG)))
    run = subprocess.run(
        [str(options.environment.python), str(_SCRIPT), str(options.model)],
        env={**os.environ, **variables, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("check", CHECKS)
def test_under_vllms_scheduler(found: dict[str, str], check: str) -> None:
    assert found[check] == "", found[check]


def test_every_check_is_listed(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)
    assert len(CHECKS) > 10
