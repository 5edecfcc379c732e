"""Hand-offs whose true times are known: notes as two processes would take them, each by a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.core.handoff import HandoffKey, Outcome, TransferId
from kvbaton.core.timeline import Note, Side, Stage
from kvbaton.observe.records import InstanceInfo, InstanceRecord
from kvbaton.observe.timelines import Timelines
from kvbaton.observe.transfer_report import SideAnswer

__all__ = ["TRANSFER", "Way", "account", "notes_of_pull", "notes_of_push"]

TRANSFER = "tx-1"
SPAN_BYTES = 4096


@dataclass
class Way:
    """How long everything takes, in seconds, and how wrong the two clocks are. `true` holds the moments as they really were."""

    source_clock: float = 1000.0
    target_clock: float = -52.5
    queue_s: float = 0.002
    layer_s: float = 0.001
    message_s: float = 0.0005
    copy_s: float = 0.0004
    allocate_s: float = 0.003
    router_s: float = 0.004
    step_s: float = 0.0002
    chunks: int = 3
    layers: int = 4
    chunk_tokens: int = 16
    cached_tokens: int = 0
    key: HandoffKey = field(default_factory=lambda: HandoffKey(TransferId(TRANSFER)))
    notes: list[Note] = field(default_factory=list)
    true: dict[tuple[Side, Stage], list[float]] = field(default_factory=dict)

    def source(self, stage: Stage, at: float, **more: object) -> float:
        return self._note(Side.SOURCE, self.source_clock, stage, at, more)

    def target(self, stage: Stage, at: float, **more: object) -> float:
        return self._note(Side.TARGET, self.target_clock, stage, at, more)

    def of(self, side: Side) -> list[Note]:
        return [note for note in self.notes if note.side is side]

    def _note(self, side: Side, clock: float, stage: Stage, at: float, more: dict[str, object]) -> float:
        self.notes.append(Note(self.key, side, stage, at + clock, **more))  # type: ignore[arg-type]
        self.true.setdefault((side, stage), []).append(at)
        return at


def notes_of_push(way: Way) -> Way:
    """A push hand-off that works out: the cache streams while it is computed."""
    way.source(Stage.ARRIVED, 0.0)
    way.target(Stage.ARRIVED, 0.0001)
    way.target(Stage.ALLOCATED, way.allocate_s)
    way.target(Stage.GRANT_SENT, way.allocate_s + 0.0001)
    granted = way.source(Stage.GRANTED, way.allocate_s + 0.0001 + way.message_s)
    now = way.source(Stage.STARTED, way.queue_s)
    moved = 0.0
    for chunk in range(way.chunks):
        for layer in range(way.layers):
            now += way.layer_s
            moved = _span_travels(way, max(now, granted), moved, span(way, chunk, layer))
        way.source(Stage.COMPUTED, now, **span(way, chunk, 0, way.layers))
    sampled = way.source(Stage.PREFILLED, now + 0.0001)
    heard = way.target(Stage.PREFILLED, max(sampled, granted) + way.message_s)
    return _finish(way, max(moved, heard))


def notes_of_pull(way: Way) -> Way:
    """A pull hand-off that works out: everything travels after prefill."""
    way.source(Stage.ARRIVED, 0.0)
    now = way.source(Stage.STARTED, way.queue_s)
    for chunk in range(way.chunks):
        now = way.source(Stage.COMPUTED, now + way.layers * way.layer_s, **span(way, chunk, 0, way.layers))
    sampled = way.source(Stage.PREFILLED, now + 0.0001)
    asked = way.target(Stage.ARRIVED, sampled + way.router_s)
    way.target(Stage.ALLOCATED, asked + way.allocate_s)
    sent = way.target(Stage.GRANT_SENT, asked + way.allocate_s + 0.0001)
    granted = sent + way.message_s
    whole = {**span(way, 0, 0, way.layers), "end_token": way.chunks * way.chunk_tokens}
    moved = _span_travels(way, granted, 0.0, whole)
    way.target(Stage.PREFILLED, granted + way.message_s)
    return _finish(way, moved)


def span(way: Way, chunk: int, first_layer: int, end_layer: int | None = None) -> dict[str, int]:
    tokens = {"first_token": chunk * way.chunk_tokens, "end_token": (chunk + 1) * way.chunk_tokens}
    return {**tokens, "first_layer": first_layer, "end_layer": first_layer + 1 if end_layer is None else end_layer}


def _span_travels(way: Way, announced: float, before: float, place: dict[str, int]) -> float:
    way.source(Stage.ANNOUNCED, announced, **place)
    heard = way.target(Stage.ANNOUNCED, announced + way.message_s, **place)
    taken = {**place, "first_token": max(place["first_token"], way.cached_tokens)}
    return way.target(Stage.MOVED, max(heard, before) + way.copy_s, moved_bytes=SPAN_BYTES, **taken)


def _finish(way: Way, filled: float) -> Way:
    way.target(Stage.FILLED, filled)
    confirmed = way.source(Stage.CONFIRMED, filled + way.message_s)
    landed = way.target(Stage.CONFIRMED, confirmed + way.message_s)
    way.target(Stage.ENDED, landed, outcome=Outcome.DELIVERED)
    way.source(Stage.ENDED, landed + way.message_s, outcome=Outcome.DELIVERED)
    way.target(Stage.FIRST_STEP, landed + way.step_s)
    return way


def account(side: Side, *ways: Way) -> SideAnswer:
    """What the instance of one side tells."""
    return SideAnswer(name=f"{side} instance", record=record(side, *ways))


def record(side: Side, *ways: Way) -> InstanceRecord:
    timelines = Timelines(InstanceInfo("prefill" if side is Side.SOURCE else "decode", f"{side}:1", f"inc-{side}"))
    for way in ways:
        for note in way.of(side):
            timelines.note(note)
    told = timelines.record(TRANSFER)
    assert told is not None
    return told
