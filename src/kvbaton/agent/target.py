"""The target side of hand-offs: grants blocks, has them filled and confirmed, and only then lets decode start.

Theory of operation
===================

One hand-off is one `TargetRecord`: a state of the table `TARGET` (core/lifecycle.py), and the counts and lists beside it.
Whatever happens (a call of the engine, a message, a report of a rank, an alarm) becomes an event for `step`, which looks up
the row of the state and performs the effects of that row, in order. `_settle` follows: it raises the events that are not
messages but facts about the counts, "everything is in" and "nothing is in flight". Nothing else changes a state. There is no
thread and no I/O here; the simulator runs this very code (`kvbaton sim`).

A hand-off that goes well: QUEUED (the request waits for blocks), HANDSHAKING (there are blocks, the source's card is not
known), GRANTED (the grant is sent), FILLING (the source announces spans, our ranks read them), CONFIRMING (everything is in,
the source is asked whether it was right), DELIVERED. Where the source writes, FILLING leads to DELIVERED without CONFIRMING:
the source knows itself when its last byte has arrived, and confirms without being asked.

Confirm after copy
------------------
A one-sided read does not notice that its source block was freed and overwritten while it ran. So bytes count only when the
source confirms them *afterwards*: `ConfirmAsk` is sent when the last byte is in, and the source answers `Confirmed` only
while the blocks still hold the generation that was read. A confirmation from before the last byte proves nothing and is late.

A source of the same host need not be asked. With `Prefilled` it names a *stamp*, a number in memory that we can read, which it
clears before its blocks go anywhere (core/stamps.py). If that stands when the last byte is in, the blocks held the generation,
FILLING leads to DELIVERED, and `Release` names the stamp. If it does not, the question follows: the source knows why.

Where checksums are compared, those of the source come with whichever of the two proves that the blocks held the generation. A
stamp that waits for them may come last: then CONFIRMING waits for it, and the question is what is sent if it does not come.

Generation, and what happens when a source is preempted in mid-transfer
-----------------------------------------------------------------------
A generation is the source's number for one computation of the cache. Every announcement, `Prefilled` and confirmation carries
it.

1. The source's engine needs the blocks of an unfinished prefill for another request and calls `retract`. Its side goes from
   STREAMING to RETRACTING: it stops its own copies, takes a new generation number, and sends `Retracted` with that number.
   When no copy *of its own* is in flight the engine gets `Drained` and may overwrite the blocks. It does not wait for us: our
   reads may go on and read another request's bytes, which is harmless because the old generation is never confirmed again.
2. Here FILLING or CONFIRMING becomes CLEARING (`follow_generation`): what was announced, moved and summed is forgotten, and
   the copy is stopped on every rank. `Retracted` may be lost or overtaken, so *any* message of a newer generation does the
   same. If the target had already asked for the confirmation, the source answers with `Retracted` instead.
3. In CLEARING, spans of the new generation are noted and not moved: a read of the old generation that is still in flight ends
   in the same target blocks, and could overwrite a byte of the new one after that was counted.
4. When every rank has reported that its copy is stopped, QUIET leads back to FILLING, and what was announced meanwhile is
   moved. Grant, blocks and epoch stay what they were: to the engine nothing has happened but a delay.

Where the source writes, step 3 is its duty: it announces nothing of the new generation before its writes of the old one have
stopped (RETRACTING has no row that announces). Then there is no copy here to wait for, and CLEARING ends at once. A finished
prefill (SERVING at the source) is never retracted: its blocks are held until it ends.

Grant numbers
-------------
Every grant has a number that no other grant of this instance ever has, and every message about it carries that number. A
transfer id may be used again by a later request, and messages arrive late: an answer to an earlier grant of the same key is
not about this one (`current`). Beside it a grant has a `sequence` number, which counts the grants to that one source. The
source uses each of those up once, so that a grant which arrives after its `Stop` starts nothing (core/grants.py). If it
refuses one as *stale* (used, too old to know, or too far ahead) and nothing else was received about the grant, a new grant is
made, with the next sequence number that the source accepts. A source that refuses `_MAX_STALE` of them in a row agrees with us
on no number: the hand-off fails. A refusal is an answer, and no sign that the hand-off makes progress: no deadline is renewed
by it, nor by a heartbeat of a source that does not hold our grant although it was sent.

Quarantine
----------
A hand-off that ends without delivery does not give its blocks back at once: a copy in flight would write into whatever the
engine puts there next. STOPPING keeps the blocks until our ranks have stopped and, where the source writes, the source has
reported that it will not touch them again (`Stopped`, `Over`, `Refused`). If it does not answer for `stop_timeout`, stronger
means follow: REVOKING tears the session with that source down, ISOLATED registers our memory anew, which ends the rights of
every peer. Time leads from one to the next and *never* to the end: only quiet does.

Lost writers
------------
A source counts as lost when its process is dead, or when another process answers at its address. For a read that is enough.
A write may land all the same: two processes can have had one address one after the other, with the first paused, cut off or
only slow to end, and what a dead process had sent may lie in a buffer of ours. So where our ranks can fence (`can_fence`), a
lost writer goes to REVOKING at once, and its blocks go back when every rank has reported the fence; over `tcp` that is local
and immediate. Where they cannot (`--unfenced-writes`), there is nothing better to wait for, and being lost counts as quiet.
The same holds for a source that lives, has given up a connection with bytes on it, and reports that (`may_land`): it is quiet
itself, and what it had sent may wait in a buffer of ours all the same.

Deadlines
---------
QUEUED ends after `queue_timeout`. From then on `give_up_at` measures the silence of the source; its heartbeats renew that
where the source is what we wait for (not in CLEARING and CONFIRMING). A heartbeat states how long ago the source's engine took
its last step, and silence is counted from then: an engine may hang while its agents go on. Heartbeats of an engine that works
cannot renew it for ever either: a hand-off that gets no further than it was for `Limits.hold_cap` ends, because the engine may
have lost it. Only getting *further than ever before* (a later state, more spans moved or summed) counts from anew, so that a
source which retracts again and again does not keep our blocks. The states of the quarantine have deadlines that lead to
stronger means, and no end but quiet.

Epoch
-----
A counter of this instance that every grant carries; each fence raises it. A fence ends only what was granted in an earlier
epoch: a source that was revoked may reconnect and be granted blocks again before the ranks have reported the fence, and that
new grant is not ended by the old fence. What the same source was granted before fails, even if all was well with it, because
its writes do not land any more.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvbaton.agent.card_requests import CardRequests, is_answer_after
from kvbaton.agent.decline_notices import DeclineNotices
from kvbaton.agent.engine_port import Allocation, HandoffStats, Landed, SourceRequest, TargetEnded
from kvbaton.agent.ports import NO_STAMPS, Clock, Control, EnginePort, Ranks, Stamps
from kvbaton.agent.rank_orders import (
    Arrived,
    AuxRead,
    CloseCopy,
    CopyFailed,
    CopyId,
    CopyReport,
    CopyStopped,
    DropSums,
    MoveSpans,
    OpenCopy,
    RankSums,
    ReadAux,
    ResetRegion,
    RevokePeer,
    SpansMoved,
    SpansSummed,
    StopCopy,
    SumSpans,
    sums_by_leg,
)
from kvbaton.agent.timers import Backoff, Questions, Timers
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.aux_area import AuxArea, AuxPointer, AuxSlots, pointer_problem, unpack_aux
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card
from kvbaton.core.checks import ONE_IN, SpanSum, size_worth_summing, span_size, sums_problem
from kvbaton.core.grants import REACH, next_sequence
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
from kvbaton.core.lifecycle import TARGET, TargetEffect, TargetEvent, TargetState, TargetTable
from kvbaton.core.members import members_of
from kvbaton.core.messages import (
    MAX_NUMBER,
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
from kvbaton.core.stamps import Stamp
from kvbaton.core.timeline import Observer, Side, Stage, no_observer, note
from kvbaton.errors import ProtocolError
from kvbaton.wire.log_limit import shown

__all__ = ["TargetRecord", "TargetSide"]

log = logging.getLogger(__name__)

if not TYPE_CHECKING:
    AuxChannel, Executor, Integrity, Mode, Outcome = map(members_of, (AuxChannel, Executor, Integrity, Mode, Outcome))
    Side, Stage, TargetEvent, TargetState = map(members_of, (Side, Stage, TargetEvent, TargetState))

_MAX_ENDS = 4096
_MAX_SOURCES = 1024

_MAX_STALE = 8
"""Grants of one hand-off that may be refused as stale. One is normal where a side lost count; more, where many grants race."""

_STAGES = {
    TargetState.QUEUED: 0,
    TargetState.HANDSHAKING: 1,
    TargetState.GRANTED: 2,
    TargetState.FILLING: 3,
    TargetState.CLEARING: 3,
    TargetState.CONFIRMING: 4,
}
"""How far a hand-off in each of the live states has got; the higher, the further."""

_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
"""States in which the end is certain, and a copy may still write."""

_UNANSWERED = frozenset({TargetState.QUEUED, TargetState.HANDSHAKING, TargetState.GRANTED})
"""States in which the source has answered nothing about this hand-off yet."""

_REPEATING = _CLOSING | {TargetState.HANDSHAKING, TargetState.GRANTED, TargetState.FILLING, TargetState.CONFIRMING}
"""States in which the target waits for an answer, and asks again."""

_NOT_RENEWED = _CLOSING | {TargetState.CLEARING, TargetState.CONFIRMING}
"""States in which a sign of life of the source is not enough: a rank or an answer is overdue, not the prefill."""

_QUIET = {
    Outcome.FAILED: TargetEvent.QUIET_FAILED,
    Outcome.CANCELLED: TargetEvent.QUIET_CANCELLED,
    Outcome.EXPIRED: TargetEvent.QUIET_EXPIRED,
}

_OUTCOMES = {
    TargetState.DELIVERED: Outcome.DELIVERED,
    TargetState.FAILED: Outcome.FAILED,
    TargetState.CANCELLED: Outcome.CANCELLED,
    TargetState.EXPIRED: Outcome.EXPIRED,
}


class TargetRecord(msgspec.Struct, eq=False):
    """One live hand-off as its target knows it: the state, and the counts and lists beside it."""

    request: SourceRequest
    retry: Backoff
    asked_before: int
    """The last question for a card that was sent before this request came: the process that it names was alive since."""
    give_up_at: float = math.inf
    """When it ends if its source stays silent; while it is QUEUED, silence does not end it."""
    furthest: tuple[int, int] = (-1, 0)
    """The furthest that it ever got: the stage, and what was announced or moved, and summed by then."""
    capped_at: float = 0.0
    """When it ends if it gets no further, whatever its source sends."""
    question: int = 0
    """The number of the last message that was sent about it and expects an answer; see `Questions`."""
    state: TargetState = TARGET.start
    allocation: Allocation | None = None
    source: Incarnation | None = None
    grant: int = 0
    """The number of the grant; 0 before there is one."""
    sequence: int = 0
    """Its number among the grants to this source."""
    stale_grants: int = 0
    """How many grants of it the source has refused as stale."""
    epoch: int = 0
    executor: Executor = Executor.TARGET_READS
    generation: int = 0
    """The one that counts; 0 until the source has announced anything under this grant."""
    source_blocks: BlockLists = ()
    spans: dict[int, Span] = msgspec.field(default_factory=dict)
    """Everything that was announced of this generation, by number."""
    unmoved: dict[int, Span] = msgspec.field(default_factory=dict)
    just_moved: list[int] = msgspec.field(default_factory=list)
    """Numbers of spans that were counted as moved, and of which nothing followed yet."""
    moved: dict[int, set[int]] = msgspec.field(default_factory=dict)
    """Numbers of the spans that are in, by rank."""
    span_count: int | None = None
    """How many spans there are; known when the prefill is complete."""
    unsummed: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """By rank: numbers of spans that are in and that it was not ordered to sum yet, where sums are compared."""
    unsummed_size: dict[int, int] = msgspec.field(default_factory=dict)
    """By rank: how much that is, as `span_size` counts it."""
    summing: set[int] = msgspec.field(default_factory=set)
    sums: RankSums = msgspec.field(default_factory=dict)
    source_sums: dict[tuple[int, int], int] = msgspec.field(default_factory=dict)
    stamp: Stamp | None = None
    """What stands at the source as long as its blocks hold this generation."""
    sums_follow: bool = False
    """Whether the stamp waits for checksums of the source, and both are still to come."""
    aux: Aux | None = None
    aux_channel: AuxChannel = AuxChannel.CONTROL
    aux_pointer: AuxPointer | None = None
    source_area: AuxArea | None = None
    reads_stamps: bool = False
    """Whether the stamps of the source can be read here."""
    is_confirmed: bool = False
    counts_arrivals: bool = False
    """Whether our ranks count what the source writes."""
    arrived_bytes: int = 0
    """What they have counted of this generation."""
    arrivals: dict[int, int] = msgspec.field(default_factory=dict)
    """By rank: the number of its last report that was counted."""
    written_bytes: int | None = None
    """How much the source has confirmed to be on its way; None where what it confirms is in."""
    early_confirmed: Confirmed | None = None
    """The last confirmation of a source that writes which has overtaken `Prefilled`; taken, and checked, when that is in."""
    open_copies: dict[int, CopyId] = msgspec.field(default_factory=dict)
    """By rank: the copy that it has open, which may be that of an earlier generation while we are CLEARING."""
    peer_is_quiet: bool = False
    """Whether the source will provably not touch our blocks again."""
    quarantined: int = 0
    stop_until: float = 0.0
    verdict: Outcome = Outcome.FAILED
    """How it will end, fixed by whatever ended it first."""
    reason: str = ""
    held_s: float = 0.0
    prefilled_at: float = 0.0
    on_wire: int = 0
    """Spans of all ranks that are being moved right now."""
    wire_since: float = 0.0
    wire_s: float = 0.0
    """For how long something was being moved."""
    exposed_wire_s: float = 0.0
    """How much of that came after the source had chosen its first token, and was hidden by no computing."""
    bytes_planned: int = 0
    bytes_moved: int = 0

    @property
    def key(self) -> HandoffKey:
        """The key of the hand-off."""
        return self.request.key

    @property
    def copy(self) -> CopyId:
        """The copy of this generation, as the ranks know it."""
        return CopyId(self.key, self.grant, self.generation)


class _TargetEnd(NamedTuple):
    """How a grant ended, when, its number in sequence, and the stamp that its release names."""

    outcome: Outcome
    at: float
    sequence: int
    stamp: int = 0


class TargetSide:
    """All live hand-offs that this instance is the target of."""

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
        stamps: Stamps = NO_STAMPS,
    ) -> None:
        self._stamps = stamps
        self._settings = settings
        self._observe = observe
        self._card = card
        self._layers = card.layers
        is_sampled = settings.integrity is Integrity.SAMPLED
        self.sum_size = size_worth_summing(rank.layout for rank in card.ranks) * (ONE_IN if is_sampled else 1)
        """How much is worth an order to sum it before everything is in; see `size_worth_summing`."""
        self._transport = transport
        self._limits = limits
        self._clock = clock
        self._control = control
        self._ranks = ranks
        self._engine = engine
        self.live: dict[HandoffKey, TargetRecord] = {}
        self.epoch = 1
        self._last_grant = 0
        self._last_sequence: BoundedMap[Incarnation, int] = BoundedMap(_MAX_SOURCES)
        self._ended: BoundedMap[tuple[HandoffKey, int], _TargetEnd] = BoundedMap(_MAX_ENDS)
        self.card_requests = CardRequests(card, limits, clock, control)
        self._questions = Questions()
        self._timers = Timers(limits, clock, lambda key, now: self._look_at(self.live[key], now))
        self._alarm_times = self._timers.times
        self._hold_cap = limits.hold_cap
        self.decline_notices = DeclineNotices(limits, clock, control, self.card_requests)
        self.aux_slots = AuxSlots(card.ranks[0].aux)
        self.quarantined_blocks = 0
        """Blocks that no request may use until every copy into them has provably stopped."""
        self.late_total: Counter[str] = Counter()
        self.failures_total: Counter[str] = Counter()
        self.mismatches_total = 0
        self.stamped_total = 0
        self.aux_fallbacks_total: Counter[str] = Counter()
        self.effects: dict[TargetEffect, Callable[[TargetRecord], None]] = {
            TargetEffect.NEW_GRANT: self.new_grant,
            TargetEffect.SEND_GRANT: self.send_grant,
            TargetEffect.MOVE_SPANS: self.move_spans,
            TargetEffect.DROP_SPANS: self.drop_spans,
            TargetEffect.ASK_CONFIRMATION: self.ask_confirmation,
            TargetEffect.QUARANTINE: self.quarantine,
            TargetEffect.SEND_STOP: self.send_stop,
            TargetEffect.STOP_COPY: self.stop_copy,
            TargetEffect.REVOKE_PEER: self.revoke_peer,
            TargetEffect.RESET_REGION: self.reset_region,
            TargetEffect.SEND_RELEASE: self.send_release,
            TargetEffect.DELIVER: self.deliver,
            TargetEffect.RETURN_BLOCKS: self.return_blocks,
        }

    # The state machine.

    def step(self, record: TargetRecord, event: TargetEvent) -> None:
        """Step the machine and perform the effects of its row, in order; a late event is counted."""
        row = self.table.step(record.state, event)
        if row is None:
            self.late_total[event] += 1
            return
        if row.state is not record.state:
            # Before the effects: DELIVER and RETURN_BLOCKS read the outcome from the state.
            record.state = row.state
            if row.state in self.table.terminal:
                # Nothing more is waited for.
                for effect in row.effects:
                    self.effects[effect](record)
                return
            self._progress(record)
        for effect in row.effects:
            self.effects[effect](record)
        self._watch(record)

    def _settle(self, record: TargetRecord) -> None:
        """Raise the events that follow from counts: everything is in, or nothing is in flight."""
        self._watch(record)
        if record.state is TargetState.FILLING:
            if self.compares_sums:
                (self.sum_moved if record.executor is Executor.TARGET_READS else self.sum_written)(record)
            if self.is_complete(record):
                self._finish_filling(record)
        elif record.state is TargetState.CLEARING and not record.open_copies:
            self.step(record, TargetEvent.QUIET)
        elif record.state in _CLOSING and self.is_quiet(record):
            self.step(record, _QUIET[record.verdict])

    def _finish_filling(self, record: TargetRecord) -> None:
        if problem := self.span_problem(record):
            reason = f"the source's spans are not the whole cache: {problem}"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
        elif record.executor is Executor.TARGET_READS:
            self._finish_reading(record)
        else:
            self._end_checked(record, TargetEvent.WRITTEN)

    def _finish_reading(self, record: TargetRecord) -> None:
        self._note(record, Stage.FILLED)
        if record.sums_follow:
            self.step(record, TargetEvent.AHEAD)
        else:
            self._look_at_stamp(record)

    def _look_at_stamp(self, record: TargetRecord) -> None:
        """Everything is in, and it is known whether there is a stamp: deliver it if that stands, or ask."""
        if self.is_stamped(record):
            self._note(record, Stage.CONFIRMED)
            self._end_checked(record, TargetEvent.STAMPED)
        else:
            record.stamp = None
            self.step(record, TargetEvent.FILLED)

    def _end_by(self, record: TargetRecord, event: TargetEvent, verdict: Outcome, reason: str) -> None:
        """Begin an end without delivery. The first one decides the outcome; what comes while it stops is late."""
        if record.state in _CLOSING:
            self.late_total[event] += 1
        else:
            record.verdict, record.reason = verdict, reason[:MAX_REASON]
            record.stop_until = self._clock() + self._limits.stop_timeout
            self.failures_total[event] += 1
            self.step(record, event)
        # In either case: the event may have come with the proof that the source is quiet.
        self._settle(record)

    def _end_checked(self, record: TargetRecord, event: TargetEvent) -> None:
        """`event` proves that the blocks held the generation when the last byte was in: deliver, unless a checksum differs."""
        if problem := self.sums_problem(record):
            self.mismatches_total += 1
            self._end_by(record, TargetEvent.MISMATCHED, Outcome.FAILED, problem)
        else:
            self.stamped_total += event is TargetEvent.STAMPED
            self.step(record, event)

    def follow_generation(self, record: TargetRecord, generation: int) -> bool:
        """Take up the generation of a message, if it is newer; false when it is older than the one that counts.

        A newer one voids everything before it, whichever message brings it: `Retracted` may be lost, or come after the first
        announcement of the new generation.
        """
        if generation < record.generation:
            return False
        if generation > record.generation:
            # Generations of a source start at 1 and grow over all its hand-offs: 0 means that this is the first message.
            is_first, record.generation = record.generation == 0, generation
            if not is_first:
                self._note(record, Stage.RETRACTED)
                self.step(record, TargetEvent.RETRACTED)
                self._settle(record)
        return True

    # The effects of the table.

    def new_grant(self, record: TargetRecord) -> None:
        """Take the next number; no two grants of this instance share one, whichever source they are for."""
        if record.source is not None:
            self._last_grant += 1
            record.grant = self._last_grant
            # The last number there is comes again, if a forged refusal has led there: the source refuses it, and names its own.
            record.sequence = min(self._last_sequence.get(record.source, 0), MAX_NUMBER - 1) + 1
            self._last_sequence[record.source] = record.sequence
            record.generation = 0
            self.drop_spans(record)
            record.epoch = self.epoch
            record.aux_channel = self._choose_aux_channel(record)
            record.executor = self._ranks.executor if record.request.mode is Mode.PUSH else Executor.TARGET_READS
            record.counts_arrivals = record.executor is Executor.SOURCE_WRITES and self._ranks.counts_arrivals

    def send_grant(self, record: TargetRecord) -> None:
        """Grant the blocks to the source. A source that only announces learns no block of ours: it has no use for them."""
        if record.allocation is None:
            return
        self._note(record, Stage.GRANT_SENT)
        grant = Grant(
            key=record.key,
            grant=record.grant,
            prompt=record.request.prompt,
            mode=record.request.mode,
            executor=record.executor,
            epoch=record.epoch,
            blocks=record.allocation.blocks if record.executor is Executor.SOURCE_WRITES else (),
            cached_tokens=record.allocation.cached_tokens,
            sequence=record.sequence,
            integrity=self._settings.integrity,
            aux_channel=record.aux_channel,
            tokens=record.allocation.tokens,
            counts_arrivals=record.counts_arrivals,
            reads_stamps=record.reads_stamps,
        )
        self._send(record, grant)

    def move_spans(self, record: TargetRecord) -> None:
        """Have every rank move what was announced and is not being moved yet, if the copy is ours to execute."""
        if record.executor is Executor.SOURCE_WRITES or record.allocation is None or record.source is None:
            return
        new = tuple(record.unmoved.values())
        if not new:
            return
        record.unmoved.clear()
        if not record.on_wire:
            record.wire_since = self._clock()
        record.on_wire += len(new) * len(self._card.ranks)
        copy = record.copy
        for rank in self._card.ranks:
            if rank.rank not in record.open_copies:
                record.open_copies[rank.rank] = copy
                order = OpenCopy(
                    copy=copy,
                    peer=record.source,
                    executor=record.executor,
                    epoch=record.epoch,
                    target_blocks=record.allocation.blocks,
                    cached_tokens=record.allocation.cached_tokens,
                    total_tokens=record.allocation.tokens,
                )
                self._ranks.send(rank.rank, order)
            self._ranks.send(rank.rank, MoveSpans(copy, record.source_blocks, new))

    def drop_spans(self, record: TargetRecord) -> None:
        """Forget what was announced, moved, summed and sampled: it is void. Copies in flight are left to `stop_copy`."""
        record.spans.clear()
        record.source_blocks = ()
        record.unmoved.clear()
        record.moved.clear()
        record.on_wire = 0
        record.span_count = record.stamp = None
        record.sums_follow = False
        record.aux = record.aux_pointer = None
        record.is_confirmed = False
        record.arrived_bytes, record.written_bytes = 0, None
        self._drop_sums(record)
        record.bytes_planned = record.bytes_moved = 0

    def ask_confirmation(self, record: TargetRecord) -> None:
        """Everything is in: ask the source whether its blocks held this generation all the time."""
        self._send(record, ConfirmAsk(record.key, record.grant, record.generation))

    def quarantine(self, record: TargetRecord) -> None:
        """Count the blocks that wait until no copy can write to them any more."""
        if record.allocation is not None:
            record.quarantined = sum(map(len, record.allocation.blocks))
            self.quarantined_blocks += record.quarantined

    def send_stop(self, record: TargetRecord) -> None:
        """Ask the source to stop, and to report that. One that had no grant gets a decline notice, when our side has ended."""
        if record.grant:
            stop = Stop(
                key=record.key,
                grant=record.grant,
                outcome=record.verdict,
                reason=record.reason,
                sequence=record.sequence,
            )
            self._send(record, stop)

    def stop_copy(self, record: TargetRecord) -> None:
        """Have every rank stop what it has open; each reports CopyStopped once nothing of it is in flight."""
        for rank, copy in tuple(record.open_copies.items()):
            self._ranks.send(rank, StopCopy(copy))

    def revoke_peer(self, record: TargetRecord) -> None:
        """The source does not report that it has stopped: end its right to write here."""
        if record.source is not None:
            self.epoch += 1
            self._ranks.send_all(RevokePeer(record.source, self.epoch))

    def reset_region(self, record: TargetRecord) -> None:
        """The source could not be fenced alone: end the right of every peer to write here."""
        del record
        self.epoch += 1
        self._ranks.send_all(ResetRegion(self.epoch))

    def send_release(self, record: TargetRecord) -> None:
        """Notify the source that its blocks are not needed any more."""
        self._send(record, Release(record.key, record.grant, _value_of(record.stamp)))

    def deliver(self, record: TargetRecord) -> None:
        """The good end: the engine may decode."""
        self._forget(record)
        if record.aux is not None:
            self._note(record, Stage.ENDED, outcome=Outcome.DELIVERED)
            self._engine(Landed(record.key, record.aux, self._stats(record)))

    def return_blocks(self, record: TargetRecord) -> None:
        """The other ends: the engine may have its blocks back."""
        self._forget(record)
        outcome = _OUTCOMES[record.state]
        if not record.grant and not record.peer_is_quiet:
            # The source was never granted anything, so no Stop was sent; it may be computing for this request all the same.
            self.decline_notices.send(record.request, outcome, record.reason, record.source)
        self._note(record, Stage.ENDED, outcome=outcome)
        log.warning("hand-off %s: target %s: %s", record.key, outcome, shown(record.reason))
        self._engine(TargetEnded(record.key, outcome, record.reason))

    # Calls of the engine.

    def expect(self, request: SourceRequest, source: Card | None) -> None:
        """A request waits for memory; its source, once it is known, gets heartbeats that keep its blocks."""
        problem = key_problem(request.key)
        if request.key in self.live:
            problem = f"hand-off {request.key} is live already"
        if problem:
            self._engine(TargetEnded(request.key, Outcome.FAILED, problem))
            return
        # A notice about an earlier request of this key would make the source drop this one.
        self.decline_notices.forget(request.key)
        record = TargetRecord(request, Backoff.start(self._limits, self._clock()), self.card_requests.asked)
        self.live[request.key] = record
        self.renew_cap(record)
        self._watch(record)
        if source is None:
            self.card_requests.dial(request.source)
        else:
            self._take_source(record, source)

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

    def decline(self, request: SourceRequest, source: Card | None, reason: str) -> None:
        """The engine refuses a request before admission: its source need not wait.

        A live hand-off of the same key is another request, which must go on. Without a prompt all of the transfer id is
        declined: the source ends only what has no grant yet, so the notice does no harm to the live one.
        """
        if (request.prompt and request.key in self.live) or key_problem(request.key):
            self.late_total["decline"] += 1
        else:
            self.decline_notices.send(request, Outcome.FAILED, reason, None if source is None else source.incarnation)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The engine cancels a hand-off; its blocks come back once no copy can write to them."""
        if (record := self.live.get(key)) is not None:
            self._end_by(record, TargetEvent.ABORTED, Outcome.CANCELLED, reason)

    # What is learnt about the source.

    def on_card(self, card: Card, address: ControlAddress, answers: int | None = None) -> None:
        """A peer has shown its card at `address`, in answer to question `answers`: go on with all that waited for it.

        A card may be late, and its process dead: what names another incarnation waits for the answer to a later question.
        """
        self.card_requests.on_answer(address)
        for record in self._waiting_for(address):
            if self._is_named(record, card) or is_answer_after(record.asked_before, answers):
                self._take_source(record, card)
            else:
                self.card_requests.dial(address, after=record.asked_before)
        self.decline_notices.on_card(card, address, answers)

    def resend_to(self, source: Incarnation) -> None:
        """A source asks for our card: it has dropped what was sent before as coming from an unknown peer. Send it again.

        Otherwise each hand-off would wait for its own retry, although the cause is known and gone.
        """
        for record in [record for record in self.live.values() if record.source == source and self._asks_again(record)]:
            self._ask_again(record, self._clock())
        self.decline_notices.resend_to(source)

    def on_refused_peer(self, address: ControlAddress, reason: str, source: Incarnation | None = None) -> None:
        """The peer at `address` refused us, or we refused it: every hand-off that waited for it fails with the reason.

        A `source` that has shown who it is gets one decline of each: its engine may have the request too, and would wait for us
        until `queue_timeout`. None is repeated, because a refused peer owes no answer.
        """
        self.card_requests.on_answer(address)
        self.decline_notices.on_refused_peer(address, source)
        for record in self._waiting_for(address):
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
            if source is not None:
                prompt = record.request.prompt
                self._control.send(source, Stop(record.key, 0, outcome=Outcome.FAILED, reason=record.reason, prompt=prompt))

    def on_peer_gone(self, source: Incarnation, reason: str) -> None:
        """A source is gone, or another process answers in its place: what it should have sent fails.

        That is no proof that nothing of a source that writes lands any more, see "Lost writers": it is fenced, if it can be.
        """
        self.decline_notices.on_peer_gone(source)
        for record in [record for record in self.live.values() if record.source == source]:
            record.peer_is_quiet |= not self.can_fence(record)
            self._end_by(record, TargetEvent.PEER_GONE, Outcome.FAILED, reason)
            self._fence_writer(record)

    def _fence_writer(self, record: TargetRecord) -> None:
        """Its source proves nothing by what it sends, or sends nothing any more: do not wait for it, fence it."""
        if record.state is TargetState.STOPPING and not record.peer_is_quiet:
            record.stop_until = self._clock() + self._limits.stop_timeout
            self.step(record, TargetEvent.WRITER_LOST)

    def can_fence(self, record: TargetRecord) -> bool:
        """Whether the source was granted a right to write into our blocks that we can take back."""
        return record.executor is Executor.SOURCE_WRITES and self._ranks.fences_writers

    def on_peer_fenced(self, source: Incarnation, epoch: int) -> None:
        """The session with a source was torn down: what it was granted before `epoch` fails. Later grants are not fenced."""
        reason = "its session was torn down, because it did not stop when it was asked to"
        for record in [record for record in self._granted_before(epoch) if record.source == source]:
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.PEER_GONE, Outcome.FAILED, reason)

    def on_region_fenced(self, epoch: int) -> None:
        """Our memory was registered anew: no peer writes under an earlier epoch any more, and what relied on one fails.

        Hand-offs that our own ranks execute go on: a read does not use a right to write here.
        """
        for record in self._granted_before(epoch):
            if record.executor is Executor.SOURCE_WRITES:
                record.peer_is_quiet = True
                self._end_by(record, TargetEvent.PEER_GONE, Outcome.FAILED, "the memory had to be registered anew")

    # Messages of the source.

    def current(self, sender: Incarnation, key: HandoffKey, grant: int) -> TargetRecord | None:
        """The live hand-off that a message of this source and grant is about.

        The grant must be the one in hand: an answer to an earlier grant of the same key, still on its way when the key was used
        again, would otherwise be counted for blocks that it is not about.
        """
        record = self.live.get(key)
        return record if record is not None and record.source == sender and record.grant == grant > 0 else None

    def _answered(self, sender: Incarnation, key: HandoffKey, grant: int) -> TargetRecord | None:
        """The live hand-off that a message is about, noted as an answer of its source."""
        record = self.current(sender, key, grant)
        if record is not None:
            self._questions.answered(sender, record.question, self._clock())
        return record

    def on_announced(self, sender: Incarnation, announced: Announced) -> None:
        """More is computed: move it, if the copy is ours to execute."""
        record = self._answered(sender, announced.key, announced.grant)
        if record is None or not self.follow_generation(record, announced.generation):
            self.late_total["announced"] += 1
            return
        new: Sequence[Span] = announced.spans
        if repeated := [span for span in new if span.number in record.spans]:
            if changed := [span for span in repeated if record.spans[span.number] != span]:
                # What was moved under this number are other tokens or layers: nothing shows which of the two was meant.
                known = record.spans[changed[0].number]
                reason = f"the source announced span {known.number} as {known} and then as {changed[0]}"
                self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
                return
            new = [span for span in new if span.number not in record.spans]
        if self._observe is not no_observer:
            for span in announced.spans:
                self._note(record, Stage.ANNOUNCED, span)
        # Announcements may overtake each other. Within a generation block lists only grow, so the longer one is the newer one.
        if sum(map(len, announced.blocks)) >= sum(map(len, record.source_blocks)):
            record.source_blocks = announced.blocks
        for span in new:
            record.unmoved[span.number] = record.spans[span.number] = span
        if record.executor is Executor.SOURCE_WRITES:
            self.renew_cap(record)  # of what is read, only what has arrived counts
        self.step(record, TargetEvent.ANNOUNCED)
        self._refuse_surplus(record)
        self._settle(record)

    def on_prefilled(self, sender: Incarnation, prefilled: Prefilled) -> None:
        """The prefill is complete; it may still come before some of the announcements."""
        record = self._answered(sender, prefilled.key, prefilled.grant)
        if record is None or record.allocation is None or not self.follow_generation(record, prefilled.generation):
            self.late_total["prefilled"] += 1
        elif prefilled.tokens != record.allocation.tokens:
            reason = f"the source has {prefilled.tokens} tokens, the target asked for {record.allocation.tokens}"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            if record.span_count is None:
                record.held_s, record.prefilled_at = prefilled.held_s, self._clock()
                record.span_count = prefilled.span_count
                self._take_stamp(record, prefilled)
                self._note(record, Stage.PREFILLED)
                # Only the first one is progress: the source repeats it, and a repetition must not renew a deadline.
                self._progress(record)
            elif record.sums_follow and not prefilled.sums_follow:
                self._take_stamp(record, prefilled)
            self._refuse_surplus(record)
            self._settle(record)
            if (early := record.early_confirmed) is not None:
                record.early_confirmed = None
                self.on_confirmed(sender, early)

    def _take_stamp(self, record: TargetRecord, prefilled: Prefilled) -> None:
        """Take the stamp and the checksums that go with it, or that they follow."""
        record.stamp, record.sums_follow = prefilled.stamp, prefilled.sums_follow
        record.source_sums = _by_leg(prefilled.sums)
        if record.state is TargetState.CONFIRMING:
            self._look_at_stamp(record)

    def on_aux(self, sender: Incarnation, message: AuxSent) -> None:
        """The aux record is in, or lies where we can fetch it."""
        record = self._answered(sender, message.key, message.grant)
        if record is None or record.state in _CLOSING:
            # What is ending takes no slot for a record that nothing needs, and asks for none again: its Stop is under way.
            self.late_total["aux"] += 1
        elif message.aux is not None:
            record.aux = message.aux
            self._settle(record)
        elif message.pointer is not None:
            self._fetch_aux(record, message.pointer)

    def on_retracted(self, sender: Incarnation, retracted: Retracted) -> None:
        """What was announced before is void."""
        record = self._answered(sender, retracted.key, retracted.grant)
        if record is None or not self.follow_generation(record, retracted.generation):
            self.late_total["retracted"] += 1

    def on_confirmed(self, sender: Incarnation, confirmed: Confirmed) -> None:
        """The source confirms what was moved. It must be about this generation and as many spans as we have counted."""
        record = self._answered(sender, confirmed.key, confirmed.grant)
        if record is not None and record.span_count is None and record.executor is Executor.SOURCE_WRITES:
            # Sent right behind `Prefilled` where our ranks count, and over a new connection it may come first.
            record.early_confirmed = confirmed
        elif record is None or record.generation != confirmed.generation or record.span_count != confirmed.span_count:
            self.late_total["confirmed"] += 1
        elif record.executor is Executor.SOURCE_WRITES:
            record.is_confirmed, record.written_bytes = True, confirmed.written_bytes
            record.source_sums = _by_leg(confirmed.sums)
            self._settle(record)
        elif record.state is TargetState.CONFIRMING:
            self._note(record, Stage.CONFIRMED)
            record.source_sums, record.sums_follow = _by_leg(confirmed.sums), False
            self._end_checked(record, TargetEvent.CONFIRMED)
        else:
            self.step(record, TargetEvent.CONFIRMED)

    def on_arrived(self, report: Arrived) -> None:
        """A rank has counted bytes that the source wrote into our blocks; it may be the first that we learn of a generation."""
        record = self.current(report.peer, report.copy.key, report.copy.grant)
        is_counted = record is not None and record.counts_arrivals and report.number > record.arrivals.get(report.rank, 0)
        if record is None or not is_counted or not self.follow_generation(record, report.copy.generation):
            self.late_total["arrived"] += 1
            return
        record.arrivals[report.rank] = report.number
        record.arrived_bytes += report.stored_bytes
        self._progress(record)
        self._settle(record)

    def on_refused(self, sender: Incarnation, refused: Refused) -> None:
        """The source refuses; with a stale number we only have to take a new one, a few times."""
        record = None if refused.key is None else self._answered(sender, refused.key, refused.grant)
        if record is None or (refused.stale and refused.sequence not in (0, record.sequence)):
            # Of a sequence number that this grant never had: its frame was changed on the way, and the true one may have been
            # accepted. Taken as the end, it would free blocks that the source writes to.
            self.late_total["refused"] += 1
        elif refused.stale and not refused.sequence and self._may_write(record, refused.used_up_to):
            self._end_unnumbered(record, sender, refused)
        elif refused.stale and record.state is TargetState.GRANTED:
            self._grant_anew(record, sender, refused.used_up_to)
        else:
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, refused.reason)

    @staticmethod
    def _may_write(record: TargetRecord, used_up_to: int) -> bool:
        """Whether the source may have accepted the grant; not where its number is too far ahead of those that it has used."""
        return record.executor is Executor.SOURCE_WRITES and record.sequence <= used_up_to + REACH

    def _end_unnumbered(self, record: TargetRecord, source: Incarnation, refused: Refused) -> None:
        """A source that writes has refused a number as stale, without naming it, as an older release may.

        The refusal may be about a frame that was changed on the way, and the source may write under the true grant. So it is no
        proof that the source is quiet, and the same blocks are not granted again: a stop of the second grant would be answered
        although the first is still written to. It ends, and only the answer to its own Stop gives the blocks back. The
        next hand-off begins with a number that the source accepts.
        """
        self._follow_refusal(source, refused.used_up_to)
        self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, refused.reason)

    def _grant_anew(self, record: TargetRecord, source: Incarnation, used_up_to: int) -> None:
        """A number was refused as stale: take the next one that the source accepts, unless it has refused too many."""
        record.stale_grants += 1
        following = self._follow_refusal(source, used_up_to)
        if record.stale_grants > _MAX_STALE or following > MAX_NUMBER:
            reason = (
                f"the source refused {record.stale_grants} grants in a row as stale, the last one as number {record.sequence} "
                f"in sequence, and would accept {following}"
            )
            # Used up or out of reach, the number starts nothing at the source any more: there is nothing to wait for.
            record.peer_is_quiet = True
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            self.step(record, TargetEvent.STALE)

    def _follow_refusal(self, source: Incarnation, used_up_to: int) -> int:
        """The next number that the source accepts; the next grant to it has that number, whichever hand-off it is about."""
        following = next_sequence(self._last_sequence.get(source, 0), used_up_to)
        if following <= MAX_NUMBER:
            self._last_sequence[source] = following - 1
        return following

    def on_over(self, sender: Incarnation, over: Over) -> None:
        """The source has ended and is quiet, but for what it has sent and given up: that is fenced first, where we can."""
        record = self._answered(sender, over.key, over.grant) if over.grant else self._unanswered(sender, over.key)
        if record is None:
            self.late_total["over"] += 1
            return
        # An end from before the source had our grant promises nothing about that grant, which may still arrive there.
        may_land = over.may_land and self.can_fence(record)
        record.peer_is_quiet |= record.grant == over.grant and not may_land
        self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, f"the source {over.outcome}: {over.reason}")
        if may_land:
            self._fence_writer(record)

    def on_stopped(self, sender: Incarnation, stopped: Stopped) -> None:
        """The source will not touch our blocks for this grant again; what it has sent and given up is fenced, where we can."""
        record = self._answered(sender, stopped.key, stopped.grant)
        if not stopped.grant and self.decline_notices.on_stopped(sender, stopped.key):
            return
        if record is None or record.state not in _CLOSING:
            self.late_total["stopped"] += 1
        elif stopped.may_land and self.can_fence(record):
            self._fence_writer(record)
        else:
            record.peer_is_quiet = True
            self._settle(record)

    def on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        """A source is alive; what it holds for us lives on, and about what is over here it is notified again."""
        for key, grant in heartbeat.live:
            record = self.live.get(key)
            if record is not None and record.source == sender and grant in (0, record.grant):
                self.step(record, TargetEvent.PEER_ALIVE)
                # Without our grant, however often it was sent, the source cannot make progress with this hand-off.
                if record.state not in _NOT_RENEWED and grant == record.grant:
                    # Nor while its engine hangs: then only the agents are alive, and nothing more will be computed.
                    seen_at = self._clock() - heartbeat.step_age_s
                    record.give_up_at = max(record.give_up_at, seen_at + self._limits.transfer_timeout)
            elif grant:
                self._send_end_again(sender, key, grant)

    # Reports of the ranks.

    def on_copy(self, report: CopyReport) -> None:
        """A rank reports about its part of a copy; the hand-off is decided by all ranks together."""
        record = self.live.get(report.copy.key)
        if record is None or record.open_copies.get(report.rank) != report.copy:
            self.late_total["copy"] += 1
            return
        match report:
            case SpansMoved():
                self.count_moved(record, report)
                self._follow_moved(record, report.rank)
            case CopyStopped():
                del record.open_copies[report.rank]
            case CopyFailed():
                del record.open_copies[report.rank]
                self._end_by(record, TargetEvent.COPY_FAILED, Outcome.FAILED, report.reason)
        self._settle(record)

    def _follow_moved(self, record: TargetRecord, rank: int) -> None:
        """Spans have arrived on a rank: that is progress, and they are summed there, if sums are compared."""
        if record.just_moved:
            self._count_wire(record, len(record.just_moved))
            # Not for what is ending: a cancelled hand-off may have hundreds of reads in flight, which all arrive.
            if self.compares_sums and record.state not in _CLOSING:
                size = sum([span_size(record.spans[number]) for number in record.just_moved])
                record.unsummed.setdefault(rank, []).extend(record.just_moved)
                record.unsummed_size[rank] = record.unsummed_size.get(rank, 0) + size
            record.just_moved.clear()
            self._progress(record)

    def count_moved(self, record: TargetRecord, report: SpansMoved) -> None:
        """Spans of one copy are in on one rank; a span counts once, and only in the generation that it was read in."""
        if report.copy.generation != record.generation:
            return
        moved = record.moved.setdefault(report.rank, set())
        new = [span for span in report.spans if span not in moved]
        if new:
            moved.update(new)
            record.bytes_planned += report.bytes_planned
            record.bytes_moved += report.bytes_moved
            record.just_moved += new
            if self._observe is not no_observer:
                self._note_moved(record, report, new)

    def _note_moved(self, record: TargetRecord, report: SpansMoved, numbers: Sequence[int]) -> None:
        """Note each span; the bytes of spans that were moved as one are shared out by tokens and layers."""
        spans = [record.spans[number] for number in numbers]
        parts = [(span.end_token - span.first_token) * (span.end_layer - span.first_layer) for span in spans]
        count, now = sum(parts) or 1, self._clock()
        ends = [report.bytes_moved * done // count for done in itertools.accumulate(parts)]
        for span, before, end in zip(spans, [0, *ends], ends, strict=False):
            moved_bytes = end - before
            self._observe(note(record.key, Side.TARGET, Stage.MOVED, now, span, moved_bytes=moved_bytes, rank=report.rank))

    def _count_wire(self, record: TargetRecord, spans: int) -> None:
        """So many spans less are being moved; with the last of them, a time on the wire is over."""
        record.on_wire -= spans
        if not record.on_wire:
            now = self._clock()
            record.wire_s += now - record.wire_since
            if record.span_count is not None:
                record.exposed_wire_s += now - max(record.wire_since, record.prefilled_at)

    def on_summed_spans(self, report: SpansSummed) -> None:
        """A rank has summed spans of our blocks; sums are compared when all are in and the source has sent its own."""
        record = self.live.get(report.copy.key)
        if record is None or record.state in _CLOSING or report.copy != record.copy or not record.summing >= report.sums.keys():
            self.late_total["summed"] += 1
        elif report.error:
            self._end_by(record, TargetEvent.COPY_FAILED, Outcome.FAILED, report.error)
        else:
            rank = report.rank
            record.sums.update({(rank, span): sums for span, sums in report.sums.items()})
            self._progress(record)
            self._settle(record)

    # Time.

    def tick(self) -> None:
        """Ask again what has no answer, fence what does not stop, and give up what makes no progress."""
        self.decline_notices.tick()
        self._timers.tick()
        due_at = self.card_requests.next_deadline()
        if due_at is not None and due_at <= self._clock():
            needed = {record.request.source for record in self.live.values() if record.source is None}
            self.card_requests.hang_up(needed | self.decline_notices.unanswered())

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; may be early."""
        earliest = self._timers.next_deadline()
        for when in (self.decline_notices.next_deadline(), self.card_requests.next_deadline()):
            if when is not None and (earliest is None or when < earliest):
                earliest = when
        return earliest

    def beat(self) -> dict[Incarnation, Heartbeat]:
        """The heartbeats that are due to sources that we wait for.

        QUEUED hand-offs are listed too: a target may wait for memory longer than a source keeps blocks for a silent peer.
        """
        lists: dict[Incarnation, list[tuple[HandoffKey, int]]] = {}
        for record in self.live.values():
            if record.source is not None and record.state not in _CLOSING:
                lists.setdefault(record.source, []).append((record.key, record.grant))
        return {source: Heartbeat(from_source=False, live=tuple(live)) for source, live in lists.items()}

    def peers(self) -> set[Incarnation]:
        """Sources that we wait for."""
        return {record.source for record in self.live.values() if record.source is not None}

    def _look_at(self, record: TargetRecord, now: float) -> None:
        if record.state in _CLOSING and record.stop_until <= now:
            record.stop_until = now + self._limits.stop_timeout
            self.step(record, TargetEvent.STOP_LATE)
        elif self._asks_again(record) and record.retry.at <= now:
            record.retry.at = self._questions.lost_at(record.source, record.question, record.retry.wait_s)
            if record.retry.at <= now:
                self._ask_again(record, now)
        if record.state not in _CLOSING and self._deadline(record) <= now:
            self._end_by(record, TargetEvent.NO_PROGRESS, Outcome.EXPIRED, self._why_late(record, now))
        self._watch(record)

    def _watch(self, record: TargetRecord) -> None:
        """Set the alarm for the next thing that time will do to this hand-off.

        Called after every step of it, and nearly always the alarm that is set rings first: then nothing else is looked at. Ends
        are further off than the next question when they are set, and are only put off; fences may come before it.
        """
        key = record.request.key
        if self._alarm_times.get(key, math.inf) <= record.retry.at and record.state not in _CLOSING:
            return
        if self.live.get(key) is record:
            # In quarantine time ends nothing, and leads to stronger means only.
            until = record.stop_until if record.state in _CLOSING else self._deadline(record)
            self._timers.set(key, min(until, record.retry.at) if self._asks_again(record) else until)

    def _deadline(self, record: TargetRecord) -> float:
        return min(record.give_up_at, record.capped_at)

    def _why_late(self, record: TargetRecord, now: float) -> str:
        if record.state is TargetState.QUEUED:
            return f"queued for {self._limits.queue_timeout:g} s (queue_timeout), and there was no memory for it"
        if record.give_up_at <= now:
            return f"no progress for {self._limits.transfer_timeout:g} s while {record.state}"
        return f"no further for {self._limits.hold_cap:g} s while {record.state}, although the source is alive"

    def renew_cap(self, record: TargetRecord) -> None:
        """Count the time that heartbeats of the source can gain from now, if the hand-off has got further than ever before."""
        stage, furthest = _STAGES.get(record.state, -1), record.furthest
        if stage < furthest[0]:
            return
        done = self._done(record)
        if stage > furthest[0] or done > furthest[1]:
            record.furthest = stage, done
            is_queued = record.state is TargetState.QUEUED
            record.capped_at = self._clock() + (self._limits.queue_timeout if is_queued else self._hold_cap)

    def _done(self, record: TargetRecord) -> int:
        """How much of it is here. Of a source that writes we see only announcements, of which a bounded number counts."""
        done = len(record.sums)
        for moved in record.moved.values():
            done += len(moved)
        if record.executor is Executor.SOURCE_WRITES and record.allocation is not None:
            done += min(len(record.spans), record.allocation.tokens * len(self._layers))
        return done

    def _progress(self, record: TargetRecord) -> None:
        """Something moved: deadlines measure the lack of progress from here."""
        now = self._clock()
        record.give_up_at = now + self._limits.transfer_timeout
        record.retry.restart(now)
        self.renew_cap(record)

    def _asks_again(self, record: TargetRecord) -> bool:
        if record.state is TargetState.FILLING and self._has_everything_sent(record):
            return False
        return record.state in _REPEATING or record.source is None

    def _has_everything_sent(self, record: TargetRecord) -> bool:
        """Whether the source has sent everything there is to send, and only our own ranks are waited for."""
        is_sent = record.span_count is not None and record.aux is not None and len(record.spans) >= record.span_count
        return is_sent and (record.executor is Executor.TARGET_READS or record.is_confirmed)

    def _ask_again(self, record: TargetRecord, now: float) -> None:
        """Repeat the last question. A repeated grant makes the source repeat all that it announced: whatever was lost comes."""
        record.retry.double(now)
        if record.state is TargetState.CONFIRMING:
            self.ask_confirmation(record)
        elif record.state in _CLOSING:
            self.send_stop(record)
        elif record.source is None:
            self.card_requests.dial(record.request.source)
        else:
            self.send_grant(record)

    # Checks: pure questions about the counts of a record.

    def is_complete(self, record: TargetRecord) -> bool:
        """Whether every span of every rank is in and summed, and the aux record is in."""
        if record.span_count is None or not self.has_aux(record) or not self.is_summed(record):
            return False
        if record.executor is Executor.SOURCE_WRITES:
            return self.is_written(record)
        # Without a generator: it is asked after every message and report.
        for rank in self._card.ranks:  # noqa: SIM110
            if len(record.moved.get(rank.rank, ())) != record.span_count:
                return False
        return True

    def is_written(self, record: TargetRecord) -> bool:
        """Whether every byte of a source that writes is in: it has confirmed that, or how much our ranks have to count."""
        return record.is_confirmed and record.written_bytes in (None, record.arrived_bytes)

    def is_stamped(self, record: TargetRecord) -> bool:
        """Whether the stamp of the source stands, now that everything is in: then its blocks held this generation until now."""
        stamp, source = record.stamp, record.source
        if stamp is None or source is None:
            return False
        return self._stamps.read(source, stamp.slot) == stamp.value

    def has_aux(self, record: TargetRecord) -> bool:
        """Whether the aux record is in."""
        return record.aux is not None

    def is_quiet(self, record: TargetRecord) -> bool:
        """Whether no copy, of ours or of the source, can write to the blocks of this hand-off any more."""
        if record.open_copies:
            return False
        # One without a grant counts as one that is read: nothing was ever granted to write to.
        return record.executor is Executor.TARGET_READS or record.peer_is_quiet

    def is_summed(self, record: TargetRecord) -> bool:
        """Whether every span of every rank was summed here, or need not be."""
        return not self.compares_sums or len(record.sums) == len(self._card.ranks) * (record.span_count or 0)

    def span_problem(self, record: TargetRecord) -> str:
        """Why the spans are not the whole cache, each part once; empty when they are.

        A source that writes knows itself what it has written, unless its spans are to be summed.
        """
        if record.allocation is None or (record.executor is Executor.SOURCE_WRITES and not self.compares_sums):
            return ""
        whole = Span(0, 0, record.allocation.tokens, self._layers.start, self._layers.stop)
        return span_problem(record.spans.values(), whole)

    def sums_problem(self, record: TargetRecord) -> str:
        """Why what lies in our blocks is not what the source summed; empty when it is, or is not compared."""
        if not self.compares_sums:
            return ""
        return sums_problem(record.spans.values(), sums_by_leg(record.sums), record.source_sums)

    @property
    def compares_sums(self) -> bool:
        """Whether what was moved has to be compared with the source's checksums."""
        return self._settings.integrity is not Integrity.OFF

    # Checksums.

    def sum_moved(self, record: TargetRecord) -> None:
        """Have each rank sum what has arrived there: all of it once nothing is missing; before that, what is worth it.

        An order costs as much as summing some hundred KiB, and what is left for the end about a millisecond.
        """
        for rank, numbers in record.unsummed.items():
            is_all = len(record.moved[rank]) == record.span_count
            if numbers and (is_all or record.unsummed_size[rank] >= self.sum_size):
                spans = tuple([record.spans[number] for number in numbers])
                record.summing.update(numbers)
                record.unsummed_size[rank] = 0
                numbers.clear()
                self._sum_spans(record, (rank,), spans)

    def sum_written(self, record: TargetRecord) -> None:
        """Sums are compared. Once a source that writes has confirmed it, have every rank sum what lies in our blocks.

        Not before: only the source knows when its last byte has arrived.
        """
        is_known = self.is_written(record) and len(record.spans) == record.span_count
        if is_known and not record.summing:
            record.summing |= record.spans.keys()
            self._sum_spans(record, [rank.rank for rank in self._card.ranks], tuple(record.spans.values()))

    def _sum_spans(self, record: TargetRecord, ranks: Collection[int], spans: tuple[Span, ...]) -> None:
        if record.allocation is not None and record.source is not None:
            order = SumSpans(
                copy=record.copy,
                side=Side.TARGET,
                blocks=record.allocation.blocks,
                spans=spans,
                cached_tokens=record.allocation.cached_tokens,
                integrity=self._settings.integrity,
                total_tokens=record.allocation.tokens,
                peer=record.source,
            )
            for rank in ranks:
                self._ranks.send(rank, order)

    def _drop_sums(self, record: TargetRecord) -> None:
        if record.summing:
            self._ranks.send_all(DropSums(Side.TARGET, record.key))
        record.unsummed.clear()
        record.unsummed_size.clear()
        record.summing.clear()
        record.sums.clear()
        record.source_sums.clear()

    # Aux records that come over the data transport: read out of a slot of the source, checked, else sent in a message.

    def _choose_aux_channel(self, record: TargetRecord) -> AuxChannel:
        """How the aux record is to travel; in a message where one of the two sides has no area for it."""
        if self._settings.aux_channel is AuxChannel.CONTROL:
            return AuxChannel.CONTROL
        if self.aux_slots.area is None or record.source_area is None:
            self.aux_fallbacks_total["no aux area"] += 1
            return AuxChannel.CONTROL
        return AuxChannel.DATA

    def _fetch_aux(self, record: TargetRecord, pointer: AuxPointer) -> None:
        """Have rank 0 read what a pointer leads to; what does not lie in a slot of the source's area is never read."""
        if record.aux is not None or record.aux_pointer is not None or record.aux_channel is AuxChannel.CONTROL:
            self.late_total["aux"] += 1
        elif record.source is None or record.source_area is None or pointer_problem(pointer, record.source_area):
            self._fall_back(record, "bad pointer")
        elif refusal := self.aux_slots.refusal(pointer.size_bytes):
            self._fall_back(record, refusal)
        else:
            record.aux_pointer = pointer
            order = ReadAux(
                copy=record.copy,
                peer=record.source,
                offset=pointer.offset,
                slot=self.aux_slots.take(),
                size_bytes=pointer.size_bytes,
            )
            self._ranks.send(0, order)

    def on_aux_read(self, report: AuxRead) -> None:
        """Rank 0 does not touch a slot any more: take the record, if it is the right one and still needed.

        The slot is given back here and nowhere else: a read that is in flight when its hand-off ends still writes to the slot.
        """
        self.aux_slots.give(report.slot)
        record, pointer = self.live.get(report.copy.key), None
        if record is not None and record.grant == report.copy.grant and record.state not in _CLOSING:
            pointer, record.aux_pointer = record.aux_pointer, None
        if record is None or pointer is None:
            self.late_total["aux"] += 1
        elif report.error:
            self._fall_back(record, "not read")
        else:
            self._take_aux(record, pointer, report.data)

    def _take_aux(self, record: TargetRecord, pointer: AuxPointer, data: bytes) -> None:
        try:
            record.aux = unpack_aux(data, pointer, record.key, record.grant)
        except ProtocolError:
            self._fall_back(record, "not the record")
        else:
            self._progress(record)
            self._settle(record)

    def _fall_back(self, record: TargetRecord, cause: str) -> None:
        """Have the record sent in a message: a repeated grant names the channel, and makes the source send everything again."""
        self.aux_fallbacks_total[cause] += 1
        record.aux_channel = AuxChannel.CONTROL
        self.send_grant(record)

    # Helpers.

    def _send(self, record: TargetRecord, message: Message) -> None:
        if record.source is not None:
            record.question = self._questions.next_number()
            self._control.send(record.source, message)

    def _note(self, record: TargetRecord, stage: Stage, span: Span | None = None, outcome: Outcome | None = None) -> None:
        if self._observe is not no_observer:
            text = record.reason if outcome is not None else ""
            self._observe(note(record.key, Side.TARGET, stage, self._clock(), span, outcome=outcome, text=text))

    def _take_source(self, record: TargetRecord, card: Card) -> None:
        """The card of the peer at the source's address is known: it is the source, if it is the incarnation that was meant.

        Another incarnation never had the cache: the process that computed it is gone, and with it everything it could write.
        """
        if not self._is_named(record, card):
            record.peer_is_quiet = True
            expected = record.request.source_incarnation
            reason = f"the source restarted: incarnation {expected} is gone, {card.incarnation} answers in its place"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            record.source = card.incarnation
            record.source_area = card.ranks[0].aux
            record.reads_stamps = self._stamps.follow(card)
            self.step(record, TargetEvent.PEER_KNOWN)

    @staticmethod
    def _is_named(record: TargetRecord, card: Card) -> bool:
        return record.request.source_incarnation in (None, card.incarnation)

    def _waiting_for(self, address: ControlAddress) -> list[TargetRecord]:
        return [record for record in self.live.values() if record.source is None and record.request.source == address]

    def _unanswered(self, sender: Incarnation, key: HandoffKey) -> TargetRecord | None:
        record = self.live.get(key)
        return record if record is not None and record.source == sender and record.state in _UNANSWERED else None

    def _granted_before(self, epoch: int) -> list[TargetRecord]:
        return [record for record in self.live.values() if record.grant and record.epoch < epoch]

    def _send_end_again(self, sender: Incarnation, key: HandoffKey, grant: int) -> None:
        """A source lists what is over here: our last message to it is lost, unless it was sent only just now."""
        end = self._ended.get((key, grant)) or _TargetEnd(Outcome.FAILED, -math.inf, 0)
        if self._clock() - end.at < self._limits.retry:
            return
        if end.outcome is Outcome.DELIVERED:
            self._control.send(sender, Release(key, grant, end.stamp))
        else:
            reason = "the target has ended it"
            stop = Stop(key=key, grant=grant, outcome=end.outcome, reason=reason, sequence=end.sequence)
            self._control.send(sender, stop)

    def _refuse_surplus(self, record: TargetRecord) -> None:
        """More spans than there are to be: nothing shows which of them are the right ones."""
        if record.span_count is not None and len(record.spans) > record.span_count:
            reason = f"the source announced {len(record.spans)} spans and counts {record.span_count}"
            self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)

    def _forget(self, record: TargetRecord) -> None:
        del self.live[record.key]
        self.quarantined_blocks -= record.quarantined
        self._timers.drop(record.key)
        self._drop_sums(record)
        end = _TargetEnd(_OUTCOMES[record.state], self._clock(), record.sequence, _value_of(record.stamp))
        self._ended[record.key, record.grant] = end
        for rank, copy in record.open_copies.items():
            self._ranks.send(rank, CloseCopy(copy))

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


def _by_leg(sums: tuple[SpanSum, ...]) -> dict[tuple[int, int], int]:
    return {(each.leg, each.span): each.value for each in sums}


def _value_of(stamp: Stamp | None) -> int:
    return 0 if stamp is None else stamp.value
