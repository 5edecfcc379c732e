"""The target half of a coordinator: grants blocks, has them filled and confirmed, and only then lets decode start."""

from __future__ import annotations

import math

from kvbaton.agent.engine_port import Pull, SourceWanted, TargetEnded
from kvbaton.agent.ports import (
    LegFailed,
    LegMoved,
    LegReport,
    LegStopped,
)
from kvbaton.agent.records import TargetRecord
from kvbaton.agent.target_effects import TargetEffects
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.handoff import (
    Executor,
    HandoffKey,
    Incarnation,
    Outcome,
    Span,
    key_problem,
    span_problem,
)
from kvbaton.core.lifecycle import TargetEvent, TargetState
from kvbaton.core.messages import (
    MAX_REASON,
    Announced,
    AuxSent,
    Confirmed,
    Heartbeat,
    Hello,
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

_QUIET = {
    Outcome.FAILED: TargetEvent.QUIET_FAILED,
    Outcome.CANCELLED: TargetEvent.QUIET_CANCELLED,
    Outcome.EXPIRED: TargetEvent.QUIET_EXPIRED,
}
_MAX_GREETED = 4096
_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
_ASKING_AGAIN = frozenset({TargetState.GREETING, TargetState.GRANTED, TargetState.FILLING, TargetState.CONFIRMING}) | _CLOSING
_UNHEARD = frozenset({TargetState.QUEUED, TargetState.GREETING, TargetState.GRANTED})


class TargetSide(TargetEffects):
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
        now = self._clock()
        retry_s = self._limits.retry
        record = TargetRecord(wanted, now + self._limits.transfer_timeout, now + retry_s, retry_s)
        self.live[wanted.key] = record
        self._watch(record)
        if source is None:
            self._greet(record)
        else:
            self._meet(record, source)

    def pull(self, pull: Pull) -> None:
        """There are blocks: grant them as soon as the source is known."""
        record = self.live.get(pull.key)
        if record is None or record.pull is not None:
            self.late_total["pull"] += 1
            return
        record.pull = pull
        self.step(record, TargetEvent.ALLOCATED)
        if record.source is not None:
            self.step(record, TargetEvent.PEER_KNOWN)

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

    def on_forgotten(self, source: Incarnation) -> None:
        """A source asks who we are, so it has not taken in what we said before: say it again, now that it knows."""
        for record in [record for record in self.live.values() if record.source == source and self._asks_again(record)]:
            self._ask_again(record, self._clock())

    def on_refused_peer(self, address: ControlAddress, reason: str) -> None:
        """The peer at `address` does not want us, or we do not want it: whoever waited for it fails with the reason."""
        self._greeted_at.pop(address, None)
        for record in self._strangers(address):
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)

    def on_peer_gone(self, source: Incarnation, reason: str) -> None:
        """A source is provably gone: it will not write any more, and what was wanted of it fails."""
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
        record.source_blocks = announced.blocks
        record.unmoved |= {span.number: span for span in announced.spans if span.number not in record.spans}
        record.spans |= {span.number: span for span in announced.spans}
        self.step(record, TargetEvent.ANNOUNCED)
        self._refuse_surplus(record)
        self._settle(record)

    def on_prefilled(self, sender: Incarnation, prefilled: Prefilled) -> None:
        """Nothing more will be announced."""
        record = self.current(sender, prefilled.key, prefilled.grant)
        if record is None or record.pull is None or not self._same_generation(record, prefilled.generation):
            self.late_total["prefilled"] += 1
        elif prefilled.tokens != record.pull.tokens:
            reason = f"the source has {prefilled.tokens} tokens, the target asked for {record.pull.tokens}"
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
        """The aux record is in."""
        record = self.current(sender, message.key, message.grant)
        if record is None:
            self.late_total["aux"] += 1
        else:
            record.aux = message.aux
            self._settle(record)

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
            self._settle(record)
        else:
            self._note(record, Stage.CONFIRMED)
            self.step(record, TargetEvent.CONFIRMED)

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
        record.peer_is_quiet = True
        self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, f"the source {over.outcome}: {over.reason}")

    def on_stopped(self, sender: Incarnation, stopped: Stopped) -> None:
        """The source will not touch our blocks for this grant again."""
        record = self.current(sender, stopped.key, stopped.grant)
        if record is None or record.state not in _CLOSING:
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
                if record.state not in _CLOSING:
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
            now = record.last_move_at = self._clock()
            span, moved_bytes = record.spans.get(report.span), report.bytes_moved
            self._observe(note(record.key, Side.TARGET, Stage.MOVED, now, span, moved_bytes=moved_bytes, rank=report.rank))
            self._progress(record)

    def tick(self) -> None:
        """Ask again what has no answer, fence what does not stop, and give up what makes no progress."""
        now = self._clock()
        for record in [self.live[key] for key in self._alarms.ring(now)]:
            if record.state in _CLOSING and record.stop_until <= now:
                record.stop_until = now + self._limits.stop_timeout
                self.step(record, TargetEvent.STOP_LATE)
            elif self._asks_again(record) and record.retry_at <= now:
                if self._may_be_lost(record, now):
                    self._ask_again(record, now)
                else:
                    record.retry_at = now + record.retry_s
            if self._has_deadline(record) and record.give_up_at <= now:
                reason = f"no progress for {self._limits.transfer_timeout:g} s while {record.state}"
                self._end_by(record, TargetEvent.NO_PROGRESS, Outcome.EXPIRED, reason)
            self._watch(record)

    def beat(self) -> dict[Incarnation, Heartbeat]:
        """The heartbeats that are due to sources that we wait for."""
        lists: dict[Incarnation, list[tuple[HandoffKey, int]]] = {}
        for record in self.live.values():
            if record.source is not None and record.state not in _CLOSING:
                lists.setdefault(record.source, []).append((record.key, record.grant))
        return {source: Heartbeat(False, tuple(live)) for source, live in lists.items()}

    def next_deadline(self) -> float | None:
        """When something here will want to be looked at; may be early."""
        return self._alarms.next()

    def peers(self) -> set[Incarnation]:
        """Sources that we wait for."""
        return {record.source for record in self.live.values() if record.source is not None}

    # Helpers.

    def step(self, record: TargetRecord, event: TargetEvent) -> None:
        """Step the machine and perform what its row says; a late event is counted."""
        row = self.table.step(record.state, event)
        if row is None:
            self.late_total[event] += 1
            return
        if row.state is not record.state:
            if row.state in _CLOSING and record.state not in _CLOSING:
                self._quarantine(record)
            record.state = row.state
            self._progress(record)
        for effect in row.effects:
            self.effects[effect](record)
        self._watch(record)

    def _watch(self, record: TargetRecord) -> None:
        if self.live.get(record.key) is not record:
            return
        if record.state in _CLOSING:
            self._alarms.set(record.key, record.stop_until)
        if self._asks_again(record):
            self._alarms.set(record.key, record.retry_at)
        if self._has_deadline(record):
            self._alarms.set(record.key, record.give_up_at)

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

    def _same_generation(self, record: TargetRecord, generation: int) -> bool:
        """Whether a message speaks of the generation that counts; a newer one voids what was before."""
        if generation < record.generation:
            return False
        if generation > record.generation:
            is_first, record.generation = record.generation == 0, generation
            if not is_first:
                self._note(record, Stage.RETRACTED)
                self.step(record, TargetEvent.RETRACTED)
                self._settle(record)
        return True

    def _granted_before(self, epoch: int) -> list[TargetRecord]:
        return [record for record in self.live.values() if record.grant and record.epoch < epoch]

    def _strangers(self, address: ControlAddress) -> list[TargetRecord]:
        waiting = (TargetState.QUEUED, TargetState.GREETING)
        return [
            record
            for record in self.live.values()
            if record.source is None and record.wanted.source == address and record.state in waiting
        ]

    def _greet(self, record: TargetRecord) -> None:
        """Ask who answers at the source's address; one question does for everybody who waits for the answer."""
        address, now = record.wanted.source, self._clock()
        if now - self._greeted_at.get(address, -math.inf) >= self._limits.retry / 2:
            if len(self._greeted_at) >= _MAX_GREETED:
                self._greeted_at.clear()
            self._greeted_at[address] = now
            self._control.dial(address, Hello(self._card, wants_answer=True))

    def _meet(self, record: TargetRecord, card: Card) -> None:
        expected = record.wanted.source_incarnation
        if expected is not None and expected != card.incarnation:
            reason = f"the source restarted: incarnation {expected} is gone, {card.incarnation} answers in its place"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            record.source = card.incarnation
            self.step(record, TargetEvent.PEER_KNOWN)

    def _asks_again(self, record: TargetRecord) -> bool:
        if record.state is TargetState.FILLING and self._knows_all(record):
            return False
        return record.state in _ASKING_AGAIN or record.source is None

    def _knows_all(self, record: TargetRecord) -> bool:
        """Whether the source has told everything there is to tell, and only our own legs are waited for."""
        told = record.span_count is not None and record.aux is not None and len(record.spans) >= record.span_count
        return told and (record.executor is Executor.TARGET_READS or record.is_confirmed)

    def _may_be_lost(self, record: TargetRecord, now: float) -> bool:
        """Whether a question may be lost, rather than wait its turn behind others that the same peer is still answering.

        Peers answer in the order in which they are asked: one that answers, but nothing that was asked later, is busy.
        """
        answered = None if record.source is None else self._answered.get(record.source)
        if answered is None:
            return True
        number, at = answered
        return number > record.asked or at <= now - record.retry_s

    def _ask_again(self, record: TargetRecord, now: float) -> None:
        record.retry_s = max(record.retry_s, min(record.retry_s * 2, self._limits.beat_s))
        record.retry_at = now + record.retry_s
        if record.state is TargetState.CONFIRMING:
            self.ask_confirmation(record)
        elif record.state in _CLOSING:
            self.tell_stop(record)
        elif record.source is None:
            self._greet(record)
        else:
            self.send_grant(record)

    def _tell_end_again(self, sender: Incarnation, key: HandoffKey, grant: int) -> None:
        """A source speaks of what is over here: it may have missed that, unless it has only just been told."""
        outcome, at = self._ended.get((key, grant)) or (Outcome.FAILED, -math.inf)
        if self._clock() - at < self._limits.beat_s:
            return
        if outcome is Outcome.DELIVERED:
            self._control.send(sender, Release(key, grant))
        else:
            self._control.send(sender, Stop(key, grant, outcome, "the target has ended it"))

    def _has_deadline(self, record: TargetRecord) -> bool:
        return record.state not in _CLOSING and record.state is not TargetState.QUEUED

    def _end_by(self, record: TargetRecord, event: TargetEvent, verdict: Outcome, reason: str) -> None:
        if record.state in _CLOSING:
            self.late_total[event] += 1
        else:
            record.verdict, record.reason = verdict, reason[:MAX_REASON]
            record.stop_until = self._clock() + self._limits.stop_timeout
            self.step(record, event)
        self._settle(record)

    def _refuse_surplus(self, record: TargetRecord) -> None:
        """More spans than there are to be: nothing tells which of them are the right ones."""
        if record.span_count is not None and len(record.spans) > record.span_count:
            reason = f"the source announced {len(record.spans)} spans and counts {record.span_count}"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)

    def span_problem(self, record: TargetRecord) -> str:
        """Why what was read is not the whole cache, each part once; empty when it is. A source that writes knows itself."""
        if record.executor is Executor.SOURCE_WRITES or record.pull is None:
            return ""
        layers = [layer for group in self._card.ranks[0].layout.groups for layer in group.layers]
        whole = Span(0, 0, record.pull.tokens, min(layers, default=0), max(layers, default=-1) + 1)
        return span_problem(record.spans.values(), whole)

    def is_complete(self, record: TargetRecord) -> bool:
        """Whether every span of every rank and the aux record are in."""
        if record.span_count is None or not self.has_aux(record):
            return False
        if record.executor is Executor.SOURCE_WRITES:
            return record.is_confirmed
        return all(len(record.moved.get(rank.rank, ())) == record.span_count for rank in self._card.ranks)

    def has_aux(self, record: TargetRecord) -> bool:
        """Whether the aux record is in."""
        return record.aux is not None

    def is_quiet(self, record: TargetRecord) -> bool:
        """Whether nobody, here or there, can write to the blocks of this hand-off any more."""
        if record.open_legs:
            return False
        return record.executor is Executor.TARGET_READS or record.peer_is_quiet or not record.grant

    def _settle(self, record: TargetRecord) -> None:
        """Raise the events that follow from counts: everything in, everything quiet."""
        self._watch(record)
        if record.state is TargetState.FILLING and self.is_complete(record):
            if problem := self.span_problem(record):
                reason = f"the source's spans are not the whole cache: {problem}"
                self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
                return
            writes = record.executor is Executor.SOURCE_WRITES
            self.step(record, TargetEvent.WRITTEN if writes else TargetEvent.FILLED)
        elif record.state is TargetState.CLEARING and not record.open_legs:
            self.step(record, TargetEvent.QUIET)
        elif record.state in _CLOSING and self.is_quiet(record):
            self.step(record, _QUIET[record.verdict])
