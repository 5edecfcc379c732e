"""The source half of a coordinator: announces what is computed, keeps it under a lease, confirms it, gives it back once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvbaton.agent.engine_port import Offer, SourceEnded
from kvbaton.agent.ports import LegFailed, LegId, LegMoved, LegReport, LegStopped, LegSummed
from kvbaton.agent.records import Declined, SourceRecord
from kvbaton.agent.source_effects import SourceEffects
from kvbaton.core.handoff import (
    AuxWay,
    BlockLists,
    HandoffKey,
    Incarnation,
    Integrity,
    Mode,
    Outcome,
    Span,
    key_problem,
    span_problem,
)
from kvbaton.core.lifecycle import SourceEvent, SourceState
from kvbaton.core.messages import (
    MAX_REASON,
    ConfirmAsk,
    Grant,
    Heartbeat,
    Over,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
)
from kvbaton.core.timeline import Stage

__all__ = ["SourceRecord", "SourceSide"]

_MAX_PARKED = 4096
_MAX_TAKEN = 1024
_QUIET = {
    Outcome.FAILED: SourceEvent.QUIET_FAILED,
    Outcome.CANCELLED: SourceEvent.QUIET_CANCELLED,
    Outcome.EXPIRED: SourceEvent.QUIET_EXPIRED,
}


class SourceSide(SourceEffects):
    """All live hand-offs that this instance is the source of. A hand-off belongs to the first target that speaks for it."""

    # What the engine says.

    def expect(self, key: HandoffKey, prompt: str) -> None:
        """The engine will prefill `key`; a grant for the same prompt that came earlier is taken up."""
        if problem := key_problem(key):
            self._engine(SourceEnded(key, Outcome.FAILED, problem))
            return
        record = self.live.get(key)
        if record is not None and record.state is SourceState.PARKED and not self.same_prompt(record, prompt):
            self._end_by(record, SourceEvent.ABORTED, Outcome.FAILED, "the source has another prompt of that transfer id")
            record = None
        if record is None and (declined := self._taken_as_declined(key, prompt)) is not None:
            self._engine(SourceEnded(key, Outcome.CANCELLED, declined.reason))
        elif record is None:
            self.live[key] = self._new_record(key, SourceState.QUEUED)
            self.live[key].prompt = prompt
        elif record.state is SourceState.PARKED:
            record.is_expected = True
            self.step(record, SourceEvent.EXPECTED)
        else:
            self._engine(SourceEnded(key, Outcome.FAILED, f"hand-off {key} is live already"))

    def same_prompt(self, record: SourceRecord, prompt: str) -> bool:
        """Whether a hand-off is about this very prompt; a transfer id alone proves nothing."""
        return record.prompt == prompt

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """The engine has computed spans; they are announced as soon as there is a grant."""
        record = self._expected(key)
        if record is None or record.state in (SourceState.RETRACTING, SourceState.STOPPING):
            self.late_total["spans"] += 1
            return
        if record.offer is not None:
            reason = f"the engine told of {len(spans)} more spans after it had offered the whole cache"
            self._end_by(record, SourceEvent.ABORTED, Outcome.FAILED, reason)
            return
        record.blocks = blocks
        record.spans.extend(spans)
        self.step(record, SourceEvent.SPAN_READY)

    def offer(self, offer: Offer, whole: Callable[[], Span]) -> None:
        """The prefill is complete. `whole` makes the one span of a cache of which no spans were told before."""
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
        """The engine needs the blocks for something else; it is told when they are free."""
        record = self._expected(key)
        if record is None:
            self.late_total["retract"] += 1
            return
        self.step(record, SourceEvent.PREEMPTED)
        self._settle(record)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """The engine gives it up."""
        if (record := self.live.get(key)) is not None:
            self._end_by(record, SourceEvent.ABORTED, Outcome.CANCELLED, reason)

    def stop(self, reason: str) -> None:
        """Give everything up."""
        for key in list(self.live):
            self.cancel(key, reason)

    # What the target says.

    def on_grant(self, sender: Incarnation, grant: Grant) -> None:
        """A target has blocks. A number counts once; the same number again only repeats what was announced."""
        self._is_wanted_again(grant.key)
        record = self.live.get(grant.key)
        if record is not None and record.target == sender and record.grant_number == grant.grant:
            record.announced = 0
            if grant.aux_way is AuxWay.CONTROL and record.grant is not None:
                record.grant = msgspec.structs.replace(record.grant, aux_way=grant.aux_way)
            self.step(record, SourceEvent.GRANTED)
            self._confirm_again(record)
        elif not self.use_grant(sender, grant):
            self.late_total["grant"] += 1
            if (end := self._end_of(sender, grant.key, grant.grant)) is not None:
                self._control.send(sender, end)
            else:
                self._refuse(sender, grant, "this grant was used before", stale=True)
        elif record is None:
            self._park(sender, grant)
        elif not self.same_prompt(record, grant.prompt):
            self._refuse(sender, grant, "the source has another prompt of that transfer id")
            if record.grant is None and record.target == sender:
                record.target = None
        elif record.grant is None and record.target in (None, sender):
            record.target, record.grant = sender, grant
            self.step(record, SourceEvent.GRANTED)
            self._settle(record)
        elif record.target == sender:
            self._refuse(sender, grant, "an earlier grant for it was given up")
            self._end_by(record, SourceEvent.STOP_ASKED, Outcome.FAILED, "the target granted it anew")
        else:
            self._refuse(sender, grant, "it belongs to another target")

    def use_grant(self, sender: Incarnation, grant: Grant) -> bool:
        """Use the number of a grant up; false when that was done before."""
        return self._windows.use(sender, grant.grant)

    def on_confirm_ask(self, sender: Incarnation, ask: ConfirmAsk) -> None:
        """A target has read everything: confirm that the blocks never changed, or say that they did."""
        record = self._owned(sender, ask.key, ask.grant)
        if record is None:
            self._control.send(sender, self._over(sender, ask.key, ask.grant))
        elif not self.still_holds(record, ask):
            self._control.send(sender, Retracted(ask.key, ask.grant, record.generation))
        elif record.state is SourceState.SERVING and not self._all_summed(record):
            record.is_asked = True
            self.step(record, SourceEvent.HEARD)
        elif not record.writes or self._all_moved(record):
            self.step(record, SourceEvent.CONFIRM_ASKED)

    def still_holds(self, record: SourceRecord, ask: ConfirmAsk) -> bool:
        """Whether the blocks hold what was announced as the generation that the target has read."""
        return record.generation == ask.generation

    def on_release(self, sender: Incarnation, release: Release) -> None:
        """The target has delivered."""
        record = self._owned(sender, release.key, release.grant)
        if record is None or not record.is_confirmed:
            self.late_total["release"] += 1
        else:
            self.step(record, SourceEvent.RELEASED)

    def on_stop(self, sender: Incarnation, stop: Stop) -> None:
        """The target has ended without delivery; a grant of that number that is still on its way is void."""
        if not stop.grant and not stop.prompt:
            self._stop_whole(sender, stop)
            return
        is_unheard = stop.grant > 0 and self._windows.use(sender, stop.grant)
        record = self.live.get(stop.key)
        if record is None or record.target not in (None, sender) or not self._is_stopped_by(record, stop, is_unheard):
            if record is None and not stop.grant:
                self._remember_declined(sender, stop)
            self._control.send(sender, Stopped(stop.key, stop.grant))
            return
        record.stop_asked = True
        record.target = sender
        self._end_by(record, SourceEvent.STOP_ASKED, _end_here(stop.outcome), f"the target {stop.outcome}: {stop.reason}")

    def _stop_whole(self, sender: Incarnation, stop: Stop) -> None:
        """A target has refused a request as a whole: nobody comes for anything of its transfer id, now or later.

        What has ended here before is no news: it is what came of that request, not what a later one of the same id is about.
        """
        transfer_id, reason = stop.key.transfer_id, f"the target {stop.outcome}: {stop.reason}"
        earlier, verdict = self._declined_whole.get(transfer_id), _end_here(stop.outcome)
        taken = set() if earlier is None or earlier.until < self._clock() else earlier.taken
        taken |= {key for _, key, _ in self._ended if key.transfer_id == transfer_id}
        declined = Declined("", reason, self._clock() + self._limits.defer_timeout, taken)
        self._declined_whole.add(transfer_id, declined)
        for record in [record for key, record in self.live.items() if key.transfer_id == transfer_id]:
            if record.target in (None, sender) and self._is_stopped_by(record, stop, is_unheard=False):
                declined.taken.add(record.key)
                self._end_by(record, SourceEvent.STOP_ASKED, verdict, reason)
        self._control.send(sender, Stopped(stop.key, 0))

    def on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        """A target is alive; what it waits for lives on, what is over here is told again."""
        for key, grant in heartbeat.live:
            record = self.live.get(key)
            if record is not None and record.target in (None, sender) and self._speaks_of(record, grant):
                record.target = sender
                self.step(record, SourceEvent.HEARD)
            elif record is None and self._is_wanted_again(key):
                continue
            elif record is None and (end := self._end_of(sender, key, grant)) is not None:
                self._control.send(sender, end)

    def on_peer_gone(self, target: Incarnation, reason: str) -> None:
        """A target is provably gone: what it had goes back."""
        for record in [record for record in self.live.values() if record.target == target]:
            self._end_by(record, SourceEvent.PEER_GONE, Outcome.FAILED, reason)

    # What the ranks and the clock say.

    def on_leg(self, report: LegReport) -> None:
        """A rank tells what became of its leg."""
        record = self.live.get(report.leg.key)
        if record is None or record.open_legs.get(report.rank) != report.leg:
            self.late_total["leg"] += 1
            return
        match report:
            case LegMoved():
                if report.leg.generation == record.generation:
                    record.moved.setdefault(report.rank, set()).add(report.span)
            case LegStopped():
                del record.open_legs[report.rank]
            case LegFailed():
                del record.open_legs[report.rank]
                self._end_by(record, SourceEvent.LEG_FAILED, Outcome.FAILED, report.reason)
        self._settle(record)

    def on_summed(self, report: LegSummed) -> None:
        """A rank has summed a span; without all sums nothing is confirmed."""
        record = self.live.get(report.leg.key)
        if record is None or not record.summing or report.leg != record.leg:
            self.late_total["summed"] += 1
        elif report.error:
            self._end_by(record, SourceEvent.LEG_FAILED, Outcome.FAILED, report.error)
        else:
            record.sums[report.rank, report.span] = report.sums
            self._settle(record)

    def owns_leg(self, leg: LegId) -> bool:
        """Whether a leg moves something out of here by our own hand."""
        record = self.live.get(leg.key)
        return record is not None and leg in record.open_legs.values()

    def tick(self) -> None:
        """End what has had no sign of life from its target for too long."""
        now = self._clock()
        for key in self._alarms.ring(now):
            try:
                self._look_at(self.live[key], now)
            except BaseException:
                self._alarms.set(key, now + self._limits.retry)
                raise

    def _look_at(self, record: SourceRecord, now: float) -> None:
        if self._has_lease(record) and record.lease_until <= now:
            reason = f"no word from the target for {self._limits.defer_timeout:g} s while {record.state}"
            self._end_by(record, SourceEvent.LEASE_OUT, Outcome.EXPIRED, reason)
        else:
            self._watch(record)

    def beat(self) -> dict[Incarnation, Heartbeat]:
        """The heartbeats that are due to targets that wait for something of ours."""
        lists: dict[Incarnation, list[tuple[HandoffKey, int]]] = {}
        for record in self.live.values():
            if record.target is not None and record.state not in (SourceState.PARKED, SourceState.STOPPING):
                lists.setdefault(record.target, []).append((record.key, record.grant_number))
        return {target: Heartbeat(True, tuple(live)) for target, live in lists.items()}

    def next_deadline(self) -> float | None:
        """When something here will want to be looked at; may be early."""
        return self._alarms.next()

    def peers(self) -> set[Incarnation]:
        """Targets that have something of ours."""
        return {record.target for record in self.live.values() if record.target is not None}

    # Helpers.

    def step(self, record: SourceRecord, event: SourceEvent) -> None:
        """Step the machine and perform what its row says; a late event is counted."""
        row = self.table.step(record.state, event)
        if row is None:
            self.late_total[event] += 1
            return
        if record.state is SourceState.PARKED and row.state is not SourceState.PARKED:
            self._parked -= 1
        record.state = row.state
        for effect in row.effects:
            self.effects[effect](record)
        self._watch(record)

    def _new_record(self, key: HandoffKey, state: SourceState) -> SourceRecord:
        self._generation += 1
        return SourceRecord(key, state, self._clock() + self._limits.defer_timeout, self._generation)

    def _watch(self, record: SourceRecord) -> None:
        if self._has_lease(record) and self.live.get(record.key) is record:
            self._alarms.set(record.key, record.lease_until)

    def _park(self, sender: Incarnation, grant: Grant) -> None:
        """A grant for something that the engine does not know (yet)."""
        if grant.mode is Mode.PULL:
            self._refuse(sender, grant, "it is not held here (any more)")
        elif self._parked >= _MAX_PARKED:
            self._refuse(sender, grant, f"{self._parked} grants wait for their prefill already")
        else:
            record = self._new_record(grant.key, SourceState.PARKED)
            record.target, record.grant, record.prompt = sender, grant, grant.prompt
            record.is_expected = False
            self.live[grant.key] = record
            self._parked += 1
            self._watch(record)

    def _refuse(self, sender: Incarnation, grant: Grant, reason: str, *, stale: bool = False) -> None:
        self._control.send(sender, Refused(f"hand-off {grant.key}: {reason}", grant.key, grant.grant, stale))

    def _owned(self, sender: Incarnation, key: HandoffKey, grant: int) -> SourceRecord | None:
        record = self.live.get(key)
        return record if record is not None and record.target == sender and record.grant_number == grant else None

    def _speaks_of(self, record: SourceRecord, grant: int) -> bool:
        """Whether a target that waits with `grant` waits for this; its grant may still be on its way, or not yet made."""
        return grant == 0 or record.grant is None or record.grant_number == grant

    def _expected(self, key: HandoffKey) -> SourceRecord | None:
        """The live hand-off that the engine speaks of; a grant that waits for its prefill is none of its business yet."""
        record = self.live.get(key)
        return record if record is not None and record.is_expected else None

    def _is_stopped_by(self, record: SourceRecord, stop: Stop, is_unheard: bool) -> bool:
        """Whether a stop is about this record: it holds the grant, or would have, had it not been overtaken.

        Without a grant it is about whatever of the same prompt has none, or still waits for the engine.
        """
        if stop.grant:
            return record.grant_number == stop.grant or (record.grant is None and is_unheard)
        is_early = record.grant is None or record.state is SourceState.PARKED
        return is_early and (not stop.prompt or self.same_prompt(record, stop.prompt))

    def _remember_declined(self, sender: Incarnation, stop: Stop) -> None:
        """The engine may still be asked for it; what has ended here before is no news."""
        if self._end_of(sender, stop.key, 0) is None:
            until = self._clock() + self._limits.defer_timeout
            self._declined.add(stop.key, Declined(stop.prompt, f"the target {stop.outcome}: {stop.reason}", until))

    def _taken_as_declined(self, key: HandoffKey, prompt: str) -> Declined | None:
        """The word of a target that will not come for this, which is used up with it."""
        now, declined, whole = self._clock(), self._declined.get(key), self._declined_whole.get(key.transfer_id)
        if declined is not None and declined.prompt == prompt and now <= declined.until:
            self._declined.discard(key)
            return declined
        if whole is not None and key not in whole.taken and now <= whole.until and len(whole.taken) < _MAX_TAKEN:
            whole.taken.add(key)
            return whole
        return None

    def _is_wanted_again(self, key: HandoffKey) -> bool:
        """Whether a target comes after all for what was declined; what it declined does not count for this any more."""
        declined, whole = self._declined.get(key), self._declined_whole.get(key.transfer_id)
        self._declined.discard(key)
        if whole is not None and len(whole.taken) < _MAX_TAKEN:
            whole.taken.add(key)
        return declined is not None or whole is not None

    def _end_of(self, sender: Incarnation, key: HandoffKey, grant: int) -> Over | None:
        """How it ended for this target, or before there was any."""
        return self._ended.get((sender, key, grant)) or (None if grant else self._ended.get((None, key, 0)))

    def _over(self, sender: Incarnation, key: HandoffKey, grant: int) -> Over:
        end = self._end_of(sender, key, grant)
        return end or Over(key, grant, Outcome.FAILED, f"hand-off {key} is not held here (any more)")

    def _has_lease(self, record: SourceRecord) -> bool:
        return record.state not in (SourceState.QUEUED, SourceState.STOPPING)

    def _end_by(self, record: SourceRecord, event: SourceEvent, verdict: Outcome, reason: str) -> None:
        if record.state is SourceState.STOPPING:
            self.late_total[event] += 1
            return
        record.verdict, record.reason = verdict, reason[:MAX_REASON]
        self.failures_total[event] += 1
        self.step(record, event)
        self._settle(record)

    def _all_moved(self, record: SourceRecord) -> bool:
        wanted = {span.number for span in record.spans}
        return all(record.moved.get(rank, set()) >= wanted for rank in range(self._ranks_count))

    def _all_summed(self, record: SourceRecord) -> bool:
        return record.integrity is Integrity.OFF or len(record.sums) == self._ranks_count * len(record.spans)

    def _confirm_again(self, record: SourceRecord) -> None:
        if record.is_confirmed and record.writes and record.state is SourceState.SERVING:
            self.send_confirmation(record)

    def _settle(self, record: SourceRecord) -> None:
        """Raise the events that follow from counts: everything moved and summed, everything quiet."""
        if record.state is SourceState.SERVING and self._all_summed(record):
            if record.writes and not record.is_confirmed and self._all_moved(record):
                self.step(record, SourceEvent.WRITTEN)
            elif record.is_asked and not record.writes:
                record.is_asked = False
                self.step(record, SourceEvent.CONFIRM_ASKED)
        elif record.open_legs:
            return
        elif record.state is SourceState.RETRACTING:
            self.step(record, SourceEvent.QUIET)
        elif record.state is SourceState.STOPPING:
            self.step(record, _QUIET[record.verdict])


def _end_here(outcome: Outcome) -> Outcome:
    """How a source ends whose target has stopped it; nobody delivers by stopping."""
    return Outcome.FAILED if outcome is Outcome.DELIVERED else outcome
