"""The life of a hand-off as tables: (state, event) -> (state, effects). One table per side; all that may happen is a row.

Theory of operation. A side of a hand-off is one small state machine. Its coordinator turns what it hears (from its engine,
its peer, its ranks and the clock) into events, steps the machine, and performs the effects that the row lists, in order. The
tables know no time, no sockets and no block lists; they only say what may follow what. Three kinds of events exist for every
state: those with a row, those in `LATE` (they may still arrive after the end, or again, and then change nothing), and all
others, which are a bug of ours: `step` raises, and nothing has changed.

Invariants that the tables encode:
- terminal states have no rows, so the first outcome stands;
- a target leaves STOPPING only when every leg is quiet, so its blocks never go back while somebody may write to them;
- a target decodes (DELIVER) only out of CONFIRMING: after the last byte and after the source's word;
- a source returns its blocks only when it also stops confirming, so a late read can never be confirmed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbaton.errors import IllegalTransition

__all__ = [
    "SOURCE",
    "TARGET",
    "Row",
    "SourceEffect",
    "SourceEvent",
    "SourceState",
    "Table",
    "TargetEffect",
    "TargetEvent",
    "TargetState",
]


class SourceState(enum.StrEnum):
    """Where the source side of a hand-off stands."""

    HELD = "held"
    READING = "reading"
    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class SourceEvent(enum.StrEnum):
    """What can happen to a source side."""

    ASKED = "asked"
    RENEWED = "renewed"
    CONFIRM_ASKED = "confirm asked"
    RELEASED_DELIVERED = "released: delivered"
    RELEASED_FAILED = "released: failed"
    RELEASED_CANCELLED = "released: cancelled"
    ABORTED = "aborted here"
    LEASE_OUT = "lease out"
    PEER_GONE = "peer gone"


class SourceEffect(enum.StrEnum):
    """What the source's coordinator then does."""

    EXTEND_LEASE = "extend lease"
    SEND_OFFER = "send offer"
    SEND_CONFIRMATION = "send confirmation"
    TELL_RETRACTED = "tell retracted"
    RETURN_BLOCKS = "return blocks"


class TargetState(enum.StrEnum):
    """Where the target side of a hand-off stands."""

    GREETING = "greeting"
    ASKING = "asking"
    FILLING = "filling"
    CONFIRMING = "confirming"
    STOPPING = "stopping"
    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class TargetEvent(enum.StrEnum):
    """What can happen to a target side."""

    PEER_KNOWN = "peer known"
    OFFERED = "offered"
    LEGS_FILLED = "legs filled"
    CONFIRMED = "confirmed"
    REFUSED = "refused"
    LEG_FAILED = "leg failed"
    ABORTED = "aborted here"
    NO_PROGRESS = "no progress"
    PEER_GONE = "peer gone"
    QUIET_FAILED = "quiet: failed"
    QUIET_CANCELLED = "quiet: cancelled"
    QUIET_EXPIRED = "quiet: expired"


class TargetEffect(enum.StrEnum):
    """What the target's coordinator then does."""

    SEND_ASK = "send ask"
    START_LEGS = "start legs"
    ASK_CONFIRMATION = "ask confirmation"
    STOP_LEGS = "stop legs"
    DELIVER = "deliver"
    TELL_RELEASE = "tell release"
    RETURN_BLOCKS = "return blocks"


StateT = TypeVar("StateT", bound=enum.StrEnum)
EventT = TypeVar("EventT", bound=enum.StrEnum)
EffectT = TypeVar("EffectT", bound=enum.StrEnum)


@dataclass(frozen=True, slots=True)
class Row(Generic[StateT, EffectT]):
    """Where a step leads, and what to do on the way."""

    state: StateT
    effects: tuple[EffectT, ...] = ()


@dataclass(frozen=True, slots=True)
class Table(Generic[StateT, EventT, EffectT]):
    """All rows of one side, the states that are final, and the events that may come late."""

    name: str
    start: StateT
    rows: Mapping[tuple[StateT, EventT], Row[StateT, EffectT]]
    terminal: frozenset[StateT]
    late: frozenset[tuple[StateT, EventT]]

    def step(self, state: StateT, event: EventT) -> Row[StateT, EffectT] | None:
        """The row for `event` in `state`; None when it comes late and changes nothing. Raises IllegalTransition."""
        row = self.rows.get((state, event))
        if row is not None:
            return row
        if state in self.terminal or (state, event) in self.late:
            return None
        raise IllegalTransition(f"{self.name}: {event!s} in state {state!s}")


def _source() -> Table[SourceState, SourceEvent, SourceEffect]:
    state, event, effect = SourceState, SourceEvent, SourceEffect
    rows: dict[tuple[SourceState, SourceEvent], Row[SourceState, SourceEffect]] = {}
    for live in (state.HELD, state.READING):
        rows |= {
            (live, event.ASKED): Row(state.READING, (effect.EXTEND_LEASE, effect.SEND_OFFER)),
            (live, event.RENEWED): Row(live, (effect.EXTEND_LEASE,)),
            (live, event.ABORTED): Row(state.CANCELLED, (effect.TELL_RETRACTED, effect.RETURN_BLOCKS)),
            (live, event.LEASE_OUT): Row(state.EXPIRED, (effect.TELL_RETRACTED, effect.RETURN_BLOCKS)),
            (live, event.RELEASED_FAILED): Row(state.FAILED, (effect.RETURN_BLOCKS,)),
            (live, event.RELEASED_CANCELLED): Row(state.CANCELLED, (effect.RETURN_BLOCKS,)),
        }
    rows |= {
        (state.READING, event.CONFIRM_ASKED): Row(state.READING, (effect.EXTEND_LEASE, effect.SEND_CONFIRMATION)),
        (state.READING, event.RELEASED_DELIVERED): Row(state.DELIVERED, (effect.RETURN_BLOCKS,)),
        (state.READING, event.PEER_GONE): Row(state.FAILED, (effect.RETURN_BLOCKS,)),
    }
    return Table(
        name="source",
        start=state.HELD,
        rows=rows,
        terminal=frozenset({state.DELIVERED, state.FAILED, state.CANCELLED, state.EXPIRED}),
        late=frozenset(
            {(state.HELD, event.CONFIRM_ASKED), (state.HELD, event.RELEASED_DELIVERED), (state.HELD, event.PEER_GONE)}
        ),
    )


def _target() -> Table[TargetState, TargetEvent, TargetEffect]:
    state, event, effect = TargetState, TargetEvent, TargetEffect
    stop = Row(state.STOPPING, (effect.TELL_RELEASE, effect.STOP_LEGS))
    rows: dict[tuple[TargetState, TargetEvent], Row[TargetState, TargetEffect]] = {
        (state.GREETING, event.PEER_KNOWN): Row(state.ASKING, (effect.SEND_ASK,)),
        (state.ASKING, event.OFFERED): Row(state.FILLING, (effect.START_LEGS,)),
        (state.FILLING, event.LEGS_FILLED): Row(state.CONFIRMING, (effect.ASK_CONFIRMATION,)),
        (state.FILLING, event.LEG_FAILED): stop,
        (state.CONFIRMING, event.CONFIRMED): Row(state.DELIVERED, (effect.TELL_RELEASE, effect.DELIVER)),
        (state.STOPPING, event.QUIET_FAILED): Row(state.FAILED, (effect.RETURN_BLOCKS,)),
        (state.STOPPING, event.QUIET_CANCELLED): Row(state.CANCELLED, (effect.RETURN_BLOCKS,)),
        (state.STOPPING, event.QUIET_EXPIRED): Row(state.EXPIRED, (effect.RETURN_BLOCKS,)),
    }
    for live in (state.GREETING, state.ASKING, state.FILLING, state.CONFIRMING):
        for ending in (event.REFUSED, event.ABORTED, event.NO_PROGRESS, event.PEER_GONE):
            rows[live, ending] = stop
    stopping_late = set(event) - {event.QUIET_FAILED, event.QUIET_CANCELLED, event.QUIET_EXPIRED}
    late = {(state.STOPPING, late_event) for late_event in stopping_late}
    late |= {(busy, event.OFFERED) for busy in (state.FILLING, state.CONFIRMING)}
    late |= {(busy, event.PEER_KNOWN) for busy in (state.ASKING, state.FILLING, state.CONFIRMING)}
    late |= {(early, event.CONFIRMED) for early in (state.GREETING, state.ASKING, state.FILLING)}
    late |= {(state.GREETING, event.OFFERED)}
    return Table(
        name="target",
        start=state.GREETING,
        rows=rows,
        terminal=frozenset({state.DELIVERED, state.FAILED, state.CANCELLED, state.EXPIRED}),
        late=frozenset(late),
    )


SOURCE = _source()
TARGET = _target()
