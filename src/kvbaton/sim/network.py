"""A network that delays, loses, doubles and reorders frames, and can be cut in one direction or clogged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.sim.world import World

__all__ = ["LinkFaults", "Network"]


@dataclass(slots=True)
class LinkFaults:
    """How badly one direction between two addresses behaves."""

    loss: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    cut_until: float = 0.0
    clogged_until: float = 0.0
    lose_next: int = 0
    double_next: int = 0
    delay_next_s: float = 0.0
    slow_until: float = 0.0
    slow_s: float = 0.0


@dataclass(slots=True)
class Network:
    """Carries frames between addresses. `arrive(address, frame, sender_address)` is called when one gets through."""

    world: World
    arrive: Callable[[str, bytes, str], None]
    delay_s: float = 0.001
    faults: dict[tuple[str, str], LinkFaults] = field(default_factory=dict)

    def link(self, source: str, target: str) -> LinkFaults:
        """The faults of the direction from `source` to `target`."""
        return self.faults.setdefault((source, target), LinkFaults())

    def send(self, source: str, target: str, frame: bytes) -> None:
        """Send one frame; it may arrive late, twice, out of order, or not at all."""
        faults = self.link(source, target)
        random = self.world.random
        self.world.use(f"frame {source} {target}")
        if faults.lose_next > 0 or faults.cut_until > self.world.now or random.random() < faults.loss:
            faults.lose_next = max(0, faults.lose_next - 1)
            return
        copies = 1
        if faults.double_next > 0 or random.random() < faults.double:
            faults.double_next = max(0, faults.double_next - 1)
            copies = 2
        for _ in range(copies):
            self._deliver(faults, source, target, frame)

    def _deliver(self, faults: LinkFaults, source: str, target: str, frame: bytes) -> None:
        random = self.world.random
        delay = self.delay_s * random.uniform(0.5, 1.5)
        if faults.delay_next_s:
            delay, faults.delay_next_s = delay + faults.delay_next_s, 0.0
        elif faults.slow_until > self.world.now:
            delay += random.uniform(0.0, faults.slow_s)
        elif random.random() < faults.reorder:
            delay *= random.choice((5, 50, 2000))
        arrival = max(self.world.now + delay, faults.clogged_until)
        self.world.at(arrival, None, lambda: self.arrive(target, frame, source))
