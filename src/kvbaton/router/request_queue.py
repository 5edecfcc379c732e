"""Requests that wait for a free instance: fair between clients, by priority and order of arrival within one.

A client is an API key, or without keys the address that it connects from. Sequences are counted, not requests: a request of
1,024 prompts is 1,024 times the work of one. Clients have their turn by start-time fair queueing: each has a tag that grows
by the sequences it was served, and the smallest tag is next. A priority is for the client's own requests only; between
clients it would be a way to jump the queue. When the queue is full, the newest request of the client with the most waiting
sequences makes room.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Protocol

__all__ = ["ClientShare", "QueuedRequest", "RequestQueue"]

_SPARE = 16


class QueuedRequest(Protocol):
    """A request that waits."""

    share: ClientShare
    sequences: int

    def try_again(self, now: float) -> bool:
        """Try to go on; False when there is still no seat."""

    def waited_too_long(self) -> None:
        """The deadline has passed; it is no longer in the queue."""

    def crowded_out(self) -> None:
        """It made room for another client; it is no longer in the queue."""


class ClientShare:
    """What one client has: sequences in flight, those of them that instances have, those that wait, and its turn.

    `lines` is the header by which instances know it.
    """

    __slots__ = ("in_flight", "lines", "requests", "running", "tag", "waiting")

    def __init__(self, lines: bytes = b"") -> None:
        self.lines = lines
        self.in_flight = 0
        self.running = 0
        self.waiting = 0
        self.tag = 0.0
        self.requests: list[tuple[int, int, QueuedRequest]] = []


class RequestQueue:
    """A bounded queue. A request whose client `may_run` holds back does not hold up the others. For the event loop's thread."""

    def __init__(self, limit: int, may_run: Callable[[QueuedRequest], bool]) -> None:
        self.deadlines: dict[QueuedRequest, float] = {}
        """The requests that wait."""
        self._limit = limit
        self._may_run = may_run
        self._sequences = 0
        self._count = itertools.count()
        self._turns: list[tuple[float, int, ClientShare]] = []
        self._now_tag = 0.0

    def add(self, request: QueuedRequest, priority: int, deadline: float) -> bool:
        """Let a request wait, smaller priorities first as in vLLM. False when there is no room for it."""
        share = request.share
        while self._sequences + request.sequences > self._limit and self.deadlines:
            largest = max({other.share for other in self.deadlines}, key=lambda other: other.waiting)
            if largest is share or largest.waiting <= share.waiting + request.sequences:
                return False
            newest = max(entry[1:] for entry in largest.requests if entry[2] in self.deadlines)[1]
            self.discard(newest)
            newest.crowded_out()
        if not share.waiting:
            share.tag = max(share.tag, self._now_tag)
            self._push_turn(share)
        self.deadlines[request] = deadline
        share.waiting += request.sequences
        self._sequences += request.sequences
        heapq.heappush(share.requests, (priority, next(self._count), request))
        return True

    def discard(self, request: QueuedRequest) -> None:
        """The request waits no longer."""
        if self.deadlines.pop(request, None) is not None:
            share = request.share
            share.waiting -= request.sequences
            self._sequences -= request.sequences
            if not share.waiting:
                share.requests.clear()

    def wake(self, now: float) -> None:
        """Let requests go on in their turn, until one finds no seat."""
        held_back = []
        while self._turns:
            turn = heapq.heappop(self._turns)
            tag, _, share = turn
            request = self._first_of(share)
            if request is None or tag != share.tag:
                continue
            if not self._may_run(request):
                held_back.append(turn)
                continue
            if not request.try_again(now):
                held_back.append(turn)
                break
            self.discard(request)
            self._now_tag = tag
            share.tag = tag + request.sequences
            self._push_turn(share)
        for turn in held_back:
            heapq.heappush(self._turns, turn)

    def sweep(self, now: float) -> None:
        """Remove and notify the requests whose deadline has passed."""
        for request in [request for request, deadline in self.deadlines.items() if now >= deadline]:
            self.discard(request)
            request.waited_too_long()
        waiting = Counter(request.share for request in self.deadlines)
        for share, count in waiting.items():
            if len(share.requests) > 2 * count + _SPARE:
                share.requests = [entry for entry in share.requests if entry[2] in self.deadlines]
                heapq.heapify(share.requests)
        if len(self._turns) > 2 * len(waiting) + _SPARE:
            self._turns = []
            for share in waiting:
                self._push_turn(share)

    def _push_turn(self, share: ClientShare) -> None:
        heapq.heappush(self._turns, (share.tag, next(self._count), share))

    def _first_of(self, share: ClientShare) -> QueuedRequest | None:
        while share.requests and share.requests[0][2] not in self.deadlines:
            heapq.heappop(share.requests)
        return share.requests[0][2] if share.requests else None
