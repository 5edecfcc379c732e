"""What only `local` has: process identity, and permission trouble explained."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import PeerLost, RangeError, TransportError
from kvbaton.transport import neighbour
from kvbaton.transport.base import (
    Batch,
    Completion,
    Direction,
    Endpoint,
    PagingTransport,
    PeerRank,
    Region,
    TransportSettings,
)
from kvbaton.transport.choose import AutoTransport
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.neighbour import Neighbour, NeighbourWatch, ProcessMemory, host_id, start_ticks
from kvbaton.transport.queued import Ledger
from kvbaton.transport.runs import Pages, load_loops
from kvbaton.transport.shared_memory import SharedMemory

PEER = PeerRank(Incarnation("p"))
BYTES = 6 << 20
PAGES = Batch(PEER, Direction.READ, np.array([[(1 << 20) * n, (1 << 20) * (5 - n), 1 << 20] for n in range(5)], np.uint64))


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    made = LocalTransport(Region.of(bytearray(64)), TransportSettings())
    yield made
    made.close()


Pair = tuple[SharedMemory, LocalTransport, SharedMemory, LocalTransport]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Source and target with shared memory, as the embedded engine has it; the source's is filled."""
    source, target = SharedMemory(BYTES), SharedMemory(BYTES)
    np.frombuffer(source.region.view, np.uint8)[:] = np.random.default_rng(1).integers(1, 255, BYTES, dtype=np.uint8)
    owner = LocalTransport(source.region, TransportSettings())
    reader = LocalTransport(target.region, TransportSettings())
    reader.connect(PEER, owner.endpoint())
    yield source, owner, target, reader
    reader.close()
    owner.close()


def completed(reader: LocalTransport) -> Completion:
    while True:
        assert select.select([reader.wakeup_fd], [], [], 60)[0], "no completion"
        if found := reader.poll():
            return found[0]


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


def test_a_batch_of_megabytes_moves_without_the_mover(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, target, reader = pair
    if load_loops() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(Ledger, "admit", None)
    for _ in range(20):
        np.frombuffer(target.region.view, np.uint8)[:] = 0
        ticket = reader.post(PAGES)
        completion = completed(reader)
        assert (completion.ticket, completion.moved_bytes, completion.error) == (ticket, 5 << 20, "")
        for of, at, count in np.asarray(PAGES.runs).tolist():
            assert target.region.view[at : at + count] == source.region.view[of : of + count]
        assert not any(target.region.view[: 1 << 20])


def test_bytes_of_a_source_that_has_withdrawn_do_not_count(pair: Pair) -> None:
    _, owner, _, reader = pair
    owner.close()
    reader.post(PAGES)
    assert "withdrawn" in completed(reader).error


def test_batches_posted_at_once_complete_in_order(pair: Pair) -> None:
    reader = pair[3]
    few = Batch(PEER, Direction.READ, np.array([[0, 0, 8]], np.uint64))
    for _ in range(20):
        tickets = [reader.post(PAGES), reader.post(few), reader.post(PAGES)]
        seen: list[int] = []
        while len(seen) < len(tickets):
            assert select.select([reader.wakeup_fd], [], [], 60)[0], "no completion"
            seen += [each.ticket for each in reader.poll() if not each.error]
        assert seen == tickets


def test_nothing_changes_after_a_revoke_has_completed(pair: Pair) -> None:
    _, owner, target, reader = pair
    for _ in range(20):
        ticket = reader.post(PAGES)
        reader.revoke(PEER)
        assert completed(reader).ticket == ticket
        target.region.view[:] = bytes(BYTES)
        reader.connect(PEER, owner.endpoint())
        assert target.region.view == bytes(BYTES)


def test_a_batch_of_megabytes_is_refused_by_name(pair: Pair) -> None:
    reader = pair[3]
    for rows in ([[0, 0, 4 << 20], [0, 1 << 20, 4 << 20]], [[1 << 20, 0, BYTES]], [[0, 1 << 20, BYTES]]):
        with pytest.raises(RangeError):
            reader.post(Batch(PEER, Direction.READ, np.array(rows, np.uint64)))
    assert reader.poll() == []


needs_compiler = pytest.mark.skipif(load_loops() is None, reason="needs a C compiler")

BLOCK = 16 << 10


def pages_of(sources: tuple[int, ...], targets: tuple[int, ...]) -> Pages:
    """Whole blocks of one layer, of 16 tokens each; those of the target are twice as far apart."""
    tokens = 16
    table = (ctypes.c_int64 * 9)(BLOCK, 2 * BLOCK, BLOCK // tokens, tokens, BYTES // BLOCK, BYTES // BLOCK // 2, 1, 0, 0)
    return Pages(table, sources, targets, 0, len(sources) * tokens, len(sources) * BLOCK)


FEW_PAGES = pages_of((7, 2, 5), (4, 1, 9))


def refused_or_left(reader: LocalTransport) -> str:
    """Why pages were not moved; empty where they are left to `post`."""
    try:
        moved = reader.move_pages(PEER, FEW_PAGES)
    except TransportError as error:
        return str(error)
    assert moved is None
    return ""


@needs_compiler
def test_pages_are_moved_by_the_caller_and_complete_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, target, reader = pair
    monkeypatch.setattr(Ledger, "admit", None)
    wanted = bytearray(target.region.view)
    for of, at in zip(FEW_PAGES.sources, FEW_PAGES.targets, strict=True):
        wanted[2 * at * BLOCK : (2 * at + 1) * BLOCK] = source.region.view[of * BLOCK : (of + 1) * BLOCK]
    moved = reader.move_pages(PEER, FEW_PAGES)
    assert moved is not None
    assert target.region.view == wanted
    completion = completed(reader)
    assert (completion.ticket, completion.moved_bytes, completion.error) == (moved.ticket, 3 * BLOCK, "")
    assert moved.runs == 3
    assert reader.poll() == []
    assert not select.select([reader.wakeup_fd], [], [], 0)[0]


@needs_compiler
def test_pages_are_moved_by_the_transport_that_was_chosen(pair: Pair) -> None:
    source, owner, target, reader = pair
    chooser = AutoTransport(target.region, TransportSettings(), {"local": reader}, {})
    assert chooser.move_pages(PEER, FEW_PAGES) is None
    offered: dict[str, str | int] = {"local": msgspec.json.encode(owner.endpoint()).decode()}
    chooser.connect(PEER, Endpoint("auto", source.region.region_bytes, offered))
    inner = reader.move_pages(PEER, FEW_PAGES)
    moved = [chooser.move_pages(PEER, FEW_PAGES) for _ in range(2)]
    assert inner is not None
    assert [each and each.runs for each in moved] == [3, 3]
    found = chooser.poll()
    assert [each.ticket for each in found] == [each and each.ticket for each in moved]
    assert {(each.moved_bytes, each.error) for each in found} == {(3 * BLOCK, "")}
    owner.close()
    assert chooser.move_pages(PEER, FEW_PAGES) is not None
    assert "withdrawn" in chooser.poll()[0].error
    chooser.revoke(PEER)
    assert chooser.move_pages(PEER, FEW_PAGES) is None


@needs_compiler
def test_pages_are_left_alone_while_something_else_is_in_flight(pair: Pair) -> None:
    _, _, target, reader = pair
    ticket = reader.post(PAGES, lambda: False)
    assert refused_or_left(reader) == ""
    reader.cancel(ticket)
    assert completed(reader).ticket == ticket
    assert not any(target.region.view)
    assert reader.move_pages(PEER, FEW_PAGES) is not None


@needs_compiler
def test_pages_of_more_than_is_copied_at_once_are_left_alone(pair: Pair) -> None:
    _, _, target, reader = pair
    most, more = (pages_of(tuple(range(count)), tuple(range(count))) for count in (16, 17))
    for pages in (more, more._replace(wire_bytes=BLOCK)):
        assert reader.move_pages(PEER, pages) is None
    assert not any(target.region.view)
    assert reader.move_pages(PEER, most) is not None


def test_pages_of_memory_that_is_not_shared_are_left_alone() -> None:
    target = Region.of(bytearray(BYTES))
    owner, reader = (LocalTransport(region, TransportSettings()) for region in (Region.of(bytearray(BYTES)), target))
    reader.connect(PEER, owner.endpoint())
    assert refused_or_left(reader) == ""
    reader.close()
    owner.close()


@needs_compiler
def test_pages_of_a_peer_that_was_revoked_or_after_the_end_are_not_moved(pair: Pair) -> None:
    _, owner, target, reader = pair
    reader.revoke(PEER)
    assert "not connected" in refused_or_left(reader) or not refused_or_left(reader), "the mover may have yet to release it"
    with pytest.raises(TransportError, match="not connected"):
        reader.post(Batch(PEER, Direction.READ, np.array([[0, 0, 8]], np.uint64)))
    assert not any(target.region.view)
    reader.connect(PEER, owner.endpoint())
    reader.close()
    assert "the transport is closed" in refused_or_left(reader)
    assert not any(target.region.view)


@needs_compiler
def test_pages_of_a_source_that_has_withdrawn_do_not_count(pair: Pair) -> None:
    _, owner, _, reader = pair
    owner.close()
    moved = reader.move_pages(PEER, FEW_PAGES)
    assert moved is not None
    completion = completed(reader)
    assert completion.ticket == moved.ticket
    assert "withdrawn" in completion.error
    assert reader.poll() == []


@needs_compiler
def test_pages_that_were_moved_before_a_revoke_complete_once(pair: Pair) -> None:
    reader = pair[3]
    moved = reader.move_pages(PEER, FEW_PAGES)
    assert moved is not None
    reader.revoke(PEER)
    assert [(each.ticket, each.error) for each in reader.poll()] == [(moved.ticket, "")]
    assert reader.poll() == []


def test_a_wrapper_that_changes_batches_is_not_passed_by(pair: Pair) -> None:
    _, _, target, reader = pair
    assert isinstance(reader, PagingTransport)
    assert not isinstance(FaultyTransport(reader, target.region, Faults()), PagingTransport)
