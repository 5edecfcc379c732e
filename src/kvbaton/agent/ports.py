"""The ports behind which the agents' logic lives: a clock, a way to speak to peers, the ranks, and the ear of the engine.

The driver gives real ones, tests give scripted ones. The logic on this side of the ports does no I/O and starts no thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbaton.agent.engine_port import EngineEvent
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, ProcessId
from kvbaton.core.handoff import BlockLists, HandoffKey, Incarnation
from kvbaton.core.messages import Message

__all__ = [
    "Clock",
    "Control",
    "EnginePort",
    "LegFailed",
    "LegFilled",
    "LegProgress",
    "LegReport",
    "LegStart",
    "LegStopped",
    "Ranks",
]


Clock = Callable[[], float]
"""Monotonic seconds; only differences mean anything."""

EnginePort = Callable[[EngineEvent], None]
"""Where decided facts go."""


class Control(Protocol):
    """Speaks to other coordinators. Neither method waits, and a message may be lost."""

    def dial(self, address: ControlAddress, message: Message) -> None:
        """Say `message` to whichever incarnation answers at `address`."""

    def send(self, peer: Incarnation, message: Message) -> None:
        """Say `message` to a peer that was heard before; dropped and counted when there is no way to it."""

    def is_gone(self, process: ProcessId) -> bool:
        """Whether a process of this host is provably dead; false whenever that cannot be known."""


@dataclass(frozen=True, slots=True)
class LegStart:
    """What one rank needs to fill its part of a hand-off from one source rank."""

    key: HandoffKey
    source: Incarnation
    source_rank: int
    source_blocks: BlockLists
    target_blocks: BlockLists
    first_token: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LegProgress:
    """Some bytes of a leg have arrived."""

    key: HandoffKey
    rank: int


@dataclass(frozen=True, slots=True)
class LegFilled:
    """Every run of a leg has arrived."""

    key: HandoffKey
    rank: int
    bytes_planned: int
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class LegFailed:
    """A leg ended early; its memory is quiet."""

    key: HandoffKey
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class LegStopped:
    """A leg that was told to stop is quiet: nobody writes for it any more."""

    key: HandoffKey
    rank: int


LegReport = LegProgress | LegFilled | LegFailed | LegStopped


class Ranks(Protocol):
    """The rank agents of this instance, as the coordinator sees them. Answers come back as `LegReport`s."""

    def connect(self, card: Card) -> None:
        """Make every rank able to read from the ranks of `card`; raises TransportError or Incompatible."""

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer that is gone for good."""

    def start_leg(self, rank: int, start: LegStart) -> None:
        """Start one leg; its end is reported as LegFilled or LegFailed."""

    def stop_leg(self, rank: int, key: HandoffKey) -> None:
        """Stop one leg; LegStopped follows once it is quiet, whatever state it was in."""
