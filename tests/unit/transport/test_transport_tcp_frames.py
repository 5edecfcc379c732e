"""Frames of writers, by hand: what is no frame, or none of a stream, ends that connection and stores nothing."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tcp_rig import dial, is_closed, make, shake_hands, take

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ProtocolError
from kvbaton.transport.base import Arrival, PeerRank
from kvbaton.transport.tcp import TcpTransport
from kvbaton.transport.tcp.wire import (
    MAX_NOTICE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PIECES,
    RECENT_FRAMES,
    REPLY_BYTES,
    REQUEST_BYTES,
    OpenBody,
    ReplyHead,
    RequestKind,
    Status,
    pack_ends,
    pack_frame,
    pack_open,
    unpack_ends,
    unpack_frame,
    unpack_open,
    unpack_reply,
    unpack_request,
    writer_name,
)
from watching import wait_until

WRITER = PeerRank(Incarnation("writer"))


@pytest.fixture
def owner() -> Iterator[TcpTransport]:
    made = make("owner", bytes(64), fenced_writes=True)
    yield made
    made.close()


@pytest.fixture
def writer(owner: TcpTransport) -> Iterator[socket.socket]:
    """A connection of a writer that the owner has connected; no stream yet."""
    other = make("writer", fenced_writes=True)
    owner.connect(WRITER, other.endpoint())
    with dial(owner.endpoint()) as sock:
        shake_hands(sock, owner.endpoint())
        yield sock
    other.close()


def _name(owner: TcpTransport) -> bytes:
    endpoint = owner._ledger.endpoint_of(WRITER)
    assert endpoint is not None
    return writer_name(bytes.fromhex(str(endpoint.details["token"])))


def _open(sock: socket.socket, owner: TcpTransport) -> None:
    sock.sendall(pack_open(1, OpenBody(_name(owner), 7, 0)))
    assert _reply(sock) == (ReplyHead(Status.OK, 1, 0), b"")


def _reply(sock: socket.socket) -> tuple[ReplyHead, bytes]:
    head = unpack_reply(take(sock, REPLY_BYTES))
    return head, take(sock, head.payload_bytes)


def _memory(owner: TcpTransport) -> bytes:
    return bytes(owner._region.view)


def _runs(*rows: tuple[int, int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array([(0, offset, size) for offset, size in rows], np.uint64).reshape(-1, 3)


def test_a_frame_is_stored_and_its_notice_handed_out(owner: TcpTransport, writer: socket.socket) -> None:
    _open(writer, owner)
    writer.sendall(pack_frame(2, 0, 1, b"done", _runs((3, 4), (60, 4))) + b"abcdwxyz")
    assert _reply(writer) == (ReplyHead(Status.OK, 2, 0), b"")
    assert _memory(owner)[:8] + _memory(owner)[56:] == bytes(3) + b"abcd" + bytes(5) + b"wxyz"
    assert owner.take_arrivals() == [Arrival(WRITER, b"done", 8)]


def test_a_frame_arrives_byte_by_byte(owner: TcpTransport, writer: socket.socket) -> None:
    _open(writer, owner)
    for byte in pack_frame(2, 0, 1, b"n", _runs((0, 4))) + b"abcd":
        writer.sendall(bytes([byte]))
    assert _reply(writer)[0].status is Status.OK
    assert _memory(owner)[:4] == b"abcd"


def test_what_is_refused_costs_that_frame_only(owner: TcpTransport, writer: socket.socket) -> None:
    _open(writer, owner)
    owner.fence_peer(WRITER, 5)
    writer.sendall(pack_frame(2, 4, 1, b"", _runs((0, 4))) + b"late")
    writer.sendall(pack_frame(3, 5, 2, b"", _runs((2**63, 4))) + b"wild")
    writer.sendall(pack_frame(4, 5, 3, b"", _runs((62, 4))) + b"over")
    writer.sendall(pack_frame(5, 5, 4, b"", _runs((0, 4))) + b"good")
    statuses = [_reply(writer)[0].status for _ in range(4)]
    assert statuses == [Status.STALE, Status.RANGE, Status.RANGE, Status.OK]
    assert _memory(owner) == b"good" + bytes(60)
    with dial(owner.endpoint()) as again:
        shake_hands(again, owner.endpoint())
        again.sendall(pack_open(9, OpenBody(_name(owner), 7, 0, resumes=True)))
        assert unpack_ends(_reply(again)[1]) == {2: Status.STALE, 3: Status.RANGE, 4: Status.RANGE, 5: Status.OK}
        assert is_closed(writer), "another connection goes on with its stream"


_BAD = {
    "a frame without a stream": pack_frame(2, 0, 1, b"", _runs((0, 4))) + b"evil",
    "no mark": b"EVIL" + bytes(12),
    "no pieces": struct.pack("<4sIQ", b"WRIT", 0, 2),
    "too many pieces": struct.pack("<4sIQ", b"WRIT", MAX_PIECES + 1, 2),
    "a notice that is too long": struct.pack("<4sIQ", b"WRIT", 1 | (MAX_NOTICE_BYTES + 1) << 16, 2),
    "an opening with pieces": struct.pack("<4sIQ", b"OPEN", 3, 2),
    "a frame that is too long": pack_frame(2, 0, 1, b"", _runs((0, MAX_PAYLOAD_BYTES), (0, 1))),
}


@pytest.mark.parametrize("sent", _BAD.values(), ids=_BAD)
def test_garbage_ends_its_connection_and_is_counted(owner: TcpTransport, writer: socket.socket, sent: bytes) -> None:
    writer.sendall(sent)
    assert is_closed(writer)
    wait_until(lambda: owner._server.garbage_total == 1, "it is counted")
    assert _memory(owner) == bytes(64)


def test_a_writer_that_sends_before_its_stream_is_open_is_garbage(owner: TcpTransport) -> None:
    with dial(owner.endpoint()) as sock:
        shake_hands(sock, owner.endpoint())
        sock.sendall(pack_open(1, OpenBody(bytes(16), 7, 0)) + b"impatient")
        assert is_closed(sock)


def test_openings_that_cannot_be_are_refused_by_name() -> None:
    reader = make("reader")
    taker = make("taker", fenced_writes=True, timeout_s=20)
    other = make("writer", fenced_writes=True)
    try:
        taker.connect(WRITER, other.endpoint())
        name = writer_name(other._server.secret.token)
        for owner, body, words in (
            (reader, OpenBody(name, 1, 0), b"takes no writes; set fenced_writes"),
            (taker, OpenBody(name, 1, 0, resumes=True), b"the session was torn down"),
            (taker, OpenBody(name, 1, 64), b"at most 64"),
        ):
            with dial(owner.endpoint()) as sock:
                shake_hands(sock, owner.endpoint())
                sock.sendall(pack_open(1, body))
                head, text = _reply(sock)
                assert head.status is Status.REFUSED
                assert words in text
    finally:
        for each in (reader, taker, other):
            each.close()


@given(st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES))
def test_any_head_is_a_request_within_limits_or_none(data: bytes) -> None:
    for mark in (b"", *(kind.value for kind in RequestKind)):
        try:
            head = unpack_request(mark + data[len(mark) :])
        except ProtocolError:
            continue
        assert head.count <= MAX_PIECES
        assert head.notice_bytes <= MAX_NOTICE_BYTES
        assert head.body_bytes <= 1 << 20


@given(st.binary(max_size=200))
def test_any_answer_to_an_opening_is_read_or_refused(data: bytes) -> None:
    try:
        ends = unpack_ends(data)
    except ProtocolError:
        return
    assert len(ends) <= len(data) // 12


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.binary(max_size=64), st.integers(1, 9))
def test_what_was_packed_is_unpacked(epoch: int, batch: int, notice: bytes, count: int) -> None:
    runs = _runs(*((n * 8, 8) for n in range(count)))
    data = pack_frame(3, epoch, batch, notice, runs)
    head = unpack_request(data[:REQUEST_BYTES])
    assert (head.kind, head.request_id, len(data)) == (RequestKind.WRITE, 3, REQUEST_BYTES + head.body_bytes)
    frame = unpack_frame(data[REQUEST_BYTES:], head.notice_bytes)
    assert (frame.epoch, frame.batch, frame.notice) == (epoch, batch, notice)
    assert np.array_equal(frame.pieces, runs[:, 1:])
    body = OpenBody(bytes(16), epoch, count, resumes=True)
    assert unpack_open(pack_open(1, body)[REQUEST_BYTES:]) == body
    ends = [(number, Status.OK) for number in range(RECENT_FRAMES)]
    assert unpack_ends(pack_ends(ends)) == dict(ends)
