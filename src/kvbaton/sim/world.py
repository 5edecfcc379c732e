"""Virtual time: one queue of events, one source of randomness, processes that can die, stand still and have wrong clocks."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.errors import Bug

__all__ = ["HARNESS_RULES", "RULES", "SimClock", "SimProcess", "Violation", "World"]

RULES: dict[str, str] = {
    "foreign byte": "what is decoded was computed for this very request",
    "foreign aux": "so was the aux record",
    "corrupt byte": "with full checksums, no byte that changed in transit is decoded",
    "mixed generations": "what is decoded was computed in one go",
    "half-landed prefix": "no prefix is shared before it has landed",
    "epoch": "nothing writes to a block but the hand-off that it was granted to",
    "confirmed before delivered": "no target delivers what its source has not confirmed",
    "confirmed after the last byte": "nothing is confirmed, or asked about, before all of it was moved",
    "released by its target": "a source is delivered only when the target of that grant has released it",
    "resurrection": "what has ended does not live again under the same grant",
    "one outcome": "each side ends exactly once",
    "legal pair": "the outcomes of the two sides are possible together",
    "blocks conserved": "no block is freed twice or lost",
    "every block is back": "after the last fault, every block is back",
    "every slot is back": "so is every slot for aux records",
    "everything ends": "so has every request, hand-off, copy and notice ended",
    "hard end": "no hand-off stands still for longer than the cap of its state",
    "silent engine": "nothing waits for an engine that hangs, whatever its agents send",
    "spurious failure": "no request fails that no fault has reached",
    "heals": "when every fault is over, every pair serves",
    "nothing twice": "no rank is ordered the same twice or for nothing, and no byte of a copy is moved twice",
    "counted": "what a target reports as moved was moved, by the side that had to",
    "as set": "what was set is what is done",
    "on time": "a side that no message reaches ends when its limit is over",
    "named end": "an end has a reason, and the outcome of what caused it",
    "prompt": "where nothing is disturbed, no hand-off waits for a retry",
    "no needless message": "no message is repeated before it can be lost, and no question answered twice",
    "taken": "what a message states about the grant in hand counts as soon as it has arrived, and a question is answered",
    "left alone": "a message about another grant, generation or peer changes nothing",
    "counts agree": "what is counted of a hand-off agrees with what is listed of it",
    "alarm": "for every deadline of a hand-off, and every dial that is to be repeated, an alarm is set",
    "fenced everywhere": "a fence counts when every rank has it, for what was granted before it, and for nothing else",
    "weakest fence": "no memory is registered anew where it is enough to fence one peer",
    "nothing kept": "without hand-offs, nothing is remembered but what is bounded",
}
"""The rules of the protocol, each broken by a plant."""

HARNESS_RULES: dict[str, str] = {
    "exception": "the code raises nothing that it does not name",
    "bounded": "no run has more events than it may",
    "wire": "every frame can be decoded",
    "engine": "an engine gets the events of its side only",
}
"""What every run is held to besides: an error of the code itself, whichever rule it serves."""


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
    died_at: float = math.inf


class World:
    """The event loop of a simulation."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events_total = 0
        self.violations: list[Violation] = []
        self.findings: list[Violation] = []
        """Rules that were broken without harm to what follows: they count when the run is over, if no other rule was broken."""
        self.not_promised: set[str] = set()
        """Rules that the set-up of this run does not promise; where they do not hold is counted."""
        self.broken_unpromised: Counter[str] = Counter()
        self.timeline: list[tuple[float, str]] | None = None
        self._queue: list[tuple[float, int, SimProcess | None, Callable[[], None]]] = []
        self._sequence = 0
        self.on_event: list[Callable[[], None]] = []
        self.running: SimProcess | None = None
        """In which process the event happens that checks follow; None for one that may have reached any."""
        self.outside = SimProcess("what lies between processes")
        """For events on the way from one process to another: what they bring about in a process is an event of that one."""
        self.uses: set[tuple[int, str]] = set()

    def at(self, when: float, process: SimProcess | None, action: Callable[[], None]) -> None:
        """Let `action` happen at `when` (not before now), in `process` if one is named."""
        self._sequence += 1
        heapq.heappush(self._queue, (when if when > self.now else self.now, self._sequence, process, action))

    def after(self, delay: float, process: SimProcess | None, action: Callable[[], None]) -> None:
        """Let `action` happen `delay` from now."""
        self.at(self.now + delay, process, action)

    def violate(self, rule: str, detail: str) -> None:
        """Record that a rule did not hold."""
        if rule not in RULES and rule not in HARNESS_RULES:
            raise Bug(f"{rule!r} is no rule; add it to RULES, with a plant that breaks it")
        if rule in self.not_promised:
            self.broken_unpromised[rule] += 1
            return
        self.violations.append(Violation(rule, self.now, detail))
        self.note(f"VIOLATION {rule}: {detail}")

    def find(self, rule: str, detail: str) -> None:
        """Record that a rule did not hold which a run need not end for."""
        self.findings.append(Violation(rule, self.now, detail))
        self.note(f"FOUND {rule}: {detail}")

    def use(self, what: str) -> None:
        """Remember that this event used something that a fault may lie in wait for."""
        self.uses.add((self.events_total, what))

    def note(self, text: str) -> None:
        """Add a line to the timeline, when one is kept."""
        if self.timeline is not None:
            self.timeline.append((self.now, text))

    def run(self, until: float, max_events: int) -> None:
        """Let events happen until `until`, the queue is empty, a rule is broken, or there were too many."""
        queue, violations, checks = self._queue, self.violations, self.on_event
        while queue and queue[0][0] <= until and not violations:
            when, sequence, process, action = heapq.heappop(queue)
            self.now = when
            if process is not None:
                if not process.is_alive:
                    continue
                if process.paused_until > when:
                    heapq.heappush(queue, (process.paused_until, sequence, process, action))
                    continue
            self.events_total += 1
            if self.events_total > max_events:
                self.violate("bounded", f"more than {max_events} events")
                return
            self.running = process
            action()
            for check in checks:
                check()
        self.now = max(self.now, until) if not self.violations else self.now
