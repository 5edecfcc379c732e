"""Several engines to one peer, each on a thread of its own: a library that copies with the caller's processor gets several.

A slice is cut into as many parts as there are lanes, of about as many bytes each. It is over when the last part is, and a part
that has failed is told only then: nothing moves any more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import numpy as np

from kvbaton.transport.base import Direction, Runs
from kvbaton.transport.peer_mover import Look, PeerEngine
from kvbaton.transport.runs import RunCursor

__all__ = ["Lanes", "cut"]

_MANY_RUNS = 128
_END_S = 5.0

_Work = tuple[Direction, Runs]


class Lanes:
    """An engine made of `count` engines; slices of less than `least_bytes` go over the first. For one thread."""

    def __init__(self, make_lane: Callable[[], PeerEngine], count: int, name: str, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._first = make_lane()
        self._others: list[_Helper] = []
        try:
            for _ in range(count - 1):
                self._others.append(_Helper(make_lane(), f"kvbaton-{name}-lane"))
        except BaseException:
            self.close()
            raise
        self._unproved = [other.lane for other in self._others]
        self.is_bound = self._first.is_bound

    def open(self) -> None:
        """Get to know the peer, over every lane."""
        self._first.open()
        for other in self._others:
            other.lane.open()

    def move(self, direction: Direction, runs: Runs) -> None:
        """Move `runs` to their last byte, over all lanes at once where that is worth it."""
        if not self._others or int(runs[:, 2].sum()) < self._least_bytes:
            self._first.move(direction, runs)
            return
        own, *parts = cut(runs, 1 + len(self._others))
        busy = self._others[: len(parts)]
        self._unproved = [other.lane for other in self._others]
        for other, part in zip(busy, parts, strict=True):
            other.begin(direction, part)
        errors: list[BaseException | None] = []
        try:
            self._first.move(direction, own)
        finally:
            errors += [other.end() for other in busy]
        for error in filter(None, errors):
            raise error

    def read_mark(self, runs: Runs, look: Look) -> None:
        """Read the peer's mark, and look at it, over the first lane and those that were used since."""
        for lane in (self._first, *self._unproved):
            lane.read_mark(runs, look)
        self._unproved = []

    def close(self) -> None:
        """End every lane, and its thread."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._first.close)
            for other in self._others:
                closing.callback(other.close)


class _Helper:
    """A lane and the thread that moves its parts, one at a time."""

    def __init__(self, lane: PeerEngine, name: str) -> None:
        self.lane = lane
        self._parts: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, direction: Direction, runs: Runs) -> None:
        """Begin to move a part."""
        self._parts.put((direction, runs))

    def end(self) -> BaseException | None:
        """Wait until the part does not move any more, for which its lane has a deadline; what went wrong, if anything."""
        return self._ends.get()

    def close(self) -> None:
        """End the thread and the lane."""
        self._parts.put(None)
        self._thread.join(_END_S)
        self.lane.close()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            problem = None
            try:
                self.lane.move(*part)
            except BaseException as error:  # noqa: BLE001 - raised where the slice was begun, which waits for it
                error.__traceback__ = error.__cause__ = error.__context__ = None  # frames hold what keeps an engine alive
                problem = error
            del part
            self._ends.put(problem)


def cut(runs: Runs, count: int) -> list[Runs]:
    """`runs` in at most `count` parts of about as many bytes: between runs where there are many, else within them."""
    if len(runs) >= _MANY_RUNS * count:
        ends = np.cumsum(runs[:, 2], dtype=np.int64)
        places = np.searchsorted(ends, [int(ends[-1]) * part // count for part in range(1, count)], side="right")
        return [part for part in np.split(runs, places) if len(part)]
    cursor = RunCursor(runs)
    share = -(-cursor.total_bytes // count)
    parts = []
    while cursor.remaining_bytes:
        part = cursor.peek(share, len(runs) + 1)
        cursor.advance(int(part[:, 2].sum()))
        parts.append(part)
    return parts
