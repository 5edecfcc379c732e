"""Simulated transports, one for each promise about late writes. Cells move one by one, at times of their own."""

from __future__ import annotations

import functools
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvbaton.agent.rank import RankAgent
from kvbaton.agent.rank_orders import (
    CloseCopy,
    Connect,
    CopyFailed,
    CopyId,
    Disconnect,
    PutAux,
    RankOrder,
    ReadAux,
    RevokePeer,
    StopCopy,
    SumSpans,
)
from kvbaton.core.card import Endpoint
from kvbaton.core.checks import PiecePlanner
from kvbaton.core.handoff import HandoffKey, Incarnation
from kvbaton.core.lifecycle import CopyState
from kvbaton.core.strips import unroll
from kvbaton.core.timeline import Side
from kvbaton.errors import KVBatonError, QueueFull, TransportError
from kvbaton.sim.memory import RankMemory, TaggedCell
from kvbaton.sim.network import Network
from kvbaton.sim.rank_watch import RankWatch
from kvbaton.sim.world import SimProcess, World
from kvbaton.transport.base import (
    BATCH_BYTES,
    AfterEvent,
    Arrival,
    Batch,
    Completion,
    Direction,
    LateWrites,
    PagesMoved,
    PagingTransport,
    PeerRank,
    Ticket,
)
from kvbaton.transport.runs import Loops, Pages, load_loops

__all__ = ["Fabric", "FencingSimTransport", "ReportingSimTransport", "SimRank", "SimTransport", "find_loops"]

if TYPE_CHECKING:
    from kvbaton.agent.rank import _SumJob

_SEVERED_POLL_S = 0.02
"""How often a batch looks whether its link is whole again, or it was cancelled."""

_OFFER_AGAIN_S = 0.0009
"""What a full queue has refused waits a millisecond at least; clocks drift."""

_FEW_OFFERS, _LONGEST_S = 10, 0.045
"""How often it is offered again while waits double, and how often after that."""

_SHORT = "were moved without an error"
"""How a batch fails that has completed, and not with all its bytes."""

_MOST_RUNS = 512
"""As many as are moved in one call over real memory."""

_ORPHANED_S = 1.0
"""How long a rank goes on after the process of its coordinator has died."""


@functools.cache
def find_loops() -> Loops | None:
    """The loops in C that plan pages, where there is a compiler; looked up once, for they are read from files."""
    return load_loops()


@dataclass(slots=True)
class _PostedBatch:
    ticket: Ticket
    batch: Batch
    copy: CopyId
    session: int
    moves: deque[tuple[int, int, int]]
    pace: float = 1.0
    arrives_at: float = 0.0
    """When the cell that is in flight arrives."""
    moved: int = 0
    cancelled: bool = False
    error: str = ""
    is_short: bool = False
    """Whether it completes without its last cell."""
    is_given_up: bool = False
    """Whether its connection was given up, and not the batch by its owner: what was sent may lie in a buffer of the peer."""


@dataclass(slots=True)
class Fabric:
    """What connects the ranks of all processes: which rank is where, and how long a move takes."""

    world: World
    network: Network
    late_writes: LateWrites
    move_s: float = 0.0005
    uneven: float = 1.0
    """How many times slower every fourth batch is, so that batches overtake each other."""
    library_writes: bool = False
    """Whether writers are as those that are shipped: what failed may land later, and no memory is registered anew."""
    is_plain: bool = False
    """Whether transports do no more than they have to: none reports what arrives, and one that only reads fences nothing."""
    batch_bytes: int = BATCH_BYTES
    stop_within_s: float = math.inf
    """How soon a copy has to be quiet, after its transport was asked to stop it, so that its session is not torn down."""
    ranks: dict[PeerRank, SimTransport] = field(default_factory=dict)
    outlasting: dict[HandoffKey, frozenset[str]] = field(default_factory=dict)
    """Hand-offs of which a cell was in flight for longer, and between which addresses: rightly their session is torn down."""


class SimTransport:
    """The transport of one rank. `allow(at, copy)` checks that a write is inside its epoch.

    It does what the libraries do that write today: it can fence no peer.
    """

    def __init__(
        self,
        fabric: Fabric,
        process: SimProcess,
        me: PeerRank,
        memory: RankMemory,
        allow: Callable[[int, CopyId], None],
        wake: Callable[[], None],
    ) -> None:
        self._fabric = fabric
        self._process = process
        self._me = me
        self.address = process.name.partition("#")[0]
        self._where = f"{self.address} {me.rank}"
        self.memory = memory
        self._allow = allow
        self._wake = wake
        self._loops = find_loops()
        self._last_ticket = 0
        self._posted: dict[Ticket, _PostedBatch] = {}
        self._done: list[Completion] = []
        self._sessions: dict[PeerRank, int] = {}
        self.open_sessions: set[PeerRank] = set()
        self._epoch = 1
        self.peer_epochs: dict[PeerRank, int] = {}
        self._arrivals: list[Arrival] = []
        self.context: CopyId | None = None
        self.fail_next = 0
        self.short_next = 0
        """How many batches complete without their last cell."""
        self.fail_connects = 0
        """How many ranks of peers cannot be reached."""
        self.fail_last = 0
        """How many writes fail when their last byte is in: what would have shown that is lost."""
        self.corrupt_next = 0
        self.refuse_until = self.takes_every_s = 0.0
        """Until when it is full; it takes one batch for each peer in so many seconds then, where that is not 0."""
        self.is_shared = False
        """Whether it takes one for all peers together then."""
        self._taken_at: dict[Incarnation, float] = {}
        self._peer_of: dict[CopyId, Incarnation] = {}
        self.refused_since: dict[CopyId, float] = {}
        """Copies of which a batch was refused, since when, and none was taken."""
        self._refused_at: dict[CopyId, float] = {}
        """When nothing was last taken of each copy, and nothing has completed since."""
        self._offered: dict[CopyId, int] = {}
        """How often a batch of each copy was refused without that anything was taken."""
        self.stall_until = 0.0
        self.is_paired = False
        """Whether its rank exchanges bytes with the same rank of each peer, and with no other."""
        self.errors: dict[CopyId, list[str]] = {}
        """With what batches of each copy have failed, in that order."""
        self.stopped: set[CopyId] = set()
        """Copies that were ordered to stop while they were open."""
        fabric.ranks[me] = self

    @property
    def name(self) -> str:
        return "sim"

    @property
    def late_writes(self) -> LateWrites:
        """The promise that is simulated."""
        return self._fabric.late_writes

    @property
    def directions(self) -> frozenset[Direction]:
        """Where the owner of the target memory executes the copy, there are only reads."""
        if self.late_writes is LateWrites.IMPOSSIBLE:
            return frozenset({Direction.READ})
        return frozenset(Direction)

    @property
    def batch_bytes(self) -> int:
        """Mostly more than any hand-off of a run."""
        return self._fabric.batch_bytes

    @property
    def wakeup_fd(self) -> int:
        """There is none; `wake` is called instead."""
        return -1

    def endpoint(self) -> Endpoint:
        return Endpoint("sim", len(self.memory.cells) + len(self.memory.aux), {})

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        """Open a session with `peer`; an earlier one stays closed."""
        if endpoint.transport != self.name:
            self._fabric.world.find("as set", f"{self._where}: {peer} is connected by {endpoint}")
        if self.fail_connects > 0:
            self.fail_connects -= 1
            raise TransportError("the simulated connection failed")
        if self.is_paired and peer.rank != self._me.rank:
            self._fabric.world.find("as set", f"{self._where}: a session with {peer}, with which it exchanges nothing")
        if peer not in self.open_sessions:
            self._sessions[peer] = self._sessions.get(peer, 0) + 1
            self.open_sessions.add(peer)

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        """Start moving cells, one event each."""
        del after
        runs = unroll(batch.runs)
        if not len(runs):
            self._fabric.world.find("nothing twice", f"{self._where}: a batch without a run: {self.context}")
        now, peer = self._fabric.world.now, batch.peer.incarnation
        local = self._process.clock.local(now)
        if self.context is not None:
            self._peer_of[self.context] = peer
        taken_at = max(self._taken_at.values(), default=-math.inf) if self.is_shared else self._taken_at.get(peer, -math.inf)
        takes_one = 0.0 < self.takes_every_s <= local - taken_at
        if self.refuse_until > now and not takes_one:
            is_aux = len(runs) > 0 and runs[0][1] >= len(self.memory.cells)
            if self.context is not None and not is_aux:
                self.refused_since.setdefault(self.context, self._fabric.world.now)
                self._check_wait(self.context)
            raise QueueFull("queue full: refused by the simulation; post again")
        self._taken_at[peer] = local
        self.refused_since.clear()
        self._offered.clear()
        self._last_ticket += 1
        ticket = Ticket(self._last_ticket)
        moves = deque(move for run in runs.tolist() for move in self._moves(batch.direction, *run))
        copy = self.context
        assert copy is not None, "a batch belongs to a copy"  # noqa: S101
        owner = self._fabric.ranks.get(batch.peer)
        session = 0 if owner is None else owner._sessions.get(self._me, 0)  # noqa: SLF001
        posted = _PostedBatch(ticket, batch, copy, session, moves)
        if self._fabric.uneven > 1.0 and self._fabric.world.random.random() < 0.25:
            posted.pace = self._fabric.uneven
        self._fabric.world.use(f"post {self._where}")
        if self.fail_next > 0:
            self.fail_next -= 1
            posted.error = "TransportError: the simulated copy failed"
            posted.is_given_up = True
        self._posted[ticket] = posted
        self._schedule(posted)
        return ticket

    def move_pages(self, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        """Start moving their cells, as `post` does; not while it is full, which only `post` reports."""
        is_full = self.refuse_until > self._fabric.world.now
        runs = None if self._loops is None or is_full else self._loops.plan_pages(pages, _MOST_RUNS)
        if runs is None or pages.wire_bytes > self.batch_bytes:
            return None
        return PagesMoved(self.post(Batch(peer, Direction.READ, runs)), len(runs))

    def _check_wait(self, copy: CopyId) -> None:
        """What was refused is not offered again before something may have changed: a completion, a peer that is gone, or time.

        Another copy may be offered at once: the first one may have been given up.
        """
        now = self._fabric.world.now
        if (before := self._refused_at.get(copy)) is not None and now - before < _OFFER_AGAIN_S:
            self._fabric.world.find("no needless message", f"{self._where}: offered again after {now - before:.6f} s")
        self._refused_at[copy] = now
        self._offered[copy] = self._offered.get(copy, 0) + 1
        if self._offered[copy] > _FEW_OFFERS + (now - self.refused_since[copy]) / _LONGEST_S:
            detail = f"{self._where}: offered {self._offered[copy]} times since {self.refused_since[copy]:.4f}"
            self._fabric.world.find("no needless message", detail)

    @property
    def has_completed(self) -> bool:
        """Whether there is something to poll."""
        return bool(self._done)

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            self._refused_at.clear()
            self._offered.clear()
        return done

    def cancel(self, ticket: Ticket) -> None:
        """Ask a batch to stop; the cell that is in flight still arrives, as a posted RDMA write would."""
        if (posted := self._posted.get(ticket)) is not None:
            posted.cancelled = True
            if posted.arrives_at - self._fabric.world.now > self._fabric.stop_within_s:
                peer = self._fabric.ranks.get(posted.batch.peer)
                ends = frozenset({self.address, self.address if peer is None else peer.address})
                self._fabric.outlasting[posted.copy.key] = ends
            if self._is_severed_from(self._fabric.ranks.get(posted.batch.peer)):
                posted.is_given_up = True
                # Nothing is in flight: it need not wait until the link is looked at again.
                self._fabric.world.at(max(self._fabric.world.now, self.stall_until), self._process, lambda: self._move(posted))

    def may_have_room(self) -> None:
        """A peer is gone, maybe one that was gone before: what waits is offered at once, although it was refused just now."""
        self._refused_at.clear()

    def revoke(self, peer: PeerRank) -> None:
        """Close the session with `peer`, both ways: what it posted to us under it never lands, what we posted to it fails."""
        self.open_sessions.discard(peer)
        self.may_have_room()
        for posted in self._posted.values():
            if posted.batch.peer == peer:
                posted.error = posted.error or "PeerLost: the session was torn down"

    def failure_problem(self, report: CopyFailed) -> str:
        """What is wrong with the report that a copy has failed: the first error counts, and what was stopped has stopped."""
        errors = self.errors.pop(report.copy, [])
        if report.copy in self.stopped:
            return f"it was ordered to stop: {report}"
        is_first = bool(errors) and (_SHORT if _SHORT in report.reason else report.reason) == errors[0]
        if errors and not is_first and "queue full" not in report.reason:
            return f"its first error was {errors[0]}: {report}"
        if "nothing was taken for" in report.reason and (peer := self._peer_of.get(report.copy)) is not None:
            timeout_s = float(report.reason.split()[-2])
            since = self._taken_at.get(peer, -math.inf)
            if self._process.clock.local(self._fabric.world.now) - since < timeout_s / 2:
                return f"a batch to that peer was taken at {since:.4f}: {report}"
        return ""

    def close(self) -> None:
        """Nothing to give back."""

    def _schedule(self, posted: _PostedBatch, is_severed: bool = False) -> None:
        delay = (
            _SEVERED_POLL_S if is_severed else posted.pace * self._fabric.move_s * self._fabric.world.random.uniform(0.2, 2.0)
        )
        posted.arrives_at = self._fabric.world.now + delay
        when = max(posted.arrives_at, self.stall_until)
        world = self._fabric.world
        mover = self._process if self.late_writes is LateWrites.IMPOSSIBLE else world.outside
        world.at(when, mover, lambda: self._move(posted))

    def _move(self, posted: _PostedBatch) -> None:
        """Move one cell, or complete."""
        if not (self._process.is_alive or self._outlives_leader) or posted.ticket not in self._posted:
            return
        if posted.error or not posted.moves:
            self._complete(posted)
            return
        peer = self._fabric.ranks.get(posted.batch.peer)
        is_severed = self._is_severed_from(peer) or (peer is not None and peer._has_yet_to_connect(self._me, posted))  # noqa: SLF001
        if peer is None or not peer._process.is_alive:  # noqa: SLF001
            posted.error = "PeerLost: the peer is gone"
        elif is_severed:
            pass
        elif posted.batch.direction is Direction.READ:
            self._carry(posted, peer, self)
            self._lose_last(posted)
        elif not peer._accepts(self._me, posted):  # noqa: SLF001
            posted.error = "PeerRefused: the session was torn down, or the memory registered anew"
        else:
            self._carry(posted, self, peer)
            self._lose_last(posted)
            if self.fail_last > 0 and not posted.moves:
                self.fail_last -= 1
                posted.error = "PeerLost: the connection was closed before the last reply"
        if posted.cancelled:
            self._complete(posted)
        else:
            self._schedule(posted, is_severed)

    def _lose_last(self, posted: _PostedBatch) -> None:
        """Complete without the last cell, and without an error: the count of bytes shows it."""
        if self.short_next > 0 and len(posted.moves) == 1 and posted.moves[0][1] < len(self.memory.cells):
            self.short_next -= 1
            posted.moves.clear()
            posted.is_short = True

    def _has_yet_to_connect(self, writer: PeerRank, posted: _PostedBatch) -> bool:
        """Whether a write waits for its session: this rank may get the order to connect after the writer got the grant."""
        is_write = posted.batch.direction is Direction.WRITE
        if is_write and not posted.session:
            posted.session = self._sessions.get(writer, 0)
        return is_write and not posted.session

    def _is_severed_from(self, peer: SimTransport | None) -> bool:
        return peer is not None and self._fabric.network.is_severed(self.address, peer.address)

    def _moves(self, direction: Direction, source: int, target: int, count: int) -> list[tuple[int, int, int]]:
        """How a run moves: cell by cell, or at once where it is an aux record, which is always read."""
        if direction is Direction.READ and target >= len(self.memory.cells):
            return [(source, target, count)]
        return [(source + index, target + index, 1) for index in range(count)]

    def _carry(self, posted: _PostedBatch, giver: SimTransport, taker: SimTransport) -> None:
        source, target, count = posted.moves.popleft()
        self._fabric.world.use(f"move {self._where}")
        is_corrupt, self.corrupt_next = self.corrupt_next > 0, max(0, self.corrupt_next - 1)
        if source >= len(giver.memory.cells):
            data = bytearray(giver.memory.read(source, count))
            data[0] ^= 0xFF if is_corrupt else 0
            taker.memory.write(target, bytes(data))
        else:
            cell = giver.memory.cells[source]
            taker.land(target, cell.corrupted() if is_corrupt else cell, posted.copy)
        posted.moved += count
        if posted.batch.notice and not posted.moves:
            taker.on_arrival(Arrival(self._me, posted.batch.notice, posted.moved))

    def on_arrival(self, arrival: Arrival) -> None:
        """A write of a peer is complete; only one that can fence a peer counts them."""

    def land(self, at: int, cell: TaggedCell, copy: CopyId) -> None:
        """Put one cell into this rank's memory; a write outside its epoch is noticed here."""
        self._allow(at, copy)
        self.memory.cells[at] = cell

    def _accepts(self, writer: PeerRank, posted: _PostedBatch) -> bool:
        """Whether a peer's write still lands: registering anew stops every writer, a torn-down session only a revocable one."""
        if posted.batch.epoch < self._epoch:
            return False
        if posted.batch.epoch < self.peer_epochs.get(writer, 0) and self.late_writes is LateWrites.REVOCABLE:
            return False
        is_open = writer in self.open_sessions and self._sessions.get(writer, 0) == posted.session
        return is_open or self.late_writes is LateWrites.UNFENCED

    @property
    def _outlives_leader(self) -> bool:
        """Whether this rank has yet to notice that the process of its coordinator is dead."""
        return self._fabric.library_writes and self._fabric.world.now < self._process.died_at + _ORPHANED_S

    def _land_late(self, posted: _PostedBatch) -> None:
        """What was on its way when the batch failed, or was cancelled, lands after all."""
        peer = self._fabric.ranks.get(posted.batch.peer)
        if peer is not None and posted.moves and posted.batch.direction is Direction.WRITE:
            self._carry(posted, self, peer)

    def _may_land(self, posted: _PostedBatch) -> bool:
        """Whether it is known, and reported, that bytes of a batch which has ended may land: libraries do not state that."""
        del posted
        return False

    def _complete(self, posted: _PostedBatch) -> None:
        del self._posted[posted.ticket]
        may_land = self._may_land(posted)
        if may_land or (self._fabric.library_writes and posted.error):
            late_s = self._fabric.world.random.choice((0.1, 1.0, 5.0))
            self._fabric.world.after(late_s, None, lambda: self._land_late(posted))
        error = posted.error or ("cancelled" if posted.cancelled and posted.moves else "")
        if error or posted.is_short:
            self.errors.setdefault(posted.copy, []).append(error or _SHORT)
        self._done.append(Completion(posted.ticket, posted.moved, error, bool(error) and posted.cancelled, may_land))
        self._fabric.world.at(self._fabric.world.now, self._process, self._wake)


class FencingSimTransport(SimTransport):
    """One that can fence a peer, or all of them by registering its memory anew; as one that wraps `tcp` with `fenced_writes`.

    What it had sent over a connection that it gives up may be stored by its peer later, until that fences it.
    """

    def _may_land(self, posted: _PostedBatch) -> bool:
        is_write = posted.batch.direction is Direction.WRITE and self.late_writes is LateWrites.REVOCABLE
        return posted.is_given_up and is_write and bool(posted.moves)

    def _land_late(self, posted: _PostedBatch) -> None:
        peer = self._fabric.ranks.get(posted.batch.peer)
        if peer is not None and peer._process.is_alive and peer._accepts(self._me, posted):  # noqa: SLF001
            super()._land_late(posted)

    def fence_peer(self, peer: PeerRank, epoch: int) -> None:
        self.peer_epochs[peer] = max(epoch, self.peer_epochs.get(peer, 0))

    def reset_region(self, epoch: int) -> None:
        self._epoch = max(epoch, self._epoch)


class ReportingSimTransport(FencingSimTransport):
    """One that reports what has arrived, too; as `tcp` itself."""

    def on_arrival(self, arrival: Arrival) -> None:
        """Report it here at once; the writer learns it one move later."""
        self._arrivals.append(arrival)
        self._fabric.world.at(self._fabric.world.now, self._process, self._wake)

    def take_arrivals(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals


class SimRank(RankAgent):
    """A rank agent that names the copy of each batch to its simulated transport, so that writes can be checked."""

    _reads_aux = False

    def watch_turns(self, watch: RankWatch, world: World) -> None:
        """Have its turns looked at."""
        self._watch, self._world = watch, world
        vars(self._summer).update(_planned=partial(self._plan_and_check, vars(type(self._summer))["_planned"]))

    def handle(self, order: RankOrder) -> None:
        """Carry out one order."""
        self._watch.on_order(order)
        if isinstance(order, StopCopy) and order.copy in self.copies and isinstance(self._transport, SimTransport):
            self._transport.stopped.add(order.copy)
        if isinstance(order, CloseCopy) and (copy := self.copies.get(order.copy)) is not None and not copy.is_drained:
            self._world.find("nothing kept", f"rank {self.rank}: more of it is moving: {order}")
        self._reads_aux = isinstance(order, ReadAux)
        if isinstance(order, Connect):
            self._connect_and_check(order)
        elif isinstance(order, SumSpans):
            self._sum_and_check(order)
        elif isinstance(order, Disconnect | RevokePeer):
            self._part_and_check(order)
        else:
            super().handle(order)
        self._reads_aux = False
        if isinstance(order, Disconnect | RevokePeer | PutAux) and isinstance(self._transport, SimTransport):
            self._check_done(self._transport, order)

    def _connect_and_check(self, order: Connect) -> None:
        error = ""
        try:
            super().handle(order)
        except KVBatonError as raised:
            error = str(raised)
            raise
        finally:
            sessions = self._transport.open_sessions if isinstance(self._transport, SimTransport) else ()
            if problem := self._watch.connected_problem(
                order, error, is_first=self.rank == 0, sessions=sessions, routes=self._routes, unreachable=self._unreachable
            ):
                self._world.find("nothing kept", f"rank {self.rank}: {problem}")

    def _part_and_check(self, order: Disconnect | RevokePeer) -> None:
        """Every rank is fenced that the peer may write from, and what waits for the peer is offered: it is gone."""
        routes, transport, offers = self._routes.get(order.incarnation), self._transport, self._watch.offers
        waiting = [
            copy
            for each in vars(self._backlog)["_peers"].values()
            for part in each.parts
            if (copy := self.copies.get(part.copy)) is not None and copy.state is CopyState.OPEN
        ]
        if isinstance(transport, SimTransport):
            transport.may_have_room()
        super().handle(order)
        if isinstance(order, RevokePeer) and transport.late_writes is LateWrites.UNFENCED:
            return
        if waiting and self._watch.offers == offers:
            self._world.find("prompt", f"rank {self.rank}: {len(waiting)} parts wait, and none was offered after {order}")
        if isinstance(order, RevokePeer) and routes is not None and isinstance(transport, FencingSimTransport):
            unfenced = [peer for peer in routes.peers if transport.peer_epochs.get(peer, 0) < order.epoch]
            if unfenced:
                self._world.find("fenced everywhere", f"rank {self.rank}: {unfenced} are not after {order}")

    def _sum_and_check(self, order: SumSpans) -> None:
        """What is soon summed in one go does not wait for a turn."""
        waiting = vars(self._summer)["_jobs"]
        before = len(waiting.get((order.side, order.copy.key), ()))
        super().handle(order)
        size, most = self._most_cells(order), self._summer.at_once_bytes
        if size is not None and size <= most and len(waiting.get((order.side, order.copy.key), ())) > before:
            self._world.find("prompt", f"rank {self.rank}: {size} cells wait, and {most} are summed at once: {order}")

    def _plan_and_check(
        self, plan: Callable[..., _SumJob | None], order: SumSpans, legs: Mapping[int, PiecePlanner]
    ) -> _SumJob | None:
        """Piece by piece is slow: what can be summed in one go, and within a turn, is not summed that way."""
        size, most = self._most_cells(order), self._summer.turn_bytes
        if size is not None and size <= most:
            self._world.find("prompt", f"rank {self.rank}: {size} cells of {most} are summed piece by piece: {order}")
        return plan(self._summer, order, legs)

    def _most_cells(self, order: SumSpans) -> int | None:
        """How many cells are summed for an order; None where that is not possible in one go."""
        routes = self._routes.get(order.peer)
        own = () if routes is None else routes.writes if order.side is Side.SOURCE else routes.reads
        if len(own) != 1 or not isinstance(self._memory, RankMemory):
            return None
        key, given = order.copy.key, (order.cached_tokens, order.integrity)
        blocks = own[0].sums.block_sums(order.blocks, key, order.spans, *given)
        return None if blocks is None else self._memory.most_cells(blocks)

    def _check_done(self, transport: SimTransport, order: Disconnect | RevokePeer | PutAux) -> None:
        problem = ""
        if isinstance(order, PutAux):
            is_there = self._memory is not None and self._memory.read(order.offset, len(order.data)) == order.data
            problem = "" if is_there else f"not there: {order}"
        elif isinstance(order, Disconnect) or transport.late_writes is not LateWrites.UNFENCED:
            epochs = transport.peer_epochs if isinstance(transport, FencingSimTransport) else None
            problem = self._watch.session_problem(
                order, sessions=transport.open_sessions, routes=self._routes.keys(), epochs=epochs
            )
        if problem:
            self._world.find("taken", f"{transport.address} rank {self.rank}: {problem}")

    def start(self, copy_id: CopyId, batch: Batch) -> Ticket:
        """Hand one batch of a copy to the transport."""
        copy = self.copies.get(copy_id)
        if copy is not None and copy.state is not CopyState.OPEN and not self._reads_aux:
            self._world.find("nothing twice", f"rank {self.rank}: {copy_id} is {copy.state}, and more of it is posted")
        if isinstance(self._transport, SimTransport):
            self._transport.context = copy_id
        is_waiting = batch.peer in vars(self._backlog)["_peers"]
        try:
            ticket = super().start(copy_id, batch)
        except QueueFull:
            self._watch.on_offer(batch.peer, is_taken=False, is_waiting=is_waiting)
            raise
        self._watch.on_offer(batch.peer, is_taken=True, is_waiting=is_waiting)
        return ticket

    def start_pages(self, copy_id: CopyId, transport: PagingTransport, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        """Hand pages of a copy to the transport."""
        if isinstance(transport, SimTransport):
            transport.context = copy_id
        if vars(self._backlog)["_peers"]:
            self._world.find("prompt", f"rank {self.rank}: pages of {copy_id} overtake what waits")
        moved = super().start_pages(copy_id, transport, peer, pages)
        if moved is not None:
            self._watch.on_offer(peer, is_taken=True, is_waiting=False)
        return moved

    def next_deadline(self) -> float | None:
        """When it wants its next turn."""
        deadline = super().next_deadline()
        waiting = vars(self._backlog)["_peers"]
        if waiting and (problem := self._watch.deadline_problem(deadline, [each.retry_at for each in waiting.values()])):
            self._world.find("alarm", f"rank {self.rank}: {problem}")
        return deadline

    def poll(self) -> None:
        """Take a turn."""
        transport, memory, watch = self._transport, self._memory, self._watch
        if not isinstance(transport, SimTransport) or not isinstance(memory, RankMemory) or not self._has_turn(transport):
            super().poll()
            return
        has_completed, waiting = transport.has_completed, len(self._backlog)
        watch.begin_turn(vars(self._backlog)["_peers"])
        jobs = vars(self._summer)["_jobs"]
        first = next(iter(jobs), None)
        memory.summed, memory.largest, memory.most, memory.is_late = 0, 0, self._summer.turn_bytes, False
        super().poll()
        memory.most = sys.maxsize
        offered = watch.offer_problem(has_completed=has_completed, waiting=(waiting, len(self._backlog)))
        summed = watch.turn_problem(memory.summed, memory.largest, self._summer.turn_bytes, is_late=memory.is_late)
        if problem := offered or summed or watch.turns_problem(first, tuple(jobs)):
            self._world.find("prompt", f"{transport.address} rank {self.rank}: {problem}")

    def _has_turn(self, transport: SimTransport) -> bool:
        return self._summer.has_work or (self._backlog.has_parts and transport.has_completed)
