"""Alarms of an instance: what is due rings, nothing rings before its time, and those that will never ring are not kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from kvbaton.agent.timers import Timers
from kvbaton.core.handoff import HandoffKey

__all__ = ["watch_alarms"]

_MOST_DROPPED = 2
"""How many alarms may be kept that were dropped, beyond as many as there are to ring: few, so that runs get there."""


def watch_alarms(timers: Timers, find: Callable[[str], None]) -> None:
    """Have it looked at what rings at each tick, and at what is kept when an alarm is set."""
    ring, set_alarm = timers.ring, timers.set
    vars(timers)["_slack"] = _MOST_DROPPED

    def watched_set(key: HandoffKey, when: float) -> None:
        earlier = timers.times.get(key, math.inf)
        set_alarm(key, when)
        if timers.times.get(key, math.inf) != min(earlier, when):
            find(f"{key} was to ring at {earlier}, then at {when}, and rings at {timers.times.get(key)}")
        heap = vars(timers)["_heap"]
        if when < earlier and len(heap) > 2 * len(timers) + _MOST_DROPPED:
            find(f"{len(heap)} alarms are kept, of which {len(timers)} will ring")
        if any(heap[(place - 1) // 2] > heap[place] for place in range(1, len(heap))):
            find(f"{key}: alarms are not kept in the order in which they ring")

    def watched(now: float) -> Iterator[HandoffKey]:
        before = {key: when for key, when in timers.times.items() if when <= now}
        due = dict(before)
        rung: set[HandoffKey] = set()
        for key in ring(now):
            if key in rung:
                find(f"{key} is looked at twice in one turn")
            rung.add(key)
            if due.pop(key, None) is None:
                find(f"{key} is looked at before its time")
            yield key
        # One that is set for the past meanwhile rings the next time, which is at once, and those behind it with it.
        is_set_back = any(when <= now and before.get(key) != when for key, when in timers.times.items())
        left = [key for key, when in due.items() if timers.times.get(key) == when]
        if left and not is_set_back:
            find(f"{left} are due, and are not looked at")

    vars(timers)["ring"] = watched
    vars(timers)["set"] = watched_set
