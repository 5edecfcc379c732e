"""Small runs of the simulator for one rule each: scripts that differ in one thing, played, and asked what came of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec
import pytest

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.source import SourceSide
from kvbaton.agent.target import TargetSide
from kvbaton.config import Limits
from kvbaton.core.handoff import Mode, Outcome
from kvbaton.core.messages import Message, decode
from kvbaton.sim.instance import Bugs, SimInstance
from kvbaton.sim.run import LIMITS, Result, Run
from kvbaton.sim.script import Fault, RequestScript, Script
from kvbaton.transport.base import LateWrites

__all__ = [
    "BOTH_DELIVERED",
    "FLOWS",
    "HOP_S",
    "WRITES",
    "Flow",
    "Story",
    "at_every_event",
    "broken",
    "confirmed_early",
    "disturbed",
    "echo",
    "every_flow",
    "every_push",
    "every_read",
    "every_write",
    "first_broken",
    "losing",
    "make",
    "play",
    "request",
    "sides",
]

HOP_S = 0.01
"""Longer than a message, or what a rank has in flight, takes where nothing is wrong."""

BOTH_DELIVERED = (Outcome.DELIVERED, Outcome.DELIVERED)

Prepare = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Flow:
    """One way to hand off: who decides when, what the transport promises, and whether the source may write unfenced."""

    mode: Mode
    late_writes: LateWrites
    unfenced_writes: bool = False

    def __str__(self) -> str:
        return f"{self.mode}-{self.late_writes}{'-writes' if self.unfenced_writes else ''}"

    @property
    def source_writes(self) -> bool:
        """Whether the source executes the copies."""
        return self.mode is Mode.PUSH and (self.unfenced_writes or self.late_writes is LateWrites.REVOCABLE)

    @property
    def counts_arrivals(self) -> bool:
        """Whether the target counts what the source writes, so that the last byte ends the hand-off and no message does."""
        return self.source_writes and self.late_writes is LateWrites.REVOCABLE

    @property
    def fences(self) -> int:
        """How many times `stop_timeout` passes before a source that says nothing can no longer write."""
        return (2 if self.unfenced_writes else 1) if self.source_writes else 0


FLOWS = [
    Flow(Mode.PUSH, LateWrites.IMPOSSIBLE),
    Flow(Mode.PUSH, LateWrites.REVOCABLE),
    Flow(Mode.PUSH, LateWrites.UNFENCED, unfenced_writes=True),
    Flow(Mode.PULL, LateWrites.IMPOSSIBLE),
    Flow(Mode.PULL, LateWrites.UNFENCED),
]
"""Every flow that differs: in push the target reads, or the source writes and can be fenced more or less; in pull all read."""

WRITES = [flow for flow in FLOWS if flow.source_writes]
"""Those in which the source writes into the target's memory."""

every_flow = pytest.mark.parametrize("flow", FLOWS, ids=str)
every_push = pytest.mark.parametrize("flow", [flow for flow in FLOWS if flow.mode is Mode.PUSH], ids=str)
every_read = pytest.mark.parametrize("flow", [flow for flow in FLOWS if not flow.source_writes], ids=str)
every_write = pytest.mark.parametrize("flow", WRITES, ids=str)


def request(flow: Flow, **changes: Any) -> RequestScript:
    """One request of three tokens in chunks of two, from p0 to d0, with nothing shared."""
    plain = RequestScript(at_s=0.0, prefill=0, decode=0, tokens=3, chunk=2, mode=flow.mode)
    return msgspec.structs.replace(plain, **changes)


def make(flow: Flow, *requests: RequestScript, faults: Iterable[Fault] = (), **changes: Any) -> Script:
    """A script with one prefill and one decode instance on two hosts; the router never cancels what fails elsewhere."""
    plain = Script(
        seed=1,
        late_writes=flow.late_writes,
        unfenced_writes=flow.unfenced_writes,
        one_host=False,
        ranks=2,
        layers=2,
        prefills=1,
        decodes=1,
        prefill_blocks=24,
        decode_blocks=24,
        requests=requests or (request(flow),),
        faults=tuple(faults),
        move_s=0.002,
        router_cancels=0.0,
    )
    return msgspec.structs.replace(plain, **changes)


@dataclass(slots=True)
class Story:
    """A run that is over."""

    run: Run
    result: Result
    back_at: dict[str, float] = field(default_factory=dict)
    """When the last block of each address came back; absent while some are out, and when none ever was."""
    out: set[str] = field(default_factory=set)
    """The addresses some of whose blocks never came back."""

    @property
    def rules(self) -> set[str]:
        """The rules that did not hold."""
        return {violation.rule for violation in self.result.violations}

    @property
    def ends(self) -> list[tuple[Outcome | None, Outcome | None]]:
        """How the source and the target of each attempt ended, in order; without those that only look whether all is healed."""
        pairs = [each for each in self.run.prompts.items() if not self.run.probed_from or each[0] < self.run.probed_from]
        return [(_end(source, number), _end(target, number)) for number, (source, target) in pairs]

    @property
    def counted(self) -> Counter[str]:
        """What all coordinators counted as late or dropped."""
        total: Counter[str] = Counter()
        for instance in self.run.all_instances:
            coordinator = instance.coordinator
            total += coordinator.source.late_total + coordinator.target.late_total + coordinator.dropped_total
        return total

    @property
    def fault_at(self) -> float:
        """When the first fault struck."""
        return self.times("FAULT ")[0]

    def back(self, address: str) -> float:
        """How long after the first fault the blocks of `address` were all back; infinity if they never were."""
        return math.inf if address in self.out else self.back_at.get(address, 0.0) - self.fault_at

    def times(self, *texts: str) -> list[float]:
        """When something happened whose line in the timeline holds all `texts`, before it is looked whether all is healed."""
        lines = takewhile(lambda entry: not entry[1].startswith("PROBE"), self.result.timeline)
        return [when for when, line in lines if all(text in line for text in texts)]

    def said(self, *texts: str) -> bool:
        """Whether a line of the timeline holds all `texts`."""
        return bool(self.times(*texts))


def _end(side: SimInstance | None, number: int) -> Outcome | None:
    return None if side is None else side.engine.outcomes.get(number)


def play(script: Script, bugs: Bugs | None = None, *, prepare: Prepare | None = None, limits: Limits = LIMITS) -> Story:
    """Run a script; `prepare` may watch or disturb the run before it starts."""
    run = Run(script, bugs, keep_timeline=True, limits=limits)
    back_at: dict[str, float] = {}
    out: set[str] = set()
    run.world.on_event.append(partial(_watch, run, out, back_at))
    if prepare is not None:
        prepare(run)
    return Story(run, run.run(), back_at, out)


def _watch(run: Run, out: set[str], back_at: dict[str, float]) -> None:
    if run.probes:
        return
    for address, instance in run.cluster.instances.items():
        engine = instance.engine
        if engine.blocks_out():
            out.add(address)
            back_at.pop(address, None)
        elif address in out:
            out.discard(address)
            back_at[address] = run.world.now


def at_every_event(script: Script, *faults: Fault, step: int = 1) -> Iterator[Script]:
    """The script with all `faults` together at each (or each `step`th) event of its undisturbed run in turn."""
    for event in range(1, play(script).result.events + 1, step):
        struck = tuple(msgspec.structs.replace(fault, at_event=event) for fault in faults)
        yield msgspec.structs.replace(script, faults=script.faults + struck)


def broken(scripts: Iterable[Script], bugs: Bugs | None = None, *, prepare: Prepare | None = None) -> dict[str, str]:
    """Every rule that any of `scripts` breaks, with what was seen."""
    stories = (play(script, bugs, prepare=prepare) for script in scripts)
    return {violation.rule: violation.detail for story in stories for violation in story.result.violations}


def first_broken(scripts: Iterable[Script], bugs: Bugs | None = None, *, prepare: Prepare | None = None) -> set[str]:
    """The rules broken by the first of `scripts` that breaks one; empty when all hold."""
    stories = (play(script, bugs, prepare=prepare) for script in scripts)
    return next((story.rules for story in stories if story.rules), set())


def sides(source: type[SourceSide] = SourceSide, target: type[TargetSide] = TargetSide) -> Bugs:
    """Instances whose coordinators are made of these halves."""
    return Bugs(coordinator=type("ChangedCoordinator", (Coordinator,), {"source_side": source, "target_side": target}))


def disturbed(run: Run) -> None:
    """Let failures be no surprise, although the script has no fault."""
    run.is_disturbed = True


def confirmed_early(run: Run) -> None:
    """Let a confirmation before the last byte pass, to see what comes of it."""
    run.is_disturbed = True
    run.world.not_promised.add("confirmed after the last byte")


def echo(*delays: float, of: type | tuple[type, ...] = object) -> Prepare:
    """Let every frame (that carries a message of the kind `of`) arrive again, so long after it first did."""

    def prepare(run: Run) -> None:
        run.is_disturbed = True
        arrive = run.cluster.network.arrive

        def arrive_and_again(address: str, frame: bytes, sender: str) -> None:
            arrive(address, frame, sender)
            for delay in delays if isinstance(decode(frame).message, of) else ():
                run.world.after(delay, None, partial(arrive, address, frame, sender))

        run.cluster.network.arrive = arrive_and_again

    return prepare


def losing(is_lost: Callable[[Message], bool]) -> Prepare:
    """Let no frame arrive whose message `is_lost`."""

    def prepare(run: Run) -> None:
        run.is_disturbed = True
        arrive = run.cluster.network.arrive

        def arrive_or_not(address: str, frame: bytes, sender: str) -> None:
            if not is_lost(decode(frame).message):
                arrive(address, frame, sender)

        run.cluster.network.arrive = arrive_or_not

    return prepare
