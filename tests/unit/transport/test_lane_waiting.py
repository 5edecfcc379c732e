"""How often a library is asked: all the time while asking moves bytes, and ever more rarely while nothing moves."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvbaton.errors import PeerLost
from kvbaton.transport import lanes
from kvbaton.transport.base import Direction
from kvbaton.transport.lanes import Lane, LaneSlice

TIMEOUT_S = 5.0


class Clock:
    """Time that passes only during a sleep or a question."""

    def __init__(self) -> None:
        self.now = self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept_s += seconds


class Engine:
    """Has one transfer, which never ends or ends at `ends_at`; asking takes `poll_s`."""

    is_bound = True

    def __init__(self, clock: Clock, poll_s: float, ends_at: float = 100.0) -> None:
        self.asked = 0
        self._clock = clock
        self._poll_s = poll_s
        self._ends_at = ends_at

    def open(self) -> None:
        pass

    def start(self, *_: object) -> None:
        pass

    def start_mark(self, *_: object) -> None:
        pass

    def is_done(self) -> bool:
        self.asked += 1
        self._clock.now += self._poll_s
        return self._clock.now >= self._ends_at

    def close(self) -> None:
        pass


def move(clock: Clock, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "time", clock)
    ended = threading.Event()
    piece = LaneSlice(Direction.READ, np.array([[0, 0, 64]], np.uint64), ended.set)
    lane = Lane("test", lambda: engine, 100, TIMEOUT_S)
    lane.move(piece)
    assert ended.wait(20)
    lane.close()
    piece.is_done()


def test_a_peer_that_stands_still_is_asked_rarely_and_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = Engine(clock, poll_s=1e-6)
    with pytest.raises(PeerLost, match="no progress within 5 s"):
        move(clock, engine, monkeypatch)
    assert clock.slept_s > 0.9 * TIMEOUT_S
    assert TIMEOUT_S <= clock.now < 1.01 * TIMEOUT_S


def test_where_asking_moves_bytes_it_hardly_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    move(clock, Engine(clock, poll_s=1e-4, ends_at=2.0), monkeypatch)
    assert clock.slept_s < 0.01 * clock.now


@pytest.mark.parametrize("ends_at", [0.001, 0.02, 0.5])
def test_an_end_is_noticed_soon(ends_at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    move(clock, Engine(clock, poll_s=1e-6, ends_at=ends_at), monkeypatch)
    assert clock.now < 1.07 * ends_at + 0.0001
