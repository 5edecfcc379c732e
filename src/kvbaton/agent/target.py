"""The target half of a coordinator: grants blocks, has them filled and confirmed, and only then lets decode start."""

from __future__ import annotations

import math

from kvbaton.agent.engine_port import Allocation, SourceWanted, TargetEnded
from kvbaton.agent.ports import (
    LegFailed,
    LegMoved,
    LegReport,
    LegStopped,
    LegSummed,
)
from kvbaton.agent.records import TargetRecord
from kvbaton.agent.target_aux import TargetAux
from kvbaton.agent.target_steps import CLOSING
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.handoff import (
    Executor,
    HandoffKey,
    Incarnation,
    Outcome,
    key_problem,
)
from kvbaton.core.lifecycle import TargetEvent, TargetState
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    Confirmed,
    Heartbeat,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
)
from kvbaton.core.timeline import Side, Stage, note

__all__ = ["TargetRecord", "TargetSide"]

_UNHEARD = frozenset({TargetState.QUEUED, TargetState.GREETING, TargetState.GRANTED})


_NOT_RENEWED = CLOSING | {TargetState.CLEARING, TargetState.CONFIRMING}
"""States in which a sign of life of the source is not enough: something has to come of it."""


class TargetSide(TargetAux):
    """All live hand-offs that this instance is the target of."""

    # What the engine says.

    def expect(self, wanted: SourceWanted, source: Card | None) -> None:
        """A request waits for memory; its source, once it is known, is told that somebody waits."""
        problem = key_problem(wanted.key)
        if wanted.key in self.live:
            problem = f"hand-off {wanted.key} is live already"
        if problem:
            self._engine(TargetEnded(wanted.key, Outcome.FAILED, problem))
            return
        self.farewells.forget(wanted.key)
        now = self._clock()
        retry_s = self._limits.retry
        record = TargetRecord(wanted, now + self._limits.transfer_timeout, now + retry_s, retry_s)
        self.live[wanted.key] = record
        self._watch(record)
        if source is None:
            self._greet(record.wanted.source)
        else:
            self._meet(record, source)

    def allocated(self, allocation: Allocation) -> None:
        """There are blocks: grant them as soon as the source is known."""
        record = self.live.get(allocation.key)
        if record is None or record.allocation is not None:
            self.late_total["allocated"] += 1
            return
        record.allocation = allocation
        self.step(record, TargetEvent.ALLOCATED)
        if record.source is not None:
            self.step(record, TargetEvent.PEER_KNOWN)

    def decline(self, wanted: SourceWanted, source: Card | None, reason: str) -> None:
        """The engine does not take a request: its source need not wait. A live hand-off of the same key is another request,

        but where the prompt is not known, all of the transfer id is declined, of which that may be a part.
        """
        if (wanted.prompt and wanted.key in self.live) or key_problem(wanted.key):
            self.late_total["decline"] += 1
        else:
            self.farewells.say(wanted, Outcome.FAILED, reason, None if source is None else source.incarnation)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The engine gives it up; its blocks come back once nobody writes to them."""
        if (record := self.live.get(key)) is not None:
            self._end_by(record, TargetEvent.ABORTED, Outcome.CANCELLED, reason)

    def stop(self, reason: str) -> None:
        """Give everything up."""
        for key in list(self.live):
            self.cancel(key, reason)

    # What is learnt about the source.

    def on_card(self, card: Card, address: ControlAddress) -> None:
        """A peer has shown its card at `address`: go on with whoever waited for it."""
        self._greeted_at.pop(address, None)
        for record in self._strangers(address):
            self._meet(record, card)
        self.farewells.on_card(card, address)

    def on_forgotten(self, source: Incarnation) -> None:
        """A source asks who we are, so it has not taken in what we said before: say it again, now that it knows."""
        for record in [record for record in self.live.values() if record.source == source and self._asks_again(record)]:
            self._ask_again(record, self._clock())
        self.farewells.on_forgotten(source)

    def on_refused_peer(self, address: ControlAddress, reason: str) -> None:
        """The peer at `address` does not want us, or we do not want it: whoever waited for it fails with the reason."""
        self._greeted_at.pop(address, None)
        self.farewells.on_refused_peer(address)
        for record in self._strangers(address):
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)

    def on_peer_gone(self, source: Incarnation, reason: str) -> None:
        """A source is provably gone: it will not write any more, and what was wanted of it fails."""
        self.farewells.on_peer_gone(source)
        for record in [record for record in self.live.values() if record.source == source]:
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.PEER_GONE, Outcome.FAILED, reason)

    def on_peer_fenced(self, source: Incarnation, epoch: int) -> None:
        """The session with a source was torn down: what it was granted before `epoch` fails. Later grants are not fenced."""
        reason = "its session was torn down, because it did not stop when told to"
        for record in [record for record in self._granted_before(epoch) if record.source == source]:
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.PEER_GONE, Outcome.FAILED, reason)

    def on_region_fenced(self, epoch: int) -> None:
        """Our memory was registered anew: nobody writes under an earlier epoch any more, and what relied on one fails."""
        for record in self._granted_before(epoch):
            if record.executor is Executor.SOURCE_WRITES:
                record.peer_is_quiet = True
                self._end_by(record, TargetEvent.PEER_GONE, Outcome.FAILED, "the memory had to be registered anew")

    # What the source says.

    def on_announced(self, sender: Incarnation, announced: Announced) -> None:
        """More is computed: move it, if moving is ours."""
        record = self.current(sender, announced.key, announced.grant)
        if record is None or not self._same_generation(record, announced.generation):
            self.late_total["announced"] += 1
            return
        for span in announced.spans:
            self._note(record, Stage.ANNOUNCED, span)
        if sum(map(len, announced.blocks)) >= sum(map(len, record.source_blocks)):
            record.source_blocks = announced.blocks
        record.unmoved |= {span.number: span for span in announced.spans if span.number not in record.spans}
        record.spans |= {span.number: span for span in announced.spans}
        self.step(record, TargetEvent.ANNOUNCED)
        self._refuse_surplus(record)
        self._settle(record)

    def on_prefilled(self, sender: Incarnation, prefilled: Prefilled) -> None:
        """Nothing more will be announced."""
        record = self.current(sender, prefilled.key, prefilled.grant)
        if record is None or record.allocation is None or not self._same_generation(record, prefilled.generation):
            self.late_total["prefilled"] += 1
        elif prefilled.tokens != record.allocation.tokens:
            reason = f"the source has {prefilled.tokens} tokens, the target asked for {record.allocation.tokens}"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            if record.span_count is None:
                record.held_s, record.prefilled_at = prefilled.held_s, self._clock()
                record.span_count = prefilled.span_count
                self._note(record, Stage.PREFILLED)
            self._progress(record)
            self._refuse_surplus(record)
            self._settle(record)

    def on_aux(self, sender: Incarnation, message: AuxSent) -> None:
        """The aux record is in, or lies where we can fetch it."""
        record = self.current(sender, message.key, message.grant)
        if record is None:
            self.late_total["aux"] += 1
        elif message.aux is not None:
            record.aux = message.aux
            self._settle(record)
        elif message.pointer is not None:
            self.fetch_aux(record, message.pointer)

    def on_retracted(self, sender: Incarnation, retracted: Retracted) -> None:
        """What was announced before is void."""
        record = self.current(sender, retracted.key, retracted.grant)
        if record is None or not self._same_generation(record, retracted.generation):
            self.late_total["retracted"] += 1

    def on_confirmed(self, sender: Incarnation, confirmed: Confirmed) -> None:
        """The source says that what was moved was right."""
        record = self.current(sender, confirmed.key, confirmed.grant)
        if record is None or record.generation != confirmed.generation or record.span_count != confirmed.span_count:
            self.late_total["confirmed"] += 1
        elif record.executor is Executor.SOURCE_WRITES:
            record.is_confirmed = True
            self._take_sums(record, confirmed)
            self._settle(record)
        else:
            self._note(record, Stage.CONFIRMED)
            self._take_sums(record, confirmed)
            if record.state is not TargetState.CONFIRMING or self._has_right_sums(record):
                self.step(record, TargetEvent.CONFIRMED)

    def _take_sums(self, record: TargetRecord, confirmed: Confirmed) -> None:
        if self.sums_wanted:
            record.source_sums = {(each.leg, each.span): each.value for each in confirmed.sums}

    def on_refused(self, sender: Incarnation, refused: Refused) -> None:
        """The source says no; with a stale number we only have to take a new one."""
        record = None if refused.key is None else self.current(sender, refused.key, refused.grant)
        if record is None:
            self.late_total["refused"] += 1
        elif refused.stale and record.state is TargetState.GRANTED:
            self.step(record, TargetEvent.STALE)
        else:
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, refused.reason)

    def on_over(self, sender: Incarnation, over: Over) -> None:
        """The source has ended and is quiet."""
        record = self.current(sender, over.key, over.grant)
        if record is None and not over.grant:
            record = self._unheard(sender, over.key)
        if record is None:
            self.late_total["over"] += 1
            return
        record.peer_is_quiet |= record.grant == over.grant
        self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, f"the source {over.outcome}: {over.reason}")

    def on_stopped(self, sender: Incarnation, stopped: Stopped) -> None:
        """The source will not touch our blocks for this grant again."""
        record = self.current(sender, stopped.key, stopped.grant)
        if not stopped.grant and self.farewells.on_stopped(sender, stopped.key):
            return
        if record is None or record.state not in CLOSING:
            self.late_total["stopped"] += 1
        else:
            record.peer_is_quiet = True
            self._settle(record)

    def on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        """A source is alive; what it holds for us lives on, what is over here is told again."""
        for key, grant in heartbeat.live:
            record = self.live.get(key)
            if record is not None and record.source == sender and grant in (0, record.grant):
                self.step(record, TargetEvent.HEARD)
                if record.state not in _NOT_RENEWED:
                    record.give_up_at = self._clock() + self._limits.transfer_timeout
            elif grant:
                self._tell_end_again(sender, key, grant)

    # What the ranks and the clock say.

    def on_leg(self, report: LegReport) -> None:
        """A rank tells what became of its leg; the hand-off is decided by all of them together."""
        record = self.live.get(report.leg.key)
        if record is None or record.open_legs.get(report.rank) != report.leg:
            self.late_total["leg"] += 1
            return
        match report:
            case LegMoved():
                self.count_moved(record, report)
            case LegStopped():
                del record.open_legs[report.rank]
            case LegFailed():
                del record.open_legs[report.rank]
                self._end_by(record, TargetEvent.LEG_FAILED, Outcome.FAILED, report.reason)
        self._settle(record)

    def count_moved(self, record: TargetRecord, report: LegMoved) -> None:
        """One span of one rank is in; a span counts once."""
        if report.leg.generation != record.generation:
            return
        moved = record.moved.setdefault(report.rank, set())
        if report.span not in moved:
            moved.add(report.span)
            record.bytes_planned += report.bytes_planned
            record.bytes_moved += report.bytes_moved
            now = self._clock()
            self._count_wire(record, now)
            span, moved_bytes = record.spans.get(report.span), report.bytes_moved
            self._observe(note(record.key, Side.TARGET, Stage.MOVED, now, span, moved_bytes=moved_bytes, rank=report.rank))
            self.sum_moved(record, report.rank, report.span)
            self._progress(record)

    def on_summed(self, report: LegSummed) -> None:
        """A rank has summed a span of our blocks; the sums are compared when all are in and the source has sent its own."""
        record = self.live.get(report.leg.key)
        if record is None or report.leg != record.leg or report.span not in record.summing or record.state in CLOSING:
            self.late_total["summed"] += 1
        elif report.error:
            self._end_by(record, TargetEvent.LEG_FAILED, Outcome.FAILED, report.error)
        else:
            record.sums[report.rank, report.span] = report.sums
            self._progress(record)
            self._settle(record)

    def _count_wire(self, record: TargetRecord, now: float) -> None:
        """One span less is being moved; with the last of them, a time on the wire is over."""
        record.on_wire -= 1
        if not record.on_wire:
            record.wire_s += now - record.wire_since
            if record.span_count is not None:
                record.exposed_wire_s += now - max(record.wire_since, record.prefilled_at)

    def tick(self) -> None:
        """Ask again what has no answer, fence what does not stop, and give up what makes no progress."""
        now = self._clock()
        self.farewells.tick()
        for key in self._alarms.ring(now):
            try:
                self._look_at(self.live[key], now)
            except BaseException:
                self._alarms.set(key, now + self._limits.retry)
                raise

    def _look_at(self, record: TargetRecord, now: float) -> None:
        if record.state in CLOSING and record.stop_until <= now:
            record.stop_until = now + self._limits.stop_timeout
            self.step(record, TargetEvent.STOP_LATE)
        elif self._asks_again(record) and record.retry_at <= now:
            record.retry_at = self._lost_at(record)
            if record.retry_at <= now:
                self._ask_again(record, now)
        if self._has_deadline(record) and record.give_up_at <= now:
            reason = f"no progress for {self._limits.transfer_timeout:g} s while {record.state}"
            self._end_by(record, TargetEvent.NO_PROGRESS, Outcome.EXPIRED, reason)
        self._watch(record)

    def beat(self) -> dict[Incarnation, Heartbeat]:
        """The heartbeats that are due to sources that we wait for."""
        lists: dict[Incarnation, list[tuple[HandoffKey, int]]] = {}
        for record in self.live.values():
            if record.source is not None and record.state not in CLOSING:
                lists.setdefault(record.source, []).append((record.key, record.grant))
        return {source: Heartbeat(False, tuple(live)) for source, live in lists.items()}

    def next_deadline(self) -> float | None:
        """When something here will want to be looked at; may be early."""
        moments = (self._alarms.next(), self.farewells.next_deadline())
        return min((when for when in moments if when is not None), default=None)

    def peers(self) -> set[Incarnation]:
        """Sources that we wait for."""
        return {record.source for record in self.live.values() if record.source is not None}

    # Helpers.

    def current(self, sender: Incarnation, key: HandoffKey, grant: int) -> TargetRecord | None:
        """The live hand-off that a message of this source and grant speaks of."""
        record = self.live.get(key)
        if record is None or record.source != sender or not record.grant == grant > 0:
            return None
        self._note_answer(sender, record)
        return record

    def _unheard(self, sender: Incarnation, key: HandoffKey) -> TargetRecord | None:
        record = self.live.get(key)
        return record if record is not None and record.source == sender and record.state in _UNHEARD else None

    def _granted_before(self, epoch: int) -> list[TargetRecord]:
        return [record for record in self.live.values() if record.grant and record.epoch < epoch]

    def _strangers(self, address: ControlAddress) -> list[TargetRecord]:
        waiting = (TargetState.QUEUED, TargetState.GREETING)
        return [
            record
            for record in self.live.values()
            if record.source is None and record.wanted.source == address and record.state in waiting
        ]

    def _meet(self, record: TargetRecord, card: Card) -> None:
        expected = record.wanted.source_incarnation
        if expected is not None and expected != card.incarnation:
            record.peer_is_quiet = True
            reason = f"the source restarted: incarnation {expected} is gone, {card.incarnation} answers in its place"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            record.source = card.incarnation
            record.source_area = card.ranks[0].aux
            self.step(record, TargetEvent.PEER_KNOWN)

    def _tell_end_again(self, sender: Incarnation, key: HandoffKey, grant: int) -> None:
        """A source speaks of what is over here: it may have missed that, unless it has only just been told."""
        outcome, at = self._ended.get((key, grant)) or (Outcome.FAILED, -math.inf)
        if self._clock() - at < self._limits.retry:
            return
        if outcome is Outcome.DELIVERED:
            self._control.send(sender, Release(key, grant))
        else:
            self._control.send(sender, Stop(key, grant, outcome, "the target has ended it"))

    def _refuse_surplus(self, record: TargetRecord) -> None:
        """More spans than there are to be: nothing tells which of them are the right ones."""
        if record.span_count is not None and len(record.spans) > record.span_count:
            reason = f"the source announced {len(record.spans)} spans and counts {record.span_count}"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
