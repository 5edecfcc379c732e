"""Deadlines of thousands of hand-offs: which are due, and when the next one is, without a scan over all of them.

An alarm may ring early, never late: setting a later time for a key that has an earlier one changes nothing. Every heartbeat
renews every deadline of a peer, so renewing has to be free; the owner of a key that rings checks its real deadline, and sets
the alarm again if that lies ahead.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Alarms"]

KeyT = TypeVar("KeyT")

_SLACK = 64


class Alarms(Generic[KeyT]):
    """At most one alarm per key. Times are those of the caller's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KeyT]] = []
        self._set: dict[KeyT, float] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._set)

    def set(self, key: KeyT, when: float) -> None:
        """Ring for `key` at `when`, or at the time already set if that is earlier."""
        if when < self._set.get(key, float("inf")):
            self._set[key] = when
            heapq.heappush(self._heap, (when, next(self._numbers), key))
            # Dropped and replaced entries stay in the heap; without this it would grow with every hand-off that ends early.
            if len(self._heap) > 2 * len(self._set) + _SLACK:
                self._heap = [entry for entry in self._heap if self._set.get(entry[2]) == entry[0]]
                heapq.heapify(self._heap)

    def drop(self, key: KeyT) -> None:
        """Do not ring for `key` any more."""
        self._set.pop(key, None)
        if not self._set:
            self._heap.clear()

    def ring(self, now: float) -> Iterator[KeyT]:
        """Take the keys that are due, one by one, earliest first; each has to be set again to ring again.

        Keys that the caller did not take, because it raised in between, ring the next time. So do keys set in the meantime.
        """
        # Entries from here on are newer than this call: a caller that sets an alarm in the past would otherwise never finish.
        asked = next(self._numbers)
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] < asked:
            when, _, key = heapq.heappop(self._heap)
            if self._set.get(key) == when:
                del self._set[key]
                yield key

    def next(self) -> float | None:
        """When the next alarm rings; None when there is none."""
        while self._heap and self._set.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
