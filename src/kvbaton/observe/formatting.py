"""Durations, sizes, phases and outcomes as text for people."""

from __future__ import annotations

from kvbaton.core.handoff import Outcome
from kvbaton.observe.phases import Bar, HandoffPhase

__all__ = ["duration", "outcome_text", "row_label", "size", "waited_for"]

_WAITED = {
    HandoffPhase.ROUTER: "the router",
    HandoffPhase.QUEUE: "blocks at the target",
    HandoffPhase.HANDSHAKE: "the handshake of the two instances",
    HandoffPhase.GRANT: "the grant",
    HandoffPhase.ANNOUNCEMENT: "the announcement",
    HandoffPhase.WIRE: "bytes on the wire",
    HandoffPhase.CONFIRMATION: "the confirmation",
    HandoffPhase.FIRST_STEP: "the first step",
}
_ENDS = {
    Outcome.DELIVERED: "was delivered",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.EXPIRED: "expired",
}


def duration(seconds: float) -> str:
    """Seconds with about three digits: `0.42 ms`, `12.3 ms`, `450 ms`, `1.50 s`."""
    ms = seconds * 1000
    for limit, digits in ((1, 2), (100, 1), (1000, 0)):
        if round(abs(ms), digits) < limit:
            return f"{ms:.{digits}f} ms"
    return f"{seconds:.2f} s"


def size(count: int) -> str:
    """Bytes with a unit: `512 B`, `3.4 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def waited_for(phase: HandoffPhase) -> str:
    """What the request waited for, as the end of a sentence."""
    return _WAITED.get(phase, f"the {phase}")


def outcome_text(outcome: Outcome) -> str:
    """How a side ended, as a verb."""
    return _ENDS[outcome]


def row_label(bar: Bar) -> str:
    """The label of a phase's row."""
    return f"{bar.phase} at the {bar.side}" if bar.phase is HandoffPhase.QUEUE else str(bar.phase)
