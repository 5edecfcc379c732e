"""How vLLM's engine process waits for its workers while nothing is computed and a cache is on its way.

With workers in processes of their own, vLLM's engine process polls a queue in shared memory until a step has ended, and gives
its core up only after a second without a message. A step with a forward ends soon, and polling saves its latency. But while
requests wait for their caches there is one step after the other without a forward, each of which waits for news in a worker:
the engine would keep a core busy for as long as a prefill takes, on a machine where that may compute the prefill. So in such
steps it sleeps until it is notified, as vLLM lets it do after that second. A request that comes in meanwhile ends the step
(`engine_calls`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["EngineWaits"]

_SHORTEST_NAP_MS, _LONGEST_NAP_MS = 5, 50
"""How long it sleeps at a time, at least and at most: vLLM's notifications are dropped when they follow each other closely, and
it would look again after five seconds."""


class EngineWaits:
    """Of one engine process: whether it sleeps while it waits for the step that was just built."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._had_forward = True
        self._built_at = 0.0
        self.is_asleep = False

    def step(self, *, has_forward: bool) -> None:
        """A step is built. With async scheduling the one before it is waited for first: both have to be without a forward."""
        self._built_at = self._clock()
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
                nap_ms = self._nap_ms()
                timeout_ms = nap_ms if timeout_ms is None else min(timeout_ms, nap_ms)
            return wait(condition, timeout_ms=timeout_ms)

        conditions.wait = guided

    def watch(self, engines: Any, call: Callable[[], None]) -> None:
        """Have engines of this class, vLLM's `EngineCore`, `call` when a request comes in during such steps.

        Its thread that reads requests prepares each with this method, and puts it into the queue of the engine then.
        """
        prepare = getattr(engines.preprocess_add_request, "__wrapped__", engines.preprocess_add_request)

        @functools.wraps(prepare)
        def watched(engine: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return prepare(engine, *args, **kwargs)
            finally:
                if self.is_asleep:
                    call()

        engines.preprocess_add_request = watched

    def _nap_ms(self) -> int:
        """Notifications come closely only where steps do: the longer this one takes, the longer a nap may be."""
        return min(_LONGEST_NAP_MS, max(_SHORTEST_NAP_MS, int((self._clock() - self._built_at) * 1000 / 2)))
