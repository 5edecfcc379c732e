"""Which step every rank of an instance has reached: what concerns the caches of all of them waits for the last one.

vLLM gives blocks to a target in a step. The first rank begins that step when another one may still compute, or have yet to
queue, an earlier step that writes to the same blocks: with async scheduling a request that has ended is computed once more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from kvbaton.core.handoff import HandoffKey
from kvbaton.errors import KVBatonError

__all__ = ["ReachedSteps"]

log = logging.getLogger(__name__)


class ReachedSteps:
    """Holds calls back until the other ranks have reached a step. Safe to call from any thread."""

    def __init__(self, others: Iterable[int] = ()) -> None:
        self._reached = dict.fromkeys(others, -1)
        self._held: dict[HandoffKey, tuple[int, Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def when_reached(self, step: int, key: HandoffKey, call: Callable[[], None]) -> None:
        """Make `call` when every other rank has reached `step`: now, or from the thread that reports the last of them."""
        with self._lock:
            if any(each < step for each in self._reached.values()):
                self._held[key] = (step, call)
                return
        call()

    def reached(self, rank: int, step: int) -> None:
        """Another rank has begun this step, so whatever it has queued before is behind it."""
        with self._lock:
            self._reached[rank] = max(step, self._reached[rank])
            last = min(self._reached.values())
            ready = [key for key, (needed, _) in self._held.items() if needed <= last]
            # Under the lock: a call that was dropped must not be made.
            for key in ready:
                try:
                    self._held.pop(key)[1]()
                except KVBatonError:
                    # The agents have stopped, or are stuck: the deadline of the target ends it.
                    log.exception("hand-off %s: its blocks could not be passed on", key)

    def drop(self, key: HandoffKey) -> None:
        """A hand-off has ended: its call is not made any more."""
        with self._lock:
            self._held.pop(key, None)
