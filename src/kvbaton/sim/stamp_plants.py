"""Planted bugs about stamps: one known mistake each, of a source that shows them, or of a target that looks at them."""

from __future__ import annotations

from collections.abc import Iterator

from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.handoff import Executor, Incarnation
from kvbaton.core.lifecycle import SOURCE, Row, SourceEffect, SourceEvent, SourceState, TargetState
from kvbaton.core.messages import Prefilled, Release
from kvbaton.sim.plant_rows import with_rows
from kvbaton.sim.stamps import SimStamps

__all__ = ["OfTheDead", "stamp_plants"]


class _LeftStanding(SourceSide):
    """Gives the blocks back, and goes on to show their stamp."""

    def clear_stamp(self, record: SourceRecord) -> None:
        record.stamp = None


class _ClearedLate(SourceSide):
    """Clears the stamp of what was released when its engine has the blocks already."""

    table = with_rows(
        SOURCE,
        {
            (SourceState.SERVING, SourceEvent.RELEASED): Row(
                SourceState.DELIVERED, (SourceEffect.RETURN_BLOCKS, SourceEffect.CLEAR_STAMP)
            )
        },
    )


class _AnyStamp(TargetSide):
    """Takes whatever stands in the slot for the stamp that it was sent."""

    def is_stamped(self, record: TargetRecord) -> bool:
        if record.stamp is None or record.source is None:
            return False
        return self._stamps.read(record.source, record.stamp.slot) > 0


class _BeforeTheLastByte(TargetSide):
    """Looks at the stamp as soon as the prefill is complete, and not behind the last byte."""

    def is_complete(self, record: TargetRecord) -> bool:
        if record.executor is Executor.TARGET_READS and record.span_count is not None and self.is_stamped(record):
            return self.has_aux(record)
        return super().is_complete(record)


class _InsteadOfSums(TargetSide):
    """Takes a stamp where sums are to be compared, and does not compare them."""

    def sums_problem(self, record: TargetRecord) -> str:
        return "" if record.state is TargetState.FILLING and self.is_stamped(record) else super().sums_problem(record)


class _BeforeTheSums(SourceSide):
    """Shows a stamp before the sums are there that go with it."""

    def _awaits_sums(self, record: SourceRecord) -> bool:
        del record
        return False

    def set_stamp(self, record: SourceRecord) -> None:
        if self.shows_stamp(record):
            record.stamp = self.stamp_slots.take()
            if record.stamp is not None:
                self._stamps.write(record.stamp.slot, record.stamp.value)


class _SumsNotSent(SourceSide):
    """Shows the stamp when the last sum is there, and does not send the two."""

    table = with_rows(SOURCE, {(SourceState.SERVING, SourceEvent.SUMMED): Row(SourceState.SERVING, (SourceEffect.SET_STAMP,))})


class _SumsNotTaken(TargetSide):
    """Takes the first `Prefilled` only, and asks for what the second one has."""

    def on_prefilled(self, sender: Incarnation, prefilled: Prefilled) -> None:
        record = self.live.get(prefilled.key)
        if record is None or record.span_count is None or not record.sums_follow:
            super().on_prefilled(sender, prefilled)


class _WaitsForEver(TargetSide):
    """Waits for a stamp that was promised, and never asks."""

    def ask_confirmation(self, record: TargetRecord) -> None:
        if not record.sums_follow:
            super().ask_confirmation(record)


class _ReleasedByAnyStamp(SourceSide):
    """Takes any release of what has a stamp for that of a target which has seen it."""

    def is_confirmed_for(self, record: SourceRecord, release: Release) -> bool:
        return super().is_confirmed_for(record, release) or record.stamp is not None


class OfTheDead(SimStamps):
    """Looks at what a process has shown before it died."""

    def counts(self, peer: Incarnation) -> bool:
        del peer
        return True


def stamp_plants() -> Iterator[tuple[str, str, str, type[SourceSide], type[TargetSide]]]:
    """Name, mistake, the rule that finds it, and the two sides."""
    before = "confirmed before delivered"
    yield "stamp-left-standing", "stamp not cleared with the end", before, _LeftStanding, TargetSide
    yield "stamp-cleared-late", "stamp cleared behind the blocks", "counts agree", _ClearedLate, TargetSide
    yield "any-stamp", "stamp of another hand-off taken", before, SourceSide, _AnyStamp
    yield "stamp-before-the-last-byte", "stamp looked at too early", "foreign byte", SourceSide, _BeforeTheLastByte
    yield "stamp-instead-of-sums", "stamp taken, and sums not compared", "corrupt byte", SourceSide, _InsteadOfSums
    yield "stamp-before-sums", "stamp shown before the sums are there", "as set", _BeforeTheSums, TargetSide
    yield "stamp-not-sent", "stamp and sums not sent when the last sum is there", "prompt", _SumsNotSent, TargetSide
    yield "stamp-not-taken", "stamp that comes with the sums not taken", "prompt", SourceSide, _SumsNotTaken
    yield (
        "stamp-awaited-for-ever",
        "promised stamp waited for, and never asked for",
        "spurious failure",
        SourceSide,
        _WaitsForEver,
    )
    yield "released-by-any-stamp", "release without the stamp taken", "released by its target", _ReleasedByAnyStamp, TargetSide
