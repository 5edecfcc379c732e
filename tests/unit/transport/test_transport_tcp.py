"""What only `tcp` has: a port that strangers can reach."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tcp_rig import (
    CHALLENGE,
    CONTENT,
    NONCE,
    ONE_RUN,
    SOURCE,
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
from kvbaton.errors import ConfigError, ProtocolError, TransportError
from kvbaton.transport.base import Batch, Direction, PeerRank, Region, TransportSettings
from kvbaton.transport.tcp import TcpTransport
from kvbaton.transport.tcp.wire import (
    HELLO_BYTES,
    PIECE_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    Status,
    pack_hello,
    pack_reply,
    pack_request,
    unpack_hello,
    unpack_pieces,
    unpack_reply,
    unpack_request,
)
from watching import wait_until


@pytest.fixture(autouse=True, params=["C", "NumPy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loops in C that lay requests and replies out, where there is a compiler, and without."""
    if request.param == "NumPy":
        monkeypatch.setattr("kvbaton.transport.tcp.transport.load_loops", lambda: None)


@pytest.fixture
def source() -> Iterator[TcpTransport]:
    made = make("source", CONTENT)
    yield made
    made.close()


@pytest.fixture
def target() -> Iterator[TcpTransport]:
    made = make("target")
    yield made
    made.close()


def test_ports_are_found_below_the_ephemeral_ones(source: TcpTransport) -> None:
    assert 1024 < int(source.endpoint().details["port"]) < 32768


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_both_address_families_work(target: TcpTransport, host: str) -> None:
    source = make("source", CONTENT, host=host)
    target.connect(SOURCE, source.endpoint())
    assert read(target).error == ""
    source.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: localhost:8000\r\n\r\n", bytes(64), b"KVBATON\x02" + bytes(32)])
def test_garbage_closes_that_connection_only(source: TcpTransport, target: TcpTransport, garbage: bytes) -> None:
    target.connect(SOURCE, source.endpoint())
    assert read(target).error == ""
    with dial(source.endpoint()) as stranger:
        stranger.sendall(garbage)
        assert is_closed(stranger)
    assert source._server.garbage_total == 1
    assert read(target).error == ""


@pytest.mark.parametrize(
    "garbage",
    [
        b"WHAT" + bytes(12),
        struct.pack("<4sIQ", b"READ", 0, 1),
        struct.pack("<4sIQ", b"READ", 8193, 1),
        struct.pack("<4sIQQQ", b"READ", 1, 1, 0, 1 << 40),
        struct.pack("<4sIQQQQQ", b"READ", 2, 1, 0, 2**63, 0, 2**63),
    ],
    ids=["mark", "no pieces", "too many pieces", "too many bytes", "sum wraps"],
)
def test_garbage_after_the_handshake_closes_that_connection_only(
    source: TcpTransport, target: TcpTransport, garbage: bytes
) -> None:
    target.connect(SOURCE, source.endpoint())
    with dial(source.endpoint()) as stranger:
        shake_hands(stranger, source.endpoint())
        stranger.sendall(garbage)
        assert is_closed(stranger)
    assert source._server.garbage_total == 1
    assert read(target).error == ""


def test_the_owner_checks_ranges_itself(source: TcpTransport) -> None:
    with dial(source.endpoint()) as reader:
        shake_hands(reader, source.endpoint())
        for offset, count in ((60, 8), (2**64 - 4, 8), (65, 0)):
            reader.sendall(pack_request(7, np.array([[offset, 0, count]], np.uint64)))
            reply = unpack_reply(take(reader, REPLY_BYTES))
            assert (reply.status, reply.request_id) == (Status.RANGE, 7)
            assert b"source region of 64 bytes" in take(reader, reply.payload_bytes)
        reader.sendall(pack_request(8, np.array([[60, 0, 4], [0, 0, 2]], np.uint64)))
        assert unpack_reply(take(reader, REPLY_BYTES)).payload_bytes == 6
        assert take(reader, 6) == CONTENT[60:] + CONTENT[:2]


@pytest.mark.parametrize("step", [1, 7, 33, 1000])
def test_requests_are_answered_in_order_in_whatever_portions_they_come(source: TcpTransport, step: int) -> None:
    good = [pack_request(number, np.array([[number, 0, 3], [40, 0, number]], np.uint64)) for number in range(8)]
    bad = pack_request(8, np.array([[65, 0, 1]], np.uint64))
    sent = b"".join([*good[:4], bad, *good[4:]])
    with dial(source.endpoint()) as reader:
        shake_hands(reader, source.endpoint())
        reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), step):
            reader.sendall(sent[at : at + step])
        for number in (0, 1, 2, 3, 8, 4, 5, 6, 7):
            reply = unpack_reply(take(reader, REPLY_BYTES))
            assert reply.request_id == number
            data = take(reader, reply.payload_bytes)
            if number < 8:
                assert data == CONTENT[number : number + 3] + CONTENT[40 : 40 + number]
            else:
                assert (reply.status, data[:6]) == (Status.RANGE, b"run 0:")


def test_a_region_that_is_smaller_than_its_card_says_fails_the_batch_only(source: TcpTransport, target: TcpTransport) -> None:
    target.connect(SOURCE, msgspec.structs.replace(source.endpoint(), region_bytes=1000))
    target.post(Batch(SOURCE, Direction.READ, np.array([[900, 0, 16]], np.uint64)))
    assert complete(target).error.startswith("RangeError")
    assert read(target).error == ""


def test_a_wrong_cluster_key_is_refused_and_the_right_one_admitted(target: TcpTransport) -> None:
    source, friend = make("source", CONTENT, cluster_key=b"k" * 16), make("friend", cluster_key=b"k" * 16)
    for reader in (target, friend):
        reader.connect(SOURCE, source.endpoint())
    refused = read(target)
    assert refused.error.startswith("PeerRefused")
    assert "cluster key" in refused.error
    assert read(friend).error == ""
    friend.close()
    source.close()


def test_an_overheard_handshake_is_worth_nothing(source: TcpTransport) -> None:
    with dial(source.endpoint()) as reader:
        overheard = secret_of(source.endpoint()).handshake(unpack_hello(take(reader, HELLO_BYTES)), NONCE)
    with dial(source.endpoint()) as thief:
        take(thief, HELLO_BYTES)
        thief.sendall(overheard)
        assert unpack_reply(take(thief, REPLY_BYTES)).status is Status.REFUSED


def test_large_batches_use_several_streams_and_small_ones_one() -> None:
    source, target = make("source", bytes(64 << 20), streams=3), make("target", bytes(64 << 20), streams=3)
    target.connect(SOURCE, source.endpoint())
    assert read(target).error == ""
    assert len(source._server._readers) == 1

    def uses_all_streams() -> bool:
        target.post(Batch(SOURCE, Direction.READ, np.array([[0, 0, 64 << 20]], np.uint64)))
        assert complete(target).error == ""
        return len(source._server._readers) == 3

    wait_until(uses_all_streams, "three streams are open")
    target.close()
    source.close()


@pytest.mark.parametrize("change", [{"token": "00" * 16}, {"incarnation": ""}])
def test_a_wrong_token_or_incarnation_is_refused(source: TcpTransport, target: TcpTransport, change: dict[str, str]) -> None:
    endpoint = source.endpoint()
    target.connect(SOURCE, msgspec.structs.replace(endpoint, details=endpoint.details | change))
    completion = read(target)
    assert completion.error.startswith("PeerRefused")
    assert "fetch its card again" in completion.error
    while not source._server.refused_total:
        select.select([], [], [], 0.001)


def test_a_restarted_process_on_the_same_port_is_another_peer(source: TcpTransport, target: TcpTransport) -> None:
    target.connect(SOURCE, source.endpoint())
    assert read(target).error == ""
    port = int(source.endpoint().details["port"])
    source.close()
    successor = make("successor", port=port)
    errors = [read(target).error.split(":")[0] for _ in range(2)]
    assert set(errors) <= {"PeerLost", "PeerRefused"}
    assert errors[1] == "PeerRefused"
    target.connect(PeerRank(Incarnation("successor")), successor.endpoint())
    assert read(target, PeerRank(Incarnation("successor"))).error == ""
    successor.close()


def test_nobody_listening_is_a_lost_peer(source: TcpTransport, target: TcpTransport) -> None:
    target.connect(SOURCE, source.endpoint())
    source.close()
    assert "Connection refused" in read(target).error


def test_a_peer_that_never_greets_back_is_lost_in_time() -> None:
    target = make("target", timeout_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target.connect(SOURCE, endpoint_of(silent))
        assert "no progress within 0.3 s (no hello: " in read(target).error
    target.close()


@pytest.mark.parametrize("reply", [b"", pack_reply(Status.OK, 5, PROOF_BYTES), pack_reply(Status.OK, 0, 0)])
def test_a_peer_that_talks_nonsense_is_named(target: TcpTransport, reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target.connect(SOURCE, endpoint_of(listener))
        target.post(Batch(SOURCE, Direction.READ, ONE_RUN))
        with listener.accept()[0] as sock:
            sock.sendall((pack_hello(CHALLENGE) if reply else b"HTTP/1.1 400 Bad Request\r\n") + reply)
            assert complete(target).error.startswith("ProtocolError")


@pytest.mark.parametrize("begun", [0, 5], ids=["before the reply", "within the reply"])
def test_bytes_that_come_after_a_cancel_are_thrown_away(begun: int) -> None:
    memory = bytearray(64)
    target = TcpTransport(Region.of(memory), TransportSettings())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target.connect(SOURCE, endpoint_of(listener))
        ticket = target.post(Batch(SOURCE, Direction.READ, ONE_RUN))
        with listener.accept()[0] as owner:
            welcome(owner)
            take(owner, REQUEST_BYTES + PIECE_BYTES)
            reply = pack_reply(Status.OK, 1, 16) + b"x" * 16
            sent = REPLY_BYTES + begun if begun else 0
            owner.sendall(reply[:sent])
            while memory.count(b"x") < begun:
                select.select([], [], [], 0.001)
            target.cancel(ticket)
            assert complete(target).cancelled
            owner.sendall(reply[sent:])
            target.post(Batch(SOURCE, Direction.READ, np.array([[0, 32, 4]], np.uint64)))
            take(owner, REQUEST_BYTES + PIECE_BYTES)
            owner.sendall(pack_reply(Status.OK, 2, 4) + b"good")
            assert complete(target).error == ""
    assert bytes(memory) == (b"x" * begun).ljust(32, b"\0") + b"good".ljust(32, b"\0")
    target.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "not a host", "192.0.2.1"])  # noqa: S104
def test_hosts_that_cannot_be_listened_on_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        make("source", host=host)


def test_a_port_in_use_is_refused(source: TcpTransport) -> None:
    with pytest.raises(ConfigError, match="in use"):
        make("source", port=int(source.endpoint().details["port"]))


@pytest.mark.parametrize("change", [{"host": "some.name"}, {"port": 0}, {"port": 2**40}, {"token": "zz"}, {"token": "00"}])
def test_endpoints_that_cannot_be_used_are_refused(source: TcpTransport, target: TcpTransport, change: dict[str, Any]) -> None:
    endpoint = source.endpoint()
    with pytest.raises(TransportError, match="tcp endpoint"):
        target.connect(SOURCE, msgspec.structs.replace(endpoint, details=endpoint.details | change))


@given(st.binary(max_size=64))
def test_decoders_raise_only_protocol_errors(data: bytes) -> None:
    for decode, size in ((unpack_request, 16), (unpack_pieces, 32), (unpack_reply, REPLY_BYTES)):
        try:
            decode(data[:size].ljust(size, b"\0"))
        except ProtocolError:
            continue
