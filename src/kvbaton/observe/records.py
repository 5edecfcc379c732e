"""The JSON in which an instance reports its hand-offs. Moments are durations, because clocks of two processes do not compare.

Readers take these values from another process: bounds are part of the types, so that decoding also validates.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.core.handoff import MAX_TRANSFER_ID, Outcome
from kvbaton.core.timeline import Side, Stage

__all__ = ["MAX_TEXT", "InstanceInfo", "InstanceRecord", "NoteRecord", "SideRecord", "Summary"]

MAX_TEXT = 512
"""Characters of a note's text that are reported."""

_MAX_NOTES = 16_384
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Name = Annotated[str, Meta(max_length=MAX_TRANSFER_ID)]
_TransferId = Annotated[str, Meta(min_length=1, max_length=MAX_TRANSFER_ID)]


class InstanceInfo(msgspec.Struct, frozen=True):
    """The reporting instance: its role, the address by which a router knows it, and its incarnation."""

    role: _Name
    name: _Name
    incarnation: _Name


class NoteRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One note, `at_s` seconds after the first note of its side."""

    stage: Stage
    at_s: _Seconds
    first_token: _Count = 0
    end_token: _Count = 0
    first_layer: _Count = 0
    end_layer: _Count = 0
    moved_bytes: _Count = 0
    rank: _Count = 0
    outcome: Outcome | None = None
    text: Annotated[str, Meta(max_length=MAX_TEXT)] = ""


class SideRecord(msgspec.Struct, frozen=True):
    """One side of one hand-off: its notes in order, the first of them `since_s` after the instance's first of this transfer."""

    prompt_index: _Count
    sample_index: _Count
    side: Side
    since_s: _Seconds
    notes: Annotated[tuple[NoteRecord, ...], Meta(min_length=1, max_length=_MAX_NOTES)]


class InstanceRecord(msgspec.Struct, frozen=True):
    """All notes of one instance about one transfer. `notes_dropped` counts those that it had no room for."""

    transfer_id: _TransferId
    instance: InstanceInfo
    sides: Annotated[tuple[SideRecord, ...], Meta(max_length=_MAX_NOTES)]
    notes_dropped: _Count = 0


class Summary(msgspec.Struct, frozen=True):
    """One line of a list of transfers. `outcome` is None while a hand-off is under way, else the worst of its sides."""

    transfer_id: str
    sides: tuple[Side, ...]
    handoffs: int
    outcome: Outcome | None
    total_s: float
