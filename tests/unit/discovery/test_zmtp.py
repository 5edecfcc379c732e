"""ZeroMQ on the bound side, as bytes in and messages out: what libzmq sends is understood, and nothing else is kept."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.discovery.zmtp import MAX_FRAME_BYTES, MAX_FRAMES, Zmtp, ZmtpError, encode_frame

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HELLO = GREETING + READY


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def test_a_dealer_is_greeted_and_its_message_is_read() -> None:
    zmtp = Zmtp()
    assert zmtp.outgoing()[:10] == b"\xff" + bytes(8) + b"\x7f"
    assert zmtp.feed(HELLO) == []
    assert zmtp.is_ready
    assert b"READY" in zmtp.outgoing()
    assert zmtp.feed(frame(b"one") + frame(b"", 1) + frame(b"two")) == [[b"one"], [b"", b"two"]]


@given(st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=3), max_size=4), st.lists(st.integers(1, 90)))
def test_messages_do_not_depend_on_how_the_bytes_are_cut(messages: list[list[bytes]], cuts: list[int]) -> None:
    stream = HELLO + b"".join(frame(f, i < len(m) - 1) for m in messages for i, f in enumerate(m))
    zmtp, found = Zmtp(), []
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        found += zmtp.feed(piece)
    assert found == messages


@given(st.binary(max_size=300), st.sampled_from([b"", GREETING, HELLO]))
def test_any_bytes_are_read_or_refused(garbage: bytes, before: bytes) -> None:
    zmtp = Zmtp()
    zmtp.feed(before)
    with contextlib.suppress(ZmtpError):
        zmtp.feed(garbage)


def test_a_ping_is_answered() -> None:
    zmtp = Zmtp()
    zmtp.feed(HELLO)
    zmtp.outgoing()
    zmtp.feed(frame(b"\x04PING\x00\x10hello", 4))
    assert zmtp.outgoing() == frame(b"\x04PONGhello", 4)


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
def test_what_is_not_spoken_here_ends_the_connection(stream: bytes) -> None:
    with pytest.raises(ZmtpError) as caught:
        Zmtp().feed(stream)
    assert not caught.value.is_too_long


TOO_LONG = {
    "a long frame": frame(b"x" * (MAX_FRAME_BYTES + 1)),
    "a frame that only says that it is long": b"\x02" + (2**62).to_bytes(8, "big"),
    "many frames": frame(b"", 1) * (MAX_FRAMES + 1),
    "frames that are long together": frame(b"x" * 9000, 1) * 2,
    "a long command": b"\x06" + (2**40).to_bytes(8, "big"),
}


@pytest.mark.parametrize("stream", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_what_is_too_long_ends_the_connection(stream: bytes) -> None:
    zmtp = Zmtp()
    zmtp.feed(HELLO)
    with pytest.raises(ZmtpError) as caught:
        zmtp.feed(stream)
    assert caught.value.is_too_long


@pytest.mark.parametrize("size", [0, 255, 256, 5000])
def test_frames_are_written_as_they_are_read(size: int) -> None:
    zmtp = Zmtp()
    zmtp.feed(HELLO)
    assert zmtp.feed(encode_frame(b"x" * size)) == [[b"x" * size]]
