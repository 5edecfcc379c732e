"""Processes that are measured: what they use of processors and memory, and how they are paused meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["Processes", "available_memory_bytes", "cpu_s", "guarded"]

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GUARD_S = 10.0
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_SESSION, _USER, _SYSTEM, _RESIDENT_PAGES = 3, 11, 12, 21
"""Fields of `/proc/PID/stat` after the name."""


_GUARD = """
import os, signal, sys
if not sys.stdin.read():
    for leader in sys.argv[1:]:
        try:
            os.killpg(int(leader), signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


@contextlib.contextmanager
def guarded(leaders: Iterable[int]) -> Iterator[None]:
    """Should this process be killed meanwhile, end these and their children: one that stands still dies of nothing else."""
    command = [sys.executable, "-c", _GUARD, *map(str, leaders)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.communicate(b"all is well", timeout=_GUARD_S)


class Processes:
    """Everything that runs in the sessions of these leaders, each of them with its children."""

    def __init__(self, leaders: Iterable[int]) -> None:
        self._leaders = frozenset(leaders)

    def cpu_s(self) -> float:
        """Processor seconds that all of them have used so far."""
        return sum(_used_s(fields) for _, fields in self._members())

    def memory_kib(self) -> int:
        """Resident memory of all of them."""
        return sum(int(fields[_RESIDENT_PAGES]) for _, fields in self._members()) * _PAGE_KIB

    def pause(self) -> None:
        """Pause them, so that one that spins or sends heartbeats does not disturb the measurement of another."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid, _ in list(self._members()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _members(self) -> Iterator[tuple[int, list[str]]]:
        for directory in _PROC.iterdir():
            if not directory.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                fields = _stat(int(directory.name))
                if int(fields[_SESSION]) in self._leaders:
                    yield int(directory.name), fields


def available_memory_bytes() -> int:
    """Memory that new processes can have without pushing others out."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def cpu_s(pid: int) -> float:
    """Processor seconds that one process has used so far, in steps of a clock tick. Raises OSError when it is gone."""
    return _used_s(_stat(pid))


def _stat(pid: int) -> list[str]:
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _used_s(fields: list[str]) -> float:
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S
