"""A flow goes on behind bytes that its caller has received and put back."""

from __future__ import annotations

import socket
from collections.abc import Generator

import pytest

from kvbaton.errors import PeerLost
from kvbaton.transport.exchange.flow import Flow, Step

_MESSAGE = bytes(range(24))


@pytest.fixture(name="ends")
def _ends() -> Generator[tuple[Flow, socket.socket, list[bytes]], None, None]:
    taken: list[bytes] = []

    def steps() -> Generator[Step, bytes, None]:
        while True:
            taken.append((yield len(_MESSAGE)))

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    flow = Flow(ours, steps())
    yield flow, theirs, taken
    flow.close()
    theirs.close()


@pytest.mark.parametrize("count", [0, 1, 23, 24])
def test_a_message_of_which_bytes_were_put_back_is_taken_once_it_is_whole(
    ends: tuple[Flow, socket.socket, list[bytes]], count: int
) -> None:
    flow, other, taken = ends
    flow.put_back(_MESSAGE[:count])
    assert flow.is_between_messages == (count == 0)
    if count < len(_MESSAGE):
        flow.advance()
        assert not taken
        other.sendall(_MESSAGE[count:])
    flow.advance()
    assert taken == [_MESSAGE]
    assert flow.is_between_messages
    other.sendall(_MESSAGE[::-1])
    flow.advance()
    assert taken == [_MESSAGE, _MESSAGE[::-1]]


def test_a_close_behind_bytes_that_were_put_back_is_noticed(ends: tuple[Flow, socket.socket, list[bytes]]) -> None:
    flow, other, taken = ends
    flow.put_back(_MESSAGE[:5])
    other.close()
    with pytest.raises(PeerLost):
        flow.advance()
    assert not taken
