"""The control sockets alone: where they listen and dial, what they take, what they tell whom they refuse, what they bound."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq

from kvbaton.agent import sockets as sockets_module
from kvbaton.agent.sockets import ControlSockets, Dropped
from kvbaton.config import Trust, parse_trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import MAX_FRAME_BYTES, Envelope, Heartbeat, Refused, decode, encode
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker, check_port_free
from watching import wait_until

KEY = Trust(b"the key of this cluster")
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
            socket.bind(address.zmq_url)
        else:
            socket.connect(address.zmq_url)
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


@pytest.mark.parametrize("trust", [None, KEY, parse_trust(allow=["127.0.0.1"])], ids=["open", "key", "list"])
def test_a_question_and_its_answer_travel_over_one_connection(rig: Rig, trust: Trust | None) -> None:
    alice, bob = rig.make(ALICE, trust), rig.make(BOB, trust)
    alice.dial(bob.address, BEAT)
    assert take(bob) == [(Envelope(PROTOCOL, ALICE, "", BEAT), None)]
    bob.send(ALICE, BEAT)
    [(envelope, via)] = take(alice)
    assert (envelope.sender, envelope.recipient, via) == (BOB, ALICE, bob.address)
    alice.send(BOB, BEAT)
    [(envelope, via)] = take(bob)
    assert (envelope.sender, envelope.recipient, via) == (ALICE, BOB, None)
    assert alice.dropped_total.total() == bob.dropped_total.total() == 0


def test_nobody_is_sent_anything_before_he_was_heard(rig: Rig) -> None:
    alice = rig.make(ALICE)
    alice.send(BOB, BEAT)
    assert alice.dropped_total[Dropped.NO_ROUTE] == 1


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


def test_a_frame_on_the_wire_is_sealed(rig: Rig) -> None:
    listener = rig.free_address()
    wire = rig.raw(zmq.ROUTER, listener)
    rig.make(ALICE, KEY).dial(listener, BEAT)
    _, frame = wire.recv_multipart()
    assert frame.startswith(b"\xc1KVB\x01")
    assert frame.endswith(encode(ALICE, "", BEAT))
    assert KEY.key is not None
    assert KEY.key not in frame


def test_an_address_that_must_not_be_dialled_is_not_and_is_told_once(rig: Rig) -> None:
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
def test_an_address_that_cannot_be_dialled_is_told_too(rig: Rig, host: str) -> None:
    alice = rig.make(ALICE, KEY)
    for _ in range(3000):
        alice.dial(ControlAddress.of(host, 9), BEAT)
    [(address, reason)] = alice.refusals()
    assert address.host == host
    assert "cannot be dialled: Invalid argument" in reason
    assert alice.dropped_total[Dropped.NOT_DIALLED] == 3000


def test_whoever_is_not_understood_is_told_why(rig: Rig) -> None:
    alice = rig.make(ALICE)
    wire = rig.raw(zmq.DEALER, alice.address)
    wire.send(encode(BOB, "", BEAT).replace(b"\xa7version" + bytes([PROTOCOL]), b"\xa7version\x63"))
    wait_dropped(alice, Dropped.NOT_A_MESSAGE)
    answer = decode(wire.recv())
    assert answer.message == Refused(f"protocol version is {PROTOCOL} here and 99 there")


def test_who_has_no_key_is_told_in_a_sealed_frame(rig: Rig) -> None:
    alice, bob = rig.make(ALICE, KEY), rig.make(BOB)
    bob.dial(alice.address, BEAT)
    wait_dropped(alice, Dropped.NOT_AUTHENTICATED)
    wait_dropped(bob, Dropped.NOT_AUTHENTICATED)
    [(address, reason)] = bob.refusals()
    assert address == alice.address
    assert reason.startswith(f"what answers at {alice.address} is no peer of ours: no key here")
    assert alice.refusals() == []


def test_a_frame_that_is_played_back_to_its_sender_is_refused(rig: Rig) -> None:
    listener = rig.free_address()
    wire, alice = rig.raw(zmq.ROUTER, listener), rig.make(ALICE, KEY)
    alice.dial(listener, BEAT)
    wire.send_multipart(wire.recv_multipart())
    wait_dropped(alice, Dropped.NOT_AUTHENTICATED)
    assert "wrong key" in alice.refusals()[0][1]


def test_who_is_not_on_the_list_is_not_heard_whatever_he_says(rig: Rig) -> None:
    alice, bob = rig.make(ALICE, parse_trust(allow=["10.0.0.0/8"])), rig.make(BOB)
    bob.dial(alice.address, BEAT)
    wait_dropped(alice, Dropped.NOT_ALLOWED)
    [(envelope, via)] = take(bob)
    assert envelope.message == Refused("127.0.0.1 is not on the allow-list here")
    assert via == alice.address


def test_with_a_list_and_a_key_the_key_alone_is_not_enough(rig: Rig) -> None:
    assert KEY.key is not None
    strict = Trust(KEY.key, parse_trust(allow=["10.0.0.0/8"]).allowed)
    alice, bob = rig.make(ALICE, strict), rig.make(BOB, KEY)
    bob.dial(alice.address, BEAT)
    wait_dropped(alice, Dropped.NOT_ALLOWED)
    alice.dial(bob.address, BEAT)
    assert alice.dropped_total[Dropped.NOT_DIALLED] == 1


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 10_000_000])
def test_a_frame_that_is_too_large_is_counted(rig: Rig, size: int) -> None:
    alice = rig.make(ALICE)
    rig.raw(zmq.DEALER, alice.address).send(bytes(size))
    wait_dropped(alice, Dropped.NOT_A_MESSAGE)


def test_drops_are_all_counted_and_few_of_them_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    alice = rig.make(ALICE)
    wire = rig.raw(zmq.DEALER, alice.address)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            wire.send(b"?")
        wait_dropped(alice, Dropped.NOT_A_MESSAGE, 1000)
    assert len(caplog.records) == 10


def test_the_dial_table_is_bounded_and_keeps_who_has_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "_MAX_DIALLED", 4)
    alice, bob = rig.make(ALICE), rig.make(BOB)
    alice.dial(bob.address, BEAT)
    take(bob)
    bob.send(ALICE, BEAT)
    take(alice)
    for _ in range(10):
        alice.dial(rig.free_address(), BEAT)
    assert len(alice._dialled) == 4
    alice.send(BOB, BEAT)
    assert take(bob)


def test_causes_are_there_before_anything_happened(rig: Rig) -> None:
    assert rig.make(ALICE).dropped_total == dict.fromkeys(Dropped, 0)


def test_an_address_where_somebody_else_answers_is_hung_up(rig: Rig) -> None:
    """Else libzmq would connect there for as long as the process lives."""
    alice, address = rig.make(ALICE), rig.free_address()
    stranger = rig.raw(zmq.ROUTER, address)
    alice.dial(address, BEAT)
    caller, _ = stranger.recv_multipart()
    stranger.send_multipart([caller, b"two", b"parts"])
    wait_dropped(alice, Dropped.WRONG_FRAMES)
    assert alice.refusals() == [
        (address, f"what answers at {address} is no peer of ours: a message of 2 frames; ours have one")
    ]
    assert address not in alice._dialled
    alice.dial(address, BEAT)
    assert stranger.recv_multipart()[0] != caller, "whoever wants it again connects anew"


def test_a_peer_that_says_something_odd_keeps_its_connection(rig: Rig) -> None:
    alice, address = rig.make(ALICE), rig.free_address()
    bob = rig.raw(zmq.ROUTER, address)
    alice.dial(address, BEAT)
    caller, _ = bob.recv_multipart()
    bob.send_multipart([caller, encode(BOB, ALICE, BEAT)])
    assert len(take(alice)) == 1
    bob.send_multipart([caller, b"odd"])
    wait_dropped(alice, Dropped.NOT_A_MESSAGE)
    assert [refused for refused, _ in alice.refusals()] == [address]
    alice.send(BOB, BEAT)
    assert bob.recv_multipart()[0] == caller
