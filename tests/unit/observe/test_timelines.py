"""Timelines: whatever is noted, from however many threads, is kept within bounds and reported as durations."""

from __future__ import annotations

import itertools
import threading

import msgspec
import pytest

from kvbaton.core.handoff import HandoffKey, Outcome, TransferId
from kvbaton.core.timeline import Note, Side, Stage
from kvbaton.errors import ConfigError
from kvbaton.observe.records import MAX_TEXT, InstanceInfo, InstanceRecord
from kvbaton.observe.timelines import Timelines
from true_notes import TRANSFER, Way, notes_of_push

ABOUT = InstanceInfo("prefill", "127.0.0.1:1", "inc-1")


def note(transfer: str, stage: Stage = Stage.COMPUTED, at: float = 0.0, side: Side = Side.SOURCE, sample: int = 0) -> Note:
    outcome = Outcome.DELIVERED if stage is Stage.ENDED else None
    return Note(HandoffKey(TransferId(transfer), 0, sample), side, stage, at, outcome=outcome)


def kept(timelines: Timelines, transfer: str) -> InstanceRecord:
    record = timelines.record(transfer)
    assert record is not None
    return record


def count(timelines: Timelines, transfer: str) -> int:
    return sum(len(side.notes) for side in kept(timelines, transfer).sides)


def test_only_durations_are_reported_in_order_and_per_side() -> None:
    timelines = Timelines(ABOUT)
    way = notes_of_push(Way(source_clock=1e6, target_clock=1e6))
    for taken in reversed(way.notes):
        timelines.note(taken)
    record = kept(timelines, TRANSFER)
    assert record.instance == ABOUT
    assert [side.side for side in record.sides] == [Side.SOURCE, Side.TARGET]
    for side in record.sides:
        times = [each.at_s for each in side.notes]
        assert times[0] == 0
        assert times == sorted(times)
        assert max(times) < 1
    assert record.sides[1].since_s == pytest.approx(0.0001, abs=1e-6)
    assert msgspec.json.decode(msgspec.json.encode(record), type=InstanceRecord) == record


def test_the_newest_transfers_are_kept() -> None:
    timelines = Timelines(ABOUT, max_transfers=3)
    for number in range(10):
        timelines.note(note(f"tx-{number}", Stage.ARRIVED, at=number))
    assert len(timelines) == 3
    assert timelines.record("tx-6") is None
    assert [summary.transfer_id for summary in timelines.newest(100)] == ["tx-9", "tx-8", "tx-7"]
    assert [summary.transfer_id for summary in timelines.newest(2)] == ["tx-9", "tx-8"]


def test_a_transfer_that_made_room_does_not_come_back_in_pieces() -> None:
    timelines = Timelines(ABOUT, max_transfers=2)
    for transfer in ("tx-0", "tx-1", "tx-2"):
        timelines.note(note(transfer, Stage.ARRIVED))
    timelines.note(note("tx-0", Stage.MOVED))
    assert timelines.record("tx-0") is None
    timelines.note(note("tx-0", Stage.ARRIVED))
    assert count(timelines, "tx-0") == 1


def test_notes_beyond_the_bound_of_a_transfer_are_counted() -> None:
    timelines = Timelines(ABOUT, max_notes=5)
    for number in range(8):
        timelines.note(note("tx", Stage.RETRACTED, at=number))
    assert count(timelines, "tx") == 5
    assert kept(timelines, "tx").notes_dropped == 3


def test_a_hand_off_of_very_many_spans_still_has_its_end() -> None:
    timelines = Timelines(ABOUT, max_notes=40)
    ends = (Stage.PREFILLED, Stage.FILLED, Stage.CONFIRMED, Stage.ENDED, Stage.FIRST_STEP)
    for _ in range(2):
        timelines.note(note("tx", Stage.ARRIVED, side=Side.TARGET))
        for number in range(50):
            timelines.note(note("tx", Stage.ANNOUNCED, at=number, side=Side.TARGET))
            timelines.note(note("tx", Stage.MOVED, at=number, side=Side.TARGET))
        for stage in ends:
            timelines.note(note("tx", stage, at=100, side=Side.TARGET))
        stages = [each.stage for each in kept(timelines, "tx").sides[0].notes]
        assert stages[-len(ends) :] == list(ends)
        assert len(stages) == 1 + 30 + len(ends)
    assert kept(timelines, "tx").notes_dropped == 2 * 70


def test_the_oldest_transfers_make_room_when_there_are_too_many_notes_in_all() -> None:
    timelines = Timelines(ABOUT, max_notes_total=10, max_notes=6)
    for transfer in ("tx-0", "tx-1", "tx-2"):
        for number in range(6):
            timelines.note(note(transfer, Stage.RETRACTED, at=number))
    assert timelines.record("tx-0") is None
    assert sum(count(timelines, summary.transfer_id) for summary in timelines.newest(9)) <= 10
    assert count(timelines, "tx-2") == 6


def test_a_transfer_id_that_is_used_again_starts_anew() -> None:
    timelines = Timelines(ABOUT)
    for stage in (Stage.ARRIVED, Stage.ENDED, Stage.ARRIVED, Stage.STARTED):
        timelines.note(note("tx", stage))
    assert [each.stage for each in kept(timelines, "tx").sides[0].notes] == [Stage.ARRIVED, Stage.STARTED]


def test_a_second_arrival_of_a_live_side_takes_nothing_away() -> None:
    timelines = Timelines(ABOUT)
    for stage in (Stage.ARRIVED, Stage.STARTED, Stage.ARRIVED):
        timelines.note(note("tx", stage))
    assert count(timelines, "tx") == 3


def test_a_long_reason_is_cut() -> None:
    timelines = Timelines(ABOUT)
    timelines.note(msgspec.structs.replace(note("tx"), text="x" * 10_000))
    assert len(kept(timelines, "tx").sides[0].notes[0].text) == MAX_TEXT


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((Outcome.DELIVERED, Outcome.DELIVERED), Outcome.DELIVERED),
        ((Outcome.DELIVERED, Outcome.EXPIRED), Outcome.EXPIRED),
        ((Outcome.CANCELLED, Outcome.FAILED), Outcome.FAILED),
        ((Outcome.DELIVERED, None), None),
    ],
)
def test_a_summary_has_the_worst_outcome(ends: tuple[Outcome | None, ...], expected: Outcome | None) -> None:
    timelines = Timelines(ABOUT)
    for sample, outcome in enumerate(ends):
        timelines.note(note("tx", Stage.ARRIVED, 1.0, sample=sample))
        if outcome is not None:
            timelines.note(msgspec.structs.replace(note("tx", Stage.ENDED, 3.5, sample=sample), outcome=outcome))
    (summary,) = timelines.newest(5)
    assert (summary.outcome, summary.handoffs, summary.total_s) == (expected, 2, 2.5)


def test_threads_lose_nothing() -> None:
    timelines = Timelines(ABOUT, max_notes_total=100_000)
    readers_stop = threading.Event()

    def write(thread: int) -> None:
        for number in range(300):
            timelines.note(note(f"tx-{number % 10}", at=number, sample=thread))

    def read() -> None:
        for number in itertools.cycle(range(10)):
            if readers_stop.is_set():
                return
            timelines.record(f"tx-{number}")
            timelines.newest(10)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join(20)
    readers_stop.set()
    reader.join(20)
    assert sum(count(timelines, f"tx-{number}") for number in range(10)) == 1200


@pytest.mark.parametrize("name", ["max_transfers", "max_notes", "max_notes_total"])
def test_a_bound_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        Timelines(ABOUT, **{name: 0})
