"""What the agents of an instance have counted: a snapshot for metrics, taken without stopping them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AgentStats"]


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
    failures_total: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Hand-offs that were ended before they were delivered, by side and by what ended them."""
    runs_total: int = 0
    """Runs that were handed to the transport."""
    peers: int = 0
    """Peers whose cards are known."""
    handshakes_total: int = 0
    """Cards that were checked and taken, each incarnation of a peer once."""
