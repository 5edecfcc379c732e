"""What only `local` has: process identity, and permission trouble explained."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport import neighbour
from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.neighbour import Neighbour, NeighbourWatch, ProcessMemory, host_id, start_ticks
from kvbaton.transport.shared_memory import SharedMemory

PEER = PeerRank(Incarnation("p"))


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    made = LocalTransport(Region.of(bytearray(64)), TransportSettings())
    yield made
    made.close()


def changed(endpoint: Endpoint, **details: str | int) -> Endpoint:
    return msgspec.structs.replace(endpoint, details=endpoint.details | details)


def test_the_endpoint_names_this_process(transport: LocalTransport) -> None:
    details = transport.endpoint().details
    assert details["pid"] == os.getpid()
    assert details["start_ticks"] == start_ticks(os.getpid())
    assert details["host_id"] == host_id()


def test_another_host_is_refused_by_name(transport: LocalTransport) -> None:
    with pytest.raises(TransportError, match=r"another host .*'elsewhere'.* choose transport tcp"):
        transport.connect(PEER, changed(transport.endpoint(), host_id="elsewhere"))


def test_a_recycled_pid_is_refused_at_connect(transport: LocalTransport) -> None:
    with pytest.raises(TransportError, match="another one now"):
        transport.connect(PEER, changed(transport.endpoint(), start_ticks=1))


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_process_that_ends_is_noticed_after_the_copy(monkeypatch: pytest.MonkeyPatch, has_descriptors: bool) -> None:
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    watch = NeighbourWatch(Neighbour(host_id(), process.pid, start_ticks(process.pid)))
    watch.check()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for reap in (lambda: None, process.communicate):
        reap()
        with pytest.raises(PeerLost, match=r"gone|dead"):
            watch.check()
    watch.close()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


@pytest.mark.parametrize(("is_shared", "calls"), [(True, 0), (False, 1)])
def test_only_memory_that_is_not_shared_is_opened_to_tracers(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool, calls: int
) -> None:
    allowed: list[ProcessMemory] = []
    monkeypatch.setattr(ProcessMemory, "allow_readers", lambda memory: allowed.append(memory))
    region = SharedMemory(64).region if is_shared else Region.of(bytearray(64))
    LocalTransport(region, TransportSettings()).close()
    assert len(allowed) == calls


def refuse(_pid: int) -> int:
    raise OSError(errno.ENOSYS, "no such call")


@pytest.mark.parametrize(
    "details", [{"pid": 0}, {"pid": -1}, {"pid": 2**63}, {"address": 0}, {"address": 2**64 - 8}, {"address": 4096}]
)
def test_addresses_that_cannot_be_read_are_refused(transport: LocalTransport, details: dict[str, int]) -> None:
    with pytest.raises(TransportError):
        transport.connect(PEER, changed(transport.endpoint(), **details))


def test_dead_processes_are_lost_whether_reaped_or_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert start_ticks(process.pid) > 0
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(PeerLost, match="dead"):
        start_ticks(process.pid)
    process.communicate(timeout=10)
    with pytest.raises(PeerLost, match="gone"):
        start_ticks(process.pid)


def test_a_read_stops_where_memory_ends() -> None:
    source, target = Region.of(bytearray(b"abcd")), Region.of(bytearray(8))
    memory = ProcessMemory()
    runs = np.array([[0, 0, 4], [2**46, 4, 4]], np.uint64)
    assert memory.read(os.getpid(), source.address, target.address, runs) == 4
    assert bytes(target.view) == b"abcd\0\0\0\0"
    with pytest.raises(TransportError, match="no longer mapped"):
        memory.read(os.getpid(), source.address, target.address, runs[1:])


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.EPERM, TransportError, "ptrace_scope.*same user.*SYS_PTRACE.*transport tcp"),
        (errno.ESRCH, PeerLost, "gone"),
        (errno.EFAULT, TransportError, "no longer mapped"),
        (errno.ENOMEM, TransportError, "failed: Cannot allocate memory"),
    ],
)
def test_system_errors_say_what_to_do(code: int, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        raise neighbour._explain(code, 77)
