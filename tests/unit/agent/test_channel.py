"""Frames between two processes of an instance: whole, bounded, and never waited for without a deadline."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

import pytest

from kvbaton.agent.channel import MAX_FRAME_BYTES, Channel, ChannelClosed, ChannelStuck, channel_pair

WAIT_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = channel_pair()
    pair = Channel(one, "the other"), Channel(other, "the one")
    yield pair
    for end in pair:
        end.close()


def received(end: Channel) -> bytes:
    frame = end.receive(WAIT_S)
    assert frame is not None
    return bytes(frame)


def test_frames_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    frames = [b"", b"a", bytes(range(256)) * 40]
    for frame in frames:
        ends[0].send(frame, WAIT_S)
    assert [received(ends[1]) for _ in frames] == frames
    assert ends[1].receive(0.0) is None


def test_a_frame_larger_than_the_buffers_arrives_while_the_other_end_reads(ends: tuple[Channel, Channel]) -> None:
    frame = bytes(range(256)) * 65536
    sender = threading.Thread(target=ends[0].send, args=(frame, WAIT_S))
    sender.start()
    assert received(ends[1]) == frame
    sender.join(WAIT_S)
    assert not sender.is_alive()


def test_the_end_of_the_other_shows_in_both_directions(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosed, match="the other is gone"):
        ends[0].receive(WAIT_S)
    with pytest.raises(ChannelClosed, match="the other is gone"):
        ends[0].send(b"late", WAIT_S)


def test_one_that_takes_nothing_is_not_waited_for(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ChannelStuck, match="has taken nothing"):
        ends[0].send(bytes(64 << 20), 0.05)


def test_two_that_send_at_once_do_not_wait_for_each_other(ends: tuple[Channel, Channel]) -> None:
    """What the other end sends is read while ours cannot go on, so that two full buffers are no deadlock."""
    large = bytes(32 << 20)
    frames: list[bytes] = []

    def talk() -> None:
        ends[1].send(large, WAIT_S)
        frames.append(received(ends[1]))

    answer = threading.Thread(target=talk)
    answer.start()
    ends[0].send(large, WAIT_S, meanwhile=lambda: frames.append(received(ends[0])))
    answer.join(WAIT_S)
    assert frames == [large, large]


def test_a_frame_that_is_too_large_is_refused(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = channel_pair()
    one.send(struct.pack("<Q", MAX_FRAME_BYTES + 1))
    with pytest.raises(ChannelStuck, match="at most"):
        Channel(other, "an unknown peer").receive(WAIT_S)
    one.close()
    other.close()
    monkeypatch.setattr("kvbaton.agent.channel.MAX_FRAME_BYTES", 3)
    with pytest.raises(ChannelStuck, match="4 bytes"):
        ends[0].send(b"four", WAIT_S)
