"""From the notes of a hand-off to its phases: bars with a start and an end on one clock, and the sequence of waits.

Bars may overlap; that is the point of streaming. Waits do not: they divide the time from the first token to the first decode
step into consecutive pieces that add up to it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side, Stage
from kvbaton.observe.clocks import Moment, Track
from kvbaton.observe.records import NoteRecord

__all__ = ["Bar", "HandoffPhase", "Sides", "Wait", "bars", "waits"]

_LOOK_BACK = 64


class HandoffPhase(enum.StrEnum):
    """What a period of time was spent on, in the usual order."""

    QUEUE = "queue"
    """Either side: until the engine had room for the request."""
    PREFILL = "prefill"
    """Source: from its first step to its first token; its parts are chunks."""
    CHUNK = "chunk"
    ROUTER = "router"
    """Pull: from the source's first token until the target has the request."""
    HANDSHAKE = "handshake"
    """Target: from its blocks to the grant; long only for the first hand-off between two instances."""
    GRANT = "grant"
    """From the target's grant to its arrival at the source."""
    ANNOUNCEMENT = "announcement"
    """From the source's announcement to its arrival at the target; shown only where the request waited for it."""
    WIRE = "wire"
    """From the first span announced to the last one moved; where the source writes, to the confirmation. Parts: spans."""
    SPAN = "span"
    CONFIRMATION = "confirmation"
    """Target: from the last byte to the source's confirmation."""
    FIRST_STEP = "first step"
    """Target: from the confirmation until the engine takes the cache into a step."""


class Bar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A period on the timeline. `hidden_s` of it overlapped prefill, `exposed_s` came after the first token.

    Of the wire, only moments in which bytes were moving count for either. `is_cut`: the phase began and was not completed.
    """

    phase: HandoffPhase
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
    """Time after the first token in which only this phase delayed the next token."""

    phase: HandoffPhase
    seconds: float


@dataclass(frozen=True, slots=True)
class Sides:
    """The two tracks of one hand-off on one clock; that of a side without a record is empty."""

    source: Track
    target: Track

    def of(self, side: Side) -> Track:
        """The track of a side."""
        return self.source if side is Side.SOURCE else self.target

    @property
    def last_s(self) -> float:
        """When the last note of both was."""
        return max(self.source.last_s, self.target.last_s)

    @property
    def first_token_s(self) -> float | None:
        """When the source chose its first token; without a record of the source, when the target received `prefilled`."""
        return _either(self.source.settled(Stage.PREFILLED), self.target.settled(Stage.PREFILLED))

    @property
    def granted_s(self) -> float | None:
        """When the source had its grant. A source that held the finished cache notes no grant: it announces at once."""
        return _either(self.source.first(Stage.GRANTED), self.source.first(Stage.ANNOUNCED))

    @property
    def ready_s(self) -> float | None:
        """When the target's engine took the cache into a step; of a request that needed no step, when it was confirmed."""
        return _either(self.target.first(Stage.FIRST_STEP), self.confirmed_s)

    @property
    def confirmed_s(self) -> float | None:
        """When the target had the confirmation; where the source writes, when it was delivered."""
        ended = self.target.moments(Stage.ENDED)
        delivered = next((at for at, note in ended if note.outcome is Outcome.DELIVERED), None)
        return _either(self.target.settled(Stage.CONFIRMED), delivered)

    @property
    def moved(self) -> list[Moment]:
        """Every span that was moved; none where the source writes, because only the side that executes the copy notes spans."""
        return self.target.moments(Stage.MOVED)


def bars(sides: Sides) -> tuple[Bar, ...]:
    """The phases of a hand-off, the source's first, in order; phases that never began are left out."""
    return tuple(bar for bar in _all_bars(sides) if bar is not None)


def waits(sides: Sides) -> tuple[Wait, ...]:
    """The waits between the first token and the first decode step, in order; their seconds add up to that time."""
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


def _milestones(sides: Sides) -> Iterator[tuple[HandoffPhase, float | None]]:
    yield HandoffPhase.ROUTER, sides.target.first(Stage.ARRIVED)
    yield HandoffPhase.QUEUE, sides.target.first(Stage.ALLOCATED)
    yield HandoffPhase.HANDSHAKE, sides.target.first(Stage.GRANT_SENT)
    yield HandoffPhase.GRANT, sides.granted_s
    yield HandoffPhase.ANNOUNCEMENT, sides.target.settled(Stage.PREFILLED)
    yield HandoffPhase.WIRE, _either(sides.target.settled(Stage.FILLED), max((at for at, _ in sides.moved), default=None))
    yield HandoffPhase.CONFIRMATION, sides.confirmed_s
    yield HandoffPhase.FIRST_STEP, sides.target.first(Stage.FIRST_STEP)


def _all_bars(sides: Sides) -> Iterator[Bar | None]:
    source, target = Side.SOURCE, Side.TARGET
    yield _bar(sides, HandoffPhase.QUEUE, source, sides.source.first(Stage.ARRIVED), _started(sides))
    yield _prefill(sides)
    yield _router(sides)
    yield _bar(sides, HandoffPhase.QUEUE, target, sides.target.first(Stage.ARRIVED), sides.target.first(Stage.ALLOCATED))
    granted = sides.target.first(Stage.GRANT_SENT)
    yield _bar(sides, HandoffPhase.HANDSHAKE, target, sides.target.first(Stage.ALLOCATED), granted)
    answered = _either(sides.target.first(Stage.ANNOUNCED), sides.target.first(Stage.PREFILLED))
    # A source that is not recorded had the grant at the latest when its first answer arrived.
    received = _either(sides.granted_s, answered)
    yield _bar(sides, HandoffPhase.GRANT, target, granted, received)
    yield _wire(sides)
    asked = _either(sides.target.settled(Stage.FILLED), sides.source.settled(Stage.CONFIRMED))
    confirmed = sides.confirmed_s
    yield _bar(sides, HandoffPhase.CONFIRMATION, target, asked, confirmed)
    stepped = sides.target.first(Stage.FIRST_STEP)
    if stepped is not None or sides.target.first(Stage.ENDED) is None:
        yield _bar(sides, HandoffPhase.FIRST_STEP, target, confirmed, stepped)


def _bar(sides: Sides, phase: HandoffPhase, side: Side, start: float | None, end: float | None) -> Bar | None:
    """One bar; a phase that was not completed lasts until the last note of its side."""
    if start is None:
        return None
    until = max(start, sides.of(side).last_s if end is None else end)
    if side is Side.SOURCE:
        return Bar(phase, side, start, until, is_cut=end is None)
    hidden, exposed = _shares(sides, start, until)
    return Bar(phase, side, start, until, hidden, exposed, is_cut=end is None)


def _shares(sides: Sides, start: float, end: float) -> tuple[float, float]:
    """How much of a period lay before the first token, and how much after it. Without a first token all of it is hidden."""
    border = sides.first_token_s
    if border is None:
        return end - start, 0.0
    return max(0.0, min(end, border) - start), max(0.0, end - max(start, border))


def _started(sides: Sides) -> float | None:
    return _either(sides.source.first(Stage.STARTED), sides.source.first(Stage.COMPUTED))


def _router(sides: Sides) -> Bar | None:
    """Pull only: the router calls the target after the source has answered. In push the target has the request earlier."""
    done, asked = sides.source.settled(Stage.PREFILLED), sides.target.first(Stage.ARRIVED)
    if done is None or asked is None or asked <= done:
        return None
    return _bar(sides, HandoffPhase.ROUTER, Side.TARGET, done, asked)


def _prefill(sides: Sides) -> Bar | None:
    whole = _bar(sides, HandoffPhase.PREFILL, Side.SOURCE, _started(sides), sides.source.settled(Stage.PREFILLED))
    if whole is None:
        return None
    return msgspec.structs.replace(whole, parts=tuple(_chunks(sides.source.moments(Stage.COMPUTED), whole.start_s)))


def _chunks(computed: list[Moment], start: float) -> Iterator[Bar]:
    """One bar per chunk. A chunk that was computed again after a retraction has a bar of its own."""
    for at, note in computed:
        yield _part(HandoffPhase.CHUNK, Side.SOURCE, start, at, note)
        start = at


def _wire(sides: Sides) -> Bar | None:
    spans = tuple(_spans(sides))
    announced = _either(sides.source.first(Stage.ANNOUNCED), sides.target.first(Stage.ANNOUNCED))
    if announced is None and not spans:
        return None
    start = min([span.start_s for span in spans] + ([] if announced is None else [announced]))
    done = max((span.end_s for span in spans), default=sides.confirmed_s)
    is_in = _either(sides.target.settled(Stage.FILLED), sides.confirmed_s) is not None
    whole = _bar(sides, HandoffPhase.WIRE, Side.TARGET, start, done)
    if whole is None:
        return None
    busy = tuple(_merged([(span.start_s, span.end_s) for span in spans]))
    shares = [_shares(sides, *period) for period in busy]
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
    announced = sides.source.moments(Stage.ANNOUNCED) or sides.target.moments(Stage.ANNOUNCED)
    by_layers: dict[tuple[int, int], list[Moment]] = {}
    for moment in announced:
        by_layers.setdefault((moment[1].first_layer, moment[1].end_layer), []).append(moment)
    for at, note in sides.moved:
        start = _announced_at(by_layers.get((note.first_layer, note.end_layer), announced[:1]), at, note)
        part = _part(HandoffPhase.SPAN, Side.TARGET, start, at, note)
        hidden, exposed = _shares(sides, start, at)
        yield msgspec.structs.replace(part, hidden_s=hidden, exposed_s=exposed, moved_bytes=note.moved_bytes)


def _announced_at(announced: list[Moment], moved_at: float, moved: NoteRecord) -> float:
    end = bisect.bisect_right(announced, moved_at, key=lambda moment: moment[0])
    nearest = (announced[place] for place in range(end - 1, max(-1, end - 1 - _LOOK_BACK), -1))
    return next((at for at, note in nearest if _overlap(note, moved)), moved_at)


def _overlap(one: NoteRecord, other: NoteRecord) -> bool:
    return one.first_token < other.end_token and other.first_token < one.end_token


def _part(phase: HandoffPhase, side: Side, start: float, end: float, note: NoteRecord) -> Bar:
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


def _merged(periods: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The union of these periods, as periods that do not overlap."""
    current: tuple[float, float] | None = None
    for start, end in sorted(periods):
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
