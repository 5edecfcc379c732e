"""Runs the checks of `inside/scheduler_checks.py` in the environment of a release of vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from vllm_servers import ready

from kvbaton.engines.vllm.setup.environment import VLLM_VERSION

__all__ = ["CHECKS", "run_checks"]

_SCRIPT = Path(__file__).parent / "inside" / "scheduler_checks.py"
_RIG = Path(__file__).parents[2] / "unit" / "engines" / "vllm"
_LIMIT_S = 1500.0

CHECKS = re.findall(r"^    (\w+),$", _SCRIPT.read_text().partition("\nCHECKS")[2], re.MULTILINE)
"""The names of all checks."""


def run_checks(version: str = VLLM_VERSION) -> dict[str, str]:
    """What each check found; empty when all is well."""
    options = ready(version)
    variables = options.environment.variables()
    path = os.pathsep.join((variables["PYTHONPATH"], str(_RIG)))
    run = subprocess.run(
        [str(options.environment.python), str(_SCRIPT), str(options.model)],
        env={**os.environ, **variables, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))
