"""Bare instances whose hand-offs can be made to stand still at a chosen stage, and whose copies can go wrong.

Run as a program, this file is the process of such an instance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec

from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import Landed
from kvbaton.agent.sockets import ControlSockets
from kvbaton.bench.bare.instance import (
    MODEL,
    BareBooks,
    BareInstance,
    BareSettings,
    Begin,
    Ended,
    Gauges,
    Here,
    Offered,
    Order,
    SourceTask,
    TargetTask,
    Task,
    run_child,
)
from kvbaton.bench.bare.pages import SMALL, TaggedPages
from kvbaton.bench.bare.process import BareProcess
from kvbaton.config import Limits, Trust
from kvbaton.core.handoff import BlockLists, HandoffKey, Incarnation
from kvbaton.core.messages import Message, Prefilled
from kvbaton.engines.instance import AgentSettings, open_driver
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import AfterEvent, Batch, Region, Ticket, Transport
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = ["NO_HOLD", "CancelTask", "Free", "Halt", "HeldProcess", "HeldSettings", "Hold", "Lift", "SetFaults", "SetHold"]


class HeldSettings(BareSettings, frozen=True):
    """Everything that such an instance is started with."""

    limits: Limits = Limits()
    host: str = "127.0.0.1"
    cluster_key: str = ""


class Hold(msgspec.Struct, frozen=True):
    """Where the hand-offs of a task stand still on one side until the hold is lifted.

    spans:  a source announces so many spans and then pauses (None: it goes on to the offer)
    waits:  whether a source announces nothing of a push before it has the grant
    pulls:  whether a target goes on from expecting a source to asking for the cache
    muted:  messages of these kinds (their tags) are swallowed before they leave
    stalls: copies that a target posts do not complete
    keeps:  whether a target keeps the blocks of what has landed, to look at them again later
    """

    spans: int | None = None
    waits: bool = True
    pulls: bool = True
    muted: tuple[str, ...] = ()
    stalls: bool = False
    keeps: bool = False


NO_HOLD = Hold()


class SetHold(msgspec.Struct, frozen=True, tag="set_hold"):
    """How the hand-offs of a task are held; sent before the task begins."""

    task: str
    hold: Hold


class Lift(msgspec.Struct, frozen=True, tag="lift"):
    """Let a task's hand-offs go on from where they are held."""

    task: str


class CancelTask(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel all live hand-offs of a task."""

    task: str


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Begin no more hand-offs of a task; those that are live go on."""

    task: str


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Look once more at every byte that a task has kept, then free it."""

    task: str


class SetFaults(msgspec.Struct, frozen=True, tag="set_faults"):
    """What goes wrong with copies from now on; see `kvbaton.transport.faulty`."""

    drop_writes: bool = False
    corrupt: bool = False


HeldOrder = SetHold | Lift | CancelTask | Halt | Free | SetFaults


class HeldGauges(Gauges, frozen=True, tag="gauges"):
    """More of the instance as it stands; `held`, per task, counts hand-offs that stand still."""

    quarantined_blocks: int = 0
    landed_total: int = 0
    errors_total: int = 0
    held: dict[str, int] = msgspec.field(default_factory=dict)


def task_of(key: HandoffKey) -> str:
    """The task that a hand-off belongs to."""
    return key.transfer_id.rpartition("-")[0]


class MutedSockets(ControlSockets):
    """A control channel that swallows messages of chosen kinds about the hand-offs of chosen tasks.

    `swallowed` keeps, per task, the hand-offs that this happened to.
    """

    def __init__(self, me: Incarnation, host: str, port: int, trust: Trust) -> None:
        super().__init__(me, host, port, trust)
        self._muted: dict[str, tuple[str, ...]] = {}
        self.swallowed: dict[str, set[HandoffKey]] = {}

    def mute(self, task: str, kinds: tuple[str, ...]) -> None:
        """Swallow messages of these kinds from now on; none of them lifts it."""
        self._muted[task] = kinds
        self.swallowed[task] = set()

    def send(self, peer: Incarnation, message: Message) -> None:
        key = getattr(message, "key", None)
        if self._muted and key is not None:
            task = task_of(key)
            kinds = self._muted.get(task, ())
            if message.__struct_config__.tag in kinds:
                self.swallowed[task].add(key)
                return
            if isinstance(message, Prefilled) and "confirmed" in kinds:
                # With its stamp, nothing would be asked, and no answer be there to be swallowed.
                message = msgspec.structs.replace(message, stamp=None)
        super().send(peer, message)


class HoldingTransport(FaultyTransport):
    """A transport that fails on command, and counts the bytes that it holds up."""

    def __init__(self, inner: Transport, region: Region) -> None:
        super().__init__(inner, region, Faults())
        self._wrong = Faults()
        self.stalled_bytes = 0

    def go_wrong(self, faults: Faults) -> None:
        """What goes wrong from the next post on."""
        self._wrong = faults
        self.set_faults(faults)

    def stall(self, stalls: bool) -> None:
        """Hold up what is posted from now on, or stop doing so; what is held up stays so."""
        self.go_wrong(replace(self._wrong, stall=stalls))

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        ticket = super().post(batch, after)
        if self._wrong.stall:
            self.stalled_bytes += batch.wire_bytes
        return ticket


class HeldSource(SourceTask):
    """A source that can pause in the middle of its spans."""

    def __init__(self, task: Task, books: BareBooks, hold: Hold) -> None:
        super().__init__(task, books)
        self.waits_for_grant &= hold.waits
        self.hold = hold
        self._paused: deque[HandoffKey] = deque()

    @property
    def held(self) -> int:
        """Hand-offs that pause."""
        return sum(key in self.live for key in self._paused)

    def announce(self, keys: Sequence[HandoffKey], first: int, end: int) -> None:
        super().announce(keys, first, end if self.hold.spans is None else self.hold.spans)

    def offer(self, key: HandoffKey) -> None:
        if self.hold.spans is None:
            super().offer(key)
        else:
            self._paused.append(key)

    def lift(self) -> None:
        """Go on with what pauses."""
        announced, self.hold = self.hold.spans or 0, NO_HOLD
        while self._paused:
            if (key := self._paused.popleft()) in self.live:
                self.announce([key], announced, len(self.spans))
                self.offer(key)


class HeldTarget(TargetTask):
    """A target that can delay asking for its cache, and keep what has landed."""

    def __init__(self, task: Task, books: BareBooks, source: str, hold: Hold) -> None:
        super().__init__(task, books, source)
        self.hold = hold
        self.landed_total = 0
        self._waiting: deque[HandoffKey] = deque()
        self._kept: dict[HandoffKey, BlockLists] = {}

    @property
    def held(self) -> int:
        """Hand-offs that have not asked for their cache yet."""
        return sum(key in self.live for key in self._waiting)

    def allocate(self, key: HandoffKey) -> None:
        if self.hold.pulls:
            super().allocate(key)
        else:
            self._waiting.append(key)

    def lift(self) -> None:
        """Ask for what was not asked for yet."""
        self.hold = NO_HOLD
        while self._waiting:
            if (key := self._waiting.popleft()) in self.live:
                self.allocate(key)

    def on_landed(self, event: Landed) -> None:
        self.landed_total += event.key in self.live
        super().on_landed(event)

    def free(self, key: HandoffKey, blocks: BlockLists) -> None:
        if self.hold.keeps:
            self._kept[key] = blocks
        else:
            super().free(key, blocks)

    def free_kept(self) -> None:
        """Check what was kept once more, then free it."""
        for key, blocks in self._kept.items():
            self.books.foreign_bytes += self.books.pages.foreign_bytes(key, blocks, self.task.tokens)
            self.books.pool.give(blocks)
        self._kept.clear()


class HeldInstance(BareInstance):
    """A bare instance with a wrapper round its transport and its sockets, which takes more orders."""

    orders = Order | HeldOrder
    sources: dict[str, HeldSource]  # type: ignore[assignment]
    targets: dict[str, HeldTarget]  # type: ignore[assignment]

    def open_driver(self, settings: BareSettings, pages: TaggedPages, news: Callable[[], None]) -> Driver:
        assert isinstance(settings, HeldSettings)
        self._holds: dict[str, Hold] = {}
        port, limits, trust = PortPicker().pick(), settings.limits, Trust(settings.cluster_key.encode() or None)
        agents = AgentSettings(
            port, settings.host, transport=settings.transport, limits=limits, handoff=settings.handoff, trust=trust
        )
        self._holding = HoldingTransport(agents.open_transport(self.incarnation, pages.region), pages.region)
        self._muted = MutedSockets(self.incarnation, agents.control_host, port, trust)
        wrapped: Any = {"sockets": self._muted, "transport": self._holding}
        return open_driver(agents, self.incarnation, MODEL, pages.layout(), pages.region, news, **wrapped)

    def take(self, order: Order | HeldOrder) -> None:
        match order:
            case SetHold():
                self._holds[order.task] = order.hold
            case Lift():
                self._hold(order.task, NO_HOLD)
                self._task(order.task).lift()
            case CancelTask():
                self._halt(order.task)
                for key in self._task(order.task).live:
                    self.driver.cancel(key)
            case Halt():
                self._halt(order.task)
            case Free():
                self.targets[order.task].free_kept()
            case SetFaults():
                self._holding.go_wrong(Faults(drop_writes=order.drop_writes, corrupt=order.corrupt))
            case _:
                super().take(order)

    def begin(self, order: Begin) -> None:
        name, hold = order.task.name, self._holds.get(order.task.name, NO_HOLD)
        self._hold(name, hold)
        if order.source:
            self.targets[name] = HeldTarget(order.task, self.books, order.source, hold)
        else:
            self.sources[name] = HeldSource(order.task, self.books, hold)

    def gauges(self, number: int) -> HeldGauges:
        tasks: dict[str, HeldSource | HeldTarget] = {**self.sources, **self.targets}
        agent = self.driver.stats()
        return HeldGauges(
            **msgspec.structs.asdict(super().gauges(number)),
            quarantined_blocks=agent.quarantined_blocks,
            landed_total=sum(target.landed_total for target in self.targets.values()),
            errors_total=agent.errors_total,
            held={name: task.held + self._held_up(task.task) for name, task in tasks.items()},
        )

    def _hold(self, task: str, hold: Hold) -> None:
        self._muted.mute(task, hold.muted)
        self._holding.stall(hold.stalls)

    def _halt(self, task: str) -> None:
        self._task(task).next_index = self._task(task).task.count

    def _task(self, name: str) -> HeldSource | HeldTarget:
        return self.sources.get(name) or self.targets[name]

    def _held_up(self, task: Task) -> int:
        """How many hand-offs the wrappers hold up: messages were swallowed, or every byte of theirs was posted."""
        stalls = self._holds.get(task.name, NO_HOLD).stalls
        swallowed = len(self._muted.swallowed.get(task.name, ()))
        return swallowed + (self._holding.stalled_bytes // SMALL.cache_bytes(task.tokens) if stalls else 0)


class HeldProcess(BareProcess):
    """Such an instance in a process of its own."""

    program = (str(Path(__file__)),)
    report_types = Here | Offered | Ended | HeldGauges

    def gauges(self) -> HeldGauges:
        return cast(HeldGauges, super().gauges())


if __name__ == "__main__":
    run_child(HeldInstance, HeldSettings)
