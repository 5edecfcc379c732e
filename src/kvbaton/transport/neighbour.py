"""Processes of this host: which one this is and what it may still open, whether another one lives, and how its memory is read.

A process is named for good by host, pid and start time: a recycled pid has another start time.
"""

from __future__ import annotations

import array
import ctypes
import errno
import functools
import hashlib
import os
import resource
import select
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbaton.core.card import ProcessId
from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Endpoint, Runs
from kvbaton.transport.queued import detail

__all__ = [
    "Neighbour",
    "NeighbourWatch",
    "ProcessMemory",
    "explain_limits",
    "files_left",
    "host_id",
    "is_gone",
    "is_readable",
    "is_there",
    "start_ticks",
    "this_process",
]

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_START_TICKS_FIELD = 22
_STAT_BYTES = 4096
_SCOPE_ADMIN = 2
_MOST_WATCHED = 64
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
        # Copies, always: a single run is contiguous as it is, and adding the address below would change the caller's runs.
        target_pieces = np.array(runs[:, 1:3], order="C")
        source_pieces = np.array(runs[:, 0:3:2], order="C")
        target_pieces[:, 0] += np.uint64(target_address)
        source_pieces[:, 0] += np.uint64(source_address)
        count = len(runs)
        moved: int = self._readv(pid, target_pieces.ctypes.data, count, source_pieces.ctypes.data, count, 0)
        if moved <= 0:
            raise _explain(ctypes.get_errno() if moved < 0 else errno.EFAULT, pid)
        return moved

    def read_pieces(self, pid: int, here: array.array[int], there: array.array[int]) -> int:
        """Copy pieces in order, each an address and a size in both arrays; returns how many bytes. Raises KVBatonError."""
        count = len(here) // 2
        moved: int = self._readv(pid, here.buffer_info()[0], count, there.buffer_info()[0], count, 0)
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


def is_readable(address: int, memory_bytes: int) -> bool:
    """Whether the first and the last byte of this process's memory can be read by the processor.

    Memory of a device has addresses that are reserved in the process and cannot be read. A system call returns an error for
    them, where a plain access would end the process. It writes to a pipe, because /dev/null takes any address unread.
    """
    write = ctypes.CDLL(None).write
    write.argtypes, write.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_ssize_t
    outlet, inlet = os.pipe()
    try:
        return all(write(inlet, at, 1) == 1 for at in (address, address + memory_bytes - 1))
    finally:
        os.close(outlet)
        os.close(inlet)


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
        stat = _read_stat(pid)
    except OSError as error:
        raise PeerLost(f"process {pid} is gone ({error.strerror})") from error
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, ticks = fields[0], int(fields[_START_TICKS_FIELD - 3])
    if state in (b"Z", b"X"):
        raise PeerLost(f"process {pid} is dead")
    return ticks


def _read_stat(pid: int) -> bytes:
    """The one line of /proc, by plain calls: a third of what a `Path` takes."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _STAT_BYTES)
    finally:
        os.close(fd)


def host_id() -> str:
    """Digest of this boot, host name and pid namespace: equal exactly where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return hashlib.blake2b(f"{boot} {socket.gethostname()} {namespace}".encode(), digest_size=12).hexdigest()


@functools.lru_cache(maxsize=1)
def _own_host_id(pid: int) -> str:
    """`host_id`, found out once per process: every hand-off asks whether its peer lives. A fork may be in another namespace."""
    del pid
    return host_id()


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


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One process of one host; a recycled pid has another start time."""

    host: str
    pid: int
    ticks: int

    @classmethod
    def here(cls) -> Neighbour:
        """This process."""
        return cls(host_id(), os.getpid(), start_ticks(os.getpid()))

    @classmethod
    def of(cls, endpoint: Endpoint) -> Neighbour:
        """The process that an endpoint names; raises TransportError, naming the field, when it names none."""
        neighbour = cls(detail(endpoint, "host_id", str), detail(endpoint, "pid", int), detail(endpoint, "start_ticks", int))
        if not 0 < neighbour.pid < 1 << 31:
            raise TransportError(f"{endpoint.transport} endpoint: pid {neighbour.pid} is not usable; fetch its card again")
        return neighbour

    def details(self) -> dict[str, str | int]:
        """How an endpoint names this process; the inverse of `of`."""
        return {"host_id": self.host, "pid": self.pid, "start_ticks": self.ticks}

    def confirm(self) -> None:
        """Raise PeerLost unless this very process is alive."""
        ticks = start_ticks(self.pid)
        if ticks != self.ticks:
            raise PeerLost(f"process {self.pid} is another one now: it started at tick {ticks}, the peer at {self.ticks}")


class NeighbourWatch:
    """Checks whether a process still lives, a hundred times cheaper than `Neighbour.confirm`: through a descriptor of it.

    Raises PeerLost when it does not live now. Where the system has no such descriptors, it confirms each time.
    """

    def __init__(self, neighbour: Neighbour) -> None:
        self._neighbour = neighbour
        self._poll = select.poll()
        self._lock = threading.Lock()
        try:
            self._fd = os.pidfd_open(neighbour.pid)
        except OSError:
            self._fd = -1
        else:
            self._poll.register(self._fd, select.POLLIN)
        # After the descriptor is open: before, the pid could still become another process's.
        try:
            neighbour.confirm()
        except PeerLost:
            self.close()
            raise

    def check(self) -> None:
        """Raise PeerLost unless this very process is alive."""
        if self._fd < 0:
            self._neighbour.confirm()
            return
        with self._lock:  # agents of one process share a watch, and two threads must not poll at once
            is_gone = bool(self._poll.poll(0))
        if is_gone:
            raise PeerLost(f"process {self._neighbour.pid} is gone")

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def files_left() -> tuple[int, int]:
    """How many files this process may still open, and how many in all."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = sys.maxsize if limit == resource.RLIM_INFINITY else limit
    return most - sum(1 for _ in Path("/proc/self/fd").iterdir()), most


def this_process() -> ProcessId:
    """The name of this process, for its card; without a host where that is unknown, so that no peer relies on it."""
    try:
        return ProcessId(host_id(), os.getpid(), start_ticks(os.getpid()))
    except (OSError, PeerLost):
        return ProcessId("", os.getpid(), 0)


def is_gone(process: ProcessId) -> bool:
    """Whether `process` ran on this host and does not any more; false whenever that cannot be known."""
    try:
        if not process.host or process.host != _own_host_id(os.getpid()):
            return False
    except OSError:
        return False
    if not 0 < process.pid < 1 << 31:
        return True
    try:
        _watch_of(process).check()
    except PeerLost:
        return True
    return False


@functools.lru_cache(maxsize=_MOST_WATCHED)
def _watch_of(process: ProcessId) -> NeighbourWatch:
    """A descriptor of the process, kept: every request asks whether its peer lives, and reading /proc takes far longer."""
    return NeighbourWatch(Neighbour(process.host, process.pid, process.started))
