"""The producer's event as the contract's `after`: a condition that the mover asks, not something a stream waits for."""

from __future__ import annotations

from typing import Any

from kvbaton.transport.base import AfterEvent

__all__ = ["queued_so_far"]


def queued_so_far(stream: Any) -> AfterEvent:
    """Record an event on a torch `stream` now; true once everything that was queued there before has been done."""
    query: AfterEvent = stream.record_event().query
    return query
