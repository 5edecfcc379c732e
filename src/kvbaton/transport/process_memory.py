"""What Linux offers for memory of another process: `process_vm_readv`, process start times, ptrace permission."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import socket
from pathlib import Path

import numpy as np

from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Runs

__all__ = ["ProcessMemory", "explain_limits", "host_id", "is_there", "start_ticks", "usable_processors"]

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_START_TICKS_FIELD = 22
_SCOPE_ADMIN = 2
_CAP_SYS_PTRACE = 19
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class ProcessMemory:
    """The system calls, bound once. Raises TransportError where the system has none."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._readv = libc.process_vm_readv
        except AttributeError:
            raise TransportError("this system has no process_vm_readv (it needs Linux); choose transport tcp") from None
        word, pointer = ctypes.c_ulong, ctypes.c_void_p
        self._readv.argtypes = [ctypes.c_int, pointer, word, pointer, word, word]
        self._readv.restype = ctypes.c_ssize_t
        self._prctl = libc.prctl
        self._prctl.argtypes = [ctypes.c_int, word, word, word, word]

    def read(self, pid: int, source_address: int, target_address: int, runs: Runs) -> int:
        """Copy `runs` (at most 1024) from process `pid`; returns how many bytes came, at least one. Raises KVBatonError."""
        target_pieces = np.ascontiguousarray(runs[:, 1:3])
        source_pieces = np.ascontiguousarray(runs[:, 0:3:2])
        target_pieces[:, 0] += np.uint64(target_address)
        source_pieces[:, 0] += np.uint64(source_address)
        count = len(runs)
        moved: int = self._readv(pid, target_pieces.ctypes.data, count, source_pieces.ctypes.data, count, 0)
        if moved <= 0:
            raise _explain(ctypes.get_errno() if moved < 0 else errno.EFAULT, pid)
        return moved

    def allow_readers(self) -> None:
        """Let processes of this user read this process's memory where Yama would only let its parents."""
        if _ptrace_scope() == 1:
            self._prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def explain_limits(memory: ProcessMemory) -> str:
    """Why no other process could read this one's memory, and what to do about it; empty when nothing is known to forbid it."""
    spare = np.zeros(2, np.uint8)
    try:
        memory.read(os.getpid(), int(spare.ctypes.data), int(spare.ctypes.data) + 1, np.array([[0, 0, 1]], np.uint64))
    except TransportError as error:
        return f"process_vm_readv is blocked here, perhaps by a container's seccomp profile: {error}"
    scope = _ptrace_scope()
    if scope >= _SCOPE_ADMIN and not _may_ptrace():
        return (
            f"kernel.yama.ptrace_scope is {scope}, so only a holder of CAP_SYS_PTRACE may read other processes: "
            "set it to 0 or 1, give the container that capability, use shared memory for the region, or choose transport tcp"
        )
    return ""


def usable_processors() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0))


def is_there(pid: int) -> bool:
    """Whether a process of that number exists; cheaper than `start_ticks`, and true for a zombie."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def start_ticks(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot; pid and ticks name a process. Raises PeerLost when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        raise PeerLost(f"process {pid} is gone ({error.strerror})") from error
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, ticks = fields[0], int(fields[_START_TICKS_FIELD - 3])
    if state in (b"Z", b"X"):
        raise PeerLost(f"process {pid} is dead")
    return ticks


def host_id() -> str:
    """Digest of this boot, host name and pid namespace: equal exactly where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return hashlib.blake2b(f"{boot} {socket.gethostname()} {namespace}".encode(), digest_size=12).hexdigest()


def _ptrace_scope() -> int:
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return 0


def _may_ptrace() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return False


def _explain(code: int, pid: int) -> PeerLost | TransportError:
    if code == errno.ESRCH:
        return PeerLost(f"process {pid} is gone")
    if code == errno.EFAULT:
        return TransportError(f"memory of process {pid}, or the target memory here, is no longer mapped at its address")
    if code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return TransportError(
            f"reading memory of process {pid} is not permitted ("
            f"{os.strerror(code)}; user id {os.getuid()} here, kernel.yama.ptrace_scope {_ptrace_scope()}): "
            "run both instances as the same user, set kernel.yama.ptrace_scope to 0 or 1, give containers the SYS_PTRACE "
            "capability and one pid namespace, or choose transport tcp"
        )
    return TransportError(f"process_vm_readv from process {pid} failed: {os.strerror(code)}")
