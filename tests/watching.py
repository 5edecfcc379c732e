"""Watching processes from outside, through /proc: whether they run, what they started; and waiting until something is so."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["command_line", "descendants", "is_running", "listening_ports", "pause", "processor_s", "shared_files", "wait_until"]

_TICKS = os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Every running process that descends from `pid`, at any depth."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, stat in parents.items() if stat and int(stat[1]) in level} - found
        found |= level
    return {child for child in found if is_running(child)}


def pause(pid: int) -> None:
    """Make a process stand still, and wait until every thread of it does: on a busy machine some go on after the signal."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(map(_stands_still, tasks.iterdir())), f"process {pid} stands still")


def processor_s(pid: int) -> float:
    """Processor seconds that a process has used so far; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def command_line(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    held = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(str(path.readlink()))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def shared_files(pids: Iterable[int]) -> set[Path]:
    """The files of shared memory that these processes map or hold open, and no other's: several tests run on one machine."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it may end at any time
            root = Path(f"/proc/{pid}")
            held = [str(each.readlink()) for each in (root / "fd").iterdir()]
            mapped = [line.partition("/")[1] + line.partition("/")[2] for line in (root / "maps").read_text().splitlines()]
            found |= {Path(name) for name in (*held, *mapped) if name.startswith("/dev/shm/")}  # noqa: S108
    return found


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Look until `condition` holds; fails with `what` when it does not within `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def _stands_still(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return True  # a thread that has ended


def _stat(pid: int) -> list[str]:
    """State, parent and the rest of what /proc tells about a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
