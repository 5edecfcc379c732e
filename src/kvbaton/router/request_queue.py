"""Requests that wait for a free instance: by priority, then in the order they came, each with a deadline."""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol

__all__ = ["QueuedRequest", "RequestQueue"]


class QueuedRequest(Protocol):
    """A request that waits."""

    def try_again(self, now: float) -> bool:
        """Try to go on; False when there is still no seat."""

    def waited_too_long(self) -> None:
        """The deadline has passed; it is no longer in the queue."""


class RequestQueue:
    """A bounded queue. Belongs to the event loop's thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = itertools.count()
        self._heap: list[tuple[int, int, QueuedRequest]] = []
        self._deadlines: dict[QueuedRequest, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def is_full(self) -> bool:
        """Whether no other request may wait."""
        return len(self._deadlines) >= self._limit

    def add(self, waiter: QueuedRequest, priority: int, deadline: float) -> None:
        """Let a request wait; smaller priorities go first, as in vLLM."""
        self._deadlines[waiter] = deadline
        heapq.heappush(self._heap, (priority, next(self._count), waiter))

    def discard(self, waiter: QueuedRequest) -> None:
        """The request waits no longer."""
        self._deadlines.pop(waiter, None)

    def wake(self, now: float) -> None:
        """Let those at the head go on, until one finds no seat."""
        while self._heap:
            entry = self._heap[0]
            if entry[2] in self._deadlines:
                if not entry[2].try_again(now):
                    return
                self.discard(entry[2])
            if self._heap and self._heap[0] is entry:
                heapq.heappop(self._heap)

    def sweep(self, now: float) -> None:
        """Remove and notify the requests whose deadline has passed."""
        for waiter in [waiter for waiter, deadline in self._deadlines.items() if now >= deadline]:
            self.discard(waiter)
            waiter.waited_too_long()
        if len(self._heap) > 2 * len(self._deadlines) + 16:
            self._heap = [entry for entry in self._heap if entry[2] in self._deadlines]
            heapq.heapify(self._heap)
