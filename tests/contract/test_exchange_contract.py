"""What every exchange promises, over each transport that claims one, with the other side in a process of its own."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from exchange_peer import ExchangePeer, exchange_peer

from kvbaton.errors import ConfigError, PeerError, QueueFull, RangeError, TransportError
from kvbaton.transport.base import Direction, TransportSettings
from kvbaton.transport.exchange.base import MemoryHandle, TransferRequest
from kvbaton.transport.exchange.memories import MemoryTable, NoticeTable
from kvbaton.transport.exchange.service import MemoryExchange
from kvbaton.transport.exchange.wire import CALL_BYTES, CallKind, MemoryCall, pack_call
from kvbaton.transport.runs import load_loops
from kvbaton.transport.shared_memory import SharedPlace, shared_place
from kvbaton.transport.table import load, transport_entries, transport_entry
from watching import pause

_KINDS = [entry.name for entry in transport_entries() if entry.exchange]
_READ, _WRITE = Direction.READ, Direction.WRITE
_LIMIT_S = 30.0
_HAS_LOOPS = load_loops() is not None


@pytest.fixture(params=_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if why := transport_entry(name).why_not_here():
        pytest.skip(why)
    return name


@pytest.fixture
def open_exchange(kind: str) -> Iterator[Callable[..., MemoryExchange]]:
    opened: list[MemoryExchange] = []

    def make(name: str = "here", **settings: object) -> MemoryExchange:
        opened.append(load(transport_entry(kind).exchange)(name, TransportSettings(**settings)))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for exchange in opened:
        exchange.check()
        exchange.close()


@pytest.fixture
def peer(kind: str) -> Iterator[ExchangePeer]:
    with exchange_peer(kind) as started:
        yield started


def _random(size: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


def _runs(*runs: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    return np.array(runs or np.empty((0, 3)), np.uint64).reshape(-1, 3)


def _poll(condition: Callable[[], bool], limit_s: float = _LIMIT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.002)
    return True


class _Pair:
    """This side's exchange and memory, and one memory of the peer."""

    def __init__(self, exchange: MemoryExchange, peer: ExchangePeer, size: int) -> None:
        self.exchange, self.peer = exchange, peer
        self.memory = _random(size)
        self.own = exchange.register(self.memory.ctypes.data, size)
        self.remote = peer.register(size)
        self.link = exchange.connect(peer.endpoint)

    def move(self, direction: Direction, runs: npt.NDArray[np.uint64], tag: int | None = None) -> str:
        transfer = self.link.post(TransferRequest(direction, self.own, self.remote, runs, tag))
        assert transfer.wait(_LIMIT_S)
        return transfer.error


@pytest.fixture
def pair(open_exchange: Callable[..., MemoryExchange], peer: ExchangePeer) -> _Pair:
    return _Pair(open_exchange(), peer, 1 << 20)


_SHAPES = [
    pytest.param(8, 1, id="8 bytes"),
    pytest.param(1, 700, id="700 single bytes"),
    pytest.param(4096, 200, id="200 pages"),
    pytest.param(1 << 20, 1, id="1 MiB"),
]


@pytest.mark.parametrize(("size", "count"), _SHAPES)
def test_writes_arrive_and_nothing_else_changes(pair: _Pair, size: int, count: int) -> None:
    places = np.random.default_rng(1).permutation((1 << 20) // size)[:count]
    runs = _runs(*((source * size, int(target) * size, size) for source, target in enumerate(places)))
    assert pair.move(_WRITE, runs) == ""
    expected = np.zeros(1 << 20, np.uint8)
    for source, target, length in runs.tolist():
        expected[target : target + length] = pair.memory[source : source + length]
    assert pair.peer.content(pair.remote.slot) == expected.tobytes()


@pytest.mark.parametrize(("size", "count"), _SHAPES)
def test_reads_arrive_and_nothing_else_changes(pair: _Pair, size: int, count: int) -> None:
    assert pair.move(_WRITE, _runs((0, 0, 1 << 20))) == ""
    theirs, before = np.frombuffer(pair.peer.content(pair.remote.slot), np.uint8), pair.memory.copy()
    pair.memory[:] = expected = np.zeros_like(before)
    places = np.random.default_rng(2).permutation((1 << 20) // size)[:count]
    runs = _runs(*((int(source) * size, target * size, size) for target, source in enumerate(places)))
    assert pair.move(_READ, runs) == ""
    for source, target, length in runs.tolist():
        expected[target : target + length] = theirs[source : source + length]
    assert (pair.memory == expected).all()


def test_a_control_that_stores_nothing_is_noticed(open_exchange: Callable[..., MemoryExchange], peer: ExchangePeer) -> None:
    exchange = open_exchange()
    dropped, kept = (_Pair(exchange, peer, 1 << 16) for _ in range(2))
    exchange.drop_stores(dropped.own)
    for pair in (dropped, kept):
        peer.ask("fill", slot=pair.remote.slot, value=7)
        assert pair.move(_READ, _runs((0, 0, 1 << 16))) == ""
    assert (dropped.memory == _random(1 << 16)).all()
    assert (kept.memory == 7).all()


def test_transfers_beyond_the_limits_of_one_call_arrive(
    open_exchange: Callable[..., MemoryExchange], peer: ExchangePeer
) -> None:
    pair = _Pair(open_exchange(), peer, 1 << 18)
    count = 70_000
    order = np.random.default_rng(3).permutation(count)
    runs = np.stack([np.arange(count), order, np.ones(count, np.int64)], axis=1).astype(np.uint64)
    assert pair.move(_WRITE, runs) == ""
    assert peer.content(pair.remote.slot)[:count] == bytes(pair.memory[np.argsort(order)])


def test_memories_come_and_go_while_others_are_used(pair: _Pair) -> None:
    extra = [pair.peer.register(64, value) for value in range(5)]
    for handle in extra[::2]:
        pair.peer.ask("withdraw", slot=handle.slot)
    for value, handle in enumerate(extra):
        request = TransferRequest(_READ, pair.own, handle, _runs((0, 0, 64)))
        transfer = pair.link.post(request)
        assert transfer.wait(_LIMIT_S)
        assert bool(transfer.error) == (value % 2 == 0)
        assert transfer.error or (pair.memory[:64] == value).all()
    pair.peer.ask("check")


def test_a_slot_that_was_given_to_another_memory_is_not_mistaken(pair: _Pair) -> None:
    pair.peer.ask("withdraw", slot=pair.remote.slot)
    again = pair.peer.register(1 << 20, 9)
    assert again.slot == pair.remote.slot
    for direction in (_READ, _WRITE):
        assert "RangeError" in pair.move(direction, _runs((0, 0, 4096)))
    assert pair.peer.content(again.slot) == bytes([9]) * (1 << 20)


@pytest.mark.parametrize("direction", [_READ, _WRITE])
def test_ranges_are_checked_here_before_anything_is_sent(pair: _Pair, direction: Direction) -> None:
    for run in ((0, (1 << 20) - 8, 9), ((1 << 20) - 8, 0, 9), (1 << 63, 0, 8), (0, (1 << 64) - 4, 8)):
        with pytest.raises(RangeError, match="outside"):
            pair.move(direction, _runs(run))


@pytest.mark.parametrize("direction", [_READ, _WRITE])
def test_ranges_are_checked_by_the_owner_too(pair: _Pair, direction: Direction) -> None:
    forged = MemoryHandle(pair.remote.slot, pair.remote.stamp, 1 << 30)
    neighbour = pair.peer.register(1 << 20, 5)
    before = pair.memory.copy()
    run = (1 << 20, 0, 4096) if direction is _READ else (0, 1 << 20, 4096)
    transfer = pair.link.post(TransferRequest(direction, pair.own, forged, _runs(run)))
    assert transfer.wait(_LIMIT_S)
    assert "RangeError" in transfer.error
    assert pair.peer.content(neighbour.slot) == bytes([5]) * (1 << 20)
    assert (pair.memory == before).all()


def test_own_memory_that_is_not_registered_is_refused(pair: _Pair) -> None:
    pair.exchange.withdraw(pair.own)
    pair.exchange.withdraw(pair.own)
    with pytest.raises(RangeError, match="not registered"):
        pair.move(_WRITE, _runs((0, 0, 8)))


@pytest.mark.parametrize(("address", "size"), [(0, 8), (4096, 0), (-1, 8), (1 << 63, 8), (4096, 1 << 63)])
def test_what_is_no_memory_is_not_registered(open_exchange: Callable[..., MemoryExchange], address: int, size: int) -> None:
    with pytest.raises(ConfigError, match="cannot be registered"):
        open_exchange().register(address, size)


def test_memory_that_the_processor_cannot_read_is_refused(open_exchange: Callable[..., MemoryExchange]) -> None:
    """A driver reserves the addresses of a device's memory like this."""
    exchange, page = open_exchange(), mmap.PAGESIZE
    reserved = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    exchange.withdraw(exchange.register(address, 2 * page))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 0) == 0
    for start, size in ((address + page, page), (address, 2 * page)):
        with pytest.raises(ConfigError, match="memory of a device"):
            exchange.register(start, size)
    assert exchange.stats()["memories"] == 0
    exchange.withdraw(exchange.register(address, page))


class HeldTable(MemoryTable):
    """Holds a write up before its second slice, until `go` is set.

    With `forgets` it makes the mistake that the next test must find: a slice is begun in a memory that was withdrawn.
    """

    def __init__(self, forgets: bool) -> None:
        super().__init__(10.0)
        self.forgets = forgets
        self.slices = 0
        self.is_held, self.go = threading.Event(), threading.Event()
        self.last: dict[int, tuple[int, int]] = {}

    def pin(self, slot: int, stamp: int) -> tuple[int, int]:
        self.slices += 1
        if self.slices == 2:
            self.is_held.set()
            self.go.wait(_LIMIT_S)
        if not self.forgets:
            return super().pin(slot, stamp)
        try:
            self.last[slot] = super().pin(slot, stamp)
        except RangeError:
            self._pins[slot] += 1
        return self.last[slot]


@pytest.mark.parametrize("forgets", [False, True], ids=["as it is", "control"])
def test_no_byte_changes_after_a_withdrawal(kind: str, open_exchange: Callable[..., MemoryExchange], forgets: bool) -> None:
    """A write of many slices is under way when the target is withdrawn; what it holds from then on is a pattern of its own."""
    owner, writer = open_exchange("owner"), open_exchange("writer")
    table = owner._state.table = HeldTable(forgets)
    owner._state.slice_bytes = 1 << 16
    size = 4 << 20
    target, source = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    handle, own = owner.register(target.ctypes.data, size), writer.register(source.ctypes.data, size)
    transfer = writer.connect(owner.endpoint()).post(TransferRequest(_WRITE, own, handle, _runs((0, 0, size))))
    assert table.is_held.wait(_LIMIT_S)
    owner.withdraw(handle)
    target[:] = 5
    table.go.set()
    assert transfer.wait(_LIMIT_S)
    assert ((target == 5).all(), bool(transfer.error)) == ((False, False) if forgets else (True, True))


def _mapped_files() -> int:
    """How many anonymous files of others this process has mapped."""
    return Path("/proc/self/maps").read_text().count("r--s 00000000") if _HAS_LOOPS else 0


@pytest.mark.parametrize("is_shared", [False, True], ids=["private", "shared"])
@pytest.mark.parametrize("direction", [_READ, _WRITE])
def test_shared_memory_is_copied_where_it_is_mapped(
    kind: str, open_exchange: Callable[..., MemoryExchange], direction: Direction, is_shared: bool
) -> None:
    """Memory that lies inside a shared file; the copying side is this process, which maps the file where that is possible."""
    size, before = 4 << 20, _mapped_files()
    here = open_exchange()
    with exchange_peer(kind) as peer:
        memory = _random(size)
        own, remote = here.register(memory.ctypes.data, size), peer.register(size, 3, is_shared=is_shared)
        link = here.connect(peer.endpoint)
        runs = _runs(*((at, size - at - 4096, 4096) for at in range(0, size, 8192)))
        if direction is _WRITE:
            places = {"endpoint": msgspec.to_builtins(here.endpoint()), "to": msgspec.to_builtins(own)}
            assert peer.ask("write", slot=remote.slot, runs=runs.tolist(), **places) == ""
        else:
            transfer = link.post(TransferRequest(_READ, own, remote, runs))
            assert transfer.wait(_LIMIT_S)
            assert transfer.error == ""
        blocks = memory.reshape(-1, 4096)
        assert (blocks[1::2] == 3).all()
        assert np.array_equal(blocks[::2], _random(size).reshape(-1, 4096)[::2])
        assert _mapped_files() - before == (is_shared and kind == "local" and _HAS_LOOPS)
        peer.ask("withdraw", slot=remote.slot)
        if direction is _READ:
            assert link.post(TransferRequest(_READ, own, remote, runs)).wait(_LIMIT_S)
            assert _mapped_files() == before, "what was withdrawn is not kept"
    assert _poll(lambda: _mapped_files() == before), "the end of the peer's process ends it"


class _BusyCopy:
    """Keeps a helper for as long as a test likes."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def copy(self, _: object) -> None:
        self.is_over.wait(_LIMIT_S)


def test_helpers_that_do_not_run_are_not_waited_for() -> None:
    size = 4 << 20
    one, other = (load(transport_entry("local").exchange)(name, TransportSettings()) for name in ("one", "other"))
    source, target = _random(size), np.zeros(size, np.uint8)
    remote, own = one.register(source.ctypes.data, size), other.register(target.ctypes.data, size)
    busy, helpers = _BusyCopy(), other._state.helpers
    blocked = [helpers.submit(busy, _runs()) for _ in range(helpers.parts - 1)]
    try:
        transfer = other.connect(one.endpoint()).post(TransferRequest(_READ, own, remote, _runs((0, 0, size))))
        assert transfer.wait(_LIMIT_S)
        assert transfer.error == ""
        assert np.array_equal(source, target)
        assert not any(each.done() for each in blocked)
    finally:
        busy.is_over.set()
        other.close()
        one.close()


def test_a_file_that_can_shrink_is_no_shared_memory() -> None:
    fd = os.memfd_create("kvbaton-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    mapping = mmap.mmap(fd, 1 << 16)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    assert shared_place(address, 1 << 16) is None
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert shared_place(address + 4096, 4096) == SharedPlace(fd, os.fstat(fd).st_ino, 4096)
    assert shared_place(address + 4096, 1 << 16) is None, "it ends outside the file"
    os.close(fd)


def test_a_withdrawal_waits_for_a_slice_and_no_longer() -> None:
    table = MemoryTable(20.0)
    handle = table.register(4096, 64)
    table.pin(handle.slot, handle.stamp)
    done = threading.Event()

    def withdraw() -> None:
        table.withdraw(handle.slot, handle.stamp)
        done.set()

    thread = threading.Thread(target=withdraw)
    thread.start()
    assert _poll(lambda: not len(table))
    assert not done.is_set()
    with pytest.raises(RangeError):
        table.pin(handle.slot, handle.stamp)
    table.unpin(handle.slot)
    thread.join(_LIMIT_S)
    assert done.is_set()
    table.check()


def test_a_withdrawal_that_takes_too_long_is_reported() -> None:
    table = MemoryTable(0.01)
    handle = table.register(4096, 64)
    table.pin(handle.slot, handle.stamp)
    with pytest.raises(TransportError, match="did not end"):
        table.withdraw(handle.slot, handle.stamp)


@pytest.mark.parametrize("direction", [_READ, _WRITE])
@pytest.mark.parametrize("size", [64, 1 << 20])
def test_a_notice_is_left_after_the_last_byte(pair: _Pair, direction: Direction, size: int) -> None:
    assert pair.move(direction, _runs((0, 0, size)), tag=11) == ""
    assert _poll(lambda: pair.peer.ask("notice", initiator="here", tag=11))
    assert not pair.peer.ask("notice", initiator="here", tag=12)
    assert not pair.peer.ask("notice", initiator="another", tag=11)


@pytest.mark.parametrize("direction", [_READ, _WRITE])
def test_a_transfer_that_fails_leaves_no_notice(pair: _Pair, direction: Direction) -> None:
    pair.peer.ask("withdraw", slot=pair.remote.slot)
    assert pair.move(direction, _runs((0, 0, 64)), tag=3)
    assert not pair.peer.ask("notice", initiator="here", tag=3)


def test_notices_are_bounded_and_the_oldest_go() -> None:
    notices = NoticeTable(most=10)
    for tag in range(25):
        notices.add("peer", tag)
    assert [tag for tag in range(25) if notices.has("peer", tag)] == list(range(15, 25))
    assert (len(notices), notices.dropped_total) == (10, 15)


def test_nothing_to_move_succeeds_at_once_and_notifies(pair: _Pair) -> None:
    for direction in (_READ, _WRITE):
        for runs in (_runs(), _runs((0, 0, 0), (5, 5, 0))):
            assert pair.move(direction, runs, tag=21) == ""
    assert _poll(lambda: pair.peer.ask("notice", initiator="here", tag=21))


def test_many_threads_share_one_link(pair: _Pair) -> None:
    errors: list[str] = []

    def work(at: int) -> None:
        for step in range(20):
            place = (at * 20 + step) * 512
            errors.append(pair.move(_WRITE if step % 2 else _READ, _runs((place, place, 512)), tag=at * 20 + step))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
    assert errors == [""] * 160
    assert _poll(lambda: all(pair.peer.ask("notice", initiator="here", tag=tag) for tag in range(160)))


def test_a_dead_peer_fails_what_is_in_flight_and_what_follows(pair: _Pair) -> None:
    pause(pair.peer.pid)
    transfer = pair.link.post(TransferRequest(_WRITE, pair.own, pair.remote, _runs((0, 0, 1 << 20))))
    assert not transfer.is_finished()
    pair.peer.process.kill()
    assert transfer.wait(_LIMIT_S)
    assert "Peer" in transfer.error
    assert _poll(lambda: bool(pair.link.failure))
    with pytest.raises(TransportError):
        pair.move(_WRITE, _runs((0, 0, 8)))
    with pytest.raises(PeerError):
        pair.exchange.connect(pair.peer.endpoint)


def test_a_stopped_peer_costs_its_callers_a_bounded_time_and_no_other_peer_any(
    kind: str, open_exchange: Callable[..., MemoryExchange], peer: ExchangePeer
) -> None:
    with exchange_peer(kind) as other:
        exchange = open_exchange(timeout_s=2.0)
        slow, quick = _Pair(exchange, peer, 4096), _Pair(exchange, other, 4096)
        pause(peer.pid)
        stuck = [slow.link.post(TransferRequest(_WRITE, slow.own, slow.remote, _runs((0, 0, 64)))) for _ in range(50)]
        assert quick.move(_WRITE, _runs((0, 0, 64))) == ""
        assert not stuck[0].is_over
        for transfer in stuck:
            assert transfer.wait(_LIMIT_S)
            assert "PeerLost" in transfer.error


def test_a_queue_that_is_full_refuses(open_exchange: Callable[..., MemoryExchange], peer: ExchangePeer) -> None:
    pair = _Pair(open_exchange(max_in_flight=3), peer, 4096)
    pause(peer.pid)
    for _ in range(3):
        pair.link.post(TransferRequest(_WRITE, pair.own, pair.remote, _runs((0, 0, 64))))
    with pytest.raises(QueueFull, match="max_in_flight 3"):
        pair.link.post(TransferRequest(_WRITE, pair.own, pair.remote, _runs((0, 0, 64))))
    os.kill(peer.pid, signal.SIGCONT)


def test_a_restarted_peer_on_the_same_port_is_not_mistaken(kind: str, open_exchange: Callable[..., MemoryExchange]) -> None:
    exchange = open_exchange()
    with exchange_peer(kind) as first:
        old = _Pair(exchange, first, 4096)
        port = int(first.endpoint.details["port"])
    assert _poll(lambda: "cannot" not in _why_not(lambda: socket.create_connection(("127.0.0.1", port)).close()))
    with exchange_peer(kind, port) as second:
        handle = second.register(4096, 3)
        assert handle.slot == old.remote.slot
        with pytest.raises(PeerError, match="token"):
            exchange.connect(first.endpoint)
        new = exchange.connect(second.endpoint)
        transfer = new.post(TransferRequest(_WRITE, old.own, old.remote, _runs((0, 0, 64))))
        assert transfer.wait(_LIMIT_S)
        assert "RangeError" in transfer.error
        assert second.content(handle.slot) == bytes([3]) * 4096


def _why_not(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        return str(error)
    return ""


def _admitted_socket(exchange: MemoryExchange, peer: ExchangePeer) -> socket.socket:
    """The socket of a channel that has authenticated."""
    return exchange.connect(peer.endpoint).sock


def test_garbage_costs_its_connection_only(pair: _Pair) -> None:
    address = ("127.0.0.1", int(pair.peer.endpoint.details["port"]))
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, secrets.token_bytes(4096), b"KVBATON\x03" + bytes(48)):
        with socket.create_connection(address) as sock:
            sock.sendall(data)
    assert pair.move(_WRITE, _runs((0, 0, 4096))) == ""


@pytest.mark.parametrize("what", ["mark", "kind", "runs", "number", "sum", "introduction", "handle", "garbage handle"])
def test_bad_calls_of_an_admitted_peer_end_its_connection_only(
    pair: _Pair, open_exchange: Callable[..., MemoryExchange], what: str
) -> None:
    bad = open_exchange("bad")
    sock = _admitted_socket(bad, pair.peer)
    names = (0, 0, pair.remote.slot, pair.remote.stamp)
    good = MemoryCall(CallKind.FETCH, 1, None, *names, 1, 64)
    frame = bytearray(pack_call(good, _runs((0, 0, 64))))
    assert len(frame) == CALL_BYTES
    if what == "mark":
        frame[0] ^= 1
    elif what == "kind":
        frame[4] = 77
    elif what == "runs":
        frame[8:12] = b"\xff" * 4
    elif what == "number":
        frame[12:20] = bytes(8)
    elif what == "handle":
        frame[6] = 9  # a FETCH has none
    elif what == "garbage handle":
        frame = bytearray(pack_call(msgspec.structs.replace(good, kind=CallKind.PULL), _runs((0, 0, 64)), b"no handle"))
    else:
        frame[-8:] = b"\xff" * 8
    sock.setblocking(True)
    sock.settimeout(_LIMIT_S)
    sock.sendall(frame)
    assert sock.recv(1) == b""
    assert pair.move(_READ, _runs((0, 0, 4096))) == ""
    assert pair.peer.ask("stats")["garbage_total"] >= 1


def test_an_exchange_that_is_dropped_gives_everything_back(kind: str, peer: ExchangePeer) -> None:
    exchange = load(transport_entry(kind).exchange)("dropped", TransportSettings())
    pair = _Pair(exchange, peer, 4096)
    assert pair.move(_WRITE, _runs((0, 0, 64))) == ""
    port, threads = exchange.port, threading.active_count()
    del exchange, pair
    gc.collect()
    assert threading.active_count() < threads
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_a_closed_exchange_fails_what_is_in_flight(pair: _Pair) -> None:
    pause(pair.peer.pid)
    transfer = pair.link.post(TransferRequest(_WRITE, pair.own, pair.remote, _runs((0, 0, 1 << 20))))
    pair.exchange.close()
    pair.exchange.close()
    assert transfer.wait(_LIMIT_S)
    assert "closed" in transfer.error
    with pytest.raises((TransportError, RangeError)):
        pair.move(_WRITE, _runs((0, 0, 8)))


def test_a_transfer_goes_on_when_it_is_dropped(pair: _Pair) -> None:
    pair.link.post(TransferRequest(_WRITE, pair.own, pair.remote, _runs((0, 0, 1 << 20)), tag=5))
    gc.collect()
    assert _poll(lambda: pair.peer.ask("notice", initiator="here", tag=5))
    assert pair.peer.content(pair.remote.slot) == pair.memory.tobytes()
