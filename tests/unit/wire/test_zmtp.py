"""ZeroMQ's wire, as bytes in and messages out: what libzmq sends is understood, and nothing else is kept."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.wire.zmtp import Zmtp, ZmtpError, ZmtpLimits, ZmtpRefused, encode_error, encode_frame
from wire_peer import GREETING, READY

HELLO = GREETING + READY
LIMITS = ZmtpLimits(16 * 1024, 8)


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def opened(limits: ZmtpLimits = LIMITS) -> Zmtp:
    """A listener behind the handshake, with a peer that it trusts."""
    zmtp = Zmtp(limits)
    zmtp.feed(HELLO)
    zmtp.outgoing()
    zmtp.trust()
    return zmtp


def test_a_dealer_is_answered_and_its_message_is_read() -> None:
    zmtp = Zmtp()
    assert zmtp.outgoing()[:10] == b"\xff" + bytes(8) + b"\x7f"
    assert zmtp.feed(HELLO) == []
    assert zmtp.is_ready
    assert b"READY" in zmtp.outgoing()
    zmtp.trust()
    assert zmtp.feed(frame(b"one") + frame(b"", 1) + frame(b"two")) == [[b"one"], [b"", b"two"]]


def test_two_ends_of_ours_understand_each_other() -> None:
    dialler, listener = Zmtp(is_listener=False, extra={b"X-Test": b"one"}), Zmtp(extra={b"X-Test": b"two"})
    listener.feed(dialler.outgoing())
    dialler.feed(listener.outgoing())
    assert dialler.is_ready
    assert listener.is_ready
    assert (dialler.peer_properties[b"x-test"], listener.peer_properties[b"x-test"]) == (b"two", b"one")
    assert (dialler.own_ready, dialler.peer_ready) == (listener.peer_ready, listener.own_ready)


@given(st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=3), max_size=4), st.lists(st.integers(1, 90)))
def test_messages_do_not_depend_on_how_the_bytes_are_cut(messages: list[list[bytes]], cuts: list[int]) -> None:
    stream = HELLO + b"".join(frame(f, i < len(m) - 1) for m in messages for i, f in enumerate(m))
    zmtp, found = Zmtp(), []
    zmtp.trust()
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        found += zmtp.feed(piece)
    assert found == messages
    assert zmtp.buffered_bytes == 0


@given(st.lists(st.binary(max_size=600), max_size=8), st.integers(1, 2000))
def test_an_unknown_peer_has_one_message_at_a_time(bodies: list[bytes], cut: int) -> None:
    stream, zmtp, found = HELLO + b"".join(map(frame, bodies)), Zmtp(), []
    for start in range(0, len(stream), cut):
        messages = zmtp.feed(stream[start : start + cut])
        assert len(messages) <= 1
        found += messages
        while zmtp.has_more:
            messages = zmtp.feed(b"")
            assert len(messages) <= 1
            found += messages
    assert found == [[body] for body in bodies]


@given(st.binary(max_size=300), st.sampled_from([b"", GREETING, HELLO]), st.booleans(), st.booleans())
def test_any_bytes_are_read_or_refused(garbage: bytes, before: bytes, is_listener: bool, is_trusted: bool) -> None:
    zmtp = Zmtp(is_listener=is_listener)
    with contextlib.suppress(ZmtpError):
        zmtp.feed(before)
        if is_trusted:
            zmtp.trust()
        zmtp.feed(garbage)
        while zmtp.has_more:
            zmtp.feed(b"")


@given(st.data())
def test_a_stream_with_changed_bytes_never_keeps_more_than_the_limit(data: st.DataObject) -> None:
    stream = bytearray(HELLO + frame(b"x" * 300, 1) + frame(b"y" * 3000) + frame(b"\x04PING\x00\x10hello", 4) + frame(b"z"))
    for _ in range(data.draw(st.integers(1, 6))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    limits = ZmtpLimits(4096, 4)
    zmtp = Zmtp(limits)
    zmtp.trust()
    try:
        for start in range(0, len(stream), 64):
            for message in zmtp.feed(bytes(stream[start : start + 64])):
                assert len(message) <= limits.parts
                assert sum(map(len, message)) <= limits.frame_bytes
            assert zmtp.buffered_bytes <= 2 * limits.frame_bytes
            assert len(zmtp.outgoing()) < 2048
    except ZmtpError:
        assert zmtp.violation is not None


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_what_came_before_a_violation_is_returned_first(bodies: list[bytes]) -> None:
    zmtp = opened()
    assert zmtp.feed(b"".join(map(frame, bodies)) + b"\x80\x00") == [[body] for body in bodies]
    assert zmtp.violation is not None
    with pytest.raises(ZmtpError):
        zmtp.feed(b"")


def test_a_ping_is_answered() -> None:
    zmtp = opened()
    zmtp.feed(frame(b"\x04PING\x00\x10hello", 4))
    assert zmtp.outgoing() == frame(b"\x04PONGhello", 4)


def test_pings_of_a_peer_that_does_not_read_do_not_pile_up() -> None:
    zmtp = opened()
    for _ in range(1000):
        zmtp.feed(frame(b"\x04PING\x00\x10hello", 4) * 20)
    assert len(zmtp.outgoing()) < 2048


def test_a_reason_is_sent_and_read() -> None:
    for zmtp in (opened(), Zmtp(is_listener=False)):
        with pytest.raises(ZmtpRefused, match=r"^not on the list: é+$"):
            zmtp.feed((b"" if zmtp.is_ready else GREETING) + encode_error("not on the list: " + "é" * 300))


REFUSED = {
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an old version": b"\xff" + bytes(8) + b"\x7f\x01" + bytes(60),
    "another mechanism": GREETING.replace(b"NULL", b"PLAI"),
    "a PUSH socket": GREETING + READY.replace(b"DEALER", b"PUSHPU"),
    "no socket type": GREETING + b"\x04\x06\x05READY",
    "a handshake that is cut off": GREETING + b"\x04\x0a\x05READY\x0bSock",
    "an error instead of a handshake": GREETING + b"\x04\x06\x05ERROR",
    "an empty command": GREETING + b"\x04\x00",
    "a message before the handshake": GREETING + frame(b"x"),
    "an unknown command": HELLO + frame(b"\x04WHAT", 4),
    "unknown flags": HELLO + b"\x80\x00",
    "a command with more to come": HELLO + b"\x05\x00",
}


@pytest.mark.parametrize("stream", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_understood_ends_the_connection(stream: bytes) -> None:
    with pytest.raises(ZmtpError) as caught:
        Zmtp().feed(stream)
    assert not caught.value.is_too_long


TOO_LONG = {
    "a long frame": frame(b"x" * (LIMITS.frame_bytes + 1)),
    "the head of a long frame": b"\x02" + (2**62).to_bytes(8, "big"),
    "the head of a long part": b"\x03" + (2**63).to_bytes(8, "big"),
    "many frames": frame(b"", 1) * (LIMITS.parts + 1),
    "one part too many": frame(b"x", 1) * LIMITS.parts + frame(b"x"),
    "frames that are long together": frame(b"x" * 9000, 1) * 2,
    "a long command": b"\x06" + (2**40).to_bytes(8, "big"),
    "a command that would be a message": frame(b"\x04PING" + bytes(2000), 4),
}


@pytest.mark.parametrize("stream", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_what_is_too_long_ends_the_connection(stream: bytes) -> None:
    with pytest.raises(ZmtpError) as caught:
        opened().feed(stream)
    assert caught.value.is_too_long


def test_a_handshake_has_the_limit_of_a_command() -> None:
    zmtp = Zmtp(ZmtpLimits(1 << 20))
    zmtp.feed(GREETING)
    with pytest.raises(ZmtpError) as caught:
        zmtp.feed(b"\x06" + (5000).to_bytes(8, "big"))
    assert caught.value.is_too_long


def test_an_unknown_peer_has_a_limit_of_its_own_until_it_is_trusted() -> None:
    limits = ZmtpLimits(1 << 20, unknown_bytes=16)
    zmtp = Zmtp(limits)
    zmtp.feed(HELLO)
    with pytest.raises(ZmtpError):
        zmtp.feed(frame(b"x" * 17))
    zmtp = Zmtp(limits)
    assert zmtp.feed(HELLO + frame(b"x" * 16) + frame(b"y" * 70_000)) == [[b"x" * 16]]
    zmtp.trust()
    assert zmtp.feed(b"") == [[b"y" * 70_000]]


@pytest.mark.parametrize("size", [0, 255, 256, 5000])
def test_frames_are_written_as_they_are_read(size: int) -> None:
    assert opened().feed(encode_frame(b"x" * size)) == [[b"x" * size]]


def test_a_long_frame_in_small_pieces_costs_no_more_than_its_length() -> None:
    """Each piece is looked at once: with 4 MiB in pieces of 1 KiB, copying all before it would take minutes."""
    zmtp = opened(ZmtpLimits(4 << 20))
    stream = frame(b"x" * (4 << 20))
    found = [message for start in range(0, len(stream), 1024) for message in zmtp.feed(stream[start : start + 1024])]
    assert [len(body) for (body,) in found] == [4 << 20]
