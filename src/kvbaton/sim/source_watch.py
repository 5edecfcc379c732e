"""What a source is held to while it keeps something for a target: for how long, and that what it sends is true: to whom it
shows that it lives, what it has computed, how something has ended. And that nothing is summed for what is over.

Leases and caps are worked out here a second time, from the records alone and from one look to the next. Few runs wait until a
wrong one is over, and in most of them a message has renewed it by then: so the times themselves are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import EngineEvent, Granted, SourceEnded
from kvbaton.agent.rank_orders import (
    CopyFailed,
    CopyId,
    CopyStopped,
    DropSums,
    MoveSpans,
    OpenCopy,
    PutAux,
    RankOrder,
    SumSpans,
    sums_by_leg,
)
from kvbaton.agent.source import SourceRecord
from kvbaton.agent.target import TargetRecord
from kvbaton.config import Limits
from kvbaton.core.aux_area import AuxPointer, pack_aux, point_at
from kvbaton.core.handoff import AuxChannel, HandoffKey, Integrity, Outcome, Span
from kvbaton.core.lifecycle import SourceState, TargetState
from kvbaton.core.messages import Announced, AuxSent, Confirmed, Message, Over, Prefilled, Refused, Stopped
from kvbaton.core.timeline import Note, Side, Stage
from kvbaton.sim.records import SOURCE_STAGES

__all__ = ["SourceWatch"]

_SMALL_S = 1e-6
_COMPUTED = (Announced, Prefilled, Confirmed)

_LEASED = frozenset(
    {
        (SourceState.PARKED, SourceState.STREAMING),
        (SourceState.PARKED, SourceState.SERVING),
        (SourceState.QUEUED, SourceState.STREAMING),
        (SourceState.QUEUED, SourceState.HELD),
        (SourceState.QUEUED, SourceState.SERVING),
        (SourceState.HELD, SourceState.SERVING),
        (SourceState.STREAMING, SourceState.SERVING),
    }
)
"""Steps with which a target's silence counts from anew: it has just granted, or there is something new to ask about."""


class _Held(NamedTuple):
    """What was seen of a record. It keeps the record, whose place in memory no other one takes meanwhile."""

    record: SourceRecord
    state: SourceState
    generation: int
    furthest: tuple[int, int]
    capped_at: float


class SourceWatch:
    """Sees what one instance sends and orders as a source, and looks at its records."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Callable[[], float],
        limits: Limits,
        *,
        is_noted: bool,
    ) -> None:
        self._coordinator = coordinator
        self._source = coordinator.source
        self._clock = clock
        self._limits = limits
        self._has_notes = is_noted
        self._held: dict[int, _Held] = {}
        self._noted: set[tuple[object, ...]] = set()
        """What was noted for operators, and has yet to be done, by key and stage; of spans, with their tokens and layers."""
        self._ended: defaultdict[HandoffKey, list[tuple[Outcome | None, str]]] = defaultdict(list)
        self._isolated: list[TargetRecord] = []
        self._may_land: set[tuple[str | None, HandoffKey, int]] = set()
        """Target, key and grant under which a copy of ours has ended with bytes on their way."""
        self._put: dict[int, AuxPointer] = {}
        """What lies in each slot of the area for aux records."""
        self._summed: dict[tuple[Side, HandoffKey, int], CopyId] = {}
        """Of every rank what it was last ordered to sum for a side of a hand-off, and not to drop."""

    def on_order(self, rank: int, order: RankOrder) -> None:
        """A rank is given an order."""
        if isinstance(order, SumSpans):
            self._summed[order.side, order.copy.key, rank] = order.copy
        elif isinstance(order, DropSums):
            self._summed.pop((order.side, order.key, rank), None)
        elif isinstance(order, PutAux):
            self._put[order.offset] = point_at(order.offset, order.data)

    def on_report(self, report: CopyStopped | CopyFailed) -> None:
        """A copy has ended; what of it may land is stated with the end of its hand-off, unless that was delivered by then."""
        record = self._source.live.get(report.copy.key)
        is_current = record is not None and record.open_copies.get(report.rank) == report.copy
        if is_current and record is not None and report.may_land and not record.is_released:
            self._may_land.add((record.target, report.copy.key, report.copy.grant))

    def order_problem(self, order: RankOrder) -> str:
        """What is wrong with an order to move or to sum for a target: it states what that has granted, and what is computed."""
        if isinstance(order, DropSums) and all(each[:2] != (order.side, order.key) for each in self._summed):
            return f"there is nothing to drop: {order}"
        if not isinstance(order, OpenCopy | MoveSpans | SumSpans):
            return ""
        record = self._source.live.get(order.copy.key)
        is_other_side = isinstance(order, SumSpans) and order.side is not Side.SOURCE
        if record is None or record.grant is None or record.copy != order.copy or is_other_side:
            return ""
        if not isinstance(order, SumSpans) and record.key in self._coordinator.target.live:
            # One instance may have both sides of hand-offs of the same name: it may be the other one's.
            return ""
        grant = record.grant
        if not record.writes and not isinstance(order, SumSpans):
            return f"its target reads: {order}"
        if isinstance(order, MoveSpans):
            return "" if order.source_blocks == record.blocks else f"{record.blocks} are computed: {order}"
        granted: tuple[object, ...] = (record.target, grant.cached_tokens, grant.tokens or None)
        stated: tuple[object, ...] = (order.peer, order.cached_tokens, order.total_tokens)
        if isinstance(order, OpenCopy):
            granted = (*granted, grant.blocks, grant.epoch, grant.executor, grant.counts_arrivals)
            stated = (*stated, order.target_blocks, order.epoch, order.executor, order.counts_arrivals)
        else:
            granted = (*granted, record.blocks, grant.integrity)
            stated = (*stated, order.blocks, order.integrity)
        return "" if stated == granted else f"{granted} is granted: {order}"

    def reset_problem(self) -> str:
        """What is wrong with an order to register memory anew: each hand-off has it done once, when nothing else has helped."""
        live = self._coordinator.target.live.values()
        before, self._isolated = self._isolated, [each for each in live if each.state is TargetState.ISOLATED]
        is_new = any(all(each is not other for other in before) for each in self._isolated)
        return "" if is_new else "all memory is registered anew, and for no hand-off for the first time"

    def note(self, note: Note) -> None:
        """Something is noted for operators."""
        if note.side is Side.SOURCE and note.stage is Stage.ENDED:
            self._ended[note.key].append((note.outcome, note.text))
        elif note.side is Side.SOURCE:
            where = (note.first_token, note.end_token, note.first_layer, note.end_layer)
            self._noted.add((note.key, note.stage, *where))

    def _is_noted(self, key: HandoffKey, stage: Stage, span: Span | None = None) -> bool:
        """Whether something was noted, once for each time that it is done; always, where no notes are taken."""
        where = (0, 0, 0, 0) if span is None else (span.first_token, span.end_token, span.first_layer, span.end_layer)
        is_noted = (key, stage, *where) in self._noted
        self._noted.discard((key, stage, *where))
        return is_noted or not self._has_notes

    def event_problem(self, event: EngineEvent) -> str:
        """What is wrong with an event that the engine takes at once."""
        record = self._source.live.get(event.key)
        if isinstance(event, SourceEnded) and (noted := self._ended.pop(event.key, [])):
            # An engine that hangs takes it late, when later uses of the key may have ended, too.
            if (end := (event.outcome, event.reason)) not in noted:
                return f"another end was noted than {event}"
            self._ended[event.key] = noted[noted.index(end) + 1 :]
        if isinstance(event, Granted) and record is not None and record.grant is not None:
            if event.cached_tokens != record.grant.cached_tokens:
                return f"{record.grant.cached_tokens} tokens are cached at the target: {event}"
            if not self._is_noted(event.key, Stage.GRANTED):
                return f"not noted: {event}"
        return ""

    def sent_problem(self, recipient: str, message: Message) -> str:
        """What is wrong with a message that is being sent."""
        if isinstance(message, _COMPUTED):
            record = self._source.live.get(message.key)
            return "" if record is None else self._computed_problem(record, message)
        if isinstance(message, AuxSent):
            return self._aux_problem(message)
        if isinstance(message, Over | Stopped) and (recipient, message.key, message.grant) in self._may_land:
            return "" if message.may_land else f"bytes of it may still land: {message}"
        if problem := self._superseding_problem(recipient, message):
            return problem
        # A grant that came meanwhile ends with the one before it, and for the same reason.
        is_alone = all(each[:2] != (recipient, getattr(message, "key", None)) for each in self._may_land)
        if isinstance(message, Over | Stopped) and message.may_land and is_alone:
            return f"nothing of it can land any more: {message}"
        if isinstance(message, Over) and message.key not in self._source.live:
            # What is live is ending now, and without a grant an earlier use of its key has the same number.
            end = vars(self._source)["_ended"].get((recipient, message.key, message.grant))
            return "" if end is None or end == message else f"it ended as {end}: {message}"
        if isinstance(message, Refused) and message.stale:
            is_used = "was used before" in message.reason
            return "" if is_used == (message.sequence <= (message.used_up_to or 0)) else f"another reason is true: {message}"
        return ""

    def _superseding_problem(self, recipient: str, message: Message) -> str:
        """What is wrong with the answer to a grant that came before an earlier one of its target had ended.

        A refusal is the promise that nothing of the earlier one is on its way; else both end, and are remembered as over.
        """
        key, grant = getattr(message, "key", None), getattr(message, "grant", 0)
        record = None if key is None else self._source.live.get(key)
        later = None if record is None or record.target != recipient else record.superseded_by
        if record is None or later is None or later.grant != grant or grant == record.grant_number:
            return ""
        if isinstance(message, Refused) and not message.stale and record.may_land:
            return f"bytes of an earlier grant may still land: {message}"
        if isinstance(message, Over) and not record.may_land:
            return f"nothing of an earlier grant can land, and this one is not refused: {message}"
        if isinstance(message, Over) and (recipient, key, grant) not in self._source.ends():
            return f"it is over, and not remembered: {message}"
        return ""

    def _computed_problem(self, record: SourceRecord, message: Announced | Prefilled | Confirmed) -> str:
        """What is wrong with a message about what is computed; numbers of a grant and a generation are those in hand."""
        count, key = len(record.spans), record.key
        if (record.grant_number, record.generation) != (message.grant, message.generation):
            return f"grant {record.grant_number} and generation {record.generation} are in hand: {message}"
        match message:
            case Announced():
                if not message.spans:
                    return f"nothing is announced: {message}"
                if message.blocks != (() if record.writes else record.blocks):
                    return f"the blocks that its target reads from are {() if record.writes else record.blocks}: {message}"
                noted = [self._is_noted(key, Stage.ANNOUNCED, span) for span in message.spans]
                if not all(noted):
                    return f"not noted, or not all of it: {message}"
            case Prefilled():
                held_s = max(0.0, self._clock() - record.held_since)
                tokens = None if record.offer is None else record.offer.tokens
                if (message.span_count, message.tokens) != (count, tokens) or abs(message.held_s - held_s) > _SMALL_S:
                    return f"{count} spans of {tokens} tokens are held for {held_s} s: {message}"
                if message.stamp != record.stamp:
                    return f"its stamp is {record.stamp}: {message}"
                is_read = record.grant is not None and record.grant.reads_stamps and not record.writes
                if message.sums_follow != (is_read and not self._is_summed(record)):
                    return f"{len(record.sums)} sums of {count} spans are there: {message}"
                sums = {} if record.stamp is None else sums_by_leg(record.sums)
                if {(each.leg, each.span): each.value for each in message.sums} != sums:
                    return f"the sums that go with its stamp are {sums}: {message}"
                if self._has_notes and (key, Stage.PREFILLED, 0, 0, 0, 0) not in self._noted:
                    return f"not noted: {message}"
            case Confirmed():
                sums = {(each.leg, each.span): each.value for each in message.sums}
                if message.span_count != count or sums != sums_by_leg(record.sums):
                    return f"{count} spans have the sums {sums_by_leg(record.sums)}: {message}"
                is_counted = record.grant is not None and record.grant.counts_arrivals
                if message.written_bytes != (record.written_bytes if is_counted else None):
                    return f"{record.written_bytes} bytes are on their way, counted by the target ({is_counted}): {message}"
                if not self._is_noted(key, Stage.CONFIRMED):
                    return f"not noted: {message}"
        return ""

    def _is_summed(self, record: SourceRecord) -> bool:
        ranks = len(self._coordinator.card.ranks)
        return record.integrity is Integrity.OFF or len(record.sums) == ranks * len(record.spans)

    def _aux_problem(self, message: AuxSent) -> str:
        if (message.aux is None) is (message.pointer is None):
            return f"a record, and where it lies, or neither: {message}"
        if message.pointer is not None and self._put.get(message.pointer.offset) != message.pointer:
            return f"the record does not lie there: {message}"
        record = self._source.live.get(message.key)
        if message.aux is None or record is None or record.grant is None or record.grant_number != message.grant:
            return ""
        if record.grant.aux_channel is AuxChannel.DATA:
            size = len(pack_aux(record.key, message.grant, record.generation, message.aux))
            if not self._source.aux_slots.refusal(size):
                return f"there is a slot for the aux record, and its target would read it there: {message}"
        return ""

    def time_problems(self, now: float) -> Iterable[str]:
        """Leases and caps that are not what they have to be."""
        if self._source.live:
            return self._wrong_times(now)
        if self._held:
            self._held.clear()
        return ()

    def _wrong_times(self, now: float) -> Iterator[str]:
        before, self._held, limits = self._held, {}, self._limits
        for record in self._source.live.values():
            state = record.state
            seen, generation = before.get(id(record)), record.generation
            if (stage := SOURCE_STAGES.get(state)) is None:
                is_given_up = record.is_released and record.verdict is Outcome.EXPIRED
                if is_given_up and seen is not None and seen.capped_at > now + _SMALL_S:
                    yield f"{record.key} is released, its own copies may go on, and its target's silence has ended it"
                continue
            is_queued, has_target = state is SourceState.QUEUED, record.target is not None
            if is_queued:
                place = stage, int(has_target)
            else:
                moved = sum(map(len, record.moved.values())) if record.moved else 0
                place = stage, len(record.spans) + moved + len(record.sums)
            furthest, capped_at = ((-1, 0), 0.0) if seen is None else (seen.furthest, seen.capped_at)
            if place > furthest:
                furthest = place
                capped_at = now + (limits.queue_timeout if is_queued and not has_target else limits.hold_cap)
            elif seen is not None and seen.generation != generation:
                # What was computed between two looks, and retracted before the second, is not seen; that it renewed the cap is.
                furthest = max(furthest, record.furthest)
                capped_at = max(capped_at, min(record.capped_at, now + limits.hold_cap))
            if abs(record.capped_at - capped_at) > _SMALL_S:
                yield f"{record.key} is {state}, and may last until {record.capped_at}, and not {capped_at}, at {now}"
            is_leased = seen is not None and seen.state is not state and (seen.state, state) in _LEASED
            if is_leased and record.lease_until < now + limits.defer_timeout - _SMALL_S:
                yield f"{record.key} has become {state} at {now}, and its lease ends at {record.lease_until}"
            self._held[id(record)] = _Held(record, state, generation, furthest, record.capped_at)

    def sum_problems(self) -> Iterable[str]:
        """Sums that no side of a hand-off waits for any more, and that no rank was ordered to drop."""
        return self._left_to_sum() if self._summed else ()

    def _left_to_sum(self) -> Iterator[str]:
        for (side, key, rank), copy in self._summed.items():
            record = (self._source if side is Side.SOURCE else self._coordinator.target).live.get(key)
            if record is None or record.copy != copy:
                yield f"rank {rank} is left to sum {copy} for a {side}"
