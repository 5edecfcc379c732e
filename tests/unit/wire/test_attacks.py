"""Attacks on the ports that peers reach, each against a process of its own: it stays small, and serves key holders in turn.

`KVBATON_ATTACK_FRAMES` is how many frames of each of the four classes are sent; without it, the tests that are marked `attacks`
send few enough for `make test`. `make test-attacks-full` sends 250,000 of each: 10^6 on every port.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import msgspec
import pytest
from attackers import ATTACKS
from guarding import BEAT, KEY, ME, GuardedPort, guarded, holds_its_size, too_often

from kvbaton.core.auth import Seal
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Heartbeat, decode, encode
from kvbaton.discovery.messages import Freshness, encode_registration
from wire_peer import GREETING, READY, WirePeer, keyed_ready

FRAMES = int(os.environ.get("KVBATON_ATTACK_FRAMES", "0"))
QUICK_FRAMES = {"control": 25_000, "discovery": 25_000, "tcp": 5_000, "http": 5_000, "agent": 5_000}

PORTS = [("control", KEY), ("control", ""), ("discovery", KEY), ("discovery", "")]
each_port = pytest.mark.parametrize(("kind", "key"), PORTS, ids=lambda value: (value and value.partition(" ")[0]) or "no key")


def pour(served: GuardedPort, before: bytes, piece: bytes, total_bytes: int) -> None:
    """Send a piece over and over on one connection, until it is ended or enough was sent."""
    with contextlib.suppress(OSError), served.open() as sock:
        sock.settimeout(5)
        sock.sendall(before)
        for _ in range(0, total_bytes, len(piece)):
            sock.sendall(piece)


ENDLESS = {
    "empty parts": (GREETING + READY, b"\x01\x00" * 32768),
    "parts of 200 bytes": (GREETING + READY, (b"\x01\xc8" + bytes(200)) * 300),
    "one frame without an end": (GREETING + READY + b"\x02" + (1 << 40).to_bytes(8, "big"), bytes(65536)),
    "a frame of the largest size": (GREETING + READY + b"\x02" + (4 << 20).to_bytes(8, "big"), bytes(65536)),
    "a handshake without an end": (GREETING + b"\x06" + (1 << 30).to_bytes(8, "big"), bytes(65536)),
    "pings": (GREETING + READY, b"\x04\x0c\x04PING\x00\x10hello" * 5000),
    "properties": (GREETING, (b"\x04\xf8\x05READY" + b"\x01x\x00\x00\x00\x00" * 40 + bytes(2)) * 200),
    "a claim to the key, then garbage": (keyed_ready(), b"\x00\x10" + bytes(16) + b"\x00\xff" + bytes(255) * 200),
    "messages that are none": (GREETING + READY, b"\x00\x04\xc1\xc1\xc1\xc1" * 5000),
}


@each_port
def test_what_has_no_end_fills_no_memory(kind: str, key: str) -> None:
    with guarded(kind, key) as served:
        for name, attack in ENDLESS.items():
            with holds_its_size(served):
                senders = [threading.Thread(target=pour, args=(served, *attack, 48 << 20)) for _ in range(3)]
                for sender in senders:
                    sender.start()
                served.assert_serves()
                for sender in senders:
                    sender.join(60)
                    assert not sender.is_alive(), name


@each_port
def test_unfinished_frames_of_many_connections_share_one_budget(kind: str, key: str) -> None:
    start = GREETING + READY + b"\x02" + (3 << 20).to_bytes(8, "big") + bytes(2 << 20)
    with guarded(kind, key) as served, holds_its_size(served), ExitStack() as open_sockets:
        for _ in range(60):
            with contextlib.suppress(OSError):
                sock = open_sockets.enter_context(served.open())
                sock.settimeout(0.5)
                sock.sendall(start)


def test_unfinished_frames_of_a_key_holder_share_one_budget() -> None:
    with guarded("control") as served, holds_its_size(served), ExitStack() as peers:
        for _ in range(40):
            peer = peers.enter_context(WirePeer.dial(served.port, served.secret))
            peer.sock.settimeout(0.5)
            with contextlib.suppress(OSError):
                peer.send_bytes(b"\x02" + (4 << 20).to_bytes(8, "big") + bytes(3 << 20))


@each_port
def test_idle_connections_leave_descriptors_for_key_holders(kind: str, key: str) -> None:
    """At a limit of 256 descriptors, 700 connections come and send nothing, or the handshake and nothing more."""
    with guarded(kind, key, files=256) as served, ExitStack() as idle:
        for number in range(700):
            sock = idle.enter_context(served.open())
            if number % 2:
                sock.sendall(GREETING + READY)
            if number % 100 == 99:
                served.assert_serves()
        served.assert_serves()
        assert served.files() < 200
        assert not any("Traceback" in line for line in served.lines)


@each_port
def test_a_peer_that_was_there_before_is_served_through_a_flood_of_connections(kind: str, key: str) -> None:
    with guarded(kind, key, files=256) as served:
        stopping = threading.Event()

        def flood() -> None:
            while not stopping.is_set():
                with contextlib.suppress(OSError), ExitStack() as some:
                    for _ in range(20):
                        some.enter_context(served.open()).sendall(GREETING)

        floods = [threading.Thread(target=flood) for _ in range(3)]
        with WirePeer.dial(served.port, served.secret if kind == "control" else None) as peer:
            if kind == "control":
                peer.send(BEAT)
                peer.receive()
            for each in floods:
                each.start()
            try:
                for _ in range(20 if kind == "control" else 0):
                    peer.send(BEAT)
                    peer.receive()
                served.assert_serves(30.0)
            finally:
                stopping.set()
                for each in floods:
                    each.join(20)
        served.assert_serves()


@pytest.mark.parametrize("kind", ["control", "discovery"])
def test_a_byte_now_and_then_buys_no_time(kind: str) -> None:
    """Whatever it sends, a peer that has not authenticated is ended a few seconds after it has connected."""
    slow = GREETING + READY + b"\x00\xff" + bytes(255)
    with guarded(kind) as served, ExitStack() as sockets:
        dribbling = [sockets.enter_context(served.open()) for _ in range(30)]
        began, at = time.monotonic(), 0
        while dribbling and time.monotonic() - began < 20:
            for sock in list(dribbling):
                try:
                    sock.sendall(slow[at : at + 1])
                except OSError:
                    dribbling.remove(sock)
            at += 1
            time.sleep(0.1)
        assert not dribbling
        assert time.monotonic() - began < 12
        served.assert_serves()


ATTACKED = [*PORTS, ("tcp", KEY), ("http", KEY)]


@pytest.mark.attacks
@pytest.mark.parametrize("frames", ATTACKS)
@pytest.mark.parametrize(("kind", "key"), ATTACKED, ids=lambda value: (value and value.partition(" ")[0]) or "no key")
def test_frames_of_every_class(kind: str, key: str, frames: str) -> None:
    """It lives, serves key holders all the while, stays within 64 MB of its size, and logs a cause once a second at most."""
    attack = ATTACKS[frames]
    with guarded(kind, key) as served, holds_its_size(served):
        began = time.monotonic()
        count = FRAMES or QUICK_FRAMES[kind]
        with ThreadPoolExecutor(1) as pool:
            attacker = pool.submit(attack, served, random.Random(15), count)
            while not attacker.done():
                served.assert_serves(30.0)
                wait([attacker], 0.2)
        assert attacker.result() >= 0.95 * count, "the attack itself was held up"
    took_s = time.monotonic() - began
    assert too_often(served, took_s) == {}, f"in {took_s:.0f} s"
    assert not any("Traceback" in line for line in served.lines)


@pytest.mark.attacks
def test_every_kind_of_message_of_key_holders_at_real_agents() -> None:
    """Well-formed messages with wrong contents: the agents live, serve, stay small, and log a cause once a second at most."""
    with guarded("agent") as served, holds_its_size(served):
        began = time.monotonic()
        count = FRAMES or QUICK_FRAMES["agent"]
        with ThreadPoolExecutor(1) as pool:
            attacker = pool.submit(ATTACKS["sealed"], served, random.Random(15), count)
            while not attacker.done():
                served.assert_serves(30.0)
                wait([attacker], 0.2)
        assert attacker.result() >= 0.95 * count, "the attack itself was held up"
    took_s = time.monotonic() - began
    assert too_often(served, took_s) == {}, f"in {took_s:.0f} s"
    assert not any("Traceback" in line or not line.rstrip("\n").isprintable() for line in served.lines)


# What a recorded frame is worth.


def taken_by(peer: WirePeer) -> int:
    """How many messages were taken so far, with the one that asks."""
    peer.send(encode(Incarnation("auditor"), "", Heartbeat(True, ())))
    message = decode(peer.receive()).message
    assert isinstance(message, Heartbeat)
    return message.live[0][1]


def test_a_recorded_session_is_worth_nothing_on_another_connection() -> None:
    with guarded("control") as served, ExitStack() as peers:
        auditor, peer = (peers.enter_context(WirePeer.dial(served.port, served.secret)) for _ in range(2))
        for _ in range(10):
            peer.send(BEAT)
            peer.receive()
        taken = taken_by(auditor)
        for recorded in (peer.sent, GREETING + READY + peer.sent[-300:]):
            answer = b""
            with served.open() as attacker, contextlib.suppress(ConnectionError):
                attacker.sendall(recorded)
                while data := attacker.recv(65536):
                    answer += data
            assert b"ERROR" in answer
        assert taken_by(auditor) == taken + 1, "nothing of it was taken"
        peer.send(BEAT)
        assert isinstance(decode(peer.receive()).message, Heartbeat), "the peer's route is where it was"


def test_a_frame_is_taken_once_on_its_own_connection() -> None:
    """An attacker on the path repeats, leaves out or swaps frames: the connection ends, and nothing is taken twice."""
    with guarded("control") as served, WirePeer.dial(served.port, served.secret) as auditor:
        for order in ([0, 0], [1], [0, 2], [0, 1, 0]):
            with WirePeer.dial(served.port, served.secret) as peer:
                assert peer.session is not None
                frames = [peer.session.seal(BEAT) for _ in range(3)]
                taken = taken_by(auditor)
                for number in order:
                    peer.send_frame(frames[number])
                assert peer.is_ended()
                assert "wrong key" in peer.reason
                assert taken_by(auditor) == taken + len(order)


def test_what_the_port_has_sent_cannot_be_sent_back_to_it() -> None:
    with guarded("control") as served, WirePeer.dial(served.port, served.secret) as auditor:
        taken = taken_by(auditor)
        with WirePeer.dial(served.port, served.secret) as peer:
            peer.send(BEAT)
            peer.receive()
            peer.send_bytes(peer.received[-100:])
            assert peer.is_ended()
        assert taken_by(auditor) == taken + 2


@pytest.mark.parametrize("key", [b"the key of another cluster", None], ids=["another key", "no key"])
def test_a_peer_without_the_key_is_sent_the_reason(key: bytes | None) -> None:
    with guarded("control") as served:
        with WirePeer.dial(served.port, key) as peer:
            with contextlib.suppress(ConnectionError):
                peer.send(BEAT)
            assert peer.is_ended()
            assert "set the same" in peer.reason
        served.assert_serves()


def test_a_sealed_registration_counts_once_on_its_connection_too() -> None:
    with guarded("discovery") as served, WirePeer.dial(served.port) as peer:
        seal = Seal(served.secret)
        peer.send(encode_registration(ME, seal))
        nonce = _answer(peer)["nonce"]
        assert isinstance(nonce, bytes)
        asking = msgspec.structs.replace(ME, answer=True)
        first = encode_registration(asking, seal, Freshness.stamp(nonce, 1))
        peer.send(first)
        assert _answer(peer)["type"] == "welcome"
        peer.send(first)
        assert _answer(peer)["type"] == "challenge"
        peer.send(encode_registration(asking, seal, Freshness.stamp(nonce, 2)))
        assert _answer(peer)["type"] == "welcome"
        with WirePeer.dial(served.port) as other:
            other.send(encode_registration(asking, seal, Freshness.stamp(nonce, 3)))
            assert _answer(other)["type"] == "challenge"


def _answer(peer: WirePeer) -> dict[str, object]:
    answer: dict[str, object] = msgspec.msgpack.decode(peer.receive())
    return answer
