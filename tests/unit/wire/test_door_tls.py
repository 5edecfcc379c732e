"""Two doors with certificates: what gets through, and what each side is given as the reason when nothing does."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvbaton.launch.ports import PortPicker
from kvbaton.wire.door import Door, DoorLimits, EndCause, PeerConnection
from kvbaton.wire.machine import listen_on
from kvbaton.wire.tls import ClusterTls
from tls_files import expired_files, other_tls, our_tls
from watching import wait_until

KEY = b"the key of this cluster"


class End:
    """One door, and what became of its connections."""

    def __init__(self, parts: ExitStack, tls: ClusterTls | None, key: bytes | None) -> None:
        self.ended: list[tuple[EndCause, str]] = []
        self.opened: list[PeerConnection] = []
        self.received: list[tuple[PeerConnection, list[bytes]]] = []
        self.door = Door(
            DoorLimits(frame_bytes=1 << 20, unknown_frame_bytes=1 << 20),
            lambda _connection, cause, detail: self.ended.append((cause, detail)),
            key=key,
            tls=tls,
            on_open=self.opened.append,
        )
        parts.callback(self.door.close)

    def turn(self) -> None:
        self.door.wait(0.005)
        self.received += self.door.receive()

    @property
    def causes(self) -> set[EndCause]:
        return {cause for cause, _ in self.ended}

    @property
    def reasons(self) -> str:
        return "; ".join(detail for _, detail in self.ended)


class Two:
    """A listener and a dialler, in one thread."""

    def __init__(self, parts: ExitStack, listener: ClusterTls | None, dialler: ClusterTls | None, key: bytes | None) -> None:
        self.port = PortPicker().pick()
        self.listener, self.dialler = End(parts, listener, key), End(parts, dialler, key)
        self.listener.door.listen(listen_on("127.0.0.1", self.port))
        self.dialled = self.dialler.door.dial(socket.AF_INET, ("127.0.0.1", self.port), "listener")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def is_so() -> bool:
            self.listener.turn()
            self.dialler.turn()
            return condition()

        wait_until(is_so, what)


@pytest.fixture
def parts() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("key", [None, KEY])
def test_messages_of_every_size_pass_in_both_directions(parts: ExitStack, key: bytes | None) -> None:
    two = Two(parts, our_tls(), our_tls(), key)
    two.until(lambda: bool(two.dialler.opened), "the connection is open")
    messages = [bytes([n % 256]) * size for n, size in enumerate((0, 1, 255, 256, 16384, 16385, 300_000))]
    for message in messages:
        assert two.dialler.door.send(two.dialled, message)
    two.until(lambda: len(two.listener.received) == len(messages), "all have arrived")
    assert [parts for _, parts in two.listener.received] == [[message] for message in messages]
    accepted = two.listener.received[0][0]
    two.listener.door.admit(accepted)
    for message in messages:
        assert two.listener.door.send(accepted, message)
    two.until(lambda: len(two.dialler.received) == len(messages), "all have come back")
    assert [parts for _, parts in two.dialler.received] == [[message] for message in messages]


def test_another_authority_is_refused_on_both_sides(parts: ExitStack) -> None:
    two = Two(parts, our_tls(), other_tls(), None)
    two.until(lambda: bool(two.listener.ended and two.dialler.ended), "both ends know")
    assert two.listener.causes == two.dialler.causes == {EndCause.TLS_FAILED}
    assert "the certificate of the peer is refused" in two.dialler.reasons
    assert "the peer refuses the certificate of this side" in two.listener.reasons
    assert not two.dialler.opened


def test_an_expired_certificate_is_refused_on_both_sides(parts: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvbaton.wire.tls._try_out", lambda *_: "")
        expired = ClusterTls(expired_files())
    two = Two(parts, our_tls(), expired, KEY)
    two.until(lambda: bool(two.listener.ended and two.dialler.ended), "both ends know")
    assert two.listener.causes == two.dialler.causes == {EndCause.TLS_FAILED}
    assert "certificate of the peer is refused: certificate has expired" in two.listener.reasons
    assert "certificate of this side: it has expired" in two.dialler.reasons


@pytest.mark.parametrize("key", [None, KEY])
def test_a_plain_dialler_is_told_the_reason_in_the_clear(parts: ExitStack, key: bytes | None) -> None:
    two = Two(parts, our_tls(), None, key)
    two.until(lambda: bool(two.listener.ended and two.dialler.ended), "both ends know")
    assert two.listener.causes == {EndCause.TLS_FAILED}
    assert two.dialler.causes == {EndCause.REFUSED}
    for reasons in (two.listener.reasons, two.dialler.reasons):
        assert "does not encrypt, and here certificates are set (tls_dir); set them on both sides" in reasons


@pytest.mark.parametrize("key", [None, KEY])
def test_a_plain_listener_and_a_dialler_that_encrypts_both_name_it(parts: ExitStack, key: bytes | None) -> None:
    two = Two(parts, None, our_tls(), key)
    two.until(lambda: bool(two.listener.ended and two.dialler.ended), "both ends know")
    assert "the peer encrypts, and no certificates (tls_dir) are set here" in two.listener.reasons
    assert two.dialler.causes == {EndCause.TLS_FAILED}
    assert "does not encrypt" in two.dialler.reasons


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\x16" * 20000, b"\x15\x03\x03\x00\x02\x02\x28"]
)
def test_garbage_costs_its_own_connection_only(parts: ExitStack, data: bytes) -> None:
    two = Two(parts, our_tls(), our_tls(), KEY)
    with socket.create_connection(("127.0.0.1", two.port), timeout=10) as sock:
        sock.sendall(data)
        two.until(lambda: bool(two.listener.ended), "it is ended")
    assert two.listener.causes <= {EndCause.TLS_FAILED, EndCause.LOST}
    two.until(lambda: bool(two.dialler.opened), "the other connection is open")


def test_a_silent_handshake_has_the_deadline_of_every_unknown_peer(parts: ExitStack) -> None:
    now = [0.0]
    end = End(parts, our_tls(), None)
    ended: list[EndCause] = []
    door = Door(DoorLimits(), lambda _c, cause, _d: ended.append(cause), tls=our_tls(), clock=lambda: now[0])
    parts.callback(door.close)
    port = PortPicker().pick()
    door.listen(listen_on("127.0.0.1", port))
    end.door.dial(socket.AF_INET, ("127.0.0.1", port), "listener")
    end.turn()  # connected, and the first flight is sent; the answer is never read
    wait_until(lambda: door.wait(0.01) and not list(door.receive()) and len(door) == 1, "it is accepted")
    for _ in range(3):
        now[0] += 3.0
        door.wait(0.01)
        list(door.receive())
    door.wait(0.01)
    assert ended == [EndCause.SILENT]


def unfinished_hello(size: int) -> bytes:
    """The beginning of a ClientHello that announces 120,000 bytes, in records of TLS."""
    message = b"\x01" + (120_000).to_bytes(3, "big") + b"\x03\x03" + bytes(size)
    return b"".join(
        b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
        for part in (message[at : at + 8000] for at in range(0, len(message), 8000))
    )


def test_what_tls_keeps_of_unknown_peers_is_in_their_budget(parts: ExitStack) -> None:
    """Twelve handshakes of 20,000 bytes that are not over; 100,000 are the budget of all."""
    ended: list[tuple[PeerConnection, EndCause, str]] = []
    limits = DoorLimits(unknown_bytes=100_000, guaranteed_s=60.0, unknown_share=1.0)
    door = Door(limits, lambda *end: ended.append(end), tls=our_tls(), key=KEY)
    parts.callback(door.close)
    port = PortPicker().pick()
    door.listen(listen_on("127.0.0.1", port))
    for number in range(12):
        sock = parts.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        sock.sendall(unfinished_hello(20_000))

        def is_taken(count: int = number + 1) -> bool:
            door.wait(0.005)
            assert not list(door.receive())
            held = sum(each.tls.handshake_bytes for each in door._unknown if each.tls is not None)
            assert held <= 100_000
            return held == min(count, 4) * 20_021

        wait_until(is_taken, "its bytes are taken")
    assert [(cause, detail) for _, cause, detail in ended] == [(EndCause.NO_ROOM, "too many bytes of unfinished messages")] * 8
    assert len(door) == 4


def test_a_handshake_without_an_end_is_refused(parts: ExitStack) -> None:
    two = Two(parts, our_tls(), our_tls(), KEY)
    with socket.create_connection(("127.0.0.1", two.port), timeout=10) as sock:
        sock.sendall(unfinished_hello(40_000))
        two.until(lambda: bool(two.listener.ended), "it is ended")
    assert two.listener.causes == {EndCause.TLS_FAILED}
    assert "the handshake of TLS is not over after" in two.listener.reasons
    two.until(lambda: bool(two.dialler.opened), "the other connection is open")
    assert all(each.buffered == 0 for each in two.listener.door.known)
