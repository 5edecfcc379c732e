"""Time, as both sides of a hand-off and their notices use it: alarms that ring per hand-off, and waits that double."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.agent.ports import Clock
from kvbaton.config import Limits
from kvbaton.core.alarms import Alarms
from kvbaton.core.handoff import HandoffKey

__all__ = ["Backoff", "Timers"]


@dataclass(slots=True)
class Backoff:
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


class Timers:
    """One alarm per live hand-off. `look_at(key, now)` is called when one rings; it sets the alarm again if that is needed."""

    def __init__(self, limits: Limits, clock: Clock, look_at: Callable[[HandoffKey, float], None]) -> None:
        self._limits = limits
        self._clock = clock
        self._look_at = look_at
        self._alarms: Alarms[HandoffKey] = Alarms()

    def set(self, key: HandoffKey, when: float) -> None:
        """Ring for `key` at `when` at the latest."""
        self._alarms.set(key, when)

    def drop(self, key: HandoffKey) -> None:
        """Do not ring for `key` any more: it is over."""
        self._alarms.drop(key)

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; may be early, never late."""
        return self._alarms.next()

    def tick(self) -> None:
        """Look at every hand-off whose time has come.

        An alarm that has rung is gone. If `look_at` raises before it has set the next one, its hand-off would never be
        looked at again, and blocks that wait for a deadline would stay away for ever: so it rings again, after `retry`.
        """
        now = self._clock()
        for key in self._alarms.ring(now):
            try:
                self._look_at(key, now)
            except BaseException:
                self._alarms.set(key, now + self._limits.retry)
                raise
