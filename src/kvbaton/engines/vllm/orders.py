"""What the scheduler half of the connector orders from the worker half in one step, and what the worker half reports back.

vLLM carries both between its processes, so they are plain values. Every order names the request, because a request can be
over, and its hand-off's key taken by another one, while the first is still being stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvbaton.agent.engine_port import Allocation, Offer, SourceRequest
from kvbaton.core.handoff import BlockLists, HandoffKey

__all__ = [
    "ComputedChunk",
    "FailLoad",
    "Order",
    "SourceBegins",
    "SourceCancels",
    "SourceOffers",
    "SourceRetracts",
    "SourceWithdraws",
    "StepOrders",
    "StepReport",
    "TargetBegins",
    "TargetDeclines",
    "TargetCancels",
    "TargetAllocates",
]


@dataclass(frozen=True, slots=True)
class SourceBegins:
    """A prefill for a hand-off was admitted; `prompt` is a digest."""

    request_id: str
    key: HandoffKey
    prompt: str


@dataclass(frozen=True, slots=True)
class SourceRetracts:
    """The blocks of a prefill were taken away; what was announced of it is void before the next forward."""

    request_id: str
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class SourceOffers:
    """The prefill is complete; vLLM keeps the blocks until the sending is reported as finished."""

    request_id: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class SourceCancels:
    """The prefill was aborted; vLLM keeps the blocks until the sending is reported as finished."""

    request_id: str
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class SourceWithdraws:
    """The prefill will never be computed; it has no blocks, and vLLM waits for nothing."""

    request_id: str
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class TargetBegins:
    """A request for a hand-off was admitted."""

    request_id: str
    wanted: SourceRequest


@dataclass(frozen=True, slots=True)
class TargetDeclines:
    """A request for a hand-off was refused before admission; what its prompt was is not known."""

    request_id: str
    wanted: SourceRequest


@dataclass(frozen=True, slots=True)
class TargetAllocates:
    """Blocks are there; vLLM waits until the receiving is reported as finished."""

    request_id: str
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class TargetCancels:
    """The request is over, or does not need the hand-off any more."""

    request_id: str
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class FailLoad:
    """vLLM waits for a cache that cannot come: the load is reported as failed at once."""

    request_id: str
    reason: str


Order = (
    SourceBegins
    | SourceRetracts
    | SourceOffers
    | SourceCancels
    | SourceWithdraws
    | TargetBegins
    | TargetDeclines
    | TargetAllocates
    | TargetCancels
    | FailLoad
)


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """In this step the tokens `first_token` up to `end_token` of a prefill are computed into `blocks`, layer by layer."""

    request_id: str
    key: HandoffKey
    blocks: BlockLists
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Everything for one step: what to do before the forward, and what the forward computes for hand-offs.

    `first_steps` are hand-offs whose prefill begins with this step, or whose landed cache is first used in it. Steps are
    numbered: the ranks of an instance are not all in the same one.
    """

    orders: tuple[Order, ...] = ()
    chunks: tuple[ComputedChunk, ...] = ()
    has_forward: bool = True
    first_steps: tuple[HandoffKey, ...] = ()
    number: int = 0


@dataclass(slots=True)
class StepReport:
    """What a worker reports after a step, beside the ids that vLLM itself takes.

    All by request: a record of each hand-off that landed, prefills for which a target has blocks ready, and requests whose
    hand-off has ended early: a prefill before vLLM completed it, a target before it had blocks.
    """

    landed: dict[str, dict[str, Any]] = field(default_factory=dict)
    granted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.landed or self.granted or self.ended)

    def aggregate(self, other: StepReport) -> StepReport:
        """Both reports as one."""
        return StepReport({**self.landed, **other.landed}, self.granted | other.granted, self.ended | other.ended)
