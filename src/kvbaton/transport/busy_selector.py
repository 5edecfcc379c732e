"""A selector that looks for a moment before it sleeps, while that pays: a thread that sleeps is woken late.

To put a processor to sleep and to wake it takes 20 to 170 microseconds, most of all in a virtual machine, and the thread that
wakes it spends as much. A hand-off passes from thread to thread and from process to process up to eight times: where each of
them answers at once, that is longer than everything else together.

A thread looks only if at least half of its last waits ended within that moment: one that waits for a prefill, or for nothing,
sleeps at once. Between two looks it leaves its processor to whatever can run there, and sleeps when something else needs it. It
looks without the interpreter's lock, by a loop in C (busy_poll.c): without a compiler every wait sleeps at once, and on a
single processor, which whatever is waited for needs itself.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable

from kvbaton.transport.runs import load_loops
from kvbaton.wire.machine import StreamSelector, ThisMachine

__all__ = ["BusyMachine", "BusySelector"]

_WEIGHT = 1 / 8
"""Of the last wait, in the share of those that were short."""

_WORTH_IT = 0.5

Look = Callable[[int, int], int]
"""Look at an epoll, by its descriptor, again and again until something is ready, for at most so many nanoseconds."""


class BusySelector(selectors.EpollSelector):
    """A selector of one thread; `longest_s` is the moment for which it looks before it sleeps, 0 for not at all."""

    def __init__(self, longest_s: float, *, clock: Callable[[], float] = time.monotonic, look: Look | None = None) -> None:
        super().__init__()
        found = look or _look_of_this_machine()
        self._look: Look = found or (lambda _epoll, _longest_ns: 0)
        self._longest_s = longest_s if found else 0.0
        self._clock = clock
        self._short = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the next wait begins with looking."""
        return self._short >= _WORTH_IT

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready, after a wait of at most `timeout`."""
        if not self._longest_s or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        began = self._clock()
        if self.is_busy:
            longest_s = self._longest_s if timeout is None else min(self._longest_s, timeout)
            self._look(self.fileno(), int(longest_s * 1e9))
        ready = super().select(timeout)
        is_short = bool(ready) and self._clock() - began <= self._longest_s
        self._short += (is_short - self._short) * _WEIGHT
        return ready


class BusyMachine(ThisMachine):
    """This machine, with selectors that look for so long before they sleep."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s

    def selector(self) -> StreamSelector:
        return BusySelector(self._longest_s)


def _look_of_this_machine() -> Look | None:
    """None where there is no loop for it, or only one processor."""
    loops = load_loops()
    return None if loops is None or len(os.sched_getaffinity(0)) < 2 else loops.busy_poll
