"""The names of a hand-off: its key, how it can end, and the small record that travels with the cache."""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

__all__ = ["Aux", "BlockLists", "HandoffKey", "Incarnation", "Outcome", "RequestId", "TransferId"]

TransferId = NewType("TransferId", str)
"""Joins the two sides of a hand-off; made by the router, the same on both instances."""

RequestId = NewType("RequestId", str)
"""An engine's own name of a request; never leaves its process as a key."""

Incarnation = NewType("Incarnation", str)
"""Random id born with a process; a restarted peer is a different peer."""

BlockLists = tuple[tuple[int, ...], ...]
"""Block ids of one request, one tuple per group of the layout, in token order."""


class HandoffKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """What one hand-off is called on every wire and in every log line."""

    transfer_id: TransferId
    prompt_index: int = 0
    sample_index: int = 0

    def __str__(self) -> str:
        return f"{self.transfer_id}/{self.prompt_index}.{self.sample_index}"


class Outcome(enum.StrEnum):
    """How a side of a hand-off ends; exactly one of these, and final."""

    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Aux(msgspec.Struct, frozen=True):
    """Small per-request data sent once beside the cache: the first token, so that the target need not compute it again."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    queue_s: float = 0.0
    prefill_s: float = 0.0
