"""The control sockets alone: where they listen and dial, what they take, what a refused peer is sent, what they bound."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq
from agent_rig import card_of

from kvbaton.agent import sockets as sockets_module
from kvbaton.agent.sockets import ControlSockets, Dropped
from kvbaton.config import Trust, parse_trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import (
    MAX_FRAME_BYTES,
    MAX_MORE,
    Envelope,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Release,
    Stopped,
    decode,
    encode,
    encode_several,
)
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker, check_port_free
from kvbaton.wire.zmtp import encode_frame
from watching import wait_until
from wire_peer import GREETING, READY, WirePeer

SECRET = b"the key of this cluster"
KEY = Trust(SECRET)
BEAT = Heartbeat(True, ())
ALICE, BOB = Incarnation("alice"), Incarnation("bob")


class Rig:
    """Makes sockets, and takes what arrives at them."""

    def __init__(self, parts: ExitStack) -> None:
        self._parts = parts
        self._ports = PortPicker()

    def make(self, me: Incarnation, trust: Trust | None = None) -> ControlSockets:
        sockets = ControlSockets(me, "127.0.0.1", self._ports.pick(), trust)
        self._parts.callback(sockets.close)
        return sockets

    def free_address(self) -> ControlAddress:
        return ControlAddress.of("127.0.0.1", self._ports.pick())

    def raw(self, kind: int, address: ControlAddress) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._parts.callback(context.destroy, linger=0)
        socket = context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        if kind == zmq.ROUTER:
            socket.bind(f"tcp://{address.host}:{address.handshake}")
        else:
            socket.connect(f"tcp://{address.host}:{address.handshake}")
        return socket


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as parts:
        yield Rig(parts)


def take(sockets: ControlSockets, count: int = 1) -> list[tuple[Envelope, ControlAddress | None]]:
    """The next `count` messages."""
    taken: list[tuple[Envelope, ControlAddress | None]] = []

    def has_enough() -> bool:
        sockets.wait(0.1, [])
        taken.extend(sockets.receive())
        return len(taken) >= count

    wait_until(has_enough, f"{count} messages, not only {taken}")
    return taken


def wait_dropped(sockets: ControlSockets, cause: Dropped, count: int = 1) -> None:
    def is_there() -> bool:
        sockets.wait(0.1, [])
        assert list(sockets.receive()) == []
        return sockets.dropped_total[cause] >= count

    wait_until(is_there, f"{count} dropped as {cause}")


def turn_until(condition: Callable[[], bool], *all_sockets: ControlSockets) -> None:
    """Let each of them take turns until the condition holds; what they receive is thrown away."""

    def is_so() -> bool:
        for sockets in all_sockets:
            sockets.wait(0.01, [])
            list(sockets.receive())
        return condition()

    wait_until(is_so, "the condition holds")


def exchange(sender: ControlSockets, receiver: ControlSockets) -> list[tuple[Incarnation, ControlAddress | None]]:
    """The sender and the address of each message that the receiver takes next, while the sender takes its turns too."""
    taken: list[tuple[Envelope, ControlAddress | None]] = []

    def has_some() -> bool:
        for sockets in (sender, receiver):
            sockets.wait(0.01, [])
            got = list(sockets.receive())
            if sockets is receiver:
                taken.extend(got)
        return bool(taken)

    wait_until(has_some, "a message")
    return [(envelope.sender, via) for envelope, via in taken]


@contextmanager
def dial(sockets: ControlSockets, key: bytes | None) -> Iterator[WirePeer]:
    """A connection from outside, behind its handshake."""
    with ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(WirePeer.dial, sockets.address.handshake, key)
        turn_until(dialling.done, sockets)
        with dialling.result() as peer:
            yield peer


@contextmanager
def count_connections(address: ControlAddress) -> Iterator[Callable[[], int]]:
    """Closes every connection that is made to an address; how many there were."""
    count, stopping = [0], threading.Event()

    def accept(server: socket.socket) -> None:
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                server.accept()[0].close()
                count[0] += 1

    with socket.create_server((address.host, address.handshake)) as server:
        server.settimeout(0.05)
        thread = threading.Thread(target=accept, args=(server,))
        thread.start()
        try:
            yield lambda: count[0]
        finally:
            stopping.set()
            thread.join()


@pytest.mark.parametrize("trust", [None, KEY, parse_trust(allow=["127.0.0.1"])], ids=["open", "key", "list"])
def test_a_question_and_its_answer_travel_over_one_connection(rig: Rig, trust: Trust | None) -> None:
    alice, bob = rig.make(ALICE, trust), rig.make(BOB, trust)
    alice.dial(bob.address, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]
    bob.send(ALICE, BEAT)
    assert exchange(bob, alice) == [(BOB, bob.address)]
    alice.send(BOB, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]
    assert alice.dropped_total.total() == bob.dropped_total.total() == 0


@pytest.mark.parametrize(("beat_s", "expected_s"), [(0.25, 1.0), (2.5, 2.5)], ids=["at least a second", "one interval"])
def test_an_acknowledgement_is_awaited_for_one_interval_of_heartbeats(beat_s: float, expected_s: float) -> None:
    """What comes of it over a link that is cut: tests/e2e/test_cut_connections.py."""
    with contextlib.closing(ControlSockets(ALICE, "127.0.0.1", PortPicker().pick(), beat_s=beat_s)) as alice:
        assert vars(alice)["_limits"].unacknowledged_s == expected_s


def test_listening_where_others_can_reach_it_needs_a_key_or_a_list() -> None:
    with pytest.raises(ConfigError, match=r"would listen on 0\.0\.0\.0.*--cluster-key-file.*--allow"):
        ControlSockets(ALICE, "0.0.0.0", PortPicker().pick())  # noqa: S104
    port = PortPicker().pick()
    for trust in (KEY, parse_trust(allow=["10.0.0.0/8"])):
        ControlSockets(ALICE, "0.0.0.0", port, trust).close()  # noqa: S104


def test_a_port_in_use_is_refused_by_number(rig: Rig) -> None:
    port = rig.make(ALICE).address.handshake
    with pytest.raises(ConfigError, match=rf"control port {port} on 127\.0\.0\.1: Address already in use.*; choose another"):
        ControlSockets(BOB, "127.0.0.1", port)


def test_close_frees_the_port_and_can_be_repeated(rig: Rig) -> None:
    alice, bob = rig.make(ALICE), rig.make(BOB)
    alice.dial(bob.address, BEAT)
    alice.close()
    alice.close()
    check_port_free("127.0.0.1", alice.address.handshake, "--control-port")


def test_an_address_that_must_not_be_dialled_is_not_and_is_reported_once(rig: Rig) -> None:
    alice, elsewhere = rig.make(ALICE), ControlAddress.of("10.0.0.1", 9)
    alice.dial(elsewhere, BEAT)
    alice.dial(elsewhere, BEAT)
    assert alice._dialled == {}
    assert alice.wait(60.0, []) is True
    [(address, reason)] = alice.refusals()
    assert address == elsewhere
    assert "10.0.0.1 is not this machine" in reason
    assert alice.refusals() == []
    assert alice.wait(0.0, []) is False
    assert alice.dropped_total[Dropped.NOT_DIALLED] == 2


@pytest.mark.parametrize("host", ["..", "-", "_"])
def test_an_address_that_cannot_be_dialled_is_reported_too(rig: Rig, host: str) -> None:
    alice = rig.make(ALICE, KEY)
    for _ in range(3000):
        alice.dial(ControlAddress.of(host, 9), BEAT)
    [(address, reason)] = alice.refusals()
    assert address.host == host
    assert "cannot be dialled: Invalid argument" in reason
    assert alice.dropped_total[Dropped.NOT_DIALLED] == 3000


def test_a_port_beyond_all_limits_ends_neither_the_dial_nor_the_wait(rig: Rig) -> None:
    alice, bob = rig.make(ALICE), rig.make(BOB)
    alice.dial(ControlAddress.of("127.0.0.1", 1 << 40), BEAT)
    alice.wait(0.0, [])
    alice.dial(bob.address, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]


def test_the_dial_table_is_bounded_and_keeps_peers_that_have_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "_MAX_DIALLED", 4)
    alice, bob = rig.make(ALICE), rig.make(BOB)
    alice.dial(bob.address, BEAT)
    exchange(alice, bob)
    bob.send(ALICE, BEAT)
    exchange(bob, alice)
    for _ in range(10):
        alice.dial(rig.free_address(), BEAT)
    assert len(alice._dialled) == 4
    alice.send(BOB, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]


def test_causes_are_there_before_anything_happened(rig: Rig) -> None:
    assert rig.make(ALICE).dropped_total == dict.fromkeys(Dropped, 0)


def test_an_address_where_another_protocol_answers_is_hung_up(rig: Rig) -> None:
    alice, address = rig.make(ALICE), rig.free_address()
    other = rig.raw(zmq.ROUTER, address)
    alice.dial(address, BEAT)
    turn_until(lambda: bool(other.poll(0)), alice)
    caller, _ = other.recv_multipart()
    other.send_multipart([caller, b"two", b"parts"])
    wait_dropped(alice, Dropped.WRONG_FRAMES)
    assert alice.refusals() == [
        (address, f"what answers at {address} is no peer of ours: a message of 2 frames; ours have one")
    ]
    assert address not in alice._dialled
    alice.dial(address, BEAT)
    turn_until(lambda: bool(other.poll(0)), alice)
    assert other.recv_multipart()[0] != caller, "the next dial connects anew"


def test_a_peer_that_sends_something_odd_keeps_its_connection(rig: Rig) -> None:
    alice, address = rig.make(ALICE), rig.free_address()
    bob = rig.raw(zmq.ROUTER, address)
    alice.dial(address, BEAT)
    turn_until(lambda: bool(bob.poll(0)), alice)
    caller, _ = bob.recv_multipart()
    bob.send_multipart([caller, encode(BOB, ALICE, BEAT)])
    assert len(take(alice)) == 1
    bob.send_multipart([caller, b"odd"])
    wait_dropped(alice, Dropped.NOT_A_MESSAGE)
    assert [refused for refused, _ in alice.refusals()] == [address]
    alice.send(BOB, BEAT)
    alice.wait(0.0, [])
    assert bob.recv_multipart()[0] == caller


def test_a_peer_is_sent_nothing_before_its_first_message(rig: Rig) -> None:
    alice = rig.make(ALICE)
    alice.send(BOB, BEAT)
    assert alice.dropped_total[Dropped.NO_ROUTE] == 1


def test_a_peer_that_is_not_understood_is_sent_the_reason(rig: Rig) -> None:
    alice = rig.make(ALICE)
    wire = rig.raw(zmq.DEALER, alice.address)
    wire.send(encode(BOB, "", BEAT).replace(b"\xa7version" + bytes([PROTOCOL]), b"\xa7version\x63"))
    wait_dropped(alice, Dropped.NOT_A_MESSAGE)
    answer = decode(wire.recv())
    assert answer.message == Refused(f"protocol version is {PROTOCOL} here and 99 there")


def test_a_dialled_address_without_the_key_learns_nothing_but_a_nonce(rig: Rig) -> None:
    """The address may be one that a client made up: no card, no incarnation, nothing sealed goes there."""
    listener = rig.free_address()
    wire, alice = rig.raw(zmq.ROUTER, listener), rig.make(ALICE, KEY)
    alice.dial(listener, BEAT)
    wait_dropped(alice, Dropped.NOT_AUTHENTICATED)
    [(address, reason)] = alice.refusals()
    assert address == listener
    assert "not authenticated: a cluster key is set here, but the peer has none" in reason
    assert not wire.poll(200), "not one message"


@pytest.mark.parametrize("key", [b"the key of another cluster", None], ids=["another key", "no key"])
def test_a_listener_has_to_prove_itself_before_it_is_sent_anything(rig: Rig, key: bytes | None) -> None:
    alice, address = rig.make(ALICE, KEY), rig.free_address()
    with socket.create_server((address.host, address.handshake)) as server:
        alice.dial(address, BEAT)
        for _ in range(3):
            alice.wait(0.1, [])
            list(alice.receive())
        with WirePeer(server.accept()[0], key, is_listener=True) as wire:
            wire.shake_hands()
            wait_dropped(alice, Dropped.NOT_AUTHENTICATED)
            assert wire.is_ended()
            assert ALICE.encode() not in wire.received
            assert SECRET not in wire.received
    assert address not in alice._dialled or not alice._dialled[address].is_proven


def test_no_key_here_is_named_on_either_side(rig: Rig) -> None:
    alice, bob = rig.make(ALICE, KEY), rig.make(BOB)
    bob.dial(alice.address, BEAT)
    turn_until(lambda: bob.dropped_total[Dropped.NOT_AUTHENTICATED] > 0, alice, bob)
    [(address, reason)] = bob.refusals()
    assert address == alice.address
    assert reason.startswith(f"what answers at {alice.address} is no peer of ours: no key here")
    assert alice.dropped_total[Dropped.NOT_AUTHENTICATED] == 1
    assert alice.refusals() == []


def test_an_address_off_the_list_is_refused_whatever_it_sends(rig: Rig) -> None:
    alice, bob = rig.make(ALICE, parse_trust(allow=["10.0.0.0/8"])), rig.make(BOB)
    bob.dial(alice.address, BEAT)
    turn_until(lambda: bool(bob._refusals), alice, bob)
    assert alice.dropped_total[Dropped.NOT_ALLOWED] >= 1
    assert bob.refusals() == [
        (alice.address, f"refused by {alice.address}: 127.0.0.1 is not on the allow-list here"),
    ]


def test_with_a_list_and_a_key_the_key_alone_is_not_enough(rig: Rig) -> None:
    assert KEY.key is not None
    strict = Trust(KEY.key, parse_trust(allow=["10.0.0.0/8"]).allowed)
    alice, bob = rig.make(ALICE, strict), rig.make(BOB, KEY)
    bob.dial(alice.address, BEAT)
    turn_until(lambda: alice.dropped_total[Dropped.NOT_ALLOWED] > 0, alice, bob)
    alice.dial(bob.address, BEAT)
    assert alice.dropped_total[Dropped.NOT_DIALLED] == 1


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 10_000_000])
def test_a_frame_that_is_too_large_is_counted(rig: Rig, size: int) -> None:
    alice = rig.make(ALICE)
    rig.raw(zmq.DEALER, alice.address).send(bytes(size))
    wait_dropped(alice, Dropped.NOT_A_MESSAGE)


def test_drops_are_all_counted_and_logged_once_a_second(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    alice = rig.make(ALICE)
    wire = rig.raw(zmq.DEALER, alice.address)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            wire.send(b"?")
        wait_dropped(alice, Dropped.NOT_A_MESSAGE, 1000)
    assert 1 <= len(caplog.records) <= 2 + time.monotonic() - began


def test_what_a_peer_sends_stands_in_a_log_line_without_its_line_breaks(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    bob = rig.make(BOB)
    with caplog.at_level(logging.WARNING):
        name = Incarnation("evil\n2026-01-01 ERROR all is lost\x1b[2J" + "x" * 200)
        with socket.create_connection(("127.0.0.1", bob.address.handshake), timeout=10) as sock:
            sock.sendall(GREETING + READY + encode_frame(encode(ALICE, "", BEAT)) + encode_frame(encode(name, "", BEAT)))
            turn_until(lambda: bob.dropped_total[Dropped.OTHER_SENDER] == 1, bob)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 500


def test_a_connection_belongs_to_the_incarnation_of_its_first_message(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with dial(alice, SECRET) as wire:
        wire.send(encode(BOB, "", BEAT))
        assert take(alice)[0][0].sender == BOB
        wire.send(encode(Incarnation("carol"), "", BEAT))
        wait_dropped(alice, Dropped.OTHER_SENDER)
        assert isinstance(decode(wire.receive()).message, Refused)
        alice.send(Incarnation("carol"), BEAT)
        assert alice.dropped_total[Dropped.NO_ROUTE] == 1
        wire.send(encode(BOB, "", BEAT))
        assert take(alice)[0][0].sender == BOB


def test_our_own_incarnation_is_no_peer(rig: Rig) -> None:
    """A connection that an attacker passes on to the process that made it proves the key, and would talk to itself."""
    alice = rig.make(ALICE, KEY)
    alice.dial(alice.address, BEAT)
    wait_dropped(alice, Dropped.OTHER_SENDER)
    assert alice.dropped_total.total() == 1


def test_peers_that_dial_each_other_are_answered_where_they_asked(rig: Rig) -> None:
    alice, bob = rig.make(ALICE, KEY), rig.make(BOB, KEY)
    alice.dial(bob.address, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]
    bob.dial(alice.address, BEAT)
    assert exchange(bob, alice) == [(BOB, None)]
    alice.send(BOB, BEAT)
    assert exchange(alice, bob) == [(ALICE, alice.address)]
    alice.dial(bob.address, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]
    bob.send(ALICE, BEAT)
    assert exchange(bob, alice) == [(BOB, bob.address)]


def test_a_peer_with_two_connections_is_reached_over_the_one_that_is_left(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with dial(alice, SECRET) as first:
        first.send(encode(BOB, "", BEAT))
        take(alice)
        with dial(alice, SECRET) as second:
            second.send(encode(BOB, "", BEAT))
            take(alice)
        turn_until(lambda: len(list(alice._door.known)) == 1, alice)
        alice.send(BOB, BEAT)
        alice.wait(0.0, [])
        assert decode(first.receive()).sender == ALICE


def test_a_listener_that_starts_late_is_reached_without_a_second_dial(rig: Rig) -> None:
    alice, address = rig.make(ALICE, KEY), rig.free_address()
    alice.dial(address, BEAT)
    for _ in range(3):
        alice.wait(0.1, [])
        list(alice.receive())
    bob = ControlSockets(BOB, "127.0.0.1", address.handshake, KEY)
    try:
        assert exchange(alice, bob) == [(ALICE, None)]
    finally:
        bob.close()


def test_a_dial_ends_soon_after_the_last_request_has_asked_for_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "_DIAL_LIFE_S", 0.3)
    alice, address = rig.make(ALICE, KEY), rig.free_address()
    with count_connections(address) as connections:
        alice.dial(address, BEAT)
        turn_until(lambda: not alice._dialled, alice)
        before = connections()
        for _ in range(10):
            alice.wait(0.1, [])
            list(alice.receive())
        assert connections() == before


def test_a_dial_ends_when_it_is_needed_no_longer_and_a_peer_that_answered_stays(rig: Rig) -> None:
    alice, bob, address = rig.make(ALICE, KEY), rig.make(BOB, KEY), rig.free_address()
    with count_connections(address) as connections:
        alice.dial(address, BEAT)
        turn_until(lambda: connections() > 0, alice)
        alice.hang_up(address)
        assert not alice._dialled
        before = connections()
        for _ in range(10):
            alice.wait(0.1, [])
            list(alice.receive())
        assert connections() == before
    alice.hang_up(address)
    alice.dial(bob.address, BEAT)
    exchange(alice, bob)
    bob.send(ALICE, BEAT)
    exchange(bob, alice)
    alice.hang_up(bob.address)
    alice.send(BOB, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]


def test_a_peer_that_is_gone_is_not_dialled_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "_DIAL_LIFE_S", 0.3)
    alice, bob = rig.make(ALICE, KEY), rig.make(BOB, KEY)
    alice.dial(bob.address, BEAT)
    exchange(alice, bob)
    bob.send(ALICE, BEAT)
    exchange(bob, alice)
    bob.close()
    turn_until(lambda: alice._dialled[bob.address].connection is None, alice)
    alice.send(BOB, BEAT)
    turn_until(lambda: not alice._dialled, alice)
    alice.send(BOB, BEAT)
    assert alice.dropped_total[Dropped.NO_ROUTE] == 1


def test_dials_of_addresses_that_never_answered_are_few_per_second(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "_DIAL_BURST", 5.0)
    monkeypatch.setattr(sockets_module, "_DIALS_PER_S", 0.001)
    alice, bob, address = rig.make(ALICE, KEY), rig.make(BOB, KEY), rig.free_address()
    alice.dial(bob.address, BEAT)
    exchange(alice, bob)
    bob.send(ALICE, BEAT)
    exchange(bob, alice)
    with count_connections(address) as connections:
        for _ in range(30):
            alice.dial(address, BEAT)
            alice.wait(0.05, [])
            list(alice.receive())
        assert 1 <= connections() <= 4
    alice.send(BOB, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)], "a peer that has answered is reached all the same"


def test_a_name_that_takes_long_to_look_up_holds_up_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, is_slow = socket.getaddrinfo, threading.Event()

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "slow.example":
            is_slow.wait(20)
            return look_up("127.0.0.1", *arguments, **options)
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    alice, bob, carol = rig.make(ALICE, KEY), rig.make(BOB, KEY), rig.make(Incarnation("carol"), KEY)
    alice.dial(ControlAddress.of("slow.example", carol.address.handshake), BEAT)
    alice.dial(bob.address, BEAT)
    assert exchange(alice, bob) == [(ALICE, None)]
    is_slow.set()
    assert exchange(alice, carol) == [(ALICE, None)]


def releases(count: int) -> list[Release]:
    return [Release(HandoffKey(TransferId(f"tx-{number}")), number + 1) for number in range(count)]


@contextmanager
def greeted(sockets: ControlSockets, *, takes_several: bool) -> Iterator[WirePeer]:
    """A key holder that has shown its card, and whether it reads frames of several messages."""
    with dial(sockets, SECRET) as peer:
        peer.send(encode(BOB, "", Hello(card_of("bob"), wants_answer=False, takes_several=takes_several)))
        take(sockets)
        yield peer


def sent_to(peer: WirePeer, count: int) -> list[tuple[Message, ...]]:
    """The messages of each of the next `count` frames."""
    frames = [decode(peer.receive()) for _ in range(count)]
    return [(frame.message, *frame.more) for frame in frames]


def test_what_is_sent_in_one_turn_leaves_in_one_frame(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with greeted(alice, takes_several=True) as bob:
        for message in releases(5):
            alice.send(BOB, message)
        alice.wait(0.0, [])
        alice.send(BOB, BEAT)
        alice.wait(0.0, [])
        assert sent_to(bob, 2) == [tuple(releases(5)), (BEAT,)]
        assert alice.dropped_total.total() == 0


def test_a_peer_that_has_not_announced_it_gets_one_message_per_frame(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with greeted(alice, takes_several=False) as bob:
        for message in releases(5):
            alice.send(BOB, message)
        alice.wait(0.0, [])
        assert sent_to(bob, 5) == [(message,) for message in releases(5)]


def test_more_messages_than_a_frame_takes_leave_in_several_and_in_order(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with greeted(alice, takes_several=True) as bob:
        many = releases(2 * MAX_MORE + 5)
        for message in many:
            alice.send(BOB, message)
        alice.wait(0.0, [])
        frames = sent_to(bob, 3)
        assert [len(frame) for frame in frames] == [MAX_MORE + 1, MAX_MORE + 1, 3]
        assert [message for frame in frames for message in frame] == many


def test_messages_that_are_long_together_leave_each_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = rig.make(ALICE, KEY)
    monkeypatch.setattr(sockets_module, "_MAX_TOGETHER_BYTES", 100)
    with greeted(alice, takes_several=True) as bob:
        for message in releases(3):
            alice.send(BOB, message)
        alice.wait(0.0, [])
        alice.send(BOB, BEAT)
        alice.wait(0.0, [])
        assert sent_to(bob, 4) == [*((message,) for message in releases(3)), (BEAT,)]


def test_answers_of_a_turn_leave_when_everything_was_read(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with greeted(alice, takes_several=True) as bob:
        bob.send(encode_several(BOB, ALICE, releases(3)))
        taken: list[Message] = []

        def has_answered() -> bool:
            alice.wait(0.1, [])
            for envelope, _ in alice.receive():
                taken.append(envelope.message)
                if isinstance(envelope.message, Release):
                    alice.send(BOB, Stopped(envelope.message.key, envelope.message.grant))
            return bool(taken)

        wait_until(has_answered, "a turn with messages")
        assert taken == releases(3)
        assert sent_to(bob, 1) == [tuple(Stopped(each.key, each.grant) for each in releases(3))]


def test_each_message_of_a_frame_has_an_envelope_of_its_own(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with greeted(alice, takes_several=True) as bob:
        bob.send(encode_several(BOB, ALICE, releases(4)))
        taken = take(alice, 4)
        assert [envelope for envelope, _ in taken] == [Envelope(PROTOCOL, BOB, ALICE, message) for message in releases(4)]
        assert {via for _, via in taken} == {None}


def test_what_waits_for_the_turn_to_end_leaves_before_the_sockets_close(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with greeted(alice, takes_several=True) as bob:
        for message in releases(2):
            alice.send(BOB, message)
        alice.close()
        assert sent_to(bob, 1) == [tuple(releases(2))]


def test_what_waits_for_a_peer_that_has_gone_is_dropped_and_counted(rig: Rig) -> None:
    alice = rig.make(ALICE, KEY)
    with greeted(alice, takes_several=True):
        pass
    turn_until(lambda: not list(alice._door.known), alice)
    alice.send(BOB, BEAT)
    assert alice.dropped_total[Dropped.NO_ROUTE] == 1
