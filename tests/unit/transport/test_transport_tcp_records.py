"""Records of TLS in C: the same on the wire as OpenSSL's, and what is changed, repeated or left out does not open."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial

import numpy as np
import pytest
from tcp_rig import SOURCE, complete, make

from kvbaton.transport.base import Batch, Direction
from kvbaton.transport.tcp import records, server, transport
from kvbaton.transport.tcp.records import AesRecords, load_records, take_over
from kvbaton.transport.tcp.sockets import TlsCalls, Vectors
from kvbaton.wire.tls import TlsSocket, tls_reason
from tls_files import our_tls

pytestmark = pytest.mark.skipif(load_records() is None, reason="needs a C compiler, and OpenSSL as a library")

SUITES = ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"]
NO_TAKE_OVER: Callable[[TlsSocket], None] = lambda _: None  # noqa: E731


@pytest.fixture
def parts() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def shake_hands(*pairs: tuple[TlsSocket, TlsSocket]) -> None:
    """Handshakes of several connections at once, step by step in turns."""
    waiting = {end for pair in pairs for end in pair}
    for _ in range(6):
        for end in list(waiting):
            try:
                end.do_handshake()
            except BlockingIOError:
                continue
            waiting.discard(end)
    assert not waiting


def pair(parts: ExitStack) -> tuple[TlsSocket, TlsSocket]:
    """A server and a client, before their handshake."""
    one, two = (parts.enter_context(each) for each in socket.socketpair())
    for each in (one, two):
        each.setblocking(False)
    ends = (
        our_tls().data_server.wrap_socket(one, server_side=True, do_handshake_on_connect=False),
        our_tls().data_client.wrap_socket(two, do_handshake_on_connect=False),
    )
    for end in ends:
        parts.enter_context(end)
        assert isinstance(end, TlsSocket)
    return ends  # type: ignore[return-value]


def exchange(sender: TlsSocket, receiver: TlsSocket, data: bytes) -> None:
    """`data` arrives as it was sent."""
    received, at = b"", 0
    while len(received) < len(data):
        with suppress(BlockingIOError):
            at += sender.send(data[at:]) if at < len(data) else 0
        try:
            received += receiver.recv(70_000)
        except BlockingIOError:
            continue
    assert received == data


@pytest.mark.parametrize("who", ["both", "server", "client", "none"])
def test_either_end_may_use_openssl(parts: ExitStack, who: str) -> None:
    ends = pair(parts)
    shake_hands(ends)
    for end, name in zip(ends, ("server", "client"), strict=True):
        if who in ("both", name):
            take_over(end)
        assert (end.records is not None) is (who in ("both", name))
        assert (end.cipher() or ("",))[0] == SUITES[0]
    for size in (1, 5, 16383, 16384, 16385, 300_000):
        exchange(*ends, os.urandom(size))
        exchange(ends[1], ends[0], os.urandom(size))


def test_secrets_of_connections_that_are_made_at_once_are_not_mixed_up(parts: ExitStack) -> None:
    pairs = [pair(parts) for _ in range(4)]
    shake_hands(*pairs)
    for ends in pairs:
        for end in ends:
            take_over(end)
            assert end.records is not None
            assert not end.take_secrets()
        exchange(*ends, os.urandom(40_000))


def test_where_it_is_not_certain_whose_secrets_they_are_openssl_goes_on(parts: ExitStack) -> None:
    ends = pair(parts)
    shake_hands(ends)
    ends[0]._found["another"] = dict(next(iter(ends[0]._found.values())))
    take_over(ends[0])
    assert ends[0].records is None
    exchange(*ends, b"hello")


def test_a_copy_of_the_process_has_secrets_of_its_own(parts: ExitStack) -> None:
    our_tls().data_server  # noqa: B018 - loaded before the copy is made
    child = os.fork()
    if child == 0:  # pragma: no cover - the copy
        code = 1
        try:
            ends = pair(parts)
            shake_hands(ends)
            take_over(ends[0])
            code = 0 if ends[0].records is not None else 2
        finally:
            os._exit(code)
    ends = pair(parts)
    shake_hands(ends)
    take_over(ends[0])
    assert ends[0].records is not None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("who", ["both", "server"])
def test_keys_are_replaced_when_they_are_used_up(parts: ExitStack, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key for four records; OpenSSL at the other end follows, too."""
    monkeypatch.setattr(records, "_MOST_RECORDS", 4)
    ends = pair(parts)
    shake_hands(ends)
    for end in ends if who == "both" else ends[:1]:
        take_over(end)
    first = ends[0].records
    assert isinstance(first, AesRecords)
    secret = first._own
    for _ in range(3):
        exchange(*ends, os.urandom(200_000))
        exchange(ends[1], ends[0], os.urandom(200_000))
    assert first._own != secret


def test_a_socket_that_was_closed_reads_no_other_connection(parts: ExitStack) -> None:
    ends, others = pair(parts), pair(parts)
    shake_hands(ends, others)
    take_over(ends[0])
    number = ends[0].fileno()
    ends[0].close()
    os.dup2(others[0].fileno(), number)
    parts.callback(os.close, number)
    others[1].send(b"for another")
    with pytest.raises(OSError, match=r"[Bb]ad file descriptor"):
        ends[0].recv(100)


def test_an_end_that_closes_in_order_is_the_end(parts: ExitStack) -> None:
    ends = pair(parts)
    shake_hands(ends)
    take_over(ends[0])
    exchange(ends[1], ends[0], b"the last")
    with pytest.raises((ssl.SSLWantReadError, BlockingIOError)):
        ends[1].unwrap()
    assert ends[0].recv(100) == b""


class Wire:
    """Two ends of one direction, and the bytes between them."""

    def __init__(self, parts: ExitStack, suite: str) -> None:
        code = load_records()
        assert code is not None
        secrets = os.urandom(48), os.urandom(48)
        self._sockets = [parts.enter_context(each) for two in range(2) for each in socket.socketpair()]
        for each in self._sockets:
            each.setblocking(False)
        out, self._tap, self._feed, inward = self._sockets
        self.sender = AesRecords(code, out.fileno(), suite, own=secrets[0], peer=secrets[1], most_records=1000)
        self.receiver = AesRecords(code, inward.fileno(), suite, own=secrets[1], peer=secrets[0], most_records=1000)

    def record(self, data: bytes) -> bytes:
        """One record with `data`."""
        assert self.sender.send(data) == len(data)
        return self._tap.recv(20_000)

    def deliver(self, *wire: bytes) -> None:
        for each in wire:
            self._feed.sendall(each)


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(ssl.SSLError) as caught:
        call()
    return tls_reason(caught.value)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("size", [10, 5000])
def test_a_record_that_was_changed_anywhere_does_not_open(parts: ExitStack, suite: str, size: int) -> None:
    for at in (0, 1, 4, 5, size // 2, size + 5, size + 21):
        wire = Wire(parts, suite)
        record = bytearray(wire.record(b"x" * size))
        record[at] ^= 1
        wire.deliver(bytes(record) + bytes(300))
        reason = reason_of(partial(wire.receiver.recv, size))
        assert "bad record mac" in reason or "unexpected message" in reason
        reason_of(partial(wire.receiver.recv, size))  # and nothing after it, either


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [1, 0]], ids=["repeated", "one left out", "one lost", "swapped"])
def test_records_count_once_and_in_order(parts: ExitStack, order: list[int]) -> None:
    wire = Wire(parts, SUITES[0])
    sent = [wire.record(bytes([number]) * 2000) for number in range(3)]
    wire.deliver(*(sent[number] for number in order))
    if order[0] == 0:
        assert wire.receiver.recv(2000) == bytes(2000)
    assert "bad record mac" in reason_of(lambda: wire.receiver.recv(2000))


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"\x17\x03\x03\xff\xff" + bytes(70_000), b"\x17\x03\x03\x00\x10" + bytes(16)]
)
def test_garbage_is_refused(parts: ExitStack, data: bytes) -> None:
    wire = Wire(parts, SUITES[0])
    wire.deliver(data[:20_000])
    assert reason_of(lambda: wire.receiver.recv(100))


def test_what_was_received_and_not_taken_is_pending(parts: ExitStack) -> None:
    wire = Wire(parts, SUITES[0])
    wire.deliver(wire.record(b"abc"), wire.record(b"def"), wire.record(b"ghi")[:-1])
    assert wire.receiver.recv(2) == b"ab"
    assert wire.receiver.pending()
    assert wire.receiver.recv(100) == b"c"[:1] + b"def"
    assert not wire.receiver.pending()
    with pytest.raises(BlockingIOError):
        wire.receiver.recv(100)


@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_any_size_are_moved_whole_through_a_socket_that_fills(parts: ExitStack, seed: int) -> None:
    """Records are sent in part again and again; what counts as sent has been sent."""
    dice, ends, calls = random.Random(seed), pair(parts), TlsCalls()
    shake_hands(ends)
    for end in ends[: 1 + seed % 2]:
        take_over(end)
    total = 3_000_000
    content, target = np.frombuffer(dice.randbytes(total), np.uint8), np.zeros(total, np.uint8)

    def pieces(array: np.ndarray) -> Vectors:
        cuts = sorted({0, total, *(dice.randrange(total) for _ in range(dice.choice([0, 3, 900])))})
        sizes = [[array.ctypes.data + one, two - one] for one, two in itertools.pairwise(cuts)]
        return Vectors(np.array(sizes, np.uint64), array)

    outgoing, incoming = pieces(content), pieces(target)
    while incoming.remaining_bytes:
        for move, end, vectors in ((calls.send, ends[0], outgoing), (calls.receive, ends[1], incoming)):
            try:
                if vectors.remaining_bytes:
                    assert move(end, vectors) > 0
            except BlockingIOError:
                continue
    assert not outgoing.remaining_bytes
    assert np.array_equal(content, target)


@pytest.mark.parametrize("without", [(), (server,), (transport,)], ids=["both", "the target", "the source"])
def test_transports_read_with_records_of_either_kind(without: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in without:
        monkeypatch.setattr(module, "take_over", NO_TAKE_OVER)
    size = 5_000_000
    content = os.urandom(size)
    with (
        closing(make("source", content, tls=our_tls())) as source,
        closing(make("target", bytes(size), tls=our_tls())) as target,
    ):
        target.connect(SOURCE, source.endpoint())
        for _ in range(3):
            ctypes.memset(target._region.address, 0, size)
            target.post(Batch(SOURCE, Direction.READ, np.array([[0, 0, size]], np.uint64)))
            assert complete(target).error == ""
            assert bytes(target._region.view) == content
        kinds = {reader.sock.records is not None for reader in source._server._readers if isinstance(reader.sock, TlsSocket)}
        assert kinds == {server not in without}
