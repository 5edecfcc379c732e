"""Virtual time: one queue of events, one source of randomness, processes that can die, stand still and have wrong clocks."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["SimClock", "SimProcess", "Violation", "World"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that did not hold, when, and what was seen."""

    rule: str
    at_s: float
    detail: str


@dataclass(slots=True)
class SimClock:
    """A process's own monotonic clock: it drifts, and it can jump ahead."""

    rate: float = 1.0
    offset: float = 0.0

    def local(self, now: float) -> float:
        """What this clock shows at world time `now`."""
        return self.offset + self.rate * now

    def world(self, local: float) -> float:
        """The world time at which this clock will show `local`."""
        return (local - self.offset) / self.rate


@dataclass(slots=True)
class SimProcess:
    """What can crash or be paused. Events of a dead process never happen; those of a paused one wait."""

    name: str
    clock: SimClock = field(default_factory=SimClock)
    is_alive: bool = True
    paused_until: float = 0.0


class World:
    """The event loop of a simulation."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events_total = 0
        self.violations: list[Violation] = []
        self.timeline: list[tuple[float, str]] | None = None
        self._queue: list[tuple[float, int, SimProcess | None, Callable[[], None]]] = []
        self._sequence = 0
        self.on_event: list[Callable[[], None]] = []
        self.uses: set[tuple[int, str]] = set()

    def at(self, when: float, process: SimProcess | None, action: Callable[[], None]) -> None:
        """Let `action` happen at `when` (not before now), in `process` if one is named."""
        self._sequence += 1
        heapq.heappush(self._queue, (max(when, self.now), self._sequence, process, action))

    def after(self, delay: float, process: SimProcess | None, action: Callable[[], None]) -> None:
        """Let `action` happen `delay` from now."""
        self.at(self.now + delay, process, action)

    def violate(self, rule: str, detail: str) -> None:
        """Record that a rule did not hold."""
        self.violations.append(Violation(rule, self.now, detail))
        self.note(f"VIOLATION {rule}: {detail}")

    def use(self, what: str) -> None:
        """Remember that this event used something that a fault may lie in wait for."""
        self.uses.add((self.events_total, what))

    def note(self, text: str) -> None:
        """Add a line to the timeline, when one is kept."""
        if self.timeline is not None:
            self.timeline.append((self.now, text))

    def run(self, until: float, max_events: int) -> None:
        """Let events happen until `until`, the queue is empty, a rule is broken, or there were too many."""
        while self._queue and self._queue[0][0] <= until and not self.violations:
            when, sequence, process, action = heapq.heappop(self._queue)
            self.now = when
            if process is not None and not process.is_alive:
                continue
            if process is not None and process.paused_until > when:
                heapq.heappush(self._queue, (process.paused_until, sequence, process, action))
                continue
            self.events_total += 1
            if self.events_total > max_events:
                self.violate("bounded", f"more than {max_events} events")
                return
            action()
            for check in self.on_event:
                check()
        self.now = max(self.now, until) if not self.violations else self.now
