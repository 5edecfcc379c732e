"""From the notes of a hand-off to its phases: bars with a beginning and an end on one clock, and what was waited for in turn.

Bars may overlap; that is the point of streaming. Waits may not: they cut the time from the first token to the first decode
step into pieces that follow each other and add up to all of it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side, Stage
from kvbaton.observe.records import NoteRecord
from kvbaton.observe.tracks import Moment, Track

__all__ = ["Bar", "Phase", "Sides", "Wait", "bars", "waits"]

_LOOK_BACK = 64


class Phase(enum.StrEnum):
    """What a stretch of time was spent on, in the order in which it usually comes."""

    QUEUE = "queue"
    """Either side: until the engine had room for the request."""
    PREFILL = "prefill"
    """Source: from its first step to its first token; its parts are chunks."""
    CHUNK = "chunk"
    ROUTER = "router"
    """Pull: from the source's first token until the target has the request."""
    GREETING = "greeting"
    """Target: from its blocks to the grant; long only when the two instances meet for the first time."""
    GRANT = "grant"
    """From the target's grant to its arrival at the source."""
    ANNOUNCEMENT = "announcement"
    """From what the source says to its arrival at the target; seen only where somebody waited for it."""
    WIRE = "wire"
    """From the first span announced to the last one moved; where the source writes, to the confirmation. Parts: spans."""
    SPAN = "span"
    CONFIRMATION = "confirmation"
    """Target: from everything being in to the source's word that it is right."""
    FIRST_STEP = "first step"
    """Target: from the confirmation until the engine takes the cache into a step."""


class Bar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of the timeline. `hidden_s` of it lay behind prefill, `exposed_s` came after the first token.

    Of a wire, only moments in which something was on its way count for either. `is_cut`: it ended without getting done.
    """

    phase: Phase
    side: Side
    start_s: float
    end_s: float
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    moved_bytes: int = 0
    first_token: int = 0
    end_token: int = 0
    first_layer: int = 0
    end_layer: int = 0
    is_cut: bool = False
    parts: tuple[Bar, ...] = ()


class Wait(msgspec.Struct, frozen=True):
    """Time after the first token in which nothing but this phase stood between the request and its next token."""

    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True)
class Sides:
    """The two tracks of one hand-off on one clock; None for a side that nobody tells of."""

    source: Track | None
    target: Track | None

    def first(self, side: Side, stage: Stage) -> float | None:
        """When a side first reached a stage."""
        track = self._of(side)
        return None if track is None else track.first(stage)

    def settled(self, side: Side, stage: Stage) -> float | None:
        """When a side first reached a stage for good, after whatever was retracted."""
        track = self._of(side)
        return None if track is None else track.settled(stage)

    def moments(self, side: Side, stage: Stage) -> list[Moment]:
        """Every note of a stage of a side."""
        track = self._of(side)
        return [] if track is None else track.moments(stage)

    @property
    def first_token_s(self) -> float | None:
        """When the source chose its first token; of a source that nobody tells of, when the target heard of it."""
        return _either(self.settled(Side.SOURCE, Stage.PREFILLED), self.settled(Side.TARGET, Stage.PREFILLED))

    @property
    def granted_s(self) -> float | None:
        """When the source had its grant; one that held its cache ready for it answers at once, by announcing."""
        return _either(self.first(Side.SOURCE, Stage.GRANTED), self.first(Side.SOURCE, Stage.ANNOUNCED))

    @property
    def ready_s(self) -> float | None:
        """When the target's engine took the cache into a step; of a request that needed no step, when it was confirmed."""
        return _either(self.first(Side.TARGET, Stage.FIRST_STEP), self.confirmed_s)

    @property
    def confirmed_s(self) -> float | None:
        """When the target knew that what it has is right; where the source writes, that is when it was delivered."""
        ended = self.moments(Side.TARGET, Stage.ENDED)
        delivered = next((at for at, note in ended if note.outcome is Outcome.DELIVERED), None)
        return _either(self.settled(Side.TARGET, Stage.CONFIRMED), delivered)

    @property
    def moved(self) -> list[Moment]:
        """Every span that was moved; none where the source writes, because nobody tells of them."""
        return self.moments(Side.TARGET, Stage.MOVED)

    def _of(self, side: Side) -> Track | None:
        return self.source if side is Side.SOURCE else self.target


def bars(sides: Sides) -> tuple[Bar, ...]:
    """The phases of a hand-off, those of the source first, each in order; phases that never began are left out."""
    return tuple(bar for bar in _all_bars(sides) if bar is not None)


def waits(sides: Sides) -> tuple[Wait, ...]:
    """What was waited for between the first token and the first decode step, in order; the seconds add up to all of it."""
    start, end = sides.first_token_s, sides.ready_s
    if start is None or end is None:
        return ()
    found: list[Wait] = []
    for phase, reached in _milestones(sides):
        until = min(end, reached) if reached is not None else start
        if until > start:
            found.append(Wait(phase, until - start))
            start = until
    return tuple(found)


def _milestones(sides: Sides) -> Iterator[tuple[Phase, float | None]]:
    target = Side.TARGET
    yield Phase.ROUTER, sides.first(target, Stage.ARRIVED)
    yield Phase.QUEUE, sides.first(target, Stage.ALLOCATED)
    yield Phase.GREETING, sides.first(target, Stage.GRANT_SENT)
    yield Phase.GRANT, sides.granted_s
    yield Phase.ANNOUNCEMENT, sides.settled(target, Stage.PREFILLED)
    yield Phase.WIRE, _either(sides.settled(target, Stage.FILLED), max((at for at, _ in sides.moved), default=None))
    yield Phase.CONFIRMATION, sides.confirmed_s
    yield Phase.FIRST_STEP, sides.first(target, Stage.FIRST_STEP)


def _all_bars(sides: Sides) -> Iterator[Bar | None]:
    source, target = Side.SOURCE, Side.TARGET
    yield _bar(sides, Phase.QUEUE, source, sides.first(source, Stage.ARRIVED), _started(sides))
    yield _prefill(sides)
    yield _router(sides)
    yield _bar(sides, Phase.QUEUE, target, sides.first(target, Stage.ARRIVED), sides.first(target, Stage.ALLOCATED))
    yield _bar(sides, Phase.GREETING, target, sides.first(target, Stage.ALLOCATED), sides.first(target, Stage.GRANT_SENT))
    answered = _either(sides.first(target, Stage.ANNOUNCED), sides.first(target, Stage.PREFILLED))
    heard = _either(sides.granted_s, answered)
    yield _bar(sides, Phase.GRANT, target, sides.first(target, Stage.GRANT_SENT), heard)
    yield _wire(sides)
    asked = _either(sides.settled(target, Stage.FILLED), sides.settled(source, Stage.CONFIRMED))
    confirmed = sides.confirmed_s
    yield _bar(sides, Phase.CONFIRMATION, target, asked, confirmed)
    stepped = sides.first(target, Stage.FIRST_STEP)
    if stepped is not None or sides.first(target, Stage.ENDED) is None:
        yield _bar(sides, Phase.FIRST_STEP, target, confirmed, stepped)


def _bar(sides: Sides, phase: Phase, side: Side, start: float | None, end: float | None) -> Bar | None:
    """One bar; a phase that was begun and never done lasts as long as its side did."""
    if start is None:
        return None
    track = sides.source if side is Side.SOURCE else sides.target
    until = end if end is not None else (start if track is None else track.last_s)
    until = max(start, until)
    if side is Side.SOURCE:
        return Bar(phase, side, start, until, is_cut=end is None)
    hidden, exposed = _shares(sides, start, until)
    return Bar(phase, side, start, until, hidden, exposed, is_cut=end is None)


def _shares(sides: Sides, start: float, end: float) -> tuple[float, float]:
    """How much of a stretch lay before the first token, and how much after it. Without a first token all is hidden."""
    border = sides.first_token_s
    if border is None:
        return end - start, 0.0
    return max(0.0, min(end, border) - start), max(0.0, end - max(start, border))


def _started(sides: Sides) -> float | None:
    return _either(sides.first(Side.SOURCE, Stage.STARTED), sides.first(Side.SOURCE, Stage.COMPUTED))


def _router(sides: Sides) -> Bar | None:
    """In pull the target is asked when the source has answered; in push it has the request long before."""
    done, asked = sides.settled(Side.SOURCE, Stage.PREFILLED), sides.first(Side.TARGET, Stage.ARRIVED)
    if done is None or asked is None or asked <= done:
        return None
    return _bar(sides, Phase.ROUTER, Side.TARGET, done, asked)


def _prefill(sides: Sides) -> Bar | None:
    whole = _bar(sides, Phase.PREFILL, Side.SOURCE, _started(sides), sides.settled(Side.SOURCE, Stage.PREFILLED))
    if whole is None:
        return None
    return msgspec.structs.replace(whole, parts=tuple(_chunks(sides.moments(Side.SOURCE, Stage.COMPUTED), whole.start_s)))


def _chunks(computed: list[Moment], start: float) -> Iterator[Bar]:
    """One bar per chunk. A chunk that was computed again after a retraction is a chunk of its own."""
    for at, note in computed:
        yield _part(Phase.CHUNK, Side.SOURCE, start, at, note)
        start = at


def _wire(sides: Sides) -> Bar | None:
    spans = tuple(_spans(sides))
    announced = _either(sides.first(Side.SOURCE, Stage.ANNOUNCED), sides.first(Side.TARGET, Stage.ANNOUNCED))
    if announced is None and not spans:
        return None
    start = min([span.start_s for span in spans] + ([] if announced is None else [announced]))
    done = max((span.end_s for span in spans), default=sides.confirmed_s)
    is_in = _either(sides.settled(Side.TARGET, Stage.FILLED), sides.confirmed_s) is not None
    whole = _bar(sides, Phase.WIRE, Side.TARGET, start, done)
    if whole is None:
        return None
    busy = tuple(_merged([(span.start_s, span.end_s) for span in spans]))
    shares = [_shares(sides, *stretch) for stretch in busy]
    return msgspec.structs.replace(
        whole,
        hidden_s=sum(hidden for hidden, _ in shares),
        exposed_s=sum(exposed for _, exposed in shares),
        moved_bytes=sum(span.moved_bytes for span in spans),
        is_cut=not is_in,
        parts=spans,
    )


def _spans(sides: Sides) -> Iterator[Bar]:
    """One bar per span that was moved, from its latest announcement before that."""
    announced = sides.moments(Side.SOURCE, Stage.ANNOUNCED) or sides.moments(Side.TARGET, Stage.ANNOUNCED)
    by_layers: dict[tuple[int, int], list[Moment]] = {}
    for moment in announced:
        by_layers.setdefault((moment[1].first_layer, moment[1].end_layer), []).append(moment)
    for at, note in sides.moved:
        start = _announced_at(by_layers.get((note.first_layer, note.end_layer), announced[:1]), at, note)
        part = _part(Phase.SPAN, Side.TARGET, start, at, note)
        hidden, exposed = _shares(sides, start, at)
        yield msgspec.structs.replace(part, hidden_s=hidden, exposed_s=exposed, moved_bytes=note.moved_bytes)


def _announced_at(announced: list[Moment], moved_at: float, moved: NoteRecord) -> float:
    end = bisect.bisect_right(announced, moved_at, key=lambda moment: moment[0])
    nearest = (announced[place] for place in range(end - 1, max(-1, end - 1 - _LOOK_BACK), -1))
    return next((at for at, note in nearest if _overlap(note, moved)), moved_at)


def _overlap(one: NoteRecord, other: NoteRecord) -> bool:
    return one.first_token < other.end_token and other.first_token < one.end_token


def _part(phase: Phase, side: Side, start: float, end: float, note: NoteRecord) -> Bar:
    return Bar(
        phase,
        side,
        start,
        max(start, end),
        first_token=note.first_token,
        end_token=note.end_token,
        first_layer=note.first_layer,
        end_layer=note.end_layer,
    )


def _merged(stretches: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The moments that any of the stretches covers, as stretches that do not overlap."""
    current: tuple[float, float] | None = None
    for start, end in sorted(stretches):
        if current is not None and start <= current[1]:
            current = (current[0], max(current[1], end))
            continue
        if current is not None:
            yield current
        current = (start, end)
    if current is not None:
        yield current


def _either(one: float | None, other: float | None) -> float | None:
    return other if one is None else one
