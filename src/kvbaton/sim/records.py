"""What holds of every live hand-off between two events: its counts agree with each other, and each deadline has an alarm.

A count that is off shows in what is decoded only when several things go wrong at once. So it is looked at itself.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from kvbaton.agent.rank_orders import CopyId
from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.config import Limits
from kvbaton.core.checks import ONE_IN, span_size
from kvbaton.core.handoff import Executor, Integrity, Outcome
from kvbaton.core.lifecycle import (
    SOURCE,
    TARGET,
    EffectT,
    EventT,
    SourceEvent,
    SourceState,
    StateT,
    Table,
    TargetState,
)
from kvbaton.errors import IllegalTransition

__all__ = [
    "SOURCE_STAGES",
    "Causes",
    "Fences",
    "Waits",
    "alarm_problems",
    "count_problems",
    "sequence_problems",
    "stop_problems",
    "tables_problems",
]

_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
_GRANTED = frozenset({TargetState.GRANTED, TargetState.FILLING, TargetState.CONFIRMING})
_REPEATING = frozenset({TargetState.GRANTED, TargetState.CONFIRMING})
_SENDING = frozenset({SourceState.STREAMING, SourceState.SERVING})
_UNGRANTED = frozenset({SourceState.QUEUED, SourceState.HELD})
_EMPTYING = frozenset({SourceState.STOPPING, SourceState.RETRACTING})
_MOST_STALE = 8
_SMALL_S = 1e-6
_EARLY = 0.98
"""Clocks drift: so much of a wait may be missing."""

SOURCE_STAGES = {
    SourceState.PARKED: 0,
    SourceState.QUEUED: 1,
    SourceState.STREAMING: 2,
    SourceState.RETRACTING: 2,
    SourceState.HELD: 3,
    SourceState.SERVING: 4,
}
"""How far a source in each of the live states has got."""

_TARGET_STAGES = {
    TargetState.QUEUED: 0,
    TargetState.HANDSHAKING: 1,
    TargetState.GRANTED: 2,
    TargetState.FILLING: 3,
    TargetState.CLEARING: 3,
    TargetState.CONFIRMING: 4,
}


def _table_problems(table: Table[StateT, EventT, EffectT]) -> Iterator[str]:
    """Events that a table takes although they are none of its own, or does not although they may come late."""
    states, events = type(table.start), type(next(iter(table.rows))[1])
    for state in states:
        for event in events:
            is_known = (state, event) in table.rows
            may_come = is_known or state in table.terminal or (state, event) in table.late
            try:
                is_taken = (table.step(state, event) is not None) is is_known and may_come
            except IllegalTransition:
                is_taken = not may_come
            if not is_taken:
                yield f"{table.name}: {event} in {state}"


def tables_problems() -> tuple[str, ...]:
    """What is wrong with the tables of both sides; looked at once per process, and again when they or their reader change."""
    rows = tuple((id(table.rows), table.terminal, table.late) for table in (SOURCE, TARGET))
    return _found_problems(rows, Table.step.__code__)


@functools.lru_cache(maxsize=1)
def _found_problems(*_: object) -> tuple[str, ...]:
    # A look at every event in every state, which every instance of every run would repeat.
    return (*_table_problems(SOURCE), *_table_problems(TARGET))


def stop_problems(source: SourceSide, target: TargetSide, stopped: Collection[tuple[int, CopyId]]) -> Iterator[str]:
    """Copies whose end is waited for, and that no rank was ordered to stop."""
    records: list[SourceRecord | TargetRecord] = [each for each in source.live.values() if each.state in _EMPTYING]
    records += [each for each in target.live.values() if each.state in _CLOSING or each.state is TargetState.CLEARING]
    for record in records:
        if running := record.open_copies.items() - stopped:
            yield f"{record.key} is {record.state}, and these copies were not ordered to stop: {sorted(running)}"


def count_problems(source: SourceSide, target: TargetSide, ranks: int) -> Iterator[str]:
    """Counts of live hand-offs that do not agree."""
    parked = quarantined = 0
    for record in source.live.values():
        parked += record.state is SourceState.PARKED
        for problem in _source_problems(record, ranks, source.sum_size):
            yield f"{record.key}, {record.state} source: {problem}"
    is_summed = target.compares_sums
    for target_record in target.live.values():
        quarantined += target_record.quarantined
        for problem in _target_problems(target_record, ranks, is_summed, target.sum_size):
            yield f"{target_record.key}, {target_record.state} target: {problem}"
    if source.late_total[SourceEvent.LEASE_OUT]:
        yield "a lease has ended of what is ending anyhow"
    if parked != vars(source)["_parked"]:
        yield f"{parked} grants are parked, and {vars(source)['_parked']} are counted"
    if quarantined != target.quarantined_blocks:
        yield f"{quarantined} blocks are in quarantine, and {target.quarantined_blocks} are counted"


# This is looked at after every turn of every instance. So what is rare comes first in each condition, and what has to be built
# to be compared is built only where there is something to compare.


def _source_problems(record: SourceRecord, ranks: int, sum_size: int) -> Iterator[str]:
    state, count, grant = record.state, len(record.spans), record.grant
    is_checked = grant is not None and grant.integrity is not Integrity.OFF
    announced, moving, summing = record.announced, record.moving, record.summing
    if state in _SENDING:
        expected = (count, count if record.writes else 0)
        if (announced, moving) != expected:
            yield f"{(announced, moving)} spans are announced and moving, and not {expected}"
        # What is computed is summed at the latest when nothing more will be computed.
        least = count if is_checked and state is SourceState.SERVING else 0
        if not least <= summing <= (count if is_checked else 0):
            yield f"{summing} of {count} spans are being summed"
        if is_checked and summing < count:
            worth = sum_size * (ONE_IN if record.integrity is Integrity.SAMPLED else 1)
            if (waiting := sum(map(span_size, record.spans[summing:]))) >= worth:
                yield f"{waiting} is computed and not being summed, and {worth} is worth an order"
        if record.open_copies:
            copy = record.copy
            if any(each != copy for each in record.open_copies.values()):
                yield f"{record.open_copies} are open, and this is {copy}"
    elif announced > count or moving > count or summing > count:
        yield f"{(announced, moving, summing)} spans are announced, moving and summing, of {count}"
    moved = sum(map(len, record.moved.values())) if record.moved else 0
    if moved:
        numbers = {span.number for span in record.spans[:moving]}
        if any(not spans <= numbers for spans in record.moved.values()):
            yield f"{record.moved} are moved, of {sorted(numbers)}"
    if record.planned or record.written_bytes:
        numbers = {span.number for span in record.spans[:moving]}
        if any(not spans <= numbers for spans in record.planned.values()):
            yield f"{record.planned} are on their way, of {sorted(numbers)}"
        if not any(record.planned.values()):
            yield f"{record.written_bytes} bytes are on their way, and no span is"
    if record.sums:
        numbers = {span.number for span in record.spans[:summing]}
        if not {span for _, span in record.sums} <= numbers:
            yield f"{sorted(record.sums)} are summed, of {sorted(numbers)}"
    if record.blocks and not record.spans and state not in _EMPTYING:
        yield f"it holds blocks {record.blocks}, and nothing is in them"
    if state is not SourceState.STOPPING:
        if record.superseded_by is not None:
            yield f"it goes on, although its target has granted {record.superseded_by}"
        if (record.is_asked or record.is_confirmed) and state is not SourceState.SERVING:
            yield "it is asked about, or confirmed"
        if (grant is None) is not (state in _UNGRANTED):
            yield f"its grant is {grant}"
        if record.is_expected is (state is SourceState.PARKED):
            yield "it is parked, and the engine knows it, or the other way round"
    if state in SOURCE_STAGES:
        done = 0 if state is SourceState.QUEUED else count + moved + len(record.sums)
        if record.furthest < (SOURCE_STAGES[state], done):
            yield f"it has got to {SOURCE_STAGES[state], done}, and {record.furthest} is remembered"
    # What has to follow from counts, and has not.
    if state in _EMPTYING and not record.open_copies:
        yield "no copy of ours is open, and nothing follows"
    if state is SourceState.SERVING and (not is_checked or len(record.sums) == ranks * count):
        if record.writes and moved == ranks * count and not record.is_confirmed:
            yield "everything is written, and not confirmed"
        if record.is_released and moved == ranks * count:
            yield "everything is written, and released, and it does not end"
        if record.is_released and not record.open_copies:
            yield "it is released, and no copy of ours is open, and it does not end"
        if grant is not None and grant.counts_arrivals and not record.is_confirmed:
            planned = sum(map(len, record.planned.values()))
            if planned == ranks * count:
                yield "everything is on its way, and not confirmed"
        if record.is_asked and not record.writes:
            yield "everything is summed, and the question is not answered"


def _target_problems(record: TargetRecord, ranks: int, is_summed: bool, sum_size: int) -> Iterator[str]:
    spans, state = record.spans.keys(), record.state
    moved = sum(map(len, record.moved.values())) if record.moved else 0
    is_reading = record.executor is Executor.TARGET_READS
    on_wire = ranks * (len(spans) - len(record.unmoved)) - moved if is_reading else 0
    if record.on_wire != on_wire:
        yield f"{record.on_wire} spans are counted as being moved, and {on_wire} are"
    if not record.unmoved.keys() <= spans:
        yield f"{list(record.unmoved)} are to be moved, of {list(spans)}"
    if record.written_bytes is not None and not record.is_confirmed:
        yield f"{record.written_bytes} bytes are to come, and nothing is confirmed"
    if record.just_moved:
        yield f"nothing followed from spans {record.just_moved}, which were moved"
    if moved:
        begun = spans - record.unmoved.keys()
        if any(not numbers <= begun for numbers in record.moved.values()):
            yield f"{record.moved} are moved, of {list(spans)} without {list(record.unmoved)}"
    if record.unsummed and state is TargetState.FILLING:
        for rank, numbers in record.unsummed.items():
            if numbers and len(record.moved.get(rank, ())) == record.span_count:
                yield f"everything is in on rank {rank}, and {numbers} are not being summed"
            if spans >= set(numbers) and sum(span_size(record.spans[number]) for number in numbers) >= sum_size:
                yield f"{numbers} are in on rank {rank}, are worth an order, and are not being summed"
    if record.unsummed and any(not spans >= set(numbers) for numbers in record.unsummed.values()):
        yield f"{record.unsummed} are to be summed, of {list(spans)}"
    elif record.unsummed_size:
        sizes = {rank: sum(span_size(record.spans[each]) for each in numbers) for rank, numbers in record.unsummed.items()}
        if sizes != record.unsummed_size:
            yield f"{record.unsummed_size} are to be summed, and {record.unsummed} are {sizes}"
    if (record.sums or record.summing) and not {span for _, span in record.sums} <= record.summing <= spans:
        yield f"{sorted(record.sums)} are summed, of {sorted(record.summing)} of {list(spans)}"
    if (record.source_sums or record.is_confirmed or record.stamp or record.sums_follow) and record.span_count is None:
        yield "what was confirmed is void, and still counts"
    blocks = sum(map(len, record.allocation.blocks)) if record.allocation is not None and state in _CLOSING else 0
    if record.quarantined != blocks:
        yield f"{record.quarantined} blocks are in quarantine, and not {blocks}"
    if record.open_copies and state in _GRANTED:
        copy = record.copy
        if any(each != copy for each in record.open_copies.values()):
            yield f"{record.open_copies} are open, and this is {copy}"
    if record.span_count is not None and len(spans) > record.span_count and state not in _CLOSING:
        yield f"{list(spans)} are announced, of {record.span_count} spans"
    if record.stale_grants > _MOST_STALE:
        yield f"{record.stale_grants} grants were refused as stale, and it goes on"
    if not moved and (record.bytes_planned or record.bytes_moved):
        yield f"{record.bytes_moved} of {record.bytes_planned} bytes are counted, and no span is moved"
    if state in _TARGET_STAGES:
        done = moved + len(record.sums)
        if not is_reading and record.allocation is not None and state is TargetState.FILLING:
            # Without spans of nothing, of which a source can announce any number.
            done += sum([span.first_token < span.end_token for span in record.spans.values()])
        if record.furthest < (_TARGET_STAGES[state], done):
            yield f"it has got to {_TARGET_STAGES[state], done}, and {record.furthest} is remembered"
    if state is TargetState.CONFIRMING and (record.span_count is None or moved != ranks * record.span_count):
        yield f"{moved} of {record.span_count} spans are in on {ranks} ranks, and the source is asked about them"
    if state is TargetState.CONFIRMING and record.stamp is not None:
        yield f"{record.stamp} is known, and it was not looked at, or it does not stand"
    if record.sums_follow and (record.stamp is not None or record.source_sums):
        yield f"{record.stamp} and {record.source_sums} are here, and counted as to come"
    # What has to follow from counts, and has not.
    if state is TargetState.FILLING:
        if record.span_count is not None and record.aux is not None:
            is_written = record.is_confirmed and record.written_bytes in (None, record.arrived_bytes)
            is_in = moved == ranks * record.span_count if is_reading else is_written
            if is_summed and not is_reading and is_in and len(spans) == record.span_count and not record.summing:
                yield "everything is written and announced, and is not being summed"
            if is_in and (not is_summed or len(record.sums) == ranks * record.span_count):
                yield "everything is in, and nothing follows"
    elif not record.open_copies:
        if state in _CLOSING and (is_reading or record.peer_is_quiet or not record.grant):
            yield "nothing can write to its blocks any more, and it does not end"
        if state is TargetState.CLEARING:
            yield "no copy of ours is open, and nothing follows"


def alarm_problems(source: SourceSide, target: TargetSide) -> Iterator[str]:
    """Deadlines for which no alarm is set: nothing would happen when they are over."""
    source_timers, target_timers = vars(source)["_timers"], vars(target)["_timers"]
    for timers in (source_timers, target_timers, vars(target.decline_notices)["_timers"]):
        if timers.times:
            first = min(timers.times.values())
            if first < math.inf and (timers.next_deadline() or math.inf) > first:
                yield f"an alarm is set for {first}, and does not ring"
    alarms = source_timers.times
    for record in source.live.values():
        state = record.state
        if state is not SourceState.STOPPING:
            until = record.capped_at
            is_alone = state is SourceState.QUEUED and record.target is None
            if record.lease_until < until and not is_alone and not record.is_released:
                until = record.lease_until
            if alarms.get(record.key, math.inf) > until:
                yield f"{record.key}, {state} source: no alarm is set for its deadline"
    alarms = target_timers.times
    for target_record in target.live.values():
        target_state = target_record.state
        if target_state in _CLOSING:
            until = target_record.stop_until
        else:
            until = target_record.capped_at
            if target_record.give_up_at < until and target_state is not TargetState.QUEUED:
                until = target_record.give_up_at
        asks_again = target_record.source is None or target_state in _REPEATING
        if asks_again or (target_state is TargetState.FILLING and _misses_something(target_record)):
            until = min(until, target_record.retry.at)
        if alarms.get(target_record.key, math.inf) > until:
            yield f"{target_record.key}, {target_state} target: no alarm is set for its deadline, or its next question"


def _misses_something(record: TargetRecord) -> bool:
    """Whether the source has something left to send, of what it has computed or will compute."""
    if record.span_count is None or record.aux is None or len(record.spans) < record.span_count:
        return True
    return record.executor is Executor.SOURCE_WRITES and not record.is_confirmed


def sequence_problems(target: TargetSide) -> Iterable[str]:
    """Grants to one source that share a number: it takes one of them, and refuses the others."""
    return _shared_numbers(target) if len(target.live) > 1 else ()


def _shared_numbers(target: TargetSide) -> Iterator[str]:
    numbers = [(each.source, each.sequence) for each in target.live.values() if each.grant]
    if len(set(numbers)) < len(numbers):
        for (source, sequence), count in Counter(numbers).items():
            if count > 1:
                yield f"{count} grants to {source} have number {sequence} in sequence"


@dataclass(slots=True)
class _Seen:
    """A live target. It keeps the record, whose place in memory no other one takes meanwhile."""

    record: TargetRecord
    since: float
    allocated_at: float = math.inf
    best: tuple[int, int] = (-1, 0)
    """How far it has got."""
    capped_at: float = math.inf
    """When it ends if it gets no further."""
    looked: int = 0
    """When it was looked at last, in looks."""


class Waits:
    """How long each target waits: only getting further than ever before puts its end off, and none ends before its time."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._queued_s, self._granted_s = limits.queue_timeout * _EARLY, limits.transfer_timeout * _EARLY
        self._limits = limits
        self._seen: dict[int, _Seen] = {}
        self._looked_at = now
        """An engine calls between two looks: what is new was new at any time since the one before."""
        self._looks = 0

    def problems(self, target: TargetSide, now: float) -> Iterable[tuple[str, str]]:
        """With their rules: ends that were put off although nothing has got further, and those that came before their time."""
        before, self._looked_at = self._looked_at, now
        return self._look(target, before, now) if target.live or self._seen else ()

    def _look(self, target: TargetSide, before: float, now: float) -> Iterator[tuple[str, str]]:
        self._looks += 1
        waiting = 0
        for record in target.live.values():
            state = record.state
            if state in _CLOSING:
                continue
            waiting += 1
            done = len(record.sums) + (sum(map(len, record.moved.values())) if record.moved else 0)
            if record.executor is Executor.SOURCE_WRITES:
                done += len(record.spans)
            place = _TARGET_STAGES[state], done
            seen = self._seen.get(id(record))
            if seen is None:
                seen = self._seen[id(record)] = _Seen(record, since=before)
            if record.capped_at > seen.capped_at and place <= seen.best:
                detail = f"{record.key}, {state} target: it got to {seen.best} before, and has more time at {place}"
                yield "counts agree", detail
            if seen.allocated_at == math.inf and record.allocation is not None:
                seen.allocated_at = before
            if place > seen.best:
                seen.best = place
                # What was moved between two looks, and retracted before the second, may have been further still.
                cap_s = self._limits.queue_timeout if state is TargetState.QUEUED else self._limits.hold_cap
                is_furthest = record.furthest == place
                if is_furthest and not before - _SMALL_S <= record.capped_at - cap_s <= now + _SMALL_S:
                    yield "on time", f"{record.key} has got to {place} by {now}, and may last until {record.capped_at}"
            seen.capped_at, seen.looked = record.capped_at, self._looks
        if waiting < len(self._seen):
            for seen in [each for each in self._seen.values() if each.looked < self._looks]:
                del self._seen[id(seen.record)]
                is_queued = seen.record.allocation is None
                waited_s = now - (seen.since if is_queued else seen.allocated_at)
                if seen.record.verdict is Outcome.EXPIRED and waited_s < (self._queued_s if is_queued else self._granted_s):
                    yield "on time", f"{seen.record.key} expired after {waited_s:.3f} s"


class Fences:
    """How long each target that is being stopped waits before it takes stronger means: `stop_timeout` for each of them.

    No message puts that off, however often a source sends it; and none shortens it.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._stop_s = limits.stop_timeout
        self._seen: dict[int, tuple[TargetRecord, TargetState, float]] = {}
        self._looked_at = now

    def problems(self, target: TargetSide, now: float) -> Iterable[str]:
        """Waits that are too long or too short."""
        since, self._looked_at = self._looked_at, now
        ending = [each for each in target.live.values() if each.state in _CLOSING]
        if not ending:
            self._seen.clear()
            return ()
        return self._look(ending, since, now)

    def _look(self, ending: list[TargetRecord], since: float, now: float) -> Iterator[str]:
        before, self._seen = self._seen, {}
        for record in ending:
            state, until = record.state, record.stop_until
            _, state_before, until_before = before.get(id(record), (record, None, -math.inf))
            self._seen[id(record)] = record, state, until
            if state is state_before and until == until_before:
                continue
            # The strongest means is repeated each time that it was not enough; it begins then.
            is_new = state is not state_before or (state is TargetState.ISOLATED and until_before <= now + _SMALL_S)
            # An engine ends it between two looks; what follows comes with a turn, which is looked at.
            earliest = since if state is TargetState.STOPPING else now
            if not is_new or not earliest - _SMALL_S <= until - self._stop_s <= now + _SMALL_S:
                yield f"{record.key} is {state} since {earliest} at {now}, and waits until {until}, not {until_before}"


class Causes:
    """What ended each hand-off that is being stopped: the first cause stays."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[SourceRecord | TargetRecord, str, str]] = {}

    def problems(self, source: SourceSide, target: TargetSide) -> Iterable[str]:
        """Causes that are not the first any more."""
        ending: list[SourceRecord | TargetRecord] = []
        for record in source.live.values():
            if record.state is SourceState.STOPPING:
                ending.append(record)  # noqa: PERF401 - a comprehension is a call, see above
        for target_record in target.live.values():
            if target_record.state in _CLOSING:
                ending.append(target_record)  # noqa: PERF401
        if ending:
            return self._changed(ending)
        self._first.clear()
        return ()

    def _changed(self, ending: list[SourceRecord | TargetRecord]) -> Iterator[str]:
        before, self._first = self._first, {}
        for record in ending:
            first = before.get(id(record), (record, record.verdict, record.reason))
            self._first[id(record)] = first
            if first[1:] != (record.verdict, record.reason):
                yield f"{record.key} was ended by {first[1:]}, and now by {record.verdict, record.reason}"
