"""How vLLM's engine process waits for its workers while nothing is computed and a cache is on its way.

With workers in processes of their own, vLLM's engine process polls a queue in shared memory until a step has ended, and gives
its core up only after a second without a message. A step with a forward ends soon, and polling saves its latency. But while
requests wait for their caches there is one step after the other without a forward, each of which waits for news in a worker:
the engine would keep a core busy for as long as a prefill takes, on a machine where that may compute the prefill. So in such
steps it sleeps until it is notified, as vLLM lets it do after that second.
"""

from __future__ import annotations

import functools
import math
from typing import Any

__all__ = ["EngineWaits"]

_NAP_MS = 5
"""How long it sleeps at a time: vLLM's notifications are dropped when they follow each other closely, and it would look again
after five seconds."""


class EngineWaits:
    """Of one engine process: whether it sleeps while it waits for the step that was just built."""

    def __init__(self) -> None:
        self._had_forward = True
        self.is_asleep = False

    def step(self, *, has_forward: bool) -> None:
        """A step is built. With async scheduling the one before it is waited for first: both have to be without a forward."""
        self.is_asleep = not has_forward and not self._had_forward
        self._had_forward = has_forward

    def guide(self, conditions: Any) -> None:
        """Have readers that wait for a condition of this class, vLLM's `SpinCondition`, go to sleep at once in such steps.

        In a process with several engines, one after the other, the last one counts.
        """
        wait = getattr(conditions.wait, "__wrapped__", conditions.wait)

        @functools.wraps(wait)
        def guided(condition: Any, timeout_ms: int | None = None) -> Any:
            if self.is_asleep:
                # It polls for a second after it was last read.
                condition.last_read = -math.inf
                timeout_ms = _NAP_MS if timeout_ms is None else min(timeout_ms, _NAP_MS)
            return wait(condition, timeout_ms=timeout_ms)

        conditions.wait = guided
