"""A bare instance whose requests and faults come from a script of the simulator.

Signals and cut links come from outside. What no signal can do is done here, at the edge of the production code: a control
channel that loses, doubles, holds up and repeats messages, a transport that fails, stalls and refuses, an engine that hangs.
With `has_rank_process` its rank lives in a process of its own, which may be stopped or killed alone.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import logging
import math
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec

from kvbaton.agent import engine_port
from kvbaton.agent.channel import Channel, channel_pair
from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import EngineEvent, Landed, SourceRequest
from kvbaton.agent.rank_sets import RankLoop, RemoteRanks
from kvbaton.agent.sockets import ControlSockets
from kvbaton.agent.stamps import open_stamps
from kvbaton.bench.bare.instance import (
    MODEL,
    BareBooks,
    BareInstance,
    BareSettings,
    Gauges,
    HandoffEnd,
    Here,
    Order,
    SourceTask,
    TargetTask,
    Task,
    run_child,
)
from kvbaton.bench.bare.pages import TaggedPages
from kvbaton.bench.bare.process import BareProcess
from kvbaton.config import Limits, Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Endpoint, RankCard
from kvbaton.core.handoff import BlockLists, Executor, HandoffKey, Incarnation, Mode, Outcome, TransferId
from kvbaton.core.messages import Message
from kvbaton.engines.instance import AgentSettings, instance_card, open_driver
from kvbaton.errors import LocalError, QueueFull
from kvbaton.sim.script import FaultKind
from kvbaton.transport.base import AfterEvent, Batch, Region, Ticket, Transport
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = [
    "PLANTS",
    "CancelRequest",
    "HealAll",
    "PeerCame",
    "SideOver",
    "RankStarted",
    "ReplayGauges",
    "ReplayProcess",
    "ReplaySettings",
    "StrikeHere",
    "SubmitSide",
    "main",
]

log = logging.getLogger(__name__)

PLANTS = {
    "drop-writes": "foreign byte",
    "keep-block": "every block is back",
    "lose-end": "everything ends",
    "stay-cut": "heals",
    "fail-all": "spurious failure",
}
"""Mistakes that an instance can be started with, and the rule that each breaks: the controls of the checks."""

_RECORDED = 16
_REORDERED_S = 0.05
_LOSSY = 0.1
_REORDERED = 0.2
_LATER_S = 0.002
_PR_SET_PDEATHSIG = 1
_READY_S = 30.0
_LOST_CODE = 3


class ReplaySettings(BareSettings, frozen=True):
    """Everything that such an instance is started with. Its port stays the same when it is started again."""

    port: int = 0
    host: str = "127.0.0.1"
    cluster_key: str = ""
    limits: Limits = Limits()
    has_rank_process: bool = False
    step_s: float = 0.002
    """How long the model computes for one span."""
    plant: str = ""


class SubmitSide(msgspec.Struct, frozen=True, tag="submit"):
    """One side of an attempt; a target's where `source` names the address to dial.

    is_early: whether a source computes before it has a grant
    decode_s: how long a target uses what has landed
    """

    number: int
    task: Task
    source: str = ""
    incarnation: Incarnation | None = None
    is_early: bool = False
    decode_s: float = 0.0


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """The client of an attempt has gone."""

    number: int


class StrikeHere(msgspec.Struct, frozen=True, tag="strike"):
    """A fault of this instance, or of what it sends to the peer at `address`."""

    kind: FaultKind
    address: str = ""
    for_s: float = 0.0
    number: int = 0
    is_whole: bool = False


class PeerCame(msgspec.Struct, frozen=True, tag="known"):
    """Who lives at an address now."""

    address: str
    incarnation: Incarnation


class HealAll(msgspec.Struct, frozen=True, tag="heal"):
    """No fault lasts any longer."""


class RankStarted(msgspec.Struct, frozen=True, tag="rank"):
    """The process in which the rank of this instance lives."""

    pid: int


class SideOver(msgspec.Struct, frozen=True, tag="over"):
    """One side of an attempt is over, or, with the outcome `offered`, its prefill is."""

    number: int
    outcome: str
    reason: str


class ReplayGauges(Gauges, frozen=True, tag="gauges"):
    """More of the instance as it stands."""

    quarantined_blocks: int = 0
    errors_total: int = 0


class _RankOpened(msgspec.Struct, frozen=True):
    """What a rank process reports of itself first."""

    endpoint: Endpoint
    executor: str
    fences_writers: bool
    transport: str


# Faults at the edges.


@dataclass(slots=True)
class _StruckLink:
    """What happens to messages for one peer."""

    lose_next: int = 0
    double_next: int = 0
    delay_next_s: float = 0.0
    cut_until: float = 0.0
    clogged_until: float = 0.0
    slow_until: float = 0.0
    slow_s: float = 0.0
    lossy_until: float = 0.0


@dataclass(order=True)
class _HeldMessage:
    at: float
    number: int
    peer: Incarnation = field(compare=False)
    message: Message = field(compare=False)


class StruckSockets(ControlSockets):
    """A control channel that loses, doubles, holds up and repeats what it sends, as ordered. The agents' thread sends."""

    def __init__(self, me: Incarnation, host: str, port: int, trust: Trust) -> None:
        super().__init__(me, host, port, trust)
        self._links: dict[str, _StruckLink] = {}
        self._addresses: dict[Incarnation, str] = {}
        self._sent: dict[Incarnation, deque[Message]] = {}
        self._orders: deque[StrikeHere] = deque()
        self._held: list[_HeldMessage] = []
        self._numbers = itertools.count()
        self._random = random.Random(port)

    def strike(self, order: StrikeHere) -> None:
        """Any thread may call it: the agents' thread obeys before it sends or waits again."""
        self._orders.append(order)

    def know(self, order: PeerCame) -> None:
        """Learn who lives at an address."""
        self._addresses[order.incarnation] = order.address

    def heal(self, stays_cut: bool) -> None:
        """Disturb nothing any longer; what is held up goes out as it was to. The plant `stay-cut` sends nothing any more."""
        self._links = {}
        if stays_cut:
            for address in set(self._addresses.values()):
                self._links[address] = _StruckLink(cut_until=math.inf)

    def dial(self, address: ControlAddress, message: Message) -> None:
        self._obey()
        link = self._links.get(str(address))
        if link is None or time.monotonic() >= link.cut_until:
            super().dial(address, message)

    def send(self, peer: Incarnation, message: Message) -> None:
        self._obey()
        self._sent.setdefault(peer, deque(maxlen=_RECORDED)).append(message)
        link = self._links.get(self._addresses.get(peer, ""))
        if link is None:
            super().send(peer, message)
            return
        now, is_lossy = time.monotonic(), time.monotonic() < link.lossy_until
        if link.lose_next or now < link.cut_until or (is_lossy and self._random.random() < _LOSSY):
            link.lose_next = max(0, link.lose_next - 1)
            return
        is_double = bool(link.double_next) or (is_lossy and self._random.random() < _LOSSY)
        link.double_next = max(0, link.double_next - 1)
        for _ in range(1 + is_double):
            delay_s = 0.0
            if link.delay_next_s:
                delay_s, link.delay_next_s = link.delay_next_s, 0.0
            elif now < link.slow_until:
                delay_s = self._random.uniform(0.0, link.slow_s)
            elif is_lossy and self._random.random() < _REORDERED:
                delay_s = _REORDERED_S
            self._send_at(max(now + delay_s, link.clogged_until), peer, message)

    def wait(self, timeout_s: float, wakeups: list[int]) -> bool:
        self._obey()
        while self._held and self._held[0].at <= time.monotonic():
            held = heapq.heappop(self._held)
            super().send(held.peer, held.message)
        if self._held:
            timeout_s = min(timeout_s, max(0.0, self._held[0].at - time.monotonic()))
        return super().wait(timeout_s, wakeups)

    def _send_at(self, at: float, peer: Incarnation, message: Message) -> None:
        if at <= time.monotonic():
            super().send(peer, message)
        else:
            heapq.heappush(self._held, _HeldMessage(at, next(self._numbers), peer, message))

    def _obey(self) -> None:
        while self._orders:
            self._take(self._orders.popleft())

    def _take(self, order: StrikeHere) -> None:
        link, until = self._links.setdefault(order.address, _StruckLink()), time.monotonic() + order.for_s
        match order.kind:
            case FaultKind.CUT | FaultKind.SEVER:
                link.cut_until = until
            case FaultKind.CLOG:
                link.clogged_until = until
            case FaultKind.LOSE:
                link.lose_next += order.number
            case FaultKind.DOUBLE:
                link.double_next += order.number
            case FaultKind.DELAY:
                link.delay_next_s = order.for_s
            case FaultKind.SLOW:
                link.slow_until, link.slow_s = until, 0.5 * order.number
            case FaultKind.LOSSY:
                link.lossy_until = until
            case FaultKind.REPLAY:
                self._replay(order)
            case FaultKind.STALL_AGENT:
                # Nothing of the agents' thread moves: the engine's own goes on.
                time.sleep(order.for_s)
            case _:
                raise LocalError(f"{order.kind} is no fault of a link")

    def _replay(self, order: StrikeHere) -> None:
        for peer, address in self._addresses.items():
            sent = self._sent.get(peer, ())
            if address == order.address and sent:
                for index in range(order.number):
                    at = time.monotonic() + order.for_s * (index + 1) / order.number
                    heapq.heappush(self._held, _HeldMessage(at, next(self._numbers), peer, self._random.choice(sent)))


class StruckTransport(FaultyTransport):
    """A transport that fails, flips a byte, stalls or refuses, as ordered."""

    def __init__(self, inner: Transport, region: Region, drop_writes: bool) -> None:
        super().__init__(inner, region, Faults())
        self._drop_writes = drop_writes
        self._fail_next = 0
        self._corrupt_next = 0
        self._stall_until = 0.0
        self._refuse_until = 0.0

    def strike(self, order: StrikeHere) -> None:
        """What goes wrong from the next post on."""
        until = time.monotonic() + order.for_s
        match order.kind:
            case FaultKind.COPY_FAILS:
                self._fail_next += 1
            case FaultKind.CORRUPT:
                self._corrupt_next += 1
            case FaultKind.STALL:
                self._stall_until = until
            case FaultKind.QUEUE_FULL:
                self._refuse_until = until
            case _:
                raise LocalError(f"{order.kind} is no fault of a transport")

    def heal(self) -> None:
        """Disturb nothing that is posted from now on."""
        self._fail_next = self._corrupt_next = 0
        self._stall_until = self._refuse_until = 0.0

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        now = time.monotonic()
        if now < self._refuse_until:
            raise QueueFull("queue full: refused by the replay; post again")
        faults = Faults(
            drop_writes=self._drop_writes,
            fail_after=0 if self._fail_next else None,
            corrupt=bool(self._corrupt_next),
            delay_s=max(0.0, self._stall_until - now),
        )
        self.set_faults(faults)
        ticket = super().post(batch, after)
        self._fail_next, self._corrupt_next = max(0, self._fail_next - 1), max(0, self._corrupt_next - 1)
        return ticket


# Requests.


class ReplayedSource(SourceTask):
    """One prefill, computed span by span; it can be preempted."""

    def __init__(self, order: SubmitSide, books: BareBooks) -> None:
        super().__init__(order.task, books)
        self.number = order.number
        self.waits_for_grant &= not order.is_early
        self._next_span = 0
        self._is_draining = False

    @property
    def is_computing(self) -> bool:
        """Whether its turn has come, and it has not ended."""
        return bool(self._ready) and not self._is_draining and self._ready[0] in self.live

    def step(self) -> bool:
        """Compute one span, or offer what is complete; whether there was something to do."""
        if not self.is_computing:
            return False
        key = self._ready[0]
        if self._next_span < len(self.spans):
            self.announce([key], self._next_span, self._next_span + 1)
            self._next_span += 1
        else:
            self._ready.clear()
            self.offer(key)
        return True

    def preempt(self) -> None:
        """Take the blocks of a prefill that is under way: at once in pull, after `Drained` in push."""
        if not self.is_computing or not self._next_span:
            return
        key = self._ready[0]
        if self.task.mode is Mode.PUSH:
            self.books.port.retract(key)
            self._is_draining = True
        else:
            self.start_over(key)

    def start_over(self, key: HandoffKey) -> None:
        """Compute everything again, in other blocks; the old ones are spoilt: who still reads them must not count it."""
        live = self.live.get(key)
        if live is not None:
            self.books.pages.poison(live.blocks)
            self.books.pool.give(live.blocks)
            blocks = self.books.pool.take(len(live.blocks[0]))
            if blocks is None:
                raise LocalError("the blocks that were given back are gone")
            self.live[key] = replace(live, blocks=blocks)
        self._next_span, self._is_draining = 0, False


class ReplayedTarget(TargetTask):
    """One decode: what has landed is checked, kept for as long as decode takes, and checked again."""

    def __init__(self, order: SubmitSide, books: BareBooks) -> None:
        super().__init__(order.task, books, order.source)
        self.number = order.number
        self.offered = order.task.count
        self._decode_s = order.decode_s
        self._incarnation = order.incarnation
        self._kept: list[tuple[float, HandoffKey, BlockLists]] = []

    @property
    def is_decoding(self) -> bool:
        """Whether it still keeps blocks of what has landed."""
        return bool(self._kept)

    def free(self, key: HandoffKey, blocks: BlockLists) -> None:
        self._kept.append((time.monotonic() + self._decode_s, key, blocks))

    def step(self, keeps_block: bool) -> None:
        """Free what is decoded, after another look at it. The plant `keep-block` forgets one block."""
        while self._kept and self._kept[0][0] <= time.monotonic():
            _, key, blocks = self._kept.pop(0)
            self.books.foreign_bytes += self.books.pages.foreign_bytes(key, blocks, self.task.tokens)
            self.books.pool.give((blocks[0][1:],) if keeps_block else blocks)

    def request(self, key: HandoffKey) -> SourceRequest:
        """What the agents are asked for."""
        return self._request(key)

    def _request(self, key: HandoffKey) -> SourceRequest:
        return replace(super()._request(key), source_incarnation=self._incarnation)


ReplayOrder = SubmitSide | CancelRequest | StrikeHere | PeerCame | HealAll


class ReplayInstance(BareInstance):
    """A bare instance with both edges wrapped, which takes single requests and faults."""

    orders = Order | ReplayOrder
    sources: dict[str, ReplayedSource]  # type: ignore[assignment]
    targets: dict[str, ReplayedTarget]  # type: ignore[assignment]

    def open_driver(self, settings: BareSettings, pages: TaggedPages, news: Callable[[], None]) -> Driver:
        if not isinstance(settings, ReplaySettings):
            raise LocalError("a replayed instance needs its own settings")
        self._settings = settings
        self._stuck_until = 0.0
        self._refuse_next: list[bool] = []
        self._rank_pid = 0
        self._transport: StruckTransport | None = None
        trust = Trust(settings.cluster_key.encode() or None)
        agents = AgentSettings(
            settings.port,
            settings.host,
            transport=settings.transport,
            limits=settings.limits,
            handoff=settings.handoff,
            trust=trust,
        )
        if settings.has_rank_process:
            return self._driver_of_a_rank_process(agents, pages, news)
        drop_writes = settings.plant == "drop-writes"
        self._transport = StruckTransport(agents.open_transport(self.incarnation, pages.region), pages.region, drop_writes)
        self._sockets = StruckSockets(self.incarnation, agents.control_host, settings.port, trust)
        wrapped: Any = {"sockets": self._sockets, "transport": self._transport}
        return open_driver(agents, self.incarnation, MODEL, pages.layout(), pages.region, news, **wrapped)

    def _driver_of_a_rank_process(self, agents: AgentSettings, pages: TaggedPages, news: Callable[[], None]) -> Driver:
        ours, theirs = channel_pair()
        read_fd, self._alive_fd = os.pipe()
        # No thread runs yet: the fork is whole, and shares the region, whose descriptor it has inherited.
        self._rank_pid = os.fork()
        if not self._rank_pid:
            ours.close()
            os.close(self._alive_fd)
            _be_the_rank(agents, self.incarnation, pages, Channel(theirs, "the agents"), self._settings, read_fd)
        os.close(read_fd)
        theirs.close()
        channel = Channel(ours, "the rank")
        frame = channel.receive(_READY_S)
        if frame is None:
            raise LocalError(f"the rank process did not start within {_READY_S:g} s")
        ready = msgspec.msgpack.decode(frame, type=_RankOpened)
        self._sockets = StruckSockets(self.incarnation, agents.control_host, agents.control_port, agents.trust)
        executor = Executor(ready.executor)
        ranks = RemoteRanks([channel], ready.transport, executor, _lost, fences_writers=ready.fences_writers)
        cards = [RankCard(0, pages.layout(), (ready.endpoint,))]
        card = instance_card(self.incarnation, MODEL, agents.limits, cards)
        return Driver(card, ranks, agents.limits, self._sockets, news, agents.handoff, stamps=open_stamps())

    def start(self) -> None:
        super().start()
        if self._rank_pid:
            self._send(cast(Any, RankStarted(self._rank_pid)))

    def close(self) -> None:
        super().close()
        if self._rank_pid:
            os.close(self._alive_fd)
            os.waitpid(self._rank_pid, 0)

    def take(self, order: Order | ReplayOrder) -> None:
        match order:
            case SubmitSide():
                self._submit(order)
            case CancelRequest():
                self._cancel(order.number)
            case StrikeHere():
                self._strike(order)
            case PeerCame():
                self._sockets.know(order)
            case HealAll():
                self._heal()
            case _:
                super().take(order)

    @property
    def _tasks(self) -> list[ReplayedSource | ReplayedTarget]:
        return [*self.sources.values(), *self.targets.values()]

    def work(self) -> bool:
        """One step: events, then one span of each prefill. The model computes that long, and the engine does nothing else."""
        self._take_events()
        is_busy = False
        if time.monotonic() >= self._stuck_until:
            for task in self._tasks:
                task.start()
            for source in self.sources.values():
                is_busy |= source.step()
            for target in self.targets.values():
                target.step(self._settings.plant == "keep-block")
        self._report()
        waits = time.monotonic() < self._stuck_until or any(target.is_decoding for target in self.targets.values())
        if is_busy:
            time.sleep(self._settings.step_s)
        elif waits:
            time.sleep(_LATER_S)
        return is_busy or waits

    def gauges(self, number: int) -> ReplayGauges:
        agents = self.driver.stats()
        return ReplayGauges(
            **msgspec.structs.asdict(super().gauges(number)),
            quarantined_blocks=agents.quarantined_blocks,
            errors_total=agents.errors_total,
        )

    def _submit(self, order: SubmitSide) -> None:
        name = order.task.name
        if name in (self.targets if order.source else self.sources):
            # Also one whose end is not reported yet: it would be lost with its task.
            self._over(order.number, Outcome.FAILED, "a request of this transfer id is live already")
        elif order.source:
            target = ReplayedTarget(order, self.books)
            if self._settings.plant == "fail-all":
                self._over(order.number, Outcome.FAILED, "the plant fails everything")
            elif self._refuse_next:
                is_whole = self._refuse_next.pop()
                request = target.request(HandoffKey(TransferId(f"{name}-0")))
                self.driver.decline(replace(request, prompt="") if is_whole else request, "refused by the replay")
                self._over(order.number, Outcome.FAILED, "refused by the replay")
            else:
                self.targets[name] = target
        else:
            self.sources[name] = ReplayedSource(order, self.books)

    def _cancel(self, number: int) -> None:
        for task in self._tasks:
            if task.number != number:
                continue
            for key in task.live:
                self.driver.cancel(key)
            if not task.next_index:
                task.next_index = task.task.count
                now = time.monotonic()
                task.ends.append(HandoffEnd(0, Outcome.CANCELLED.value, "cancelled before it had blocks", now, 0.0))

    def _strike(self, order: StrikeHere) -> None:
        match order.kind:
            case FaultKind.SILENT_ENGINE:
                # The engine hangs, as in a step that does not end; the agents' thread goes on.
                time.sleep(order.for_s)
            case FaultKind.STUCK_ENGINE:
                self._stuck_until = time.monotonic() + order.for_s
            case FaultKind.PREEMPT:
                for source in self.sources.values():
                    source.preempt()
            case FaultKind.REFUSE:
                self._refuse_next.append(order.is_whole)
            case FaultKind.COPY_FAILS | FaultKind.CORRUPT | FaultKind.STALL | FaultKind.QUEUE_FULL:
                if self._transport is not None:
                    self._transport.strike(order)
            case _:
                self._sockets.strike(order)

    def _heal(self) -> None:
        self._stuck_until = 0.0
        self._refuse_next.clear()
        if self._transport is not None:
            self._transport.heal()
        self._sockets.heal(self._settings.plant == "stay-cut")

    def _take_event(self, event: EngineEvent) -> None:
        name = event.key.transfer_id.rpartition("-")[0]
        match event:
            case engine_port.Drained():
                if name in self.sources:
                    self.sources[name].start_over(event.key)
            case Landed() if self._settings.plant == "lose-end":
                pass
            case engine_port.Granted() | engine_port.SourceEnded() if name not in self.sources:
                pass
            case Landed() | engine_port.TargetEnded() if name not in self.targets:
                pass
            case _:
                super()._take_event(event)

    def _report(self, *, at_once: bool = True) -> None:
        del at_once  # always
        for task in self._tasks:
            if isinstance(task, ReplayedSource) and task.offered and self._reported_offers.get(task.task.name) != task.number:
                self._reported_offers[task.task.name] = task.number
                self._send(cast(Any, SideOver(task.number, "offered", "")))
            ends, task.ends = task.ends, []
            for end in ends:
                self._send(cast(Any, SideOver(task.number, end.outcome, end.reason)))
        for tasks in (self.sources, self.targets):
            for name in [name for name, task in tasks.items() if task.next_index and not task.live]:
                task = tasks[name]
                if not (isinstance(task, ReplayedTarget) and task.is_decoding):
                    del tasks[name]
                    self._reported_offers.pop(name, None)

    def _over(self, number: int, outcome: Outcome, reason: str) -> None:
        self._send(cast(Any, SideOver(number, outcome.value, reason)))


def _be_the_rank(
    agents: AgentSettings,
    incarnation: Incarnation,
    pages: TaggedPages,
    channel: Channel,
    settings: ReplaySettings,
    parent_fd: int,
) -> None:
    """The process of a rank, until its parent ends or closes its end of the pipe `parent_fd`. Never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(int(sys.argv[2]))
    region = pages.region
    drop_writes = settings.plant == "drop-writes"
    transport = StruckTransport(agents.open_transport(incarnation, region), region, drop_writes)
    loop = RankLoop(0, [pages.layout()], transport, channel, settings.limits.transfer_timeout, region.view)
    ready = _RankOpened(transport.endpoint(), loop.agent.executor.value, loop.agent.fences_writers, transport.name)
    channel.send(msgspec.msgpack.encode(ready), _READY_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loop.start()
    os.read(parent_fd, 1)
    loop.close()
    os._exit(0)


def _lost(reason: str) -> None:
    """As engines do: an instance that has lost a rank ends."""
    log.error("the rank is lost: %s", reason)
    os._exit(_LOST_CODE)


class ReplayProcess(BareProcess):
    """Such an instance in a process of its own."""

    program = ("-m", "kvbaton.bench.replay.instance")
    report_types = Here | SideOver | RankStarted | ReplayGauges

    @property
    def is_up(self) -> bool:
        """Whether it has reported itself."""
        return self._here is not None

    def gauges(self) -> ReplayGauges:
        return cast(ReplayGauges, super().gauges())


def main() -> None:
    """The process of such an instance."""
    run_child(ReplayInstance, ReplaySettings)


if __name__ == "__main__":
    main()
