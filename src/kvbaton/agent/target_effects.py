"""What the target half of a coordinator does when its table says so: the effects, and what they need."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable

from kvbaton.agent.engine_port import Allocation, HandoffStats, Landed, TargetEnded
from kvbaton.agent.farewells import Farewells
from kvbaton.agent.ports import (
    Clock,
    Control,
    EnginePort,
    LegOpen,
    Ranks,
)
from kvbaton.agent.records import TargetRecord
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.alarms import Alarms
from kvbaton.core.aux_area import AuxSlots
from kvbaton.core.card import Card
from kvbaton.core.grants import Tombstones
from kvbaton.core.handoff import (
    AuxWay,
    Executor,
    HandoffKey,
    Incarnation,
    Mode,
    Outcome,
    Span,
)
from kvbaton.core.lifecycle import TARGET, TargetEffect, TargetTable
from kvbaton.core.messages import (
    ConfirmAsk,
    Grant,
    Hello,
    Message,
    Release,
    Stop,
)
from kvbaton.core.timeline import Observer, Side, Stage, no_observer, note

__all__ = ["TargetEffects"]

log = logging.getLogger(__name__)

_MAX_ANSWERED = 2048
_MAX_GREETED = 4096


class TargetEffects:
    """The ports and live hand-offs of a target side, and one method per effect of its table."""

    table: TargetTable = TARGET

    def __init__(
        self,
        card: Card,
        transport: str,
        limits: Limits,
        clock: Clock,
        control: Control,
        ranks: Ranks,
        engine: EnginePort,
        settings: HandoffSettings = DEFAULT_HANDOFF,
        observe: Observer = no_observer,
    ) -> None:
        self._settings = settings
        self._observe = observe
        self._card = card
        self._transport = transport
        self._limits = limits
        self._clock = clock
        self._control = control
        self._ranks = ranks
        self._engine = engine
        self.live: dict[HandoffKey, TargetRecord] = {}
        self._last_grant = 0
        self._ended: Tombstones[tuple[HandoffKey, int], tuple[Outcome, float]] = Tombstones()
        self.epoch = 1
        self._alarms: Alarms[HandoffKey] = Alarms()
        self._greeted_at: dict[ControlAddress, float] = {}
        self._asked = 0
        self._answered: dict[Incarnation, tuple[int, float]] = {}
        self.quarantined_blocks = 0
        """Blocks that wait until somebody is provably quiet."""
        self.late_total: Counter[str] = Counter()
        self.failures_total: Counter[str] = Counter()
        self.mismatches_total = 0
        self.aux_slots = AuxSlots(card.ranks[0].aux)
        self.aux_fallbacks_total: Counter[str] = Counter()
        self.farewells = Farewells(limits, clock, control, self._greet)
        self.effects: dict[TargetEffect, Callable[[TargetRecord], None]] = {
            TargetEffect.NEW_GRANT: self.new_grant,
            TargetEffect.SEND_GRANT: self.send_grant,
            TargetEffect.MOVE_SPANS: self.move_spans,
            TargetEffect.DROP_SPANS: self.drop_spans,
            TargetEffect.ASK_CONFIRMATION: self.ask_confirmation,
            TargetEffect.STOP_LEGS: self.stop_legs,
            TargetEffect.TELL_STOP: self.tell_stop,
            TargetEffect.REVOKE_PEER: self.revoke_peer,
            TargetEffect.RESET_REGION: self.reset_region,
            TargetEffect.TELL_RELEASE: self.tell_release,
            TargetEffect.DELIVER: self.deliver,
            TargetEffect.RETURN_BLOCKS: self.return_blocks,
        }

    # The effects.

    def new_grant(self, record: TargetRecord) -> None:
        """Take the next number; no two grants of this instance share one, whoever they are for."""
        if record.source is not None:
            self._last_grant += 1
            record.grant = self._last_grant
            record.generation, record.aux = 0, None
            self.drop_spans(record)
            record.epoch = self.epoch
            record.aux_way, record.aux_pointer = self._aux_way(record), None
            record.executor = self._ranks.executor if record.wanted.mode is Mode.PUSH else Executor.TARGET_READS

    def send_grant(self, record: TargetRecord) -> None:
        """Tell the source that the blocks are there."""
        if record.allocation is None:
            return
        blocks = record.allocation.blocks if record.executor is Executor.SOURCE_WRITES else ()
        mode, cached = record.wanted.mode, record.allocation.cached_tokens
        prompt = record.wanted.prompt
        self._note(record, Stage.GRANT_SENT)
        how = (self._settings.integrity, record.aux_way, record.allocation.tokens)
        grant = Grant(record.key, record.grant, prompt, mode, record.executor, record.epoch, blocks, cached, *how)
        self._tell(record, grant)

    def move_spans(self, record: TargetRecord) -> None:
        """Let every rank move what was announced and is not being moved yet."""
        if record.executor is Executor.SOURCE_WRITES or record.allocation is None or record.source is None:
            return
        new = tuple(record.unmoved.values())
        if not new:
            return
        record.unmoved.clear()
        if not record.on_wire:
            record.wire_since = self._clock()
        record.on_wire += len(new) * len(self._card.ranks)
        for rank in self._card.ranks:
            if rank.rank not in record.open_legs:
                record.open_legs[rank.rank] = record.leg
                self._ranks.open_leg(rank.rank, self._leg_open(record, record.allocation, record.source))
            self._ranks.move(rank.rank, record.leg, record.source_blocks, new)

    def drop_spans(self, record: TargetRecord) -> None:
        """What was announced and moved is void."""
        record.spans.clear()
        record.source_blocks = ()
        record.unmoved.clear()
        record.moved.clear()
        record.on_wire = 0
        record.span_count = None
        record.is_confirmed = False
        self._drop_sums(record)
        record.bytes_planned = record.bytes_moved = 0

    def ask_confirmation(self, record: TargetRecord) -> None:
        """Everything is in: ask the source whether it was right."""
        self._note(record, Stage.FILLED)
        self._tell(record, ConfirmAsk(record.key, record.grant, record.generation))

    def stop_legs(self, record: TargetRecord) -> None:
        """Ask every leg of ours to stop."""
        for rank, leg in tuple(record.open_legs.items()):
            self._ranks.stop_leg(rank, leg)

    def tell_stop(self, record: TargetRecord) -> None:
        """Tell the source to stop, and to say so; one that had no grant is told with a farewell, when our side has ended."""
        if record.grant:
            self._tell(record, Stop(record.key, record.grant, record.verdict, record.reason))

    def revoke_peer(self, record: TargetRecord) -> None:
        """The source does not say that it has stopped: end its right to write here."""
        if record.source is not None:
            self.epoch += 1
            self._ranks.revoke(record.source, self.epoch)

    def reset_region(self, record: TargetRecord) -> None:
        """The source could not be fenced alone: end everybody's right to write here."""
        del record
        self.epoch += 1
        self._ranks.reset_region(self.epoch)

    def tell_release(self, record: TargetRecord) -> None:
        """Tell the source that we have all we need."""
        self._tell(record, Release(record.key, record.grant))

    def deliver(self, record: TargetRecord) -> None:
        """The good end: the engine may decode."""
        self._forget(record)
        if record.aux is not None:
            self._note(record, Stage.ENDED, outcome=Outcome.DELIVERED)
            self._engine(Landed(record.key, record.aux, self._stats(record)))

    def return_blocks(self, record: TargetRecord) -> None:
        """The other ends: the engine may have its blocks back."""
        self._forget(record)
        outcome = Outcome(record.state.value)
        if not record.grant and not record.peer_is_quiet:
            self.farewells.say(record.wanted, outcome, record.reason, record.source)
        self._note(record, Stage.ENDED, outcome=outcome)
        log.warning("hand-off %s: target %s: %s", record.key, outcome, record.reason)
        self._engine(TargetEnded(record.key, outcome, record.reason))

    # Helpers.

    def _note(self, record: TargetRecord, stage: Stage, span: Span | None = None, outcome: Outcome | None = None) -> None:
        text = record.reason if outcome is not None else ""
        self._observe(note(record.key, Side.TARGET, stage, self._clock(), span, outcome=outcome, text=text))

    def _greet(self, address: ControlAddress) -> None:
        """Ask who answers at a source's address; one question does for everybody who waits for the answer."""
        now = self._clock()
        if now - self._greeted_at.get(address, -math.inf) >= self._limits.retry / 2:
            if len(self._greeted_at) >= _MAX_GREETED:
                self._greeted_at.clear()
            self._greeted_at[address] = now
            self._control.dial(address, Hello(self._card, wants_answer=True))

    def _aux_way(self, record: TargetRecord) -> AuxWay:
        """How the aux record is to travel; by message where one of the two sides has no area for it."""
        if self._settings.aux_way is AuxWay.CONTROL:
            return AuxWay.CONTROL
        if self.aux_slots.area is None or record.source_area is None:
            self.aux_fallbacks_total["no aux area"] += 1
            return AuxWay.CONTROL
        return AuxWay.DATA

    def _drop_sums(self, record: TargetRecord) -> None:
        if record.summing:
            for rank in self._card.ranks:
                self._ranks.drop_sums(rank.rank, Side.TARGET, record.key)
        record.summing.clear()
        record.sums.clear()
        record.source_sums.clear()

    def _progress(self, record: TargetRecord) -> None:
        """Something moved: deadlines measure the lack of progress from here."""
        now = self._clock()
        record.give_up_at = now + self._limits.transfer_timeout
        record.retry_s = self._limits.retry
        record.retry_at = now + record.retry_s

    def _leg_open(self, record: TargetRecord, allocation: Allocation, source: Incarnation) -> LegOpen:
        blocks, cached, tokens = allocation.blocks, allocation.cached_tokens, allocation.tokens
        return LegOpen(record.leg, source, record.executor, record.epoch, blocks, cached, tokens)

    def _note_answer(self, source: Incarnation, record: TargetRecord) -> None:
        """A source has answered something new: everything that it was asked earlier is answered, or lost."""
        number, _ = self._answered.get(source, (0, 0.0))
        if record.asked <= number:
            return
        self._answered.pop(source, None)
        self._answered[source] = (record.asked, self._clock())
        while len(self._answered) > _MAX_ANSWERED:
            del self._answered[next(iter(self._answered))]

    def _tell(self, record: TargetRecord, message: Message) -> None:
        if record.source is not None:
            self._asked += 1
            record.asked = self._asked
            self._control.send(record.source, message)

    def _quarantine(self, record: TargetRecord) -> None:
        if record.allocation is not None:
            record.quarantined = sum(map(len, record.allocation.blocks))
            self.quarantined_blocks += record.quarantined

    def _forget(self, record: TargetRecord) -> None:
        del self.live[record.key]
        self.quarantined_blocks -= record.quarantined
        self._alarms.drop(record.key)
        self._drop_sums(record)
        self._ended.add((record.key, record.grant), (Outcome(record.state.value), self._clock()))
        for rank, leg in record.open_legs.items():
            self._ranks.close_leg(rank, leg)

    def _stats(self, record: TargetRecord) -> HandoffStats:
        now = self._clock()
        waited = record.held_s + (now - record.prefilled_at)
        return HandoffStats(
            bytes_planned=record.bytes_planned,
            bytes_moved=record.bytes_moved,
            handover_s=max(0.0, waited - record.exposed_wire_s),
            wire_s=record.wire_s,
            transport=self._transport,
            source_writes=record.executor is Executor.SOURCE_WRITES,
        )
