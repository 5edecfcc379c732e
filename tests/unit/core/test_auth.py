"""What the cluster key proves: a sealed message, a connection, a pair of addresses; to its holders, and once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import MIN_KEY_BYTES, SEAL_BYTES, TAG_BYTES, AddressProof, Seal, Session
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Heartbeat, decode, encode
from kvbaton.errors import ConfigError, ProtocolError

KEY = b"sixteen bytes or more"
OTHER = b"sixteen bytes or less"
FRAME = encode(Incarnation("a"), "b", Heartbeat(True, ()))

keys = st.binary(min_size=MIN_KEY_BYTES, max_size=200)


@given(key=keys, frame=st.binary(max_size=300))
def test_what_is_sealed_is_opened_with_the_same_key(key: bytes, frame: bytes) -> None:
    sealed = Seal(key).seal(frame)
    assert len(sealed) == len(frame) + SEAL_BYTES
    assert Seal(key).open(sealed) == frame


@given(st.data())
def test_not_one_bit_may_change(data: st.DataObject) -> None:
    sealed = bytearray(Seal(KEY).seal(FRAME))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=r"^(wrong key|not authenticated): "):
        Seal(KEY).open(bytes(sealed))


@given(length=st.integers(0, SEAL_BYTES + len(FRAME) - 1))
def test_a_cut_message_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=r"^(wrong key|not authenticated): "):
        Seal(KEY).open(Seal(KEY).seal(FRAME)[:length])


@given(key=keys, other=keys)
def test_another_key_is_named_as_what_is_wrong(key: bytes, other: bytes) -> None:
    if key != other:
        with pytest.raises(ProtocolError, match=r"^wrong key: .* set the same on both sides"):
            Seal(other).open(Seal(key).seal(FRAME))


def test_long_keys_count_to_their_last_byte() -> None:
    with pytest.raises(ProtocolError, match="wrong key"):
        Seal(b"k" * 100 + b"1").open(Seal(b"k" * 100 + b"2").seal(FRAME))


def test_a_seal_covers_version_sender_recipient_and_message() -> None:
    seal = Seal(KEY).seal(FRAME)[:SEAL_BYTES]
    changed = [
        encode(Incarnation("c"), "b", Heartbeat(True, ())),
        encode(Incarnation("a"), "c", Heartbeat(True, ())),
        encode(Incarnation("a"), "b", Heartbeat(False, ())),
        FRAME.replace(b"\xa7version" + bytes([PROTOCOL]), b"\xa7version" + bytes([PROTOCOL + 1])),
    ]
    for frame in changed:
        assert frame != FRAME
        with pytest.raises(ProtocolError, match="wrong key"):
            Seal(KEY).open(seal + frame)
    assert decode(Seal(KEY).open(seal + FRAME)).sender == "a"


@given(st.binary(max_size=100) | st.just(FRAME))
def test_with_a_key_what_is_not_sealed_is_not_authenticated(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^(not authenticated|wrong key): .* set the same on both sides"):
        Seal(KEY).open(frame)


def test_without_a_key_messages_pass_as_they_are() -> None:
    assert Seal(None).seal(FRAME) == FRAME
    assert Seal(None).open(FRAME) == FRAME


def test_without_a_key_a_sealed_message_is_refused_with_what_to_do() -> None:
    with pytest.raises(ProtocolError, match=r"^no key here: .* set the same on both sides"):
        Seal(None).open(Seal(KEY).seal(FRAME))


@pytest.mark.parametrize("key", [b"", b"short", b"k" * (MIN_KEY_BYTES - 1)])
def test_a_short_key_is_refused_without_being_shown(key: bytes) -> None:
    with pytest.raises(ConfigError, match=rf"has {len(key)} bytes; it must have at least {MIN_KEY_BYTES}") as caught:
        Seal(key)
    assert not key or key.decode() not in str(caught.value)


def test_no_text_shows_the_key() -> None:
    texts = [repr(Seal(KEY)), str(Seal(KEY)), repr(session())]
    for frame in (FRAME, Seal(OTHER).seal(FRAME)):
        with pytest.raises(ProtocolError) as caught:
            Seal(KEY).open(frame)
        texts.append(str(caught.value))
    for text in texts:
        assert KEY.decode() not in text
        assert KEY.hex() not in text


# One connection.


def session(
    key: bytes = KEY, dialled: bytes = b"nonce of one", accepted: bytes = b"nonce of two", *, is_listener: bool = False
) -> Session:
    return Session(key, dialled=dialled, accepted=accepted, is_listener=is_listener)


@given(keys, st.lists(st.tuples(st.booleans(), st.binary(max_size=300)), max_size=20))
def test_both_ends_of_a_session_open_what_the_other_seals(key: bytes, frames: list[tuple[bool, bytes]]) -> None:
    dialler, listener = session(key), session(key, is_listener=True)
    for from_dialler, frame in frames:
        sender, receiver = (dialler, listener) if from_dialler else (listener, dialler)
        sealed = sender.seal(frame)
        assert len(sealed) == len(frame) + TAG_BYTES
        assert receiver.open(sealed) == frame


@given(st.data())
def test_not_one_bit_of_a_frame_may_change(data: st.DataObject) -> None:
    sealed = bytearray(session().seal(FRAME))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=r"^wrong key"):
        session(is_listener=True).open(bytes(sealed))


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1])
def test_what_is_shorter_than_a_tag_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError):
        session(is_listener=True).open(session().seal(b"")[:length])


OTHERS = {
    "another key": session(OTHER),
    "another nonce of the dialler": session(dialled=b"nonce of 1"),
    "another nonce of the listener": session(accepted=b"nonce of 2"),
    "nonces that are cut elsewhere": session(dialled=b"nonce of onen", accepted=b"once of two"),
    "the other direction": session(is_listener=True),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_was_sealed_for_another_session_does_not_open(other: Session) -> None:
    with pytest.raises(ProtocolError, match=r"^wrong key: .* set the same on both sides"):
        session(is_listener=True).open(other.seal(FRAME))


def test_a_frame_opens_once_and_in_its_place_only() -> None:
    sender = session()
    first, second, third = (sender.seal(b"%d" % number) for number in range(3))
    for order in ([first, first], [second], [first, third], [first, second, first]):
        receiver = session(is_listener=True)
        for frame in order[:-1]:
            receiver.open(frame)
        with pytest.raises(ProtocolError):
            receiver.open(order[-1])


# Two addresses.

TRANSFER = "tx-1"
PREFILL, DECODE = ControlAddress.of("10.0.0.1", 1), ControlAddress.of("10.0.0.2", 2)


def test_a_proof_is_that_of_its_transfer_and_its_addresses() -> None:
    proof = AddressProof(KEY, PREFILL, DECODE).of(TRANSFER)
    assert AddressProof(KEY, PREFILL, DECODE).fits(proof, TRANSFER)
    assert not AddressProof(KEY, PREFILL, DECODE).fits(proof, "tx-2")
    for key, prefill, decode_address in [
        (KEY, DECODE, PREFILL),
        (KEY, ControlAddress.of("10.0.0.9", 1), DECODE),
        (KEY, PREFILL, ControlAddress.of("10.0.0.2", 20)),
        (KEY, PREFILL, ControlAddress("10.0.0.2", 2, 3)),
        (OTHER, PREFILL, DECODE),
    ]:
        assert not AddressProof(key, prefill, decode_address).fits(proof, TRANSFER)


@given(st.text(max_size=80))
def test_no_other_text_is_a_proof(text: str) -> None:
    assert not AddressProof(KEY, PREFILL, DECODE).fits(text, TRANSFER)


def test_a_proof_seals_nothing_and_a_seal_proves_nothing() -> None:
    parts = b"".join(len(text).to_bytes(8, "big") + text.encode() for text in (str(PREFILL), str(DECODE), TRANSFER))
    assert AddressProof(KEY, PREFILL, DECODE).of(TRANSFER) not in Seal(KEY).seal(parts).hex()
