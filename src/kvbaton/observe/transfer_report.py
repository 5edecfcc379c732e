"""The report on a transfer: both sides of each of its hand-offs on one timeline, with a sentence on where the time went.

Pure: from the records of two instances to values that JSON can carry. A side without a record, a side that failed and a side
that is still live are all reported; the report states what is not known, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side, Stage
from kvbaton.observe.clocks import ClockOffset, Track, estimate_offset
from kvbaton.observe.phases import Bar, HandoffPhase, Sides, Wait, bars, waits
from kvbaton.observe.records import InstanceInfo, InstanceRecord, SideRecord

__all__ = [
    "HandoffReport",
    "Mark",
    "Participant",
    "SideAnswer",
    "SideEnd",
    "TransferReport",
    "build_report",
    "duration",
    "row_label",
    "size",
]

_Key = tuple[int, int]

_WAITED = {
    HandoffPhase.ROUTER: "the router",
    HandoffPhase.QUEUE: "blocks at the target",
    HandoffPhase.HANDSHAKE: "the handshake of the two instances",
    HandoffPhase.GRANT: "the grant",
    HandoffPhase.ANNOUNCEMENT: "the announcement",
    HandoffPhase.WIRE: "bytes on the wire",
    HandoffPhase.CONFIRMATION: "the confirmation",
    HandoffPhase.FIRST_STEP: "the first step",
}
_ENDS = {
    Outcome.DELIVERED: "was delivered",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.EXPIRED: "expired",
}


@dataclass(frozen=True, slots=True)
class SideAnswer:
    """What one instance answered when asked about a transfer; without a record, `problem` is the reason."""

    name: str
    record: InstanceRecord | None = None
    problem: str = ""


class Participant(msgspec.Struct, frozen=True):
    """The instance of one side, or the reason why it has no record."""

    side: Side
    name: str
    instance: InstanceInfo | None
    problem: str
    notes_dropped: int


class SideEnd(msgspec.Struct, frozen=True):
    """How a side ended; `outcome` is None while it is live, and without a record."""

    side: Side
    outcome: Outcome | None
    reason: str
    at_s: float


class Mark(msgspec.Struct, frozen=True):
    """A moment that is drawn as a line through all rows."""

    label: str
    side: Side
    at_s: float


class HandoffReport(msgspec.Struct, frozen=True):
    """One hand-off. Seconds count from the transfer's first note; None for what did not happen, or is not known.

    first_token_s:  when the source chose its first token
    ready_s:        when the target took the cache into a step
    exposed_s:      the time between the two, which the client waits for; the `waits` are its pieces
    hidden_s:       time in which bytes travelled behind prefill
    """

    prompt_index: int
    sample_index: int
    sentence: str
    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    marks: tuple[Mark, ...]
    ends: tuple[SideEnd, ...]
    first_token_s: float | None
    ready_s: float | None
    exposed_s: float | None
    hidden_s: float
    wire_bytes: int


class TransferReport(msgspec.Struct, frozen=True):
    """All hand-offs of a transfer, on a timeline of `total_s` seconds."""

    transfer_id: str
    sentence: str
    total_s: float
    clock: ClockOffset
    participants: tuple[Participant, ...]
    handoffs: tuple[HandoffReport, ...]


def build_report(transfer_id: str, source: SideAnswer, target: SideAnswer) -> TransferReport:
    """Join the source sides in a prefill instance's record with the target sides in a decode instance's record."""
    sources, targets = _records(source, Side.SOURCE), _records(target, Side.TARGET)
    shared = sorted(sources.keys() & targets.keys())
    clock = estimate_offset((Track(sources[key]), Track(targets[key])) for key in shared)
    shift = _zero(sources, targets, clock.offset_s)
    keys = sorted(sources.keys() | targets.keys())
    joined = {key: Sides(Track(sources.get(key), shift), Track(targets.get(key), shift + clock.offset_s)) for key in keys}
    participants = (_participant(Side.SOURCE, source), _participant(Side.TARGET, target))
    handoffs = tuple(_handoff(key, sides, clock, participants) for key, sides in joined.items())
    total = max((sides.last_s for sides in joined.values()), default=0.0)
    return TransferReport(transfer_id, _summary(handoffs), total, clock, participants, handoffs)


def _records(answer: SideAnswer, side: Side) -> dict[_Key, SideRecord]:
    if answer.record is None:
        return {}
    return {(record.prompt_index, record.sample_index): record for record in answer.record.sides if record.side is side}


def _zero(sources: dict[_Key, SideRecord], targets: dict[_Key, SideRecord], offset_s: float) -> float:
    """What to add to the source's clock so that the timeline starts at 0."""
    starts = [record.since_s for record in sources.values()] + [offset_s + record.since_s for record in targets.values()]
    return -min(starts, default=0.0)


def _participant(side: Side, answer: SideAnswer) -> Participant:
    record = answer.record
    if record is None:
        return Participant(side, answer.name, None, answer.problem or "it was not asked", 0)
    problem = "" if _records(answer, side) else f"it knows the transfer, but nothing of its {side} side"
    return Participant(side, answer.name, record.instance, problem, record.notes_dropped)


def _handoff(key: _Key, sides: Sides, clock: ClockOffset, participants: tuple[Participant, ...]) -> HandoffReport:
    drawn = bars(sides)
    waited = waits(sides)
    ends = tuple(_end(side, sides.of(side)) for side in (Side.SOURCE, Side.TARGET))
    wire = next((bar for bar in drawn if bar.phase is HandoffPhase.WIRE), None)
    return HandoffReport(
        prompt_index=key[0],
        sample_index=key[1],
        sentence=" ".join(_sentences(sides, drawn, waited, ends, clock, participants)),
        bars=drawn,
        waits=waited,
        marks=tuple(_marks(sides)),
        ends=ends,
        first_token_s=sides.first_token_s,
        ready_s=sides.ready_s,
        exposed_s=_exposed(sides),
        hidden_s=0.0 if wire is None else wire.hidden_s,
        wire_bytes=0 if wire is None else wire.moved_bytes,
    )


def _exposed(sides: Sides) -> float | None:
    start, end = sides.first_token_s, sides.ready_s
    return None if start is None or end is None else max(0.0, end - start)


def _end(side: Side, track: Track) -> SideEnd:
    ended = track.moments(Stage.ENDED)
    if not ended:
        return SideEnd(side, None, "", track.last_s)
    at, note = ended[0]
    return SideEnd(side, note.outcome, note.text, at)


def _marks(sides: Sides) -> Iterator[Mark]:
    token_s = sides.source.settled(Stage.PREFILLED)
    if token_s is not None:
        yield Mark("first token", Side.SOURCE, token_s)
    for side in Side:
        for at, _ in sides.of(side).moments(Stage.RETRACTED):
            yield Mark("retracted", side, at)
        for at, note in sides.of(side).moments(Stage.ENDED):
            if note.outcome is not None and note.outcome is not Outcome.DELIVERED:
                yield Mark(str(note.outcome), side, at)


def _sentences(
    sides: Sides,
    drawn: tuple[Bar, ...],
    waited: tuple[Wait, ...],
    ends: tuple[SideEnd, ...],
    clock: ClockOffset,
    participants: tuple[Participant, ...],
) -> Iterator[str]:
    target_end = ends[1].outcome
    is_delivered = target_end is Outcome.DELIVERED or (target_end is None and sides.ready_s is not None)
    if is_delivered:
        yield _delivery(sides, waited, clock)
    yield from _bad_ends(sides, ends, drawn)
    if not any(end.outcome for end in ends):
        yield _under_way(drawn, sides)
    elif ends[0].outcome is Outcome.DELIVERED and not is_delivered:
        yield "The source delivered; the outcome of the target is not known."
    yield from _wire_sentence(drawn)
    yield from _retractions(sides)
    yield from _unknowns(sides, clock, participants)


def _retractions(sides: Sides) -> Iterator[str]:
    count = len(sides.source.moments(Stage.RETRACTED)) or len(sides.target.moments(Stage.RETRACTED))
    if count:
        times = "once" if count == 1 else f"{count} times"
        yield f"The source was preempted {times}: it retracted what it had announced, and computed again."


def _delivery(sides: Sides, waited: tuple[Wait, ...], clock: ClockOffset) -> str:
    exposed = _exposed(sides)
    if exposed is None:
        return "The cache was delivered; when the first token was chosen is not known."
    since = (
        "the first token" if sides.source.settled(Stage.PREFILLED) is not None else "the target was notified of the first token"
    )
    stepped = sides.target.first(Stage.FIRST_STEP) is not None
    what = "The first decode step came" if stepped else "The cache had landed"
    doubt = f" (± {duration(clock.uncertain_s)})" if clock.uncertain_s is not None else ""
    longest = max(waited, key=lambda wait: wait.seconds, default=None)
    if longest is None:
        return f"{what} {duration(exposed)}{doubt} after {since}."
    share, what_for = duration(longest.seconds), _WAITED.get(longest.phase, f"the {longest.phase}")
    return f"{what} {duration(exposed)}{doubt} after {since}, {share} of them waiting for {what_for}."


def _bad_ends(sides: Sides, ends: tuple[SideEnd, ...], drawn: tuple[Bar, ...]) -> Iterator[str]:
    for end in ends:
        if end.outcome is None or end.outcome is Outcome.DELIVERED:
            continue
        cut = [bar for bar in drawn if bar.side is end.side and bar.is_cut]
        where = f", in its {cut[-1].phase}" if cut else ""
        lasted = duration(end.at_s - sides.of(end.side).first_s)
        reason = f": {end.reason.rstrip('.')}" if end.reason else ""
        yield f"The hand-off {_ENDS[end.outcome]} at the {end.side} after {lasted}{where}{reason}."


def _under_way(drawn: tuple[Bar, ...], sides: Sides) -> str:
    now = [str(bar.phase) for bar in drawn if bar.is_cut]
    lasted = duration(sides.last_s)
    return f"It is still under way, {lasted} after its first note; open: {', '.join(now) or 'nothing'}."


def _wire_sentence(drawn: tuple[Bar, ...]) -> Iterator[str]:
    for bar in drawn:
        busy = bar.hidden_s + bar.exposed_s
        if bar.phase is HandoffPhase.WIRE and bar.parts and busy > 0:
            hidden = f"{duration(bar.hidden_s)} of the {duration(busy)} on the wire were hidden behind prefill"
            yield f"{size(bar.moved_bytes)} were moved; {hidden}."


def _unknowns(sides: Sides, clock: ClockOffset, participants: tuple[Participant, ...]) -> Iterator[str]:
    for participant in participants:
        if not sides.of(participant.side).is_known:
            why = participant.problem or "the instance knows nothing of this hand-off"
            yield f"The {participant.side} side ({participant.name}) is not known: {why}."
    if sides.source.is_known and sides.target.is_known and not clock.is_joined:
        yield "No message between the two sides bounds the offset of their clocks; both are drawn from 0."


def _summary(handoffs: tuple[HandoffReport, ...]) -> str:
    if not handoffs:
        return "Nothing is known of this transfer."
    if len(handoffs) == 1:
        return handoffs[0].sentence
    slowest = max(handoffs, key=lambda handoff: (any(_is_bad(end) for end in handoff.ends), handoff.exposed_s or 0.0))
    number = f"prompt {slowest.prompt_index}, sample {slowest.sample_index}"
    return f"{len(handoffs)} hand-offs; the one that took longest, or went wrong, is {number}: {slowest.sentence}"


def _is_bad(end: SideEnd) -> bool:
    return end.outcome not in (None, Outcome.DELIVERED)


def duration(seconds: float) -> str:
    """Seconds with about three digits: `0.42 ms`, `12.3 ms`, `450 ms`, `1.50 s`."""
    ms = seconds * 1000
    for limit, digits in ((1, 2), (100, 1), (1000, 0)):
        if round(abs(ms), digits) < limit:
            return f"{ms:.{digits}f} ms"
    return f"{seconds:.2f} s"


def size(count: int) -> str:
    """Bytes with a unit: `512 B`, `3.4 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def row_label(bar: Bar) -> str:
    """The label of a phase's row."""
    return f"{bar.phase} at the {bar.side}" if bar.phase is HandoffPhase.QUEUE else str(bar.phase)
