"""When a part that died is restarted: after which back-off, and after how many restarts no more. Pure: time is an argument."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

__all__ = ["DEFAULT_RESTARTS", "RestartPolicy", "RestartSchedule"]

DEFAULT_RESTARTS = 5


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `limit` restarts of one part within `window_s`; the wait before each is twice the one before, up to a maximum.

    The maximum of the wait bounds what a very high limit costs: with the defaults a part that dies at once is restarted about
    23 times within the window, so that a higher limit is never reached and the restarts go on every 30 s.
    """

    limit: int = DEFAULT_RESTARTS
    window_s: float = 600.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0

    def wait_s(self, restarts: int) -> float | None:
        """How long to wait after a death when the window holds so many restarts already; None: restart no more."""
        if restarts >= self.limit:
            return None
        wait_s = self.first_wait_s
        for _ in range(restarts):
            if wait_s >= self.longest_wait_s:
                break
            wait_s *= 2.0
        return min(wait_s, self.longest_wait_s)


class RestartSchedule:
    """Applies one policy to several parts, each by itself: a part that keeps dying uses up no other part's restarts."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)

    def on_death(self, name: str, now: float) -> float | None:
        """Count a death of this part; how long to wait before its restart, or None when the limit is reached."""
        deaths = self._deaths[name]
        while deaths and deaths[0] <= now - self.policy.window_s:
            deaths.popleft()
        wait_s = self.policy.wait_s(len(deaths))
        if wait_s is not None:
            deaths.append(now)
        return wait_s

    def restarts(self, name: str) -> int:
        """How many restarts of this part were allowed within the window that ended with its last death."""
        return len(self._deaths[name])
