"""Scripted ports for the coordinator's logic: a clock that is set, frames that wait to be delivered, ranks that obey."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import EngineEvent
from kvbaton.agent.rank_orders import (
    AuxRead,
    CloseCopy,
    Connect,
    CopyFailed,
    CopyId,
    CopyStopped,
    Disconnect,
    DropSums,
    MoveSpans,
    OpenCopy,
    PeerFenced,
    PutAux,
    RankOrder,
    RankReport,
    ReadAux,
    RegionFenced,
    ResetRegion,
    RevokePeer,
    SpansMoved,
    SpansSummed,
    StopCopy,
    SumSpans,
)
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, ProcessId, RankCard
from kvbaton.core.handoff import Aux, BlockLists, Executor, HandoffKey, Incarnation, TransferId
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
    """Time that passes when the test decides so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Post:
    """A control port that keeps what was sent."""

    sent: list[tuple[Incarnation | ControlAddress, Message]] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    hung_up: list[ControlAddress] = field(default_factory=list)

    def dial(self, address: ControlAddress, message: Message) -> None:
        self.sent.append((address, message))

    def hang_up(self, address: ControlAddress) -> None:
        self.hung_up.append(address)

    def send(self, peer: Incarnation, message: Message) -> None:
        self.sent.append((peer, message))

    def is_gone(self, process: ProcessId) -> bool:
        return process.pid in self.dead

    def take(self) -> list[Message]:
        """What was sent since the last call, to any peer."""
        messages = [message for _, message in self.sent]
        self.sent.clear()
        return messages


@dataclass(frozen=True)
class Move:
    """One span that one rank was ordered to move."""

    rank: int
    copy: CopyId
    span: int
    executor: Executor
    peer: Incarnation
    source_blocks: BlockLists


@dataclass
class ScriptedRanks:
    """Ranks that do nothing until the test states what became of it."""

    executor: Executor = Executor.TARGET_READS
    report: Callable[[RankReport], None] = print
    refusal: Exception | None = None
    counts_arrivals: bool = field(default=False, kw_only=True)
    fences_writers: bool = field(default=False, kw_only=True)
    copies: dict[tuple[int, CopyId], OpenCopy] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    stops: list[tuple[int, CopyId]] = field(default_factory=list)
    connected: list[Incarnation] = field(default_factory=list)
    disconnected: list[Incarnation] = field(default_factory=list)
    revoked: list[tuple[Incarnation, int]] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)
    sums: list[tuple[int, SumSpans]] = field(default_factory=list)
    aux: dict[int, bytes] = field(default_factory=dict)
    aux_reads: list[ReadAux] = field(default_factory=list)
    dropped_sums: list[tuple[int, Side, HandoffKey]] = field(default_factory=list)
    count: int = 1

    def send_all(self, order: RankOrder) -> None:
        match order:
            case Connect():
                if self.refusal is not None:
                    raise self.refusal
                self.connected.append(order.card.incarnation)
            case Disconnect():
                self.disconnected.append(order.incarnation)
            case RevokePeer():
                self.revoked.append((order.incarnation, order.epoch))
            case ResetRegion():
                self.resets.append(order.epoch)
            case _:
                for rank in range(self.count):
                    self.send(rank, order)

    def send(self, rank: int, order: RankOrder) -> None:
        match order:
            case OpenCopy():
                assert (rank, order.copy) not in self.copies, "a copy is opened once"
                self.copies[rank, order.copy] = order
            case MoveSpans():
                self.moves += [self._move_of(rank, order, span.number) for span in order.spans]
            case CloseCopy():
                is_moving = [move for move in self.moves if (move.rank, move.copy) == (rank, order.copy)]
                assert not is_moving, "a copy is closed when all is moved"
                self.copies.pop((rank, order.copy), None)
            case StopCopy():
                self._stop(rank, order.copy)
            case SumSpans():
                self.sums.append((rank, order))
            case DropSums():
                self.dropped_sums.append((rank, order.side, order.key))
                gone = (rank, order.side, order.key)
                self.sums = [(of, each) for of, each in self.sums if (of, each.side, each.copy.key) != gone]
            case PutAux():
                self.aux[order.offset] = order.data
            case ReadAux():
                self.aux_reads.append(order)
            case _:
                raise AssertionError(f"{order} goes to every rank")

    def _move_of(self, rank: int, order: MoveSpans, span: int) -> Move:
        opened = self.copies[rank, order.copy]
        return Move(rank, order.copy, span, opened.executor, opened.peer, order.source_blocks)

    def _stop(self, rank: int, copy: CopyId) -> None:
        if (rank, copy) not in self.copies:
            self.report(CopyStopped(copy, rank))
        elif (rank, copy) not in self.stops:
            self.stops.append((rank, copy))

    def read_all_aux(self, of: ScriptedRanks, error: str = "") -> None:
        """Every aux record that was to be read is, out of the memory of `of`."""
        while self.aux_reads:
            ask = self.aux_reads.pop(0)
            data = b"" if error else of.aux[ask.offset][: ask.size_bytes]
            self.report(AuxRead(ask.copy, ask.slot, data, error))

    def sum_all(self, wrong: int = 0) -> None:
        """Every span that is to be summed is; the sum is made of its rank and number, and is off by `wrong`."""
        while self.sums:
            rank, ask = self.sums.pop(0)
            sums = {span.number: 100 * rank + span.number + wrong for span in ask.spans}
            by_leg = {number: ((rank, value),) for number, value in sums.items()}
            self.report(SpansSummed(ask.copy, ask.side, rank, {**by_leg}))

    def finish(self, move: Move) -> None:
        """A span is where it belongs."""
        self.moves.remove(move)
        self.report(SpansMoved(move.copy, move.rank, (move.span,), 10, 10))

    def finish_all(self) -> None:
        """All spans are."""
        while self.moves:
            self.finish(self.moves[0])

    def quiet(self, rank: int, copy: CopyId) -> None:
        """A copy that was to stop is quiet."""
        self._forget(rank, copy)
        self.report(CopyStopped(copy, rank))

    def quiet_all(self) -> None:
        """All copies that were to stop are."""
        while self.stops:
            self.quiet(*self.stops[0])

    def fail(self, rank: int, copy: CopyId, reason: str = "the link broke") -> None:
        """A copy fails; if it was to stop it has only stopped."""
        was_stopping = (rank, copy) in self.stops
        self._forget(rank, copy)
        self.report(CopyStopped(copy, rank) if was_stopping else CopyFailed(copy, rank, reason))

    def fence(self, peer: Incarnation, epoch: int, ranks: int) -> None:
        """Every rank has torn its session with a peer down."""
        for rank in range(ranks):
            self.report(PeerFenced(peer, epoch, rank))

    def reregister(self, epoch: int, ranks: int) -> None:
        """Every rank has registered its memory anew."""
        for rank in range(ranks):
            self.report(RegionFenced(epoch, rank))

    def _forget(self, rank: int, copy: CopyId) -> None:
        self.moves = [move for move in self.moves if (move.rank, move.copy) != (rank, copy)]
        self.stops = [stop for stop in self.stops if stop != (rank, copy)]
        del self.copies[rank, copy]


@dataclass(frozen=True)
class Letter:
    """A frame on its way from one address to another."""

    sender: ControlAddress
    recipient: ControlAddress
    frame: bytes

    @property
    def message(self) -> Message:
        """What it sends."""
        return decode(self.frame).message


class _NetControl:
    def __init__(self, net: Net, node: Node) -> None:
        self._net = net
        self._node = node

    def dial(self, address: ControlAddress, message: Message) -> None:
        self._node.dialled.add(address)
        self._post(address, "", message)

    def hang_up(self, address: ControlAddress) -> None: ...

    def send(self, peer: Incarnation, message: Message) -> None:
        address = self._node.routes.get(peer)
        if address is not None:
            self._post(address, peer, message)

    def is_gone(self, process: ProcessId) -> bool:
        return process.pid in self._net.dead

    def _post(self, address: ControlAddress, recipient: str, message: Message) -> None:
        self._node.sent.append(message)
        frame = encode(self._node.card.incarnation, recipient, message)
        self._net.letters.append(Letter(self._node.address, address, frame))


class Net:
    """Letters between nodes; they arrive when the test decides so, in any order, twice or never."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.letters: list[Letter] = []
        self.nodes: dict[ControlAddress, Node] = {}
        self.dead: set[int] = set()
        self.loses: Callable[[Message], bool] = lambda _message: False
        """Which messages never arrive."""

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
        if self.loses(envelope.message):
            return
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
                if not node.engine_hangs:
                    node.coordinator.stepped_at = self.clock.now
                node.coordinator.tick()
                node.settle()
            if lose:
                self.letters.clear()
            else:
                self.deliver_all()


class Node:
    """A coordinator with scripted ports; `events` is what its engine got."""

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
        self.sent: list[Message] = []
        self.events: list[EngineEvent] = []
        self.engine_hangs = False
        self.routes: dict[Incarnation, ControlAddress] = {}
        self.dialled: set[ControlAddress] = set()
        self._reports: list[RankReport] = []
        self.ranks = ScriptedRanks(executor, self._reports.append, count=len(card.ranks))
        self.coordinator = Coordinator(
            card, "scripted", limits, net.clock, _NetControl(net, self), self.ranks, engine or self.events.append, settings
        )

    def settle(self) -> None:
        """Pass what its ranks have reported to the coordinator."""
        while self._reports:
            self.coordinator.on_rank(self._reports.pop(0))
