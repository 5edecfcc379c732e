"""The ports behind which the agents' logic lives: a clock, a way to speak to peers, the ranks, and the ear of the engine.

The driver gives real ones, the simulator gives simulated ones, tests give scripted ones. The logic on this side of the ports
does no I/O and starts no thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbaton.agent.engine_port import EngineEvent
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, ProcessId
from kvbaton.core.checks import Pieces
from kvbaton.core.handoff import BlockLists, Executor, HandoffKey, Incarnation, Integrity, Span
from kvbaton.core.messages import Message
from kvbaton.core.timeline import Side

__all__ = [
    "AuxAsk",
    "AuxRead",
    "Clock",
    "Control",
    "EnginePort",
    "LegFailed",
    "LegId",
    "LegMoved",
    "LegOpen",
    "LegReport",
    "LegStopped",
    "LegSummed",
    "Memory",
    "PeerFenced",
    "RankReport",
    "Ranks",
    "RegionFenced",
    "SumAsk",
]

Clock = Callable[[], float]
"""Monotonic seconds; only differences mean anything."""

EnginePort = Callable[[EngineEvent], None]
"""Where decided facts go."""


class Control(Protocol):
    """Speaks to other coordinators. No method waits, and a message may be lost."""

    def dial(self, address: ControlAddress, message: Message) -> None:
        """Say `message` to whichever incarnation answers at `address`."""

    def send(self, peer: Incarnation, message: Message) -> None:
        """Say `message` to a peer that was heard before; dropped and counted when there is no way to it."""

    def is_gone(self, process: ProcessId) -> bool:
        """Whether a process of this host is provably dead; false whenever that cannot be known."""


@dataclass(frozen=True, slots=True, order=True)
class LegId:
    """One attempt to move one generation of a hand-off: what a rank calls a leg."""

    key: HandoffKey
    grant: int
    generation: int


@dataclass(frozen=True, slots=True)
class LegOpen:
    """What one rank needs to know before it can move anything of a leg; the blocks of the source come with each move."""

    leg: LegId
    peer: Incarnation
    executor: Executor
    epoch: int
    target_blocks: BlockLists
    cached_tokens: int
    total_tokens: int | None = None
    """Of the whole sequence; without it, each span counts as the last."""


@dataclass(frozen=True, slots=True)
class LegMoved:
    """One span of a leg is where it belongs."""

    leg: LegId
    rank: int
    span: int
    bytes_planned: int
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class LegFailed:
    """A leg ended early; its memory is quiet."""

    leg: LegId
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class LegStopped:
    """A leg that was told to stop is quiet: nothing moves for it any more."""

    leg: LegId
    rank: int


@dataclass(frozen=True, slots=True)
class SumAsk:
    """Which spans of a hand-off to sum on one rank: of whose side, in which blocks, from which token on, and how much."""

    leg: LegId
    side: Side
    blocks: BlockLists
    spans: tuple[Span, ...]
    cached_tokens: int
    integrity: Integrity
    total_tokens: int | None = None
    """Of the whole sequence; without it, each span counts as the last."""
    peer: Incarnation | None = None
    """Whose ranks hold the other ends; without it, all that the rank holds is summed as one leg of the rank's number."""


@dataclass(frozen=True, slots=True)
class LegSummed:
    """One span was summed on one rank: (number, checksum) of each of its legs with the ranks of the peer, or why not."""

    leg: LegId
    side: Side
    rank: int
    span: int
    sums: tuple[tuple[int, int], ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class AuxAsk:
    """Where the aux record of a hand-off lies on rank 0 of a peer, and the slot of ours to read it into."""

    leg: LegId
    peer: Incarnation
    offset: int
    slot: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AuxRead:
    """What was read, or why nothing was; the slot is not touched any more."""

    leg: LegId
    slot: int
    data: bytes
    error: str = ""


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """A rank has torn down its session with a peer: what that peer was granted before `epoch` it cannot write any more."""

    peer: Incarnation
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class RegionFenced:
    """A rank has registered its memory anew: nobody who was granted an earlier epoch can write here any more."""

    epoch: int
    rank: int


LegReport = LegMoved | LegFailed | LegStopped
RankReport = LegReport | LegSummed | AuxRead | PeerFenced | RegionFenced


class Memory(Protocol):
    """A rank's own memory, as its agent sees it."""

    def sum(self, pieces: Pieces, value: int) -> int:
        """Go on with the checksum `value` over these pieces, in order."""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """A copy of what lies there."""

    def write(self, offset: int, data: bytes) -> None:
        """Let `data` lie there."""


class Ranks(Protocol):
    """The rank agents of this instance, as the coordinator sees them. Answers come back as `RankReport`s."""

    @property
    def executor(self) -> Executor:
        """Who executes the copies into this instance's memory, by the promise of its transport."""

    def connect(self, card: Card) -> None:
        """Make every rank able to reach the ranks of `card`; raises TransportError or Incompatible."""

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer that is gone for good; what is posted to it fails."""

    def revoke(self, incarnation: Incarnation, epoch: int) -> None:
        """End a peer's right to touch this instance's memory; PeerFenced follows from each rank that can do that."""

    def reset_region(self, epoch: int) -> None:
        """End everybody's right to touch this instance's memory; RegionFenced follows from each rank that can do that."""

    def open_leg(self, rank: int, start: LegOpen) -> None:
        """Prepare one leg; nothing moves yet."""

    def move(self, rank: int, leg: LegId, source_blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """Move spans; LegMoved follows for each, or LegFailed once for the leg."""

    def close_leg(self, rank: int, leg: LegId) -> None:
        """Forget a leg of which nothing is in flight; nothing is reported."""

    def stop_leg(self, rank: int, leg: LegId) -> None:
        """Stop one leg; LegStopped follows once it is quiet (at once for an unknown leg)."""

    def sum_spans(self, rank: int, ask: SumAsk) -> None:
        """Sum spans in the rank's own memory; LegSummed follows for each, unless the sums are dropped before."""

    def drop_sums(self, rank: int, side: Side, key: HandoffKey) -> None:
        """Nobody waits for the sums of this side of a hand-off any more."""

    def put_aux(self, offset: int, data: bytes) -> bool:
        """Write an aux record into the memory of rank 0; false when it cannot be written there."""

    def read_aux(self, ask: AuxAsk) -> None:
        """Let rank 0 read an aux record; AuxRead follows, once."""
