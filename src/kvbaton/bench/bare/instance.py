"""A bare instance: real driver, sockets and transport over tagged pages, ordered by its parent to hand off.

`main` is its process. The parent sends orders and takes reports over one channel, one per frame.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvbaton.agent import engine_port
from kvbaton.agent.channel import Channel, ChannelClosed
from kvbaton.agent.engine_port import AgentStats, Allocation, EngineEvent, HandoffPort, Offer, SourceRequest, SpansReady
from kvbaton.bench.bare.pages import SMALL, BarePool, TaggedPages, spans_of
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Incarnation, Mode, Outcome, TransferId
from kvbaton.engines.instance import AgentSettings, ModelIdentity, new_incarnation, open_driver
from kvbaton.launch.ports import PortPicker

__all__ = [
    "MODEL",
    "Ask",
    "BareAgents",
    "BareBooks",
    "BareInstance",
    "BareSettings",
    "Begin",
    "Ended",
    "Gauges",
    "HandoffEnd",
    "Here",
    "Offered",
    "Order",
    "Report",
    "SourceTask",
    "TargetTask",
    "Task",
    "main",
    "run_child",
]

MODEL = ModelIdentity("tagged pages", "tagged pages")
"""What every bare instance serves."""

_PROMPT = "prompt of "
_COMPUTED_PER_TURN = 4
_PR_SET_PDEATHSIG = 1
_SEND_S = 60.0
_IDLE_MS = 5_000


class BareSettings(msgspec.Struct, frozen=True):
    """Everything that a bare instance is started with. `report_s` is for how long ends wait to be reported with others."""

    blocks: int
    most_tokens: int
    transport: str = "local"
    handoff: HandoffSettings = DEFAULT_HANDOFF
    report_s: float = 0.0


class Task(msgspec.Struct, frozen=True):
    """Hand-offs `name`-0 to `name`-(count-1) of `tokens` tokens each, at most `in_flight` at a time.

    The target checks every byte of what has landed, or a sample of it. To compute a layer takes the source `layer_s`.
    """

    name: str
    mode: Mode
    count: int
    in_flight: int
    tokens: int
    chunk_tokens: int
    every_byte: bool = True
    layer_s: float = 0.0


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Start one side of a task. `source` is the control address that a target dials; empty for the source itself."""

    task: Task
    source: str = ""


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """The first `count` hand-offs of a task are offered. In pull a source reports it, because its target waits for it."""

    task: str
    count: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Report the gauges; the answer has the same number."""

    number: int


Order = Begin | Offered | Ask


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The instance runs."""

    address: str
    incarnation: Incarnation
    pid: int


class HandoffEnd(msgspec.Struct, frozen=True, array_like=True):
    """One side of one hand-off is over: how, why, when by its own clock, and how long after it was begun.

    `computed_at` is when a source had computed all of it, and had not reported the last of it yet.
    """

    index: int
    outcome: str
    reason: str
    at: float
    seconds: float
    computed_at: float = 0.0


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Hand-offs that are over since the last report."""

    task: str
    ends: list[HandoffEnd]


class Gauges(msgspec.Struct, frozen=True, tag="gauges"):
    """The instance as it stands; `live` counts the hand-offs of its tasks and those that its agents have."""

    number: int
    blocks_in_use: int
    live: int
    foreign_bytes: int


Report = Here | Offered | Ended | Gauges


class BareAgents(HandoffPort, Protocol):
    """The agents of a bare instance: a `Driver`, or what is measured beside it."""

    @property
    def address(self) -> ControlAddress:
        """Where peers reach them."""

    def start(self) -> None:
        """Start them."""

    def close(self) -> None:
        """Stop them. Idempotent."""

    def stats(self) -> AgentStats:
        """What was counted so far."""


@dataclass(slots=True)
class BareBooks:
    """What all tasks of an instance share: memory, pool, agents, and what was found in landed caches."""

    pages: TaggedPages
    pool: BarePool
    port: HandoffPort
    foreign_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Live:
    index: int
    blocks: BlockLists
    begun_at: float


@dataclass
class _BareTask:
    """What both kinds have in common: which hand-offs are live, and which are over and not reported yet."""

    task: Task
    books: BareBooks
    live: dict[HandoffKey, _Live] = field(default_factory=dict)
    ends: list[HandoffEnd] = field(default_factory=list)
    next_index: int = 0
    computed_at: dict[HandoffKey, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether every hand-off was begun and has ended."""
        return self.next_index >= self.task.count and not self.live

    def on_ended(self, event: engine_port.SourceEnded | engine_port.TargetEnded) -> None:
        """A source is done, or nothing landed at a target: the blocks are back."""
        if event.key in self.live:
            self.books.pool.give(self._end(event.key, event.outcome, event.reason).blocks)

    def _begin(self) -> tuple[HandoffKey, _Live] | None:
        """Make the next hand-off live; None when it is not its turn or there are no blocks."""
        task = self.task
        if self.next_index >= task.count or len(self.live) >= task.in_flight:
            return None
        blocks = self.books.pool.take(self.books.pages.shape.blocks_for(task.tokens))
        if blocks is None:
            return None
        key = HandoffKey(TransferId(f"{task.name}-{self.next_index}"))
        self.live[key] = _Live(self.next_index, blocks, time.monotonic())
        self.next_index += 1
        return key, self.live[key]

    def _end(self, key: HandoffKey, outcome: Outcome, reason: str) -> _Live:
        live = self.live.pop(key)
        now = time.monotonic()
        computed_at = self.computed_at.pop(key, 0.0)
        self.ends.append(HandoffEnd(live.index, outcome.value, reason, now, now - live.begun_at, computed_at))
        return live


class SourceTask(_BareTask):
    """Computes and offers hand-offs, in the order in which they were granted (push) or begun (pull)."""

    def __init__(self, task: Task, books: BareBooks) -> None:
        super().__init__(task, books)
        self.spans = spans_of(books.pages.shape, task.tokens, task.chunk_tokens)
        self.waits_for_grant = task.mode is Mode.PUSH
        self._ready: deque[HandoffKey] = deque()
        self.offered = 0

    def start(self) -> None:
        """Begin what may begin."""
        while (begun := self._begin()) is not None:
            key, _ = begun
            self.books.port.expect_target(key, _PROMPT + key.transfer_id)
            if not self.waits_for_grant:
                self._ready.append(key)

    def compute(self, most: int) -> bool:
        """Compute and offer at most so many hand-offs, in one step; whether there may be more.

        As engines compute: a layer of all of them, then the next one, and one call announces what is new of all.
        """
        taken = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        if keys := [key for key in taken if key in self.live]:
            self.announce(keys, 0, len(self.spans))
            for key in keys:
                self.offer(key)
        return len(taken) == most

    def on_granted(self, event: engine_port.Granted) -> None:
        """A target has blocks: its turn will come."""
        if event.key in self.live and self.waits_for_grant:
            self._ready.append(event.key)

    def announce(self, keys: Sequence[HandoffKey], first: int, end: int) -> None:
        """Compute these spans of some hand-offs; in push, their targets are notified of each."""
        write, is_push = self.books.pages.write, self.task.mode is Mode.PUSH
        lives = [(key, self.live[key].blocks) for key in keys]
        for span in self.spans[first:end]:
            if self.task.layer_s:
                time.sleep(self.task.layer_s)  # as an engine that is in a step: its agents go on meanwhile
            for key, blocks in lives:
                write(key, blocks, span)
            if span is self.spans[-1]:
                # Before the report: the agents' thread may send it while this one waits for its next turn.
                self.computed_at.update(dict.fromkeys(keys, time.monotonic()))
            if is_push:
                self.books.port.spans_ready_all([SpansReady(key, blocks, (span,)) for key, blocks in lives])

    def offer(self, key: HandoffKey) -> None:
        """The cache is complete."""
        live = self.live[key]
        self.books.port.offer(Offer(key, live.blocks, self.task.tokens, Aux(live.index, 0.0)))
        self.offered += 1


class TargetTask(_BareTask):
    """Asks for hand-offs into poisoned blocks and checks what has landed."""

    def __init__(self, task: Task, books: BareBooks, source: str) -> None:
        super().__init__(task, books)
        self._source = ControlAddress.parse(source)
        self.offered = task.count if task.mode is Mode.PUSH else 0

    def start(self) -> None:
        """Begin what may begin: in pull, only what is offered."""
        while self.next_index < self.offered and (begun := self._begin()) is not None:
            key, live = begun
            (self.books.pages.poison if self.task.every_byte else self.books.pages.poison_sample)(live.blocks)
            self.books.port.expect_source(self._request(key))
            self.allocate(key)

    def allocate(self, key: HandoffKey) -> None:
        """Ask for the cache."""
        self.books.port.allocated(Allocation(self._request(key), self.live[key].blocks, self.task.tokens, 0))

    def on_landed(self, event: engine_port.Landed) -> None:
        """Check every byte, or a sample, and free the blocks."""
        if event.key not in self.live:
            return
        live = self._end(event.key, Outcome.DELIVERED, "")
        pages = self.books.pages
        look = pages.foreign_bytes if self.task.every_byte else pages.foreign_sample
        self.books.foreign_bytes += look(event.key, live.blocks, self.task.tokens)
        self.books.foreign_bytes += event.aux.token_id != live.index
        self.free(event.key, live.blocks)

    def free(self, key: HandoffKey, blocks: BlockLists) -> None:
        """What has landed was checked and is not needed any more."""
        del key
        self.books.pool.give(blocks)

    def _request(self, key: HandoffKey) -> SourceRequest:
        return SourceRequest(key, _PROMPT + key.transfer_id, self._source, mode=self.task.mode)


class BareInstance:
    """The engine's part without an engine. One thread calls it; `news` is called from the driver's, when there are events."""

    orders: Any = Order
    """What it can be ordered to do."""

    def __init__(self, settings: BareSettings, send: Callable[[Report], None], news: Callable[[], None]) -> None:
        self._send = send
        self.report_s = settings.report_s
        self.incarnation = new_incarnation()
        pages = TaggedPages(SMALL, settings.blocks, settings.most_tokens)
        self.driver = self.open_driver(settings, pages, news)
        self.books = BareBooks(pages, BarePool(settings.blocks), self.driver)
        self.sources: dict[str, SourceTask] = {}
        self.targets: dict[str, TargetTask] = {}
        self._reported_offers: dict[str, int] = {}

    def open_driver(self, settings: BareSettings, pages: TaggedPages, news: Callable[[], None]) -> BareAgents:
        """The agents, not started."""
        agents = AgentSettings(PortPicker().pick(), transport=settings.transport, handoff=settings.handoff)
        return open_driver(agents, self.incarnation, MODEL, pages.layout(), pages.region, news)

    def start(self) -> None:
        """Start the driver, and report it."""
        self.driver.start()
        self._send(Here(str(self.driver.address), self.incarnation, os.getpid()))

    def close(self) -> None:
        """Stop in good order: cancel what is live, notify the peers, and report how each hand-off ended."""
        self.driver.close()
        self._take_events()
        self._report(at_once=True)

    def take(self, order: Order) -> None:
        """Carry out an order."""
        match order:
            case Begin():
                self.begin(order)
            case Offered():
                self.targets[order.task].offered = order.count
            case Ask():
                self._send(self.gauges(order.number))

    def begin(self, order: Begin) -> None:
        """Start one side of a task."""
        if order.source:
            self.targets[order.task.name] = TargetTask(order.task, self.books, order.source)
        else:
            self.sources[order.task.name] = SourceTask(order.task, self.books)

    def work(self) -> bool:
        """Take the events of the agents, begin and compute what is due, report; whether there is more to compute at once."""
        self._take_events()
        more = False
        for source in self.sources.values():
            source.start()
            more |= source.compute(_COMPUTED_PER_TURN)
        for target in self.targets.values():
            target.start()
        self._report()
        return more

    def gauges(self, number: int) -> Gauges:
        """Its state now, as the answer to a question."""
        tasks = (*self.sources.values(), *self.targets.values())
        live = sum(len(task.live) for task in tasks) + sum(self.driver.stats().handoffs_live.values())
        return Gauges(number, self.books.pool.in_use, live, self.books.foreign_bytes)

    def _take_events(self) -> None:
        for event in self.driver.events():
            self._take_event(event)

    def _take_event(self, event: EngineEvent) -> None:
        name = event.key.transfer_id.rpartition("-")[0]
        match event:
            case engine_port.Granted():
                self.sources[name].on_granted(event)
            case engine_port.SourceEnded():
                self.sources[name].on_ended(event)
            case engine_port.Landed():
                self.targets[name].on_landed(event)
            case engine_port.TargetEnded():
                self.targets[name].on_ended(event)
            case engine_port.Drained():
                pass

    @property
    def has_unreported(self) -> bool:
        """Whether ends wait to be reported with others."""
        return any(task.ends for task in (*self.sources.values(), *self.targets.values()))

    def _report(self, *, at_once: bool = False) -> None:
        """Report offers at once where targets wait for them, and ends as the settings have it."""
        for name, source in self.sources.items():
            if source.task.mode is Mode.PULL and source.offered != self._reported_offers.get(name):
                self._reported_offers[name] = source.offered
                self._send(Offered(name, source.offered))
        for task in (*self.sources.values(), *self.targets.values()):
            if task.ends and (at_once or task.is_over or time.monotonic() - task.ends[0].at >= self.report_s):
                ends, task.ends = task.ends, []
                self._send(Ended(task.task.name, ends))


class _Child:
    """Joins the channel, the signal and the instance in one loop."""

    def __init__(self, kind: type[BareInstance], settings: BareSettings, channel: Channel) -> None:
        self._channel = channel
        self._decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(kind.orders)
        self._news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = False
        self._instance = kind(settings, self._send, self._wake)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._news_fd, select.POLLIN)

    def run(self) -> None:
        """Until a SIGTERM comes, or the parent closes its end."""
        signal.signal(signal.SIGTERM, self._stop)
        with contextlib.suppress(ChannelClosed):
            self._instance.start()
            # As vLLM and SGLang do once they are up: what is there stays, and is not looked through again and again.
            gc.collect()
            gc.freeze()
            more = True
            while not self._is_over:
                wait_ms = self._instance.report_s * 1e3 if self._instance.has_unreported else _IDLE_MS
                for fd, _ in self._poll.poll(0 if more else wait_ms):
                    if fd == self._channel.fileno():
                        self._take_orders()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._news_fd)
                more = self._instance.work()
        with contextlib.suppress(ChannelClosed):
            self._instance.close()

    def _stop(self, number: int, where: object) -> None:
        del number, where
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._news_fd, 1)

    def _take_orders(self) -> None:
        while (frame := self._channel.receive(0.0)) is not None:
            self._instance.take(self._decoder.decode(frame))

    def _send(self, report: Report) -> None:
        self._channel.send(msgspec.msgpack.encode(report), _SEND_S)


def run_child(kind: type[BareInstance], settings: type[BareSettings]) -> None:
    """Be the process of an instance. Arguments: the settings as JSON, and the socket of the channel to the parent.

    The kernel ends this process with its parent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.ERROR)
    channel = Channel(socket.socket(fileno=int(sys.argv[2])), "the parent")
    _Child(kind, msgspec.json.decode(sys.argv[1], type=settings), channel).run()


def main() -> None:
    """The process of a bare instance."""
    run_child(BareInstance, BareSettings)


if __name__ == "__main__":
    main()
