"""Faults on real processes: hand-offs that stand still at every stage at once, a signal to one side, and what must follow."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
from hosts import Host

from held_instances import NO_HOLD, CancelTask, Free, Halt, HeldProcess, HeldSettings, Hold, SetHold
from kvbaton.bench.bare.instance import HandoffEnd, Task
from kvbaton.bench.bare.process import Relay
from kvbaton.config import Limits
from kvbaton.core.handoff import Mode

__all__ = ["LIMITS", "STAGES", "Fault", "Scene", "Stage", "Times", "scene", "stages_of"]

LIMITS = Limits(transfer_timeout=1.5, defer_timeout=2.5, stop_timeout=0.3, retry=0.1)
TOKENS = 60
_CHUNK_TOKENS = 32
_SPANS = 8
_EACH = 3
_BLOCKS = 128
_BLOCKS_EACH = 4
_WAIT_S = 20.0
_FRESH = 64
_KEY = "the key of three hosts that are gone after the test"


@dataclass(frozen=True)
class Stage:
    """Where hand-offs stand when the fault strikes. `holder` is the side whose gauges show that they are there."""

    name: str
    holder: str
    source: Hold = NO_HOLD
    target: Hold = NO_HOLD
    is_pull_too: bool = True
    router_cancels: bool = False
    """No timeout runs at this stage: it is the router that notices, and cancels the other side."""


STAGES = (
    Stage("queued", "target", target=Hold(pulls=False), is_pull_too=False, router_cancels=True),
    Stage("offered, grant lost", "target", source=Hold(waits=False), target=Hold(muted=("grant",))),
    Stage("moving", "target", target=Hold(stalls=True)),
    Stage("granted", "source", source=Hold(spans=0), is_pull_too=False),
    Stage("in mid-stream", "source", source=Hold(spans=_SPANS // 2), is_pull_too=False),
    Stage("all announced", "source", source=Hold(spans=_SPANS), is_pull_too=False),
    Stage("confirming", "source", source=Hold(muted=("confirmed",))),
    Stage("before release", "target", target=Hold(muted=("release",))),
)
"""In the order in which they are set up: nothing is copied before the stage whose copies are held up; the last one alone passes
by itself."""


def stages_of(mode: Mode) -> Sequence[Stage]:
    """The stages that hand-offs of a mode can stand at."""
    return [stage for stage in STAGES if mode is Mode.PUSH or stage.is_pull_too]


@dataclass(frozen=True)
class Fault:
    """A signal, and whether the process goes on afterwards."""

    name: str
    number: int
    resumes: bool = False


@dataclass
class Times:
    """How long after a fault memory was back, hand-off by hand-off, in seconds, by what happened."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, *seconds: float) -> None:
        """Note some."""
        self.taken.setdefault(what, []).extend(seconds)

    def lines(self) -> Iterator[str]:
        """Median and maximum of each, as lines of a table."""
        for what, values in sorted(self.taken.items()):
            if values:
                yield f"| {what} | {sorted(values)[len(values) // 2]:.2f} s | {max(values):.2f} s | {len(values)} |"


@dataclass
class Scene:
    """Three instances: a source and a target with hand-offs between them, and a third that can stand in for either."""

    mode: Mode
    source: HeldProcess
    target: HeldProcess
    spare: HeldProcess
    relay: Relay
    fresh: dict[str, HeldProcess] = field(default_factory=dict)
    """The targets of fresh loads, by name."""

    @property
    def processes(self) -> tuple[HeldProcess, ...]:
        """All three."""
        return self.source, self.target, self.spare

    def process(self, side: str) -> HeldProcess:
        """The instance on that side."""
        return self.source if side == "source" else self.target

    def hold_at_every_stage(self) -> None:
        """Bring a few hand-offs to each stage of the mode; all stand there at the same time."""
        for stage in stages_of(self.mode):
            self.source.order(SetHold(stage.name, stage.source))
            self.target.order(SetHold(stage.name, stage.target))
            self.relay.begin(Task(stage.name, self.mode, _EACH, _EACH, TOKENS, _CHUNK_TOKENS), self.source, self.target)
            holder = self.process(stage.holder)
            self.relay.wait(partial(self._stands, holder, stage), stage.name, _WAIT_S)

    def _stands(self, holder: HeldProcess, stage: Stage) -> bool:
        return holder.gauges().held[stage.name] >= _EACH

    def cancel_queued(self, side: str) -> None:
        """What a router does when it has lost the other side: cancel what no timeout would end."""
        self.process(side).order(*(CancelTask(stage.name) for stage in stages_of(self.mode) if stage.router_cancels))

    def halt(self, name: str) -> None:
        """Begin no more hand-offs of a load, on either side."""
        for process in (self.source, self.target):
            process.order(Halt(name))

    def wait_idle(self, process: HeldProcess) -> float:
        """Wait until an instance has no live hand-off and no block in use; the moment at which that was so."""
        self.relay.wait(lambda: _is_idle(process), f"all blocks of {process.name} are back", _WAIT_S)
        return time.monotonic()

    def outcomes(self, name: str, process: HeldProcess) -> set[str]:
        """How the hand-offs of a load ended on one instance, once all have."""
        ends = self.relay.ends[name, process.name]
        self.relay.wait(lambda: len(ends) >= _EACH, f"{name} has ended at {process.name}", _WAIT_S)
        return {end.outcome for end in ends}

    def begin_fresh(self, name: str, survivor: str, other: HeldProcess) -> None:
        """Begin so many hand-offs with another instance that every freed block is used again; some of what lands is kept."""
        source, target = (self.source, other) if survivor == "source" else (other, self.target)
        most = _BLOCKS // _BLOCKS_EACH
        fresh = Task(name, self.mode, _FRESH, most // 2, TOKENS, _CHUNK_TOKENS)
        kept = Task(f"{name} kept", self.mode, most // 2, most // 2, TOKENS, _CHUNK_TOKENS)
        target.order(SetHold(kept.name, Hold(keeps=True)))
        for each in (kept, fresh):
            self.relay.begin(each, source, target)
        self.fresh[name] = target

    def finish_fresh(self, name: str) -> None:
        """Wait until they have landed; look at what was kept once more."""
        for each, count in ((f"{name} kept", _BLOCKS // _BLOCKS_EACH // 2), (name, _FRESH)):
            for (task, process), ends in self.relay.ends.items():
                if task == each:
                    self.relay.wait(partial(_has, ends, count), f"{count} of {each} at {process}", _WAIT_S)
                    assert {end.outcome for end in ends} == {"delivered"}, ends
        self.fresh[name].order(Free(f"{name} kept"))

    def begin_load(self, name: str, count: int) -> None:
        """Begin a long load without any hold."""
        self.source.order(SetHold(name, Hold(waits=False)))
        self.relay.begin(Task(name, self.mode, count, 16, TOKENS, _CHUNK_TOKENS), self.source, self.target)


def _has(ends: list[HandoffEnd], count: int) -> bool:
    return len(ends) >= count


def _is_idle(process: HeldProcess) -> bool:
    gauges = process.gauges()
    return gauges.blocks_in_use == gauges.live == gauges.quarantined_blocks == 0


@contextmanager
def scene(mode: Mode, transport: str, places: Sequence[Host] = ()) -> Iterator[Scene]:
    """Three instances, started; ended when left, the stopped ones too. With `places`, each on a host of its own."""
    settings = HeldSettings(_BLOCKS, TOKENS, transport=transport, limits=LIMITS)
    with ExitStack() as parts:
        made = []
        for index, name in enumerate(("source", "target", "spare")):
            if places:
                there = msgspec.structs.replace(settings, host=places[index].ipv4, cluster_key=_KEY)
                made.append(HeldProcess(name, there, places[index].named_command()))
            else:
                made.append(HeldProcess(name, settings))
            parts.enter_context(made[-1])
        for process in made:
            parts.callback(process.send_signal, signal.SIGCONT)
            assert process.here.pid == process.pid
        source, target, spare = made
        yield Scene(mode, source, target, spare, Relay(made))
