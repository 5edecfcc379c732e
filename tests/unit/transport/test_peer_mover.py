"""What moves bytes between this side and one peer, over an engine whose calls wait until the test lets them go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvbaton.errors import Bug, ConfigError, PeerLost, QueueFull, TransportError
from kvbaton.transport.base import Direction, Runs
from kvbaton.transport.marks import MARK_BYTES, Marks
from kvbaton.transport.peer_mover import Look, MarkCheck, PeerMover, PeerSlice
from watching import wait_until

RUNS = np.array([[n, n, 1] for n in range(8)], np.uint64)


class Engine:
    """Does what it is told; notes what it was asked."""

    def __init__(self, asked: list[str], *, most_runs: int = 100, fails: bool = False, is_bound: bool = False) -> None:
        self.asked = asked
        self.is_bound = is_bound
        self.opens, self.moves = threading.Event(), threading.Event()
        self.opens.set()
        self.moves.set()
        self._most_runs = most_runs
        self._fails = fails

    def open(self) -> None:
        self.asked.append("open")
        assert self.opens.wait(20)

    def move(self, direction: Direction, runs: Runs) -> None:
        self.asked.append(f"{direction} {len(runs)}")
        assert self.moves.wait(20)
        if len(runs) > self._most_runs:
            raise QueueFull("too many")
        if self._fails:
            raise PeerLost("the peer is gone")

    def read_mark(self, runs: Runs, look: Look) -> None:
        assert len(runs) == 1
        self.asked.append("mark")
        look()

    def close(self) -> None:
        self.asked.append("close")


def reading(wake: Callable[[], None] = lambda: None) -> PeerSlice:
    return PeerSlice(Direction.READ, RUNS, wake)


def start(engine: Engine, most_runs: int = 100, timeout_s: float = 5.0) -> PeerMover:
    return PeerMover("test", lambda: engine, most_runs, timeout_s)


def end(mover: PeerMover) -> None:
    mover.close()
    wait_until(lambda: mover.is_over, "the mover ends")


def test_slices_are_read_in_order_and_the_mark_after_the_last() -> None:
    asked: list[str] = []
    woken = threading.Event()
    mover = start(Engine(asked), most_runs=5)
    mark = MarkCheck(RUNS[:1], lambda: asked.append("looked"), before=False, after=True)
    last = PeerSlice(Direction.READ, RUNS, woken.set, mark)
    mover.move(reading())
    mover.move(last)
    assert woken.wait(20)
    assert last.is_done()
    end(mover)
    assert asked == ["open", "read 5", "read 3", "read 5", "read 3", "mark", "looked", "close"]


@pytest.mark.parametrize("is_bound", [False, True])
def test_the_mark_is_looked_at_before_the_first_byte_of_a_write_and_after_the_last(is_bound: bool) -> None:
    asked: list[str] = []
    mover = start(Engine(asked, is_bound=is_bound), most_runs=5)
    mark = MarkCheck(RUNS[:1], lambda: asked.append("looked"), before=True, after=True)
    for _ in range(2):
        whole = PeerSlice(Direction.WRITE, RUNS, lambda: None, mark)
        mover.move(whole)
        wait_until(whole.is_done, "all is written")
    end(mover)
    first, after = ["mark", "looked"], ["write 5", "write 3", "mark", "looked"]
    assert asked == ["open", *first, *after, *([] if is_bound else first), *after, "close"]


def test_a_peer_that_is_another_by_now_is_not_written_to() -> None:
    def look() -> None:
        raise PeerLost("another mark")

    asked: list[str] = []
    mover = start(Engine(asked))
    whole = PeerSlice(Direction.WRITE, RUNS, lambda: None, MarkCheck(RUNS[:1], look, before=True, after=True))
    mover.move(whole)
    wait_until(lambda: mover.is_over, "the mover ends")
    assert asked == ["open", "mark", "close"]
    with pytest.raises(PeerLost, match="another mark"):
        whole.is_done()


def test_a_failure_is_told_when_the_engine_is_gone_and_takes_the_rest_along() -> None:
    asked: list[str] = []
    engine = Engine(asked, fails=True)
    engine.moves.clear()
    mover = start(engine)
    readings = [reading(), reading()]
    for each in readings:
        mover.move(each)
    wait_until(lambda: "read 8" in asked, "it reads")
    assert not readings[0].is_done()
    assert not readings[0].give_up()
    engine.moves.set()
    wait_until(lambda: mover.is_over, "the mover ends")
    assert asked == ["open", "read 8", "close"]
    for each in readings:
        with pytest.raises(PeerLost, match="the peer is gone"):
            each.is_done()
        assert each.give_up()
    late = reading()
    mover.move(late)
    with pytest.raises(PeerLost, match="the peer is gone"):
        late.is_done()


def test_a_peer_that_does_not_answer_can_be_given_up_and_is_never_read_afterwards() -> None:
    asked: list[str] = []
    engine = Engine(asked)
    engine.opens.clear()
    mover = start(engine)
    waiting = reading()
    mover.move(waiting)
    wait_until(lambda: asked == ["open"], "it opens")
    assert waiting.give_up()
    mover.close()
    assert mover.wait_quiet(0.0)
    assert not mover.is_over
    engine.opens.set()
    wait_until(lambda: mover.is_over, "the mover ends")
    assert asked == ["open", "close"]


def test_a_full_queue_ends_the_engine_and_is_asked_for_less() -> None:
    asked: list[str] = []
    mover = start(Engine(asked, most_runs=2))
    one = reading()
    mover.move(one)
    wait_until(one.is_done, "all is read")
    end(mover)
    assert asked == ["open", "read 8", "close", "open", "read 4", "close", "open", *["read 2"] * 4, "close"]


def test_an_engine_that_was_opened_anew_shows_its_mark_before_it_writes_on() -> None:
    asked: list[str] = []
    mover = start(Engine(asked, most_runs=4, is_bound=True))
    mark = MarkCheck(RUNS[:1], lambda: asked.append("looked"), before=True, after=False)
    first, second = (PeerSlice(Direction.WRITE, RUNS, lambda: None, mark) for _ in range(2))
    mover.move(first)
    wait_until(first.is_done, "it is written")
    shown = ["mark", "looked"]
    assert asked == ["open", *shown, "write 8", "close", "open", *shown, "write 4", "write 4"]
    mover.move(second)
    wait_until(second.is_done, "it is written")
    assert asked[-2:] == ["write 4", "write 4"]
    assert asked.count("mark") == 2
    end(mover)


def test_a_queue_that_stays_full_is_an_error() -> None:
    mover = start(Engine([], most_runs=0), timeout_s=0.05)
    one = reading()
    mover.move(one)
    wait_until(lambda: mover.is_over, "the mover ends")
    with pytest.raises(PeerLost, match=r"too many; no progress within 0\.05 s"):
        one.is_done()


def test_a_bug_in_an_engine_costs_its_own_mover_only() -> None:
    class Broken(Engine):
        def move(self, direction: Direction, runs: Runs) -> None:
            raise ZeroDivisionError(f"oops: {direction} {len(runs)} runs")

    mover = start(Broken([]))
    one = reading()
    mover.move(one)
    wait_until(lambda: mover.is_over, "the mover ends")
    with pytest.raises(Bug, match="oops"):
        one.is_done()


def test_an_engine_that_cannot_be_made_is_told_under_its_own_name() -> None:
    def make() -> Engine:
        raise ConfigError("no memory may be registered")

    mover = PeerMover("test", make, 100, 5.0)
    one = reading()
    mover.move(one)
    wait_until(lambda: mover.is_over, "the mover ends")
    with pytest.raises(ConfigError, match="no memory"):
        one.is_done()


def test_an_engine_that_does_not_close_leaves_nobody_waiting() -> None:
    class Stubborn(Engine):
        def close(self) -> None:
            raise TransportError("it does not let go")

    mover = start(Stubborn([], fails=True))
    one, two = reading(), reading()
    mover.move(one)
    mover.move(two)
    wait_until(lambda: mover.is_over, "the mover ends")
    with pytest.raises(PeerLost, match="the peer is gone"):
        one.is_done()
    with pytest.raises(TransportError, match="does not let go"):
        two.is_done()


def test_a_peer_that_does_not_answer_after_a_full_queue_is_not_read_once_closed() -> None:
    asked: list[str] = []
    engine = Engine(asked, most_runs=2)
    engine.moves.clear()
    mover = start(engine)
    one = reading()
    mover.move(one)
    wait_until(lambda: asked == ["open", "read 8"], "it reads")
    engine.opens.clear()
    engine.moves.set()
    wait_until(lambda: asked[-1] == "open" and len(asked) == 4, "it opens again")
    mover.close()
    assert mover.wait_quiet(0.0)
    engine.opens.set()
    wait_until(lambda: mover.is_over, "the mover ends")
    assert asked == ["open", "read 8", "close", "open", "close"]
    with pytest.raises(PeerLost, match="ended"):
        one.is_done()


def test_marks_are_told_apart_and_slots_run_out() -> None:
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
