"""Estimates the offset between the clocks of two processes from the order in which messages must have travelled.

A message is sent before it is received. Each such pair of notes bounds the offset from one side: messages of the source bound
it from below, messages of the target from above. The true offset lies between the tightest two bounds; the middle is taken,
and half the distance is the uncertainty. Nothing is assumed about how long a message takes: on a busy host one direction can
take far longer than the other, so half a round trip would be a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvbaton.core.timeline import Stage
from kvbaton.observe.records import NoteRecord, SideRecord

__all__ = ["ClockOffset", "Moment", "Track", "estimate_offset"]

Moment = tuple[float, NoteRecord]
"""A note, and when it was, on the clock of its track."""

_SOURCE_FIRST = (Stage.PREFILLED, Stage.CONFIRMED, Stage.RETRACTED)
"""Noted by the source when it sends the message, and by the target when it receives it."""

_NO_MOMENTS: list[Moment] = []


class Track:
    """One side of one hand-off; `shift_s` is added to the moments of its instance's clock. Empty without a record."""

    def __init__(self, record: SideRecord | None, shift_s: float = 0.0) -> None:
        self._by_stage: dict[Stage, list[Moment]] = {}
        self.is_known = record is not None
        start, notes = (shift_s, ()) if record is None else (record.since_s + shift_s, record.notes)
        for note in sorted(notes, key=lambda note: note.at_s):
            self._by_stage.setdefault(note.stage, []).append((start + note.at_s, note))
        self.first_s = min((moments[0][0] for moments in self._by_stage.values()), default=0.0)
        self.last_s = max((moments[-1][0] for moments in self._by_stage.values()), default=0.0)

    def moments(self, stage: Stage) -> list[Moment]:
        """Every note of a stage, in order."""
        return self._by_stage.get(stage, _NO_MOMENTS)

    def first(self, stage: Stage) -> float | None:
        """When a stage was first reached; None when it was not."""
        moments = self.moments(stage)
        return moments[0][0] if moments else None

    def settled(self, stage: Stage) -> float | None:
        """When a stage was first reached after the last retraction, if there was one."""
        retracted = self.last(Stage.RETRACTED)
        since = float("-inf") if retracted is None else retracted
        return next((at for at, _ in self.moments(stage) if at >= since), None)

    def last(self, stage: Stage) -> float | None:
        """When a stage was last reached; None when it was not."""
        moments = self.moments(stage)
        return moments[-1][0] if moments else None


class ClockOffset(msgspec.Struct, frozen=True):
    """`offset_s` converts a moment of the target to the source's clock, with an error of at most `uncertain_s`.

    `is_joined` is false when no message bounds the offset; then both sides are drawn from 0. `uncertain_s` is None when it is
    bounded from one side only.
    """

    offset_s: float
    is_joined: bool
    uncertain_s: float | None


def estimate_offset(pairs: Iterable[tuple[Track, Track]]) -> ClockOffset:
    """The offset that fits every (source, target) pair of tracks of one pair of instances."""
    low: float | None = None
    high: float | None = None
    for source, target in pairs:
        for sent, received in _from_source(source, target):
            low = sent - received if low is None else max(low, sent - received)
        for sent, received in _from_target(source, target):
            high = received - sent if high is None else min(high, received - sent)
    if low is None or high is None:
        known = low if high is None else high
        return ClockOffset(known or 0.0, known is not None, None)
    return ClockOffset((low + high) / 2, True, abs(high - low) / 2)


def _from_source(source: Track, target: Track) -> Iterator[tuple[float, float]]:
    for stage in _SOURCE_FIRST:
        yield from _both(source.first(stage), target.first(stage))
    announced = _first_per_span(source.moments(Stage.ANNOUNCED))
    for stage in (Stage.ANNOUNCED, Stage.MOVED):
        for span, received in _first_per_span(target.moments(stage)).items():
            yield from _both(announced.get(span), received)


def _from_target(source: Track, target: Track) -> Iterator[tuple[float, float]]:
    for answer in (Stage.GRANTED, Stage.ANNOUNCED):  # nothing is announced without a grant
        yield from _both(target.first(Stage.GRANT_SENT), source.first(answer))
    yield from _both(target.first(Stage.FILLED), source.first(Stage.CONFIRMED))


def _both(sent: float | None, received: float | None) -> Iterator[tuple[float, float]]:
    if sent is not None and received is not None:
        yield sent, received


def _first_per_span(moments: list[Moment]) -> dict[tuple[int, int, int], float]:
    """When each span was first noted, by layers and end token; not by its start, because a target skips what it has cached."""
    first: dict[tuple[int, int, int], float] = {}
    for at, note in moments:
        first.setdefault((note.first_layer, note.end_layer, note.end_token), at)
    return first
