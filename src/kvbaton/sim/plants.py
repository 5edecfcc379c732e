"""Planted bugs: one known mistake each, made by replacing table entries, effects or guards. The core has no switch.

A simulator that does not catch them proves nothing; a test holds each to being caught within 2,000 seeds, by the rule that it
breaks. A new plant is a subclass that overrides the one line of defence (a row, an effect, a check) and a `yield` in `_plants`;
if no seed catches it, the simulator lacks the fault or the check that would, and that is what has to be added. Every rule of
`kvbaton.sim.world.RULES` is broken by a plant. `tools/mutants.py` makes hundreds of smaller mistakes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import structs

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import Landed, Offer, SpansReady
from kvbaton.agent.rank import _Copy, _Moving
from kvbaton.agent.rank_orders import AuxRead, CloseCopy, CopyFailed, CopyReport, PeerFenced, RankOrder, SpansMoved
from kvbaton.agent.rank_sets import RemoteRanks
from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, AuxChannel, Executor, HandoffKey, Incarnation, Outcome, Span
from kvbaton.core.lifecycle import TARGET, Row, SourceEvent, SourceState, TargetEffect, TargetEvent, TargetState
from kvbaton.core.messages import (
    MAX_NUMBER,
    ConfirmAsk,
    Confirmed,
    Envelope,
    Grant,
    Heartbeat,
    Hello,
    Over,
    Refused,
    Release,
    Stopped,
)
from kvbaton.sim.agent_thread import SimDriver
from kvbaton.sim.engine_plants import engine_plants
from kvbaton.sim.instance import Bugs
from kvbaton.sim.plant_rows import with_rows
from kvbaton.sim.socket_plants import socket_plants
from kvbaton.sim.source_plants import source_plants
from kvbaton.sim.stamp_plants import OfTheDead, stamp_plants
from kvbaton.sim.transport import SimRank
from kvbaton.sim.vllm_plants import vllm_plants
from kvbaton.transport.base import Completion

__all__ = ["PLANTS", "Plant"]


@dataclass(frozen=True, slots=True)
class Plant:
    """One mistake: its description, the rule that it breaks, and the classes that make it."""

    mistake: str
    rule: str
    bugs: Bugs


class _FreedBeforeAcknowledgement(TargetSide):
    table = with_rows(
        TARGET,
        {
            (state, event): Row(TargetState.FAILED, (TargetEffect.SEND_STOP, TargetEffect.RETURN_BLOCKS))
            for state in (TargetState.GRANTED, TargetState.FILLING)
            for event in (TargetEvent.ABORTED, TargetEvent.NO_PROGRESS)
        },
    )


class _FreedOnTimeAlone(TargetSide):
    table = with_rows(
        TARGET,
        {
            (state, TargetEvent.STOP_LATE): Row(TargetState.FAILED, (TargetEffect.RETURN_BLOCKS,))
            for state in (TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED)
        },
    )


class _EpochNotChecked(TargetSide):
    """Takes answers to an earlier grant of the same key for answers to this one."""

    def current(self, sender: Incarnation, key: HandoffKey, grant: int) -> TargetRecord | None:
        del grant
        record = self.live.get(key)
        return record if record is not None and record.source == sender else None


class _GenerationNotChecked(SourceSide):
    """Confirms whatever it once announced, also when the blocks have long gone back."""

    def send_prefilled(self, record: SourceRecord) -> None:
        super().send_prefilled(record)
        self._counts()[record.key, record.grant_number] = len(record.spans)

    def on_confirm_ask(self, sender: Incarnation, ask: ConfirmAsk) -> None:
        count = self._counts().get((ask.key, ask.grant))
        if count is None or ask.key in self.live:
            super().on_confirm_ask(sender, ask)
        else:
            self._control.send(sender, Confirmed(ask.key, ask.grant, ask.generation, count))

    def _counts(self) -> dict[tuple[HandoffKey, int], int]:
        counts: dict[tuple[HandoffKey, int], int] = self.__dict__.setdefault("planted_counts", {})
        return counts


class _ConfirmedBeforeRead(TargetSide):
    """Asks for the confirmation first and reads on afterwards."""

    table = with_rows(
        TARGET, {(TargetState.CONFIRMING, TargetEvent.ANNOUNCED): Row(TargetState.CONFIRMING, (TargetEffect.MOVE_SPANS,))}
    )

    def is_complete(self, record: TargetRecord) -> bool:
        if record.executor is Executor.SOURCE_WRITES:
            return super().is_complete(record)
        return record.span_count is not None and self.has_aux(record)

    def on_confirmed(self, sender: Incarnation, confirmed: Confirmed) -> None:
        record = self.current(sender, confirmed.key, confirmed.grant)
        if record is None or super().is_complete(record):
            super().on_confirmed(sender, confirmed)
        else:
            record.is_confirmed = True

    def count_moved(self, record: TargetRecord, report: SpansMoved) -> None:
        super().count_moved(record, report)
        if record.is_confirmed and record.state is TargetState.CONFIRMING and super().is_complete(record):
            self.step(record, TargetEvent.CONFIRMED)


class _ArrivalsNotAwaited(TargetSide):
    """Takes the confirmation of a source that writes for the last byte, although the bytes may be on their way."""

    def is_written(self, record: TargetRecord) -> bool:
        return record.is_confirmed


class _ReplacedTakenForQuiet(TargetSide):
    """Takes another process at the address of a writer, or its death, for the proof that nothing of it lands any more."""

    def can_fence(self, record: TargetRecord) -> bool:
        del record
        return False


class _GivenUpTakenForQuiet(TargetSide):
    """Frees the blocks of a source that is quiet itself, and has bytes on a connection that it gave up."""

    def on_over(self, sender: Incarnation, over: Over) -> None:
        super().on_over(sender, structs.replace(over, may_land=False))

    def on_stopped(self, sender: Incarnation, stopped: Stopped) -> None:
        super().on_stopped(sender, structs.replace(stopped, may_land=False))


class _FailedOverwritten(TargetSide):
    table = with_rows(
        TARGET,
        {
            (TargetState.STOPPING, TargetEvent.QUIET_FAILED): Row(
                TargetState.DELIVERED, (TargetEffect.SEND_RELEASE, TargetEffect.DELIVER)
            )
        },
    )


class _MappingDropped(SourceSide):
    """Forgets a hand-off when its request has been answered, not when the transfer is over."""

    def offer(self, offer: Offer, whole: Callable[[], Span]) -> None:
        super().offer(offer, whole)
        record = self.live.get(offer.key)
        if record is not None and record.state is SourceState.HELD:
            del self.live[offer.key]


class _DeferredForEver(SourceSide):
    """Holds a complete prefill without a lease."""

    def _has_deadline(self, record: SourceRecord) -> bool:
        return record.state is not SourceState.HELD and super()._has_deadline(record)


class _SourceRenewedForEver(SourceSide):
    """Keeps blocks for as long as the target is alive, whether the hand-off gets further or not."""

    def _deadline(self, record: SourceRecord) -> float:
        return super()._deadline(record) if record.state is SourceState.QUEUED else record.lease_until


class _TargetRenewedForEver(TargetSide):
    """Waits for as long as the source is alive, whether the hand-off gets further or not."""

    def _deadline(self, record: TargetRecord) -> float:
        return super()._deadline(record) if record.state is TargetState.QUEUED else record.give_up_at


class _TargetQueuedForEver(TargetSide):
    """Lets a request wait for memory without an end."""

    def _deadline(self, record: TargetRecord) -> float:
        return math.inf if record.state is TargetState.QUEUED else super()._deadline(record)


class _SourceQueuedForEver(SourceSide):
    """Lets a request wait for its target without an end."""

    def _has_deadline(self, record: SourceRecord) -> bool:
        return record.state is not SourceState.QUEUED and super()._has_deadline(record)


class _TargetTrustsAgents(TargetSide):
    """Takes a heartbeat for a sign of the source's engine, although only its agents go on."""

    def on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        super().on_heartbeat(sender, structs.replace(heartbeat, step_age_s=0.0))


class _SourceTrustsAgents(SourceSide):
    """Takes a heartbeat for a sign of the target's engine, although only its agents go on."""

    def on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        super().on_heartbeat(sender, structs.replace(heartbeat, step_age_s=0.0))


class _CompletionCountedTwice(TargetSide):
    """Counts reports instead of spans, so that a report which comes twice hides a span that is missing."""

    def count_moved(self, record: TargetRecord, report: SpansMoved) -> None:
        super().count_moved(record, report)
        record.moved[report.rank] |= {-1 - span for span in report.spans}

    def is_complete(self, record: TargetRecord) -> bool:
        count = record.span_count
        counted = all(len(record.moved.get(rank.rank, ())) >= (count or 0) for rank in self._card.ranks)
        return count is not None and self.has_aux(record) and (counted or super().is_complete(record))


class _NotRenewedWhileQueued(TargetSide):
    """Sends no heartbeats for requests that wait for memory; their source takes its blocks back."""

    def beat(self) -> dict[Incarnation, Heartbeat]:
        queued = {key for key, record in self.live.items() if record.state is TargetState.QUEUED}
        return {
            source: Heartbeat(from_source=False, live=tuple(entry for entry in beat.live if entry[0] not in queued))
            for source, beat in super().beat().items()
        }


class _StaleIncarnation(Coordinator):
    """Takes frames that were meant for the process which lived at this address before."""

    def is_for_us(self, envelope: Envelope) -> bool:
        del envelope
        return True


class _LateCard(Coordinator):
    """Takes whichever card arrives last for that of the process that lives, and its predecessor at the address for dead."""

    def needs_answer_after(self, hello: Hello, via: ControlAddress) -> int | None:
        del hello, via
        return None


class _AsksForEveryFrame(Coordinator):
    """Asks an unknown peer for its card with each of its frames, and gets everything again each time."""

    def on_frame(self, envelope: Envelope, via: ControlAddress | None) -> None:
        self.target.card_requests.on_card_of(envelope.sender)
        super().on_frame(envelope, via)


class _LateGrant(SourceSide):
    """Does not use grant numbers up: a grant that is delivered again later starts its hand-off again."""

    def use_grant(self, sender: Incarnation, grant: Grant) -> bool:
        del sender, grant
        return True


class _GrantLeap(SourceSide):
    """Believes every number: after one forged grant, each grant of the real target is stale."""

    def on_grant(self, sender: Incarnation, grant: Grant) -> None:
        self._windows.reach = MAX_NUMBER
        super().on_grant(sender, grant)


class _OwnCount(TargetSide):
    """Counts its grants on, whatever the source has used: once the two differ, every grant is stale."""

    def _grant_anew(self, record: TargetRecord, source: Incarnation, used_up_to: int) -> None:
        del used_up_to
        super()._grant_anew(record, source, record.sequence)


class _WrongRank(TargetSide):
    """Counts the span of one rank for every rank."""

    def count_moved(self, record: TargetRecord, report: SpansMoved) -> None:
        super().count_moved(record, report)
        for rank in self._card.ranks:
            record.moved.setdefault(rank.rank, set()).update(report.spans)


class _RankFailureLost(TargetSide):
    """Takes a failed copy of one rank for a complete one."""

    def on_copy(self, report: CopyReport) -> None:
        record = self.live.get(report.copy.key)
        if not isinstance(report, CopyFailed) or record is None or record.open_copies.get(report.rank) != report.copy:
            super().on_copy(report)
            return
        record.moved[report.rank] = set(record.spans)
        self._settle(record)


class _AuxNotCounted(TargetSide):
    """Delivers before the aux record is in."""

    def has_aux(self, record: TargetRecord) -> bool:
        del record
        return True

    def deliver(self, record: TargetRecord) -> None:
        record.aux = record.aux or Aux(token_id=-1, logprob=0.0)
        super().deliver(record)


class _SumsNotCompared(TargetSide):
    def sums_problem(self, record: TargetRecord) -> str:
        del record
        return ""


class _RetractedAccepted(TargetSide):
    """Goes on with what was announced before a retraction, and mixes two generations."""

    def follow_generation(self, record: TargetRecord, generation: int) -> bool:
        record.generation = max(record.generation, generation)
        return True


def _sides(source: type[SourceSide] = SourceSide, target: type[TargetSide] = TargetSide) -> Bugs:
    return Bugs(coordinator=type("PlantedCoordinator", (Coordinator,), {"source_side": source, "target_side": target}))


class _MovedOfAnEarlierGeneration(SourceSide):
    """Counts what was moved before a retraction as if it were of the generation that was computed since."""

    def on_copy(self, report: CopyReport) -> None:
        record = self.live.get(report.copy.key)
        if isinstance(report, SpansMoved) and record is not None and record.open_copies.get(report.rank) == report.copy:
            record.moved.setdefault(report.rank, set()).update(report.spans)
        super().on_copy(report)


class _SameGeneration(SourceSide):
    """Keeps the number of the generation when what was announced is void: the target takes old bytes for new ones."""

    def new_generation(self, record: SourceRecord) -> None:
        before = record.generation
        super().new_generation(record)
        record.generation = before


class _ReleasedByAnEarlierGrant(SourceSide):
    """Takes a release of an earlier grant of the same key for one of this."""

    def on_release(self, sender: Incarnation, release: Release) -> None:
        record = self.live.get(release.key)
        grant = release.grant if record is None else record.grant_number
        super().on_release(sender, structs.replace(release, grant=grant))


class _QuietByAnEarlierEnd(TargetSide):
    """Takes an end from before the source had the grant for the promise that it never writes under that grant."""

    def on_over(self, sender: Incarnation, over: Over) -> None:
        record = self._unanswered(sender, over.key)
        if record is not None and not over.grant:
            record.peer_is_quiet = True
        super().on_over(sender, over)


class _QuietByAnyRefusal(TargetSide):
    """Takes a refusal that names no number for the promise that the source writes under no grant of that hand-off."""

    def _end_unnumbered(self, record: TargetRecord, source: Incarnation, refused: Refused) -> None:
        record.peer_is_quiet = True
        super()._end_unnumbered(record, source, refused)


class _LandedTwice(TargetSide):
    """Lets decode start again when the source confirms again."""

    def deliver(self, record: TargetRecord) -> None:
        super().deliver(record)
        if record.aux is not None and record.executor is Executor.SOURCE_WRITES:
            self._engine(Landed(record.key, record.aux, self._stats(record)))


class _DeliveredWithoutRelease(SourceSide):
    """Takes its own confirmation for the delivery."""

    def send_confirmation(self, record: SourceRecord) -> None:
        super().send_confirmation(record)
        self._timers.set(record.key, self._clock())

    def _look_at(self, record: SourceRecord, now: float) -> None:
        if record.is_confirmed and record.state is SourceState.SERVING:
            self.step(record, SourceEvent.RELEASED)
        else:
            super()._look_at(record, now)


class _ReleasedThenFailed(TargetSide):
    """Releases its source, and fails for a reason of its own afterwards."""

    table = with_rows(
        TARGET,
        {
            (TargetState.CONFIRMING, TargetEvent.CONFIRMED): Row(
                TargetState.STOPPING, (TargetEffect.SEND_RELEASE, TargetEffect.QUARANTINE, TargetEffect.STOP_COPY)
            )
        },
    )


class _SlotKept(TargetSide):
    """Takes a slot for every aux record that it has read, and gives only one of the two back."""

    def on_aux_read(self, report: AuxRead) -> None:
        super().on_aux_read(report)
        if not self.aux_slots.refusal(1):
            self.aux_slots.take()


class _CopyNotClosed(SimRank):
    """Keeps a copy open when its hand-off is over."""

    def handle(self, order: RankOrder) -> None:
        if not isinstance(order, CloseCopy):
            super().handle(order)


class _MovedAgain(SourceSide):
    """Has everything written again when a grant is repeated, although only announcements can be lost."""

    def _repeat(self, record: SourceRecord, grant: Grant) -> None:
        record.moving = 0
        super()._repeat(record, grant)


class _RetractedBytesCounted(TargetSide):
    """Reports what was moved before a retraction as a part of what was delivered."""

    def drop_spans(self, record: TargetRecord) -> None:
        before = record.bytes_planned, record.bytes_moved
        super().drop_spans(record)
        record.bytes_planned, record.bytes_moved = before


class _BytesCountedTwice(TargetSide):
    """Reports every byte that was moved twice."""

    def count_moved(self, record: TargetRecord, report: SpansMoved) -> None:
        before = record.bytes_moved
        super().count_moved(record, report)
        record.bytes_moved += record.bytes_moved - before


class _AuxChannelIgnored(TargetSide):
    """Has every aux record sent in a message, whatever was set."""

    def _choose_aux_channel(self, record: TargetRecord) -> AuxChannel:
        del record
        return AuxChannel.CONTROL


class _SilenceNotMeasured(TargetSide):
    """Ends what gets no further, and nothing because its source is silent."""

    def _look_at(self, record: TargetRecord, now: float) -> None:
        if record.capped_at > now:
            record.give_up_at = max(record.give_up_at, now + self._limits.retry)
        super()._look_at(record, now)


class _CauseOverwritten(TargetSide):
    """Takes the last reason to end for the cause, not the first."""

    def _end_by(self, record: TargetRecord, event: TargetEvent, verdict: Outcome, reason: str) -> None:
        if record.state is TargetState.STOPPING:
            record.verdict, record.reason = verdict, reason
        super()._end_by(record, event, verdict, reason)


class _ReleaseLeftToHeartbeats(TargetSide):
    """Leaves it to the next heartbeat of the source to notice that its blocks are not needed any more."""

    def send_release(self, record: TargetRecord) -> None:
        del record


class _NoBackoff(TargetSide):
    """Asks again and again, without a wait."""

    def _ask_again(self, record: TargetRecord, now: float) -> None:
        super()._ask_again(record, now)
        record.retry.at = now + self._limits.retry / 10


class _TicketsKept(SimRank):
    """Remembers every batch that was ever posted."""

    def _complete(self, copy: _Copy, moving: _Moving, completion: Completion) -> None:
        super()._complete(copy, moving, completion)
        self._owners[completion.ticket] = copy.order.copy, 0


class _GrantNotRepeated(SourceSide):
    """Sends nothing again for a grant that comes again."""

    def _repeat(self, record: SourceRecord, grant: Grant) -> None:
        del record, grant


class _RefusalOfAnyNumber(TargetSide):
    """Takes the refusal of a number that its grant never had for one of the grant."""

    def on_refused(self, sender: Incarnation, refused: Refused) -> None:
        super().on_refused(sender, structs.replace(refused, sequence=0))


class _PreemptedFails(SourceSide):
    """Fails a prefill that its engine has to start again."""

    def retract(self, key: HandoffKey) -> None:
        if (record := self._expected(key)) is not None:
            self._end_by(record, SourceEvent.ABORTED, Outcome.FAILED, "preempted")


class _SumsKept(TargetSide):
    """Keeps the checksums of a generation that was retracted."""

    def _drop_sums(self, record: TargetRecord) -> None:
        sums = dict(record.sums)
        super()._drop_sums(record)
        record.sums |= sums


class _AlarmNotSet(SourceSide):
    """Sets no alarm for the end of the time in the queue."""

    def expect(self, key: HandoffKey, prompt: str) -> None:
        super().expect(key, prompt)
        self._timers.drop(key)


class _FencedByOneRank(Coordinator):
    """Takes the fence of one rank for one of all ranks."""

    def _on_peer_fenced(self, report: PeerFenced) -> None:
        for rank in self.card.ranks:
            super()._on_peer_fenced(structs.replace(report, rank=rank.rank))


class _RankLossIgnored(RemoteRanks):
    """Notices that the channel of a rank is closed, and lets the instance go on without that rank."""

    def _lose(self, error: Exception) -> None:
        del error
        self._is_lost = True


class _FramesBeforeCommands(SimDriver):
    """Reads frames before it carries out the engine's calls: a grant overtakes the call that it is for."""

    def _take_commands(self) -> None:
        if not self.__dict__.get("planted_turn"):
            super()._take_commands()

    def _turn(self) -> None:
        self.__dict__["planted_turn"] = True
        try:
            super()._turn()
        finally:
            self.__dict__["planted_turn"] = False
        self._take_commands()


class _FirstBlocksKept(SimDriver):
    """Announces spans that waited together with the blocks of the first of them."""

    def _take_spans(self, ready: tuple[SpansReady, ...]) -> None:
        first = {each.key: each.blocks for each in reversed(ready)}
        waiting = [each for each in self._commands if isinstance(each, tuple)]
        if len(waiting) == len(self._commands):
            changed = [tuple(each._replace(blocks=first.get(each.key, each.blocks)) for each in some) for some in waiting]
            self._commands.clear()
            self._commands.extend(changed)
        super()._take_spans(ready)


class _ConfirmedWhenAsked(SourceSide):
    """Confirms what it writes when it is asked to, whether the last byte has arrived or not."""

    def on_confirm_ask(self, sender: Incarnation, ask: ConfirmAsk) -> None:
        record = self._owned(sender, ask.key, ask.grant)
        if record is not None and record.writes and self.still_holds(record, ask):
            self.step(record, SourceEvent.CONFIRM_ASKED)
        else:
            super().on_confirm_ask(sender, ask)


class _EveryPeerFenced(TargetSide):
    """Registers its memory anew where it would be enough to end the session of one peer."""

    table = with_rows(
        TARGET,
        {
            (TargetState.STOPPING, TargetEvent.STOP_LATE): Row(
                TargetState.ISOLATED, (TargetEffect.SEND_STOP, TargetEffect.RESET_REGION)
            )
        },
    )


def _plants() -> Iterator[tuple[str, str, str, Bugs]]:
    early = _sides(target=_FreedBeforeAcknowledgement)
    yield "freed-before-acknowledgement", "block freed before the acknowledgement", "epoch", early
    yield "freed-on-time-alone", "target freed on time alone", "epoch", _sides(target=_FreedOnTimeAlone)
    yield "quiet-by-an-earlier-end", "end without the grant taken for quiet", "epoch", _sides(target=_QuietByAnEarlierEnd)
    yield "quiet-by-any-refusal", "refusal without a number taken for quiet", "epoch", _sides(target=_QuietByAnyRefusal)
    yield "epoch-not-checked", "epoch not checked", "epoch", _sides(target=_EpochNotChecked)
    yield "generation-not-checked", "generation not checked", "foreign byte", _sides(source=_GenerationNotChecked)
    after = "confirmed after the last byte"
    yield "confirmed-before-read", "confirmation taken before the read", after, _sides(target=_ConfirmedBeforeRead)
    yield "completion-counted-twice", "duplicate completion counted twice", after, _sides(target=_CompletionCountedTwice)
    yield "wrong-rank", "span counted for the wrong rank", after, _sides(target=_WrongRank)
    yield "arrivals-not-awaited", "bytes on their way taken for written", "foreign byte", _sides(target=_ArrivalsNotAwaited)
    moved = _sides(source=_MovedOfAnEarlierGeneration)
    yield "moved-of-an-earlier-generation", "span of a retracted generation counted", "left alone", moved
    yield "failed-overwritten", "failed overwritten by done", "confirmed before delivered", _sides(target=_FailedOverwritten)
    released = _sides(source=_ReleasedByAnEarlierGrant)
    yield "released-by-an-earlier-grant", "grant of a release ignored", "released by its target", released
    unreleased = _sides(source=_DeliveredWithoutRelease)
    yield "delivered-without-release", "confirmation taken for the delivery", "released by its target", unreleased
    yield "mapping-dropped", "mapping dropped at request end", "spurious failure", _sides(source=_MappingDropped)
    yield "deferred-for-ever", "deferred push never expiring", "silent engine", _sides(source=_DeferredForEver)
    renewed = _sides(source=_SourceRenewedForEver, target=_TargetRenewedForEver)
    yield "renewed-for-ever", "hand-off kept alive by heartbeats alone", "hard end", renewed
    yield "target-queued-for-ever", "no deadline while queued for memory", "hard end", _sides(target=_TargetQueuedForEver)
    yield "source-queued-for-ever", "no deadline while queued for a grant", "hard end", _sides(source=_SourceQueuedForEver)
    yield "target-trusts-agents", "hung engine of a source not noticed", "silent engine", _sides(target=_TargetTrustsAgents)
    yield "source-trusts-agents", "hung engine of a target not noticed", "silent engine", _sides(source=_SourceTrustsAgents)
    unrenewed = _sides(target=_NotRenewedWhileQueued)
    yield "not-renewed-while-queued", "lease not renewed while queued", "spurious failure", unrenewed
    yield "stale-incarnation", "stale incarnation accepted", "epoch", Bugs(coordinator=_StaleIncarnation)
    yield "late-card", "card of a dead process taken for a new one", "epoch", Bugs(coordinator=_LateCard)
    replaced = _sides(target=_ReplacedTakenForQuiet)
    yield "replaced-taken-for-quiet", "writer replaced at its address not fenced", "epoch", replaced
    given_up = _sides(target=_GivenUpTakenForQuiet)
    yield "given-up-taken-for-quiet", "bytes of a connection that was given up not fenced", "epoch", given_up
    yield "late-grant", "late grant resurrecting a finished hand-off", "resurrection", _sides(source=_LateGrant)
    yield "grant-leap", "grant number taken however far ahead", "heals", _sides(source=_GrantLeap)
    yield "own-count", "stale grant repeated with the next number", "heals", _sides(target=_OwnCount)
    yield "rank-failure-lost", "one rank's failure lost", after, _sides(target=_RankFailureLost)
    yield "aux-not-counted", "aux not counted", "foreign aux", _sides(target=_AuxNotCounted)
    yield "sums-not-compared", "checksums not compared", "corrupt byte", _sides(target=_SumsNotCompared)
    yield "retracted-accepted", "retracted chunk accepted", "spurious failure", _sides(target=_RetractedAccepted)
    yield "same-generation", "retraction without a new generation", "mixed generations", _sides(source=_SameGeneration)
    yield "landed-twice", "decode started twice", "one outcome", _sides(target=_LandedTwice)
    yield "released-then-failed", "source released before the end", "legal pair", _sides(target=_ReleasedThenFailed)
    yield "slot-kept", "aux slot not given back", "every slot is back", _sides(target=_SlotKept)
    yield "copy-not-closed", "copy left open after its hand-off", "everything ends", Bugs(rank=_CopyNotClosed)
    yield "moved-again", "spans written again with a repeated grant", "nothing twice", _sides(source=_MovedAgain)
    retracted = _sides(target=_RetractedBytesCounted)
    yield "retracted-bytes-counted", "bytes of a retracted generation reported", "counts agree", retracted
    yield "bytes-counted-twice", "bytes reported twice", "counted", _sides(target=_BytesCountedTwice)
    yield "aux-channel-ignored", "setting of the aux channel ignored", "as set", _sides(target=_AuxChannelIgnored)
    yield "silence-not-measured", "no deadline for a silent source", "on time", _sides(target=_SilenceNotMeasured)
    yield "cause-overwritten", "later cause of an end reported", "named end", _sides(target=_CauseOverwritten)
    left = _sides(target=_ReleaseLeftToHeartbeats)
    yield "release-left-to-heartbeats", "release not sent when delivered", "prompt", left
    yield "no-backoff", "questions repeated without a wait", "no needless message", _sides(target=_NoBackoff)
    every_frame = Bugs(coordinator=_AsksForEveryFrame)
    yield "asks-for-every-frame", "card asked for with every frame", "no needless message", every_frame
    yield "grant-not-repeated", "grant that comes again ignored", "taken", _sides(source=_GrantNotRepeated)
    any_number = _sides(target=_RefusalOfAnyNumber)
    yield "refusal-of-any-number", "refusal of another number taken", "left alone", any_number
    yield "preempted-fails", "preempted request failed", "spurious failure", _sides(source=_PreemptedFails)
    yield "sums-kept", "checksums of a retracted generation kept", "counts agree", _sides(target=_SumsKept)
    yield "alarm-not-set", "no alarm while queued for a grant", "alarm", _sides(source=_AlarmNotSet)
    yield "every-peer-fenced", "all memory registered anew for one peer", "weakest fence", _sides(target=_EveryPeerFenced)
    one_rank = Bugs(coordinator=_FencedByOneRank)
    yield "fenced-by-one-rank", "fence of one rank taken for one of all", "fenced everywhere", one_rank
    yield "rank-loss-ignored", "instance goes on without a rank", "heals", Bugs(remote_ranks=_RankLossIgnored)
    frames_first = Bugs(driver=_FramesBeforeCommands)
    yield "frames-before-commands", "frames read before calls of the engine", "spurious failure", frames_first
    first_blocks = Bugs(driver=_FirstBlocksKept)
    yield "first-blocks-kept", "spans announced with the blocks of the first", "spurious failure", first_blocks
    yield "confirmed-when-asked", "question answered before the last byte", after, _sides(source=_ConfirmedWhenAsked)
    yield "tickets-kept", "batches remembered for ever", "nothing kept", Bugs(rank=_TicketsKept)
    for name, mistake, rule, source in source_plants():
        yield name, mistake, rule, _sides(source=source)
    for name, mistake, rule, source, target in stamp_plants():
        yield name, mistake, rule, _sides(source, target)
    yield "stamp-of-the-dead", "stamp of a dead process taken", "confirmed before delivered", Bugs(stamps=OfTheDead)
    for name, mistake, rule, classes in engine_plants():
        yield name, mistake, rule, Bugs(embedded=classes)
    for name, mistake, rule, vllm in vllm_plants():
        yield name, mistake, rule, Bugs(vllm=vllm)
    for name, mistake, rule, sockets in socket_plants():
        yield name, mistake, rule, Bugs(sockets=sockets)


PLANTS: dict[str, Plant] = {name: Plant(mistake, rule, bugs) for name, mistake, rule, bugs in _plants()}
"""Name -> mistake."""
