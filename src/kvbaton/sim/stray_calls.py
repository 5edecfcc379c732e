"""Calls that an engine should not make: twice, too early or too late, for what it never asked for, or with wrong numbers.

Like a stray message, such a call changes nothing for the hand-offs that are live, unless it leaves no right answer: an engine
that contradicts itself about a cache has that hand-off ended, with the reason. Either is looked at here, for the call itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sized
from dataclasses import replace
from functools import partial

from msgspec import structs

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import Allocation, EngineEvent, Offer, SourceEnded, SourceRequest, TargetEnded
from kvbaton.agent.rank_orders import Arrived, CopyId, SpansMoved, SpansPlanned, SpansSummed
from kvbaton.agent.source import SourceRecord
from kvbaton.agent.target import TargetRecord
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import MAX_TRANSFER_ID, Aux, HandoffKey, Incarnation, Outcome, Span, TransferId
from kvbaton.core.lifecycle import SourceState
from kvbaton.core.messages import MAX_NUMBER
from kvbaton.core.timeline import Side
from kvbaton.sim.reactions import source_place, target_place

__all__ = ["StrayCalls"]

_ELSEWHERE = 1000
_UNKNOWN = HandoffKey(TransferId("unknown"))
_COPY = CopyId(_UNKNOWN, 1, 1)
_BAD_IDS = tuple(map(TransferId, ("", "x" * (MAX_TRANSFER_ID + 1))))
_BAD_KEYS = (*map(HandoffKey, _BAD_IDS), HandoffKey(TransferId("x"), -1), HandoffKey(TransferId("x"), 0, -1))
_COMPUTING = (SourceState.QUEUED, SourceState.STREAMING)
_OFFERED = (SourceState.HELD, SourceState.SERVING)

Call = Callable[[], None]


class StrayCalls:
    """Makes such calls of one coordinator. `events` has what its engine is yet to take, `sent` what was sent."""

    def __init__(self, coordinator: Coordinator, events: deque[EngineEvent], sent: Sized, rng: random.Random) -> None:
        self._coordinator = coordinator
        self._events = events
        self._sent = sent
        self._rng = rng

    def make(self, number: int, *, may_fail: bool) -> str:
        """Make one call; what is wrong with its effect. With `may_fail` it is one that ends a hand-off, if there is any."""
        source, target = self._coordinator.source, self._coordinator.target
        records = [each for each in source.live.values() if each.is_expected and each.state is not SourceState.STOPPING]
        if may_fail:
            return self._contradict(records)
        # Of a grant that is parked the engine has no request yet, and one that is being stopped takes nothing any more.
        unasked = [each for each in source.live.values() if each.state in (SourceState.PARKED, SourceState.STOPPING)]
        if unasked:
            return self._unasked(self._rng.choice(unasked))
        calls: list[Callable[[], str]] = [self._unknown, self._bad_key]
        if records:
            record = self._rng.choice(records)
            calls += [lambda: self._expect_again(record), lambda: self._late(record)] * 2
        if target.live:
            target_record = self._rng.choice(list(target.live.values()))
            calls += [lambda: self._fetch_again(target_record), lambda: self._late_target(target_record)] * 2
        return calls[number % len(calls)]()

    def _unanswered(self, call: Call, late: str, kind: str) -> str:
        """A call that comes to nothing: no event, no message, nothing live, and one more `late` of its kind."""
        side = self._coordinator.source if late == "source" else self._coordinator.target
        before = (len(self._events), len(self._sent), self._live(), side.late_total[kind] + 1)
        call()
        after = (len(self._events), len(self._sent), self._live(), side.late_total[kind] if kind else 1)
        before = before if kind else (*before[:3], 1)
        return "" if after == before else f"a late {kind or 'cancellation'}: {before} became {after}"

    def _live(self) -> tuple[object, ...]:
        source, target = self._coordinator.source.live, self._coordinator.target.live
        notices = tuple(map(id, vars(self._coordinator.target.decline_notices)["_waiting"].values()))
        return (*map(source_place, source.values()), *map(target_place, target.values()), *notices)

    def _refused(self, call: Call, kind: type[SourceEnded | TargetEnded], key: HandoffKey) -> str:
        """A call that is answered with an end, of which the engine has no request, and changes nothing else."""
        before = (len(self._events), len(self._sent), self._live())
        call()
        end = self._events.pop() if self._events else None
        after = (len(self._events), len(self._sent), self._live())
        is_end = isinstance(end, kind) and end.key == key and end.outcome is Outcome.FAILED and bool(end.reason)
        return "" if is_end and after == before else f"{end} is the answer about {key}; {before} became {after}"

    def _unknown(self) -> str:
        """About something that was never asked for, or is over."""
        coordinator = self._coordinator
        allocation = Allocation(SourceRequest(_UNKNOWN, "prompt", ControlAddress.of("p0", 1)), ((0,),), 1, 0)
        span, offer = Span(0, 0, 1, 0, 1), Offer(_UNKNOWN, ((0,),), 1, Aux(token_id=0, logprob=0.0))
        problems = (
            self._unanswered(lambda: coordinator.spans_ready(_UNKNOWN, ((0,),), (span,)), "source", "spans"),
            self._unanswered(lambda: coordinator.offer(offer), "source", "offer"),
            self._unanswered(lambda: coordinator.retract(_UNKNOWN), "source", "retract"),
            self._unanswered(lambda: coordinator.cancel(_UNKNOWN), "source", ""),
            self._unanswered(lambda: coordinator.allocated(allocation), "target", "allocated"),
            # A rank may report about it, too, when the last thing that it had in flight has ended.
            self._unanswered(lambda: coordinator.on_rank(Arrived(_COPY, Incarnation("gone"), 0, 1, 1)), "target", "arrived"),
            self._unanswered(lambda: coordinator.on_rank(SpansMoved(_COPY, 0, (0,), 1, 1)), "target", "copy"),
            self._unanswered(lambda: coordinator.on_rank(SpansPlanned(_COPY, 0, (0,), 1)), "source", "copy"),
        )
        return next(filter(None, problems), "")

    def _unasked(self, record: SourceRecord) -> str:
        """About something that the engine has not asked for yet, or that is being stopped."""
        coordinator, key = self._coordinator, record.key
        span, offer = Span(0, 0, 1, 0, 1), Offer(key, ((0,),), 1, Aux(token_id=0, logprob=0.0))
        before = (record.blocks, record.offer, len(record.spans))
        problems = [
            self._unanswered(lambda: coordinator.spans_ready(key, ((0,),), (span,)), "source", "spans"),
            self._unanswered(lambda: coordinator.offer(offer), "source", "offer"),
        ]
        if record.state is SourceState.PARKED:
            problems.append(self._unanswered(lambda: coordinator.retract(key), "source", "retract"))
        if (record.blocks, record.offer, len(record.spans)) != before:
            problems.append(f"{key} is {record.state}, and {before} became {record.blocks, record.offer, len(record.spans)}")
        return next(filter(None, problems), "")

    def _bad_key(self) -> str:
        coordinator, key = self._coordinator, self._rng.choice(_BAD_KEYS)
        if problem := self._refused(lambda: coordinator.expect_target(key, "prompt"), SourceEnded, key):
            return problem
        request = next((each.request for each in coordinator.target.live.values()), None)
        if request is None:
            return ""
        bad = replace(request, key=key)
        problem = self._refused(lambda: coordinator.expect_source(bad), TargetEnded, key)
        return problem or self._unanswered(lambda: coordinator.decline(bad, "no room"), "target", "decline")

    def _expect_again(self, record: SourceRecord) -> str:
        for prompt in (record.prompt, f"not {record.prompt}"):
            call = partial(self._coordinator.expect_target, record.key, prompt)
            if problem := self._refused(call, SourceEnded, record.key):
                return problem
        return ""

    def _late(self, record: SourceRecord) -> str:
        """A refusal of what was admitted is no refusal any more; and what is cancelled as a target's is none of this side."""
        problem = self._planned_late(record) or self._unanswered(
            lambda: self._coordinator.refuse(record.key, "no room"), "source", ""
        )
        if problem or record.key in self._coordinator.target.live:
            return problem
        return self._unanswered(lambda: self._coordinator.cancel(record.key, Side.TARGET), "source", "")

    def _planned_late(self, record: SourceRecord) -> str:
        """A report of what is void, or of no rank that moves it, comes late, or one that has counted comes again."""
        on_rank, before = self._coordinator.on_rank, record.written_bytes
        void = structs.replace(record.copy, generation=record.generation - 1)
        for copy, rank in ((void, 0), (record.copy, len(self._coordinator.card.ranks))):
            late = partial(on_rank, SpansPlanned(copy, rank, (0,), 1))
            if problem := self._unanswered(late, "source", "copy"):
                return problem
        if record.written_bytes != before:
            return f"{before} bytes became {record.written_bytes} by a late report"
        for rank, numbers in record.planned.items():
            on_rank(SpansPlanned(record.copy, rank, tuple(numbers), 1))
        return "" if record.written_bytes == before else f"{before} bytes became {record.written_bytes} by the same report"

    def _fetch_again(self, record: TargetRecord) -> str:
        return self._refused(lambda: self._coordinator.expect_source(record.request), TargetEnded, record.key)

    def _late_target(self, record: TargetRecord) -> str:
        coordinator, request = self._coordinator, record.request
        problem = self._unanswered(lambda: coordinator.decline(request, "no room"), "target", "decline")
        if not problem and request.key not in coordinator.source.live:
            problem = self._unanswered(lambda: coordinator.cancel(request.key, Side.SOURCE), "target", "")
        if record.allocation is None or problem:
            return problem
        again = Allocation(request, record.allocation.blocks, record.allocation.tokens, record.allocation.cached_tokens)
        problem = self._unanswered(lambda: coordinator.allocated(again), "target", "allocated")
        return problem or self._reported_again(record)

    def _reported_again(self, record: TargetRecord) -> str:
        """A rank reports what it has reported before, or what is not asked of it: nothing counts twice."""
        coordinator, copy, source = self._coordinator, record.copy, record.source
        if not record.grant or source is None:
            return ""
        of_another = SpansMoved(structs.replace(copy, grant=copy.grant + _ELSEWHERE), 0, (0,), 1, 1)
        number = record.arrivals.get(0, 0) if record.counts_arrivals else MAX_NUMBER
        arrived = Arrived(copy, source, 0, number, 1)
        summed = SpansSummed(copy, Side.TARGET, 0, {MAX_NUMBER: ((0, 0),)})
        problems = [
            self._unanswered(lambda: coordinator.on_rank(of_another), "target", "copy"),
            self._unanswered(lambda: coordinator.on_rank(arrived), "target", "arrived"),
            self._unanswered(lambda: coordinator.on_rank(summed), "target", "summed"),
        ]
        for rank, spans in tuple(record.moved.items()):
            if spans and record.open_copies.get(rank) == copy:
                before = (record.bytes_planned, record.bytes_moved, record.on_wire, record.give_up_at)
                coordinator.on_rank(SpansMoved(copy, rank, (min(spans),), 1, 1))
                after = (record.bytes_planned, record.bytes_moved, record.on_wire, record.give_up_at)
                problems += [] if after == before else [f"span {min(spans)} is moved twice: {before} became {after}"]
        return next(filter(None, problems), "")

    def _contradict(self, records: list[SourceRecord]) -> str:
        """Contradict what was reported of a cache: it has more spans than were offered, or fewer."""
        able = [each for each in records if each.state in _OFFERED or (each.state in _COMPUTING and each.spans)]
        if not able:
            return ""
        record = self._rng.choice(able)
        span = record.spans[-1]
        if record.state in _OFFERED:
            self._coordinator.spans_ready(record.key, record.blocks, (structs.replace(span, number=span.number + 1),))
        else:
            aux = Aux(token_id=0, logprob=0.0)
            self._coordinator.offer(Offer(record.key, record.blocks, span.end_token + 1, aux))
        is_live = self._coordinator.source.live.get(record.key) is record
        is_ending = record.state is SourceState.STOPPING or not is_live
        is_named = (record.verdict, bool(record.reason)) == (Outcome.FAILED, True)
        return "" if is_ending and is_named else f"{record.key} is {record.state}, although its engine contradicts itself"
