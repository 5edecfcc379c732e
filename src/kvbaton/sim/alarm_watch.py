"""Alarms of an instance: what is due rings, nothing rings before its time, and those that will never ring are not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbaton.agent.timers import Timers
from kvbaton.core.handoff import HandoffKey

__all__ = ["watch_alarms"]

_MOST_DROPPED = 100
"""How many alarms may be kept that were dropped, beyond as many as there are to ring."""


def watch_alarms(timers: Timers, find: Callable[[str], None]) -> None:
    """Have it looked at what rings at each tick."""
    ring = timers.ring

    def watched(now: float) -> Iterator[HandoffKey]:
        before = {key: when for key, when in timers.times.items() if when <= now}
        due = dict(before)
        for key in ring(now):
            if due.pop(key, None) is None:
                find(f"{key} is looked at before its time")
            yield key
        # One that is set for the past meanwhile rings the next time, which is at once, and those behind it with it.
        is_set_back = any(when <= now and before.get(key) != when for key, when in timers.times.items())
        left = [key for key, when in due.items() if timers.times.get(key) == when]
        if left and not is_set_back:
            find(f"{left} are due, and are not looked at")
        if (kept := len(vars(timers)["_heap"])) > 2 * len(timers) + _MOST_DROPPED:
            find(f"{kept} alarms are kept, of which {len(timers)} will ring")

    vars(timers)["ring"] = watched
