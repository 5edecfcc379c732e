"""ThreadAnnouncer and listener over real sockets: joining, goodbye, and a listener that survives whatever is sent to it."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import Cause, InstanceType, Registration, TransferMode, encode_registration
from kvbaton.discovery.registry import Registry
from kvbaton.errors import Bug, ConfigError
from kvbaton.wire.log_limit import LogLimit

DEADLINE_S = 20.0


def free_port() -> int:
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(0.01)


def registration(kind: str = "P", port: int = 8101, incarnation: str = "one") -> Registration:
    return Registration(
        type=InstanceType(kind),
        http_address=f"127.0.0.1:{port}",
        zmq_address=f"host:127.0.0.1,handshake:{port},notify:{port}",
        transfer_mode=TransferMode.READ,
        incarnation=incarnation,
    )


def live(registry: Registry) -> list[str]:
    return [instance.http_address for instance in registry.live(time.monotonic())]


@contextmanager
def listening(registry: Registry, port: int | None = None) -> Iterator[tuple[Listener, int]]:
    port = port or free_port()
    with Listener(registry, "127.0.0.1", port) as listener:
        yield listener, port


@contextmanager
def dealer(port: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.setsockopt(zmq.SNDTIMEO, 5000)
        sender.connect(f"tcp://127.0.0.1:{port}")
        yield sender


def test_an_instance_registers_sends_heartbeats_and_deregisters() -> None:
    registry = Registry(expire_after_s=60.0)
    with listening(registry) as (_, port):
        announcer = ThreadAnnouncer(registration(), [f"127.0.0.1:{port}"], heartbeat_s=0.02)
        assert live(registry) == []
        announcer.start()
        wait_until(lambda: live(registry) == ["127.0.0.1:8101"])
        first = registry.live(time.monotonic())[0].last_seen
        wait_until(lambda: registry.live(time.monotonic())[0].last_seen > first)
        announcer.stop()
        wait_until(lambda: live(registry) == [])
        assert not announcer.is_alive


def test_every_router_is_notified_although_one_is_away_and_one_comes_late() -> None:
    here, late = Registry(), Registry()
    late_port = free_port()
    with listening(here) as (_, port):
        routers = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{port}", f"127.0.0.1:{late_port}"]
        with ThreadAnnouncer(registration(), routers, heartbeat_s=0.05):
            wait_until(lambda: live(here) == ["127.0.0.1:8101"])
            with listening(late, late_port):
                wait_until(lambda: live(late) == ["127.0.0.1:8101"])


def test_an_instance_registers_again_with_a_restarted_router() -> None:
    port = free_port()
    with ThreadAnnouncer(registration(), [f"127.0.0.1:{port}"], heartbeat_s=0.05):
        for _ in range(2):
            registry = Registry()
            with listening(registry, port):
                wait_until(lambda registry=registry: live(registry) == ["127.0.0.1:8101"])  # type: ignore[misc]


def test_an_announcer_without_routers_does_nothing() -> None:
    with ThreadAnnouncer(registration(), []) as announcer:
        assert not announcer.is_alive


@pytest.mark.parametrize("router", ["http://127.0.0.1:1", "127.0.0.1", "", "127.0.0.1:0"])
def test_a_bad_router_address_is_named(router: str) -> None:
    with pytest.raises(ConfigError, match=r"router address"):
        ThreadAnnouncer(registration(), [router])


@pytest.mark.parametrize("heartbeat_s", [0.0, -1.0, 3.1, float("nan")])
def test_a_heartbeat_that_routers_would_not_survive_is_refused(heartbeat_s: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat_s"):
        ThreadAnnouncer(registration(), ["127.0.0.1:1"], heartbeat_s=heartbeat_s)


def test_the_listener_survives_everything(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    good = encode_registration(registration("D", 8201))
    bad: list[list[bytes]] = [
        [b""],
        [b"\xc1\xff garbage"],
        [b'{"type":"P"}'],
        [b"", good],
        [good, b"extra", b"more", b"and more"],
        [msgspec.msgpack.encode({"type": "HELLO"})],
        [msgspec.msgpack.encode({"type": "P", "http_address": "127.0.0.1:1"})],
        [msgspec.msgpack.encode(["P", "127.0.0.1:1", "z"])],
        [msgspec.msgpack.encode({"type": "P", "http_address": 1})],
    ]
    with caplog.at_level(logging.WARNING), listening(registry) as (listener, port):
        with dealer(port) as sender:
            for frames in bad:
                sender.send_multipart(frames)
            wait_until(lambda: listener.messages_total() == len(bad))
        with dealer(port) as sender:
            monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            sender.send(b"x" * 10_000_000)
            assert monitor.poll(10_000), "the sender of a huge frame was not cut off"
            sender.disable_monitor()
        with dealer(port) as sender:
            sender.send(good)
            wait_until(lambda: live(registry) == ["127.0.0.1:8201"])
        counts = listener.malformed_total()
    assert counts[Cause.NOT_A_MAP] == 4
    assert counts[Cause.FRAMES] == 2
    assert counts[Cause.UNKNOWN_TYPE] == 1
    assert counts[Cause.MISSING_FIELD] == 1
    assert counts[Cause.WRONG_TYPE] == 1
    assert counts[Cause.INTERNAL] == 0
    assert "'HELLO' is unknown" in caplog.text
    assert "zmq_address: is missing" in caplog.text


def test_a_flood_of_garbage_is_counted_but_hardly_logged(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener(Registry(), "127.0.0.1", 1, clock=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(500):
            listener.take([b"id", b"\xc1"])
    assert listener.malformed_total()[Cause.NOT_A_MAP] == 500
    assert len(caplog.records) == 1


def test_a_refusal_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener(Registry(TransferMode.READ), "127.0.0.1", 1, clock=lambda: 0.0)
    push = msgspec.structs.replace(registration(), transfer_mode=TransferMode.WRITE)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            listener.take([b"id", encode_registration(push)])
    assert len(caplog.records) == 1
    assert "prefill instance 127.0.0.1:8101 refused: transfer_mode is WRITE there and READ here" in caplog.text


def test_a_discovery_port_in_use_is_named() -> None:
    with listening(Registry()) as (_, port), pytest.raises(ConfigError, match=rf"{port}.*--discovery-port"):
        Listener(Registry(), "127.0.0.1", port).start()


def test_the_port_is_free_again_after_stop_and_stop_may_be_called_twice() -> None:
    with listening(Registry()) as (listener, port):
        listener.stop()
        with listening(Registry(), port):
            pass


def test_a_listener_that_does_not_run_is_noticed() -> None:
    with pytest.raises(Bug, match="died"):
        Listener(Registry(), "127.0.0.1", 1).check()


def test_log_limit_lets_each_key_through_once_per_time_and_counts_the_rest() -> None:
    limit = LogLimit(every_s=10.0, burst=3, max_keys=2)
    assert [limit.allow("a", 0.0), limit.allow("a", 1.0), limit.allow("b", 2.0)] == [0, None, 1]
    assert limit.allow("a", 10.0) == 0
    assert [limit.allow(key, 11.0) for key in "cdefg"] == [0, 0, None, None, None]
    assert limit.allow("h", 21.0) == 3


def test_a_flood_of_registrations_disturbs_no_instance_and_fills_nothing() -> None:
    """Twenty thousand messages as fast as they go, of instances that do not exist, and garbage: bounded, still listening."""
    registry = Registry(expire_after_s=60.0)
    generator = random.Random(5)
    with listening(registry) as (listener, port):
        with dealer(port) as sender:
            for number in range(20_000):
                if number % 2:
                    sender.send(generator.randbytes(60))
                else:
                    sender.send(encode_registration(registration("P", 1 + number % 60_000, f"flood-{number}")))
        wait_until(lambda: listener.messages_total() > 1_000)
        with ThreadAnnouncer(registration("D", 65_000), [f"127.0.0.1:{port}"], heartbeat_s=0.1):
            wait_until(lambda: len(registry.refused(time.monotonic())) > 0 or "127.0.0.1:65000" in live(registry))
        listener.check()
        assert len(registry.live(time.monotonic())) <= 1024
        assert len(registry.refused(time.monotonic())) <= 1024
        assert listener.malformed_total()[Cause.INTERNAL] == 0
