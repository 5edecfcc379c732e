"""Memory that others map: read-only, of a fixed size, and withdrawn when its transport closes."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from kvbaton.errors import ConfigError, PeerLost, TransportError
from kvbaton.transport.base import TransportSettings
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.shared_memory import SharedMapping, SharedMemory, inode_of, write_mark


def mapped(memory: SharedMemory) -> SharedMapping:
    region = memory.region
    return SharedMapping(os.getpid(), region.memory_fd, inode_of(region), region.region_bytes)


def test_a_mapping_shows_what_the_owner_writes_and_cannot_write_itself() -> None:
    memory = SharedMemory(10_000)
    view = mapped(memory)
    memory.array[9_999] = 7
    assert view.array[9_999] == 7
    assert len(view.array) == 10_000
    with pytest.raises(ValueError, match="read-only"):
        view.array[0] = 1


def test_nobody_can_shrink_it() -> None:
    memory = SharedMemory(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.region.memory_fd, 0)


def test_the_mark_comes_and_goes_with_the_transport() -> None:
    memory = SharedMemory(4096)
    view = mapped(memory)
    assert view.mark == 0
    transport = LocalTransport(memory.region, TransportSettings())
    assert view.mark == transport.endpoint().details["mark"]
    transport.close()
    assert view.mark == 0
    write_mark(memory.region, 5)
    assert view.mark == 5


def test_a_limit_of_this_process_is_named() -> None:
    """The file can be opened, but not mapped: a mapping has a descriptor of its own."""
    memory = SharedMemory(4096)
    mapped(memory)
    free, limits = os.dup(memory.region.memory_fd), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(TransportError, match=r"cannot be mapped.*ulimit -n.*transport tcp"):
            mapped(memory)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_another_file_under_the_same_number_is_noticed() -> None:
    memory, other = SharedMemory(4096), SharedMemory(4096)
    with pytest.raises(PeerLost, match="another file"):
        SharedMapping(os.getpid(), memory.region.memory_fd, inode_of(other.region), 4096)
    with pytest.raises(PeerLost, match="another file"):
        SharedMapping(os.getpid(), memory.region.memory_fd, inode_of(memory.region), 1 << 20)
    with pytest.raises(TransportError, match=r"may not be opened.*same user.*transport tcp"):
        SharedMapping(os.getpid(), 99_999, 1, 4096)


def test_a_fifo_under_the_same_number_is_noticed_at_once(tmp_path: Path) -> None:
    """Nobody will open it for writing: who opens it and waits for that, waits for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    found: list[str] = []
    opener = threading.Thread(target=lambda: found.append(refusal_of(fd)), daemon=True)
    opener.start()
    opener.join(10)
    was_stuck = opener.is_alive()
    if was_stuck:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        opener.join(10)
    os.close(fd)
    assert not was_stuck
    assert "another file now: prw" in found[0]


def test_a_socket_under_the_same_number_is_noticed() -> None:
    with socket.socket() as sock:
        assert "is a socket now" in refusal_of(sock.fileno())


def refusal_of(fd: int) -> str:
    """Why a descriptor of this process is not mapped, though the inode is right."""
    with pytest.raises(PeerLost) as caught:
        SharedMapping(os.getpid(), fd, os.fstat(fd).st_ino, 4096)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["unsealed", "on disk", "sealed"])
def test_a_file_that_can_shrink_is_not_mapped(tmp_path: Path, kind: str) -> None:
    if kind == "on disk":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4 * mmap.PAGESIZE)
    if kind == "sealed":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        assert len(SharedMapping(os.getpid(), fd, os.fstat(fd).st_ino, 4096).array) == 4096
    else:
        with pytest.raises(PeerLost, match="without the seal against shrinking"):
            SharedMapping(os.getpid(), fd, os.fstat(fd).st_ino, 4096)
    os.close(fd)


@pytest.mark.parametrize("region_bytes", [0, 1 << 60])
def test_sizes_that_cannot_be_had_are_refused(region_bytes: int) -> None:
    with pytest.raises(ConfigError, match="no shared memory of"):
        SharedMemory(region_bytes)


def test_the_file_closes_with_the_last_reference() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    region = SharedMemory(4096).region
    assert Path(f"/proc/self/fd/{region.memory_fd}").exists()
    array = np.frombuffer(region.view, np.uint8)
    del region, array
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
