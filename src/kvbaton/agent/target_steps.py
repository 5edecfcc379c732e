"""How a target side goes on: one step of its table at a time, the events that follow from counts, and when to look again."""

from __future__ import annotations

import math

from kvbaton.agent.records import TargetRecord
from kvbaton.agent.target_checks import TargetChecks
from kvbaton.core.handoff import Executor, Outcome
from kvbaton.core.lifecycle import TargetEvent, TargetState
from kvbaton.core.messages import MAX_REASON
from kvbaton.core.timeline import Stage

__all__ = ["CLOSING", "TargetSteps"]

CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
"""States in which the end is certain, and somebody may still write."""

_QUIET = {
    Outcome.FAILED: TargetEvent.QUIET_FAILED,
    Outcome.CANCELLED: TargetEvent.QUIET_CANCELLED,
    Outcome.EXPIRED: TargetEvent.QUIET_EXPIRED,
}
_ASKING_AGAIN = frozenset({TargetState.GREETING, TargetState.GRANTED, TargetState.FILLING, TargetState.CONFIRMING}) | CLOSING


class TargetSteps(TargetChecks):
    """Steps the machines of a target side. Whatever is heard ends here."""

    def step(self, record: TargetRecord, event: TargetEvent) -> None:
        """Step the machine and perform what its row says; a late event is counted."""
        row = self.table.step(record.state, event)
        if row is None:
            self.late_total[event] += 1
            return
        if row.state is not record.state:
            if row.state in CLOSING and record.state not in CLOSING:
                self._quarantine(record)
            record.state = row.state
            self._progress(record)
        for effect in row.effects:
            self.effects[effect](record)
        self._watch(record)

    def _watch(self, record: TargetRecord) -> None:
        if self.live.get(record.key) is not record:
            return
        if record.state in CLOSING:
            self._alarms.set(record.key, record.stop_until)
        if self._asks_again(record):
            self._alarms.set(record.key, record.retry_at)
        if self._has_deadline(record):
            self._alarms.set(record.key, record.give_up_at)

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

    def _asks_again(self, record: TargetRecord) -> bool:
        if record.state is TargetState.FILLING and self._knows_all(record):
            return False
        return record.state in _ASKING_AGAIN or record.source is None

    def _knows_all(self, record: TargetRecord) -> bool:
        """Whether the source has told everything there is to tell, and only our own legs are waited for."""
        told = record.span_count is not None and record.aux is not None and len(record.spans) >= record.span_count
        return told and (record.executor is Executor.TARGET_READS or record.is_confirmed)

    def _lost_at(self, record: TargetRecord) -> float:
        """From when on a question may be lost, rather than wait its turn behind others that its peer is still answering.

        Peers answer in the order in which they are asked: one that answers, but nothing that was asked later, is busy.
        """
        answered = None if record.source is None else self._answered.get(record.source)
        if answered is None or answered[0] > record.asked:
            return -math.inf
        return answered[1] + record.retry_s

    def _ask_again(self, record: TargetRecord, now: float) -> None:
        record.retry_s = max(record.retry_s, min(record.retry_s * 2, self._limits.beat_s))
        record.retry_at = now + record.retry_s
        if record.state is TargetState.CONFIRMING:
            self.ask_confirmation(record)
        elif record.state in CLOSING:
            self.tell_stop(record)
        elif record.source is None:
            self._greet(record.wanted.source)
        else:
            self.send_grant(record)

    def _has_deadline(self, record: TargetRecord) -> bool:
        return record.state not in CLOSING and record.state is not TargetState.QUEUED

    def _end_by(self, record: TargetRecord, event: TargetEvent, verdict: Outcome, reason: str) -> None:
        if record.state in CLOSING:
            self.late_total[event] += 1
        else:
            record.verdict, record.reason = verdict, reason[:MAX_REASON]
            record.stop_until = self._clock() + self._limits.stop_timeout
            self.failures_total[event] += 1
            self.step(record, event)
        self._settle(record)

    def _settle(self, record: TargetRecord) -> None:
        """Raise the events that follow from counts: everything in, everything quiet."""
        self._watch(record)
        if record.state is TargetState.FILLING:
            self.sum_written(record)
        if record.state is TargetState.FILLING and self.is_complete(record):
            if problem := self.span_problem(record):
                reason = f"the source's spans are not the whole cache: {problem}"
                self._end_by(record, TargetEvent.REFUSED, Outcome.FAILED, reason)
                return
            if record.executor is Executor.TARGET_READS:
                self.step(record, TargetEvent.FILLED)
            elif self._has_right_sums(record):
                self.step(record, TargetEvent.WRITTEN)
        elif record.state is TargetState.CLEARING and not record.open_legs:
            self.step(record, TargetEvent.QUIET)
        elif record.state in CLOSING and self.is_quiet(record):
            self.step(record, _QUIET[record.verdict])

    def _has_right_sums(self, record: TargetRecord) -> bool:
        """Whether the checksums are right; if not, the hand-off fails, and is counted."""
        problem = self.sums_problem(record)
        if problem:
            self.mismatches_total += 1
            self._end_by(record, TargetEvent.MISMATCHED, Outcome.FAILED, problem)
        return not problem
