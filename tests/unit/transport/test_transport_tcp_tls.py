"""The tcp transport inside TLS: what is refused, by name and on both sides, and bytes of every size of piece."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tcp_rig import CONTENT, SOURCE, complete, dial, make, read, shake_hands

from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport.base import Batch, Direction, Region, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.tcp import TcpTransport, server
from kvbaton.transport.tcp.wire import pack_request
from kvbaton.wire import metering
from kvbaton.wire.tls import ClusterTls, TlsSocket
from tls_files import expired_files, other_tls, our_tls
from watching import wait_until


@contextmanager
def pair(source: ClusterTls | None, target: ClusterTls | None) -> Iterator[tuple[TcpTransport, TcpTransport]]:
    with closing(make("source", CONTENT, tls=source)) as there, closing(make("target", tls=target)) as here:
        yield there, here


def test_bytes_are_read_through_tls() -> None:
    with pair(our_tls(), our_tls()) as (source, target):
        target.connect(SOURCE, source.endpoint())
        assert read(target).error == ""
        assert bytes(target._region.view[:16]) == CONTENT[:16]


@pytest.mark.parametrize("piece", [1, 1000, 4096, 16384, 16385, 100_000, 1 << 20])
def test_pieces_of_every_size_arrive_in_their_places(piece: int) -> None:
    count = max(2, min(3000, (2 << 20) // piece))
    size = count * piece
    content = np.random.default_rng(piece).integers(0, 256, size, np.uint8)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(piece)
    runs = np.stack([starts, starts[::-1], np.full(count, piece, np.uint64)], axis=1)
    with (
        closing(make("source", content.tobytes(), tls=our_tls())) as source,
        closing(make("target", bytes(size), tls=our_tls())) as target,
    ):
        target.connect(SOURCE, source.endpoint())
        target.post(Batch(SOURCE, Direction.READ, runs))
        assert complete(target).error == ""
        expected = content.reshape(count, piece)[::-1].reshape(-1)
        assert np.array_equal(np.frombuffer(target._region.view, np.uint8), expected)


def test_another_authority_is_refused_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with pair(our_tls(), other_tls()) as (source, target), caplog.at_level(logging.WARNING):
        target.connect(SOURCE, source.endpoint())
        assert "the certificate of the peer is refused" in read(target).error
        wait_until(lambda: source._server.refused_total >= 1, "the source counts it")
        # A peer that closes with bytes unread resets the connection, and its alert may be lost with it.
        said = ("the peer refuses the certificate of this side", "unexpected eof", "reset by peer")
        assert "is refused" in caplog.text
        assert any(each in caplog.text for each in said)


def test_connections_that_are_reset_before_they_are_taken_do_not_end_the_server() -> None:
    with pair(our_tls(), our_tls()) as (source, target):
        address = ("127.0.0.1", source._server.port)
        for number in range(400):
            with socket.create_connection(address, 10) as sock:
                if number % 2:
                    sock.sendall(b"GET / HTTP/1.0")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        target.connect(SOURCE, source.endpoint())
        assert read(target).error == ""


def test_an_expired_certificate_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvbaton.wire.tls._try_out", lambda *_: "")
        expired = ClusterTls(expired_files())
    with pair(our_tls(), expired) as (source, target), caplog.at_level(logging.WARNING):
        target.connect(SOURCE, source.endpoint())
        assert "the peer refuses the certificate of this side: it has expired" in read(target).error
        wait_until(lambda: source._server.refused_total >= 1, "the source counts it")
        assert "certificate has expired" in caplog.text


@pytest.mark.parametrize(("source_tls", "target_tls"), [(True, False), (False, True)])
def test_a_peer_that_does_not_encrypt_is_refused_by_its_card(source_tls: bool, target_tls: bool) -> None:
    with pair(our_tls() if source_tls else None, our_tls() if target_tls else None) as (source, target):
        how = "encrypts, and this side does not" if source_tls else "does not encrypt, and this side does"
        with pytest.raises(TransportError, match=f"{how}; set the same certificates"):
            target.connect(SOURCE, source.endpoint())


def test_a_plain_reader_that_forges_the_card_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with closing(make("source", CONTENT, tls=our_tls())) as source, caplog.at_level(logging.WARNING):
        with dial(source.endpoint()) as sock:
            sock.sendall(b"KVBATON\x03" + bytes(100))
            received = b""
            with contextlib.suppress(ConnectionError):
                while data := sock.recv(1000):
                    received += data
            assert len(received) < 16  # an alert of TLS at most
        wait_until(lambda: source._server.refused_total == 1, "it is counted")
        assert "does not encrypt" in caplog.text


def test_a_plain_source_behind_a_forged_card_is_named() -> None:
    with pair(None, our_tls()) as (source, target):
        endpoint = source.endpoint()
        target.connect(SOURCE, msgspec.structs.replace(endpoint, details=endpoint.details | {"tls": 1}))
        assert "does not encrypt" in read(target).error


def test_new_certificates_are_used_by_the_next_connection(tmp_path: Path) -> None:
    from kvbaton.wire.certificates import make_certificate

    make_certificate(tmp_path)
    now = [0.0]
    tls = ClusterTls(tmp_path, lambda: now[0])
    with pair(tls, tls) as (source, target):
        target.connect(SOURCE, source.endpoint())
        assert read(target).error == ""
        make_certificate(tmp_path, new_authority=True)
        make_certificate(tmp_path)
        now[0] += 2
        assert read(target).error == ""  # over the open connection
        target.revoke(SOURCE)
        target.connect(SOURCE, source.endpoint())
        assert read(target).error == ""


@pytest.mark.parametrize("name", ["nixl", "mooncake", "mori"])
def test_transports_that_leave_the_host_in_the_clear_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"transport {name} does not encrypt; choose tcp"):
        open_transport(name, Region.of(bytearray(8)), TransportSettings(tls=our_tls()))


def test_a_peer_that_never_ends_its_handshake_costs_one_timeout() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(make("source", CONTENT, tls=our_tls())) as source,
        closing(make("target", tls=our_tls(), timeout_s=1.0)) as target,
    ):
        listener.settimeout(20)
        stop = threading.Event()
        known = source.endpoint()
        endpoint = msgspec.structs.replace(known, details={**known.details, "port": listener.getsockname()[1]})

        def drip() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as sock:
                sock.sendall(bytes.fromhex("1603034000"))
                while not stop.wait(0.1):
                    sock.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            target.connect(SOURCE, endpoint)
            assert "1 s" in read(target).error
        finally:
            stop.set()
            thread.join()


class HandshakeTimes:
    """In place of `time` in a server: time stands still, and each step of a handshake takes ten milliseconds of work."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.steps = 0

    def monotonic(self) -> float:
        return self.passed_s

    def thread_time(self) -> float:
        return self.steps * 0.01


@pytest.mark.parametrize("is_contended", [True, False])
def test_a_flood_of_handshakes_has_a_fifth_of_the_thread_while_a_reader_needs_it(
    is_contended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, whole = HandshakeTimes(), TlsSocket.do_handshake

    def counted(sock: TlsSocket, block: bool = False) -> None:
        times.steps += bool(sock.server_side)
        whole(sock, block)

    monkeypatch.setattr(TlsSocket, "do_handshake", counted)
    monkeypatch.setattr(server, "time", times)
    monkeypatch.setattr(metering, "time", times)
    size = 16 << 20
    with (
        closing(make("source", bytes(size), tls=our_tls())) as source,
        closing(make("target", bytes(size), tls=our_tls())) as target,
        ExitStack() as flood,
    ):
        if is_contended:  # a reader that does not take what it has asked for, so that the server is never without work
            slow = flood.enter_context(our_tls().client.wrap_socket(dial(source.endpoint())))
            shake_hands(slow, source.endpoint())
            slow.sendall(pack_request(1, np.array([[0, 0, size]], np.uint64)))
            times.passed_s += 1.0
        target.connect(SOURCE, source.endpoint())
        assert read(target).error == ""
        times.passed_s += 1.0
        before = times.steps
        for _ in range(40):
            sock = flood.enter_context(dial(source.endpoint()))
            sock.sendall(first_flight())
        if not is_contended:
            wait_until(lambda: times.steps - before == 40, "all handshakes are served at once")
            return
        for _ in range(20):
            assert read(target).error == ""
        # The burst is two steps, and ends with the third. Half a second later there is a share for the burst again.
        wait_until(lambda: times.steps - before == 3, "the burst is served")
        for _ in range(20):
            assert read(target).error == ""
        assert times.steps - before == 3

        def have_served(steps: int) -> bool:
            return times.steps - before >= steps

        for number in range(1, 9):  # less than the five seconds that each has for its handshake
            times.passed_s += 0.5
            wait_until(partial(have_served, 3 + 2 * number), "the next ones are served")
            assert read(target).error == ""
            assert times.steps - before <= 3 + 3 * number


def first_flight() -> bytes:
    """What a member of the cluster sends first."""
    outgoing = ssl.MemoryBIO()
    tls = our_tls().client.wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_bytes_that_come_after_the_look_and_are_taken_with_it_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = itertools.count(), server._received_bytes
    monkeypatch.setattr(server, "_received_bytes", lambda sock: look(sock) if next(looks) % 2 else 0)
    message = b"\x01" + (120_000).to_bytes(3, "big") + b"\x03\x03" + bytes(40_000)
    with pair(our_tls(), our_tls()) as (source, _), dial(source.endpoint()) as sock:
        for at in range(0, len(message), 8000):
            part = message[at : at + 8000]
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part)
        wait_until(lambda: source._server.refused_total == 1, "it is refused")


@pytest.mark.parametrize("size", [30_000, 40_000])
def test_a_handshake_without_an_end_is_ended_by_its_bytes(size: int, caplog: pytest.LogCaptureFixture) -> None:
    message = b"\x01" + (120_000).to_bytes(3, "big") + b"\x03\x03" + bytes(size)
    with pair(our_tls(), our_tls()) as (source, target), caplog.at_level(logging.WARNING), dial(source.endpoint()) as sock:
        for at in range(0, len(message), 8000):
            part = message[at : at + 8000]
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part)
        target.connect(SOURCE, source.endpoint())
        assert read(target).error == ""
        if size == 30_000:
            assert source._server.refused_total == 0
            # A connection of the reader is known when its first request is answered; others of it are still on their way.
            wait_until(lambda: len(source._server._unknown) == 1, "the reader's connections are known, and this one is not")
            return
        wait_until(lambda: source._server.refused_total == 1, "it is refused")
        assert "the handshake of TLS is not over after" in caplog.text
        wait_until(lambda: not source._server._unknown, "its place is free again")  # counted first, then dropped
