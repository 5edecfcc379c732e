"""Seals: what one holder of the key sealed, the other opens; nobody else, no other way round, and not one bit different."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.auth import MIN_KEY_BYTES, SEAL_BYTES, Seal, Way
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Heartbeat, decode, encode
from kvbaton.errors import ConfigError, ProtocolError

KEY = b"sixteen bytes or more"
OTHER = b"sixteen bytes or less"
FRAME = encode(Incarnation("a"), "b", Heartbeat(True, ()))

keys = st.binary(min_size=MIN_KEY_BYTES, max_size=200)
ways = st.sampled_from(Way)


@given(key=keys, frame=st.binary(max_size=300), way=ways)
def test_what_is_sealed_is_opened_with_the_same_key(key: bytes, frame: bytes, way: Way) -> None:
    sealed = Seal(key).seal(frame, way)
    assert len(sealed) == len(frame) + SEAL_BYTES
    assert Seal(key).open(sealed, way) == frame


@given(st.data())
def test_not_one_bit_may_change(data: st.DataObject) -> None:
    sealed = bytearray(Seal(KEY).seal(FRAME, Way.TO_LISTENER))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=r"^(wrong key|not authenticated): "):
        Seal(KEY).open(bytes(sealed), Way.TO_LISTENER)


@given(length=st.integers(0, SEAL_BYTES + len(FRAME) - 1))
def test_a_cut_frame_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=r"^(wrong key|not authenticated): "):
        Seal(KEY).open(Seal(KEY).seal(FRAME, Way.TO_LISTENER)[:length], Way.TO_LISTENER)


@given(key=keys, other=keys, way=ways)
def test_another_key_is_named_as_what_is_wrong(key: bytes, other: bytes, way: Way) -> None:
    if key != other:
        with pytest.raises(ProtocolError, match=r"^wrong key: .* set the same on both sides"):
            Seal(other).open(Seal(key).seal(FRAME, way), way)


def test_long_keys_count_to_their_last_byte() -> None:
    with pytest.raises(ProtocolError, match="wrong key"):
        Seal(b"k" * 100 + b"1").open(Seal(b"k" * 100 + b"2").seal(FRAME, Way.TO_DIALLER), Way.TO_DIALLER)


def test_a_frame_cannot_be_reflected_to_where_it_came_from() -> None:
    for sent, taken in ((Way.TO_LISTENER, Way.TO_DIALLER), (Way.TO_DIALLER, Way.TO_LISTENER)):
        with pytest.raises(ProtocolError, match="wrong key"):
            Seal(KEY).open(Seal(KEY).seal(FRAME, sent), taken)


def test_a_seal_covers_version_sender_recipient_and_message() -> None:
    seal = Seal(KEY).seal(FRAME, Way.TO_LISTENER)[:SEAL_BYTES]
    changed = [
        encode(Incarnation("c"), "b", Heartbeat(True, ())),
        encode(Incarnation("a"), "c", Heartbeat(True, ())),
        encode(Incarnation("a"), "b", Heartbeat(False, ())),
        FRAME.replace(b"\xa7version" + bytes([PROTOCOL]), b"\xa7version" + bytes([PROTOCOL + 1])),
    ]
    for frame in changed:
        assert frame != FRAME
        with pytest.raises(ProtocolError, match="wrong key"):
            Seal(KEY).open(seal + frame, Way.TO_LISTENER)
    assert decode(Seal(KEY).open(seal + FRAME, Way.TO_LISTENER)).sender == "a"


@given(st.binary(max_size=100) | st.just(FRAME))
def test_with_a_key_what_is_not_sealed_is_not_authenticated(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^(not authenticated|wrong key): .* set the same on both sides"):
        Seal(KEY).open(frame, Way.TO_LISTENER)


def test_without_a_key_frames_pass_as_they_are() -> None:
    assert Seal(None).seal(FRAME, Way.TO_LISTENER) == FRAME
    assert Seal(None).open(FRAME, Way.TO_LISTENER) == FRAME


def test_without_a_key_a_sealed_frame_is_refused_with_what_to_do() -> None:
    with pytest.raises(ProtocolError, match=r"^no key here: .* set the same on both sides"):
        Seal(None).open(Seal(KEY).seal(FRAME, Way.TO_LISTENER), Way.TO_LISTENER)


@pytest.mark.parametrize("key", [b"", b"short", b"k" * (MIN_KEY_BYTES - 1)])
def test_a_short_key_is_refused_without_being_shown(key: bytes) -> None:
    with pytest.raises(ConfigError, match=rf"has {len(key)} bytes; it must have at least {MIN_KEY_BYTES}") as caught:
        Seal(key)
    assert not key or key.decode() not in str(caught.value)


def test_no_text_shows_the_key() -> None:
    texts = [repr(Seal(KEY)), str(Seal(KEY))]
    for frame in (FRAME, Seal(OTHER).seal(FRAME, Way.TO_LISTENER)):
        with pytest.raises(ProtocolError) as caught:
            Seal(KEY).open(frame, Way.TO_LISTENER)
        texts.append(str(caught.value))
    for text in texts:
        assert KEY.decode() not in text
        assert KEY.hex() not in text
