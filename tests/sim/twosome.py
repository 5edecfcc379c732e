"""Two coordinators joined by queues, with ranks that move at once: thousands of hand-offs a second, for what must not grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import Allocation, EngineEvent, Landed, Offer, SourceEnded, SourceRequest
from kvbaton.agent.rank_orders import CopyStopped, MoveSpans, RankOrder, RankReport, SpansMoved, StopCopy
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import PROTOCOL, Card, Endpoint, ProcessId, RankCard
from kvbaton.core.handoff import Aux, Executor, HandoffKey, Incarnation, Mode, Outcome, TransferId
from kvbaton.core.messages import Envelope, Message
from kvbaton.sim.memory import make_layout
from kvbaton.sim.run import LIMITS

__all__ = ["Side", "Twosome", "entries"]


class _InstantRanks:
    """One rank that has moved a span as soon as it is asked to."""

    def __init__(self, reports: deque[RankReport]) -> None:
        self._reports = reports

    @property
    def executor(self) -> Executor:
        return Executor.TARGET_READS

    @property
    def counts_arrivals(self) -> bool:
        return False

    @property
    def fences_writers(self) -> bool:
        return False

    def send_all(self, order: RankOrder) -> None:
        self.send(0, order)

    def send(self, rank: int, order: RankOrder) -> None:
        if isinstance(order, MoveSpans):
            numbers = tuple(span.number for span in order.spans)
            self._reports.append(SpansMoved(order.copy, rank, numbers, len(numbers), len(numbers)))
        elif isinstance(order, StopCopy):
            self._reports.append(CopyStopped(order.copy, rank))


class Side:
    """One coordinator at an address, and its way to all others."""

    def __init__(self, name: str, world: Twosome, coordinator: type[Coordinator]) -> None:
        self.name = Incarnation(name)
        self.address = ControlAddress.of(name, 1)
        self.world = world
        self.dialled: set[str] = set()
        self.events: list[EngineEvent] = []
        self.reports: deque[RankReport] = deque()
        rank = RankCard(0, make_layout(8, 1), (Endpoint("instant", 8, {}),))
        card = Card(
            incarnation=self.name,
            model="tags",
            fingerprint="tags",
            shape="tp1",
            ranks=(rank,),
            process=ProcessId("host", 1, 1),
            defer_timeout=LIMITS.defer_timeout,
            transfer_timeout=LIMITS.transfer_timeout,
        )
        ranks = _InstantRanks(self.reports)
        self.coordinator = coordinator(card, "instant", LIMITS, world.clock, self, ranks, self.events.append)

    def dial(self, address: ControlAddress, message: Message) -> None:
        """Say it to whoever is there."""
        self.dialled.add(address.host)
        self.world.frames.append((address.host, Envelope(PROTOCOL, self.name, "", message)))

    def hang_up(self, address: ControlAddress) -> None:
        """Nothing is dialled again by itself."""

    def send(self, peer: Incarnation, message: Message) -> None:
        """Say it to that peer."""
        self.world.frames.append((peer, Envelope(PROTOCOL, self.name, peer, message)))

    def is_gone(self, process: ProcessId) -> bool:
        """Nobody is."""
        del process
        return False

    def take(self) -> list[EngineEvent]:
        """What the engine was told since the last call."""
        taken = self.events[:]
        self.events.clear()
        return taken


class Twosome:
    """Sides by name; a frame to a name that is not there is lost."""

    def __init__(self, coordinator: type[Coordinator] = Coordinator) -> None:
        self.now = 0.0
        self.frames: deque[tuple[str, Envelope]] = deque()
        self.sides: dict[str, Side] = {}
        self._kind = coordinator

    def clock(self) -> float:
        """The time, as all of them see it."""
        return self.now

    def join(self, name: str) -> Side:
        """A coordinator of that name starts."""
        self.sides[name] = Side(name, self, self._kind)
        return self.sides[name]

    def settle(self) -> None:
        """Let everything happen that follows."""
        while self.frames or any(side.reports for side in self.sides.values()):
            for side in self.sides.values():
                while side.reports:
                    side.coordinator.on_rank(side.reports.popleft())
            if self.frames:
                name, envelope = self.frames.popleft()
                if (reader := self.sides.get(name)) is not None:
                    via = ControlAddress.of(envelope.sender, 1) if envelope.sender in reader.dialled else None
                    reader.coordinator.on_frame(envelope, via)

    def hand_off(self, source: Side, target: Side, name: str, *, cancel: bool = False) -> None:
        """One hand-off from beginning to end; with `cancel`, given up by its target in the middle."""
        key = HandoffKey(TransferId(name))
        wanted = SourceRequest(key, name, source.address, None, Mode.PUSH)
        source.coordinator.expect_target(key, name)
        target.coordinator.expect_source(wanted)
        target.coordinator.allocated(Allocation(wanted, ((0, 1),), 2, 0))
        self.settle()
        if cancel:
            target.coordinator.cancel(key)
        else:
            source.coordinator.offer(Offer(key, ((2, 3),), 2, Aux(7, 0.0)))
        self.settle()
        outcome = Outcome.CANCELLED if cancel else Outcome.DELIVERED
        assert [event.outcome for event in source.take() if isinstance(event, SourceEnded)] == [outcome]
        assert any(isinstance(event, Landed) for event in target.take()) is not cancel


def entries(*roots: object) -> int:
    """How many things all containers that can be reached from `roots` hold together."""
    seen: set[int] = set()
    waiting: list[Any] = list(roots)
    total = 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, Twosome | Side | type | str | bytes):
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            total += len(each)
            waiting.extend(each.keys())
            waiting.extend(each.values())
        elif isinstance(each, Collection):
            total += len(each)
            waiting.extend(each)
        elif type(each).__module__.startswith("kvbaton"):
            waiting.extend(_parts(each))
    return total


def _parts(each: object) -> list[object]:
    slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
    held = [getattr(each, name) for name in slots if hasattr(each, name)]
    return held + list(getattr(each, "__dict__", {}).values())
