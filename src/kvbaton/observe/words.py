"""Durations, sizes, phases and ends in the words of a person."""

from __future__ import annotations

from kvbaton.core.handoff import Outcome
from kvbaton.observe.phases import Bar, Phase

__all__ = ["duration", "end_words", "row_words", "size", "waited_for"]

_WAITED = {
    Phase.ROUTER: "the router",
    Phase.QUEUE: "blocks at the target",
    Phase.GREETING: "the two instances to meet",
    Phase.GRANT: "the grant",
    Phase.ANNOUNCEMENT: "the announcement",
    Phase.WIRE: "bytes on the wire",
    Phase.CONFIRMATION: "the confirmation",
    Phase.FIRST_STEP: "the first step",
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


def waited_for(phase: Phase) -> str:
    """What was waited for, as the end of a sentence."""
    return _WAITED.get(phase, f"the {phase}")


def end_words(outcome: Outcome) -> str:
    """How a side ended, as a verb."""
    return _ENDS[outcome]


def row_words(bar: Bar) -> str:
    """What the row of a phase is called."""
    return f"{bar.phase} at the {bar.side}" if bar.phase is Phase.QUEUE else str(bar.phase)
