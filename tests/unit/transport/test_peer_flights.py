"""Several lanes to one peer: which moves what, which reads the mark, and that a slice is over only when no part moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import PeerLost, QueueFull
from kvbaton.transport.base import Direction, PeerRank, Runs, TransportSettings
from kvbaton.transport.lanes import MARK_BYTES, LaneSlice, LibraryPeer, Marks, PeerFlights, cut
from watching import wait_until

MIB = 1 << 20
REGION = 64 * MIB


class Engine:
    """An engine that copies between two arrays, or waits, or fails; `mark` is what the peer that it reaches shows."""

    is_bound = True

    def __init__(self, stand: Stand, number: int) -> None:
        self.stand = stand
        self.number = number
        self.is_closed = False
        self.moved: list[Runs] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: Exception | None = None
        self.mark = stand.there_mark

    def open(self) -> None:
        pass

    def start(self, direction: Direction, runs: Runs) -> None:
        assert direction is Direction.READ
        self.moved.append(runs)
        for source, target, count in runs.tolist():
            self.stand.here[target : target + count] = self.stand.there[source : source + count]

    def start_mark(self, runs: Runs) -> None:
        self.stand.marks_read.append(self.number)
        slot = int(runs[0, 1])
        self.stand.marks.region.view[slot : slot + MARK_BYTES] = self.mark.to_bytes(MARK_BYTES, "little")

    def is_done(self) -> bool:
        assert self.may_end.wait(20)
        if self.error is not None:
            raise self.error
        return True

    def close(self) -> None:
        self.is_closed = True


class Serving:
    """Serves no peer."""

    def progress(self) -> None:
        pass

    def close(self) -> None:
        pass


class Stand:
    """The lanes of one peer, between two arrays, `here` and `there`."""

    def __init__(self, count: int, **differences: Any) -> None:
        self.there = np.random.default_rng(1).integers(0, 256, REGION, np.uint8)
        self.here = np.zeros(REGION, np.uint8)
        self.there_mark = 7
        self.marks_read: list[int] = []
        self.made: list[Engine] = []
        self.marks = Marks(1, count)
        self.peer = LibraryPeer(PeerRank(Incarnation("peer")), self.there_mark, self._make)
        settings = TransportSettings(timeout_s=20.0, max_peers=1)
        sizes = {"slice_runs": 1 << 16, "stop_s": 5.0, "most_lanes": count, "shared_bytes": 4 * MIB}
        self.flights = PeerFlights("test", Serving(), self.marks, settings, lambda: None, **sizes | differences)

    def _make(self) -> Engine:
        self.made.append(Engine(self, len(self.made)))
        return self.made[-1]

    def start(self, runs: Runs, *, is_last: bool = False) -> list[LaneSlice]:
        return self.flights.start(self.peer, Direction.READ, runs, is_first=False, is_last=is_last)

    def move(self, runs: Runs, *, is_last: bool = False) -> None:
        flight = self.start(runs, is_last=is_last)
        wait_until(lambda: self.flights.is_done(flight), "the slice is moved")

    def marks_of(self, runs: Runs) -> list[int]:
        """Which lanes read the mark at the end of a batch whose last slice has these runs."""
        self.marks_read.clear()
        self.move(runs, is_last=True)
        return sorted(self.marks_read)


@pytest.fixture(params=[2, 3])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    made = Stand(request.param)
    yield made
    made.flights.shut_down()
    assert all(engine.is_closed for engine in made.made)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvbaton-test-lane"]


def pages(count: int, size: int = 16 << 10) -> Runs:
    places = np.random.default_rng(count).permutation(count).astype(np.uint64) * np.uint64(size)
    return np.stack([places, places[::-1], np.full(count, size, np.uint64)], axis=1)


SHORT, LONG = pages(16), pages(512)


@pytest.mark.parametrize(("count", "size"), [(1, 8 * MIB), (3, 2 * MIB), (512, 16 << 10), (2000, 4096)])
def test_every_lane_moves_a_part_of_a_long_slice(stand: Stand, count: int, size: int) -> None:
    runs = pages(count, size)
    stand.move(runs)
    for source, target, length in runs.tolist():
        assert np.array_equal(stand.here[target : target + length], stand.there[source : source + length])
    shares = [sum(int(runs[:, 2].sum()) for runs in engine.moved) for engine in stand.made]
    assert sum(shares) == count * size
    assert max(shares) - min(shares) <= max(4096, size if count >= 128 else 0) * len(shares)


def test_control_a_part_that_is_left_out_is_missed(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.move(LONG)
    stand.here[:] = 0
    monkeypatch.setattr(stand.made[-1], "start", lambda *_: None)
    stand.move(LONG)
    assert not np.array_equal(stand.here[: 8 * MIB], stand.there[: 8 * MIB])


def test_a_short_slice_needs_one_lane(stand: Stand) -> None:
    stand.move(SHORT)
    assert [len(engine.moved) for engine in stand.made] == [1]


@pytest.mark.parametrize("failing", [0, -1])
def test_a_slice_that_has_failed_is_not_released_while_a_part_moves(stand: Stand, failing: int) -> None:
    stand.move(LONG)
    slow = stand.made[-1 if failing == 0 else 0]
    slow.may_end.clear()
    stand.made[failing].error = PeerLost("gone")
    flight = stand.start(LONG)
    wait_until(lambda: stand.made[failing].is_closed, "the lane that fails ends its engine")
    with pytest.raises(PeerLost, match="gone"):
        stand.flights.is_done(flight)
    assert not stand.flights.release(flight)
    slow.may_end.set()
    wait_until(lambda: stand.flights.release(flight), "the other part ends")


def test_marks_are_read_by_every_lane_that_was_used_since(stand: Stand) -> None:
    assert stand.marks_of(SHORT) == [0]
    stand.move(LONG)
    everyone = list(range(len(stand.made)))
    assert len(everyone) > 1
    assert stand.marks_of(SHORT) == everyone
    assert stand.marks_of(SHORT) == [0]
    assert stand.marks_of(LONG) == everyone


def test_a_lane_that_reaches_another_process_is_noticed(stand: Stand) -> None:
    """Whichever lane reads its mark last: each has a slot of its own."""
    stand.move(LONG)
    stand.made[-1].mark = 8
    flight = stand.start(LONG, is_last=True)

    def has_failed() -> bool:
        try:
            return stand.flights.is_done(flight)
        except PeerLost as error:
            return "has withdrawn its memory" in str(error)

    wait_until(has_failed, "the slice ends")
    with pytest.raises(PeerLost, match="has withdrawn its memory"):
        stand.flights.is_done(flight)


def test_a_peer_stays_with_one_lane_where_descriptors_are_short() -> None:
    stand = Stand(3, may_add_lane=lambda: False)
    stand.move(LONG)
    assert len(stand.made) == 1
    stand.flights.shut_down()


def test_sessions_that_do_not_end_are_bounded() -> None:
    stand = Stand(1)
    stuck = []
    for number in range(2):
        stand.move(SHORT)
        stand.made[number].may_end.clear()
        stuck.append(stand.start(SHORT))
        wait_until(lambda number=number: len(stand.made[number].moved) == 2, "it moves")  # type: ignore[misc]
        stand.flights.drop(stand.peer)
    with pytest.raises(QueueFull, match="2 test sessions are open or ending"):
        stand.start(SHORT)
    for engine in stand.made:
        engine.may_end.set()
    wait_until(lambda: all(map(stand.flights.is_done, stuck)), "what moved is moved to its end")
    wait_until(lambda: all(engine.is_closed for engine in stand.made), "the sessions end")
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "kvbaton-test-lane"], "their threads end")
    stand.move(SHORT)
    stand.flights.shut_down()


@given(sizes=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=600), count=st.integers(1, 5))
def test_parts_are_all_of_it_in_order_and_alike(sizes: list[int], count: int) -> None:
    lengths = np.array(sizes, np.uint64)
    starts = np.cumsum(lengths) - lengths
    runs = np.stack([starts, starts + np.uint64(5), lengths], axis=1)
    parts = cut(runs, count)
    assert 1 <= len(parts) <= count
    whole = np.concatenate(parts)
    assert (whole[:, 1] - whole[:, 0] == 5).all()
    assert (whole[1:, 0] == whole[:-1, 0] + whole[:-1, 2]).all()
    assert (int(whole[0, 0]), int(whole[:, 2].sum())) == (0, sum(sizes))
    assert max(int(part[:, 2].sum()) for part in parts) <= sum(sizes) // count + max(sizes) + 1
