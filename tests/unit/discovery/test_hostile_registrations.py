"""Any process that reaches the discovery port can send anything: it is dropped and counted, and disturbs no instance."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.heartbeats import Announcement, Heartbeats
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import Cause, InstanceType, Malformed, Registration, TransferMode, encode_registration
from kvbaton.discovery.registry import Registered, Registry
from kvbaton.launch.ports import PortPicker
from kvbaton.wire.zmtp import encode_frame
from watching import wait_until

GOOD = Registration(
    type=InstanceType.DECODE,
    http_address="127.0.0.1:8201",
    zmq_address="host:127.0.0.1,handshake:6301,notify:6301",
    transfer_mode=TransferMode.READ,
    incarnation="good",
)
FIELDS: dict[str, Any] = msgspec.msgpack.decode(encode_registration(GOOD))
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@contextmanager
def listening(**options: Any) -> Iterator[tuple[Registry, Listener, int]]:
    registry, port = Registry(), PortPicker().pick()
    with Listener(registry, "127.0.0.1", port, **options) as listener:
        yield registry, listener, port


def is_live(registry: Registry, address: str = GOOD.http_address) -> bool:
    return address in [instance.http_address for instance in registry.live(time.monotonic())]


@contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    stopping = threading.Event()
    thread = threading.Thread(target=work, args=(stopping,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def dealer(port: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(f"tcp://127.0.0.1:{port}")
        yield sender


def dealer_flood(port: int, frames: Callable[[int], list[bytes]]) -> Callable[[threading.Event], None]:
    """Sends as fast as it can."""

    def work(stopping: threading.Event) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
            sender.setsockopt(zmq.LINGER, 0)
            sender.setsockopt(zmq.SNDTIMEO, 100)
            sender.connect(f"tcp://127.0.0.1:{port}")
            number = 0
            while not stopping.is_set():
                try:
                    sender.send_multipart(frames(number))
                except zmq.Again:
                    continue
                number += 1

    return work


def unknown_instance(number: int) -> list[bytes]:
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:80"
    return [encode_registration(msgspec.structs.replace(GOOD, http_address=address, incarnation=str(number)))]


FLOODS: dict[str, Callable[[int], list[bytes]]] = {
    "ever new instances": unknown_instance,
    "one instance that is ever restarted": lambda n: [
        encode_registration(msgspec.structs.replace(GOOD, http_address="10.0.0.1:80", incarnation=str(n)))
    ],
    "garbage": lambda _n: [b"\xc1garbage"],
    "heartbeats of an unknown instance": lambda _n: unknown_instance(1),
}


@pytest.mark.parametrize("frames", FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_does_not_disturb_an_instance_that_is_there(frames: Callable[[int], list[bytes]]) -> None:
    with listening() as (registry, listener, port), ThreadAnnouncer(GOOD, [f"127.0.0.1:{port}"], 0.05):
        wait_until(lambda: is_live(registry), "the good one registers")
        with in_background(dealer_flood(port, frames)):
            wait_until(lambda: listener.messages_total() > 3000, "the flood is there", 60)
            seen = registry.live(time.monotonic())[0].last_seen
            wait_until(lambda: registry.live(time.monotonic())[0].last_seen > seen, "heartbeats get through")
            assert is_live(registry)
        listener.check()
        assert len(registry.live(time.monotonic())) <= 1024
        assert len(registry.refused(time.monotonic())) <= 64
        assert listener.malformed_total()[Cause.INTERNAL] == 0


def test_ten_thousand_registrations_at_once_are_all_counted_and_tables_stay_small() -> None:
    """Without sockets and without waiting: each costs the same, whatever came before."""
    registry = Registry()
    listener = Listener(registry, "127.0.0.1", 1, clock=lambda: 1.0)
    registry.register(GOOD, 1.0)
    outcomes = [listener.take([b"10.9.9.9", *unknown_instance(number)]) for number in range(10_000)]
    assert listener.messages_total() == 10_000
    assert sum(isinstance(outcome, Registered) for outcome in outcomes) == 1023
    for table in (registry._live, registry._refused, registry._superseded, registry._comings, registry._expired):
        assert len(table) <= 1024
    assert len(listener._warnings._waiting) + len(listener._warnings._by_key) <= 64


WRONG: list[object] = [None, True, 7, -1, 1.5, 2**63, b"P", "", " ", "x" * 600, [], {}, "\u00e9", "a\nb", "___", "http://h:1"]


@pytest.mark.parametrize("field", ["type", "http_address", "zmq_address", "transfer_mode"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_every_field_wrong_in_turn_is_named(field: str, value: object) -> None:
    listener = Listener(Registry(), "127.0.0.1", 1)
    got = listener.take([b"id", msgspec.msgpack.encode({**FIELDS, field: value})])
    assert isinstance(got, Malformed)
    assert got.field == field


@pytest.mark.parametrize("field", ["dp_size", "tp_size", "incarnation", "model", "fingerprint", "answer", "dispatch"])
@pytest.mark.parametrize("value", [None, -1, 1.5, 2**63, b"P", "x" * 600, [], {}, "a\nb"], ids=repr)
def test_every_optional_field_wrong_in_turn_is_named(field: str, value: object) -> None:
    listener = Listener(Registry(), "127.0.0.1", 1)
    got = listener.take([b"id", msgspec.msgpack.encode({**FIELDS, field: value})])
    assert isinstance(got, Malformed)
    assert got.field == field


@pytest.mark.parametrize("field", ["type", "http_address", "zmq_address", "transfer_mode"])
def test_every_field_missing_in_turn_is_named(field: str) -> None:
    listener = Listener(Registry(), "127.0.0.1", 1)
    got = listener.take([b"id", msgspec.msgpack.encode({k: v for k, v in FIELDS.items() if k != field})])
    assert isinstance(got, Malformed)
    assert (got.cause, got.field) == (Cause.MISSING_FIELD, field)


def send_without_end(sender: socket.socket) -> None:
    for _ in range(100_000):
        sender.sendall(b"\x01\xff" + b"x" * 255)


def test_an_endless_message_is_cut_off_and_counted() -> None:
    """A ZeroMQ socket would keep all its parts in memory until the last one has come."""
    with listening() as (_, listener, port), socket.create_connection(("127.0.0.1", port), timeout=10) as sender:
        sender.sendall(GREETING + READY)
        with pytest.raises(ConnectionError):
            send_without_end(sender)
        assert listener.malformed_total()[Cause.TOO_LONG] == 1
        wait_until(lambda: listener.connections() == 0, "its connection is gone")


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, GREETING + b"\x02" + b"\xff" * 8, b"\x16\x03\x01" + b"x" * 200]
)
def test_other_protocols_are_cut_off_and_counted(sent: bytes) -> None:
    with listening() as (_, listener, port), socket.create_connection(("127.0.0.1", port), timeout=10) as sender:
        sender.sendall(sent)
        wait_until(lambda: listener.messages_total() == 1, "it is counted")
        while sender.recv(4096):
            pass
        counted = listener.malformed_total()
        assert counted[Cause.NOT_ZMTP] + counted[Cause.TOO_LONG] == 1


def test_many_silent_connections_give_way_to_one_that_sends() -> None:
    with listening(max_connections=20) as (registry, listener, port):
        silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(50)]
        try:
            with ThreadAnnouncer(GOOD, [f"127.0.0.1:{port}"], 0.05):
                wait_until(lambda: is_live(registry), "the good one registers")
                assert listener.connections() <= 20
        finally:
            for each in silent:
                each.close()


def test_a_peer_that_never_finishes_the_handshake_is_cut_off() -> None:
    now = [0.0]
    with (
        listening(clock=lambda: now[0]) as (_, listener, port),
        socket.create_connection(("127.0.0.1", port), timeout=10) as sender,
    ):
        sender.sendall(GREETING[:20])
        wait_until(lambda: listener.connections() == 1, "it is connected")
        now[0] = 6.0
        wait_until(lambda: listener.connections() == 0, "it is cut off")


def test_garbage_is_logged_once_per_sender(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    listener = Listener(Registry(), "127.0.0.1", 1, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            now[0] = number / 20
            for sender in (b"10.0.0.1", b"10.0.0.2"):
                listener.take([sender, b"\xc1"])
            assert len(caplog.records) == (1 if now[0] < 1.0 else 2), "one line per second of one cause"
    assert len({record.getMessage().partition(" skipped")[0] for record in caplog.records}) == 2


def test_of_two_wrong_registrations_of_one_host_both_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The second when its time has come, also if no third one comes: nothing that is wrong goes unseen."""
    now = [0.0]
    with listening(clock=lambda: now[0], cluster_key=b"k" * 32) as (_, listener, port):
        with dealer(port) as sender:
            for number in range(3):
                sender.send(msgspec.msgpack.encode({"type": f"HELLO {number}"}))
                wait_until(lambda: listener.malformed_total()[Cause.NOT_SEALED] > number, "it is counted")  # noqa: B023
        assert len(caplog.records) == 1
        now[0] = 10.5
        wait_until(lambda: len(caplog.records) == 2, "the last one of those that were held back is logged")
        assert "(1 similar lines held back)" in caplog.records[1].getMessage()
        now[0] = 30.0
        with dealer(port) as sender:  # the first one may have been cut off meanwhile: it has shown no key for 30 s
            sender.send(b"\xc1")
            wait_until(lambda: len(caplog.records) == 3, "nothing is logged a second time")
        assert "held back" not in caplog.records[2].getMessage()


def test_a_router_with_a_key_takes_holders_of_the_key_only() -> None:
    key = b"k" * 32
    with listening(cluster_key=key) as (registry, listener, port):
        wrong = msgspec.structs.replace(GOOD, http_address="10.0.0.1:80")
        with ThreadAnnouncer(wrong, [f"127.0.0.1:{port}"], 0.05):
            with ThreadAnnouncer(GOOD, [f"127.0.0.1:{port}"], 0.05, cluster_key=key):
                wait_until(lambda: is_live(registry), "the holder of the key registers")
            wait_until(lambda: listener.malformed_total()[Cause.NOT_SEALED] > 0, "the unknown sender is counted")
        assert not is_live(registry, "10.0.0.1:80")


class Recorder:
    """Stands between an instance and a router, and keeps what the instance sends."""

    def __init__(self, router_port: int) -> None:
        self.received = b""
        self._router_port = router_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._listener.settimeout(10)

    def pass_on(self, stopping: threading.Event) -> None:
        """Pass everything on, both ways, until it is stopped."""
        router = ("127.0.0.1", self._router_port)
        with self._listener, self._listener.accept()[0] as near, socket.create_connection(router, timeout=10) as far:
            for sock in (near, far):
                sock.settimeout(0.01)
            while not stopping.is_set():
                self.received += _copy(near, far)
                _copy(far, near)


def _copy(one: socket.socket, other: socket.socket) -> bytes:
    try:
        data = one.recv(65536)
    except TimeoutError:
        return b""
    other.sendall(data)
    return data


def test_a_replayed_recording_registers_no_instance() -> None:
    """Every byte that an instance has sent, on another connection: sealed, but for a nonce that is not this one's."""
    key = b"k" * 32
    with listening(cluster_key=key) as (registry, listener, port):
        recorder = Recorder(port)
        with in_background(recorder.pass_on), ThreadAnnouncer(GOOD, [f"127.0.0.1:{recorder.port}"], 0.05, cluster_key=key):
            wait_until(lambda: is_live(registry), "the instance registers through the recorder")
            seen = registry.live(time.monotonic())[0].last_seen
            wait_until(lambda: registry.live(time.monotonic())[0].last_seen > seen, "and beats")
            sent = recorder.received
        registry.register(msgspec.structs.replace(GOOD, bye=True), time.monotonic())
        assert not is_live(registry)
        before = listener.malformed_total()[Cause.NOT_FRESH]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sender:
            sender.sendall(sent)
            wait_until(lambda: listener.malformed_total()[Cause.NOT_FRESH] >= before + 2, "all of it is received")
        assert not is_live(registry)


def test_control_without_a_key_what_was_recorded_counts() -> None:
    with listening() as (registry, _, port):
        recorder = Recorder(port)
        with in_background(recorder.pass_on), ThreadAnnouncer(GOOD, [f"127.0.0.1:{recorder.port}"], 0.05):
            wait_until(lambda: is_live(registry), "the instance registers through the recorder")
            sent = recorder.received
        registry.register(msgspec.structs.replace(GOOD, bye=True), time.monotonic())
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sender:
            sender.sendall(sent)
            wait_until(lambda: is_live(registry), "it is back")


def test_an_instance_is_asked_anew_by_a_router_that_was_restarted() -> None:
    key, port = b"k" * 32, PortPicker().pick()
    with ThreadAnnouncer(GOOD, [f"127.0.0.1:{port}"], 0.05, cluster_key=key):
        for _ in range(2):
            registry = Registry()
            with Listener(registry, "127.0.0.1", port, cluster_key=key) as listener:
                wait_until(lambda registry=registry: is_live(registry), "the instance registers")  # type: ignore[misc]
                assert listener.malformed_total()[Cause.NOT_SEALED] == 0


def test_a_router_that_asks_back_all_the_time_is_not_answered_as_often() -> None:
    """A second in steps of 10 ms, in which every message is answered with another nonce."""
    port, received = PortPicker().pick(), 0
    announcement = Announcement(GOOD, (f"127.0.0.1:{port}",), 1.5, b"k" * 32)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"tcp://127.0.0.1:{port}")
        with Heartbeats(announcement, lambda _news: None, 0.0) as beats:
            for step in range(100):
                beats.turn(step * 0.01)
                while router.poll(10):
                    sender, _ = router.recv_multipart()
                    received += 1
                    nonce = b"%16d" % received
                    router.send_multipart([sender, msgspec.msgpack.encode({"type": "challenge", "nonce": nonce})])
    assert 2 <= received <= 12


def ten_thousand(number: int) -> bytes:
    """Registrations as they go on the wire, one message each."""
    return b"".join(encode_frame(unknown_instance(n)[0]) for n in range(number, number + 10_000))


def test_of_a_flood_only_what_one_sender_may_send_is_read_and_the_rest_is_dropped_and_counted() -> None:
    """Thirty thousand new instances over one connection, which stands at one moment of time: 200 are read, 64 of them live."""
    with listening(clock=lambda: 100.0) as (registry, listener, port):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sender:
            sender.sendall(GREETING + READY)
            for start in range(0, 30_000, 10_000):
                sender.sendall(ten_thousand(start))
            wait_until(lambda: listener.messages_total() == 30_000, "every message is counted", 60)
        wait_until(lambda: listener.malformed_total()[Cause.TOO_MANY] == 30_000 - 64, "the rest is dropped and counted")
        assert len(registry.live(100.0)) == 64
        listener.take([b"10.0.0.9", encode_registration(GOOD)])
        assert is_live_at(registry, 100.0)


def is_live_at(registry: Registry, now: float) -> bool:
    return GOOD.http_address in [instance.http_address for instance in registry.live(now)]


def test_a_sender_that_keeps_to_the_limit_is_received_all_the_time() -> None:
    """The control: the limit is per second, not for good."""
    now = [0.0]
    with (
        listening(clock=lambda: now[0]) as (_, listener, port),
        socket.create_connection(("127.0.0.1", port), timeout=10) as sender,
    ):
        sender.sendall(GREETING + READY)
        for beat in range(1, 9):
            now[0] = float(beat)
            sender.sendall(100 * encode_frame(encode_registration(GOOD)))
            wait_until(lambda beat=beat: listener.messages_total() == 100 * beat, "all are received")  # type: ignore[misc]
        assert listener.malformed_total()[Cause.TOO_MANY] == 0


def test_a_sender_may_register_others_in_place_of_those_it_has_dropped() -> None:
    now = [0.0]
    with (
        listening(clock=lambda: now[0]) as (_, listener, port),
        socket.create_connection(("127.0.0.1", port), timeout=10) as sender,
    ):
        sender.sendall(GREETING + READY + b"".join(encode_frame(unknown_instance(n)[0]) for n in range(70)))
        wait_until(lambda: listener.messages_total() == 70, "all are received")
        wait_until(lambda: listener.malformed_total()[Cause.TOO_MANY] == 6, "six are too many")  # counted as received before
        now[0] = 61.0
        sender.sendall(encode_frame(unknown_instance(100)[0]))
        wait_until(lambda: listener.messages_total() == 71, "one more is received")
        assert listener.malformed_total()[Cause.TOO_MANY] == 6


def test_a_thousand_instances_are_live_at_once() -> None:
    registry = Registry()
    for number in range(1000):
        (frame,) = unknown_instance(number)
        assert isinstance(Listener(registry, "127.0.0.1", 1, clock=lambda: 0.0).take([b"id", frame]), Registered)
    assert len(registry.live(0.0)) == 1000
