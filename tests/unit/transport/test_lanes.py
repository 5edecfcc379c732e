"""Several engines to one peer: who moves what, and that nothing moves any more when a slice is said to be over."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import PeerLost
from kvbaton.transport.base import Direction, Runs
from kvbaton.transport.lanes import Lanes, cut
from kvbaton.transport.peer_mover import Look
from watching import wait_until

MIB = 1 << 20
REGION = 64 * MIB


class Lane:
    """An engine that copies between two arrays, or waits, or fails; `mark` is what its peer shows."""

    is_bound = True

    def __init__(self, stand: Stand, number: int) -> None:
        self.stand = stand
        self.number = number
        self.is_open = self.is_closed = False
        self.moved: list[Runs] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: Exception | None = None
        self.mark = stand.mark

    def open(self) -> None:
        self.is_open = True

    def move(self, direction: Direction, runs: Runs) -> None:
        assert self.is_open
        assert direction is Direction.READ
        self.moved.append(runs)
        assert self.may_end.wait(20)
        if self.error is not None:
            raise self.error
        for source, target, count in runs.tolist():
            self.stand.here[target : target + count] = self.stand.there[source : source + count]

    def read_mark(self, runs: Runs, look: Look) -> None:
        assert len(runs) == 1
        self.stand.marks_read.append(self.number)
        self.stand.slot = self.mark
        look()

    def close(self) -> None:
        self.is_closed = True


class Stand:
    """Lanes between two arrays, `here` and `there`."""

    def __init__(self, count: int) -> None:
        self.there = np.random.default_rng(1).integers(0, 256, REGION, np.uint8)
        self.here = np.zeros(REGION, np.uint8)
        self.mark = self.slot = 7
        self.marks_read: list[int] = []
        self.made: list[Lane] = []
        self.lanes = Lanes(self._make, count, "test", 4 * MIB)
        self.lanes.open()

    def _make(self) -> Lane:
        self.made.append(Lane(self, len(self.made)))
        return self.made[-1]

    def look(self) -> None:
        if self.slot != 7:
            raise PeerLost("another mark")

    def read_mark(self) -> list[int]:
        self.marks_read.clear()
        self.lanes.read_mark(pages(1), self.look)
        return self.marks_read


@pytest.fixture(params=[2, 3])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    made = Stand(request.param)
    yield made
    made.lanes.close()
    assert all(lane.is_closed for lane in made.made)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvbaton-test-lane"]


def pages(count: int, size: int = 16 << 10) -> Runs:
    places = np.random.default_rng(count).permutation(count).astype(np.uint64) * np.uint64(size)
    return np.stack([places, places[::-1], np.full(count, size, np.uint64)], axis=1)


@pytest.mark.parametrize(("count", "size"), [(1, 8 * MIB), (3, 2 * MIB), (512, 16 << 10), (2000, 4096)])
def test_every_lane_moves_a_part_of_a_long_slice(stand: Stand, count: int, size: int) -> None:
    runs = pages(count, size)
    stand.lanes.move(Direction.READ, runs)
    for source, target, length in runs.tolist():
        assert np.array_equal(stand.here[target : target + length], stand.there[source : source + length])
    shares = [sum(int(runs[:, 2].sum()) for runs in lane.moved) for lane in stand.made]
    assert sum(shares) == count * size
    assert max(shares) - min(shares) <= max(4096, size if count >= 128 else 0) * len(shares)


def test_control_a_part_that_is_left_out_is_missed(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand.made[-1], "move", lambda *_: None)
    stand.lanes.move(Direction.READ, pages(512))
    assert not np.array_equal(stand.here[: 8 * MIB], stand.there[: 8 * MIB])
    assert not stand.here[: 8 * MIB].all()


def test_a_short_slice_goes_over_the_first(stand: Stand) -> None:
    stand.lanes.move(Direction.READ, pages(16))
    assert [len(lane.moved) for lane in stand.made] == [1] + [0] * (len(stand.made) - 1)


@pytest.mark.parametrize("failing", [0, -1])
def test_a_failure_is_told_when_no_part_moves_any_more(stand: Stand, failing: int) -> None:
    slow = stand.made[-1 if failing == 0 else 0]
    slow.may_end.clear()
    stand.made[failing].error = PeerLost("gone")
    told: list[str] = []

    def move() -> None:
        try:
            stand.lanes.move(Direction.READ, pages(512))
        except PeerLost as error:
            told.append(str(error))

    thread = threading.Thread(target=move)
    thread.start()
    wait_until(lambda: all(lane.moved for lane in stand.made), "every lane moves")
    assert not told
    assert thread.is_alive()
    slow.may_end.set()
    thread.join(20)
    assert told == ["gone"]


def test_marks_are_read_over_every_lane_that_was_used_since(stand: Stand) -> None:
    everyone = list(range(len(stand.made)))
    assert stand.read_mark() == everyone
    assert stand.read_mark() == [0]
    stand.lanes.move(Direction.READ, pages(16))
    assert stand.read_mark() == [0]
    stand.lanes.move(Direction.READ, pages(512))
    assert stand.read_mark() == everyone


def test_a_lane_that_reaches_another_process_is_noticed(stand: Stand) -> None:
    stand.read_mark()
    stand.made[-1].mark = 8
    stand.lanes.move(Direction.READ, pages(512))
    with pytest.raises(PeerLost, match="another mark"):
        stand.read_mark()
    with pytest.raises(PeerLost, match="another mark"):
        stand.read_mark()


def test_lanes_of_which_one_cannot_be_made_are_all_ended() -> None:
    stand = Stand(1)
    made: list[Lane] = []

    def make() -> Lane:
        if len(made) == 2:
            raise PeerLost("no more")
        made.append(Lane(stand, len(made)))
        return made[-1]

    with pytest.raises(PeerLost, match="no more"):
        Lanes(make, 3, "test", 4 * MIB)
    assert [lane.is_closed for lane in made] == [True, True]
    assert not [thread for thread in threading.enumerate() if thread.name == "kvbaton-test-lane"]


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
