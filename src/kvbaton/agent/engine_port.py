"""The port between an engine and its agents: what an engine asks for, and what it is notified of.

An engine calls the methods of `HandoffPort` from its own thread; none of them waits. It drains `events` once per step, and
when it is notified that there may be some; `EngineEvent`s are facts that the coordinator has decided, in order, each reported
exactly once. Every call shows that the engine is at work. One that makes none for `transfer_timeout` (as a target:
`defer_timeout`) hangs, and its peers end the hand-offs that wait for it.

A source calls `expect_target`, then in push `spans_ready` for what it has computed and `retract` when it preempts the prefill,
and at last `offer`. A target calls `expect_source` while the request waits for memory, then `allocated` (in pull and push
alike: "I have blocks, fill them"). Both may `cancel` at any time. A target that refuses a request before admission calls
`decline`, so that its source need not wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Incarnation, Mode, Outcome, Span
from kvbaton.core.timeline import Side

__all__ = [
    "AgentStats",
    "Allocation",
    "Drained",
    "EngineEvent",
    "Granted",
    "HandoffPort",
    "HandoffStats",
    "Landed",
    "Offer",
    "SourceEnded",
    "SourceRequest",
    "SpansReady",
    "TargetEnded",
]


@dataclass(frozen=True, slots=True)
class Offer:
    """Prefill is complete: `blocks` hold the cache of the first `tokens` tokens, and stay untouched until `SourceEnded`."""

    key: HandoffKey
    blocks: BlockLists
    tokens: int
    aux: Aux


class SpansReady(NamedTuple):
    """Spans of one hand-off that are computed and lie in `blocks`."""

    key: HandoffKey
    blocks: BlockLists
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """A request whose cache will come from the source at `source`, of the named incarnation where the router knew it.

    `prompt` is a digest of the prompt's tokens: a hand-off joins two requests only if they have the same prompt, because a
    client may use one transfer id twice. It is empty when a request is declined before its prompt was read: then everything
    under its transfer id is declined.
    """

    key: HandoffKey
    prompt: str
    source: ControlAddress
    source_incarnation: Incarnation | None = None
    mode: Mode = Mode.PULL


@dataclass(frozen=True, slots=True)
class Allocation:
    """The target has allocated `blocks` for `tokens` tokens; all but the first `cached_tokens` are to be filled."""

    request: SourceRequest
    blocks: BlockLists
    tokens: int
    cached_tokens: int

    @property
    def key(self) -> HandoffKey:
        """The key of the hand-off."""
        return self.request.key


class HandoffStats(msgspec.Struct, frozen=True):
    """What one hand-off cost, as seen by the target."""

    bytes_planned: int = 0
    bytes_moved: int = 0
    handover_s: float = 0.0
    wire_s: float = 0.0
    transport: str = ""
    source_writes: bool = False
    """Whether the source wrote; then only the source knows how many bytes that were."""


class SourceEnded(msgspec.Struct, frozen=True):
    """The source side is over: its blocks may go back to the pool, and what is still being computed for it may stop."""

    key: HandoffKey
    outcome: Outcome
    reason: str = ""


class Granted(msgspec.Struct, frozen=True):
    """A target has blocks ready for this prefill: it may take the last free blocks here.

    The target has the first `cached_tokens` tokens already. An engine whose lists of state begin behind them has to know that.
    """

    key: HandoffKey
    cached_tokens: int = 0


class Drained(msgspec.Struct, frozen=True):
    """What was announced before a `retract` is void, and no copy of ours uses it: its blocks may go back to the pool.

    The target may still read them; what it reads is never confirmed. A hand-off that ends first gets `SourceEnded` instead.
    Spans of the new generation may be reported only after this, numbered from 0.
    """

    key: HandoffKey


class Landed(msgspec.Struct, frozen=True):
    """Every byte and the aux record are in, and the source has confirmed them: decode may start."""

    key: HandoffKey
    aux: Aux
    stats: HandoffStats


class TargetEnded(msgspec.Struct, frozen=True):
    """The target side ended without landing, and no copy writes to its blocks any more: they may go back to the pool."""

    key: HandoffKey
    outcome: Outcome
    reason: str


EngineEvent = SourceEnded | Granted | Drained | Landed | TargetEnded


class HandoffPort(Protocol):
    """What an engine sees of its agents.

    Every `expect_target` ends in one SourceEnded, every `expect_source` in one Landed or TargetEnded. A call about a hand-off
    that has ended is ignored: the event that reports the end may still be on its way to the engine.
    """

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        """A prefill for a hand-off was admitted: from now on its target gets heartbeats for it. `prompt` is a digest."""

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """These spans are computed and lie in `blocks`, until `retract` or the end."""

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None:
        """`spans_ready` of many hand-offs at once, at the price of one call."""

    def retract(self, key: HandoffKey) -> None:
        """Everything reported about `key` is void; its blocks may be reused after `Drained`. Computing starts over."""

    def offer(self, offer: Offer) -> None:
        """The prefill is complete; the blocks are held until `SourceEnded`. Without spans reported before, all is one span."""

    def expect_source(self, request: SourceRequest) -> None:
        """A request for a hand-off was admitted: from now on its source gets heartbeats for it."""

    def allocated(self, allocation: Allocation) -> None:
        """Blocks are there; they belong to the hand-off until `Landed` or `TargetEnded`."""

    def decline(self, request: SourceRequest, reason: str) -> None:
        """A request for this hand-off was refused before admission: release its source at once. No event follows."""

    def refuse(self, key: HandoffKey, reason: str) -> None:
        """A prefill for a hand-off was refused before admission: its target must not wait for it. No event follows."""

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        """Cancel a hand-off, on `side` or on whichever side it is; unknown keys are ignored. The usual event still follows."""

    def events(self) -> list[EngineEvent]:
        """Take what was decided since the last call; never waits."""


@dataclass(frozen=True, slots=True)
class AgentStats:
    """The agents as they were at one moment."""

    handoffs_live: Mapping[str, int]
    """Hand-offs that have not ended, by side (`source`, `target`)."""
    quarantined_blocks: int
    """Target blocks that wait until every copy into them has provably stopped."""
    late_total: Counter[str]
    """Events that came when they could not change anything any more, by kind."""
    dropped_total: Counter[str]
    """Frames and messages that were not taken, by cause."""
    mismatches_total: int
    """Hand-offs to this instance that failed because of a checksum."""
    aux_fallbacks_total: Counter[str]
    """Aux records that should have travelled by data and were sent in a message after all, by cause."""
    errors_total: int
    """Errors of our own that the agents' thread continued after."""
    turns_total: int
    """How often the agents' thread has worked."""
    busy_s_total: float
    """Seconds for which it has worked."""
    poll_s_total: float
    """Of these, seconds for which it took what its transport had completed."""
    stamped_total: int = 0
    """Hand-offs to this instance whose source was not asked to confirm them, because its stamp stood."""
    failures_total: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Hand-offs that were ended before they were delivered, by side and by what ended them."""
    runs_total: int = 0
    """Runs that were handed to the transport."""
    peers: int = 0
    """Peers whose cards are known."""
    handshakes_total: int = 0
    """Cards that were checked and taken, each incarnation of a peer once."""
    certificate_loads_total: int = 0
    """Changes of the certificate files that were taken."""
    failed_certificate_loads_total: int = 0
    """Changes of the certificate files that were not taken, because the files do not fit or have expired."""
    cluster_key_loads_total: int = 0
    """Changes of the file with the cluster keys that were taken."""
    failed_cluster_key_loads_total: int = 0
    """Changes of the file with the cluster keys that were not taken, because it holds no keys."""
