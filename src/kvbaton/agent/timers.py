"""Time, as both sides of a hand-off and their notices use it: alarms that ring per hand-off, waits that double, and lost
messages.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from kvbaton.agent.ports import Clock
from kvbaton.config import Limits
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import HandoffKey, Incarnation

__all__ = ["Alarms", "Backoff", "Questions", "Timers"]

KeyT = TypeVar("KeyT")

_SLACK = 64

_MAX_PEERS = 2048


class Alarms(Generic[KeyT]):
    """At most one alarm per key: which of thousands are due, and when the next one is, without a scan over all of them.

    An alarm may ring early, never late: setting a later time for a key that has an earlier one changes nothing. Every heartbeat
    renews every deadline of a peer, so renewing has to be free; the owner of a key that rings checks its real deadline, and
    sets the alarm again if that lies ahead. Times are those of the caller's clock.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KeyT]] = []
        self.times: dict[KeyT, float] = {}
        """When each alarm rings; only read elsewhere. A side looks into it after every step of every hand-off."""
        self._numbers = itertools.count()
        self._slack = _SLACK

    def __len__(self) -> int:
        return len(self.times)

    def set(self, key: KeyT, when: float) -> None:
        """Ring for `key` at `when`, or at the time already set if that is earlier."""
        if when < self.times.get(key, float("inf")):
            self.times[key] = when
            heapq.heappush(self._heap, (when, next(self._numbers), key))
            # Dropped and replaced entries stay in the heap; without this it would grow with every hand-off that ends early.
            if len(self._heap) > 2 * len(self.times) + self._slack:
                self._heap = [entry for entry in self._heap if self.times.get(entry[2]) == entry[0]]
                heapq.heapify(self._heap)

    def set_for(self, key: KeyT) -> float:
        """When the alarm of `key` rings; never, without one."""
        return self.times.get(key, math.inf)

    def drop(self, key: KeyT) -> None:
        """Do not ring for `key` any more."""
        self.times.pop(key, None)
        if not self.times:
            self._heap.clear()

    def ring(self, now: float) -> Iterator[KeyT]:
        """Take the keys that are due, one by one, earliest first; each has to be set again to ring again.

        Keys that the caller did not take, because it raised in between, ring the next time. So do keys set in the meantime.
        """
        # Entries from here on are newer than this call: a caller that sets an alarm in the past would otherwise never finish.
        asked = next(self._numbers)
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] < asked:
            when, _, key = heapq.heappop(self._heap)
            if self.times.get(key) == when:
                del self.times[key]
                yield key

    def next_deadline(self) -> float | None:
        """When the next alarm rings; None when there is none. May be early, never late."""
        while self._heap and self.times.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class Backoff(msgspec.Struct, eq=False):
    """When a message without an answer is sent again: after `retry`, then after twice as long each time, up to a beat.

    It stops at a beat because a peer that lives sends a heartbeat as often as that: to be slower would only delay recovery.
    """

    limits: Limits
    at: float
    wait_s: float

    @classmethod
    def start(cls, limits: Limits, now: float) -> Backoff:
        """The first wait, from `now` on."""
        return cls(limits, now + limits.retry, limits.retry)

    def restart(self, now: float) -> None:
        """Something was answered: wait from `now` on as for the first time."""
        self.wait_s = self.limits.retry
        self.at = now + self.wait_s

    def double(self, now: float) -> None:
        """It was sent again: wait twice as long, from `now` on. A `retry` longer than a beat stays as it is."""
        self.wait_s = max(self.wait_s, min(self.wait_s * 2, self.limits.beat_s))
        self.at = now + self.wait_s


class Timers(Alarms[HandoffKey]):
    """One alarm per live hand-off. `look_at(key, now)` is called when one rings; it sets the alarm again if that is needed."""

    def __init__(self, limits: Limits, clock: Clock, look_at: Callable[[HandoffKey, float], None]) -> None:
        super().__init__()
        self._limits = limits
        self._clock = clock
        self._look_at = look_at

    def tick(self) -> None:
        """Look at every hand-off whose time has come.

        An alarm that has rung is gone. If `look_at` raises before it has set the next one, its hand-off would never be
        looked at again, and blocks that wait for a deadline would stay away for ever: so it rings again, after `retry`.
        """
        now = self._clock()
        for key in self.ring(now):
            try:
                self._look_at(key, now)
            except BaseException:
                self.set(key, now + self._limits.retry)
                raise


# Which messages to a peer are lost, and which only wait their turn behind others that the peer is still answering.
#
# A source under load may need longer than `retry` for an answer. If each of a thousand hand-offs sent its grant again then,
# the source would have twice the work, answer later still, and be sent even more. Peers answer in the order in which they
# were asked: so a message is taken for lost only when the peer has answered something that was sent later, or has answered
# nothing at all.


class _LatestAnswer(msgspec.Struct, eq=False):
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
        if latest is None:
            self._answered[peer] = _LatestAnswer(number, now)
        elif number > latest.number:
            latest.number, latest.at = number, now
            self._answered.move_to_end(peer)

    def lost_at(self, peer: Incarnation | None, number: int, wait_s: float) -> float:
        """From when on message `number` counts as lost: at once, or `wait_s` after the peer last answered an earlier one."""
        latest = None if peer is None else self._answered.get(peer)
        if latest is None or latest.number > number:
            return -math.inf
        return latest.at + wait_s
