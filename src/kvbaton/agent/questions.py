"""Which messages to a peer are lost, and which only wait their turn behind others that the peer is still answering.

A source under load may need longer than `retry` for an answer. If each of a thousand hand-offs sent its grant again then, the
source would have twice the work, answer later still, and be sent even more. Peers answer in the order in which they were asked:
so a message is taken for lost only when the peer has answered something that was sent later, or has answered nothing at all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import Incarnation

__all__ = ["Questions"]

_MAX_PEERS = 2048


class _LatestAnswer(NamedTuple):
    number: int
    at: float


class Questions:
    """Numbers everything that one side sends and expects an answer to, and knows the latest that each peer has answered."""

    def __init__(self) -> None:
        self._last = 0
        self._answered: BoundedMap[Incarnation, _LatestAnswer] = BoundedMap(_MAX_PEERS)

    def next_number(self) -> int:
        """The number of what is sent now; it grows with time, over all peers."""
        self._last += 1
        return self._last

    def answered(self, peer: Incarnation, number: int, now: float) -> None:
        """`peer` has answered message `number`: everything sent to it earlier is answered, or lost."""
        latest = self._answered.get(peer)
        if latest is None or number > latest.number:
            self._answered[peer] = _LatestAnswer(number, now)

    def lost_at(self, peer: Incarnation | None, number: int, wait_s: float) -> float:
        """From when on message `number` counts as lost: at once, or `wait_s` after the peer last answered an earlier one."""
        latest = None if peer is None else self._answered.get(peer)
        if latest is None or latest.number > number:
            return -math.inf
        return latest.at + wait_s
