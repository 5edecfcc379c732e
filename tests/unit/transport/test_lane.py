"""What moves bytes between this side and one peer, over an engine whose transfers wait until the test continues them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvbaton.errors import Bug, ConfigError, PeerLost, QueueFull, TransportError
from kvbaton.transport.base import Direction, Runs
from kvbaton.transport.lanes import MARK_BYTES, Lane, LaneSlice, MarkCheck, Marks
from watching import wait_until

RUNS = np.array([[n, n, 1] for n in range(8)], np.uint64)


class Engine:
    """Does as the test says; notes what it was asked."""

    def __init__(self, asked: list[str], *, most_runs: int = 100, fails: bool = False, is_bound: bool = False) -> None:
        self.asked = asked
        self.is_bound = is_bound
        self.opens, self.moves = threading.Event(), threading.Event()
        self.opens.set()
        self.moves.set()
        self._most_runs = most_runs
        self._fails = fails
        self._started = self._steps = 0

    def open(self) -> None:
        self.asked.append("open")
        assert self.opens.wait(20)

    def start(self, direction: Direction, runs: Runs) -> None:
        self.asked.append(f"{direction} {len(runs)}")
        self._started, self._steps = len(runs), 3

    def start_mark(self, runs: Runs) -> None:
        assert len(runs) == 1
        self.asked.append("mark")
        self._started, self._steps = 0, 1

    def is_done(self) -> bool:
        if self._started:
            assert self.moves.wait(20)
            if self._started > self._most_runs:
                raise QueueFull("too many")
            if self._fails:
                raise PeerLost("the peer is gone")
        self._steps -= 1
        return self._steps <= 0

    def close(self) -> None:
        self.asked.append("close")


def reading() -> LaneSlice:
    return LaneSlice(Direction.READ, RUNS, lambda: None)


def start(engine: Engine, most_runs: int = 100, timeout_s: float = 5.0, mark: MarkCheck | None = None) -> Lane:
    return Lane("test", lambda: engine, most_runs, timeout_s, mark)


def marking(asked: list[str]) -> MarkCheck:
    """A mark that is always the right one."""
    return MarkCheck(RUNS[:1], lambda: asked.append("checked"), lambda: asked.append("freed"))


def end(lane: Lane) -> None:
    lane.close()
    wait_until(lambda: lane.is_over, "the lane ends")


def test_slices_are_read_in_order_and_the_mark_after_the_last() -> None:
    asked: list[str] = []
    woken = threading.Event()
    lane = start(Engine(asked), most_runs=5, mark=marking(asked))
    last = LaneSlice(Direction.READ, RUNS, woken.set, is_last=True)
    lane.move(reading())
    lane.move(last)
    assert woken.wait(20)
    assert last.is_done()
    end(lane)
    assert asked == ["open", "read 5", "read 3", "read 5", "read 3", "mark", "checked", "close", "freed"]


@pytest.mark.parametrize("is_bound", [False, True])
def test_the_mark_is_looked_at_before_the_first_byte_of_a_write_and_after_the_last(is_bound: bool) -> None:
    asked: list[str] = []
    lane = start(Engine(asked, is_bound=is_bound), most_runs=5, mark=marking(asked))
    for _ in range(2):
        whole = LaneSlice(Direction.WRITE, RUNS, lambda: None, is_first=True, is_last=True)
        lane.move(whole)
        wait_until(whole.is_done, "all is written")
    end(lane)
    first, after = ["mark", "checked"], ["write 5", "write 3", "mark", "checked"]
    assert asked == ["open", *first, *after, *([] if is_bound else first), *after, "close", "freed"]


def test_a_lane_that_joins_a_write_later_reads_the_mark_before_its_first_byte() -> None:
    asked: list[str] = []
    lane = start(Engine(asked, is_bound=True), mark=marking(asked))
    later = LaneSlice(Direction.WRITE, RUNS, lambda: None)
    lane.move(later)
    wait_until(later.is_done, "all is written")
    assert asked == ["open", "mark", "checked", "write 8"]
    end(lane)


def test_a_slice_without_runs_only_reads_the_mark() -> None:
    asked: list[str] = []
    lane = start(Engine(asked), mark=marking(asked))
    lane.move(reading())
    owes = [lane.owes_mark]
    empty = LaneSlice(Direction.READ, RUNS[:0], lambda: None, is_last=True)
    lane.move(empty)
    assert [*owes, lane.owes_mark] == [True, False]
    wait_until(empty.is_done, "the mark is read")
    assert asked == ["open", "read 8", "mark", "checked"]
    end(lane)


def test_a_peer_that_is_another_by_now_is_not_written_to() -> None:
    def check() -> None:
        raise PeerLost("another mark")

    asked: list[str] = []
    lane = start(Engine(asked), mark=MarkCheck(RUNS[:1], check, lambda: None))
    whole = LaneSlice(Direction.WRITE, RUNS, lambda: None, is_first=True)
    lane.move(whole)
    wait_until(lambda: lane.is_over, "the lane ends")
    assert asked == ["open", "mark", "close"]
    with pytest.raises(PeerLost, match="another mark"):
        whole.is_done()


def test_a_failure_is_reported_when_the_engine_is_gone_and_takes_the_rest_along() -> None:
    asked: list[str] = []
    engine = Engine(asked, fails=True)
    engine.moves.clear()
    lane = start(engine)
    readings = [reading(), reading()]
    for each in readings:
        lane.move(each)
    wait_until(lambda: "read 8" in asked, "it reads")
    assert not readings[0].is_done()
    assert not readings[0].give_up()
    engine.moves.set()
    wait_until(lambda: lane.is_over, "the lane ends")
    assert asked == ["open", "read 8", "close"]
    for each in readings:
        with pytest.raises(PeerLost, match="the peer is gone"):
            each.is_done()
        assert each.give_up()
    late = reading()
    lane.move(late)
    with pytest.raises(PeerLost, match="the peer is gone"):
        late.is_done()


def test_a_peer_that_does_not_answer_can_be_given_up_and_is_never_read_afterwards() -> None:
    asked: list[str] = []
    engine = Engine(asked)
    engine.opens.clear()
    lane = start(engine)
    waiting = reading()
    lane.move(waiting)
    wait_until(lambda: asked == ["open"], "it opens")
    assert waiting.give_up()
    lane.close()
    assert lane.wait_quiet(0.0)
    assert not lane.is_over
    engine.opens.set()
    wait_until(lambda: lane.is_over, "the lane ends")
    assert asked == ["open", "close"]


def test_a_full_queue_ends_the_engine_and_is_asked_for_less() -> None:
    asked: list[str] = []
    lane = start(Engine(asked, most_runs=2))
    one = reading()
    lane.move(one)
    wait_until(one.is_done, "all is read")
    end(lane)
    assert asked == ["open", "read 8", "close", "open", "read 4", "close", "open", *["read 2"] * 4, "close"]


def test_an_engine_that_was_opened_anew_shows_its_mark_before_it_writes_on() -> None:
    asked: list[str] = []
    lane = start(Engine(asked, most_runs=4, is_bound=True), mark=marking(asked))
    first, second = (LaneSlice(Direction.WRITE, RUNS, lambda: None, is_first=True) for _ in range(2))
    lane.move(first)
    wait_until(first.is_done, "it is written")
    shown = ["mark", "checked"]
    assert asked == ["open", *shown, "write 8", "close", "open", *shown, "write 4", "write 4"]
    lane.move(second)
    wait_until(second.is_done, "it is written")
    assert asked[-2:] == ["write 4", "write 4"]
    assert asked.count("mark") == 2
    end(lane)


def test_a_queue_that_stays_full_is_an_error() -> None:
    lane = start(Engine([], most_runs=0), timeout_s=0.05)
    one = reading()
    lane.move(one)
    wait_until(lambda: lane.is_over, "the lane ends")
    with pytest.raises(PeerLost, match=r"too many; no progress within 0\.05 s"):
        one.is_done()


def test_a_bug_in_an_engine_costs_its_own_lane_only() -> None:
    class Broken(Engine):
        def start(self, direction: Direction, runs: Runs) -> None:
            raise ZeroDivisionError(f"oops: {direction} {len(runs)} runs")

    lane = start(Broken([]))
    one = reading()
    lane.move(one)
    wait_until(lambda: lane.is_over, "the lane ends")
    with pytest.raises(Bug, match="oops"):
        one.is_done()


def test_an_engine_that_cannot_be_made_is_reported_under_its_own_name() -> None:
    def make() -> Engine:
        raise ConfigError("no memory may be registered")

    lane = Lane("test", make, 100, 5.0)
    one = reading()
    lane.move(one)
    wait_until(lambda: lane.is_over, "the lane ends")
    with pytest.raises(ConfigError, match="no memory"):
        one.is_done()


def test_an_engine_that_does_not_close_leaves_no_slice_waiting() -> None:
    class Stubborn(Engine):
        def close(self) -> None:
            raise TransportError("it does not release it")

    lane = start(Stubborn([], fails=True))
    one, two = reading(), reading()
    lane.move(one)
    lane.move(two)
    wait_until(lambda: lane.is_over, "the lane ends")
    with pytest.raises(PeerLost, match="the peer is gone"):
        one.is_done()
    with pytest.raises(TransportError, match="does not release it"):
        two.is_done()


def test_a_peer_that_does_not_answer_after_a_full_queue_is_not_read_once_closed() -> None:
    asked: list[str] = []
    engine = Engine(asked, most_runs=2)
    engine.moves.clear()
    lane = start(engine)
    one = reading()
    lane.move(one)
    wait_until(lambda: asked == ["open", "read 8"], "it reads")
    engine.opens.clear()
    engine.moves.set()
    wait_until(lambda: asked[-1] == "open" and len(asked) == 4, "it opens again")
    lane.close()
    assert lane.wait_quiet(0.0)
    engine.opens.set()
    wait_until(lambda: lane.is_over, "the lane ends")
    assert asked == ["open", "read 8", "close", "open", "close"]
    with pytest.raises(PeerLost, match="ended"):
        one.is_done()


def test_marks_are_distinct_and_slots_run_out() -> None:
    source, target = Marks(1), Marks(1)
    slot = target.take_slot()
    with pytest.raises(PeerLost, match="has withdrawn its memory"):
        target.check(slot, source.mark, "the peer")
    at, to, count = target.run_to(slot)[0].tolist()
    target.region.view[to : to + count] = source.region.view[at : at + count]
    target.check(slot, source.mark, "the peer")
    source.withdraw()
    assert bytes(source.region.view[:MARK_BYTES]) == bytes(MARK_BYTES)
    target.take_slot()
    with pytest.raises(TransportError, match="max_peers"):
        target.take_slot()
    target.free_slot(slot)
    assert target.take_slot() == slot
