"""Joins the clocks of two processes that cannot be compared, by what must have come before what.

A message is sent before it is received. Each such pair of notes bounds the offset between the two clocks from one side:
what the source said bounds it from below, what the target said from above. The truth lies between the tightest two bounds;
the middle is taken, and half the distance is how wrong it may be. Nothing is assumed about how long a message takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvbaton.core.timeline import Stage
from kvbaton.observe.records import NoteRecord, SideRecord

__all__ = ["Clock", "Moment", "Track", "relate"]

Moment = tuple[float, NoteRecord]
"""A note, and when it was, on the clock of its track."""

_SOURCE_FIRST = ((Stage.PREFILLED, Stage.PREFILLED), (Stage.CONFIRMED, Stage.CONFIRMED), (Stage.RETRACTED, Stage.RETRACTED))
_NO_MOMENTS: list[Moment] = []


class Track:
    """One side of one hand-off; `shift_s` is added to the moments of its instance's clock."""

    def __init__(self, record: SideRecord, shift_s: float = 0.0) -> None:
        self.record = record
        self.side = record.side
        self._by_stage: dict[Stage, list[Moment]] = {}
        start = record.since_s + shift_s
        for note in sorted(record.notes, key=lambda note: note.at_s):
            self._by_stage.setdefault(note.stage, []).append((start + note.at_s, note))
        self.first_s = min(moments[0][0] for moments in self._by_stage.values())
        self.last_s = max(moments[-1][0] for moments in self._by_stage.values())

    def moments(self, stage: Stage) -> list[Moment]:
        """Every note of a stage, in order."""
        return self._by_stage.get(stage, _NO_MOMENTS)

    def first(self, stage: Stage) -> float | None:
        """When a stage was first reached; None when it was not."""
        moments = self.moments(stage)
        return moments[0][0] if moments else None

    def settled(self, stage: Stage) -> float | None:
        """When a stage was first reached for good: after the last retraction, if there was one."""
        retracted = self.last(Stage.RETRACTED)
        since = float("-inf") if retracted is None else retracted
        return next((at for at, _ in self.moments(stage) if at >= since), None)

    def last(self, stage: Stage) -> float | None:
        """When a stage was last reached; None when it was not."""
        moments = self.moments(stage)
        return moments[-1][0] if moments else None


class Clock(msgspec.Struct, frozen=True):
    """How the two clocks lie: `offset_s` brings a moment of the target to the source's clock, give or take `uncertain_s`.

    `is_joined` is false when no message bounds the offset; then the two sides are only drawn side by side. `uncertain_s` is
    None when it is bounded from one side only.
    """

    offset_s: float
    is_joined: bool
    uncertain_s: float | None


def relate(pairs: Iterable[tuple[Track, Track]]) -> Clock:
    """The offset that agrees best with every (source, target) pair of tracks of one pair of instances."""
    low: float | None = None
    high: float | None = None
    for source, target in pairs:
        for said, heard in _source_spoke(source, target):
            low = said - heard if low is None else max(low, said - heard)
        for said, heard in _target_spoke(source, target):
            high = heard - said if high is None else min(high, heard - said)
    if low is None or high is None:
        known = low if high is None else high
        return Clock(known or 0.0, known is not None, None)
    return Clock((low + high) / 2, True, abs(high - low) / 2)


def _source_spoke(source: Track, target: Track) -> Iterator[tuple[float, float]]:
    for said, heard in _SOURCE_FIRST:
        yield from _both(source.first(said), target.first(heard))
    announced = _first_per_span(source.moments(Stage.ANNOUNCED))
    for stage in (Stage.ANNOUNCED, Stage.MOVED):
        for span, heard_at in _first_per_span(target.moments(stage)).items():
            yield from _both(announced.get(span), heard_at)


def _target_spoke(source: Track, target: Track) -> Iterator[tuple[float, float]]:
    for answer in (Stage.GRANTED, Stage.ANNOUNCED):  # nothing is announced without a grant
        yield from _both(target.first(Stage.GRANT_SENT), source.first(answer))
    yield from _both(target.first(Stage.FILLED), source.first(Stage.CONFIRMED))


def _both(said: float | None, heard: float | None) -> Iterator[tuple[float, float]]:
    if said is not None and heard is not None:
        yield said, heard


def _first_per_span(moments: list[Moment]) -> dict[tuple[int, int, int], float]:
    """When each span, known by its layers and its end, was first spoken of; a target may have had its beginning already."""
    first: dict[tuple[int, int, int], float] = {}
    for at, note in moments:
        first.setdefault((note.first_layer, note.end_layer, note.end_token), at)
    return first
