"""Memory that other processes of this host can map, and only read: an anonymous file whose descriptor they open through /proc.

The last page of the file lies behind the region. It holds the *mark* of the transport that hands the region out, and is cleared
when that closes, so that a reader notices that the memory was withdrawn. The file is sealed: no process can shrink it later. A
reader looks at the seal before it maps a file, because reading behind the end of one that has shrunk would kill the reader.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.errors import ConfigError, PeerLost, TransportError
from kvbaton.transport.base import Region

__all__ = ["MARK_BYTES", "SharedMapping", "SharedMemory", "SharedPlace", "inode_of", "shared_place", "write_mark"]

MARK_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23


class SharedMemory:
    """Zeroed, page-aligned memory of this process that peers on this host can map read-only; lives as long as it is referenced.

    Raises ConfigError where there is not that much memory, or the system has no such files.
    """

    def __init__(self, region_bytes: int) -> None:
        self._fd = _open_file(region_bytes)
        try:
            self._map = mmap.mmap(self._fd, region_bytes)
        except (OSError, ValueError, MemoryError) as error:
            os.close(self._fd)
            raise ConfigError(f"no shared memory of {region_bytes} bytes: {error}; use less") from error
        weakref.finalize(self._map, os.close, self._fd)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):
            self._map.madvise(_MADV_POPULATE_WRITE)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory, writable."""
        return np.frombuffer(self._map, np.uint8)

    @property
    def region(self) -> Region:
        """The region of all of it; keeps it alive."""
        array = self.array
        return Region(int(array.ctypes.data), array.nbytes, array.data, memory_fd=self._fd)


class SharedMapping:
    """The shared memory of another process, read-only; the memory lives on until `array` and this are dropped.

    Raises TransportError when it may not be opened, PeerLost when the descriptor is no longer that of the card.
    """

    def __init__(self, pid: int, fd: int, inode: int, region_bytes: int) -> None:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise PeerLost(f"descriptor {fd} of process {pid} is a socket now, not its shared memory") from error
            raise TransportError(
                f"the shared memory of process {pid} may not be opened ({error.strerror}; user id {os.getuid()} here): "
                "run both instances as the same user and in one pid namespace, or choose transport tcp"
            ) from error
        try:
            file_bytes = _checked_bytes(opened, f"descriptor {fd} of process {pid}", inode, region_bytes)
            whole = mmap.mmap(opened, file_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransportError(
                f"the shared memory of process {pid} cannot be mapped ({error}): raise the limit that this process has reached "
                "(`ulimit -n`, `ulimit -v`, vm.max_map_count), or choose transport tcp"
            ) from error
        finally:
            os.close(opened)
        with contextlib.suppress(OSError):
            whole.madvise(mmap.MADV_HUGEPAGE)
        self._mark = np.frombuffer(whole, np.uint8, MARK_BYTES, file_bytes - mmap.PAGESIZE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(whole, np.uint8, region_bytes)

    @property
    def mark(self) -> int:
        """The mark that the owner shows now; 0 once it has withdrawn the memory."""
        return int.from_bytes(self._mark.tobytes(), "little")


class SharedPlace(NamedTuple):
    """Where memory of this process lies in a file that others can map."""

    fd: int
    inode: int
    offset: int


def shared_place(address: int, memory_bytes: int) -> SharedPlace | None:
    """Where this memory lies in an anonymous file that is sealed against shrinking; None for memory of any other kind."""
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        if b" /memfd:" not in line:
            continue
        places, rights, offset, _, inode = line.split(maxsplit=5)[:5]
        start, end = (int(number, 16) for number in places.split(b"-"))
        if rights.endswith(b"s") and start <= address and address + memory_bytes <= end:
            fd = _sealed_fd(int(inode))
            return None if fd is None else SharedPlace(fd, int(inode), int(offset, 16) + address - start)
    return None


def _sealed_fd(inode: int) -> int | None:
    """A descriptor of this process for the file, if it has one, and the file cannot shrink."""
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # what listed them has closed its own, and most are no files that can be sealed
            if os.fstat(fd).st_ino == inode and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return fd
    return None


def write_mark(region: Region, mark: int) -> None:
    """Show `mark` to processes that map the shared memory of `region`; 0 withdraws it."""
    os.pwrite(region.memory_fd, mark.to_bytes(MARK_BYTES, "little"), _mark_offset(region.region_bytes))


def inode_of(region: Region) -> int:
    """What the shared memory of `region` is recognised by; 0 where there is none."""
    return os.fstat(region.memory_fd).st_ino if region.memory_fd >= 0 else 0


def _checked_bytes(opened: int, name: str, inode: int, region_bytes: int) -> int:
    """Size of the file, if it is the one that a card describes, and cannot shrink; raises PeerLost otherwise."""
    state = os.fstat(opened)
    if not stat.S_ISREG(state.st_mode) or state.st_ino != inode or state.st_size - mmap.PAGESIZE < region_bytes:
        raise PeerLost(
            f"{name} is another file now: {stat.filemode(state.st_mode)}, inode {state.st_ino} with {state.st_size} bytes, "
            f"the card has inode {inode}, {region_bytes} bytes"
        )
    try:
        seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise PeerLost(f"{name} is a file without the seal against shrinking (seals {seals:#x}), so it is not mapped")
    return state.st_size


def _mark_offset(region_bytes: int) -> int:
    return -(-region_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _open_file(region_bytes: int) -> int:
    fd, most = -1, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if not 0 < region_bytes < most:
        raise ConfigError(f"no shared memory of {region_bytes} bytes: this machine has {most}; use less")
    try:
        fd = os.memfd_create("kvbaton", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _mark_offset(region_bytes) + mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except (AttributeError, OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise ConfigError(f"no shared memory of {region_bytes} bytes: {error}; use less, or memory of your own") from error
    return fd
