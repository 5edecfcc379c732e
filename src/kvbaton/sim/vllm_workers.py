"""The workers of a simulated vLLM: one virtual thread per rank, with the half of the connector that belongs to it.

The worker of the first rank has the `WorkerHalf`, in the process of the coordinator; every other one has a `FollowerHalf`, in
the process of its rank, and the links of production between them run over virtual sockets. A worker takes its steps in order,
as soon as it has them. In each it calls the hooks as vLLM does: orders first, then layer by layer what the step computes, then
the question what has finished. Ranks of one stage wait for each other at every layer, as they do to add up what each has
computed, so one may be a layer ahead; a later stage begins a step when the stage before has computed it, and may be a whole
step behind. What a rank computes are the tags of its own layers and heads; as attention does, it reads all that its cache holds
of a request before, and a cell that is not what it has to be is a foreign byte.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvbaton.agent.channel import ChannelClosed, ChannelStuck
from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import HandoffPort
from kvbaton.core.handoff import BlockLists
from kvbaton.engines.vllm.computed_spans import ComputedSpans, LayerGroups
from kvbaton.engines.vllm.device import OpenGate
from kvbaton.engines.vllm.instance import take_from_rank
from kvbaton.engines.vllm.rank_links import FirstRankLinks, LayersDone, RankLinks, StepCleared, StepEnded, StepReached
from kvbaton.engines.vllm.reached_steps import ReachedSteps
from kvbaton.engines.vllm.scheduler_half import SchedulerHalf
from kvbaton.engines.vllm.worker_half import Finished, FollowerHalf, WorkerHalf
from kvbaton.sim.rank_processes import SimSocket, channel_on, socket_pair
from kvbaton.sim.tag_model import TagCache, tags_of
from kvbaton.sim.virtual_threads import Signal, VirtualThread
from kvbaton.sim.vllm_scheduler import ScheduledTokens, VllmStep
from kvbaton.sim.world import SimProcess, World

__all__ = ["VLLM", "VllmClasses", "VllmWorkers"]

_PATIENT_S = 1e4
"""How long a rank waits for another one: as long as it takes, as ranks of vLLM do."""

_LAG_S = 2e-4
"""How long a step is under way to a worker at most, and its output back."""

_IDLE_S = 5e-4
"""What a step takes at least that computes nothing."""


@dataclass(frozen=True, slots=True)
class VllmClasses:
    """Which classes an instance is built from; planted bugs replace some of them."""

    scheduler: type[SchedulerHalf] = SchedulerHalf
    worker: type[WorkerHalf] = WorkerHalf
    follower: type[FollowerHalf] = FollowerHalf
    spans: type[ComputedSpans] = ComputedSpans
    reached: type[ReachedSteps] = ReachedSteps


VLLM = VllmClasses()
"""Those of production."""


class _FirstLinks(FirstRankLinks):
    """The links of the first rank on virtual sockets: a frame is taken when it has arrived."""

    def __init__(self, ends: dict[int, SimSocket]) -> None:
        # Not that of production: it listens on a real socket, and reads in a thread.
        self._steps = {rank: channel_on(end, f"rank {rank}") for rank, end in ends.items()}
        self._ends = ends

    def listen(self, take: Callable[[LayersDone | StepReached], None]) -> None:
        """From now on take what the other ranks send."""
        for rank, end in self._ends.items():
            end.on_arrival = partial(self._take_all, rank, take)

    def _take_all(self, rank: int, take: Callable[[LayersDone | StepReached], None]) -> None:
        try:
            while self._take_frame(self._steps[rank], take):
                pass
        except (ChannelClosed, ChannelStuck):
            # The rank is dead, and so will the instance be as soon as its coordinator notices.
            return


class _OtherLinks(RankLinks):
    """The links of another rank on a virtual socket: a wait for a message passes the time to others."""

    def __init__(self, rank: int, end: SimSocket, thread: VirtualThread) -> None:
        # Not that of production: it connects real sockets.
        self.rank = rank
        self._steps = channel_on(end, "the first rank")
        self._sending = threading.Lock()
        self._is_lost = False
        self._arrived = Signal(thread)
        end.on_arrival = self._arrived.set

    def receive(self, timeout_s: float) -> StepCleared | StepEnded | None:
        self._arrived.clear()
        message = super().receive(0.0)
        if message is None and not self.is_lost:
            self._arrived.wait(timeout_s)
            message = super().receive(0.0)
        return message


class _VirtualWorker:
    """One rank: its thread, its half and the steps that it was sent."""

    def __init__(self, rank: int, thread: VirtualThread) -> None:
        self.rank = rank
        self.thread = thread
        self.half: WorkerHalf | FollowerHalf
        self.steps: deque[VllmStep] = deque()
        self.progress = Signal(thread)
        """Set whenever something has come that the rank may wait for: a step, or what another rank has computed."""
        self.paused_until = 0.0
        self.sent_until = 0.0

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait until something is there that other ranks, or the scheduler, bring about."""
        while not is_there():
            self.progress.clear()
            self.progress.wait(_PATIENT_S)


class VllmWorkers:
    """All ranks of an instance. `report` gets what each has finished in a step, `on_problem` what a rank reads that is wrong.

    `begin` and `begun` are called when the first rank begins a step, before and after it has carried out the orders.
    """

    def __init__(
        self,
        world: World,
        cache: TagCache,
        port: HandoffPort,
        driver: Driver,
        classes: VllmClasses,
        *,
        processes: Sequence[SimProcess],
        clock: Callable[[], float],
        drain_s: float,
        lag_s: float,
        has_hooks: bool,
        held_until: Callable[[], float],
        poison: Callable[[BlockLists, int], None],
        begin: Callable[[VllmStep], None],
        begun: Callable[[VllmStep], None],
        report: Callable[[int, VllmStep, Finished], None],
        on_problem: Callable[[str], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._world = world
        self._cache = cache
        self._processes = processes
        self._has_hooks = has_hooks
        self._begin = begin
        self._begun = begun
        self._report = report
        self._on_problem = on_problem
        self.step_s = 0.002
        self._computed: Counter[tuple[int, int, int]] = Counter()
        """How many ranks of a stage have computed a layer of a step; by step, stage and layer, -1 for all of its layers."""
        shape = cache.shape
        self._tp = shape.shape.tp
        self._workers: list[_VirtualWorker] = []
        for rank, process in enumerate(processes):
            worker = _VirtualWorker(rank, VirtualThread(world, process, partial(self._held_until, rank, held_until), fail))
            self._workers.append(worker)
        news = Signal(self._workers[0].thread)
        self.news = news
        layouts = [shape.layout(rank) for rank in range(shape.ranks)]
        holders = {layer: self._tp for layout in layouts for layer in layout.layers}
        self.spans = classes.spans(port, holders, lambda lists: lists)
        self.reached = classes.reached(range(1, shape.ranks))
        self._links = self._connect(lag_s, classes, clock)
        self._links.listen(partial(take_from_rank, self.spans, self.reached))
        self.half = classes.worker(
            port,
            self.spans,
            LayerGroups(layouts[0], 1),
            news,
            drain_s,
            poison,
            cleared=lambda step: self._links.send(StepCleared(step)),
            busy=driver.engine_is_busy,
            reached=self.reached,
            clock=clock,
        )
        self._workers[0].half = self.half

    def _connect(self, lag_s: float, classes: VllmClasses, clock: Callable[[], float]) -> _FirstLinks:
        """Give every other rank its half, and a virtual socket to the first one."""
        ends: dict[int, SimSocket] = {}
        for worker in self._workers[1:]:
            end, far_end = socket_pair(self._world, self._processes[0], self._processes[worker.rank], lag_s)
            ends[worker.rank] = end
            links = _OtherLinks(worker.rank, far_end, worker.thread)
            groups = LayerGroups(self._cache.shape.layout(worker.rank), 1)
            worker.half = classes.follower(links, groups, OpenGate(), clock=clock)
        return _FirstLinks(ends)

    def start(self) -> None:
        """Let every rank take its steps."""
        for worker in self._workers:
            worker.thread.start(partial(self._work, worker))

    def close(self) -> None:
        """End every thread, wherever it is."""
        for worker in self._workers:
            worker.thread.close()

    def pause(self, rank: int, until: float) -> None:
        """Let one rank stand still."""
        self._workers[rank % len(self._workers)].paused_until = until

    def heal(self) -> None:
        """Let every rank go on."""
        for worker in self._workers:
            worker.paused_until = 0.0

    def _held_until(self, rank: int, engine: Callable[[], float]) -> float:
        return max(engine(), self._workers[rank].paused_until)

    def send(self, step: VllmStep) -> None:
        """Send a step to every rank; each gets it a little later, in order."""
        for worker in self._workers:
            worker.sent_until = max(worker.sent_until, self._world.now + self._world.random.uniform(0.0, _LAG_S))
            self._world.at(worker.sent_until, self._processes[worker.rank], partial(self._arrive, worker, step))

    def _arrive(self, worker: _VirtualWorker, step: VllmStep) -> None:
        worker.steps.append(step)
        worker.progress.set()

    # The thread of a rank.

    def _work(self, worker: _VirtualWorker) -> None:
        while True:
            worker.wait_for(lambda: bool(worker.steps))
            step = worker.steps.popleft()
            if step.computing and self._stage(worker):
                self._wait_computed(worker, (step.number, self._stage(worker) - 1, -1))
            if worker.rank == 0:
                self._begin(step)
            worker.half.begin_step(step.orders)
            if worker.rank == 0:
                self._begun(step)
            if step.computing:
                self._forward(worker, step)
            else:
                worker.thread.wait(_IDLE_S)
            worker.half.forward_done()
            finished = worker.half.end_step()
            if isinstance(worker.half, WorkerHalf):
                self._links.send(finished.of_step(worker.half.step))
            late_s = self._world.random.uniform(0.0, _LAG_S)
            self._world.after(late_s, self._processes[0], partial(self._report, worker.rank, step, finished))

    def _stage(self, worker: _VirtualWorker) -> int:
        return worker.rank // self._tp

    def _forward(self, worker: _VirtualWorker, step: VllmStep) -> None:
        layers = self._cache.shape.layers_of(worker.rank)
        stage = self._stage(worker)
        for layer in layers:
            worker.thread.wait(self._world.random.uniform(0.3, 1.0) * self.step_s / len(layers))
            if layer > layers.start:
                self._wait_computed(worker, (step.number, stage, layer - 1))
            self._compute(worker.rank, layer, step.computing)
            self._note_computed(step.number, stage, layer)
            if self._has_hooks:
                worker.half.layer_computed(layer)
        self._note_computed(step.number, stage, -1)

    def _wait_computed(self, worker: _VirtualWorker, layer: tuple[int, int, int]) -> None:
        worker.wait_for(lambda: self._computed[layer] >= self._tp)

    def _note_computed(self, step: int, stage: int, layer: int) -> None:
        self._computed[step, stage, layer] += 1
        for worker in self._workers:
            worker.progress.set()

    def _compute(self, rank: int, layer: int, computing: Sequence[ScheduledTokens]) -> None:
        """First every request's keys and values of this layer are written, then every request's attention reads."""
        cache, size = self._cache, self._cache.block_tokens
        for each in computing:
            tags = tags_of(each.request.expected[: each.end])
            for position in range(each.first, each.end):
                block = each.blocks[position // size]
                cache.write_rank(rank, layer, block, position % size, position, tags[position], each.preemptions)
        for each in computing:
            if each.is_stale:
                continue
            tags = tags_of(each.request.expected[: each.end])
            if problem := cache.rank_problem(rank, range(layer, layer + 1), each.blocks, tags):
                self._on_problem(f"{each.request.request_id}, rank {rank}: {problem}")
