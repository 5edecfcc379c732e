"""What a router is to real instances: begins hand-offs on both sides, forwards offers to targets, collects how each ended."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbaton.bench.bare.orders import CHECK_ALL, NO_HOLD, Begin, Check, Ended, HandoffEnd, Hold, Offered, Task
from kvbaton.bench.bare.process import BareProcess
from kvbaton.core.handoff import Mode
from kvbaton.errors import LocalError

__all__ = ["Load", "Relay"]

_TURN_S = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """Hand-offs of one kind: how many, how many at a time, how large, and where each side is to stand still."""

    name: str
    mode: Mode
    count: int
    in_flight: int
    tokens: int
    chunk_tokens: int
    waits: bool = True
    source_hold: Hold = NO_HOLD
    target_hold: Hold = NO_HOLD
    check: Check = CHECK_ALL

    def task(self, side: str, source: str = "") -> Task:
        """The half of one side."""
        hold = self.source_hold if side == "source" else self.target_hold
        return Task(
            name=self.name,
            side=side,
            mode=self.mode,
            count=self.count,
            in_flight=self.in_flight,
            tokens=self.tokens,
            chunk_tokens=self.chunk_tokens,
            source=source,
            waits=self.waits,
            hold=hold,
            check=self.check,
        )


@dataclass
class Relay:
    """Stands between bare instances; one thread calls it. `ends` are by task and instance, in the order in which they came."""

    processes: Sequence[BareProcess]
    ends: dict[tuple[str, str], list[HandoffEnd]] = field(default_factory=dict)
    blocks_in_use: dict[str, int] = field(default_factory=dict)
    _waiting: dict[str, BareProcess] = field(default_factory=dict)

    def begin(self, load: Load, source: BareProcess, target: BareProcess) -> None:
        """Start a load between two instances."""
        if load.mode is Mode.PULL:
            self._waiting[load.name] = target
        for process in (source, target):
            self.ends[load.name, process.name] = []
        source.order(Begin(load.task("source")))
        target.order(Begin(load.task("target", source.here.address)))

    def turn(self, timeout_s: float = _TURN_S) -> None:
        """Wait for reports, at most so long, and take them."""
        running = [process for process in self.processes if not process.is_over]
        for process in select.select(running, [], [], timeout_s)[0] if running else ():
            process.take()
        for process in self.processes:
            self._take_reports(process)

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Go on until `condition` holds. Raises LocalError, with `what`, when it does not in time."""
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > give_up_at:
                so_far = ", ".join(f"{len(ends)} of {task} at {name}" for (task, name), ends in self.ends.items())
                raise LocalError(f"not within {timeout_s:g} s: {what}; ended so far: {so_far}")
            self.turn()

    def _take_reports(self, process: BareProcess) -> None:
        reports, process.reports = process.reports, []
        for report in reports:
            if isinstance(report, Offered) and report.task in self._waiting:
                self._waiting[report.task].order(report)
            elif isinstance(report, Ended):
                self.ends.setdefault((report.task, process.name), []).extend(report.ends)
                self.blocks_in_use[process.name] = report.blocks_in_use
