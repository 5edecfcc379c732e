"""Processes that stand still, go on, are counted, and do not outlive whoever made them stand still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.bench.processes import Processes, available_memory_bytes, guarded
from watching import is_running, wait_until

BUSY = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\nchild.wait()"


@pytest.fixture
def busy() -> Iterator[int]:
    """A leader that sleeps, with a child that spins."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
    yield process.pid
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_children_use_is_counted(busy: int) -> None:
    processes = Processes([busy])
    before = processes.cpu_s()
    wait_until(lambda: processes.cpu_s() > before + 0.1, "the child's time to be counted")


def test_they_stand_still_and_go_on(busy: int) -> None:
    processes = Processes([busy])
    wait_until(lambda: processes.cpu_s() > 0.1, "the child to run")
    processes.pause()
    wait_until(lambda: state(busy) == "T", "the leader to stand still")
    processes.resume()
    wait_until(lambda: state(busy) != "T", "the leader to go on")
    used = processes.cpu_s()
    wait_until(lambda: processes.cpu_s() > used, "the child to go on")


def test_when_we_are_killed_those_that_stand_still_are_ended(busy: int) -> None:
    Processes([busy]).pause()
    code = (
        "import os, signal, sys\n"
        "from kvbaton.bench.processes import guarded\n"
        f"with guarded([{busy}]):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(busy), "the guard to end it")


def test_when_all_is_well_the_guard_ends_nobody(busy: int) -> None:
    with guarded([busy]):
        pass
    assert is_running(busy)


def test_there_is_some_memory() -> None:
    assert available_memory_bytes() > 1_000_000
