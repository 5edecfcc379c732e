"""The rank agent: turns spans into batches, posts them inline, and reports what became of them. No I/O of its own.

A rank executes its part of a copy (`CopyId`): every leg between itself and a rank of the peer. That part is a small state
machine, the table `COPY` of core/lifecycle.py. Failure and stop are reported only when the last batch in flight has
completed: until then the transport may still write, and a coordinator that believed the copy ended would give the blocks
away.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.agent import rank_orders
from kvbaton.agent.page_planner import PagePlanner
from kvbaton.agent.ports import Clock, Memory
from kvbaton.agent.rank_orders import CopyId
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card, Endpoint
from kvbaton.core.checks import BlockSums, LegPart, PiecePlanner, Pieces
from kvbaton.core.fused import split_fused
from kvbaton.core.handoff import BlockLists, Executor, HandoffKey, Incarnation, Span, span_rows
from kvbaton.core.layout import Layout
from kvbaton.core.legs import Leg, assign_legs
from kvbaton.core.lifecycle import COPY, CopyEffect, CopyEvent, CopyState, CopyTable
from kvbaton.core.members import members_of
from kvbaton.core.pair import Pair, Share, pair_layouts
from kvbaton.core.plan import BlockRuns, plan_blocks, plan_layers
from kvbaton.core.strips import Plan, Runs, count_bytes, count_runs, cut_runs
from kvbaton.core.timeline import Side
from kvbaton.errors import ConfigError, KVBatonError, QueueFull, TransportError
from kvbaton.transport.base import (
    Arrival,
    Batch,
    Completion,
    Direction,
    LateWrites,
    PagesMoved,
    PagingTransport,
    PeerRank,
    ReportingTransport,
    Ticket,
    Transport,
    fencing_of,
)
from kvbaton.transport.runs import Loops, Pages, RegionSummer, load_loops

__all__ = [
    "NO_CONTROLS",
    "Backlog",
    "Part",
    "RankAgent",
    "RankControls",
    "RegionMemory",
    "Routes",
    "ShareFilter",
    "Summer",
    "keep_all",
]

if not TYPE_CHECKING:
    CopyEffect, CopyEvent, CopyState, Direction, Executor, LateWrites = map(
        members_of, (CopyEffect, CopyEvent, CopyState, Direction, Executor, LateWrites)
    )

_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.05

_TURN_BYTES = 8 << 20
_AT_ONCE_BYTES = 256 << 10

_MAX_UNREACHABLE = 4096


class Part(msgspec.Struct, frozen=True, eq=False):
    """One batch of one span of a copy."""

    copy: CopyId
    span: int
    runs: Runs | Plan


@dataclass(slots=True)
class _PeerBacklog:
    full_since: float
    retry_at: float
    wait_s: float = 0.0
    parts: deque[Part] = field(default_factory=deque)


class Backlog:
    """Batches that a transport's full queue has not taken yet: kept per peer, in order, and offered again a little later.

    The first refusal of a peer's batch makes the next ones to it wait behind it, so that no copy starves behind later ones;
    other peers go on. Each refusal doubles the wait, from 1 to 50 ms; each acceptance ends it. The copies of a peer of which
    nothing is taken for `transfer_timeout` fail.

    `offer(peer, part)` hands one part to the transport and raises QueueFull when it must wait; a part of a copy that
    has ended in the meantime it takes without doing anything.
    """

    def __init__(self, transfer_timeout: float, offer: Callable[[PeerRank, Part], None]) -> None:
        self._transfer_timeout = transfer_timeout
        self._offer = offer
        self._peers: OrderedDict[PeerRank, _PeerBacklog] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(peer.parts) for peer in self._peers.values())

    @property
    def has_parts(self) -> bool:
        """Whether anything waits."""
        return bool(self._peers)

    def add(self, peer: PeerRank, part: Part, now: float) -> None:
        """Offer a part at once, unless others of that peer wait already; what is refused waits."""
        waiting = self._peers.get(peer)
        if waiting is None:
            try:
                self._offer(peer, part)
            except QueueFull:
                self._peers[peer] = _PeerBacklog(now, now + _FIRST_WAIT_S, _FIRST_WAIT_S, deque([part]))
        else:
            waiting.parts.append(part)

    def offer_again(self, now: float, *, at_once: bool) -> list[tuple[CopyId, str]]:
        """Offer what is due, or everything `at_once`; returns the copies of peers of which nothing was taken for too long."""
        given_up: list[tuple[CopyId, str]] = []
        if not self._peers:
            return given_up
        for peer, waiting in list(self._peers.items()):
            if at_once or waiting.retry_at <= now:
                given_up += self._offer_of(peer, waiting, now)
        return given_up

    def next_deadline(self) -> float | None:
        """When `offer_again` next has something to do."""
        return min(waiting.retry_at for waiting in self._peers.values()) if self._peers else None

    def _offer_of(self, peer: PeerRank, waiting: _PeerBacklog, now: float) -> list[tuple[CopyId, str]]:
        try:
            while waiting.parts:
                self._offer(peer, waiting.parts[0])
                waiting.parts.popleft()
                waiting.full_since, waiting.wait_s = now, 0.0
                # The queue may be shared by all peers: one that has just had its turn is offered last the next time.
                self._peers.move_to_end(peer)
        except QueueFull as error:
            waiting.wait_s = min(max(2 * waiting.wait_s, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            waiting.retry_at = now + waiting.wait_s
            if now - waiting.full_since < self._transfer_timeout:
                return []
            reason = f"{error}; nothing was taken for {self._transfer_timeout:g} s"
            del self._peers[peer]
            return [(copy, reason) for copy in dict.fromkeys(part.copy for part in waiting.parts)]
        del self._peers[peer]
        return []


class RegionMemory:
    """The memory that a transport has registered, as one view of bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @cached_property
    def _summer(self) -> RegionSummer:
        return RegionSummer(self._view, load_loops())

    def sums(self, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        return self._summer.sums(pieces, ends, value)

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> tuple[list[int], int] | None:
        return self._summer.sum_blocks(blocks, most_bytes)

    def read(self, offset: int, size_bytes: int) -> bytes:
        return bytes(self._view[offset : offset + size_bytes])

    def write(self, offset: int, data: bytes) -> None:
        self._view[offset : offset + len(data)] = data


@dataclass(slots=True)
class _BlockJob:
    """Spans that are to be summed in short form, in one go."""

    order: rank_orders.SumSpans
    legs: Mapping[int, PiecePlanner]
    blocks: BlockSums


class _SumJob:
    """Spans that are to be summed together: every leg of the first one, then every leg of the next one, and so on."""

    def __init__(self, copy: CopyId, spans: list[int], legs: tuple[int, ...], pieces: Pieces, counts: list[int]) -> None:
        self.copy = copy
        self.spans = spans
        self.legs = legs
        self.pieces = pieces
        self.ends = list(itertools.accumulate(counts))
        """The number of the first piece behind each sum."""
        self._left = int(pieces[:, 1].sum())
        self._bytes_up_to: npt.NDArray[np.int64] | None = None
        """Of all pieces up to each; needed only where they are too many for one turn."""
        self.done = self.value = 0
        self.sums: list[int] = []
        self.reported = 0

    def end_within(self, budget: int) -> tuple[int, int]:
        """The end of the pieces that come next, of about `budget` bytes, one at least; and their bytes."""
        if self._left <= budget:
            left, self._left = self._left, 0
            return len(self.pieces), left
        if self._bytes_up_to is None:
            self._bytes_up_to = np.cumsum(self.pieces[:, 1])
        before = int(self._bytes_up_to[self.done - 1]) if self.done else 0
        end = max(self.done + 1, int(np.searchsorted(self._bytes_up_to, before + budget, side="right")))
        count = int(self._bytes_up_to[end - 1]) - before
        self._left -= count
        return end, count

    def sum_up_to(self, end: int, memory: Memory) -> None:
        """Sum the pieces before `end`; a sum that is cut there is continued with the next call."""
        complete = bisect.bisect_right(self.ends, end) - len(self.sums)
        ends = [each - self.done for each in self.ends[len(self.sums) : len(self.sums) + complete]]
        # The last part is what is cut; without a piece, its sum is 0, with which the next one begins.
        *sums, self.value = memory.sums(self.pieces[self.done : end], [*ends, end - self.done], self.value)
        self.sums += sums
        self.done = end

    def take_complete(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The spans of which every leg is summed and that were not taken yet, each with its sums by leg."""
        legs, sums, first = self.legs, self.sums, self.reported
        # A rank without a leg has nothing to sum, and all of it is complete.
        self.reported = len(sums) // len(legs) if legs else len(self.spans)
        spans = enumerate(self.spans[first : self.reported], first)
        if len(legs) == 1:
            (leg,) = legs
            return {span: ((leg, sums[index]),) for index, span in spans}
        count = len(legs)
        return {span: tuple(zip(legs, sums[index * count : (index + 1) * count], strict=True)) for index, span in spans}


class Summer:
    """The sums that one rank was asked for. Each turn continues one hand-off; then it is the turn of the next one."""

    turn_bytes = _TURN_BYTES
    at_once_bytes = _AT_ONCE_BYTES

    def __init__(self, rank: int, memory: Memory | None, report: Callable[[rank_orders.SpansSummed], None]) -> None:
        self._rank = rank
        self._memory = memory
        self._report = report
        self._jobs: OrderedDict[tuple[Side, HandoffKey], deque[_SumJob | _BlockJob]] = OrderedDict()

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._jobs)

    def add(self, order: rank_orders.SumSpans, legs: Mapping[int, PiecePlanner]) -> None:
        """Put spans on the list, leg by leg; what cannot be summed is reported at once."""
        blocks = self._block_job(order, legs)
        # What takes some ten microseconds is done at once: to come back for it in another turn takes longer.
        if blocks is not None and self._sum_blocks(blocks, self.at_once_bytes) is not None:
            return
        job = blocks or self._planned(order, legs)
        if job is not None:
            self._jobs.setdefault((order.side, order.copy.key), deque()).append(job)

    def _block_job(self, order: rank_orders.SumSpans, legs: Mapping[int, PiecePlanner]) -> _BlockJob | None:
        """The job in short form, where the cache of its only leg has one."""
        if len(legs) != 1:
            return None
        (planner,) = legs.values()
        blocks = planner.block_sums(order.blocks, order.copy.key, order.spans, order.cached_tokens, order.integrity)
        return None if blocks is None else _BlockJob(order, legs, blocks)

    def _planned(self, order: rank_orders.SumSpans, legs: Mapping[int, PiecePlanner]) -> _SumJob | None:
        """The job piece by piece; None, and the reason is reported, where it cannot be done."""
        try:
            if self._memory is None:
                raise ConfigError("this rank was given no memory to sum; switch checksums off or give it one")
            pieces, counts = _plan_sums(order, legs)
        except KVBatonError as error:
            self.refuse(order, str(error))
            return None
        return _SumJob(order.copy, [span.number for span in order.spans], tuple(legs), pieces, counts)

    def refuse(self, order: rank_orders.SumSpans, reason: str) -> None:
        """Report that spans are not summed, and why."""
        self._report(rank_orders.SpansSummed(order.copy, order.side, self._rank, {}, f"checksum: {reason}"))

    def drop(self, side: Side, key: HandoffKey) -> None:
        """Forget the sums of one side of a hand-off."""
        self._jobs.pop((side, key), None)

    def work(self) -> None:
        """Sum a few MiB at most, and report the spans that are complete."""
        left = self.turn_bytes
        while self._jobs and left > 0:
            (side, key), jobs = next(iter(self._jobs.items()))
            while jobs and left > 0:
                left -= self._continue(side, jobs, left)
            if jobs:
                self._jobs.move_to_end((side, key))
            else:
                del self._jobs[side, key]

    def _continue(self, side: Side, jobs: deque[_SumJob | _BlockJob], budget: int) -> int:
        """Continue the first job, and report what is complete, or that the rest of it cannot be done; returns the bytes."""
        job, summed = jobs[0], 0
        if isinstance(job, _BlockJob):
            jobs.popleft()
            if (taken := self._sum_blocks(job, budget)) is not None:
                return taken
            if budget < self.turn_bytes:
                # In a turn of its own, if it is short enough for that.
                jobs.appendleft(job)
                return budget
            # Too long for a turn, or left to others by the loop in C.
            jobs.extendleft(filter(None, [self._planned(job.order, job.legs)]))
            return 0
        try:
            if self._memory is not None:
                end, summed = job.end_within(budget)
                job.sum_up_to(end, self._memory)
        except Exception as problem:
            jobs.popleft()
            error = f"checksum: {type(problem).__name__}: {problem}"
            self._report(rank_orders.SpansSummed(job.copy, side, self._rank, {}, error))
            raise
        if complete := job.take_complete():
            self._report(rank_orders.SpansSummed(job.copy, side, self._rank, complete))
        if job.reported == len(job.spans):
            jobs.popleft()
        return summed

    def _sum_blocks(self, job: _BlockJob, most_bytes: int) -> int | None:
        """Sum and report a whole job, and return its bytes; None, and nothing was done, where the memory cannot do that."""
        order = job.order
        try:
            taken = None if self._memory is None else self._memory.sum_blocks(job.blocks, most_bytes)
        except Exception as problem:
            self.refuse(order, f"{type(problem).__name__}: {problem}")
            raise
        if taken is None:
            return None
        (leg,), (values, summed) = job.legs, taken
        sums: dict[int, tuple[tuple[int, int], ...]] = {
            span.number: ((leg, value),) for span, value in zip(order.spans, values, strict=True)
        }
        self._report(rank_orders.SpansSummed(order.copy, order.side, self._rank, sums))
        return summed


def _plan_sums(order: rank_orders.SumSpans, legs: Mapping[int, PiecePlanner]) -> tuple[Pieces, list[int]]:
    """The pieces of all spans, and how many each sum has. With several legs their sums take turns, span by span."""
    key, cached_tokens = order.copy.key, order.cached_tokens
    if len(legs) == 1:
        (planner,) = legs.values()
        return planner.plan_spans(order.blocks, key, order.spans, cached_tokens, order.integrity, order.total_tokens)
    parts = [
        planner.plan_spans(order.blocks, key, (span,), cached_tokens, order.integrity, order.total_tokens)
        for span in order.spans
        for planner in legs.values()
    ]
    pieces = np.concatenate([part for part, _ in parts]) if parts else np.empty((0, 2), np.int64)
    return pieces, [count for _, counts in parts for count in counts]


@dataclass(frozen=True, slots=True)
class Route:
    """What this rank exchanges with one rank of a peer, in the leg of this number."""

    leg: int
    peer: PeerRank
    pair: Pair
    sums: PiecePlanner
    pages: PagePlanner | None = None


@dataclass(frozen=True, slots=True)
class Routes:
    """Every rank of a peer that this rank has a session with; from which it reads what, and to which it writes what."""

    peers: tuple[PeerRank, ...]
    reads: tuple[Route, ...]
    writes: tuple[Route, ...]


ShareFilter = Callable[[Share], Share]
"""For controls of `kvbaton verify`: what is left of what a leg should move."""


def keep_all(share: Share) -> Share:
    """All of it is moved."""
    return share


def find_routes(
    own: Layout, instance: Sequence[Layout], rank: int, card: Card, keep: ShareFilter = keep_all, loops: Loops | None = None
) -> Routes:
    """The routes from one rank of an instance, with the layout `own`, to those of `card`; raises Incompatible.

    First ranks always have a session with each other: aux records travel there. `keep` may leave less to move than there is.
    """
    given = [each.layout for each in card.ranks]
    theirs = split_fused(given, instance)
    instance, (own,) = split_fused(instance, given), split_fused([own], given)
    peers = [PeerRank(card.incarnation, each.rank) for each in card.ranks]

    def route(leg: Leg, other: int, pair: Pair) -> Route:
        sums = PiecePlanner(own, LegPart(leg.share, theirs[other]))
        return Route(leg.number, peers[other], pair, sums, PagePlanner.of(pair, loops))

    reads = tuple(
        route(leg, leg.source, pair_layouts(theirs[leg.source], own, keep(leg.share)))
        for leg in assign_legs(theirs, instance).of_target(rank)
    )
    writes = tuple(
        route(leg, leg.target, pair_layouts(own, theirs[leg.target], keep(leg.share)))
        for leg in assign_legs(instance, theirs).of_source(rank)
    )
    met = {route.peer for route in (*reads, *writes)} | ({peers[0]} if rank == 0 else set())
    return Routes(tuple(peer for peer in peers if peer in met), reads, writes)


class _Moving(msgspec.Struct, eq=False):
    """Spans of the same tokens and neighbouring layers, moved as one."""

    spans: tuple[Span, ...]
    planned: int = 0
    moved: int = 0
    unposted: int = 0
    open: set[Ticket] = msgspec.field(default_factory=set)

    @property
    def is_drained(self) -> bool:
        return not self.open and not self.unposted


class _Copy(msgspec.Struct, eq=False):
    """This rank's part of one copy."""

    order: rank_orders.OpenCopy
    state: CopyState = COPY.start
    error: str = ""
    may_land: bool = False
    """Whether a batch of it was given up with bytes on their way to the peer."""
    moving: dict[int, _Moving] = msgspec.field(default_factory=dict)
    """By the number of the first span."""
    plan_of: tuple[BlockLists, int, int] = ((), 0, 0)
    plans: Sequence[BlockRuns] = ()
    """One per route."""

    @property
    def is_drained(self) -> bool:
        return all(moving.is_drained for moving in self.moving.values())


def _spoil_none(blocks: BlockLists, cached_tokens: int) -> None:
    """No control asks for blocks to be spoiled."""


@dataclass(frozen=True, slots=True)
class RankControls:
    """What a control of `kvbaton verify` changes on a rank: how blocks are spoiled, and what of a leg is moved at all."""

    poison: Callable[[BlockLists, int], None] = _spoil_none
    keep: ShareFilter = keep_all


NO_CONTROLS = RankControls()


class RankAgent:
    """Carries out the orders for one rank; see `handle`.

    `instance` has the layouts of all ranks of this instance, this one's among them at `rank`; without it this is the only one.
    `loops` plan a few pages in one call; without them `core/plan.py` plans all. Batches are bounded in size, so that a long
    span stops promptly. `transfer_timeout` is how long a transport whose queue is full may take nothing before the copies that
    wait for it fail.
    """

    table: CopyTable = COPY

    def __init__(
        self,
        rank: int,
        layout: Layout,
        transport: Transport,
        report: Callable[[rank_orders.RankReport], None],
        *,
        clock: Clock,
        transfer_timeout: float,
        memory: Memory | None = None,
        unfenced_writes: bool = False,
        instance: Sequence[Layout] = (),
        controls: RankControls = NO_CONTROLS,
        loops: Loops | None = None,
    ) -> None:
        self.rank = rank
        self._loops = loops
        self._controls = controls
        self._instance = tuple(instance) or (layout,)
        self._unfenced_writes = unfenced_writes
        self._layout = layout
        self._transport = transport
        self._fencing = fencing_of(transport)
        # Looked up once: `poll` is called with every turn, and asking a protocol costs more than the rest of it.
        self._reporting = transport if isinstance(transport, ReportingTransport) else None
        self._paging = transport if isinstance(transport, PagingTransport) else None
        self._arrivals_total = 0
        self._report = report
        self._clock = clock
        self.runs_total = 0
        self._backlog = Backlog(transfer_timeout, self._post_part)
        self._memory = memory
        self._aux_reads: dict[Ticket, rank_orders.ReadAux] = {}
        self._summer = Summer(rank, memory, report)
        self._routes: dict[Incarnation, Routes] = {}
        self._unreachable: BoundedMap[Incarnation, str] = BoundedMap(_MAX_UNREACHABLE)
        self.copies: dict[CopyId, _Copy] = {}
        self._owners: dict[Ticket, tuple[CopyId, int]] = {}
        self._completions: deque[Completion] = deque()

    @property
    def executor(self) -> Executor:
        """Which side copies into this rank's memory: its owner, unless peers can write there and be fenced.

        A transport that cannot fence writers is written through only where the operator has asked for that.
        """
        transport = self._transport
        may_write = transport.late_writes is LateWrites.REVOCABLE or self._unfenced_writes
        writes = may_write and Direction.WRITE in transport.directions
        return Executor.SOURCE_WRITES if writes else Executor.TARGET_READS

    @property
    def counts_arrivals(self) -> bool:
        """Whether this rank learns from its own transport what peers have written into its memory."""
        return self.fences_writers and self._reporting is not None

    @property
    def fences_writers(self) -> bool:
        """Whether this rank can end the right of a peer to write into its memory."""
        return self._transport.late_writes is LateWrites.REVOCABLE

    def handle(self, order: rank_orders.RankOrder) -> None:
        """Carry out one order; what follows is reported. `Connect` raises TransportError or Incompatible."""
        match order:
            case rank_orders.MoveSpans():
                self._move_spans(order)
            case rank_orders.OpenCopy():
                self.copies[order.copy] = _Copy(order)
            case rank_orders.CloseCopy():
                # Every rank has reported all of its spans: nothing of it is in flight.
                self.copies.pop(order.copy, None)
            case rank_orders.StopCopy():
                self._stop_copy(order.copy)
            case rank_orders.SumSpans():
                self._sum_spans(order)
            case rank_orders.DropSums():
                self._summer.drop(order.side, order.key)
            case rank_orders.PutAux():
                if self._memory is not None:
                    self._memory.write(order.offset, order.data)
            case rank_orders.ReadAux():
                self._read_aux(order)
            case rank_orders.PoisonBlocks():
                self._controls.poison(order.blocks, order.cached_tokens)
            case rank_orders.Connect():
                self._connect(order.card)
            case rank_orders.Disconnect():
                self._disconnect(order.incarnation)
            case rank_orders.RevokePeer():
                self._revoke(order.incarnation, order.epoch)
            case rank_orders.ResetRegion():
                self._reset_region(order.epoch)
            case _:
                assert_never(order)

    # Peers.

    def _connect(self, card: Card) -> None:
        """Make the ranks of a peer reachable that this one exchanges anything with.

        Where that fails, a coordinator in another process does not learn it from here: a copy with that peer fails with the
        same error later.
        """
        self._unreachable.pop(card.incarnation, None)
        try:
            routes = find_routes(self._layout, self._instance, self.rank, card, self._controls.keep, self._loops)
            ranks = {PeerRank(card.incarnation, each.rank): each for each in card.ranks}
            for peer in routes.peers:
                self._reach(peer, ranks[peer].endpoints)
        except KVBatonError as error:
            self._unreachable[card.incarnation] = str(error)
            # Some of its ranks may be reached. It is refused as a whole, and no order to disconnect it will come.
            for each in card.ranks:
                self._transport.revoke(PeerRank(card.incarnation, each.rank))
            raise
        self._routes[card.incarnation] = routes

    def _reach(self, peer: PeerRank, endpoints: tuple[Endpoint, ...]) -> None:
        for endpoint in endpoints:
            if endpoint.transport == self._transport.name:
                self._transport.connect(peer, endpoint)
                return
        offered = ", ".join(endpoint.transport for endpoint in endpoints) or "none"
        raise TransportError(f"no common transport: {self._transport.name} here, {offered} there")

    def _disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer; what is in flight to it completes with an error."""
        routes = self._routes.pop(incarnation, None)
        for peer in routes.peers if routes is not None else ():
            self._transport.revoke(peer)
        self._offer_again(at_once=True)

    def _revoke(self, incarnation: Incarnation, epoch: int) -> None:
        """Tear the session with a peer down, and report that; nothing is done where the transport cannot fence a peer.

        The peer may come back with a new session; what it was granted before `epoch` stays void.
        """
        if self._transport.late_writes is LateWrites.UNFENCED:
            return
        routes = self._routes.get(incarnation)
        self._disconnect(incarnation)
        if self._fencing is not None:
            for peer in routes.peers if routes is not None else (PeerRank(incarnation, self.rank),):
                self._fencing.fence_peer(peer, epoch)
        self._report(rank_orders.PeerFenced(incarnation, epoch, self.rank))

    def _reset_region(self, epoch: int) -> None:
        """Register this rank's memory anew, where the transport can."""
        if self._fencing is not None:
            self._fencing.reset_region(epoch)
            self._report(rank_orders.RegionFenced(epoch, self.rank))

    # Checksums and aux records.

    def _sum_spans(self, order: rank_orders.SumSpans) -> None:
        """Sum spans in this rank's own memory, a little with each `poll`."""
        routes = self._routes.get(order.peer)
        if routes is None:
            self._summer.refuse(order, f"{order.peer} is not connected")
        else:
            own = routes.writes if order.side is Side.SOURCE else routes.reads
            self._summer.add(order, {route.leg: route.sums for route in own})

    def _read_aux(self, order: rank_orders.ReadAux) -> None:
        runs = np.array([[order.offset, order.slot, order.size_bytes]], np.uint64)
        try:
            ticket = self.start(order.copy, Batch(PeerRank(order.peer, self.rank), Direction.READ, runs))
        except KVBatonError as error:
            self._report_aux(order, str(error))
        else:
            self._aux_reads[ticket] = order

    def _report_aux(self, order: rank_orders.ReadAux, error: str) -> None:
        data = b""
        if not error and self._memory is not None:
            data = self._memory.read(order.slot, order.size_bytes)
        elif not error:
            error = "this rank has no memory to read from"
        self._report(rank_orders.AuxRead(order.copy, order.slot, data, error))

    # The loop.

    @property
    def has_work(self) -> bool:
        """Whether `poll` should be called again at once."""
        return self._summer.has_work or bool(self._completions)

    def next_deadline(self) -> float | None:
        """When `poll` should be called again at the latest, whatever completes."""
        return self._backlog.next_deadline()

    def poll(self) -> None:
        """Take what the transport has completed and report it, post what it had no room for, and sum a little.

        Completions are kept in a queue of our own: if one of them raises, those behind it are handled by the next call.
        """
        self._completions += self._transport.poll()
        has_completed = bool(self._completions)
        while self._completions:
            completion = self._completions.popleft()
            owner = self._owners.pop(completion.ticket, None)
            if owner is not None and (copy := self.copies.get(owner[0])) is not None:
                self._complete(copy, copy.moving[owner[1]], completion)
            elif (order := self._aux_reads.pop(completion.ticket, None)) is not None:
                self._report_aux(order, completion.error)
        if self._reporting is not None:
            self._report_arrivals(self._reporting.take_arrivals())
        if self._backlog.has_parts:
            self._offer_again(at_once=has_completed)
        if self._summer.has_work:
            self._summer.work()

    def _report_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            try:
                copy = rank_orders.decode_copy(arrival.notice)
            except msgspec.MsgspecError:
                continue  # of a peer that writes for another purpose: no hand-off of ours waits for it
            self._arrivals_total += 1
            number, peer = self._arrivals_total, arrival.peer.incarnation
            self._report(rank_orders.Arrived(copy, peer, self.rank, number, arrival.stored_bytes))

    # Copies.

    def _move_spans(self, order: rank_orders.MoveSpans) -> None:
        copy = self.copies.get(order.copy)
        if copy is None:
            return  # it has failed or stopped, and that report is on its way
        for together in _neighbours(order.spans):
            if copy.state is CopyState.OPEN and not self._move_at_once(copy, order.source_blocks, together):
                self._post(copy, order.source_blocks, together)

    def _move_at_once(self, copy: _Copy, source_blocks: BlockLists, spans: tuple[Span, ...]) -> bool:
        """Have the transport read a few pages in one call, where it can; what it leaves alone is planned and posted.

        What is refused is left alone too, and named there. Nothing overtakes batches that wait for room.
        """
        order, routes = copy.order, self._routes.get(copy.order.peer)
        if self._paging is None or routes is None or order.executor is not Executor.TARGET_READS or self._backlog.has_parts:
            return False
        if len(routes.reads) != 1 or (planner := routes.reads[0].pages) is None:
            return False
        first, end = max(spans[0].first_token, order.cached_tokens), spans[-1].end_token
        layers = range(spans[0].first_layer, spans[-1].end_layer)
        try:
            pages = planner.pages(source_blocks, order.target_blocks, first, end, order.total_tokens, layers)
            if pages is None:
                return False
            moved = self.start_pages(order.copy, self._paging, routes.reads[0].peer, pages)
        except KVBatonError:
            return False
        except Exception as error:
            self._fail(copy, f"{type(error).__name__}: {error}")
            raise
        if moved is None:
            return False
        number = spans[0].number
        copy.moving[number] = _Moving(spans, planned=pages.wire_bytes, open={moved.ticket})
        self._owners[moved.ticket] = (order.copy, number)
        self.runs_total += moved.runs
        self._step(copy, CopyEvent.POSTED)
        return True

    def _stop_copy(self, copy_id: CopyId) -> None:
        copy = self.copies.get(copy_id)
        if copy is None:
            # It failed, and that report is still on its way: the coordinator waits for an answer to this order all the same.
            self._report(rank_orders.CopyStopped(copy_id, self.rank))
            return
        self._step(copy, CopyEvent.STOP)
        self._settle(copy)

    def _post(self, copy: _Copy, source_blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        moving = copy.moving[spans[0].number] = _Moving(spans)
        try:
            parts = self._parts(copy, source_blocks, moving)
            moving.unposted = len(parts)
        except KVBatonError as error:
            self._fail(copy, str(error))
        except Exception as error:
            self._fail(copy, f"{type(error).__name__}: {error}")
            raise
        else:
            if copy.order.counts_arrivals:
                numbers = tuple(span.number for span in spans)
                self._report(rank_orders.SpansPlanned(copy.order.copy, self.rank, numbers, moving.planned))
            for peer, part in parts:
                if copy.state is CopyState.OPEN:
                    self._backlog.add(peer, part, self._clock())
        self._finish(copy, moving)

    def _parts(self, copy: _Copy, source_blocks: BlockLists, moving: _Moving) -> list[tuple[PeerRank, Part]]:
        """The batches of spans by peer, and count what they move."""
        copy_id, number, most = copy.order.copy, moving.spans[0].number, self._transport.batch_bytes
        parts: list[tuple[PeerRank, Part]] = []
        for peer, runs, planned in self._plan(copy, source_blocks, moving.spans):
            moving.planned += planned
            parts += [(peer, Part(copy_id, number, batch)) for batch in cut_runs(runs, planned, most)]
        return parts

    def _post_part(self, peer: PeerRank, part: Part) -> None:
        """Post one batch; raises QueueFull. Another error fails the copy, and what is left of it is not posted."""
        copy = self.copies.get(part.copy)
        moving = None if copy is None else copy.moving.get(part.span)
        if copy is None or moving is None or copy.state is not CopyState.OPEN:
            return
        reads = copy.order.executor is Executor.TARGET_READS
        notice = rank_orders.encode_copy(part.copy) if copy.order.counts_arrivals else b""
        batch = Batch(peer, Direction.READ if reads else Direction.WRITE, part.runs, copy.order.epoch, notice)
        try:
            ticket = self.start(part.copy, batch)
        except QueueFull:
            raise
        except KVBatonError as error:
            self._fail(copy, str(error))
            return
        except Exception as error:
            self._fail(copy, f"{type(error).__name__}: {error}")
            raise
        self.runs_total += count_runs(part.runs)
        moving.unposted -= 1
        moving.open.add(ticket)
        self._owners[ticket] = (part.copy, part.span)
        self._step(copy, CopyEvent.POSTED)

    def start(self, copy_id: CopyId, batch: Batch) -> Ticket:
        """Hand one batch of a copy to the transport."""
        del copy_id
        return self._transport.post(batch)

    def start_pages(self, copy_id: CopyId, transport: PagingTransport, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        """Hand pages of a copy to the transport; None if they have to be planned and posted."""
        del copy_id
        return transport.move_pages(peer, pages)

    def _offer_again(self, *, at_once: bool) -> None:
        for copy_id, reason in self._backlog.offer_again(self._clock(), at_once=at_once):
            if (copy := self.copies.get(copy_id)) is not None:
                self._fail(copy, reason)

    def _fail(self, copy: _Copy, reason: str) -> None:
        copy.error = copy.error or reason
        self._step(copy, CopyEvent.ERROR)
        self._settle(copy)

    def _plan(self, copy: _Copy, source_blocks: BlockLists, spans: tuple[Span, ...]) -> list[tuple[PeerRank, Runs | Plan, int]]:
        """The runs of spans by peer, and their bytes.

        What is the same for all layers is worked out once for those that follow each other.
        """
        order = copy.order
        known = self._routes.get(order.peer)
        if known is None:
            raise TransportError(self._unreachable.get(order.peer, f"{order.peer} is not connected"))
        routes = known.reads if order.executor is Executor.TARGET_READS else known.writes
        first, end = max(spans[0].first_token, order.cached_tokens), spans[-1].end_token
        layers = range(spans[0].first_layer, spans[-1].end_layer)
        if len(routes) == 1 and (pages := routes[0].pages) is not None:
            few = pages.pages(source_blocks, order.target_blocks, first, end, order.total_tokens, layers)
            if few is not None and (runs := pages.plan(few)) is not None:
                return [(routes[0].peer, runs, few.wire_bytes)]
        if copy.plan_of != (source_blocks, first, end):
            copy.plans = [
                plan_blocks(route.pair, source_blocks, order.target_blocks, first, end, order.total_tokens) for route in routes
            ]
            copy.plan_of = (source_blocks, first, end)
        plans = [plan_layers(route.pair, plan, layers) for route, plan in zip(routes, copy.plans, strict=True)]
        return [(route.peer, planned, count_bytes(planned)) for route, planned in zip(routes, plans, strict=True)]

    def _complete(self, copy: _Copy, moving: _Moving, completion: Completion) -> None:
        moving.open.discard(completion.ticket)
        moving.moved += completion.moved_bytes
        copy.may_land |= completion.may_land
        if completion.error:
            copy.error = copy.error or completion.error
            self._step(copy, CopyEvent.ERROR)
        self._finish(copy, moving)

    def _finish(self, copy: _Copy, moving: _Moving) -> None:
        """Nothing of these spans is in flight: they are moved, unless bytes are missing that no completion complained of."""
        if moving.is_drained:
            number = moving.spans[0].number
            copy.moving.pop(number, None)
            if copy.state is CopyState.OPEN and moving.moved != moving.planned:
                copy.error = f"{moving.moved} of {moving.planned} bytes of span {number} were moved without an error"
                self._step(copy, CopyEvent.ERROR)
            self._step(copy, CopyEvent.MOVED, moving)
        self._settle(copy)

    def _settle(self, copy: _Copy) -> None:
        if copy.state is not CopyState.OPEN and copy.is_drained:
            self._step(copy, CopyEvent.DRAINED)

    def _step(self, copy: _Copy, event: CopyEvent, moving: _Moving | None = None) -> None:
        """Step the machine and perform the effects of its row, in order; `moving` is what MOVED is about."""
        row = self.table.step(copy.state, event)
        if row is None:
            return
        copy.state = row.state
        for effect in row.effects:
            self._perform(effect, copy, moving)

    def _perform(self, effect: CopyEffect, copy: _Copy, moving: _Moving | None) -> None:
        copy_id = copy.order.copy
        match effect:
            case CopyEffect.REPORT_MOVED:
                if moving is not None:
                    numbers = tuple([span.number for span in moving.spans])
                    report = rank_orders.SpansMoved(copy_id, self.rank, numbers, moving.planned, moving.moved)
                    self._report(report)
            case CopyEffect.CANCEL_POSTED:
                for each in copy.moving.values():
                    each.unposted = 0
                    for ticket in tuple(each.open):
                        self._transport.cancel(ticket)
            case CopyEffect.REPORT_FAILED:
                del self.copies[copy_id]
                self._report(rank_orders.CopyFailed(copy_id, self.rank, copy.error, copy.may_land))
            case CopyEffect.REPORT_STOPPED:
                del self.copies[copy_id]
                self._report(rank_orders.CopyStopped(copy_id, self.rank, copy.may_land))
            case _:
                assert_never(effect)


def _neighbours(spans: tuple[Span, ...]) -> Iterator[tuple[Span, ...]]:
    """Spans in parts that are planned and moved as one: all tokens from the first span's to the last one's, in all layers from
    the first span's to the last one's.

    A part is layers of the same tokens that follow each other, or chunks of the same layers, each in such a row, that do.
    """
    part: tuple[Span, ...] = ()
    for row in span_rows(spans):
        if part and (part[0].first_layer, part[-1].end_layer, part[-1].end_token) == (
            row[0].first_layer,
            row[-1].end_layer,
            row[0].first_token,
        ):
            part += row
        else:
            if part:
                yield part
            part = row
    if part:
        yield part
