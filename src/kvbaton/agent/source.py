"""The source side of hand-offs: announces what is computed, keeps it under a lease, confirms it, and returns it once.

Theory of operation
===================

One hand-off is one `SourceRecord`: a state of the table `SOURCE` (core/lifecycle.py), and the counts and lists beside it.
Calls of the engine, messages of the target, reports of ranks and alarms become events for `step`, which performs the effects
of the row in order; `_settle` then raises the events that follow from counts. The rules of generations, confirmations, grant
numbers and quarantine are explained from the other end in agent/target.py. What this side adds:

**Order of arrival.** Engine and target learn of a request independently, so the grant may come before the engine's own call
(PARKED), after it (QUEUED, then STREAMING), or after the whole prefill (HELD, then SERVING). A hand-off belongs to the target
of the first grant for the same prompt; until then a heartbeat reserves it, but a transfer id alone proves nothing, because
clients choose it.

A grant that is PARKED gets no heartbeats: its request may never come. Except while the engine is busy with the step in which
the grant came (`busy_since`): it takes requests between steps only, and on a loaded machine one step can take longer than a
target waits.

**The lease.** A target that is silent for `defer_timeout` loses its hand-off, and the blocks go back to the engine. Time may
do that here, and only here: the target counts no byte that this side does not confirm afterwards, and a side that has ended
confirms nothing. A heartbeat vouches for the target's engine, not for the thread that sends it: it states how long ago that
engine took its last step, and silence is counted from then. A grant that is repeated extends nothing: agents repeat it while
their engine hangs, or while one rank of theirs stands still and the engine waits for it. There is no lease while a request is
QUEUED: it has no grant, and computes at the engine's own pace, within `queue_timeout`. The first heartbeat of its target ends
that wait: then the target is what queues, for memory, within a `queue_timeout` of its own, and only the cap counts here.

**The cap.** Messages of the target renew the lease; they cannot renew it for ever. A hand-off that gets no further than it was
for `Limits.hold_cap` ends although its target is alive and its engine works: one of the two engines may have lost the request.
Only getting *further than ever before* (a later state, more spans computed, moved or summed) counts from anew: a hand-off that
is preempted again and again, and never gets beyond where it was, ends too. STOPPING has no deadline: only copies of our own
are waited for, and memory that they still read cannot go back.

**Retraction.** The engine preempts a prefill by `retract`. STREAMING becomes RETRACTING: the copies that this side executes
are stopped, spans and sums are forgotten, a new generation number is taken, and `Retracted` is sent. When no copy of ours is
in flight the engine gets `Drained` and may overwrite the blocks. Reads of the target are not waited for: whatever they read
is of a generation that is never confirmed again. A side that writes must wait, because a write that is still in flight would
carry bytes of the next request into blocks of this one.

**Confirmation.** Where the target reads, it asks, and `Confirmed` is sent if the generation it has read is the one that the
blocks hold now. A target of the same host need not ask: it finds the *stamp* of the hand-off, which stands from `Prefilled` on
until this side ends (core/stamps.py). Where this side writes, it confirms by itself, after the last byte of every rank. With
checksums, nothing is confirmed or stamped before every span is summed: a sum that is taken later could be of other bytes. The
sums go with the stamp, and with a confirmation.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvbaton.agent.decline_notices import DeclinedRequests
from kvbaton.agent.engine_port import Drained, Granted, Offer, SourceEnded
from kvbaton.agent.ports import NO_STAMPS, Clock, Control, EnginePort, Ranks, Stamps
from kvbaton.agent.rank_orders import (
    CloseCopy,
    CopyFailed,
    CopyId,
    CopyReport,
    CopyStopped,
    DropSums,
    MoveSpans,
    OpenCopy,
    PutAux,
    RankSums,
    SpansMoved,
    SpansPlanned,
    SpansSummed,
    StopCopy,
    SumSpans,
    sums_by_leg,
)
from kvbaton.agent.timers import Timers
from kvbaton.config import Limits
from kvbaton.core.aux_area import AuxArea, AuxPointer, AuxSlots, pack_aux, point_at
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.checks import ONE_IN, SpanSum, span_size
from kvbaton.core.grants import GrantWindows
from kvbaton.core.handoff import (
    Aux,
    AuxChannel,
    BlockLists,
    Executor,
    HandoffKey,
    Incarnation,
    Integrity,
    Mode,
    Outcome,
    Span,
    key_problem,
    span_problem,
)
from kvbaton.core.lifecycle import SOURCE, SourceEffect, SourceEvent, SourceState, SourceTable
from kvbaton.core.members import members_of
from kvbaton.core.messages import (
    MAX_REASON,
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Message,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
)
from kvbaton.core.stamps import Stamp, StampSlots
from kvbaton.core.timeline import Observer, Side, Stage, no_observer, note
from kvbaton.wire.log_limit import shown

__all__ = ["SourceRecord", "SourceSide"]

log = logging.getLogger(__name__)

if not TYPE_CHECKING:
    AuxChannel, Executor, Integrity, Mode, Outcome = map(members_of, (AuxChannel, Executor, Integrity, Mode, Outcome))
    Side, SourceEvent, SourceState, Stage = map(members_of, (Side, SourceEvent, SourceState, Stage))

_MAX_ENDS = 4096
_MAX_PARKED = 4096
_STAGES = {
    SourceState.PARKED: 0,
    SourceState.QUEUED: 1,
    SourceState.STREAMING: 2,
    SourceState.RETRACTING: 2,
    SourceState.HELD: 3,
    SourceState.SERVING: 4,
}
"""How far a hand-off in each of the live states has got; the higher, the further."""

_QUIET = {
    Outcome.FAILED: SourceEvent.QUIET_FAILED,
    Outcome.CANCELLED: SourceEvent.QUIET_CANCELLED,
    Outcome.EXPIRED: SourceEvent.QUIET_EXPIRED,
}

_OUTCOMES = {
    SourceState.DELIVERED: Outcome.DELIVERED,
    SourceState.FAILED: Outcome.FAILED,
    SourceState.CANCELLED: Outcome.CANCELLED,
    SourceState.EXPIRED: Outcome.EXPIRED,
}


class SourceRecord(msgspec.Struct, eq=False):
    """One live hand-off as its source knows it: the state, and the counts and lists beside it."""

    key: HandoffKey
    state: SourceState
    lease_until: float
    generation: int = 0
    furthest: tuple[int, int] = (-1, 0)
    """The furthest that it ever got: the stage, and what was computed, moved and summed by then."""
    capped_at: float = 0.0
    """When it ends if it gets no further, whatever its target sends."""
    prompt: str = ""
    is_expected: bool = True
    """Whether the engine has asked for it; false while a grant is parked."""
    parked_at: float = -math.inf
    blocks: BlockLists = ()
    spans: list[Span] = msgspec.field(default_factory=list)
    announced: int = 0
    """How many of the spans were sent to the target; likewise moved by us, and given to the ranks to sum."""
    moving: int = 0
    summing: int = 0
    offer: Offer | None = None
    held_since: float = 0.0
    target: Incarnation | None = None
    grant: Grant | None = None
    open_copies: dict[int, CopyId] = msgspec.field(default_factory=dict)
    """By rank: the copy that it has open, which may be that of an earlier generation while we are RETRACTING."""
    moved: dict[int, set[int]] = msgspec.field(default_factory=dict)
    sums: RankSums = msgspec.field(default_factory=dict)
    is_asked: bool = False
    """Whether the target has asked for a confirmation that waits for the last checksum."""
    aux_pointer: AuxPointer | None = None
    is_confirmed: bool = False
    stamp: Stamp | None = None
    """What stands as long as the target may take the blocks for what was announced, where it can look at it."""
    planned: dict[int, set[int]] = msgspec.field(default_factory=dict)
    """Where the target counts what we write: numbers of the spans that are on their way, by rank, and their bytes."""
    written_bytes: int = 0
    is_released: bool = False
    """Whether the target has delivered, before our own copies were acknowledged."""
    may_land: bool = False
    """Whether a copy of ours was given up with bytes on their way: being quiet here does not stop these."""
    verdict: Outcome = Outcome.FAILED
    """How it will end, fixed by whatever ended it first."""
    reason: str = ""
    stop_asked: bool = False
    superseded_by: Grant | None = None
    """The grant because of which this one ends; refused when the end is reached."""

    @property
    def grant_number(self) -> int:
        """The number of the grant in hand; 0 without one."""
        return 0 if self.grant is None else self.grant.grant

    @property
    def copy(self) -> CopyId:
        """The copy of this generation, as the ranks know it."""
        return CopyId(self.key, self.grant_number, self.generation)

    @property
    def writes(self) -> bool:
        """Whether this side executes the copies."""
        return self.grant is not None and self.grant.executor is Executor.SOURCE_WRITES

    @property
    def integrity(self) -> Integrity:
        """How much the target has asked to be summed."""
        return Integrity.OFF if self.grant is None else self.grant.integrity


class SourceSide:
    """All live hand-offs that this instance is the source of."""

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
        sum_size: int = 0,
        stamps: Stamps = NO_STAMPS,
        name: str = "",
    ) -> None:
        self._observe = observe
        self._stamps = stamps
        self.stamp_slots = StampSlots(stamps.area, name)
        self.sum_size = sum_size
        """How much is worth an order to sum it before everything is computed; see `size_worth_summing`."""
        self._ranks_count = ranks_count
        self._limits = limits
        self._clock = clock
        self._control = control
        self._ranks = ranks
        self._engine = engine
        self.live: dict[HandoffKey, SourceRecord] = {}
        self._windows = GrantWindows()
        self._ended: BoundedMap[tuple[Incarnation | None, HandoffKey, int], Over] = BoundedMap(_MAX_ENDS)
        self._declined = DeclinedRequests()
        self._refused_here: BoundedMap[HandoffKey, tuple[str, float]] = BoundedMap(_MAX_PARKED)
        """Requests that the engine has refused before their grant came: the reason, and until when one grant is refused too."""
        self._timers = Timers(limits, clock, lambda key, now: self._look_at(self.live[key], now))
        self._alarm_times = self._timers.times
        self._hold_cap = limits.hold_cap
        self.aux_slots = AuxSlots(aux_area)
        self._generation = 0
        self._parked = 0
        self.most_parked = _MAX_PARKED
        """How many grants may wait for their prefill; targets choose how many they send."""
        self.busy_since = math.inf
        """When the engine began a step, in which it takes no requests; never, for one that always does."""
        self.late_total: Counter[str] = Counter()
        self.failures_total: Counter[str] = Counter()
        self.aux_fallbacks_total: Counter[str] = Counter()
        self.effects: dict[SourceEffect, Callable[[SourceRecord], None]] = {
            SourceEffect.EXTEND_LEASE: self.extend_lease,
            SourceEffect.NOTIFY_GRANTED: self.notify_granted,
            SourceEffect.ANNOUNCE: self.announce,
            SourceEffect.SET_STAMP: self.set_stamp,
            SourceEffect.SEND_PREFILLED: self.send_prefilled,
            SourceEffect.SEND_STAMP: self.send_stamp,
            SourceEffect.NEW_GENERATION: self.new_generation,
            SourceEffect.SEND_RETRACTED: self.send_retracted,
            SourceEffect.NOTIFY_DRAINED: self.notify_drained,
            SourceEffect.SEND_CONFIRMATION: self.send_confirmation,
            SourceEffect.REPEAT_CONFIRMATION: self.repeat_confirmation,
            SourceEffect.CLEAR_STAMP: self.clear_stamp,
            SourceEffect.STOP_COPY: self.stop_copy,
            SourceEffect.SEND_END: self.send_end,
            SourceEffect.RETURN_BLOCKS: self.return_blocks,
        }

    # The state machine.

    def step(self, record: SourceRecord, event: SourceEvent) -> None:
        """Step the machine and perform the effects of its row, in order; a late event is counted."""
        row = self.table.step(record.state, event)
        if row is None:
            self.late_total[event] += 1
            return
        if record.state is SourceState.PARKED and row.state is not SourceState.PARKED:
            self._parked -= 1
        # Before the effects: RETURN_BLOCKS reads the outcome from the state.
        record.state = row.state
        self.renew_cap(record)
        for effect in row.effects:
            self.effects[effect](record)
        self._watch(record)

    def _settle(self, record: SourceRecord) -> None:
        """Raise the events that follow from counts: everything is moved and summed, or nothing is in flight."""
        if record.state is SourceState.SERVING and self._is_summed(record):
            if record.writes and not record.is_confirmed and (self._is_moved(record) or self._is_on_its_way(record)):
                self.step(record, SourceEvent.WRITTEN)
            elif record.is_released and self._is_moved(record):
                self.step(record, SourceEvent.RELEASED)
            elif record.is_asked and not record.writes:
                record.is_asked = False
                self.step(record, SourceEvent.CONFIRM_ASKED)
        elif record.open_copies:
            return
        elif record.state is SourceState.RETRACTING:
            self.step(record, SourceEvent.QUIET)
        elif record.state is SourceState.STOPPING:
            self.step(record, _QUIET[record.verdict])

    def _end_by(self, record: SourceRecord, event: SourceEvent, verdict: Outcome, reason: str) -> None:
        """Begin an end without delivery. The first one decides the outcome; what comes while it stops is late."""
        if record.state is SourceState.STOPPING:
            self.late_total[event] += 1
            return
        record.verdict, record.reason = verdict, reason[:MAX_REASON]
        self.failures_total[event] += 1
        self.step(record, event)
        self._settle(record)

    # The effects of the table.

    def extend_lease(self, record: SourceRecord, step_age_s: float = 0.0) -> None:
        """The target is alive: count its silence from now, or from when its engine took its last step."""
        seen_at = self._clock() - step_age_s
        record.lease_until = max(record.lease_until, seen_at + self._limits.defer_timeout)

    def notify_granted(self, record: SourceRecord) -> None:
        """The engine may start it now, however full its pool is (`may_start_prefill`)."""
        self._note(record, Stage.GRANTED)
        self._engine(Granted(record.key, 0 if record.grant is None else record.grant.cached_tokens))

    def announce(self, record: SourceRecord) -> None:
        """Announce what is new, have our ranks move it if the copy is ours to execute, and sum it if the grant asks for that.

        Each of the three has a count of its own: a repeated grant announces everything again (an announcement may be lost), but
        what was moved or summed is not moved or summed twice.
        """
        grant = record.grant
        if grant is None:
            return
        new = tuple(record.spans[record.announced :])
        if new:
            record.announced = len(record.spans)
            if self._observe is not no_observer:
                for span in new:
                    self._note(record, Stage.ANNOUNCED, span)
            announced = Announced(
                key=record.key,
                grant=grant.grant,
                generation=record.generation,
                blocks=() if record.writes else record.blocks,
                spans=new,
            )
            self._send(record, announced)
        if record.writes and (unmoved := tuple(record.spans[record.moving :])):
            self._open_copy(record, grant)
            record.moving = len(record.spans)
            self._ranks.send_all(MoveSpans(record.copy, record.blocks, unmoved))
        if grant.integrity is Integrity.OFF or record.target is None:
            return
        if unsummed := self._sums_due(record, grant.integrity):
            record.summing = len(record.spans)
            order = SumSpans(
                copy=record.copy,
                side=Side.SOURCE,
                blocks=record.blocks,
                spans=unsummed,
                cached_tokens=grant.cached_tokens,
                integrity=grant.integrity,
                total_tokens=grant.tokens or None,
                peer=record.target,
            )
            self._ranks.send_all(order)

    def _sums_due(self, record: SourceRecord, integrity: Integrity) -> tuple[Span, ...]:
        """What the ranks are to sum now: all that they have not, once everything is computed; before that, what is worth it.

        An order costs as much as summing some hundred KiB, and what is left for the end about a millisecond.
        """
        size = self.sum_size * (ONE_IN if integrity is Integrity.SAMPLED else 1)
        unsummed = record.spans[record.summing :]
        is_worth_it = record.offer is not None or sum([span_size(span) for span in unsummed]) >= size
        return tuple(unsummed) if is_worth_it else ()

    def set_stamp(self, record: SourceRecord) -> None:
        """Show the stamp of a complete cache, if its target can look at it, and the checksums are there that go with it."""
        if self.shows_stamp(record) and self._is_summed(record):
            record.stamp = self.stamp_slots.take()
            if record.stamp is not None:
                self._stamps.write(record.stamp.slot, record.stamp.value)

    def send_prefilled(self, record: SourceRecord) -> None:
        """Notify the target that nothing more will be announced, and send it the aux record."""
        if record.offer is None:
            return
        self.send_stamp(record)
        pointer = self._point_at_aux(record, record.offer.aux)
        aux = None if pointer else record.offer.aux
        self._send(record, AuxSent(key=record.key, grant=record.grant_number, aux=aux, pointer=pointer))

    def send_stamp(self, record: SourceRecord) -> None:
        """Notify the target that the cache is complete; with the stamp, unless that waits for checksums."""
        if record.offer is None:
            return
        prefilled = Prefilled(
            key=record.key,
            grant=record.grant_number,
            generation=record.generation,
            span_count=len(record.spans),
            tokens=record.offer.tokens,
            held_s=max(0.0, self._clock() - record.held_since),
            stamp=record.stamp,
            sums=() if record.stamp is None else _sums_of(record),
            sums_follow=self._awaits_sums(record),
        )
        self._send(record, prefilled)

    def new_generation(self, record: SourceRecord) -> None:
        """What was announced is void; copies of the old generation, if any, are being stopped and stay in `open_copies`."""
        self._generation += 1
        record.generation = self._generation
        record.spans.clear()
        record.announced = record.moving = 0
        record.moved.clear()
        record.planned.clear()
        record.written_bytes = 0
        self._drop_sums(record)

    def send_retracted(self, record: SourceRecord) -> None:
        """Notify the target which generation counts now."""
        self._note(record, Stage.RETRACTED)
        self._send(record, Retracted(record.key, record.grant_number, record.generation))

    def notify_drained(self, record: SourceRecord) -> None:
        """The engine may overwrite the blocks of the old generation."""
        record.blocks = ()
        self._engine(Drained(record.key))

    def send_confirmation(self, record: SourceRecord) -> None:
        """Confirm that the blocks hold this generation, now that the last byte was moved, or is on its way to be counted."""
        record.is_confirmed = True
        self._note(record, Stage.CONFIRMED)
        confirmed = Confirmed(
            key=record.key,
            grant=record.grant_number,
            generation=record.generation,
            span_count=len(record.spans),
            sums=_sums_of(record),
            written_bytes=record.written_bytes if record.grant is not None and record.grant.counts_arrivals else None,
        )
        self._send(record, confirmed)

    def repeat_confirmation(self, record: SourceRecord) -> None:
        """A target that repeats its grant has missed something. It never asks a source that writes, so confirm it again."""
        if record.is_confirmed and record.writes:
            self.send_confirmation(record)

    def clear_stamp(self, record: SourceRecord) -> None:
        """From here on the blocks may change: a target that has not looked yet asks, and is answered that it is over."""
        if record.stamp is not None:
            self._stamps.write(record.stamp.slot, 0)
            self.stamp_slots.give(record.stamp)
            record.stamp = None

    def stop_copy(self, record: SourceRecord) -> None:
        """Have every rank stop what it has open, a generation that is being retracted included."""
        for rank, copy in tuple(record.open_copies.items()):
            self._ranks.send(rank, StopCopy(copy))

    def send_end(self, record: SourceRecord) -> None:
        """Notify the target of the end here. Both messages promise that its blocks will not be touched: we are quiet."""
        number, may_land = record.grant_number, record.may_land
        over = Over(key=record.key, grant=number, outcome=record.verdict, reason=record.reason, may_land=may_land)
        self._send(record, Stopped(record.key, number, may_land) if record.stop_asked else over)
        later = record.superseded_by
        if later is not None and may_land:
            # No refusal: that would promise quiet, and both grants may be for the same blocks.
            end = msgspec.structs.replace(over, grant=later.grant)
            self._ended[record.target, record.key, later.grant] = end
            self._send(record, end)
        elif later is not None and record.target is not None:
            self._refuse(record.target, later, "an earlier grant for it was given up")

    def return_blocks(self, record: SourceRecord) -> None:
        """The end: forget the record, remember how it ended, and give the engine its blocks back."""
        del self.live[record.key]
        self._timers.drop(record.key)
        self._drop_sums(record)
        if record.aux_pointer is not None:
            self.aux_slots.give(record.aux_pointer.offset)
        outcome, number = _OUTCOMES[record.state], record.grant_number
        end = Over(key=record.key, grant=number, outcome=outcome, reason=record.reason, may_land=record.may_land)
        self._ended[record.target, record.key, number] = end
        for rank, copy in record.open_copies.items():
            self._ranks.send(rank, CloseCopy(copy))
        self._note(record, Stage.ENDED, outcome=outcome)
        if outcome is not Outcome.DELIVERED:
            log.warning("hand-off %s: source %s: %s", record.key, outcome, shown(record.reason) or "no reason given")
        if record.is_expected:
            self._engine(SourceEnded(record.key, outcome, record.reason))

    # Calls of the engine.

    def expect(self, key: HandoffKey, prompt: str) -> None:
        """The engine will prefill `key`; a grant for the same prompt that came earlier is taken up."""
        if problem := key_problem(key):
            self._end_at_once(key, Outcome.FAILED, problem)
            return
        self._refused_here.pop(key, None)
        record = self.live.get(key)
        if record is not None and record.state is SourceState.PARKED and not self.is_same_prompt(record, prompt):
            self._end_by(record, SourceEvent.ABORTED, Outcome.FAILED, "the source has another prompt of that transfer id")
            record = None
        if record is None and (reason := self._declined.use_up(key, prompt, self._clock())) is not None:
            self._end_at_once(key, Outcome.CANCELLED, reason)
        elif record is None:
            record = self._new_record(key, SourceState.QUEUED)
            record.prompt = prompt
            self.live[key] = record
            self._watch(record)
        elif record.state is SourceState.PARKED:
            record.is_expected = True
            self.step(record, SourceEvent.EXPECTED)
        else:
            self._engine(SourceEnded(key, Outcome.FAILED, f"hand-off {key} is live already"))

    def _end_at_once(self, key: HandoffKey, outcome: Outcome, reason: str) -> None:
        """It is over before there is a record of it; the engine has noted that it arrived, so its timeline needs an end."""
        self._observe(note(key, Side.SOURCE, Stage.ENDED, self._clock(), outcome=outcome, text=reason))
        self._engine(SourceEnded(key, outcome, reason))

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """The engine has computed spans; they are announced as soon as there is a grant."""
        record = self._expected(key)
        if record is None or record.state in (SourceState.RETRACTING, SourceState.STOPPING):
            self.late_total["spans"] += 1
            return
        if record.offer is not None:
            reason = f"the engine reported {len(spans)} more spans after it had offered the whole cache"
            self._end_by(record, SourceEvent.ABORTED, Outcome.FAILED, reason)
            return
        record.blocks = blocks
        record.spans.extend(spans)
        self.step(record, SourceEvent.SPAN_READY)

    def offer(self, offer: Offer, whole: Callable[[], Span]) -> None:
        """The prefill is complete. `whole` makes the one span of a cache of which no spans were reported before."""
        record = self._expected(offer.key)
        if record is None or self.table.step(record.state, SourceEvent.PREFILLED) is None:
            self.late_total["offer"] += 1
            return
        record.offer = offer
        record.blocks = offer.blocks
        record.held_since = self._clock()
        self._note(record, Stage.PREFILLED)
        if not record.spans:
            record.spans.append(whole())
        if problem := span_problem(record.spans, whole()):
            reason = f"the engine's spans are not the whole cache: {problem}"
            self._end_by(record, SourceEvent.ABORTED, Outcome.FAILED, reason)
            return
        self.step(record, SourceEvent.PREFILLED)
        self._settle(record)

    def retract(self, key: HandoffKey) -> None:
        """The engine needs the blocks for something else; `Drained` follows when no copy of ours uses them."""
        record = self._expected(key)
        if record is None:
            self.late_total["retract"] += 1
            return
        self.step(record, SourceEvent.PREEMPTED)
        self._settle(record)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The engine cancels a hand-off."""
        if (record := self.live.get(key)) is not None:
            self._end_by(record, SourceEvent.ABORTED, Outcome.CANCELLED, reason)

    def refuse(self, key: HandoffKey, reason: str) -> None:
        """The engine has refused a request before admission: a target that has granted blocks, or will, need not wait.

        The two requests are sent at the same time, so the grant mostly comes later. One is refused, and not for ever: a key
        may be used again.
        """
        record = self.live.get(key)
        if record is None:
            self._refused_here[key] = reason, self._clock() + self._limits.defer_timeout
        elif record.state is SourceState.PARKED:
            self._end_by(record, SourceEvent.ABORTED, Outcome.FAILED, reason)

    # Messages of the target.

    def on_grant(self, sender: Incarnation, grant: Grant) -> None:
        """A target has blocks. A number counts once; the same number again only repeats what was announced."""
        self._declined.withdraw(grant.key)
        record = self.live.get(grant.key)
        if record is not None and record.target == sender and record.grant_number == grant.grant:
            self._repeat(record, grant)
        elif not self.use_grant(sender, grant):
            self.late_total["grant"] += 1
            if (end := self._end_of(sender, grant.key, grant.grant)) is not None:
                self._control.send(sender, end)
            else:
                self._refuse_stale(sender, grant)
        elif record is None:
            reason, until = self._refused_here.pop(grant.key, ("", 0.0))
            self._park(sender, grant)
            if self._clock() < until and (parked := self.live.get(grant.key)) is not None:
                # Ended like any other, so that the same grant gets the same answer again if this one is lost.
                self._end_by(parked, SourceEvent.ABORTED, Outcome.FAILED, reason)
        elif not self.is_same_prompt(record, grant.prompt):
            self._refuse(sender, grant, "the source has another prompt of that transfer id")
            if record.grant is None and record.target == sender:
                # A heartbeat had claimed it for this target, by the transfer id alone. Its real target is another one.
                record.target = None
        elif record.grant is None:
            # Also when the heartbeat of another target had claimed it: that one showed a transfer id, this one has the prompt.
            record.target, record.grant = sender, grant
            self.step(record, SourceEvent.GRANTED)
        elif record.target == sender:
            # One grant at a time: a new number means that the target has ended the old one, and that its Stop was lost. It is
            # refused when our copies under the old one are quiet: both may be for the same blocks, if the new one was made
            # because a stale number was refused, and the target takes a refusal as the promise that we are quiet.
            record.superseded_by = grant
            self._end_by(record, SourceEvent.STOP_ASKED, Outcome.FAILED, "the target granted it anew")
        else:
            self._refuse(sender, grant, "it belongs to another target")

    def _repeat(self, record: SourceRecord, grant: Grant) -> None:
        """The grant in hand came again: something that we sent is lost, so everything is sent again."""
        record.announced = 0
        if grant.aux_channel is AuxChannel.CONTROL and record.grant is not None:
            # The target could not read the aux record out of our memory; now it goes in a message.
            record.grant = msgspec.structs.replace(record.grant, aux_channel=grant.aux_channel)
        self.step(record, SourceEvent.GRANTED)

    def use_grant(self, sender: Incarnation, grant: Grant) -> bool:
        """Use the sequence number of a grant up; false when that was done before, or it is none that the target has reached."""
        return self._windows.use(sender, grant.sequence)

    def on_confirm_ask(self, sender: Incarnation, ask: ConfirmAsk) -> None:
        """A target has read everything: confirm that the blocks never changed, or that they did."""
        record = self._owned(sender, ask.key, ask.grant)
        if record is None:
            self._control.send(sender, self._over(sender, ask.key, ask.grant))
        elif not self.still_holds(record, ask):
            self._control.send(sender, Retracted(ask.key, ask.grant, record.generation))
        elif record.state is SourceState.SERVING and not self._is_summed(record):
            record.is_asked = True
            self.extend_lease(record)
        elif not record.writes or self._is_moved(record):
            self.step(record, SourceEvent.CONFIRM_ASKED)

    def still_holds(self, record: SourceRecord, ask: ConfirmAsk) -> bool:
        """Whether the blocks hold what was announced as the generation that the target has read."""
        return record.generation == ask.generation

    def on_release(self, sender: Incarnation, release: Release) -> None:
        """The target has delivered. What was not confirmed cannot be delivered: such a release is about something else."""
        record = self._owned(sender, release.key, release.grant)
        if record is None or not self.is_confirmed_for(record, release) or record.is_released:
            self.late_total["release"] += 1
        elif record.writes and not self._is_moved(record):
            # It has counted our bytes before our ranks have reported that they are in: the blocks are ours to keep until then.
            record.is_released = True
        else:
            self.step(record, SourceEvent.RELEASED)

    def is_confirmed_for(self, record: SourceRecord, release: Release) -> bool:
        """Whether the target of a release knew that the blocks had not changed: it had our answer, or has seen the stamp."""
        return record.is_confirmed or (record.stamp is not None and record.stamp.value == release.stamp)

    def on_stop(self, sender: Incarnation, stop: Stop) -> None:
        """The target has ended without delivery; a grant of that number that is still on its way is void.

        Stop and Grant may overtake each other. Using the number up here makes the late grant stale, so that it cannot start a
        hand-off into blocks which the target takes back as soon as it has our answer.
        """
        if not stop.grant and not stop.prompt:
            self._stop_whole(sender, stop)
            return
        overtook_grant = stop.grant > 0 and self._windows.use(sender, stop.sequence)
        record = self.live.get(stop.key)
        if record is None or record.target not in (None, sender) or not self._is_stopped_by(record, stop, overtook_grant):
            if record is None and not stop.grant:
                self._remember_declined(sender, stop, stop.prompt)
            if stop.sequence > self._windows.used_up_to(sender):
                # Too far ahead to be used up: its grant could still be accepted one day, so there is nothing to promise.
                self.late_total["stop"] += 1
                return
            end = self._ended.get((sender, stop.key, stop.grant))
            self._control.send(sender, Stopped(stop.key, stop.grant, end is not None and end.may_land))
            return
        if record.state is SourceState.PARKED:
            # The engine's own request is still on its way. Without this it would wait for a target that is gone.
            self._remember_declined(sender, stop, record.prompt)
        record.stop_asked = True
        record.target = sender
        self._end_by(record, SourceEvent.STOP_ASKED, _outcome_here(stop.outcome), _reason_of(stop))

    def _stop_whole(self, sender: Incarnation, stop: Stop) -> None:
        """A target has refused a request as a whole: it fetches nothing of its transfer id, now or later.

        What has ended here before is left out: it belongs to an earlier request of the same id, not to one that is yet to come.
        A grant that was parked is not: the engine's own request for it is still on its way, and would wait for nothing.
        """
        transfer_id, reason = stop.key.transfer_id, _reason_of(stop)
        stopped = [
            record
            for key, record in self.live.items()
            if key.transfer_id == transfer_id
            and record.target in (None, sender)
            and self._is_stopped_by(record, stop, overtook_grant=False)
        ]
        over = {key for _, key, _ in self._ended if key.transfer_id == transfer_id}
        now = self._clock()
        self._declined.add_whole(
            transfer_id,
            reason,
            until=now + self._limits.defer_timeout,
            now=now,
            except_for=over | {record.key for record in stopped if record.is_expected},
        )
        for record in stopped:
            self._end_by(record, SourceEvent.STOP_ASKED, _outcome_here(stop.outcome), reason)
        self._control.send(sender, Stopped(stop.key, 0))

    def on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        """A target is alive; what it waits for lives on, and about what is over here it is notified again.

        Its engine need not be: one that hangs allocates nothing, and blocks that are held for it are missing here.
        """
        for key, grant in heartbeat.live:
            record = self.live.get(key)
            if record is not None and record.target in (None, sender) and self._is_about(record, grant):
                record.target = sender
                self.extend_lease(record, heartbeat.step_age_s)
                self.step(record, SourceEvent.PEER_ALIVE)
            elif record is not None and record.grant is None:
                # Another target had claimed it, by the transfer id alone. While one of them waits, it lives on.
                self.extend_lease(record, heartbeat.step_age_s)
            elif self._declined.withdraw(key):
                # The engine has not asked for it yet; how an earlier hand-off of this key ended is no answer to this one.
                continue
            elif record is None and (end := self._end_of(sender, key, grant)) is not None:
                self._control.send(sender, end)

    def on_peer_gone(self, target: Incarnation, reason: str) -> None:
        """A target is provably gone: what was held for it goes back."""
        for record in [record for record in self.live.values() if record.target == target]:
            self._end_by(record, SourceEvent.PEER_GONE, Outcome.FAILED, reason)

    # Reports of the ranks.

    def on_copy(self, report: CopyReport) -> None:
        """A rank reports about its part of a copy."""
        record = self.live.get(report.copy.key)
        if record is None or record.open_copies.get(report.rank) != report.copy:
            self.late_total["copy"] += 1
            return
        match report:
            case SpansMoved():
                if report.copy.generation == record.generation:
                    record.moved.setdefault(report.rank, set()).update(report.spans)
                    self.renew_cap(record)
            case CopyStopped():
                del record.open_copies[report.rank]
                record.may_land |= report.may_land
                if report.may_land:
                    # Also one that is retracted: what is late would land on the next generation, in the same blocks.
                    reason = "what was sent before a copy was stopped may still arrive"
                    self._end_by(record, SourceEvent.COPY_FAILED, Outcome.FAILED, reason)
            case CopyFailed():
                del record.open_copies[report.rank]
                record.may_land |= report.may_land and not record.is_released
                if record.is_released:
                    record.moved[report.rank] = {span.number for span in record.spans}  # the target has it all the same
                    self.renew_cap(record)
                else:
                    self._end_by(record, SourceEvent.COPY_FAILED, Outcome.FAILED, report.reason)
        self._settle(record)

    def on_planned(self, report: SpansPlanned) -> None:
        """A rank has spans on their way to a target that counts them."""
        record = self.live.get(report.copy.key)
        if record is None or record.open_copies.get(report.rank) != report.copy or record.copy != report.copy:
            self.late_total["copy"] += 1
            return
        planned = record.planned.setdefault(report.rank, set())
        if planned.isdisjoint(report.spans):  # a report that comes twice counts once
            planned.update(report.spans)
            record.written_bytes += report.bytes_planned
            self._settle(record)

    def on_summed_spans(self, report: SpansSummed) -> None:
        """A rank has summed spans of one copy; without all sums nothing is confirmed."""
        record = self.live.get(report.copy.key)
        if record is None or report.copy != record.copy:
            self.late_total["summed"] += 1
        elif report.error:
            self._end_by(record, SourceEvent.COPY_FAILED, Outcome.FAILED, report.error)
        else:
            rank, awaited = report.rank, self._awaits_sums(record)
            record.sums.update({(rank, span): sums for span, sums in report.sums.items()})
            self.renew_cap(record)
            if awaited and not self._awaits_sums(record):
                self.step(record, SourceEvent.SUMMED)
            self._settle(record)

    def owns_copy(self, copy: CopyId) -> bool:
        """Whether this side executes a copy. One instance may be source and target of hand-offs at the same time."""
        record = self.live.get(copy.key)
        return record is not None and copy in record.open_copies.values()

    # Time.

    def tick(self) -> None:
        """End what has had no sign of life from its target for too long."""
        self._timers.tick()

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; may be early."""
        return self._timers.next_deadline()

    def beat(self) -> dict[Incarnation, Heartbeat]:
        """The heartbeats that are due to targets that wait for something of ours."""
        lists: dict[Incarnation, list[tuple[HandoffKey, int]]] = {}
        for record in self.live.values():
            is_waited_for = record.state is not SourceState.PARKED or record.parked_at >= self.busy_since
            is_over = record.state is SourceState.STOPPING or record.is_released
            if record.target is not None and is_waited_for and not is_over:
                lists.setdefault(record.target, []).append((record.key, record.grant_number))
        return {target: Heartbeat(from_source=True, live=tuple(live)) for target, live in lists.items()}

    def ends(self) -> list[tuple[Incarnation | None, HandoffKey, int]]:
        """Target, key and grant of the hand-offs that have ended and are remembered, the latest last."""
        return list(self._ended)

    def peers(self) -> set[Incarnation]:
        """Targets that have something of ours."""
        return {record.target for record in self.live.values() if record.target is not None}

    def _look_at(self, record: SourceRecord, now: float) -> None:
        if self._has_deadline(record) and self._deadline(record) <= now:
            self._end_by(record, SourceEvent.LEASE_OUT, Outcome.EXPIRED, self._why_late(record, now))
        else:
            self._watch(record)

    def _watch(self, record: SourceRecord) -> None:
        """Set the alarm for the end of the lease, or of the time in the queue; mostly an earlier one is set already."""
        if self._alarm_times.get(record.key, math.inf) <= record.lease_until:
            # It is not later than the cap either: that was not later when the alarm was set, and is never put forward.
            return
        if self._has_deadline(record) and self.live.get(record.key) is record:
            self._timers.set(record.key, self._deadline(record))

    def _has_deadline(self, record: SourceRecord) -> bool:
        """STOPPING has none: memory that copies of our own still read cannot go back, however long that takes."""
        return record.state is not SourceState.STOPPING

    def _deadline(self, record: SourceRecord) -> float:
        return min(record.lease_until, record.capped_at) if self._has_lease(record) else record.capped_at

    def _has_lease(self, record: SourceRecord) -> bool:
        """Whether the silence of a target ends it.

        Without a target nothing was promised to anyone; one that queues renews the lease by heartbeats. One that has delivered
        is done, and its silence is no sign: the transport ends copies of ours that stand still, and the cap remains.
        """
        is_alone = record.state is SourceState.QUEUED and record.target is None
        return not is_alone and not record.is_released

    def _why_late(self, record: SourceRecord, now: float) -> str:
        if record.state is SourceState.QUEUED and record.target is None:
            return f"queued for {self._limits.queue_timeout:g} s (queue_timeout), and no target has granted it"
        if record.is_released:
            return f"the target has delivered, and copies of ours have not ended for {self._limits.hold_cap:g} s"
        if record.lease_until <= now:
            return f"no message from the target for {self._limits.defer_timeout:g} s while {record.state}"
        if record.state is SourceState.QUEUED:
            return f"the target has granted nothing for {self._limits.hold_cap:g} s since its first heartbeat"
        return f"no further for {self._limits.hold_cap:g} s while {record.state}, although the target is alive"

    def renew_cap(self, record: SourceRecord) -> None:
        """Count the time that messages of the target can gain from now, if the hand-off has got further than ever before.

        What is computed in the queue does not count there: what is waited for is the target. That it is there counts once: it
        may queue for memory then, and ends before us where it has the same limits.
        """
        stage, furthest = _STAGES.get(record.state, -1), record.furthest
        if stage < furthest[0]:
            return
        is_queued, has_target = record.state is SourceState.QUEUED, record.target is not None
        done = has_target if is_queued else len(record.spans) + sum(map(len, record.moved.values())) + len(record.sums)
        if (stage, done) > furthest:
            is_alone = is_queued and not has_target
            record.furthest = (stage, done)
            record.capped_at = self._clock() + (self._limits.queue_timeout if is_alone else self._hold_cap)

    # Checks: pure questions about the counts of a record.

    def is_same_prompt(self, record: SourceRecord, prompt: str) -> bool:
        """Whether a hand-off is about this very prompt; a transfer id alone proves nothing."""
        return record.prompt == prompt

    def _is_moved(self, record: SourceRecord) -> bool:
        numbers = {span.number for span in record.spans}
        return all(record.moved.get(rank, set()) >= numbers for rank in range(self._ranks_count))

    def _is_on_its_way(self, record: SourceRecord) -> bool:
        """Whether every byte is on its way to a target that counts them."""
        numbers = {span.number for span in record.spans}
        counts = record.grant is not None and record.grant.counts_arrivals
        return counts and all(record.planned.get(rank, set()) >= numbers for rank in range(self._ranks_count))

    def _is_summed(self, record: SourceRecord) -> bool:
        return record.integrity is Integrity.OFF or len(record.sums) == self._ranks_count * len(record.spans)

    def shows_stamp(self, record: SourceRecord) -> bool:
        """Whether the target can look at a stamp of this hand-off, once its cache is complete."""
        return record.grant is not None and record.grant.reads_stamps and not record.writes

    def _awaits_sums(self, record: SourceRecord) -> bool:
        """Whether the cache is complete, and its stamp waits for checksums."""
        return record.state is SourceState.SERVING and self.shows_stamp(record) and not self._is_summed(record)

    def _is_about(self, record: SourceRecord, grant: int) -> bool:
        """Whether a target that waits with `grant` waits for this; its grant may still be on its way, or not yet made."""
        return grant == 0 or record.grant is None or record.grant_number == grant

    def _is_stopped_by(self, record: SourceRecord, stop: Stop, overtook_grant: bool) -> bool:
        """Whether a stop is about this record: it holds the grant, or would have, had the stop not overtaken the grant.

        Without a grant it is about whatever of the same prompt has none, or still waits for the engine.
        """
        if stop.grant:
            return record.grant_number == stop.grant or (record.grant is None and overtook_grant)
        is_early = record.grant is None or record.state is SourceState.PARKED
        return is_early and (not stop.prompt or self.is_same_prompt(record, stop.prompt))

    # Helpers.

    def _send(self, record: SourceRecord, message: Message) -> None:
        if record.target is not None:
            self._control.send(record.target, message)

    def _note(self, record: SourceRecord, stage: Stage, span: Span | None = None, outcome: Outcome | None = None) -> None:
        if self._observe is not no_observer:
            text = record.reason if outcome is not None else ""
            self._observe(note(record.key, Side.SOURCE, stage, self._clock(), span, outcome=outcome, text=text))

    def _new_record(self, key: HandoffKey, state: SourceState) -> SourceRecord:
        # One counter for all hand-offs, so that a key which is used again never sees a generation of its earlier life.
        self._generation += 1
        record = SourceRecord(key, state, self._clock() + self._limits.defer_timeout, self._generation)
        self.renew_cap(record)
        return record

    def _expected(self, key: HandoffKey) -> SourceRecord | None:
        """The live hand-off that a call of the engine is about; a grant that is parked is not known to the engine yet."""
        record = self.live.get(key)
        return record if record is not None and record.is_expected else None

    def _owned(self, sender: Incarnation, key: HandoffKey, grant: int) -> SourceRecord | None:
        record = self.live.get(key)
        return record if record is not None and record.target == sender and record.grant_number == grant else None

    def _park(self, sender: Incarnation, grant: Grant) -> None:
        """A grant for something that the engine does not know (yet). In pull the prefill came first, so it is over."""
        if grant.mode is Mode.PULL:
            self._refuse(sender, grant, "it is not held here (any more)")
        elif self._parked >= self.most_parked:
            self._refuse(sender, grant, f"{self._parked} grants wait for their prefill already")
        else:
            record = self._new_record(grant.key, SourceState.PARKED)
            record.target, record.grant, record.prompt = sender, grant, grant.prompt
            record.is_expected, record.parked_at = False, self._clock()
            self.live[grant.key] = record
            self._parked += 1
            self._watch(record)

    def _refuse(self, sender: Incarnation, grant: Grant, reason: str) -> None:
        text = f"hand-off {grant.key}: {reason}"[:MAX_REASON]
        self._control.send(sender, Refused(reason=text, key=grant.key, grant=grant.grant))

    def _refuse_stale(self, sender: Incarnation, grant: Grant) -> None:
        """Refuse a number in such a way that the target can go on from one that counts."""
        used_up_to = self._windows.used_up_to(sender)
        state = "was used before" if grant.sequence <= used_up_to else "is too far ahead"
        reason = f"hand-off {grant.key}: grant {grant.sequence} in sequence {state}; the next one is {used_up_to + 1}"
        numbers = {"grant": grant.grant, "used_up_to": used_up_to, "sequence": grant.sequence}
        self._control.send(sender, Refused(reason=reason, key=grant.key, stale=True, **numbers))

    def _remember_declined(self, sender: Incarnation, stop: Stop, prompt: str) -> None:
        """The engine may still be asked for it; what has ended here before needs no memory of that.

        The engine may have cancelled it before its grant came: a decline that is kept then would end the next request of the
        same transfer id.
        """
        if self._end_of(sender, stop.key, 0) is None:
            until = self._clock() + self._limits.defer_timeout
            self._declined.add(stop.key, prompt, _reason_of(stop), until)

    def _end_of(self, sender: Incarnation, key: HandoffKey, grant: int) -> Over | None:
        """How it ended for this target, or before there was any."""
        return self._ended.get((sender, key, grant)) or (None if grant else self._ended.get((None, key, 0)))

    def _over(self, sender: Incarnation, key: HandoffKey, grant: int) -> Over:
        end = self._end_of(sender, key, grant)
        reason = f"hand-off {key} is not held here (any more)"
        return end or Over(key=key, grant=grant, outcome=Outcome.FAILED, reason=reason)

    def _open_copy(self, record: SourceRecord, grant: Grant) -> None:
        if record.open_copies or record.target is None:
            return
        record.open_copies = dict.fromkeys(range(self._ranks_count), record.copy)
        order = OpenCopy(
            copy=record.copy,
            peer=record.target,
            executor=grant.executor,
            epoch=grant.epoch,
            target_blocks=grant.blocks,
            cached_tokens=grant.cached_tokens,
            total_tokens=grant.tokens or None,
            counts_arrivals=grant.counts_arrivals,
        )
        self._ranks.send_all(order)

    def _point_at_aux(self, record: SourceRecord, aux: Aux) -> AuxPointer | None:
        """Put the aux record into a slot of ours, once, if the target will read it there; None when it goes in the message."""
        if record.grant is None or record.grant.aux_channel is AuxChannel.CONTROL:
            return None
        if record.aux_pointer is None:
            data = pack_aux(record.key, record.grant_number, record.generation, aux)
            if refusal := self.aux_slots.refusal(len(data)):
                self.aux_fallbacks_total[refusal] += 1
                return None
            record.aux_pointer = point_at(self.aux_slots.take(), data)
            self._ranks.send(0, PutAux(record.aux_pointer.offset, data))
        return record.aux_pointer

    def _drop_sums(self, record: SourceRecord) -> None:
        if record.summing:
            self._ranks.send_all(DropSums(Side.SOURCE, record.key))
        record.summing, record.is_asked = 0, False
        record.sums.clear()


def _sums_of(record: SourceRecord) -> tuple[SpanSum, ...]:
    """Every checksum of a hand-off, as it is sent."""
    return tuple(SpanSum(leg, span, value) for (leg, span), value in sorted(sums_by_leg(record.sums).items()))


def _outcome_here(outcome: Outcome) -> Outcome:
    """How a source ends whose target has stopped it; a stop never delivers, whatever the message claims."""
    return Outcome.FAILED if outcome is Outcome.DELIVERED else outcome


def _reason_of(stop: Stop) -> str:
    return f"the target {stop.outcome}: {stop.reason}"
