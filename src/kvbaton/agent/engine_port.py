"""The seam between an engine and its agents: what an engine asks for, and what it is told.

An engine calls the methods of `HandoffPort` from its own thread; none of them waits. It drains `events` once per step;
`EngineEvent`s are facts that the coordinator has decided, in order, each told exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Incarnation, Outcome

__all__ = ["EngineEvent", "HandoffPort", "HandoffStats", "Landed", "Offer", "Pull", "SourceEnded", "TargetEnded"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Prefill is complete: `blocks` hold the cache of the first `tokens` tokens, and stay untouched until `SourceEnded`."""

    key: HandoffKey
    blocks: BlockLists
    tokens: int
    aux: Aux


@dataclass(frozen=True, slots=True)
class Pull:
    """The target has allocated `blocks` for `tokens` tokens; all but the first `cached_tokens` are to be filled."""

    key: HandoffKey
    source: ControlAddress
    source_incarnation: Incarnation | None
    blocks: BlockLists
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """What one hand-off cost, as seen by the target."""

    bytes_planned: int = 0
    bytes_moved: int = 0
    handover_s: float = 0.0
    wire_s: float = 0.0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """The source side is over: its blocks may go back to the pool."""

    key: HandoffKey
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Landed:
    """Every byte and the aux record are in, and the source has confirmed them: decode may start."""

    key: HandoffKey
    aux: Aux
    stats: HandoffStats


@dataclass(frozen=True, slots=True)
class TargetEnded:
    """The target side ended without landing, and nobody writes to its blocks any more: they may go back to the pool."""

    key: HandoffKey
    outcome: Outcome
    reason: str


EngineEvent = SourceEnded | Landed | TargetEnded


class HandoffPort(Protocol):
    """What an engine sees of its agents. Every `offer` ends in one SourceEnded, every `pull` in one Landed or TargetEnded."""

    def offer(self, offer: Offer) -> None:
        """Announce a finished prefill; the blocks are held until `SourceEnded`."""

    def pull(self, pull: Pull) -> None:
        """Ask for a cache; the blocks belong to the hand-off until `Landed` or `TargetEnded`."""

    def cancel(self, key: HandoffKey) -> None:
        """Give a hand-off up, on whichever side it is; unknown keys are ignored. The usual event still follows."""

    def events(self) -> list[EngineEvent]:
        """Take what was decided since the last call; never waits."""
