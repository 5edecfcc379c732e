"""Notes: the facts about a hand-off that coordinators, ranks and engines emit, from which timelines are made.

A note is a fact with a moment of its side's own clock; moments of two processes are never compared directly. A message is noted
before it is sent, so that no effect is noted before its cause: `observe/clocks.py` relies on that order to join two clocks.
Notes are emitted on the hot path: an `Observer` returns at once and does not raise.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from kvbaton.core.handoff import HandoffKey, Outcome, Span

__all__ = ["Note", "Observer", "Side", "Stage", "no_observer", "note"]


class Side(enum.StrEnum):
    """One of the two sides of a hand-off."""

    SOURCE = "source"
    TARGET = "target"


class Stage(enum.StrEnum):
    """What has just happened, in the order of a push hand-off; a side notes only its own stages."""

    ARRIVED = "arrived"
    """Both: the engine has the request."""
    STARTED = "started"
    """Source: the request has left the queue, its prefill begins."""
    ALLOCATED = "allocated"
    """Target: there are blocks."""
    GRANT_SENT = "grant sent"
    """Target: the grant is sent."""
    GRANTED = "granted"
    """Source: a grant was received."""
    COMPUTED = "computed"
    """Source: one chunk is computed, in all its layers."""
    ANNOUNCED = "announced"
    """Source: a span was announced (pull: all of it at once). Target: the announcement was received."""
    MOVED = "moved"
    """Target, where it reads: a span of one rank lies in its blocks."""
    PREFILLED = "prefilled"
    """Source: the first token is chosen and the cache complete. Target: `prefilled` was received."""
    FILLED = "filled"
    """Target: everything is in; the source is asked to confirm it."""
    CONFIRMED = "confirmed"
    """Source: the confirmation is sent. Target: it was received."""
    RETRACTED = "retracted"
    """Source: what was announced is void, computing starts over. Target: `retracted` was received."""
    ENDED = "ended"
    """Both: the side has ended; `outcome` and `text` state how."""
    FIRST_STEP = "first step"
    """Target: the engine takes the landed cache into its next step."""


class Note(msgspec.Struct, frozen=True, gc=False):
    """One fact about one side of one hand-off, at a moment of that side's monotonic clock."""

    key: HandoffKey
    side: Side
    stage: Stage
    at: float
    first_token: int = 0
    end_token: int = 0
    first_layer: int = 0
    end_layer: int = 0
    moved_bytes: int = 0
    rank: int = 0
    outcome: Outcome | None = None
    text: str = ""


def note(
    key: HandoffKey,
    side: Side,
    stage: Stage,
    at: float,
    span: Span | None = None,
    *,
    moved_bytes: int = 0,
    rank: int = 0,
    outcome: Outcome | None = None,
    text: str = "",
) -> Note:
    """A note, about one span where one is given."""
    if span is None:
        return Note(key, side, stage, at, moved_bytes=moved_bytes, rank=rank, outcome=outcome, text=text)
    tokens, layers = (span.first_token, span.end_token), (span.first_layer, span.end_layer)
    return Note(key, side, stage, at, *tokens, *layers, moved_bytes, rank, outcome, text)


Observer = Callable[[Note], None]
"""Takes notes; called from several threads."""


def no_observer(_: Note) -> None:
    """The observer that discards every note."""
