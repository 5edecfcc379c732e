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
        due = {key: when for key, when in timers.times.items() if when <= now}
        for key in ring(now):
            if due.pop(key, None) is None:
                find(f"{key} is looked at before its time")
            yield key
        if left := [key for key, when in due.items() if timers.times.get(key) == when]:
            find(f"{left} are due, and are not looked at")
        if (kept := len(vars(timers)["_heap"])) > 2 * len(timers) + _MOST_DROPPED:
            find(f"{kept} alarms are kept, of which {len(timers)} will ring")

    vars(timers)["ring"] = watched
