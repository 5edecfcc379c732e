"""Connections of `tcp` in trouble: foreign owners, slow ones, streams that do not open, more readers than there is room for."""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
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
    greet,
    is_closed,
    make,
    read,
    secret_of,
    take,
    welcome,
)

from kvbaton.core.handoff import Incarnation
from kvbaton.transport.base import Batch, Direction, PeerRank, Region, TransportSettings
from kvbaton.transport.tcp import TcpTransport, link, server
from kvbaton.transport.tcp.link import TcpLink
from kvbaton.transport.tcp.sockets import tune
from kvbaton.transport.tcp.wire import (
    GREETING_BYTES,
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
    unpack_greeting,
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


def of_the_owner(greeting: bytes) -> bytes:
    return Secret(TOKEN, b"", "").owner_proof(CHALLENGE, unpack_greeting(greeting))


def of_another_key(greeting: bytes) -> bytes:
    return Secret(TOKEN, b"another key", "").owner_proof(CHALLENGE, unpack_greeting(greeting))


def of_an_earlier_time(_greeting: bytes) -> bytes:
    return Secret(TOKEN, b"", "").owner_proof(CHALLENGE, NONCE)


def of_the_reader_itself(greeting: bytes) -> bytes:
    return greeting[-PROOF_BYTES:]


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
        owner.sendall(pack_reply(Status.OK, 0, PROOF_BYTES) + proof(take(owner, GREETING_BYTES)))
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
    """Both have requests that the socket does not take, so the mover is told of both, that it can write, in one turn."""

    def tune_small(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        tune(sock)

    monkeypatch.setattr(link, "tune", tune_small)
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
    wait_until(lambda: all(each.request_count == 2 and each.wants_write for each in links), "both are full of requests")
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
        greet(reader, source.endpoint())
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
        greet(reader, source.endpoint())
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


def test_a_reader_beyond_the_limit_is_told_its_name() -> None:
    source, target = make("source", CONTENT, max_peers=1, streams=1), make("target")
    with dial(source.endpoint()) as first:
        greet(first, source.endpoint())
        target.connect(SOURCE, source.endpoint())
        refused = read(target).error
        assert refused.startswith("PeerRefused")
        assert "settings max_peers (1) times streams (1)" in refused
        wait_until(lambda: source.refused_total == 1, "the refusal is counted")
    wait_until(lambda: not source._server._readers, "the first reader has left")
    assert read(target).error == ""
    target.close()
    source.close()


def test_strangers_take_no_places_from_readers() -> None:
    source, target = make("source", CONTENT, max_peers=1, streams=1), make("target", streams=1)
    strangers = [dial(source.endpoint()) for _ in range(3)]
    wait_until(lambda: len(source._server._strangers) == 3, "the strangers are in")
    target.connect(SOURCE, source.endpoint())
    assert read(target).error == ""
    for stranger in strangers:
        stranger.close()
    target.close()
    source.close()


def test_strangers_have_few_places_and_the_next_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_STRANGERS", 2)
    source = make("source", CONTENT)
    first, second, third = (dial(source.endpoint()) for _ in range(3))
    wait_until(lambda: not source._server._is_accepting, "the places are taken")
    assert len(source._server._strangers) == 2
    first.close()
    greet(third, source.endpoint())
    wait_until(lambda: len(source._server._strangers) == 1, "the third one is a reader now")
    for sock in (second, third):
        sock.close()
    source.close()


def test_strangers_that_say_nothing_are_let_go() -> None:
    source = make("source", timeout_s=0.2)
    with dial(source.endpoint()) as silent:
        assert is_closed(silent)
    source.close()


def test_a_stranger_does_not_renew_its_deadline_byte_by_byte() -> None:
    source = make("source", timeout_s=0.4)
    with dial(source.endpoint()) as stranger:
        greeting = secret_of(source.endpoint()).greeting(unpack_hello(take(stranger, HELLO_BYTES)), NONCE)
        closed = threading.Event()

        def watch() -> None:
            is_closed(stranger)
            closed.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        sent = 0
        while sent < GREETING_BYTES - 1 and not closed.wait(0.05):
            try:
                sent += stranger.send(greeting[sent : sent + 1])
            except OSError:
                break
        watcher.join(20)
        assert sent < GREETING_BYTES - 1
    assert source.garbage_total == 0
    source.close()
