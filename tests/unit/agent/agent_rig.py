"""Scripted ports for the coordinator's logic: a clock that is set, frames that wait to be delivered, ranks that obey."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import EngineEvent
from kvbaton.agent.ports import (
    AuxAsk,
    AuxRead,
    LegFailed,
    LegId,
    LegMoved,
    LegOpen,
    LegStopped,
    LegSummed,
    PeerFenced,
    RankReport,
    RegionFenced,
    SumAsk,
)
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, ProcessId, RankCard
from kvbaton.core.handoff import Aux, BlockLists, Executor, HandoffKey, Incarnation, Span, TransferId
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.messages import Message, decode, encode
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.core.timeline import Side

__all__ = ["AUX", "BLOCKS", "LIMITS", "Clock", "Letter", "Move", "Net", "Node", "Post", "ScriptedRanks", "card_of", "key_of"]

LIMITS = Limits(transfer_timeout=30.0, defer_timeout=60.0, stop_timeout=5.0, retry=1.0)
AUX = Aux(token_id=7, logprob=-0.5)
BLOCKS: BlockLists = ((1, 2, 3),)


def key_of(name: str) -> HandoffKey:
    """The key of the only prompt of a request."""
    return HandoffKey(TransferId(name))


def layout_of_tokens(layers: int = 1, blocks: int = 16) -> Layout:
    """A layout with one token per block and one byte per token and layer."""
    tensors = split_layers(dense_tensor((layers, blocks, 1, 1, 1), "uint8", 1))
    axes = ("block", "token", "head", "channel")
    group = tensor_group("full", range(layers), tensors, axes, heads=(HeadRange(0, 1),), total_heads=1, planes=("kv",))
    return Layout(layers * blocks, (group,))


def card_of(name: str, ranks: int = 1, **changes: Any) -> Card:
    """The card of an instance; `changes` replace fields of it."""
    card = Card(
        incarnation=Incarnation(name),
        model="tiny",
        fingerprint="f00d",
        shape=f"tp{ranks}",
        ranks=tuple(RankCard(rank, layout_of_tokens(), ()) for rank in range(ranks)),
        process=ProcessId("host", 100, 1),
        defer_timeout=LIMITS.defer_timeout,
        transfer_timeout=LIMITS.transfer_timeout,
    )
    return msgspec.structs.replace(card, **changes)


@dataclass
class Clock:
    """Time that passes when the test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Post:
    """A control port that keeps what was said."""

    sent: list[tuple[Incarnation | ControlAddress, Message]] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)

    def dial(self, address: ControlAddress, message: Message) -> None:
        self.sent.append((address, message))

    def send(self, peer: Incarnation, message: Message) -> None:
        self.sent.append((peer, message))

    def is_gone(self, process: ProcessId) -> bool:
        return process.pid in self.dead

    def take(self) -> list[Message]:
        """What was said since the last call, to whomever."""
        messages = [message for _, message in self.sent]
        self.sent.clear()
        return messages


@dataclass(frozen=True)
class Move:
    """One span that one rank was told to move."""

    rank: int
    leg: LegId
    span: int
    executor: Executor
    peer: Incarnation
    source_blocks: BlockLists


@dataclass
class ScriptedRanks:
    """Ranks that do nothing until the test says what became of it."""

    executor: Executor = Executor.TARGET_READS
    report: Callable[[RankReport], None] = print
    refusal: Exception | None = None
    legs: dict[tuple[int, LegId], LegOpen] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    stops: list[tuple[int, LegId]] = field(default_factory=list)
    connected: list[Incarnation] = field(default_factory=list)
    disconnected: list[Incarnation] = field(default_factory=list)
    revoked: list[tuple[Incarnation, int]] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)
    sums: list[tuple[int, SumAsk]] = field(default_factory=list)
    aux: dict[int, bytes] = field(default_factory=dict)
    aux_asks: list[AuxAsk] = field(default_factory=list)
    dropped_sums: list[tuple[int, Side, HandoffKey]] = field(default_factory=list)

    def connect(self, card: Card) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.connected.append(card.incarnation)

    def disconnect(self, incarnation: Incarnation) -> None:
        self.disconnected.append(incarnation)

    def revoke(self, incarnation: Incarnation, epoch: int) -> None:
        self.revoked.append((incarnation, epoch))

    def reset_region(self, epoch: int) -> None:
        self.resets.append(epoch)

    def open_leg(self, rank: int, start: LegOpen) -> None:
        assert (rank, start.leg) not in self.legs, "a leg is opened once"
        self.legs[rank, start.leg] = start

    def move(self, rank: int, leg: LegId, source_blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        start = self.legs[rank, leg]
        self.moves += [Move(rank, leg, span.number, start.executor, start.peer, source_blocks) for span in spans]

    def close_leg(self, rank: int, leg: LegId) -> None:
        assert not [move for move in self.moves if (move.rank, move.leg) == (rank, leg)], "a leg is closed when all is moved"
        self.legs.pop((rank, leg), None)

    def stop_leg(self, rank: int, leg: LegId) -> None:
        if (rank, leg) not in self.legs:
            self.report(LegStopped(leg, rank))
        elif (rank, leg) not in self.stops:
            self.stops.append((rank, leg))

    def sum_spans(self, rank: int, ask: SumAsk) -> None:
        self.sums.append((rank, ask))

    def drop_sums(self, rank: int, side: Side, key: HandoffKey) -> None:
        self.dropped_sums.append((rank, side, key))
        self.sums = [(of, ask) for of, ask in self.sums if (of, ask.side, ask.leg.key) != (rank, side, key)]

    def put_aux(self, offset: int, data: bytes) -> bool:
        self.aux[offset] = data
        return True

    def read_aux(self, ask: AuxAsk) -> None:
        self.aux_asks.append(ask)

    def read_all_aux(self, of: ScriptedRanks, error: str = "") -> None:
        """Every aux record that was to be read is, out of the memory of `of`."""
        while self.aux_asks:
            ask = self.aux_asks.pop(0)
            data = b"" if error else of.aux[ask.offset][: ask.size_bytes]
            self.report(AuxRead(ask.leg, ask.slot, data, error))

    def sum_all(self, wrong: int = 0) -> None:
        """Every span that is to be summed is; the sum is made of its rank and number, and is off by `wrong`."""
        while self.sums:
            rank, ask = self.sums.pop(0)
            for span in ask.spans:
                self.report(LegSummed(ask.leg, ask.side, rank, span.number, ((rank, 100 * rank + span.number + wrong),)))

    def finish(self, move: Move) -> None:
        """A span is where it belongs."""
        self.moves.remove(move)
        self.report(LegMoved(move.leg, move.rank, move.span, 10, 10))

    def finish_all(self) -> None:
        """All spans are."""
        while self.moves:
            self.finish(self.moves[0])

    def quiet(self, rank: int, leg: LegId) -> None:
        """A leg that was told to stop is quiet."""
        self._forget(rank, leg)
        self.report(LegStopped(leg, rank))

    def quiet_all(self) -> None:
        """All legs that were told to stop are."""
        while self.stops:
            self.quiet(*self.stops[0])

    def fail(self, rank: int, leg: LegId, reason: str = "the link broke") -> None:
        """A leg fails; if it was told to stop it has only stopped."""
        was_stopping = (rank, leg) in self.stops
        self._forget(rank, leg)
        self.report(LegStopped(leg, rank) if was_stopping else LegFailed(leg, rank, reason))

    def fence(self, peer: Incarnation, epoch: int, ranks: int) -> None:
        """Every rank has torn its session with a peer down."""
        for rank in range(ranks):
            self.report(PeerFenced(peer, epoch, rank))

    def reregister(self, epoch: int, ranks: int) -> None:
        """Every rank has registered its memory anew."""
        for rank in range(ranks):
            self.report(RegionFenced(epoch, rank))

    def _forget(self, rank: int, leg: LegId) -> None:
        self.moves = [move for move in self.moves if (move.rank, move.leg) != (rank, leg)]
        self.stops = [stop for stop in self.stops if stop != (rank, leg)]
        del self.legs[rank, leg]


@dataclass(frozen=True)
class Letter:
    """A frame on its way from one address to another."""

    sender: ControlAddress
    recipient: ControlAddress
    frame: bytes

    @property
    def message(self) -> Message:
        """What it says."""
        return decode(self.frame).message


class _NetControl:
    def __init__(self, net: Net, node: Node) -> None:
        self._net = net
        self._node = node

    def dial(self, address: ControlAddress, message: Message) -> None:
        self._node.dialled.add(address)
        self._post(address, "", message)

    def send(self, peer: Incarnation, message: Message) -> None:
        address = self._node.routes.get(peer)
        if address is not None:
            self._post(address, peer, message)

    def is_gone(self, process: ProcessId) -> bool:
        return process.pid in self._net.dead

    def _post(self, address: ControlAddress, recipient: str, message: Message) -> None:
        self._node.said.append(message)
        frame = encode(self._node.card.incarnation, recipient, message)
        self._net.letters.append(Letter(self._node.address, address, frame))


class Net:
    """Letters between nodes; they arrive when the test says so, in any order, twice or never."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.letters: list[Letter] = []
        self.nodes: dict[ControlAddress, Node] = {}
        self.dead: set[int] = set()

    def add(
        self,
        card: Card,
        port: int,
        executor: Executor = Executor.TARGET_READS,
        engine: Callable[[EngineEvent], None] | None = None,
        limits: Limits = LIMITS,
        settings: HandoffSettings = DEFAULT_HANDOFF,
    ) -> Node:
        """A node at an address; it takes the place of the one that was there."""
        node = Node(self, card, ControlAddress.of("127.0.0.1", port), executor, engine, limits, settings)
        self.nodes[node.address] = node
        return node

    def deliver(self, letter: Letter) -> None:
        """A letter arrives; it is still there to be delivered again unless it is taken out."""
        node = self.nodes.get(letter.recipient)
        if node is None:
            return
        envelope = decode(letter.frame)
        node.routes[envelope.sender] = letter.sender
        node.coordinator.on_frame(envelope, letter.sender if letter.sender in node.dialled else None)
        node.settle()

    def deliver_all(self) -> None:
        """Deliver in order, what follows included, until there is nothing left."""
        for _ in range(10_000):
            if not self.letters:
                return
            self.deliver(self.letters.pop(0))
        raise AssertionError("the nodes never stop talking")

    def pass_time(self, seconds: float, step: float = 0.5, *, lose: bool = False) -> None:
        """Let time pass in steps; letters are delivered at once, or all lost."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + step)
            for node in list(self.nodes.values()):
                node.coordinator.tick()
                node.settle()
            if lose:
                self.letters.clear()
            else:
                self.deliver_all()


class Node:
    """A coordinator with scripted ports; `events` is what its engine was told."""

    def __init__(
        self,
        net: Net,
        card: Card,
        address: ControlAddress,
        executor: Executor,
        engine: Callable[[EngineEvent], None] | None,
        limits: Limits,
        settings: HandoffSettings,
    ) -> None:
        self.card = card
        self.address = address
        self.said: list[Message] = []
        self.events: list[EngineEvent] = []
        self.routes: dict[Incarnation, ControlAddress] = {}
        self.dialled: set[ControlAddress] = set()
        self._reports: list[RankReport] = []
        self.ranks = ScriptedRanks(executor, self._reports.append)
        self.coordinator = Coordinator(
            card, "scripted", limits, net.clock, _NetControl(net, self), self.ranks, engine or self.events.append, settings
        )

    def settle(self) -> None:
        """Tell the coordinator what its ranks have reported."""
        while self._reports:
            self.coordinator.on_rank(self._reports.pop(0))
