"""`kvbaton verify --engine vllm` as users run it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from vllm_servers import ready

from kvbaton.launch.local import kvbaton_command

__all__ = ["verify"]

_LIMIT_S = 1200.0


def verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Its exit code and its report."""
    ready()
    command = kvbaton_command("verify", "--engine", "vllm", "--json", *arguments)
    run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert run.stdout, run.stderr[-12_000:]
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document
