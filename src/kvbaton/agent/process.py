"""Which process this is, and whether another one of this host is provably dead."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from kvbaton.core.card import ProcessId

__all__ = ["is_gone", "this_process"]


def this_process() -> ProcessId:
    """The name of this process, for its card."""
    return ProcessId(_host(), os.getpid(), _started(os.getpid()) or 0)


def is_gone(process: ProcessId) -> bool:
    """Whether `process` ran on this host and does not any more; false whenever that cannot be known."""
    if process.host != _host() or process.started == 0:
        return False
    return _started(process.pid) != process.started


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot}/{platform.node()}/{space}".encode(), digest_size=8).hexdigest()


def _started(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
