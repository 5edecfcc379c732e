"""What the source half of a coordinator does when its table says so: the effects, and what they need."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvbaton.agent.engine_port import Drained, Granted, SourceEnded
from kvbaton.agent.ports import Clock, Control, EnginePort, LegOpen, Ranks, SumAsk
from kvbaton.agent.records import Declined, SourceRecord, sums_by_leg
from kvbaton.config import Limits
from kvbaton.core.alarms import Alarms
from kvbaton.core.aux_area import AuxArea, AuxPointer, AuxSlots, pack_aux, point_at
from kvbaton.core.checks import SpanSum
from kvbaton.core.grants import GrantWindows, Tombstones
from kvbaton.core.handoff import Aux, AuxWay, HandoffKey, Incarnation, Integrity, Outcome, Span, TransferId
from kvbaton.core.lifecycle import SOURCE, SourceEffect, SourceTable
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    Confirmed,
    Grant,
    Message,
    Over,
    Prefilled,
    Retracted,
    Stopped,
)
from kvbaton.core.timeline import Observer, Side, Stage, no_observer, note

__all__ = ["SourceEffects"]

log = logging.getLogger(__name__)


class SourceEffects:
    """The ports and live hand-offs of a source side, and one method per effect of its table."""

    table: SourceTable = SOURCE

    def __init__(
        self,
        ranks_count: int,
        limits: Limits,
        clock: Clock,
        control: Control,
        ranks: Ranks,
        engine: EnginePort,
        observe: Observer = no_observer,
        aux_area: AuxArea | None = None,
    ) -> None:
        self._observe = observe
        self._ranks_count = ranks_count
        self._limits = limits
        self._clock = clock
        self._control = control
        self._ranks = ranks
        self._engine = engine
        self.live: dict[HandoffKey, SourceRecord] = {}
        self._windows = GrantWindows()
        self._ended: Tombstones[tuple[Incarnation | None, HandoffKey, int], Over] = Tombstones()
        self._declined: Tombstones[HandoffKey, Declined] = Tombstones()
        self._declined_whole: Tombstones[TransferId, Declined] = Tombstones()
        self.aux_slots = AuxSlots(aux_area)
        self.aux_fallbacks_total: Counter[str] = Counter()
        self._generation = 0
        self._parked = 0
        self._alarms: Alarms[HandoffKey] = Alarms()
        self.late_total: Counter[str] = Counter()
        self.failures_total: Counter[str] = Counter()
        self.effects: dict[SourceEffect, Callable[[SourceRecord], None]] = {
            SourceEffect.EXTEND_LEASE: self.extend_lease,
            SourceEffect.TELL_GRANTED: self.tell_granted,
            SourceEffect.ANNOUNCE: self.announce,
            SourceEffect.TELL_PREFILLED: self.tell_prefilled,
            SourceEffect.NEW_GENERATION: self.new_generation,
            SourceEffect.TELL_RETRACTED: self.tell_retracted,
            SourceEffect.TELL_DRAINED: self.tell_drained,
            SourceEffect.SEND_CONFIRMATION: self.send_confirmation,
            SourceEffect.STOP_LEGS: self.stop_legs,
            SourceEffect.TELL_END: self.tell_end,
            SourceEffect.RETURN_BLOCKS: self.return_blocks,
        }

    # The effects.

    def extend_lease(self, record: SourceRecord) -> None:
        """The target is alive: count its silence from now."""
        record.lease_until = self._clock() + self._limits.defer_timeout

    def tell_granted(self, record: SourceRecord) -> None:
        """The engine may start it now, however full its pool is."""
        self._note(record, Stage.GRANTED)
        self._engine(Granted(record.key))

    def announce(self, record: SourceRecord) -> None:
        """Tell the target what is new, let our own legs move it if the copying is ours, and sum it if that is asked for."""
        grant = record.grant
        if grant is None:
            return
        new = tuple(record.spans[record.announced :])
        if new:
            record.announced = len(record.spans)
            blocks = () if record.writes else record.blocks
            for span in new:
                self._note(record, Stage.ANNOUNCED, span)
            self._tell(record, Announced(record.key, grant.grant, record.generation, blocks, new))
        if record.writes and (unmoved := tuple(record.spans[record.moving :])):
            self._open_legs(record, grant)
            record.moving = len(record.spans)
            for rank in range(self._ranks_count):
                self._ranks.move(rank, record.leg, record.blocks, unmoved)
        if grant.integrity is not Integrity.OFF and (unsummed := tuple(record.spans[record.summing :])):
            record.summing = len(record.spans)
            total = grant.tokens or None
            how = (grant.cached_tokens, grant.integrity, total, record.target)
            ask = SumAsk(record.leg, Side.SOURCE, record.blocks, unsummed, *how)
            for rank in range(self._ranks_count):
                self._ranks.sum_spans(rank, ask)

    def tell_prefilled(self, record: SourceRecord) -> None:
        """Tell the target that nothing more will come, and give it the aux record."""
        if record.offer is None:
            return
        waited = max(0.0, self._clock() - record.held_since)
        count = len(record.spans)
        number = record.grant_number
        self._tell(record, Prefilled(record.key, number, record.generation, count, record.offer.tokens, waited))
        pointer = self._aux_pointer(record, record.offer.aux)
        self._tell(record, AuxSent(record.key, number, None if pointer else record.offer.aux, pointer))

    def new_generation(self, record: SourceRecord) -> None:
        """What was announced is void; legs of the old generation, if any, are being stopped."""
        self._generation += 1
        record.generation = self._generation
        record.spans.clear()
        record.announced = record.moving = 0
        record.moved.clear()
        record.is_confirmed = False
        self._drop_sums(record)

    def tell_retracted(self, record: SourceRecord) -> None:
        """Tell the target which generation counts now."""
        self._note(record, Stage.RETRACTED)
        self._tell(record, Retracted(record.key, record.grant_number, record.generation))

    def tell_drained(self, record: SourceRecord) -> None:
        """The engine may have the blocks."""
        record.blocks = ()
        self._engine(Drained(record.key))

    def send_confirmation(self, record: SourceRecord) -> None:
        """State that what was moved was right."""
        record.is_confirmed = True
        self._note(record, Stage.CONFIRMED)
        sums = tuple(SpanSum(leg, span, value) for (leg, span), value in sorted(sums_by_leg(record.sums).items()))
        self._tell(record, Confirmed(record.key, record.grant_number, record.generation, len(record.spans), sums))

    def stop_legs(self, record: SourceRecord) -> None:
        """Ask every leg of ours to stop, those of a generation that is being retracted included."""
        for rank, leg in tuple(record.open_legs.items()):
            self._ranks.stop_leg(rank, leg)

    def tell_end(self, record: SourceRecord) -> None:
        """Tell the target how it ended here; it was quiet before this is said."""
        end = Over(record.key, record.grant_number, record.verdict, record.reason)
        self._tell(record, Stopped(record.key, record.grant_number) if record.stop_asked else end)

    def return_blocks(self, record: SourceRecord) -> None:
        """The end: forget the record and tell the engine."""
        del self.live[record.key]
        self._alarms.drop(record.key)
        self._drop_sums(record)
        if record.aux_pointer is not None:
            self.aux_slots.give(record.aux_pointer.offset)
        outcome = Outcome(record.state.value)
        end = Over(record.key, record.grant_number, outcome, record.reason)
        self._ended.add((record.target, record.key, record.grant_number), end)
        for rank, leg in record.open_legs.items():
            self._ranks.close_leg(rank, leg)
        self._note(record, Stage.ENDED, outcome=outcome)
        if outcome is not Outcome.DELIVERED:
            log.warning("hand-off %s: source %s: %s", record.key, outcome, record.reason or "no reason given")
        if record.is_expected:
            self._engine(SourceEnded(record.key, outcome, record.reason))

    # Helpers.

    def _note(self, record: SourceRecord, stage: Stage, span: Span | None = None, outcome: Outcome | None = None) -> None:
        text = record.reason if outcome is not None else ""
        self._observe(note(record.key, Side.SOURCE, stage, self._clock(), span, outcome=outcome, text=text))

    def _aux_pointer(self, record: SourceRecord, aux: Aux) -> AuxPointer | None:
        """Put the aux record into a slot of ours, once, if the target wants to fetch it; None when it goes in the message."""
        if record.grant is None or record.grant.aux_way is AuxWay.CONTROL:
            return None
        if record.aux_pointer is None:
            data = pack_aux(record.key, record.grant_number, record.generation, aux)
            refusal = self.aux_slots.refusal(len(data))
            if refusal:
                self.aux_fallbacks_total[refusal] += 1
                return None
            slot = self.aux_slots.take()
            if not self._ranks.put_aux(slot, data):
                self.aux_slots.give(slot)
                self.aux_fallbacks_total["not written"] += 1
                return None
            record.aux_pointer = point_at(slot, data)
        return record.aux_pointer

    def _drop_sums(self, record: SourceRecord) -> None:
        if record.summing:
            for rank in range(self._ranks_count):
                self._ranks.drop_sums(rank, Side.SOURCE, record.key)
        record.summing, record.is_asked = 0, False
        record.sums.clear()

    def _tell(self, record: SourceRecord, message: Message) -> None:
        if record.target is not None:
            self._control.send(record.target, message)

    def _open_legs(self, record: SourceRecord, grant: Grant) -> None:
        if record.open_legs or record.target is None:
            return
        record.open_legs = dict.fromkeys(range(self._ranks_count), record.leg)
        what = (grant.blocks, grant.cached_tokens, grant.tokens or None)
        start = LegOpen(record.leg, record.target, grant.executor, grant.epoch, *what)
        for rank in range(self._ranks_count):
            self._ranks.open_leg(rank, start)
