"""What holds of every live hand-off between two events: its counts agree with each other, and each deadline has an alarm.

A count that is off shows in what is decoded only when several things go wrong at once. So it is looked at itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.handoff import Executor, Integrity
from kvbaton.core.lifecycle import SourceState, TargetState

__all__ = ["Causes", "alarm_problems", "count_problems"]

_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
_MOST_STALE = 8
_SOURCE_STAGES = {
    SourceState.PARKED: 0,
    SourceState.QUEUED: 1,
    SourceState.STREAMING: 2,
    SourceState.RETRACTING: 2,
    SourceState.HELD: 3,
    SourceState.SERVING: 4,
}
_TARGET_STAGES = {
    TargetState.QUEUED: 0,
    TargetState.HANDSHAKING: 1,
    TargetState.GRANTED: 2,
    TargetState.FILLING: 3,
    TargetState.CLEARING: 3,
    TargetState.CONFIRMING: 4,
}


def count_problems(source: SourceSide, target: TargetSide, ranks: int) -> Iterator[str]:
    """Counts of live hand-offs that do not agree."""
    for record in source.live.values():
        for problem in (*_source_problems(record), *_source_stands(record, ranks)):
            yield f"{record.key}, {record.state} source: {problem}"
    for target_record in target.live.values():
        is_summed = target.compares_sums
        for problem in (*_target_problems(target_record, ranks), *_target_stands(target_record, ranks, is_summed)):
            yield f"{target_record.key}, {target_record.state} target: {problem}"
    parked = sum(record.state is SourceState.PARKED for record in source.live.values())
    if parked != vars(source)["_parked"]:
        yield f"{parked} grants are parked, and {vars(source)['_parked']} are counted"
    quarantined = sum(record.quarantined for record in target.live.values())
    if quarantined != target.quarantined_blocks:
        yield f"{quarantined} blocks are in quarantine, and {target.quarantined_blocks} are counted"


def _source_problems(record: SourceRecord) -> Iterator[str]:
    state, count = record.state, len(record.spans)
    numbers = [span.number for span in record.spans]
    counts = (record.announced, record.moving, record.summing)
    if state in (SourceState.STREAMING, SourceState.SERVING):
        expected = (count, count if record.writes else 0, 0 if record.integrity is Integrity.OFF else count)
        if counts != expected:
            yield f"{counts} spans are announced, moving and summing, and not {expected}"
        if any(copy != record.copy for copy in record.open_copies.values()):
            yield f"{record.open_copies} are open, and this is {record.copy}"
    elif max(counts) > count:
        yield f"{counts} spans are announced, moving and summing, of {count}"
    if any(not spans <= set(numbers[: record.moving]) for spans in record.moved.values()):
        yield f"{record.moved} are moved, of {numbers[: record.moving]}"
    if not {span for _, span in record.sums} <= set(numbers[: record.summing]):
        yield f"{sorted(record.sums)} are summed, of {numbers[: record.summing]}"
    if (record.is_asked or record.is_confirmed) and state not in (SourceState.SERVING, SourceState.STOPPING):
        yield "it is asked about, or confirmed"
    if (record.grant is None) is not (state in (SourceState.QUEUED, SourceState.HELD)) and state is not SourceState.STOPPING:
        yield f"its grant is {record.grant}"
    if record.is_expected is (state is SourceState.PARKED) and state is not SourceState.STOPPING:
        yield "it is parked, and the engine knows it, or the other way round"
    if state in _SOURCE_STAGES:
        done = 0 if state is SourceState.QUEUED else count + sum(map(len, record.moved.values())) + len(record.sums)
        if record.furthest < (_SOURCE_STAGES[state], done):
            yield f"it has got to {_SOURCE_STAGES[state], done}, and {record.furthest} is remembered"


def _source_stands(record: SourceRecord, ranks: int) -> Iterator[str]:
    """What has to follow from counts, and has not."""
    state, count = record.state, len(record.spans)
    if state in (SourceState.STOPPING, SourceState.RETRACTING) and not record.open_copies:
        yield "no copy of ours is open, and nothing follows"
    if state is SourceState.SERVING and (record.integrity is Integrity.OFF or len(record.sums) == ranks * count):
        is_moved = sum(map(len, record.moved.values())) == ranks * count
        if record.writes and is_moved and not record.is_confirmed:
            yield "everything is written, and not confirmed"
        if record.is_asked and not record.writes:
            yield "everything is summed, and the question is not answered"


def _target_problems(record: TargetRecord, ranks: int) -> Iterator[str]:
    spans, state = record.spans.keys(), record.state
    moved = sum(map(len, record.moved.values()))
    is_reading = record.executor is Executor.TARGET_READS
    on_wire = ranks * (len(spans) - len(record.unmoved)) - moved if is_reading else 0
    if record.on_wire != on_wire:
        yield f"{record.on_wire} spans are counted as being moved, and {on_wire} are"
    if record.just_moved:
        yield f"nothing followed from spans {record.just_moved}, which were moved"
    if any(not numbers <= spans - record.unmoved.keys() for numbers in record.moved.values()):
        yield f"{record.moved} are moved, of {list(spans)} without {list(record.unmoved)}"
    if not {span for _, span in record.sums} <= record.summing <= spans:
        yield f"{sorted(record.sums)} are summed, of {sorted(record.summing)} of {list(spans)}"
    if (record.source_sums or record.is_confirmed) and record.span_count is None:
        yield "what was confirmed is void, and still counts"
    blocks = 0 if record.allocation is None else sum(map(len, record.allocation.blocks))
    if record.quarantined != (blocks if state in _CLOSING else 0):
        yield f"{record.quarantined} of {blocks} blocks are in quarantine"
    is_one = state in (TargetState.GRANTED, TargetState.FILLING, TargetState.CONFIRMING)
    if is_one and any(copy != record.copy for copy in record.open_copies.values()):
        yield f"{record.open_copies} are open, and this is {record.copy}"
    if record.stale_grants > _MOST_STALE:
        yield f"{record.stale_grants} grants were refused as stale, and it goes on"
    if not moved and (record.bytes_planned or record.bytes_moved):
        yield f"{record.bytes_moved} of {record.bytes_planned} bytes are counted, and no span is moved"
    if state in _TARGET_STAGES:
        done = moved + len(record.sums)
        if not is_reading and record.allocation is not None and state is TargetState.FILLING:
            done += len(spans)
        if record.furthest < (_TARGET_STAGES[state], done):
            yield f"it has got to {_TARGET_STAGES[state], done}, and {record.furthest} is remembered"


def _target_stands(record: TargetRecord, ranks: int, is_summed: bool) -> Iterator[str]:
    """What has to follow from counts, and has not."""
    is_reading = record.executor is Executor.TARGET_READS
    if record.open_copies and record.state is not TargetState.FILLING:
        return
    if record.state in _CLOSING and (is_reading or record.peer_is_quiet or not record.grant):
        yield "nothing can write to its blocks any more, and it does not end"
    if record.state is TargetState.CLEARING:
        yield "no copy of ours is open, and nothing follows"
    if record.state is TargetState.FILLING and record.span_count is not None and record.aux is not None:
        is_in = sum(map(len, record.moved.values())) == ranks * record.span_count if is_reading else record.is_confirmed
        if is_summed and not is_reading and is_in and len(record.spans) == record.span_count and not record.summing:
            yield "everything is written and announced, and is not being summed"
        if is_in and (not is_summed or len(record.sums) == ranks * record.span_count):
            yield "everything is in, and nothing follows"


def alarm_problems(source: SourceSide, target: TargetSide) -> Iterator[str]:
    """Deadlines for which no alarm is set: nothing would happen when they are over."""
    for timers in (vars(source)["_timers"], vars(target)["_timers"], vars(target.decline_notices)["_timers"]):
        first = min(timers.times.values(), default=math.inf)
        if first < math.inf and (timers.next_deadline() or math.inf) > first:
            yield f"an alarm is set for {first}, and does not ring"
    alarms = vars(source)["_timers"]
    for record in source.live.values():
        if record.state is not SourceState.STOPPING:
            is_alone = record.state is SourceState.QUEUED and record.target is None
            until = record.capped_at if is_alone else min(record.lease_until, record.capped_at)
            if alarms.set_for(record.key) > until:
                yield f"{record.key}, {record.state} source: no alarm is set for its deadline"
    alarms = vars(target)["_timers"]
    for target_record in target.live.values():
        until = target_record.stop_until
        if target_record.state not in _CLOSING:
            is_queued = target_record.state is TargetState.QUEUED
            until = target_record.capped_at if is_queued else min(target_record.give_up_at, target_record.capped_at)
        asks_again = target_record.source is None or target_record.state in (TargetState.GRANTED, TargetState.CONFIRMING)
        until = min(until, target_record.retry.at if asks_again else math.inf)
        if alarms.set_for(target_record.key) > until:
            yield f"{target_record.key}, {target_record.state} target: no alarm is set for its deadline, or its next question"


class Causes:
    """What ended each hand-off that is being stopped: the first cause stays."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[SourceRecord | TargetRecord, str, str]] = {}

    def problems(self, source: SourceSide, target: TargetSide) -> Iterator[str]:
        """Causes that are not the first any more."""
        ending: list[SourceRecord | TargetRecord] = [
            record for record in source.live.values() if record.state is SourceState.STOPPING
        ]
        ending += [record for record in target.live.values() if record.state in _CLOSING]
        if not ending:
            self._first.clear()
            return
        before, self._first = self._first, {}
        for record in ending:
            first = before.get(id(record), (record, record.verdict, record.reason))
            self._first[id(record)] = first
            if first[1:] != (record.verdict, record.reason):
                yield f"{record.key} was ended by {first[1:]}, and now by {record.verdict, record.reason}"
