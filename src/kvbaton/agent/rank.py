"""The rank agent: turns spans into batches, posts them inline, and reports what became of them. No I/O of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton.agent.backlog import Backlog, Part
from kvbaton.agent.ports import (
    AuxAsk,
    AuxRead,
    Clock,
    LegFailed,
    LegId,
    LegMoved,
    LegOpen,
    LegStopped,
    Memory,
    PeerFenced,
    RankReport,
    RegionFenced,
    SumAsk,
)
from kvbaton.agent.routes import Routes, find_routes
from kvbaton.agent.summing import Summer
from kvbaton.core.card import Card, Endpoint
from kvbaton.core.handoff import BlockLists, Executor, HandoffKey, Incarnation, Span
from kvbaton.core.layout import Layout
from kvbaton.core.lifecycle import LEG, LegEffect, LegEvent, LegState, LegTable
from kvbaton.core.plan import BlockRuns, Runs, plan_blocks, plan_layers
from kvbaton.core.timeline import Side
from kvbaton.errors import KVBatonError, QueueFull, TransportError
from kvbaton.transport.base import Batch, Completion, Direction, FencingTransport, LateWrites, PeerRank, Ticket, Transport

__all__ = ["RankAgent"]

_BATCH_BYTES = 4 << 20
_MAX_UNREACHABLE = 4096


@dataclass(slots=True)
class _Moving:
    """Spans of the same tokens and neighbouring layers, moved as one."""

    spans: tuple[Span, ...]
    planned: int = 0
    moved: int = 0
    unposted: int = 0
    open: set[Ticket] = field(default_factory=set)


@dataclass(slots=True)
class _Leg:
    start: LegOpen
    state: LegState = LEG.start
    error: str = ""
    moving: dict[int, _Moving] = field(default_factory=dict)
    """By the number of the first span."""
    known: set[int] = field(default_factory=set)
    """Numbers of all spans that were ever to be moved."""
    plan_of: tuple[BlockLists, int, int] = ((), 0, 0)
    plans: tuple[BlockRuns, ...] = ()
    """One per route."""

    @property
    def is_drained(self) -> bool:
        return not any(moving.open or moving.unposted for moving in self.moving.values())


class RankAgent:
    """Owns the legs of one rank; a leg here is all that this rank exchanges with the ranks of one peer that it meets.

    `instance` has the layouts of all ranks of this instance, this one's among them at `rank`; without it this is the only one.
    Batches are bounded in size, so that a long span stops promptly. `patience_s` is how long a transport whose queue is full
    may take nothing before the legs that wait for it fail.
    """

    table: LegTable = LEG

    def __init__(
        self,
        rank: int,
        layout: Layout,
        transport: Transport,
        report: Callable[[RankReport], None],
        *,
        clock: Clock,
        patience_s: float,
        memory: Memory | None = None,
        unfenced_writes: bool = False,
        instance: Sequence[Layout] = (),
    ) -> None:
        self.rank = rank
        self._instance = tuple(instance) or (layout,)
        self._unfenced_writes = unfenced_writes
        self._layout = layout
        self._transport = transport
        self._report = report
        self._clock = clock
        self.runs_total = 0
        self._backlog = Backlog(patience_s, self._post_part)
        self._memory = memory
        self._aux_reads: dict[Ticket, AuxAsk] = {}
        self._summer = Summer(rank, layout, memory, report)
        self._routes: dict[Incarnation, Routes] = {}
        self._unreachable: dict[Incarnation, str] = {}
        self.legs: dict[LegId, _Leg] = {}
        self._owners: dict[Ticket, tuple[LegId, int]] = {}
        self._completions: deque[Completion] = deque()

    @property
    def executor(self) -> Executor:
        """Who copies into this rank's memory: its owner, unless peers can write there and be fenced.

        A transport that cannot fence writers is only written through when somebody has asked for that.
        """
        transport = self._transport
        may_write = transport.late_writes is LateWrites.REVOCABLE or self._unfenced_writes
        writes = may_write and Direction.WRITE in transport.directions
        return Executor.SOURCE_WRITES if writes else Executor.TARGET_READS

    def connect(self, card: Card) -> None:
        """Make the ranks of a peer reachable that this one meets; raises TransportError or Incompatible.

        What is to be moved with it afterwards fails with the same words.
        """
        self._unreachable.pop(card.incarnation, None)
        try:
            self._connect(card)
        except KVBatonError as error:
            if len(self._unreachable) >= _MAX_UNREACHABLE:
                self._unreachable.clear()
            self._unreachable[card.incarnation] = str(error)
            raise

    def _connect(self, card: Card) -> None:
        routes = find_routes(self._layout, self._instance, self.rank, card)
        ranks = {PeerRank(card.incarnation, each.rank): each for each in card.ranks}
        for peer in routes.peers:
            self._reach(peer, ranks[peer].endpoints)
        self._routes[card.incarnation] = routes

    def _reach(self, peer: PeerRank, endpoints: tuple[Endpoint, ...]) -> None:
        for endpoint in endpoints:
            if endpoint.transport == self._transport.name:
                self._transport.connect(peer, endpoint)
                return
        offered = ", ".join(endpoint.transport for endpoint in endpoints) or "none"
        raise TransportError(f"no common transport: {self._transport.name} here, {offered} there")

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer; what is in flight to it completes with an error."""
        routes = self._routes.pop(incarnation, None)
        for peer in routes.peers if routes is not None else ():
            self._transport.revoke(peer)
        self._offer_again(at_once=True)

    def revoke(self, incarnation: Incarnation, epoch: int) -> None:
        """Tear the session with a peer down, and report that; nothing is done where the transport cannot fence a peer.

        The peer may come back with a new session; what it was granted before `epoch` stays void.
        """
        if self._transport.late_writes is LateWrites.UNFENCED:
            return
        routes = self._routes.get(incarnation)
        self.disconnect(incarnation)
        for peer in routes.peers if routes is not None else (PeerRank(incarnation, self.rank),):
            self._transport.revoke(peer)
            if isinstance(self._transport, FencingTransport):
                self._transport.fence_peer(peer, epoch)
        self._report(PeerFenced(incarnation, epoch, self.rank))

    def reset_region(self, epoch: int) -> None:
        """Register this rank's memory anew, where the transport can."""
        if isinstance(self._transport, FencingTransport):
            self._transport.reset_region(epoch)
            self._report(RegionFenced(epoch, self.rank))

    def open_leg(self, start: LegOpen) -> None:
        """Prepare a leg; nothing moves yet."""
        self.legs[start.leg] = _Leg(start)

    def close_leg(self, leg_id: LegId) -> None:
        """Forget a leg of which nothing is in flight."""
        leg = self.legs.get(leg_id)
        if leg is not None and leg.is_drained:
            del self.legs[leg_id]

    def move(self, leg_id: LegId, source_blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """Plan and post spans; each ends in LegMoved, or the leg in LegFailed."""
        leg = self.legs.get(leg_id)
        if leg is None:
            self._report(LegFailed(leg_id, self.rank, "the leg is not open"))
            return
        new = tuple(span for span in spans if span.number not in leg.known)
        leg.known |= {span.number for span in new}
        for together in _neighbours(new):
            if leg.state is LegState.OPEN:
                self._post(leg, source_blocks, together)

    def stop_leg(self, leg_id: LegId) -> None:
        """Cancel what is posted; LegStopped follows when nothing is in flight."""
        leg = self.legs.get(leg_id)
        if leg is None:
            self._report(LegStopped(leg_id, self.rank))
            return
        self._step(leg, LegEvent.STOP)
        self._settle(leg)

    def sum_spans(self, ask: SumAsk) -> None:
        """Sum spans in this rank's own memory, bit by bit with each `poll`; each ends in LegSummed, unless dropped."""
        routes = None if ask.peer is None else self._routes.get(ask.peer)
        if routes is not None:
            met = routes.writes if ask.side is Side.SOURCE else routes.reads
            self._summer.ask(ask, {route.leg: route.part for route in met})
        elif ask.peer is None:
            self._summer.ask(ask)
        else:
            for span in ask.spans:
                self._summer.refuse(ask, span, f"{ask.peer} is not connected")

    def drop_sums(self, side: Side, key: HandoffKey) -> None:
        """Nobody waits for these sums any more."""
        self._summer.drop(side, key)

    def put_aux(self, offset: int, data: bytes) -> bool:
        """Write an aux record into this rank's memory, if there is any."""
        if self._memory is not None:
            self._memory.write(offset, data)
        return self._memory is not None

    def read_aux(self, ask: AuxAsk) -> None:
        """Read an aux record of a peer into a slot of ours; AuxRead follows, once."""
        runs = np.array([[ask.offset, ask.slot, ask.size_bytes]], np.uint64)
        try:
            ticket = self.start(ask.leg, Batch(PeerRank(ask.peer, self.rank), Direction.READ, runs))
        except KVBatonError as error:
            self._report_aux(ask, str(error))
        else:
            self._aux_reads[ticket] = ask

    def _report_aux(self, ask: AuxAsk, error: str) -> None:
        is_there = self._memory is not None and not error
        data = self._memory.read(ask.slot, ask.size_bytes) if self._memory is not None and is_there else b""
        self._report(AuxRead(ask.leg, ask.slot, data, error or ("" if is_there else "this rank has no memory to read from")))

    @property
    def has_work(self) -> bool:
        """Whether `poll` should be called again at once."""
        return self._summer.has_work or bool(self._completions)

    def next_deadline(self) -> float | None:
        """When `poll` should be called again at the latest, whatever completes."""
        return self._backlog.next_deadline()

    def poll(self) -> None:
        """Take what the transport has completed and report it, post what it had no room for, and sum a little."""
        self._completions += self._transport.poll()
        has_completed = bool(self._completions)
        while self._completions:
            completion = self._completions.popleft()
            owner = self._owners.pop(completion.ticket, None)
            if owner is not None and (leg := self.legs.get(owner[0])) is not None:
                self._complete(leg, leg.moving[owner[1]], completion)
            elif (ask := self._aux_reads.pop(completion.ticket, None)) is not None:
                self._report_aux(ask, completion.error)
        self._offer_again(at_once=has_completed)
        self._summer.work()

    def _post(self, leg: _Leg, source_blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        moving = leg.moving[spans[0].number] = _Moving(spans)
        try:
            plans = self._plan(leg, source_blocks, spans)
            parts = [(peer, Part(leg.start.leg, spans[0].number, part)) for peer, runs in plans for part in _batches(runs)]
            moving.planned, moving.unposted = sum(int(runs[:, 2].sum()) for _, runs in plans), len(parts)
        except KVBatonError as error:
            self._fail(leg, str(error))
        except Exception as error:
            self._fail(leg, f"{type(error).__name__}: {error}")
            raise
        else:
            for peer, part in parts:
                if leg.state is LegState.OPEN:
                    self._backlog.add(peer, part, self._clock())
        self._finish(leg, moving)

    def _post_part(self, peer: PeerRank, part: Part) -> None:
        """Post one batch; raises QueueFull. Another error fails the leg, and what is left of that is not posted."""
        leg = self.legs.get(part.leg)
        moving = None if leg is None else leg.moving.get(part.span)
        if leg is None or moving is None or leg.state is not LegState.OPEN:
            return
        reads = leg.start.executor is Executor.TARGET_READS
        batch = Batch(peer, Direction.READ if reads else Direction.WRITE, part.runs, leg.start.epoch)
        try:
            ticket = self.start(part.leg, batch)
        except QueueFull:
            raise
        except KVBatonError as error:
            self._fail(leg, str(error))
            return
        except Exception as error:
            self._fail(leg, f"{type(error).__name__}: {error}")
            raise
        self.runs_total += len(part.runs)
        moving.unposted -= 1
        moving.open.add(ticket)
        self._owners[ticket] = (part.leg, part.span)
        self._step(leg, LegEvent.POSTED)

    def start(self, leg_id: LegId, batch: Batch) -> Ticket:
        """Hand one batch of a leg to the transport."""
        del leg_id
        return self._transport.post(batch)

    def _offer_again(self, *, at_once: bool) -> None:
        for leg_id, reason in self._backlog.offer_again(self._clock(), at_once=at_once):
            if (leg := self.legs.get(leg_id)) is not None:
                self._fail(leg, reason)

    def _fail(self, leg: _Leg, reason: str) -> None:
        leg.error = leg.error or reason
        self._step(leg, LegEvent.ERROR)
        self._settle(leg)

    def _plan(self, leg: _Leg, source_blocks: BlockLists, spans: tuple[Span, ...]) -> list[tuple[PeerRank, Runs]]:
        """The runs of spans by peer; what is the same for all layers is worked out once for those that follow each other."""
        start = leg.start
        known = self._routes.get(start.peer)
        if known is None:
            raise TransportError(self._unreachable.get(start.peer, f"{start.peer} is not connected"))
        routes = known.reads if start.executor is Executor.TARGET_READS else known.writes
        first, end = max(spans[0].first_token, start.cached_tokens), spans[0].end_token
        if leg.plan_of != (source_blocks, first, end):
            leg.plans = tuple(
                plan_blocks(route.pair, source_blocks, start.target_blocks, first, end, start.total_tokens) for route in routes
            )
            leg.plan_of = (source_blocks, first, end)
        layers = range(spans[0].first_layer, spans[-1].end_layer)
        return [(route.peer, plan_layers(route.pair, plan, layers)) for route, plan in zip(routes, leg.plans, strict=True)]

    def _complete(self, leg: _Leg, moving: _Moving, completion: Completion) -> None:
        moving.open.discard(completion.ticket)
        moving.moved += completion.moved_bytes
        if completion.error:
            leg.error = leg.error or completion.error
            self._step(leg, LegEvent.ERROR)
        self._finish(leg, moving)

    def _finish(self, leg: _Leg, moving: _Moving) -> None:
        if not moving.open and not moving.unposted:
            leg.moving.pop(moving.spans[0].number, None)
            if leg.state is LegState.OPEN and moving.moved != moving.planned:
                leg.error = (
                    f"{moving.moved} of {moving.planned} bytes of span {moving.spans[0].number} were moved without an error"
                )
                self._step(leg, LegEvent.ERROR)
            row = self.table.step(leg.state, LegEvent.MOVED)
            if row is not None and LegEffect.REPORT_MOVED in row.effects:
                self._report_moved(leg, moving)
        self._settle(leg)

    def _report_moved(self, leg: _Leg, moving: _Moving) -> None:
        """Tell of each span; the bytes of spans that were moved as one are shared out evenly."""
        count = len(moving.spans)
        for index, span in enumerate(moving.spans):
            planned, moved = (total * (index + 1) // count - total * index // count for total in (moving.planned, moving.moved))
            self._report(LegMoved(leg.start.leg, self.rank, span.number, planned, moved))

    def _settle(self, leg: _Leg) -> None:
        if leg.is_drained and leg.state in (LegState.BROKEN, LegState.STOPPING):
            self._step(leg, LegEvent.DRAINED)

    def _step(self, leg: _Leg, event: LegEvent) -> None:
        row = self.table.step(leg.state, event)
        if row is None:
            return
        leg.state = row.state
        for effect in row.effects:
            self._perform(leg, effect)

    def _perform(self, leg: _Leg, effect: LegEffect) -> None:
        leg_id = leg.start.leg
        match effect:
            case LegEffect.CANCEL_POSTED:
                for moving in leg.moving.values():
                    moving.unposted = 0
                    for ticket in tuple(moving.open):
                        self._transport.cancel(ticket)
            case LegEffect.REPORT_FAILED:
                del self.legs[leg_id]
                self._report(LegFailed(leg_id, self.rank, leg.error))
            case LegEffect.REPORT_STOPPED:
                del self.legs[leg_id]
                self._report(LegStopped(leg_id, self.rank))
            case LegEffect.REPORT_MOVED:
                pass


def _neighbours(spans: tuple[Span, ...]) -> Iterator[tuple[Span, ...]]:
    """Spans in parts that follow each other in layers and have the same tokens."""
    first = 0
    for index, span in enumerate(spans, 1):
        after = spans[index] if index < len(spans) else None
        tokens = (span.first_token, span.end_token)
        if after is None or (after.first_token, after.end_token) != tokens or after.first_layer != span.end_layer:
            yield spans[first:index]
            first = index


def _batches(runs: Runs) -> Iterator[Runs]:
    ends = np.cumsum(runs[:, 2])
    cuts = np.flatnonzero(np.diff(ends // _BATCH_BYTES)) + 1
    return (part for part in np.split(runs, cuts) if len(part))
