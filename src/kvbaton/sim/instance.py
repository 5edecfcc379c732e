"""One simulated instance: the production coordinator and rank agents behind simulated ports, with a model of an engine."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import assert_never

from msgspec import structs

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import EngineEvent, SourceEnded, SourceRequest, TargetEnded
from kvbaton.agent.ports import ControlSocketsPort
from kvbaton.agent.rank import RankAgent, Summer
from kvbaton.agent.rank_orders import (
    Arrived,
    AuxRead,
    Connect,
    CopyFailed,
    CopyId,
    CopyStopped,
    Disconnect,
    MoveSpans,
    OpenCopy,
    PeerFenced,
    RankOrder,
    RankReport,
    ReadAux,
    RegionFenced,
    ResetRegion,
    RevokePeer,
    SpansMoved,
    SpansPlanned,
    SpansSummed,
    StopCopy,
    SumSpans,
)
from kvbaton.agent.rank_sets import RemoteRanks
from kvbaton.agent.source import SourceRecord
from kvbaton.agent.target import TargetRecord
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits, OnFailure, Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card, Endpoint, ProcessId, RankCard
from kvbaton.core.checks import ONE_IN, size_worth_summing
from kvbaton.core.grants import REACH, GrantWindows
from kvbaton.core.handoff import Executor, HandoffKey, Incarnation, Integrity, Mode, Outcome, TransferId
from kvbaton.core.layout import Layout
from kvbaton.core.lifecycle import SourceState, TargetState
from kvbaton.core.messages import (
    MAX_NUMBER,
    Announced,
    ConfirmAsk,
    Confirmed,
    Envelope,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Release,
    Stop,
    Stopped,
    decode,
    encode,
    split,
)
from kvbaton.core.timeline import Note
from kvbaton.errors import Bug, ProtocolError
from kvbaton.sim.agent_thread import AgentThread, SimDriver, ThreadBell
from kvbaton.sim.alarm_watch import watch_alarms
from kvbaton.sim.beat_watch import watch_beats
from kvbaton.sim.contradictions import Contradiction, contradict
from kvbaton.sim.decline_watch import (
    notice_problems,
    watch_declines,
    watch_notice_waits,
    watch_questions,
    watch_target_waits,
)
from kvbaton.sim.effect_watch import watch_calls, watch_effects, watch_losses, watch_repeats
from kvbaton.sim.embedded_engine import EMBEDDED, EmbeddedClasses, EmbeddedEngine
from kvbaton.sim.engine import SimEngine, SourceEngine, TargetEngine
from kvbaton.sim.engine_watch import EngineWatch
from kvbaton.sim.memory import RankMemory, SimBlockPool, make_layout
from kvbaton.sim.network import Network
from kvbaton.sim.peer_watch import (
    HASTE,
    CardWatch,
    DialWatch,
    NoticeWatch,
    QuestionWatch,
    WatchedPeers,
    address_problems,
    beat_problems,
    gone_problems,
    source_problems,
    watch_dials,
    watch_gone,
    watch_ticks,
)
from kvbaton.sim.rank_processes import RankProcess, SimSocket, channel_on, socket_pair
from kvbaton.sim.rank_watch import RankWatch
from kvbaton.sim.reactions import Reactions
from kvbaton.sim.received import Received
from kvbaton.sim.records import (
    Causes,
    Fences,
    Waits,
    alarm_problems,
    count_problems,
    sequence_problems,
    stop_problems,
    tables_problems,
)
from kvbaton.sim.script import VllmScript
from kvbaton.sim.source_watch import SourceWatch
from kvbaton.sim.stamps import Boards, SimStamps, stamp_problems
from kvbaton.sim.stray_calls import StrayCalls
from kvbaton.sim.strays import (
    asked_anyhow,
    before_its_grant,
    may_come_from_others,
    of_another_release,
    over_of_another,
    stray_of,
)
from kvbaton.sim.tag_model import TagCache, TagCacheShape
from kvbaton.sim.target_watch import TargetWatch
from kvbaton.sim.transport import Fabric, FencingSimTransport, ReportingSimTransport, SimRank, SimTransport, find_loops
from kvbaton.sim.virtual_sockets import VirtualMachine, Wires
from kvbaton.sim.vllm_engine import VllmEngine
from kvbaton.sim.vllm_workers import VLLM, VllmClasses
from kvbaton.sim.watch import Watch
from kvbaton.sim.watched_sockets import WatchedSockets
from kvbaton.sim.window_watch import watch_windows
from kvbaton.sim.world import SimClock, SimProcess, World
from kvbaton.transport.base import LateWrites, PeerRank

__all__ = ["Bugs", "Cluster", "InstanceShape", "SimInstance"]

_WORK_S = 1e-4
_FEW_ENDS = 4
_FEW_GRANTS = 8
_EVERY_GRANT = 20
"""How many bad grants have to be left for each to take the place of the real one."""

_QUESTIONS = (Grant, ConfirmAsk, Stop)
_INTRODUCTIONS = (Hello, Refused)
_SMALL_S = 1e-6
_SHUT_DOWN_S = 0.1
_NO_SUM = "checksum: no such memory"
_STRAY = 0.5
_WAITING = frozenset({TargetState.GRANTED, TargetState.FILLING, TargetState.CLEARING})
_ENDING = frozenset({SourceState.STOPPING, TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
_WORK = (OpenCopy, MoveSpans, SumSpans, ReadAux)
_STRAY_S = 0.003, 0.05
"""How much later than the message that they resemble: that one arrives first."""


@lru_cache(maxsize=64)
def _address_of(host: str) -> ControlAddress:
    return ControlAddress.of(host, 1)


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """How large an instance is."""

    ranks: int
    blocks: int
    layers: int


@dataclass(frozen=True, slots=True)
class Bugs:
    """Which classes to build an instance from; planted bugs replace some of them."""

    coordinator: type[Coordinator] = Coordinator
    rank: type[RankAgent] = SimRank
    remote_ranks: type[RemoteRanks] = RemoteRanks
    driver: type[SimDriver] = SimDriver
    sockets: type[WatchedSockets] = WatchedSockets
    source_engine: type[SourceEngine] = SourceEngine
    target_engine: type[TargetEngine] = TargetEngine
    stamps: type[SimStamps] = SimStamps
    embedded: EmbeddedClasses = EMBEDDED
    vllm: VllmClasses = VLLM


@dataclass(slots=True)
class Cluster:
    """What all instances of a run share."""

    world: World
    network: Network
    fabric: Fabric
    limits: Limits
    bugs: Bugs
    one_host: bool
    unfenced_writes: bool
    settings: HandoffSettings = DEFAULT_HANDOFF
    rank_lag_s: float = 0.0
    """How long an order to a rank, or a report of one, is under way at most; 0: ranks live in the coordinator's process."""
    wires: Wires | None = None
    """Where the control sockets of production are run, and not only what is behind them: what those are connected by."""
    has_driver: bool = False
    """Whether instances whose ranks live in processes of their own are run by the driver of production."""
    mode: Mode = Mode.PUSH
    on_failure: OnFailure = OnFailure.FAIL
    both_roles: bool = False
    step_tokens: int = 1
    """How engines of production are set; the last of it, the next one that is started."""
    vllm: VllmScript | None = None
    """How the next one is set up if it is a vLLM."""
    is_forgetful: bool = False
    """Whether what instances remember of ends and of grants is bounded by a few entries."""
    most_peers: int = 0
    most_parked: int = 0
    """How many cards of peers an instance keeps; 0 for as many as in production."""
    few_cells: int = 0
    """How many cells a rank sums in one turn, and moves in one batch; 0 for as many as in production."""
    without_area: tuple[str, ...] = ()
    hasty: tuple[str, ...] = ()
    """Addresses of instances whose cards state that they wait for a silent source for less long."""
    strangers: tuple[str, ...] = ()
    """Addresses of instances without an area for aux records, and of those that serve another model."""
    has_foreigners: bool = False
    """Whether frames may arrive that are no messages of ours; they are counted, not a violation."""
    instances: dict[str, SimInstance] = field(default_factory=dict)
    processes: dict[int, SimProcess] = field(default_factory=dict)
    confirmed: set[tuple[str, HandoffKey, int]] = field(default_factory=set)
    released: set[tuple[str, HandoffKey, int]] = field(default_factory=set)
    """Target, key and grant of every `Confirmed` and `Release` that was ever sent; confirmed is what has shown a stamp, too."""
    boards: Boards = field(default_factory=Boards)
    stamped: dict[tuple[str, HandoffKey, int], int] = field(default_factory=dict)
    """By target, key and grant: the stamp that its first release names."""
    born: dict[Incarnation, SimInstance] = field(default_factory=dict)
    """Every instance that there ever was."""
    births: int = 0
    watch: Watch = field(init=False)

    def arrive(self, address: str, frame: bytes, sender_address: str) -> None:
        """A frame has come through the network: the instance that lives at the address now gets it."""
        instance = self.instances.get(address)
        if instance is not None:
            self.world.at(self.world.now, instance.process, lambda: instance.on_frame(frame, sender_address))


class _SimControl:
    """What the coordinator sends with; and what a driver reads, in place of its sockets."""

    frames_per_turn = 2

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance
        self.address = instance.control_address
        self.trust = Trust()
        self.dropped_total: Counter[str] = Counter()

    def receive(self) -> Iterator[tuple[Envelope, ControlAddress | None]]:
        """Read what has arrived, so many frames at a time; the rest wakes the driver again."""
        instance = self._instance
        for _ in range(min(len(instance.frames), self.frames_per_turn)):
            yield instance.frames.popleft()
        if instance.frames and instance.thread is not None:
            instance.thread.wake()

    def wait(self, timeout_s: float, wakeups: list[int]) -> bool:
        """A thread of the simulator does not wait: it is given its turns."""
        raise Bug(f"a wait of {timeout_s} s for {wakeups} in virtual time")

    def certificate_loads_total(self) -> int:
        """There are no certificates."""
        return 0

    def failed_certificate_loads_total(self) -> int:
        """There are no certificates."""
        return 0

    def close(self) -> None:
        """Nothing to give back."""

    def refusals(self) -> list[tuple[ControlAddress, str]]:
        """None: whatever is dialled is a peer, or nothing."""
        return []

    def dial(self, address: ControlAddress, message: Message) -> None:
        self._instance.on_dial(address)
        self._instance.send_frame(address.host, "", message)

    def hang_up(self, address: ControlAddress) -> None:
        """A simulated dial is one frame, and is not repeated by itself: only whether it was time to hang up is looked at."""
        self._instance.check_hang_up(address)

    def send(self, peer: Incarnation, message: Message) -> None:
        address = self._instance.routes.get(peer)
        if address is None:
            # Of no peer that has ever sent anything, sockets know no way to it either.
            detail = f"{self._instance.process.name} sends to {peer}, of which nothing was received: {message}"
            self._instance.cluster.world.find("no needless message", detail)
        else:
            self._instance.send_frame(address, peer, message)

    def is_gone(self, process: ProcessId) -> bool:
        return self._instance.is_gone(process)


def _transport_of(fabric: Fabric) -> type[SimTransport]:
    if fabric.library_writes or (fabric.is_plain and fabric.late_writes is LateWrites.IMPOSSIBLE):
        return SimTransport
    return FencingSimTransport if fabric.is_plain else ReportingSimTransport


class _SimRanks:
    """Passes orders to the rank agents: at once, or to loops of their own, where they are under way for a while."""

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance

    @property
    def executor(self) -> Executor:
        return self._instance.agents[0].executor

    @property
    def counts_arrivals(self) -> bool:
        return self._instance.agents[0].counts_arrivals and not self._instance.loops

    @property
    def fences_writers(self) -> bool:
        return self._instance.agents[0].fences_writers

    def send(self, rank: int, order: RankOrder) -> None:
        self._instance.cluster.watch.on_order(self._instance.process.name, rank, order)
        self._instance.check_needed_order(order)
        if isinstance(order, StopCopy):
            self._instance.stopped_copies.add((rank, order.copy))
        if rank == 0 and (problem := self._instance.source_watch.order_problem(order)):
            self._instance.cluster.world.find("as set", f"{self._instance.process.name}: {problem}")
        self._instance.source_watch.on_order(rank, order)
        if problem := self._instance.target_watch.order_problem(order):
            self._instance.cluster.world.find("as set", f"{self._instance.process.name}: {problem}")
        if self._instance.remote is not None:
            self._instance.send_order(rank, order)
        else:
            self._instance.agents[rank].handle(order)

    def send_all(self, order: RankOrder) -> None:
        if isinstance(order, Connect):
            self._instance.gone.discard(order.card.incarnation)
        elif isinstance(order, Disconnect):
            self._instance.gone.add(order.incarnation)
        if isinstance(order, RevokePeer) and self._instance.lose_revokes > 0:
            self._instance.lose_revokes -= 1
            return
        if isinstance(order, ResetRegion) and (problem := self._instance.source_watch.reset_problem()):
            self._instance.cluster.world.find("nothing twice", f"{self._instance.process.name}: {problem}")
        for rank in range(len(self._instance.agents)):
            self.send(rank, order)


def _counted(record: SourceRecord | TargetRecord) -> tuple[float, ...]:
    """What reports of ranks add to."""
    counts = sum(map(len, record.moved.values())), len(record.sums)
    if isinstance(record, TargetRecord):
        return *counts, record.arrived_bytes, record.give_up_at
    return *counts, record.written_bytes


def _may_count(report: SpansMoved | SpansPlanned | SpansSummed | Arrived, record: SourceRecord | TargetRecord) -> bool:
    """Whether a report is about what a hand-off has in hand; bytes that have come may be the first of its next generation."""
    copy, in_hand = report.copy, record.copy
    is_next = copy.grant == in_hand.grant and copy.generation > in_hand.generation
    return copy == in_hand or (is_next and isinstance(report, Arrived) and isinstance(record, TargetRecord))


class SimInstance:
    """A process at an address, with a model of an engine for its role; with the shape of a cache, an engine of production."""

    def __init__(
        self, cluster: Cluster, address: str, role: str, shape: InstanceShape | TagCacheShape, clock: SimClock
    ) -> None:
        cluster.births += 1
        self.cluster = cluster
        self._world, self._clock = cluster.world, clock
        self.address = address
        self.role = role
        self.shape = shape
        self.process = SimProcess(f"{address}#{cluster.births}", clock)
        cluster.processes[cluster.births] = self.process
        self.incarnation = Incarnation(f"{address}#{cluster.births}")
        cluster.born[self.incarnation] = self
        self.dialled: set[str] = set()
        self.unanswered: set[str] = set()
        """Addresses that were dialled, and from which no card or refusal has come since."""
        self.hung_up: set[ControlAddress] = set()
        """Addresses that were hung up on, and not dialled since."""
        self.routes: dict[Incarnation, str] = {}
        self.granted: dict[tuple[HandoffKey, int], int] = {}
        self._sequences: dict[int, int] = {}
        self._used_sequences: dict[Incarnation, int] = {}
        self.gone: set[Incarnation] = set()
        """Peers whose sessions were ended, and with which no new one was begun."""
        self.lose_revokes = 0
        self.failing_sums = 0
        """How many spans cannot be summed, but for the first of each hand-off."""
        self._unsummed: set[HandoffKey] = set()
        self.is_of_another_release = False
        self.stopped_copies: set[tuple[int, CopyId]] = set()
        self.is_no_peer = False
        """Whether something else answers at its address."""
        self.contradiction: Contradiction | None = None
        """What it is wrong about in what it sends as a source."""
        self.bad_grants = 0
        self.strays = 0
        self.dropped_total: Counter[str] = Counter()
        self._reports: deque[RankReport] = deque()
        self.loops: list[RankProcess] = []
        self._ends: list[SimSocket] = []
        """The coordinator's end of the channel to each rank in a process of its own."""
        self.thread: AgentThread | None = None
        self.machine: VirtualMachine | None = None
        """What the control sockets of production are run on, where they are."""
        self.frames: deque[tuple[Envelope, ControlAddress | None]] = deque()
        """What has arrived, and the driver has yet to read."""
        self.remote: RemoteRanks | None = None
        """Where ranks live in processes of their own: what production sends orders and takes reports with."""
        self._fenced: dict[Incarnation | None, dict[int, int]] = {}
        """By peer, and None for all of them: in which epoch each rank has fenced it last."""
        self._moved: dict[tuple[int, CopyId], set[int]] = {}
        self._sent: list[tuple[str, Message]] = []
        """What was sent since the last frame arrived, and to whom."""
        self._events: deque[EngineEvent] = deque()
        self._tick_at = math.inf
        self._is_polling = False
        self._build(cluster.births)

    def _build(self, pid: int) -> None:
        cluster, shape = self.cluster, self.shape
        if isinstance(shape, TagCacheShape):
            cache = TagCache(shape)
            memories, layouts = cache.memories, tuple(shape.layout(rank) for rank in range(shape.ranks))
        else:
            cache = None
            memories = [RankMemory(shape.blocks, shape.layers) for _ in range(shape.ranks)]
            layouts = (make_layout(shape.blocks, shape.layers),) * shape.ranks
        if cluster.rank_lag_s:
            names = [f"{self.process.name} rank {rank}" for rank in range(shape.ranks)]
            self.rank_processes = [SimProcess(name, self.process.clock) for name in names]
        else:
            self.rank_processes = [self.process] * shape.ranks
        self.transports = [
            _transport_of(cluster.fabric)(
                cluster.fabric,
                self.rank_processes[rank],
                PeerRank(self.incarnation, rank),
                memory,
                partial(self.check_write, rank),
                partial(self._on_wake_of, rank),
            )
            for rank, memory in enumerate(memories)
        ]
        reports: list[list[RankReport]] = [[] for _ in memories]
        self.agents = [
            cluster.bugs.rank(
                rank,
                layouts[rank],
                transport,
                partial(self._report, rank, reports[rank] if cluster.rank_lag_s else self._reports),
                clock=self.local_now,
                transfer_timeout=cluster.limits.transfer_timeout,
                memory=transport.memory,
                unfenced_writes=cluster.unfenced_writes,
                # One alone need not be given the layouts of the others.
                instance=layouts if len(layouts) > 1 else (),
                loops=find_loops(),
            )
            for rank, transport in enumerate(self.transports)
        ]
        for agent, transport in zip(self.agents, self.transports, strict=True):
            self._check_as_set(agent, transport)
        self.rank_watches = [RankWatch() for _ in self.agents]
        for agent, watch in zip(self.agents, self.rank_watches, strict=True):
            if isinstance(agent, SimRank):
                agent.watch_turns(watch, cluster.world)
        for agent in self.agents if cluster.few_cells else ():
            summer: Summer = vars(agent)["_summer"]
            summer.turn_bytes, summer.at_once_bytes = cluster.few_cells, max(1, cluster.few_cells // 3)
        if cluster.rank_lag_s:
            self._start_ranks(reports)
        card = self._make_card(pid, layouts)
        self._stamps = cluster.bugs.stamps(cluster.boards, self.incarnation, self.process)
        self.engine = self._make_engine(memories, cache)
        self.engine.executor = self.agents[0].executor
        self.engine.is_checked = cluster.settings.integrity is Integrity.FULL
        if self.remote is not None and cluster.has_driver:
            self._start_driver(card, self.remote)
        else:
            self.coordinator = cluster.bugs.coordinator(
                card,
                "sim",
                cluster.limits,
                self.local_now,
                _SimControl(self),
                _SimRanks(self),
                self._raise,
                cluster.settings,
                self._note,
                self._stamps,
            )
        worth = size_worth_summing(rank.layout for rank in card.ranks)
        sizes = {"source": worth, "target": worth * (ONE_IN if cluster.settings.integrity is Integrity.SAMPLED else 1)}
        summed = {"source": self.coordinator.source.sum_size, "target": self.coordinator.target.sum_size}
        if summed != sizes:
            cluster.world.find("as set", f"{self.process.name}: {summed} are summed at a time, and {sizes} are worth it")
        # One of the two sums every span as it comes, so that sums are under way while more is computed, moved or retracted.
        (self.coordinator.source if pid % 2 else self.coordinator.target).sum_size = 1
        self._handle_frame, self._handle_report = self.coordinator.on_frame, self.coordinator.take_report
        if self.thread is not None:
            # What the driver has its coordinator handle is looked at, too.
            vars(self.coordinator).update(on_frame=self._take, take_report=self._take_report)
        if cluster.is_forgetful:
            self._forget_soon()
        if cluster.most_parked:
            self.coordinator.source.most_parked = cluster.most_parked
        if cluster.most_peers:
            vars(self.coordinator).update(_peers=WatchedPeers(cluster.most_peers, self.coordinator, cluster.world))
        for transport in self.transports if isinstance(shape, InstanceShape) else ():
            transport.is_paired = True
        self._look_at_coordinator()
        self.engine.coordinator = self.coordinator
        self.engine.port = self.coordinator if self.thread is None else self.thread.driver
        self.engine.watch = cluster.watch
        if self.thread is None:
            self.engine.wake_agents = lambda: self.guarded(lambda: None)
        self.engine.start()

    def _check_as_set(self, agent: RankAgent, transport: SimTransport) -> None:
        """Sources write where that can be undone, or was asked for; a rank counts what comes where it can be undone."""
        is_fenced = transport.late_writes is LateWrites.REVOCABLE
        writes = is_fenced or (self.cluster.unfenced_writes and transport.late_writes is LateWrites.UNFENCED)
        counts = is_fenced and not self.cluster.fabric.is_plain
        found = agent.executor is Executor.SOURCE_WRITES, agent.fences_writers, agent.counts_arrivals
        if found != (writes, is_fenced, counts):
            self._find("as set", f"a rank writes, fences and counts: {found}, and not {(writes, is_fenced, counts)}")

    def _make_card(self, pid: int, layouts: tuple[Layout, ...]) -> Card:
        cluster, shape = self.cluster, self.shape
        is_back = any(
            each.name.startswith(f"{self.address}#") for each in cluster.processes.values() if each is not self.process
        )
        strangers = {each.rstrip("+") for each in cluster.strangers if is_back or not each.endswith("+")}
        has_area = not self.loops and self.address not in cluster.without_area
        endpoints: list[tuple[Endpoint, ...]] = [(each.endpoint(),) for each in self.transports]
        if f"{self.address}~" in cluster.strangers:
            endpoints[-1] = (Endpoint("another", 1, {}),) if pid % 2 else ()
        waits_s = cluster.limits.transfer_timeout * (HASTE if self.address in cluster.hasty else 1.0)
        if f"{self.address}^" in cluster.strangers:
            waits_s = cluster.limits.defer_timeout
        return Card(
            incarnation=self.incarnation,
            model="tags",
            fingerprint="others" if self.address in strangers else "tags",
            shape=str(shape.shape) if isinstance(shape, TagCacheShape) else f"tp{shape.ranks}",
            ranks=tuple(
                RankCard(rank, layouts[rank], endpoints[rank], each.memory.aux_area if has_area else None)
                for rank, each in enumerate(self.transports)
            ),
            process=ProcessId("host", pid, 1),
            defer_timeout=cluster.limits.defer_timeout,
            transfer_timeout=waits_s,
        )

    def _look_at_coordinator(self) -> None:
        """Have what the coordinator does looked at."""
        cluster = self.cluster
        self._reactions = Reactions(self.coordinator, self.local_now, self._sent)
        self._notices = NoticeWatch(self.coordinator, cluster.limits)
        self._causes = Causes()
        self._waits = Waits(cluster.limits, self.local_now())
        self._fences = Fences(cluster.limits, self.local_now())
        self._received = Received()
        self._card_watch = CardWatch(self.coordinator)
        self._dials = DialWatch(self.coordinator, cluster.limits)
        self._questions = QuestionWatch(self.coordinator, cluster.limits)
        self.source_watch = SourceWatch(
            self.coordinator,
            self.local_now,
            cluster.limits,
            is_noted=self.thread is None,
        )
        self.target_watch = TargetWatch(self.coordinator, is_forgetful=cluster.is_forgetful, is_noted=self.thread is None)
        coordinator = self.coordinator
        vars(coordinator).update(
            expect_target=partial(self._expect_target, coordinator.expect_target),
            refuse=partial(self._refuse, coordinator.refuse),
            expect_source=partial(self._expect_source, coordinator.expect_source),
        )
        for problem in tables_problems():
            self._find("taken", problem)
        self._engine_watch = EngineWatch(coordinator, self._sent, partial(self._find, "taken"))
        watch_windows(vars(coordinator.source)["_windows"], self._find)
        watch_effects(coordinator.target, self._find)
        watch_calls(coordinator.target, self._sent, self._find)
        watch_repeats(coordinator.target, self._sent, self._find)
        watch_losses(coordinator.target, self._find)
        watch_beats(coordinator, partial(self._find, "as set"))
        watch_gone(coordinator, self._find)
        watch_ticks(coordinator, self._find)
        watch_dials(coordinator.target, cluster.limits.retry, self.local_now, self._find)
        watch_declines(vars(coordinator.source)["_declined"], self._find)
        watch_questions(vars(coordinator.target)["_questions"], self._find)
        watch_notice_waits(coordinator.target.decline_notices, cluster.limits, self._sent, self._find)
        watch_target_waits(coordinator.target, cluster.limits, self.local_now, self._find)
        for side in (coordinator.source, coordinator.target, coordinator.target.decline_notices):
            watch_alarms(vars(side)["_timers"], partial(self._find, "alarm"))
        if self.thread is None:
            # Engines compute on their own: what comes of that is looked at before the next turn of the instance.
            vars(coordinator).update(
                retract=partial(self._engine_watch.retract, coordinator.retract),
                spans_ready=partial(self._compute, coordinator.spans_ready),
                offer=partial(self._compute, coordinator.offer),
            )

    def _make_engine(self, memories: list[RankMemory], cache: TagCache | None) -> SimEngine:
        cluster, process = self.cluster, self.process
        if cache is not None and cluster.vllm is not None:
            return VllmEngine(
                world=cluster.world,
                process=process,
                name=process.name,
                cache=cache,
                clock=self.local_now,
                mode=cluster.mode,
                on_failure=cluster.on_failure,
                limits=cluster.limits,
                step_tokens=cluster.step_tokens,
                set_up=cluster.vllm,
                processes=[process, *self.rank_processes[1:]],
                lag_s=cluster.rank_lag_s,
                address=self.control_address,
                incarnation=self.incarnation,
                notify=self._notify,
                fail=self.fail,
                classes=cluster.bugs.vllm,
            )
        if cache is not None:
            settings = replace(cluster.settings, mode=cluster.mode, on_failure=cluster.on_failure)
            return EmbeddedEngine(
                world=cluster.world,
                process=process,
                name=process.name,
                cache=cache,
                clock=self.local_now,
                handoff=settings,
                both_roles=cluster.both_roles,
                defer_timeout=cluster.limits.defer_timeout,
                step_tokens=cluster.step_tokens,
                notify=self._notify,
                fail=self.fail,
                classes=cluster.bugs.embedded,
            )
        pool = SimBlockPool(cluster.world, process.name, self.shape.blocks)
        kind = cluster.bugs.source_engine if self.role == "prefill" else cluster.bugs.target_engine
        return kind(
            world=cluster.world,
            process=process,
            name=process.name,
            pool=pool,
            memories=memories,
            layers=self.shape.layers,
        )

    def _start_driver(self, card: Card, remote: RemoteRanks) -> None:
        """Have the driver of production run the coordinator, on a thread of this process."""
        cluster, orders = self.cluster, _SimRanks(self)
        thread = AgentThread(cluster.world, self.process, self._check_records, self._step_engine)
        sockets: ControlSocketsPort = _SimControl(self)
        if cluster.wires is not None:
            self.machine = VirtualMachine(cluster.wires, self.address, self.local_now, thread.wake)
            watched = cluster.bugs.sockets(self.incarnation, self.machine, self, cluster.limits.beat_s)
            sockets, thread.rest = watched, watched.rest
        thread.driver = cluster.bugs.driver(
            card,
            remote,
            cluster.limits,
            sockets,
            thread.news,
            cluster.settings,
            stamps=self._stamps,
            clock=self.local_now,
            bell=ThreadBell(thread.wake),
            coordinator=cluster.bugs.coordinator,
        )
        thread.driver.fail = self.fail
        vars(remote).update(send=orders.send, send_all=orders.send_all)
        self.thread, self.coordinator = thread, thread.driver.coordinator

    def _step_engine(self) -> None:
        """The engine was woken: it takes what has been decided, and shows that it lives; one that hangs, when it goes on."""
        if self.thread is None:
            return
        if self.engine.is_silent:
            self.cluster.world.at(self.engine.silent_until, self.process, self._step_engine)
            return
        try:
            if isinstance(self.engine, EmbeddedEngine):
                self.engine.schedule()
                return
            if isinstance(self.engine, VllmEngine):
                self.engine.wake_worker()
                return
            for event in self.thread.driver.events():
                self._notify(event)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is an error of ours
            self.fail(error)

    def _forget_soon(self) -> None:
        """Shrink what is remembered of ends and of peers until it is forgotten in every run."""
        source, target = self.coordinator.source, self.coordinator.target
        vars(source).update(_ended=BoundedMap(_FEW_ENDS), _windows=GrantWindows(limit=1, size=_FEW_GRANTS))
        vars(target).update(_ended=BoundedMap(_FEW_ENDS), _last_sequence=BoundedMap(1))

    @property
    def control_address(self) -> ControlAddress:
        """Where others reach it."""
        return _address_of(self.address)

    def local_now(self) -> float:
        """What this process's clock shows."""
        clock = self._clock
        return clock.offset + clock.rate * self._world.now

    def is_gone(self, process: ProcessId) -> bool:
        """Whether a process of this host is known to be dead."""
        cluster = self.cluster
        return cluster.one_host and not cluster.processes[process.pid].is_alive

    def on_dial(self, address: ControlAddress) -> None:
        """An address is dialled."""
        self.hung_up.discard(address)
        self.dialled.add(address.host)
        self.unanswered.add(address.host)
        self.cluster.watch.on_dialled(self.process.name, address.host, self.local_now())

    def on_send(self, address: str, recipient: str, message: Message) -> None:
        """A message leaves."""
        self._check_sent(recipient, message)
        self._note_sent(address, message)

    def _check_sent(self, recipient: str, message: Message) -> None:
        self._sent.append((recipient, message))
        self._reactions.sent(recipient, message)
        for watch in (self.source_watch, self.target_watch):
            if problem := watch.sent_problem(recipient, message):
                self._find("as set", problem)
        if isinstance(message, Heartbeat):
            age_s = max(0.0, self.local_now() - self.coordinator.stepped_at)
            if abs(message.step_age_s - age_s) > _SMALL_S:
                self._find("as set", f"the engine took its last step {age_s} s ago: {message}")
        if isinstance(message, _QUESTIONS):
            self._questions.asked(message.key, self.local_now())
        if isinstance(message, Grant):
            self._check_needed(message)
            self.granted[message.key, message.grant] = self.engine.allocation(message.key)
            self._sequences[message.grant] = message.sequence
        elif isinstance(message, Stop) and not message.grant:
            self._check_declined(message)
            self._notices.sent(message.key, self.local_now())
        elif isinstance(message, ConfirmAsk):
            self._check_moved(message)
            self._check_unstamped(message)
        elif isinstance(message, Confirmed):
            self._check_moved(message)
            self.cluster.confirmed.add((recipient, message.key, message.grant))
        elif isinstance(message, Release):
            self._check_whole(message)
            self.cluster.released.add((self.incarnation, message.key, message.grant))
            self._note_stamp(message)
            if (self.incarnation, message.key, message.grant) not in self.cluster.confirmed:
                self.cluster.world.violate("confirmed before delivered", f"{self.process.name}: {message}")

    def _note_sent(self, address: str, message: Message) -> None:
        self.cluster.watch.on_sent(self.process.name, address, self.local_now(), message)
        if self.cluster.world.timeline is not None:
            # Not only for its own sake: the text of a message costs more than its way through the network.
            self.cluster.world.note(f"{self.process.name} -> {address}: {message}")

    def send_frame(self, address: str, recipient: str, message: Message) -> None:
        """Put one message on the wire."""
        self._check_sent(recipient, message)
        if isinstance(message, Grant) and self.bad_grants > 0:
            self.bad_grants -= 1
            if self._send_bad_grant(address, recipient, message):
                return
        self._note_sent(address, message)
        on_wire = of_another_release(message) if self.is_of_another_release else message
        aux_offset = self.transports[0].memory.aux_area.offset
        for each in (on_wire,) if self.contradiction is None else contradict(on_wire, self.contradiction, aux_offset):
            self.cluster.network.send(self.address, address, encode(self.incarnation, recipient, each))
        if self.strays > 0 and self.cluster.world.random.random() < _STRAY:
            self._send_stray(address, recipient, message)

    def _send_stray(self, address: str, recipient: str, message: Message) -> None:
        """A little later send what is about something else, or ask in the name of the receiver what it cannot ask yet."""
        world = self.cluster.world
        others = [each for each in self.cluster.instances.values() if each.role == self.role and each is not self]
        peer, sender, stray = self.cluster.instances.get(address), self, stray_of(message, world.random)
        sequence = max(self._sequences.values(), default=0) + 1
        if isinstance(message, Heartbeat) and (early := before_its_grant(message, sequence, world.random)) is not None:
            stray = early
        over = over_of_another(message) if isinstance(message, Heartbeat) and world.random.random() < 0.5 else None
        if others and over is not None:
            sender, stray = world.random.choice(others), over
        elif others and may_come_from_others(message) and world.random.random() < 0.5:
            sender, stray = world.random.choice(others), message
        elif peer is not None and world.random.random() < 0.5 and (ask := asked_anyhow(message, world.random)) is not None:
            sender, stray, address, recipient = peer, ask, self.address, self.incarnation
        if stray is not None:
            self.strays -= 1
            frame = encode(sender.incarnation, recipient, stray)
            world.note(f"STRAY {sender.process.name} -> {address}: {stray}")
            # A confirmation ends it: a false one has to come first. And a question is early only when it comes at once.
            is_soon = isinstance(stray, Confirmed) or sender is peer
            later_s = 0.0 if is_soon else world.random.uniform(*_STRAY_S)
            if isinstance(stray, Release) and sender is peer:
                world.after(later_s, None, partial(self._release_early, sender, stray, frame))
            else:
                world.after(later_s, None, lambda: self.cluster.network.send(sender.address, address, frame))

    def _release_early(self, target: SimInstance, release: Release, frame: bytes) -> None:
        """Take a release that the target has not sent, unless what it is about is confirmed: then nothing shows that.

        It takes no time: a confirmation could overtake it on its way.
        """
        if (target.incarnation, release.key, release.grant) not in self.cluster.confirmed:
            self.cluster.network.arrive(self.address, frame, target.address)

    def _send_bad_grant(self, address: str, recipient: str, grant: Grant) -> bool:
        """Send a grant in this instance's name that it never made; whether that one replaces the real one.

        Either its sequence number was corrupted: far beyond all others, or one that the source has used. Or it was forged, for
        a hand-off that no instance has: with the number of the real one, or with others skipped.
        """
        random = self.cluster.world.random
        is_corrupted = self.bad_grants >= _EVERY_GRANT or random.random() < 0.5
        leaps = (REACH + 1, 1 << 40) if is_corrupted else (0, 1, 20_000, REACH, 1 << 40)
        numbers = [MAX_NUMBER, *(grant.sequence + leap for leap in leaps)]
        if is_corrupted and (used := self._used_sequences.get(Incarnation(recipient))) is not None:
            numbers += [used, used]
        bad = structs.replace(grant, sequence=random.choice(numbers))
        if not is_corrupted:
            bad = structs.replace(bad, key=HandoffKey(TransferId("forged")), grant=bad.sequence, mode=Mode.PULL)
        self.cluster.world.note(f"{self.process.name} -> {address}: BAD {bad}")
        self.cluster.network.send(self.address, address, encode(self.incarnation, recipient, bad))
        return is_corrupted and (self.bad_grants >= _EVERY_GRANT or random.random() < 0.5)

    def heal(self) -> None:
        """Forget the faults that have yet to strike."""
        self.lose_revokes = self.bad_grants = self.strays = self.failing_sums = 0
        self.contradiction, self.is_no_peer = None, False
        self.engine.heal()
        for loop in self.loops:
            loop.paused_until = 0.0
        if self.thread is not None:
            self.thread.paused_until = 0.0
        for transport in self.transports:
            transport.fail_connects = transport.fail_next = transport.fail_last = transport.short_next = (
                transport.corrupt_next
            ) = 0

    def on_frame(self, frame: bytes, sender_address: str) -> None:
        """A frame arrives: its messages are taken one by one, as the control sockets pass them on."""
        if self.is_no_peer:
            self.cluster.network.send(self.address, sender_address, b"HTTP/1.1 400 Bad Request")
            return
        try:
            envelope = decode(frame)
        except ProtocolError as error:
            self._not_understood(sender_address, str(error))
            return
        for each in split(envelope):
            self._on_message(each, sender_address)

    def on_receive(self, envelope: Envelope, sender_address: str) -> None:
        """A message was read."""
        self.routes[envelope.sender] = sender_address
        message = envelope.message
        if isinstance(message, Hello) or (isinstance(message, Refused) and message.key is None):
            self.unanswered.discard(sender_address)
            if isinstance(message, Refused):
                self.cluster.watch.was_refused(self.process.name, sender_address)
        elif isinstance(message, Announced) and message.grant in self._sequences:
            self._used_sequences[envelope.sender] = self._sequences[message.grant]
        self.cluster.watch.on_received(self.process.name, message)

    def on_refusal(self, address: ControlAddress) -> None:
        """What answers at an address turned out to be no peer: nothing waits for it any longer."""
        self._notices.settled_at(address)
        self.unanswered.discard(address.host)
        self.cluster.watch.was_refused(self.process.name, address.host)

    def on_late_dial(self, address: ControlAddress, wait_s: float) -> None:
        """Messages wait for an address to be dialled again, and the agent's thread would wait for longer."""
        detail = f"{self.process.name}: {address} is to be dialled again before the {wait_s:.3f} s are over that are waited for"
        self.cluster.world.find("alarm", detail)

    def _on_message(self, envelope: Envelope, sender_address: str) -> None:
        self.on_receive(envelope, sender_address)
        via = _address_of(sender_address) if sender_address in self.dialled else None
        if self.thread is None:
            self.guarded(lambda: self._take(envelope, via))
        else:
            self.frames.append((envelope, via))
            self.thread.wake()

    def _take(self, envelope: Envelope, via: ControlAddress | None) -> None:
        """Have the coordinator handle a message, and see what it makes of it."""
        message, now = envelope.message, self.local_now()
        if isinstance(message, Hello) and message.wants_answer:
            self.cluster.watch.is_asked_for_card(self.process.name, envelope.sender.partition("#")[0])
        check = self._reactions.expect(envelope, via)
        self._questions.received(envelope.sender, now)
        self._received.take(envelope.sender, message)
        self.target_watch.received(envelope.sender, message)
        if isinstance(message, Stopped) and not message.grant:
            self._notices.settled(message.key)
        elif via is not None and isinstance(message, _INTRODUCTIONS):
            self._notices.settled_at(via)
        key = getattr(message, "key", None)
        notices = vars(self.coordinator.target.decline_notices)["_waiting"]
        notice = notices.get(key) if isinstance(message, Stopped) else None
        if key is not None and self.coordinator.target.current(envelope.sender, key, getattr(message, "grant", 0)) is not None:
            peer = envelope.sender.partition("#")[0]
            self.cluster.watch.answered(self.process.name, peer, now, key)
        self._sent.clear()
        if via is not None and isinstance(message, _INTRODUCTIONS):
            self.unanswered.discard(via.host)
        self._handle_frame(envelope, via)
        sent = [each for recipient, each in self._sent if recipient == envelope.sender] if self._sent else []
        if (broken := check(sent)) is not None:
            self.cluster.world.find(broken[0], f"{self.process.name}: {broken[1]}")
        strangers = {each.rstrip("+~^") for each in self.cluster.strangers}
        if via is not None and isinstance(message, Hello) and not strangers.isdisjoint((self.address, via.host)):
            # The question is answered, and the card of a stranger is not taken: the next request has to ask again.
            self.cluster.watch.was_refused(self.process.name, via.host)
        if notice is not None and notice.source != envelope.sender and notices.get(key) is not notice:
            self._find("left alone", f"a notice about {key} was for {notice.source}, and ends by that of {envelope.sender}")
        if key is not None:
            for problem in self._received.problems(self.coordinator.target.live.get(key)):
                self.cluster.world.find("counts agree", f"{self.process.name}: {key}: {problem}, and nothing of that has come")

    def _not_understood(self, sender_address: str, reason: str) -> None:
        """As the sockets do: a peer that dialled us is refused, and what answers where we dialled is no peer of ours."""
        self.dropped_total[reason] += 1
        if not self.cluster.has_foreigners:
            self.cluster.world.violate("wire", reason)
        elif sender_address in self.dialled:
            address = ControlAddress.of(sender_address, 1)
            self._notices.settled_at(address)
            self.unanswered.discard(sender_address)
            self.cluster.watch.was_refused(self.process.name, sender_address)
            waiting = vars(self.coordinator.target.decline_notices)["_waiting"]
            others = {key: each for key, each in waiting.items() if each.request.source != address or each.source is not None}
            self.guarded(lambda: self.coordinator.target.on_refused_peer(address, reason))
            if lost := [key for key, each in others.items() if waiting.get(key) is not each]:
                self._find("left alone", f"{address} is no peer, and notices about {lost} were for others")
        else:
            self.send_frame(sender_address, "", Refused(reason))

    def _on_wake_of(self, rank: int) -> None:
        """A transport has completed something."""
        if self.loops:
            self.loops[rank].wake()
        else:
            self.guarded(self._poll)

    def pause(self, until: float) -> None:
        """Let the whole instance stand still."""
        for process in (self.process, *self.rank_processes):
            process.paused_until = max(process.paused_until, until)

    def kill_rank(self, rank: int) -> None:
        """Let one rank die, with orders and reports in flight; one in the coordinator's process takes that along."""
        if self.loops:
            self.loops[rank % len(self.loops)].die()
        else:
            self.crash()

    def stall_agent(self, until: float) -> None:
        """Let the agent's thread stand still while the engine and the ranks go on; without one, all of it stands still."""
        if self.thread is not None:
            self.thread.paused_until = max(self.thread.paused_until, until)
        else:
            self.pause(until)

    def pause_rank(self, rank: int, until: float) -> None:
        """Let one rank stand still; ranks that live in the coordinator's process stand still with it."""
        self.engine.pause_rank(rank, until)
        if self.loops:
            self.loops[rank % len(self.loops)].paused_until = until
        else:
            self.process.paused_until = until

    def call_engine(self, work: Callable[[], object]) -> None:
        """Have the engine do something at its next step, which a hanging one takes when it goes on."""
        if self.engine.is_silent:
            self.cluster.world.at(self.engine.silent_until, self.process, lambda: self.call_engine(work))
        else:
            self.guarded(work)

    def stray_call(self, number: int, *, may_fail: bool) -> None:
        """Have the engine call for something that it should not; not where a driver passes calls on later."""
        if self.thread is None:
            calls = StrayCalls(self.coordinator, self._events, self._sent, self.cluster.world.random)
            if problem := calls.make(number, may_fail=may_fail):
                self._find("left alone", problem)

    def stop_engine(self, until: float, *, hangs: bool) -> None:
        """Let the engine do nothing until then: it hangs, or it takes its steps all the same. The agents go on."""
        if hangs:
            if not self.engine.is_silent:
                self._note_step()
                self.engine.silent_since = self.cluster.world.now
            self.engine.silent_until = max(until, self.engine.silent_until)
        else:
            self.engine.stuck_until = max(until, self.engine.stuck_until)
        self.cluster.world.at(until, self.process, lambda: self.call_engine(self.engine.schedule))

    def _note_step(self) -> None:
        """An engine that does not hang takes a step when the driver wakes it, and that is before every heartbeat."""
        if not self.engine.is_silent:
            self.coordinator.stepped_at = self.local_now()

    def guarded(self, work: object) -> None:
        """Do something in this process; what follows from it is done too. An error of ours is a violation."""
        try:
            work()  # type: ignore[operator]
            if self.thread is None:
                self._drain()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is an error of ours
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """The code of this process has raised what it should not."""
        self.cluster.world.violate("exception", f"{self.process.name}: {type(error).__name__}: {error}")

    def check_write(self, rank: int, at: int, copy: CopyId) -> None:
        """A copy writes to a cell of ours: only the hand-off that its block was granted to may, and once."""
        self.cluster.watch.on_cell(f"{self.process.name} rank {rank}", copy, at)
        if problem := self.engine.write_problem(at, copy, self.granted.get((copy.key, copy.grant))):
            self.cluster.world.violate("epoch", f"{self.process.name}: {problem}")

    def _check_moved(self, message: ConfirmAsk | Confirmed) -> None:
        """What this side executes is confirmed, and asked about, when every rank has moved all of it, and not before."""
        live = self.coordinator.source.live if isinstance(message, Confirmed) else self.coordinator.target.live
        record = live.get(message.key)
        if record is None or (isinstance(record, SourceRecord) and not record.writes):
            return
        if isinstance(message, Confirmed) and message.written_bytes is not None:
            return  # its target counts the bytes, and what it delivers is looked at cell by cell
        copy = CopyId(message.key, message.grant, message.generation)
        done = [len(self._moved.get((rank, copy), ())) for rank in range(len(self.agents))]
        if min(done) < len(record.spans):
            detail = f"{self.process.name}: {done} of {len(record.spans)} spans are moved: {message}"
            self.cluster.world.violate("confirmed after the last byte", detail)

    def _note_stamp(self, release: Release) -> None:
        """What is released by its stamp counts as confirmed if its source could confirm it at this moment."""
        record = self.coordinator.target.live.get(release.key)
        about = self.incarnation, release.key, release.grant
        if not release.stamp or record is None or record.grant != release.grant:
            if self.cluster.stamped.get(about, 0) != release.stamp:
                self._find("as set", f"stamp {self.cluster.stamped.get(about, 0)} was seen: {release}")
            return
        self.cluster.stamped[about] = release.stamp
        source = self._source_of(record)
        holds = source is not None and source.state is SourceState.SERVING and source.generation == record.generation
        if holds and record.source is not None and self.cluster.boards.shows(record.source, release.stamp):
            self.cluster.confirmed.add(about)

    def _source_of(self, record: TargetRecord) -> SourceRecord | None:
        """The other side of a hand-off under the grant in hand, if its process lives."""
        instance = None if record.source is None else self.cluster.born.get(record.source)
        is_alive = instance is not None and instance.process.is_alive
        source = instance.coordinator.source.live.get(record.key) if instance is not None and is_alive else None
        is_other = source is not None and (source.target, source.grant_number) == (self.incarnation, record.grant)
        return source if is_other else None

    def _check_unstamped(self, ask: ConfirmAsk) -> None:
        """No source is asked while its stamp stands and is known: it can be looked at."""
        record = self.coordinator.target.live.get(ask.key)
        source = None if record is None or record.grant != ask.grant else self._source_of(record)
        if record is not None and record.sums_follow:
            limits = self.cluster.limits
            if record.retry.wait_s <= limits.retry < limits.beat_s:
                self._find("no needless message", f"its stamp follows by itself, and is not waited for: {ask}")
        elif source is not None and source.stamp is not None:
            self._find("no needless message", f"{source.stamp} stands: {ask}")

    def _check_needed(self, grant: Grant) -> None:
        """A grant is repeated to have something sent again: not when everything has been sent."""
        record = self.coordinator.target.live.get(grant.key)
        if record is None or record.span_count is None or record.aux is None or record.state is not TargetState.FILLING:
            return
        is_sent = record.is_confirmed or record.executor is Executor.TARGET_READS
        if is_sent and len(record.spans) >= record.span_count:
            self.cluster.world.find("no needless message", f"{self.process.name}: everything is here: {grant}")

    def check_needed_order(self, order: RankOrder) -> None:
        """What is ending is neither moved nor summed any more."""
        if isinstance(order, _WORK):
            source, target = self.coordinator.source.live, self.coordinator.target.live
            for record in (source.get(order.copy.key), target.get(order.copy.key)):
                if record is not None and record.state in _ENDING and record.copy == order.copy:
                    detail = f"{self.process.name}: {record.key} is {record.state}, and is to be worked on: {order}"
                    self.cluster.world.find("nothing twice", detail)

    def _check_whole(self, release: Release) -> None:
        """What is delivered was announced as a whole, each part once; a source that writes, and is not checked, need not."""
        record = self.coordinator.target.live.get(release.key)
        if record is None or record.grant != release.grant or record.allocation is None:
            return  # An earlier one under the same key was delivered, and its release is repeated.
        is_checked = self.cluster.settings.integrity is not Integrity.OFF
        cells = {
            (token, layer)
            for span in record.spans.values()
            for token in range(span.first_token, span.end_token)
            for layer in range(span.first_layer, span.end_layer)
        }
        whole = record.allocation.tokens * len(self.coordinator.card.layers)
        if len(cells) != whole and (is_checked or record.executor is Executor.TARGET_READS):
            self.cluster.world.find("counts agree", f"{self.process.name}: {len(cells)} of {whole} were announced: {release}")

    def _check_declined(self, stop: Stop) -> None:
        """What an engine has not refused is not declined: neither all of a transfer id, nor what it has taken since."""
        record = self.coordinator.target.live.get(stop.key)
        is_live = bool(stop.prompt) and record is not None and record.request.prompt == stop.prompt
        if is_live or (not stop.prompt and not self.cluster.watch.is_declined(stop.key.transfer_id)):
            self.cluster.world.find("as set", f"{self.process.name}: its engine has not refused what is declined: {stop}")

    def check_hang_up(self, address: ControlAddress) -> None:
        """Dials end with what waits for their answers, and not before; an address that has answered is not dialled any more."""
        target = self.coordinator.target
        waiting = {record.request.source for record in target.live.values() if record.source is None}
        waiting |= {each.request.source for each in vars(target.decline_notices)["_waiting"].values() if each.source is None}
        # A card may be that of a process which has died since: then the address is asked again, and that is no answer.
        has_answered = address.host not in self.unanswered and self.cluster.births == len(self.cluster.instances)
        if address in self.hung_up:
            self.cluster.world.find("nothing twice", f"{self.process.name} hangs up on {address} again")
        self.hung_up.add(address)
        if address in waiting or has_answered:
            self.cluster.world.find("as set", f"{self.process.name} hangs up on {address}, which is waited for or has answered")
        self.unanswered.discard(address.host)

    def _check_fenced(self, report: PeerFenced | RegionFenced) -> None:
        """A fence counts when every rank has it, and not before."""
        peer = report.peer if isinstance(report, PeerFenced) else None
        epochs = self._fenced.setdefault(peer, {})
        fenced_before = min(epochs.get(rank, 0) for rank in range(len(self.agents)))
        epochs[report.rank] = max(report.epoch, epochs.get(report.rank, 0))
        fenced = min(epochs.get(rank, 0) for rank in range(len(self.agents)))
        records = list(self.coordinator.target.live.values())
        before = {id(record): record.peer_is_quiet for record in records}
        known = peer in vars(vars(self.coordinator)["_peers"])["_cards"]
        self.coordinator.on_rank(report)
        is_known = peer in vars(vars(self.coordinator)["_peers"])["_cards"]
        if peer is not None and is_known != (known and fenced == fenced_before):
            # Its sessions are gone with the last rank's report, and with no other: then its card has to come again.
            self.cluster.world.find("fenced everywhere", f"{self.process.name}: {peer} is known: {is_known}, after {report}")
        for record in records:
            is_meant = record.source == peer if peer is not None else record.executor is Executor.SOURCE_WRITES
            is_fenced = is_meant and record.grant > 0 and record.epoch < fenced
            if record.peer_is_quiet != (before[id(record)] or is_fenced):
                detail = f"{self.process.name}: {record.key} of epoch {record.epoch} after {report}, of {epochs}"
                self.cluster.world.find("fenced everywhere", detail)

    def _check_released(self, event: EngineEvent) -> None:
        """A source ends as delivered only when the target of that very grant has sent its release."""
        if not isinstance(event, SourceEnded) or event.outcome is not Outcome.DELIVERED:
            return
        ends = [end for end in self.coordinator.source.ends() if end[1] == event.key]
        if not ends and self.thread is not None and self.cluster.is_forgetful:
            # An engine on a thread of its own learns of an end when that may be forgotten.
            return
        if not ends or ends[-1] not in self.cluster.released:
            self.cluster.world.violate("released by its target", f"{self.process.name}: {event.key} of {ends[-1:]}")

    def close(self) -> None:
        """The run is over: end what is not part of its world."""
        self.engine.close()

    def shut_down(self) -> None:
        """Be stopped by an operator: every peer is notified, so that none waits for a limit. Then the process ends."""
        if self.thread is None:
            self.guarded(partial(self.coordinator.stop, "the instance is being stopped"))
        source, target = self.coordinator.source, self.coordinator.target
        records: list[SourceRecord | TargetRecord] = [*source.live.values(), *target.live.values()]
        if self.thread is None and (live := [record.key for record in records if record.state not in _ENDING]):
            self.cluster.world.find("taken", f"{self.process.name} is being stopped, and {live} go on")
        self.cluster.world.after(_SHUT_DOWN_S, self.process, self.crash)

    def crash(self) -> None:
        """Die at once: nothing of this process happens any more."""
        self._die(self.process, *self.rank_processes)

    def crash_leader(self) -> None:
        """Let the coordinator's process die, and the system close its channels; ranks of their own end when they notice."""
        self._die(self.process)
        for end in self._ends:
            end.close()

    def _die(self, *processes: SimProcess) -> None:
        for process in processes:
            process.died_at = min(process.died_at, self.cluster.world.now)
            process.is_alive = False
        self.cluster.network.forget(self.address)
        if self.machine is not None:
            self.machine.die()
        self.cluster.world.note(f"{self.process.name} dies")
        if self.cluster.instances.get(self.address) is self:
            del self.cluster.instances[self.address]

    def _start_ranks(self, reports: list[list[RankReport]]) -> None:
        """Give every rank agent a loop in a process of its own, with a channel to it."""
        world, ends = self.cluster.world, []
        for process, agent, queue in zip(self.rank_processes, self.agents, reports, strict=True):
            end, far_end = socket_pair(world, self.process, process, self.cluster.rank_lag_s)
            end.on_arrival = self._on_report_frame
            ends.append(end)
            self._ends.append(end)
            self.loops.append(RankProcess(world, far_end, agent, queue, self.fail))
        channels = [channel_on(end, process.name) for end, process in zip(ends, self.rank_processes, strict=True)]
        first = self.agents[0]
        self.remote = self.cluster.bugs.remote_ranks(
            channels, "sim", first.executor, self._lose_rank, fences_writers=first.fences_writers
        )
        self.send_order = self.remote.send

    def _on_report_frame(self) -> None:
        if self.thread is None:
            self.guarded(self._take_frames)
        else:
            self.thread.wake()

    def _take_frames(self) -> None:
        if self.remote is not None:
            self.remote.poll()
            self._reports += self.remote.reports
            self.remote.reports.clear()

    def _lose_rank(self, reason: str) -> None:
        """A rank is lost, and so is the instance: every engine ends it then."""
        self.cluster.world.note(f"{self.process.name}: {reason}")
        self.crash()

    def _report(self, rank: int, queue: list[RankReport] | deque[RankReport], report: RankReport) -> None:
        if isinstance(report, SpansSummed) and self.failing_sums > 0 and any(report.sums) and not report.error:
            self.failing_sums -= 1
            self._unsummed.add(report.copy.key)
            report = structs.replace(report, sums={}, error=_NO_SUM)
        if problem := self.rank_watches[rank].report_problem(report):
            self.cluster.world.find("nothing kept", f"{self.process.name} rank {rank}: {problem}")
        if problem := self.rank_watches[rank].planned_problem(report) or self.target_watch.arrived_problem(report):
            self.cluster.world.find("counted", f"{self.process.name} rank {rank}: {problem}")
        if isinstance(report, CopyFailed) and (problem := self.transports[rank].failure_problem(report)):
            self.cluster.world.find("named end", f"{self.process.name} rank {rank}: {problem}")
        if isinstance(report, SpansMoved):
            self._moved.setdefault((rank, report.copy), set()).update(report.spans)
        queue.append(report)

    def _poll(self) -> None:
        self._is_polling = False
        for agent in self.agents if not self.loops else ():
            agent.poll()

    def _drain(self) -> None:
        """What the driver of production does after each turn: reports to the coordinator, events to the engine, the timer."""
        while self._reports or (self._events and not self.engine.is_silent):
            while self._reports:
                self._take_report(self._reports)
            while self._events and not self.engine.is_silent:
                self._notify(self._events.popleft())
        if not self.loops and not self._is_polling:
            for agent in self.agents:
                if agent.has_work:
                    self._is_polling = True
                    self._world.after(_WORK_S, self.process, lambda: self.guarded(self._poll))
                    break
        self._check_records()
        self._arm()

    def _notify(self, event: EngineEvent) -> None:
        if self.cluster.world.timeline is not None:
            self.cluster.world.note(f"{self.process.name}: {event}")
        self._check_released(event)
        if self.thread is None and (problem := self.source_watch.event_problem(event)):
            self._find("counted", problem)
        if event.key in self._unsummed and isinstance(event, SourceEnded | TargetEnded) and _NO_SUM not in event.reason:
            self.cluster.world.find("named end", f"{self.process.name}: a span could not be summed: {event}")
        self.cluster.watch.on_event(self.process.name, event)
        self.engine.on_event(event)

    def _take_report(self, reports: deque[RankReport]) -> None:
        """Have the coordinator take the next report, and see what it makes of it."""
        target = self.coordinator.target
        match reports[0]:
            case PeerFenced() | RegionFenced() as fenced:
                reports.popleft()
                self._check_fenced(fenced)
            case AuxRead(copy=copy) as aux_read:
                record = target.live.get(copy.key)
                is_due = record is not None and record.grant == copy.grant and record.aux_pointer is not None
                self._sent.clear()
                fallbacks = self.target_watch.fallbacks()
                self._handle_report(reports)
                if problem := self.target_watch.fallback_problem(aux_read, fallbacks):
                    self.cluster.world.find("counted", f"{self.process.name}: {aux_read}: {problem}")
                is_asked = any(isinstance(each, Grant) and each.key == copy.key for _, each in self._sent)
                if is_due and record is not None and record.aux is None and record.state in _WAITING and not is_asked:
                    self.cluster.world.find("taken", f"{self.process.name}: the aux record of {copy} is not asked for again")
                deadline = self.local_now() + self.cluster.limits.transfer_timeout
                is_in = is_due and record is not None and record.aux is not None and record is target.live.get(copy.key)
                if is_in and record is not None and record.state in _WAITING and record.give_up_at < deadline - _SMALL_S:
                    self.cluster.world.find("taken", f"{self.process.name}: the aux record of {copy} is in, and no progress")
            case CopyStopped() | CopyFailed() as over:
                self.source_watch.on_report(over)
                held = self.coordinator.source.live.get(over.copy.key)
                is_released = held is not None and held.is_released and held.state is SourceState.SERVING
                is_released = is_released and held is not None and held.open_copies.get(over.rank) == over.copy
                live: list[SourceRecord | TargetRecord] = [*self.coordinator.source.live.values(), *target.live.values()]
                failed = target.live.get(over.copy.key) if isinstance(over, CopyFailed) else None
                if failed is not None and failed.open_copies.get(over.rank) != over.copy:
                    failed = None
                self._handle_report(reports)
                if failed is not None and failed.state in _WAITING and target.live.get(failed.key) is failed:
                    self._find("taken", f"{failed.key} is {failed.state}, and does not end: {over}")
                if any(record.open_copies.get(over.rank) == over.copy for record in live):
                    self.cluster.world.find("taken", f"{self.process.name}: {over}, and the copy counts as open")
                if is_released and held is not None and held.state not in (SourceState.SERVING, SourceState.DELIVERED):
                    self._find("named end", f"it was released, and {over} makes it {held.state}")
            case SpansMoved() | SpansPlanned() | SpansSummed() | Arrived() as report:
                copy = report.copy
                self.target_watch.reported(copy)
                records = (self.coordinator.source.live.get(copy.key), target.live.get(copy.key))
                others = [record for record in records if record is not None and not _may_count(report, record)]
                ending = records[1] if records[1] is not None and records[1].state in _ENDING else None
                if ending is not None and isinstance(report, SpansSummed) and _may_count(report, ending):
                    others.append(ending)
                unsummed = 0 if ending is None else sum(map(len, ending.unsummed.values()))
                places = list(map(_counted, others)) if others else []
                record = records[1]
                is_ours = record is not None and record.copy == copy and record.open_copies.get(report.rank) == copy
                self._handle_report(reports)
                if isinstance(report, SpansMoved) and (problem := self.target_watch.moved_problem(report, is_ours)):
                    self.cluster.world.find("counted", f"{self.process.name}: {report}: {problem}")
                if isinstance(report, Arrived) and (problem := self.target_watch.counted_problem(report)):
                    self.cluster.world.find("counted", f"{self.process.name}: {problem}")
                if ending is not None and sum(map(len, ending.unsummed.values())) > unsummed:
                    self._find("nothing twice", f"{ending.key} is {ending.state}, and is to be summed: {report}")
                if others and list(map(_counted, others)) != places:
                    self.cluster.world.find("left alone", f"{self.process.name}: a report of {copy} counts for another one")
            case report:
                assert_never(report)

    def _raise(self, event: EngineEvent) -> None:
        self._events.append(event)
        if isinstance(event, SourceEnded):
            for problem in stamp_problems(self.cluster.boards, self.incarnation, self.coordinator.source, len(self.agents)):
                self._find("counts agree", f"when {event} is raised: {problem}")
        self._engine_watch.on_event(event)

    def _note(self, note: Note) -> None:
        self.source_watch.note(note)
        self.target_watch.note(note)

    def _find(self, rule: str, problem: str) -> None:
        self.cluster.world.find(rule, f"{self.process.name}: {problem}")

    def _compute(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)
        self._check_times(self.local_now())

    def _expect_target(self, call: Callable[[HandoffKey, str], None], key: HandoffKey, prompt: str) -> None:
        live = self.coordinator.source.live
        was_live, record = key in live, live.get(key)
        is_parked = record is not None and record.state is SourceState.PARKED and record.prompt == prompt
        call(key, prompt)
        if is_parked and record is not None and record.state is SourceState.PARKED:
            self._find("taken", f"{key} is asked for, and the grant of {record.target} for it still waits")
        if problem := self._reactions.admitted(key, prompt, is_declined=not was_live and key not in live):
            self._find("taken", problem)

    def _expect_source(self, call: Callable[[SourceRequest], None], request: SourceRequest) -> None:
        call(request)
        peers = vars(vars(self.coordinator)["_peers"])
        resident = peers["_at"].get(request.source)
        if resident is not None and self.is_gone(peers["_cards"][resident.incarnation].process):
            named = request.source_incarnation
            if named in (None, resident.incarnation):
                self._find("taken", f"{resident.incarnation} is known to be dead, and counts as the one at {request.source}")

    def _refuse(self, call: Callable[[HandoffKey, str], None], key: HandoffKey, reason: str) -> None:
        """The engine refuses a request: what its target has granted, or will, ends."""
        live = self.coordinator.source.live
        was_live = key in live
        is_parked = was_live and live[key].state is SourceState.PARKED
        if not was_live:
            self._reactions.refused(key)
        call(key, reason)
        if was_live and key in vars(self.coordinator.source)["_refused_here"]:
            self.cluster.world.find("left alone", f"{self.process.name}: {key} is live, and its next grant would be refused")
        if is_parked and key in live:
            self.cluster.world.find("taken", f"{self.process.name}: {key} is refused, and still {live[key].state}")

    def _check_times(self, now: float) -> None:
        for problem in self.source_watch.time_problems(now):
            self._find("on time", problem)

    def _check_records(self) -> None:
        source, target = self.coordinator.source, self.coordinator.target
        now = self.local_now()
        self._check_times(now)
        if problem := self.target_watch.retracted_problem():
            self._find("counted", problem)
        for problem in self.source_watch.sum_problems():
            self._find("nothing kept", problem)
        if problem := self._reactions.unanswered():
            self._find("taken", problem)
        for problem in stamp_problems(self.cluster.boards, self.incarnation, source, len(self.agents)):
            self._find("counts agree", problem)
        if self.gone and not self.cluster.most_peers:
            for problem in gone_problems(self.coordinator, self.gone):
                self._find("taken", problem)
        if not self._notices.is_idle:
            for problem in notice_problems(target.decline_notices):
                self._find("alarm", problem)
            for key in target.live:
                self._notices.settled(key)
            for problem in self._notices.problems(now, self.gone):
                self._find("on time", problem)
        for problem in (*address_problems(self.coordinator), *self._card_watch.problems(self.gone)):
            self._find("nothing kept", problem)
        for problem in source_problems(self.coordinator):
            self._find("taken", problem)
        for problem in self._dials.problems(now, self.unanswered):
            self._find("on time", problem)
        for problem in self._questions.problems(now):
            self._find("on time", problem)
        if source.live or target.live:
            for problem in self._causes.problems(source, target):
                self._find("named end", problem)
            for problem in count_problems(source, target, len(self.agents)):
                self._find("counts agree", problem)
            for problem in stop_problems(source, target, self.stopped_copies):
                self._find("counts agree", problem)
            for problem in alarm_problems(source, target):
                self._find("alarm", problem)
            for problem in () if self.cluster.is_forgetful else sequence_problems(target):
                self._find("counts agree", problem)
        # A driver handles several messages before its thread is looked at: what has got further may be void by then.
        if self.thread is None:
            for problem in self._engine_watch.problems():
                self._find("taken", problem)
            for problem in self._fences.problems(target, now):
                self._find("on time", problem)
            for rule, problem in self._waits.problems(target, now):
                self.cluster.world.find(rule, f"{self.process.name}: {problem}")

    def _check_deadline(self, deadline: float | None) -> None:
        """The next turn comes no later than anything that has to be done in it: alarms, heartbeats, and a look at the dead."""
        coordinator, turn = self.coordinator, math.inf if deadline is None else deadline
        source, target = coordinator.source, coordinator.target
        parts = vars(target)["_timers"], target.decline_notices, target.card_requests
        for due in (source.next_deadline(), *(part.next_deadline() for part in parts)):
            if due is not None and due < turn - _SMALL_S:
                self.cluster.world.find("alarm", f"{self.process.name}: its next turn is at {turn}, and an alarm at {due}")
        waited_for = vars(target.decline_notices)["_waiting"], vars(target.card_requests)["_dialled"], self.unanswered
        if deadline is not None and not (source.live or target.live or any(waited_for)):
            self.cluster.world.find("alarm", f"{self.process.name}: nothing is waited for, and its next turn is at {turn}")
        for problem in beat_problems(coordinator):
            self._find("alarm", problem)
        if source.live or target.live:
            own = vars(coordinator)
            gone_at, beat_at = own["_gone_check_at"], own["_beaten_at"] + coordinator.beat_interval_s
            if turn > gone_at + _SMALL_S or turn > beat_at + _SMALL_S:
                detail = f"its next turn is at {turn}, a look at the dead at {gone_at}, a heartbeat at {beat_at}"
                self.cluster.world.find("alarm", f"{self.process.name}: {detail}")

    def _arm(self) -> None:
        deadline = self.coordinator.next_deadline()
        self._check_deadline(deadline)
        for agent in self.agents if not self.loops else ():
            due = agent.next_deadline()
            if due is not None and (deadline is None or due < deadline):
                deadline = due
        if deadline is None:
            return
        when = max(self._world.now + 1e-6, self._clock.world(deadline))
        if when < self._tick_at - 1e-9:
            self._tick_at = when
            self._world.at(when, self.process, self._on_tick)

    def _on_tick(self) -> None:
        if self.cluster.world.now + 1e-9 < self._tick_at:
            return
        self._tick_at = math.inf
        self.guarded(self._turn)

    def _turn(self) -> None:
        self._poll()
        self._note_step()
        live, count = self.coordinator.target.live, len(self._sent)
        closing = [(each, each.state, each.stop_until) for each in live.values() if each.state in _ENDING and each.grant]
        self.coordinator.tick()
        for record, state, until in closing:
            is_late = live.get(record.key) is record and record.source not in self.gone and record.state in _ENDING
            is_asked = any(isinstance(each, Stop) and each.key == record.key for _, each in self._sent[count:])
            if is_late and (record.state, record.stop_until) != (state, until) and not is_asked:
                self._find("taken", f"{record.key} is {record.state} by now, and its source is not asked again")
