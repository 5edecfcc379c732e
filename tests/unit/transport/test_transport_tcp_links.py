"""Connections of `tcp` in trouble: foreign owners, slow ones, streams that do not open, more readers than there is room for."""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tcp_rig import (
    CHALLENGE,
    CONTENT,
    NONCE,
    ONE_RUN,
    SOURCE,
    TOKEN,
    complete,
    dial,
    endpoint_of,
    is_closed,
    make,
    read,
    secret_of,
    shake_hands,
    take,
    welcome,
)

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import TransportError
from kvbaton.transport.base import Batch, Direction, PeerRank, Region, TransportSettings
from kvbaton.transport.tcp import TcpTransport, server
from kvbaton.transport.tcp import transport as tcp_transport
from kvbaton.transport.tcp.sockets import tune
from kvbaton.transport.tcp.transport import TcpLink
from kvbaton.transport.tcp.wire import (
    HANDSHAKE_BYTES,
    HELLO_BYTES,
    MAX_PIECES,
    PIECE_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    Secret,
    Status,
    pack_hello,
    pack_reply,
    pack_request,
    unpack_handshake,
    unpack_hello,
    unpack_reply,
)
from watching import wait_until

OTHER = PeerRank(Incarnation("other"))
BIG = 32 << 20
SLOW_BYTES = 2 << 20


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(20)
        yield made


def pause(seconds: float) -> None:
    """The pace of somebody slow."""
    select.select([], [], [], seconds)


def of_the_owner(handshake: bytes) -> bytes:
    return Secret(TOKEN, b"", "").owner_proof(CHALLENGE, unpack_handshake(handshake))


def of_another_key(handshake: bytes) -> bytes:
    return Secret(TOKEN, b"another key", "").owner_proof(CHALLENGE, unpack_handshake(handshake))


def of_an_earlier_time(_handshake: bytes) -> bytes:
    return Secret(TOKEN, b"", "").owner_proof(CHALLENGE, NONCE)


def of_the_reader_itself(handshake: bytes) -> bytes:
    return handshake[-PROOF_BYTES:]


@pytest.mark.parametrize(
    ("proof", "error"),
    [(of_the_owner, ""), (of_another_key, "PeerLost"), (of_an_earlier_time, "PeerLost"), (of_the_reader_itself, "PeerLost")],
)
def test_bytes_are_taken_from_the_owner_of_the_card_only(
    listener: socket.socket, proof: Callable[[bytes], bytes], error: str
) -> None:
    memory = bytearray(64)
    target = TcpTransport(Region.of(memory), TransportSettings())
    target.connect(SOURCE, endpoint_of(listener))
    target.post(Batch(SOURCE, Direction.READ, ONE_RUN))
    with listener.accept()[0] as owner:
        owner.sendall(pack_hello(CHALLENGE))
        owner.sendall(pack_reply(Status.OK, 0, PROOF_BYTES) + proof(take(owner, HANDSHAKE_BYTES)))
        if not error:
            take(owner, REQUEST_BYTES + PIECE_BYTES)
        owner.sendall(pack_reply(Status.OK, 1, 16) + b"x" * 16)
        completion = complete(target)
        assert completion.error.split(":")[0] == error
        assert memory.count(b"x") == (0 if error else 16)
        if error:
            assert "token of the peer's card and the cluster key" in completion.error
            assert is_closed(owner)
    target.close()


def test_a_trickle_is_progress(listener: socket.socket) -> None:
    memory = bytearray(SLOW_BYTES)
    target = TcpTransport(Region.of(memory), TransportSettings(timeout_s=0.6))
    target.connect(SOURCE, endpoint_of(listener, SLOW_BYTES))
    target.post(Batch(SOURCE, Direction.READ, np.array([[0, 0, SLOW_BYTES]], np.uint64)))
    with listener.accept()[0] as owner:
        welcome(owner)
        take(owner, REQUEST_BYTES + PIECE_BYTES)
        owner.sendall(pack_reply(Status.OK, 1, SLOW_BYTES))
        sent = 0
        while sent < 30 * 1024 and not select.select([target.wakeup_fd], [], [], 0)[0]:
            owner.sendall(b"x" * 1024)
            sent += 1024
            pause(0.05)
        owner.sendall(b"x" * (SLOW_BYTES - sent))
        assert complete(target).error == ""
    assert memory.count(b"x") == SLOW_BYTES
    target.close()


def test_a_stream_that_stops_is_no_trickle(listener: socket.socket) -> None:
    target = make("target", bytes(SLOW_BYTES), timeout_s=0.3)
    target.connect(SOURCE, endpoint_of(listener, SLOW_BYTES))
    target.post(Batch(SOURCE, Direction.READ, np.array([[0, 0, SLOW_BYTES]], np.uint64)))
    with listener.accept()[0] as owner:
        welcome(owner)
        take(owner, REQUEST_BYTES + PIECE_BYTES)
        owner.sendall(pack_reply(Status.OK, 1, SLOW_BYTES) + b"x" * 1024)
        assert "no progress within 0.3 s" in complete(target).error
    target.close()


@pytest.mark.parametrize("last_words", [b"", b"no reply of ours, at least 24 bytes"])
def test_an_answer_counts_when_the_connection_ends_right_behind_it(listener: socket.socket, last_words: bytes) -> None:
    target = make("target")
    target.connect(SOURCE, endpoint_of(listener))
    target.post(Batch(SOURCE, Direction.READ, ONE_RUN))
    with listener.accept()[0] as owner:
        welcome(owner)
        take(owner, REQUEST_BYTES + PIECE_BYTES)
        owner.sendall(pack_reply(Status.OK, 1, 16) + b"x" * 16 + last_words)
    completion = complete(target)
    assert (completion.moved_bytes, completion.error) == (16, "")
    target.close()


def test_connections_of_a_peer_that_are_lost_at_once_cost_that_peer_only(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have requests that the socket does not take, so the mover may write to both in one turn."""

    def tune_small(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        tune(sock)

    monkeypatch.setattr(tcp_transport, "tune", tune_small)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    runs = np.zeros((4 * MAX_PIECES, 3), np.uint64)
    runs[:, 0] = runs[:, 1] = np.arange(len(runs), dtype=np.uint64) * np.uint64(16)
    runs[:, 2] = 8
    target, other = make("target", bytes(16 * len(runs))), make("other", CONTENT)
    target.connect(SOURCE, endpoint_of(listener, 16 * len(runs)))
    target.connect(OTHER, other.endpoint())
    lost = target.post(Batch(SOURCE, Direction.READ, runs))
    owners = [welcomed(listener), welcomed(listener)]
    links = target._ledger.links()[0].links
    wait_until(lambda: all(each.request_count == 2 and each.has_to_write for each in links), "both are full of requests")
    is_held, may_go_on = threading.Event(), threading.Event()

    def holds_the_mover() -> bool:
        is_held.set()
        return may_go_on.wait(20)

    whole = target.post(Batch(OTHER, Direction.READ, ONE_RUN), after=holds_the_mover)
    assert is_held.wait(20)
    for owner in owners:
        owner.close()
    may_go_on.set()
    errors: dict[int, str] = {}
    while len(errors) < 2:
        assert select.select([target.wakeup_fd], [], [], 20)[0]
        errors |= {completion.ticket: completion.error for completion in target.poll()}
    assert errors[lost].startswith("PeerLost")
    assert errors[whole] == ""
    target.close()
    other.close()


def welcomed(listener: socket.socket) -> socket.socket:
    owner = listener.accept()[0]
    welcome(owner)
    return owner


def test_a_reader_that_takes_little_at_a_time_is_served_to_the_end() -> None:
    source = make("source", bytes(BIG), timeout_s=0.6)
    with dial(source.endpoint()) as reader:
        shake_hands(reader, source.endpoint())
        reader.sendall(pack_request(1, np.array([[0, 0, BIG]], np.uint64)))
        assert unpack_reply(take(reader, REPLY_BYTES)).payload_bytes == BIG
        left = BIG
        for _ in range(30):
            left -= len(reader.recv(16 << 10))
            pause(0.05)
        take(reader, left)
    source.close()


def test_a_reader_that_takes_nothing_is_let_go() -> None:
    source = make("source", bytes(BIG), timeout_s=0.3)
    with dial(source.endpoint()) as reader:
        shake_hands(reader, source.endpoint())
        reader.sendall(pack_request(1, np.array([[0, 0, BIG]], np.uint64)))
        wait_until(lambda: not source._server._readers, "the reader is let go")
    source.close()


@pytest.mark.parametrize("why", ["max_peers", "Too many open files"])
def test_a_further_stream_that_does_not_open_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    opened = TcpLink.open
    tries: list[TcpLink] = []

    def open_first_only(link: TcpLink) -> socket.socket:
        tries.append(link)
        if why != "max_peers" and link.owner is not None and link is not link.owner.links[0]:
            raise OSError(errno.EMFILE, why)
        return opened(link)

    monkeypatch.setattr(TcpLink, "open", open_first_only)
    content = np.arange(BIG, dtype=np.uint32).view(np.uint8)[:BIG].tobytes()
    source, memory = make("source", content, max_peers=1, streams=1 if why == "max_peers" else 2), bytearray(BIG)
    target = TcpTransport(Region.of(memory), TransportSettings(streams=2))
    target.connect(SOURCE, source.endpoint())
    with caplog.at_level(logging.WARNING, "kvbaton.transport"):
        for _ in range(3):
            target.post(Batch(SOURCE, Direction.READ, np.array([[0, 0, BIG]], np.uint64)))
            assert complete(target).error == ""
    assert bytes(memory) == content
    assert [why in record.getMessage() for record in caplog.records] == [True]
    assert len(tries) == 2
    target.close()
    source.close()


def test_a_reader_beyond_the_limit_is_refused_with_its_name() -> None:
    source, target = make("source", CONTENT, max_peers=1, streams=1), make("target")
    with dial(source.endpoint()) as first:
        shake_hands(first, source.endpoint())
        target.connect(SOURCE, source.endpoint())
        refused = read(target).error
        assert refused.startswith("PeerRefused")
        assert "settings max_peers (1) times streams (1)" in refused
        wait_until(lambda: source._server.refused_total == 1, "the refusal is counted")
    wait_until(lambda: not source._server._readers, "the first reader has left")
    assert read(target).error == ""
    target.close()
    source.close()


def test_unknown_connections_take_no_places_from_readers() -> None:
    source, target = make("source", CONTENT, max_peers=1, streams=1), make("target", streams=1)
    others = [dial(source.endpoint()) for _ in range(3)]
    wait_until(lambda: len(source._server._unknown) == 3, "the others are in")
    target.connect(SOURCE, source.endpoint())
    assert read(target).error == ""
    for other in others:
        other.close()
    target.close()
    source.close()


def test_unknown_connections_have_few_places_and_the_oldest_silent_one_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_UNKNOWN", 3)
    source = make("source", CONTENT)
    half, first, second = (dial(source.endpoint()) for _ in range(3))
    half.sendall(secret_of(source.endpoint()).handshake(unpack_hello(take(half, HELLO_BYTES)), NONCE)[:20])
    wait_until(lambda: sum(not reader.is_silent for reader in source._server._unknown) == 1, "one has begun its handshake")
    third, fourth = (dial(source.endpoint()) for _ in range(2))
    assert is_closed(first)
    assert is_closed(second)
    shake_hands(fourth, source.endpoint())
    wait_until(lambda: len(source._server._unknown) == 2, "the last one is a reader now")
    for sock in (half, first, second, third, fourth):
        sock.close()
    source.close()


def test_400_silent_connections_delay_no_new_peer() -> None:
    source, target = make("source", CONTENT), make("target")
    silent = [dial(source.endpoint()) for _ in range(400)]
    target.connect(SOURCE, source.endpoint())
    started = time.monotonic()
    assert read(target).error == ""
    assert time.monotonic() - started < 20.0, "it took 38 s where each silent connection was waited for"
    assert len(source._server._unknown) <= server._MAX_UNKNOWN
    for sock in silent:
        sock.close()
    target.close()
    source.close()


def test_a_reader_is_served_while_silent_connections_keep_coming() -> None:
    """A reader has a place that no unknown connection takes, and a new one gets in between them."""
    source, stopping = make("source", CONTENT), threading.Event()

    def flood() -> None:
        kept: deque[socket.socket] = deque()
        while not stopping.is_set():
            with contextlib.suppress(OSError):
                kept.append(dial(source.endpoint()))
            if len(kept) > 300:
                kept.popleft().close()
        for sock in kept:
            sock.close()

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        wait_until(lambda: len(source._server._unknown) >= server._MAX_UNKNOWN, "the places are taken")
        for _ in range(5):
            target = make("target")
            target.connect(SOURCE, source.endpoint())
            assert [read(target).error for _ in range(5)] == [""] * 5
            target.close()
    finally:
        stopping.set()
        flooder.join(20)
    source.close()


def test_the_address_with_the_most_unknown_connections_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_UNKNOWN", 3)
    source = make("source", CONTENT)
    place = (str(source.endpoint().details["host"]), int(source.endpoint().details["port"]))
    alone = socket.create_connection(place, timeout=20, source_address=("127.0.0.2", 0))
    many = [dial(source.endpoint()) for _ in range(6)]
    wait_until(lambda: len(source._server._unknown) == 3, "the places are taken")
    assert all(is_closed(sock) for sock in many[:4])
    shake_hands(alone, source.endpoint())
    for sock in (alone, *many):
        sock.close()
    source.close()


def test_a_connection_from_an_address_that_is_not_admitted_is_closed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    source = make("source", CONTENT, admits=lambda address: address == "127.0.0.1")
    place = (str(source.endpoint().details["host"]), int(source.endpoint().details["port"]))
    with caplog.at_level("WARNING", "kvbaton.transport"):
        for _ in range(3):
            with socket.create_connection(place, timeout=20, source_address=("127.0.0.2", 0)) as other:
                assert take_all(other) == b""
    wait_until(lambda: source._server.refused_total == 3, "the refusals are counted")
    assert [record.getMessage() for record in caplog.records if "127.0.0.2" in record.getMessage()][1:] == []
    target = make("target")
    target.connect(SOURCE, source.endpoint())
    assert read(target).error == ""
    target.close()
    source.close()


def test_an_address_that_is_not_admitted_is_not_dialled() -> None:
    source, target = make("source", CONTENT), make("target", admits=lambda address: address != "127.0.0.1")
    with pytest.raises(TransportError, match=r"host 127\.0\.0\.1 is not on the allow-list; add it with --allow"):
        target.connect(SOURCE, source.endpoint())
    target.close()
    source.close()


def take_all(sock: socket.socket) -> bytes:
    """What comes until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(4096):
            data += part
    return data


def test_unknown_connections_that_stay_silent_are_ended() -> None:
    source = make("source", timeout_s=0.2)
    with dial(source.endpoint()) as silent:
        assert is_closed(silent)
    source.close()


def test_an_unknown_connection_does_not_renew_its_deadline_byte_by_byte() -> None:
    source = make("source", timeout_s=0.4)
    with dial(source.endpoint()) as other:
        handshake = secret_of(source.endpoint()).handshake(unpack_hello(take(other, HELLO_BYTES)), NONCE)
        closed = threading.Event()

        def watch() -> None:
            is_closed(other)
            closed.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        sent = 0
        while sent < HANDSHAKE_BYTES - 1 and not closed.wait(0.05):
            try:
                sent += other.send(handshake[sent : sent + 1])
            except OSError:
                break
        watcher.join(20)
        assert sent < HANDSHAKE_BYTES - 1
    assert source._server.garbage_total == 0
    source.close()
