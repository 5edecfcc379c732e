"""`kvbaton verify` and `bench` that are ended while they start: what they have started goes, and so do their files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from watching import is_running, wait_until

pytestmark = pytest.mark.e2e

INTERRUPTED = 130
START_S = 180.0
"""On a machine that is busy with other tests."""
COMMANDS = {
    # It makes all its prompts before it starts anything: few enough for a start within seconds, and too many to be done early.
    "verify": ("verify", "--model", "tiny", "--requests", "400"),
    "bench": ("bench", "serve", "--model", "tiny", "--requests", "5000"),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_leaves_nothing_behind(name: str, number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvbaton.cli.main", *COMMANDS[name]]
    process = subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("kvbaton-*/*.log"))) > 1, "its parts to start", START_S)
        children = _children(process.pid)
        assert children
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, output.decode()
    assert list(tmp_path.iterdir()) == []
    assert not [pid for pid in children if is_running(pid)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
