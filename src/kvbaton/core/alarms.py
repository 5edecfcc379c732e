"""Deadlines of many things at once: who is due, and when to look again, without looking at everybody.

An alarm may ring early, never late: setting a later time for somebody who has an earlier one changes nothing, so that
renewing a deadline costs next to nothing. Whoever rings looks at its own deadline and is set again if that lies ahead.
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
    """At most one alarm per key. Times are whatever the caller's clock says."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KeyT]] = []
        self._set: dict[KeyT, float] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._set)

    def set(self, key: KeyT, when: float) -> None:
        """Ring for `key` at `when`, or earlier if it was to ring earlier anyway."""
        if when < self._set.get(key, float("inf")):
            self._set[key] = when
            heapq.heappush(self._heap, (when, next(self._numbers), key))
            if len(self._heap) > 2 * len(self._set) + _SLACK:
                self._heap = [entry for entry in self._heap if self._set.get(entry[2]) == entry[0]]
                heapq.heapify(self._heap)

    def drop(self, key: KeyT) -> None:
        """Do not ring for `key`."""
        self._set.pop(key, None)
        if not self._set:
            self._heap.clear()

    def ring(self, now: float) -> Iterator[KeyT]:
        """Take the keys whose time has come, one by one and earliest first; each has to be set again to ring again.

        Those that are not taken, because whoever asked failed on the way, ring the next time. What is set meanwhile does, too.
        """
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
