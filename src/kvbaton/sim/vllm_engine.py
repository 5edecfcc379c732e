"""Both halves of the vLLM connector in a simulated instance, under a small scheduler with vLLM's habits.

The halves, what counts computed layers and reached steps, and the links between ranks are those of production; so are the
driver and the rank loops under them. Simulated are the loop of vLLM's engine core, which builds steps and takes what came of
them, with as many under way as its set-up has (`vllm_scheduler`), its workers (`vllm_workers`), and the clients. What the
halves report to vLLM is held to the truth: a sending is finished when its source side has ended, a receiving when its target
side has, and each by every rank in the same step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import Allocation, EngineEvent, Landed, SourceEnded, TargetEnded
from kvbaton.agent.rank_orders import CopyId
from kvbaton.config import Limits, OnFailure
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import BlockLists, Executor, HandoffKey, Incarnation, Mode, Outcome
from kvbaton.core.timeline import Side
from kvbaton.engines.embedded.pool import BlockPool, PrefixDigests
from kvbaton.engines.vllm.orders import FailLoad, SourceBegins, StepReport, TargetBegins
from kvbaton.engines.vllm.requests import HandoffInfo
from kvbaton.engines.vllm.scheduler_half import Room
from kvbaton.engines.vllm.specs import TokenCounts
from kvbaton.engines.vllm.worker_half import Finished
from kvbaton.errors import Bug
from kvbaton.sim.engine import Ended, SimEngine, SimPrompt
from kvbaton.sim.script import VllmScript
from kvbaton.sim.tag_model import CONTEXT_TOKENS, FreedBlocks, TagCache, answer_to, prompt_ids, tags_of, token_ids
from kvbaton.sim.vllm_scheduler import StepResult, VllmRequest, VllmScheduler, VllmStatus, VllmStep, all_of
from kvbaton.sim.vllm_workers import VllmClasses, VllmWorkers
from kvbaton.sim.watched_port import WatchedPort
from kvbaton.sim.world import SimProcess

__all__ = ["VllmEngine"]

_TURN_S = 2e-4
"""How long the loop of the engine core needs at most for a turn."""

_MOST_RUNNING = 4
_LOOKAHEAD = 2
"""So many tokens more than it will say a request may ask for: no scheduler knows where an answer ends."""


@dataclass(slots=True, eq=False)
class _AskedRequest:
    """One request at the engine, as its client and the rules see it."""

    request: VllmRequest
    key: HandoffKey | None = None
    side: Side | None = None
    number: int = 0
    mode: Mode = Mode.PUSH
    answer: Callable[[], None] | None = None
    ended: Ended | None = None
    end: SourceEnded | TargetEnded | Landed | None = None
    """How its side of the hand-off ended."""
    is_expected: bool = False
    """Whether the agents were asked for it."""
    is_granted: bool = False
    """Whether the agents have its blocks."""
    reason: str = "the load failed"
    is_over: bool = False

    def finish(self, outcome: Outcome, reason: str) -> None:
        """Report the end of the attempt to the router, once."""
        if not self.is_over and self.ended is not None and self.key is not None:
            self.is_over = True
            self.ended(self.key, outcome, reason)


@dataclass(eq=False, kw_only=True)
class VllmEngine(SimEngine):
    """One vLLM with the connector of production. `processes` has that of the engine first, then those of the other ranks."""

    cache: TagCache
    clock: Callable[[], float]
    mode: Mode
    on_failure: OnFailure
    limits: Limits
    step_tokens: int
    set_up: VllmScript
    processes: list[SimProcess]
    lag_s: float
    address: ControlAddress
    incarnation: Incarnation
    notify: Callable[[EngineEvent], None]
    fail: Callable[[Exception], None]
    classes: VllmClasses
    retracted_total: int = 0
    _asked: dict[str, _AskedRequest] = field(default_factory=dict)
    """All of the run: orders about a request can reach the workers when it is over."""
    _live: dict[tuple[Side, HandoffKey], deque[_AskedRequest]] = field(default_factory=dict)
    """Those that the agents were asked for and have yet to report the end of, in that order."""
    _loads: dict[HandoffKey, _AskedRequest] = field(default_factory=dict)
    """Whose blocks the agents were given last for a hand-off."""
    _beginning: dict[tuple[Side, HandoffKey], _AskedRequest] = field(default_factory=dict)
    _inbox: deque[Callable[[], None]] = field(default_factory=deque)
    _aborts: deque[str] = field(default_factory=deque)
    _under_way: deque[VllmStep] = field(default_factory=deque)
    _outputs: dict[int, dict[int, Finished]] = field(default_factory=dict)
    _sent_counts: Counter[str] = field(default_factory=Counter)
    _received_counts: Counter[str] = field(default_factory=Counter)
    _wakes_at: float = float("inf")
    _is_changed: bool = False
    _requests: int = 0

    def start(self) -> None:
        if not isinstance(self.port, Driver):
            raise Bug("the connector of production runs under a driver")
        shape = self.cache.shape
        counts = TokenCounts(sizes=(shape.block_tokens,))
        self._pool = BlockPool(shape.blocks, shape.block_tokens)
        room = Room(counts.blocks(CONTEXT_TOKENS), self.limits.defer_timeout, self._free_blocks, self._held_blocks, self.clock)
        self._half = self.classes.scheduler(self.mode, counts, is_source=True, is_target=True, room=room)
        self._half.meet_worker(HandoffInfo(self.address, self.incarnation, shape.shape.tp))
        self._scheduler = VllmScheduler(
            self._half,
            self._pool,
            step_tokens=self.step_tokens,
            most_running=_MOST_RUNNING,
            stages=shape.stages,
            is_async=self.set_up.is_async,
            has_fence=self.set_up.has_fence,
            is_source=True,
            recomputes=self.on_failure is OnFailure.RECOMPUTE,
            ended=self._on_end,
            settled=self._on_settled,
            broken=lambda rule, detail: self.world.violate(rule, f"{self.name}: {detail}"),
        )
        self._workers = VllmWorkers(
            self.world,
            self.cache,
            WatchedPort(self.port, self),
            self.port,
            self.classes,
            processes=self.processes,
            clock=self.clock,
            drain_s=self.limits.stop_timeout,
            lag_s=self.lag_s,
            has_hooks=self.set_up.has_hooks,
            held_until=lambda: self.silent_until,
            poison=self._poison,
            begin=self._on_begin,
            begun=self._on_begun,
            report=self._on_output,
            on_problem=self._on_problem,
            fail=self.fail,
        )
        self._freed = FreedBlocks(self._pool, self.cache)
        self._workers.start()

    def close(self) -> None:
        self._workers.close()

    @property
    def step_s(self) -> float:
        """How long a stage computes in one step at most."""
        return self._workers.step_s

    @step_s.setter
    def step_s(self, seconds: float) -> None:
        self._workers.step_s = seconds

    # Requests.

    def prefill(self, prompt: SimPrompt, answer: Callable[[], None], ended: Ended) -> None:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": prompt.key.transfer_id}
        asked = self._ask(_ids(prompt), 1, params)
        asked.key, asked.side, asked.number, asked.mode = prompt.key, Side.SOURCE, prompt.number, prompt.mode
        asked.answer, asked.ended = answer, ended
        self._submit(asked)

    def fetch(self, prompt: SimPrompt, source: ControlAddress, incarnation: Incarnation | None, ended: Ended) -> None:
        params: dict[str, Any] = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": prompt.key.transfer_id,
            "remote_host": source.host,
            "remote_port": source.handshake,
            "remote_engine_id": incarnation,
        }
        asked = self._ask(_ids(prompt), prompt.outputs, params)
        asked.key, asked.side, asked.number, asked.mode = prompt.key, Side.TARGET, prompt.number, prompt.mode
        asked.ended = ended
        if self.refuse_next > 0:
            self.refuse_next -= 1
            asked.request.abort_immediately = True
            asked.reason = "refused"
        self._submit(asked)

    def generate(self, tokens: int, outputs: int) -> None:
        """A request without a hand-off arrives."""
        self._submit(self._ask(tuple(token_ids(f"{self.name} {self._requests}", 0, tokens)), outputs, None))

    def _ask(self, ids: tuple[int, ...], outputs: int, params: dict[str, Any] | None) -> _AskedRequest:
        self._requests += 1
        request = VllmRequest(
            request_id=f"cmpl-{self._requests}-0-{self._requests:08x}",
            kv_transfer_params=params,
            prompt_token_ids=ids,
            expected=(*ids, *answer_to(ids, outputs + _LOOKAHEAD + 1)),
            max_tokens=outputs + (_LOOKAHEAD if outputs > 1 else 0),
            stops_after=outputs,
            digests=PrefixDigests(self.cache.block_tokens),
        )
        return _AskedRequest(request)

    def _submit(self, asked: _AskedRequest) -> None:
        self._asked[asked.request.request_id] = asked
        self._inbox.append(partial(self._scheduler.add, asked.request))
        self.schedule()

    def cancel(self, key: HandoffKey) -> None:
        for asked in list(self._asked.values()):
            if asked.key == key and not asked.request.status.is_end:
                self._aborts.append(asked.request.request_id)
        self.schedule()

    def _on_end(self, request: VllmRequest, params: dict[str, Any] | None) -> None:
        """vLLM has ended a request: its client learns of it."""
        asked = self._asked[request.request_id]
        answer = list(request.expected[request.num_prompt_tokens : request.num_prompt_tokens + len(request.output_token_ids)])
        if request.output_token_ids != answer:
            detail = f"{self.name}: {request.request_id} was answered {request.output_token_ids}, and not {answer}"
            self.world.violate("foreign byte", detail)
        if request.abort_immediately:
            asked.finish(Outcome.FAILED, "refused")
        elif request.status is VllmStatus.FINISHED_ABORTED:
            asked.finish(Outcome.CANCELLED, "the request was cancelled")
        elif request.status is VllmStatus.FINISHED_ERROR:
            asked.finish(Outcome.FAILED, asked.reason)
            if asked.key is None:
                self.world.violate("spurious failure", f"{self.name}: a request without a hand-off: {request.request_id}")
        elif asked.answer is not None:
            if params is None or "do_remote_prefill" not in params:
                # Its hand-off was over before it began, and vLLM has computed the answer all the same.
                asked.finish(Outcome.FAILED, asked.reason)
            else:
                self._check_answer(asked, params)
                asked.answer()
        else:
            asked.finish(Outcome.DELIVERED, "")

    def _check_answer(self, asked: _AskedRequest, params: dict[str, Any]) -> None:
        """What the answer of a prefill carries leads the target here."""
        key, port = asked.key, self.address.handshake
        expected = (True, None if key is None else key.transfer_id, self.incarnation, self.address.host, port)
        names = ("do_remote_prefill", "transfer_id", "remote_engine_id", "remote_host", "remote_port")
        if tuple(params[name] for name in names) != expected:
            self.world.find("as set", f"{self.name}: the answer of {key} has {params}")

    # The loop of the engine core.

    def schedule(self) -> None:
        """Wake the loop."""
        self._wake(self.world.random.uniform(0.0, _TURN_S))

    def wake_worker(self) -> None:
        """The agents have something to report."""
        self._workers.news.set()

    def _wake(self, after_s: float) -> None:
        when = self.world.now + after_s
        if when < self._wakes_at:
            self._wakes_at = when
            self.world.at(when, self.process, self._on_time)

    def _on_time(self) -> None:
        if self.world.now + 1e-12 < self._wakes_at:
            return
        self._wakes_at = float("inf")
        if self.is_silent:
            self._wake(self.silent_until - self.world.now)
            return
        try:
            self._turn()
        except Bug as error:
            # The pool has noticed that a block is in two places or in none.
            self.world.violate("blocks conserved", f"{self.name}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is an error of ours
            self.fail(error)
        self._is_changed = True
        self._freed.mark()

    def _turn(self) -> None:
        """Fill the queue of steps first; when it is full, or there is nothing to step for, take what the oldest has brought."""
        is_blocked = len(self._under_way) >= self._scheduler.depth
        if not is_blocked:
            while self._inbox:
                self._inbox.popleft()()
            self._take_aborts()
            if self._scheduler.has_requests:
                step = self._scheduler.schedule()
                self._under_way.append(step)
                self._workers.send(step)
                if len(self._under_way) < self._scheduler.depth and (step.computing or self._scheduler.has_requests):
                    self.schedule()
                    return
        if self._under_way and len(self._outputs.get(self._under_way[0].number, ())) == len(self.processes):
            self._take_outputs()
            self.schedule()

    def _take_aborts(self) -> None:
        while self._aborts:
            self._scheduler.abort(self._aborts.popleft())

    def _take_outputs(self) -> None:
        step = self._under_way.popleft()
        outputs = self._outputs.pop(step.number)
        sending: list[str] = []
        receiving: list[str] = []
        failed: set[str] = set()
        report = StepReport()
        for rank in sorted(outputs):
            finished = outputs[rank]
            sending += all_of(finished.sending, self._sent_counts, len(self.processes))
            receiving += all_of(finished.receiving, self._received_counts, len(self.processes))
            failed |= finished.failed
            report = report.aggregate(finished.report)
        for what, counts in (("sending", self._sent_counts), ("receiving", self._received_counts)):
            if counts:
                detail = f"{self.name}: not every rank has reported as finished {what}: {dict(counts)}"
                self.world.violate("one outcome", detail)
        self._take_aborts()
        self._scheduler.take(step, StepResult(sending, receiving, failed, report))

    def _on_output(self, rank: int, step: VllmStep, finished: Finished) -> None:
        outputs = self._outputs.setdefault(step.number, {})
        outputs[rank] = finished
        if len(outputs) == len(self.processes):
            self.schedule()

    # What the halves call, and are notified of.

    def _free_blocks(self) -> int:
        return self._pool.free

    def _held_blocks(self, request_id: str) -> int:
        return len(self._scheduler.requests[request_id].blocks)

    def _poison(self, blocks: BlockLists, cached_tokens: int) -> None:
        self.cache.poison(blocks[0][cached_tokens // self.cache.block_tokens :])

    def _on_begin(self, step: VllmStep) -> None:
        """The first rank begins a step: remember which requests its orders begin, and why others fail."""
        self._beginning.clear()
        for order in step.orders.orders:
            asked = self._asked[order.request_id]
            if isinstance(order, SourceBegins):
                self._beginning.setdefault((Side.SOURCE, order.key), asked)
            elif isinstance(order, TargetBegins):
                self._beginning.setdefault((Side.TARGET, order.wanted.key), asked)
            elif isinstance(order, FailLoad) and "live already" not in asked.reason:
                asked.reason = "live already" if "under way already" in order.reason else order.reason

    def _on_begun(self, step: VllmStep) -> None:
        """What the first rank has not taken up is under way already."""
        del step
        for asked in self._beginning.values():
            if not asked.is_expected:
                asked.reason = "live already"
        self._beginning.clear()

    def on_expected(self, key: HandoffKey, side: Side) -> None:
        """The halves have taken up a request of a hand-off."""
        asked = self._beginning[side, key]
        asked.is_expected = True
        self._live.setdefault((side, key), deque()).append(asked)
        self.watch.submitted(key, str(side))

    def on_allocated(self, allocation: Allocation) -> None:
        """The agents get the blocks of a target."""
        asked = self._live[Side.TARGET, allocation.key][-1]
        asked.is_granted = True
        self._loads[allocation.key] = asked
        if allocation.cached_tokens < allocation.tokens:
            self.watch.allocated(allocation.key)

    def on_event(self, event: EngineEvent) -> None:
        if not isinstance(event, SourceEnded | TargetEnded | Landed):
            return
        side = Side.SOURCE if isinstance(event, SourceEnded) else Side.TARGET
        waiting = self._live.get((side, event.key))
        if not waiting:
            self.world.violate("one outcome", f"{self.name}: {event}, which is over or was not asked for")
            return
        asked = waiting.popleft()
        if not waiting:
            del self._live[side, event.key]
        asked.end = event
        self.outcomes[asked.number] = Outcome.DELIVERED if isinstance(event, Landed) else event.outcome
        if isinstance(event, TargetEnded):
            asked.reason = asked.reason if "live already" in asked.reason else event.reason
        if isinstance(event, Landed):
            self._check_landed(asked, event)

    def _check_landed(self, asked: _AskedRequest, event: Landed) -> None:
        """Every cell that had to come is there, the right one in the right place; and what is counted of it is true."""
        request, shape = asked.request, self.cache.shape
        if not request.load_number:
            self.world.violate("one outcome", f"{self.name}: {event.key} landed without blocks")
            return
        ids = request.expected[: request.num_prompt_tokens]
        first = request.cached_tokens // shape.block_tokens
        if problem := self.cache.problem(request.blocks, tags_of(ids), is_checked=self.is_checked, first_block=first):
            self.world.violate("foreign byte", f"{self.name}: {event.key}: {problem}")
        if event.aux.token_id != request.expected[len(ids)]:
            detail = f"{self.name}: {event.key} got {event.aux}, and not {request.expected[len(ids)]}"
            self.world.violate("foreign aux", detail)
        stats, executor = event.stats, self.executor if asked.mode is Mode.PUSH else Executor.TARGET_READS
        cells = (len(ids) - request.cached_tokens) * shape.cells_of_token if executor is Executor.TARGET_READS else 0
        expected = (cells, cells, executor is Executor.SOURCE_WRITES)
        if (stats.bytes_planned, stats.bytes_moved, stats.source_writes) != expected:
            self.world.find("counted", f"{self.name}: {event.key}: {stats}, and not {expected}")

    def _on_settled(self, request: VllmRequest, is_sending: bool, is_failed: bool) -> None:
        """vLLM is about to believe that a sending or receiving is finished, and takes the blocks."""
        asked = next((each for waiting in self._live.values() for each in waiting if each.request is request), None)
        if asked is not None and (is_sending or asked.is_granted):
            what = "sending" if is_sending else "receiving"
            self.world.violate("one outcome", f"{self.name}: {asked.key} is {what}, and {request.request_id} has finished")
        del is_failed

    def _on_problem(self, problem: str) -> None:
        self.world.violate("foreign byte", f"{self.name}: in a step: {problem}")

    # Blocks.

    def allocation(self, key: HandoffKey) -> int:
        asked = self._loads.get(key)
        return 0 if asked is None else asked.request.load_number

    def write_problem(self, at: int, copy: CopyId, allowed: int | None) -> str:
        block, slot = self.cache.shape.slot_at(at)
        asked = self._loads.get(copy.key)
        request = None if asked is None else asked.request
        if request is None or not request.load_number or request.load_number != allowed or block not in request.blocks:
            return f"block {block} was written for {copy} of {allowed}, which does not have it"
        position = request.blocks.index(block) * self.cache.block_tokens + slot
        if not request.cached_tokens <= position < request.num_prompt_tokens:
            needed = f"{request.cached_tokens} to {request.num_prompt_tokens}"
            return f"token {position} was written for {copy}, which needs {needed}"
        return ""

    def check(self) -> None:
        if self._is_changed:
            self._is_changed = False
            try:
                self._scheduler.check()
            except Bug as error:
                self.world.violate("blocks conserved", f"{self.name}: {error}")

    def pause_rank(self, rank: int, until: float) -> None:
        self._workers.pause(rank, until)

    def heal(self) -> None:
        super().heal()
        self._workers.heal()

    @property
    def live(self) -> int:
        # An idle vLLM takes what its agents report with its next step.
        at_worker = 0 if vars(self.port)["_events"] else self._workers.half.live
        return len(self._scheduler.requests) + len(self._inbox) + self._half.live + at_worker

    @property
    def preempted_total(self) -> int:
        """How often vLLM has taken blocks from a request that ran."""
        return self._scheduler.preempted_total

    @property
    def cached_tokens_total(self) -> int:
        """How many tokens of prompts were found in the prefix cache."""
        return self._scheduler.cached_tokens_total

    def kept(self) -> Iterator[str]:
        """What the halves keep although there is no request."""
        if vars(self.port)["_events"]:
            return
        parts: list[object] = [self._half, self._workers.half, self._workers.spans, self._workers.reached]
        names = (
            "_sources",
            "_targets",
            "_orders",
            "_unstepped",
            "_begun",
            "_unmarked",
            "_steps",
            "_numbers",
            "_blocks",
            "_held",
        )
        for part in parts:
            for name in (*names, "_undrained"):
                value = vars(part).get(name)
                if isinstance(value, Sized) and value:
                    yield f"{type(part).__name__}.{name}: {value}"

    def blocks_out(self) -> int:
        return self._pool.total - self._pool.free


def _ids(prompt: SimPrompt) -> tuple[int, ...]:
    return prompt_ids(prompt.prefix, prompt.shared, prompt.client, prompt.tokens)
