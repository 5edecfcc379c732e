"""A bare instance: real driver, sockets and transport over tagged pages, ordered by its parent to hand off."""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec.structs import replace

from kvbaton.agent.engine_port import Drained, EngineEvent, Granted, Landed, SourceEnded, TargetEnded
from kvbaton.bench.bare.holding import HoldingTransport, MutedSockets, task_of
from kvbaton.bench.bare.orders import (
    NO_HOLD,
    Ask,
    BareSettings,
    Begin,
    CancelTask,
    Ended,
    Free,
    Gauges,
    Halt,
    Here,
    Hold,
    Lift,
    Offered,
    Order,
    Report,
    SetFaults,
    Task,
)
from kvbaton.bench.bare.pages import TaggedPages
from kvbaton.bench.bare.pool import BarePool
from kvbaton.bench.bare.tasks import BareBooks, SourceTask, TargetTask
from kvbaton.engines.instance import AgentSettings, ModelIdentity, new_incarnation, open_driver
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.faulty import Faults

__all__ = ["BareInstance"]

_MODEL = ModelIdentity("tagged pages", "tagged pages")
_COMPUTED_PER_TURN = 4


class BareInstance:
    """The engine's part without an engine. One thread calls it; `news` is called from the driver's, when there are events."""

    def __init__(self, settings: BareSettings, send: Callable[[Report], None], news: Callable[[], None]) -> None:
        self._send = send
        self._shape = settings.shape
        self._incarnation = new_incarnation()
        pages = TaggedPages(settings.shape, settings.blocks, settings.most_tokens)
        region, port = pages.region, PortPicker().pick()
        agents = AgentSettings(port, transport=settings.transport, limits=settings.limits, handoff=settings.handoff)
        self._holding: HoldingTransport | None = None
        self._muted: MutedSockets | None = None
        if settings.can_hold:
            self._holding = HoldingTransport(agents.open_transport(self._incarnation, region), region)
            self._muted = MutedSockets(self._incarnation, agents.control_host, port)
        self._driver = open_driver(
            agents,
            self._incarnation,
            _MODEL,
            pages.layout(),
            region,
            news,
            sockets=self._muted,
            transport=self._holding,
        )
        self._books = BareBooks(pages, BarePool(settings.blocks), self._driver)
        self._sources: dict[str, SourceTask] = {}
        self._targets: dict[str, TargetTask] = {}
        self._reported_offers: dict[str, int] = {}

    def start(self) -> None:
        """Start the driver, and report it."""
        self._driver.start()
        self._send(Here(str(self._driver.address), self._incarnation, os.getpid()))

    def close(self) -> None:
        """Stop in good order: cancel what is live, notify the peers, and report how each hand-off ended."""
        self._driver.close()
        self._take_events()
        self._report()

    def take(self, order: Order) -> None:
        """Carry out an order."""
        match order:
            case Begin():
                self._begin(order)
            case Offered():
                self._targets[order.task].offered = order.count
            case Lift():
                self._lift(order.task)
            case CancelTask():
                self._task(order.task).cancel()
            case Halt():
                self._task(order.task).halt()
            case Free():
                self._targets[order.task].free()
            case SetFaults():
                self._go_wrong(Faults(drop_writes=order.drop_writes, corrupt=order.corrupt))
            case Ask():
                self._send(self._gauges(order.number))

    def work(self) -> bool:
        """Take the events of the agents, begin and compute what is due, report; whether there is more to compute at once."""
        self._take_events()
        more = False
        for source in self._sources.values():
            source.start()
            more |= source.compute(_COMPUTED_PER_TURN)
        for target in self._targets.values():
            target.start()
        self._report()
        return more

    def _begin(self, order: Begin) -> None:
        task = order.task
        self._hold(task.name, task.hold if task.side == "target" else replace(task.hold, stalls=False))
        if task.side == "source":
            self._sources[task.name] = SourceTask(task, self._books)
        else:
            self._targets[task.name] = TargetTask(task, self._books)

    def _lift(self, task: str) -> None:
        self._hold(task, NO_HOLD)
        self._task(task).lift()

    def _hold(self, task: str, hold: Hold) -> None:
        if self._muted is not None and self._holding is not None:
            self._muted.mute(task, hold.muted)
            self._holding.stall(hold.stalls)
        elif hold != NO_HOLD:
            raise ConfigError(f"task {task!r} has a hold, and can_hold is false; start the instance with can_hold")

    def _go_wrong(self, faults: Faults) -> None:
        if self._holding is None:
            raise ConfigError("copies are to go wrong, and can_hold is false; start the instance with can_hold")
        self._holding.go_wrong(faults)

    def _task(self, name: str) -> SourceTask | TargetTask:
        return self._sources.get(name) or self._targets[name]

    def _take_events(self) -> None:
        for event in self._driver.events():
            self._take_event(event)

    def _take_event(self, event: EngineEvent) -> None:
        name = task_of(event.key)
        match event:
            case Granted():
                self._sources[name].on_granted(event)
            case SourceEnded():
                self._sources[name].on_ended(event)
            case Landed():
                self._targets[name].on_landed(event)
            case TargetEnded():
                self._targets[name].on_ended(event)
            case Drained():
                pass

    def _report(self) -> None:
        for name, source in self._sources.items():
            if source.offered != self._reported_offers.get(name):
                self._reported_offers[name] = source.offered
                self._send(Offered(name, source.offered))
        for task in (*self._sources.values(), *self._targets.values()):
            if task.ends:
                ends, task.ends = task.ends, []
                self._send(Ended(task.task.name, ends, self._books.pool.in_use))

    def _gauges(self, number: int) -> Gauges:
        tasks = {**self._sources, **self._targets}
        agent = self._driver.stats()
        return Gauges(
            number=number,
            blocks_in_use=self._books.pool.in_use,
            live=sum(len(task.live) for task in tasks.values()) + sum(agent.handoffs_live.values()),
            quarantined_blocks=agent.quarantined_blocks,
            landed_total=self._books.landed_total,
            foreign_bytes=self._books.foreign_bytes,
            errors_total=agent.errors_total,
            held={name: task.held + self._held_up(task.task) for name, task in tasks.items()},
        )

    def _held_up(self, task: Task) -> int:
        """How many hand-offs the wrappers hold up: messages were swallowed, or every byte of theirs was posted."""
        if self._muted is None or self._holding is None:
            return 0
        swallowed = len(self._muted.swallowed.get(task.name, ()))
        return swallowed + (self._holding.stalled_bytes // self._shape.cache_bytes(task.tokens) if task.hold.stalls else 0)
