"""The embedded engine of production in a simulated instance: its queue, scheduler, block pool and prefix cache, as they are.

What is simulated is its thread, which takes a step when it is woken and while there is something to do; its model, which
computes tags; and the server and its clients, which submit, cancel and check every token of every answer. One serves both
sides of hand-offs, and requests without one. What it calls, and what it is notified of, goes through a port that looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import Allocation, EngineEvent, Landed, SourceEnded, TargetEnded
from kvbaton.agent.rank_orders import CopyId
from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.grants import Reserve
from kvbaton.core.handoff import Executor, HandoffKey, Incarnation, Mode, Outcome, RequestId
from kvbaton.core.timeline import Side
from kvbaton.engines.embedded.engine import Engine
from kvbaton.engines.embedded.engine_core import EngineCore
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.engines.embedded.request import (
    ApiCall,
    EngineBusy,
    FinishReason,
    FromSource,
    GenerationRequest,
    Sampling,
    TokenOutput,
    ToTarget,
)
from kvbaton.engines.embedded.scheduler import Scheduler
from kvbaton.engines.embedded.sequence import Sequence as EngineSequence
from kvbaton.engines.embedded.sequence import SequenceStatus
from kvbaton.engines.embedded.settings import EngineSettings
from kvbaton.errors import Bug
from kvbaton.sim.engine import Ended, SimEngine, SimPrompt
from kvbaton.sim.tag_model import FreedBlocks, LoadedTags, TagCache, answer_to, prompt_ids, tags_of, token_ids
from kvbaton.sim.watched_port import WatchedPort

__all__ = ["EMBEDDED", "EmbeddedClasses", "EmbeddedEngine"]

_WAKE_S = 5e-4
"""How long the thread needs at most to notice that it was woken."""

_MOST_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class EmbeddedClasses:
    """Which classes an engine is built from; planted bugs replace some of them."""

    core: type[EngineCore] = EngineCore
    scheduler: type[Scheduler] = Scheduler
    pool: type[BlockPool] = BlockPool


EMBEDDED = EmbeddedClasses()
"""Those of production."""


@dataclass(slots=True, eq=False)
class _ClientRequest:
    """One request at the engine, as its client sees it."""

    request: GenerationRequest
    expected: list[int]
    """What the answer has to be."""
    number: int = 0
    mode: Mode = Mode.PUSH
    answer: Callable[[], None] | None = None
    ended: Ended | None = None
    got: list[int] = field(default_factory=list)
    is_over: bool = False
    has_landed: bool = False

    def end(self, outcome: Outcome, reason: str) -> None:
        """Report the end of the attempt to the router, once."""
        if not self.is_over and self.ended is not None and self.request.handoff is not None:
            self.is_over = True
            self.ended(self.request.handoff.key, outcome, reason)


@dataclass(eq=False, kw_only=True)
class EmbeddedEngine(SimEngine):
    """One engine of production, with its server and clients. `notify` is called with every event before the engine has it."""

    cache: TagCache
    clock: Callable[[], float]
    handoff: HandoffSettings
    both_roles: bool
    defer_timeout: float
    step_tokens: int
    notify: Callable[[EngineEvent], None]
    fail: Callable[[Exception], None]
    classes: EmbeddedClasses
    step_s: float = 0.002
    retracted_total: int = 0
    _asked: dict[RequestId, _ClientRequest] = field(default_factory=dict)
    _sources: dict[HandoffKey, _ClientRequest] = field(default_factory=dict)
    _targets: dict[HandoffKey, _ClientRequest] = field(default_factory=dict)
    """Hand-offs that have not ended, by side."""
    _is_woken: bool = False
    _is_changed: bool = False
    _requests: int = 0

    def start(self) -> None:
        if not isinstance(self.port, Driver):
            raise Bug("the engine of production runs under a driver")
        settings = EngineSettings(
            step_tokens=self.step_tokens,
            max_sequences=_MOST_SEQUENCES,
            poison=True,
            handoff=self.handoff,
            has_both_roles=self.both_roles,
            defer_timeout_s=self.defer_timeout,
        )
        loaded = LoadedTags.of(self.cache.shape, self._on_problem)
        self._model = loaded.model
        self.engine = Engine(loaded, self.cache, WatchedPort(self.port, self), settings, self.clock)
        self._core: EngineCore = vars(self.engine)["_core"]
        scheduler: Scheduler = vars(self._core)["_scheduler"]
        self._pool = scheduler.pool
        self._scheduler = scheduler
        classes = self.classes
        for part, kind in ((self._core, classes.core), (scheduler, classes.scheduler), (self._pool, classes.pool)):
            # Not by way of arguments: the engine has no switch for planted bugs.
            part.__class__ = kind
        self._freed = FreedBlocks(self._pool, self.cache)
        self._check_reserve(scheduler.reserve)

    def _check_reserve(self, reserve: Reserve) -> None:
        """With one role, only a source that waits for grants leaves blocks free; with both, each that waits does."""
        waits = self.handoff.mode is Mode.PUSH
        expected = (self.both_roles, waits, self.both_roles or waits, self.both_roles and waits)
        left = (reserve.is_shared, reserve.has_grants, reserve.source > 0, reserve.target > 0)
        if left != expected:
            self.world.find("as set", f"{self.name}: {reserve} is left free")

    # Requests.

    def prefill(self, prompt: SimPrompt, answer: Callable[[], None], ended: Ended) -> None:
        ids = prompt_ids(prompt.prefix, prompt.shared, prompt.client, prompt.tokens)
        asked = self._ask(prompt, ids, 1, ToTarget(prompt.key), ended)
        asked.answer = answer
        self._submit(asked)

    def fetch(self, prompt: SimPrompt, source: ControlAddress, incarnation: Incarnation | None, ended: Ended) -> None:
        asked = self._ask(
            prompt,
            prompt_ids(prompt.prefix, prompt.shared, prompt.client, prompt.tokens),
            prompt.outputs,
            FromSource(prompt.key, source, incarnation),
            ended,
        )
        if self.refuse_next > 0:
            self.refuse_next -= 1
            self._decline(asked, "the queue is full")
        else:
            self._submit(asked)

    def generate(self, tokens: int, outputs: int) -> None:
        """A request without a hand-off arrives."""
        ids = tuple(token_ids(f"{self.name} {self._requests}", 0, tokens))
        self._submit(self._ask(None, ids, outputs, None, None))

    def _ask(
        self,
        prompt: SimPrompt | None,
        ids: tuple[int, ...],
        outputs: int,
        handoff: ToTarget | FromSource | None,
        ended: Ended | None,
    ) -> _ClientRequest:
        self._requests += 1
        request = GenerationRequest(
            RequestId(f"r{self._requests}"), ids, Sampling(outputs, ignore_eos=True), handoff, call=ApiCall()
        )
        asked = _ClientRequest(request, answer_to(ids, outputs), ended=ended)
        if prompt is not None:
            asked.number, asked.mode = prompt.number, prompt.mode
        return asked

    def _submit(self, asked: _ClientRequest) -> None:
        self._asked[asked.request.request_id] = asked
        try:
            self.engine.submit(asked.request, partial(self._on_output, asked))
        except EngineBusy as error:
            del self._asked[asked.request.request_id]
            self._decline(asked, str(error))
        self.schedule()

    def _decline(self, asked: _ClientRequest, reason: str) -> None:
        """What the server does with a request that it does not take."""
        if isinstance(asked.request.handoff, FromSource):
            self.engine.decline(asked.request, reason)
        asked.end(Outcome.FAILED, "refused")
        self.schedule()

    def cancel(self, key: HandoffKey) -> None:
        asked = self._targets.get(key) or self._sources.get(key)
        if asked is not None:
            self.engine.cancel(asked.request.request_id)
            self.schedule()

    def _on_output(self, asked: _ClientRequest, output: TokenOutput) -> None:
        """The client gets a token, or the end of its answer."""
        if output.token_id >= 0:
            asked.got.append(output.token_id)
        if asked.got != asked.expected[: len(asked.got)]:
            detail = f"{self.name}: {asked.request.request_id} was answered {asked.got}, and not {asked.expected}"
            self.world.violate("foreign byte", detail)
        match output.finish_reason:
            case None:
                return
            case FinishReason.LENGTH if asked.answer is not None:
                asked.answer()
            case FinishReason.LENGTH:
                asked.end(Outcome.DELIVERED, "")
            case FinishReason.CANCELLED:
                asked.is_over = asked.is_over or asked.has_landed
                asked.end(Outcome.CANCELLED, "the request was cancelled")
            case _:
                is_second = "under way already" in output.error
                asked.end(Outcome.FAILED, "live already" if is_second else output.error)
                if asked.request.handoff is None:
                    self.world.violate("spurious failure", f"{self.name}: a request without a hand-off: {output.error}")
        self._asked.pop(asked.request.request_id, None)

    # The thread.

    def schedule(self) -> None:
        """Wake the thread."""
        if not self._is_woken:
            self._is_woken = True
            self.world.after(self.world.random.uniform(0.0, _WAKE_S), self.process, self._turn)

    def _turn(self) -> None:
        self._is_woken = False
        if self.is_silent:
            self.world.at(self.silent_until, self.process, self.schedule)
            return
        try:
            worked = self.engine.step()
        except Bug as error:
            # The engine itself has noticed that a block, or a request, is in two places or in none.
            self.world.violate("blocks conserved", f"{self.name}: {error}")
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it is an error of ours
            self.fail(error)
            return
        self._is_changed = True
        self._freed.mark()
        if worked:
            self._is_woken = True
            self.world.after(self.step_s, self.process, self._turn)

    # What the engine calls, and is notified of.

    def on_expected(self, key: HandoffKey, side: Side) -> None:
        """The engine has taken up a request of a hand-off."""
        sequences: dict[HandoffKey, EngineSequence] = vars(self._core)["_sources" if side is Side.SOURCE else "_targets"]
        asked = self._asked[sequences[key].request.request_id]
        (self._sources if side is Side.SOURCE else self._targets)[key] = asked
        self.watch.submitted(key, str(side))

    def on_allocated(self, allocation: Allocation) -> None:
        """The engine has blocks for a target; those of its prefix cache hold what they have to."""
        ids = self._targets[allocation.key].request.prompt_ids
        tags = tags_of(ids[: allocation.cached_tokens])
        if problem := self.cache.problem(allocation.blocks[0], tags):
            self.world.violate("half-landed prefix", f"{self.name}: {allocation.key}: {problem}")
        if allocation.cached_tokens < allocation.tokens:
            self.watch.allocated(allocation.key)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case SourceEnded():
                if (asked := self._end(self._sources, event)) is not None and event.outcome is not Outcome.DELIVERED:
                    asked.end(event.outcome, event.reason)
            case TargetEnded():
                self._end(self._targets, event)
            case Landed():
                if (asked := self._end(self._targets, event)) is not None:
                    asked.has_landed = True
                    self._check_landed(asked, event)
            case _:
                pass

    def _end(self, side: dict[HandoffKey, _ClientRequest], event: SourceEnded | TargetEnded | Landed) -> _ClientRequest | None:
        asked = side.pop(event.key, None)
        if asked is None:
            self.world.violate("one outcome", f"{self.name}: {event}, which is over or was not asked for")
            return None
        self.outcomes[asked.number] = Outcome.DELIVERED if isinstance(event, Landed) else event.outcome
        return asked

    def _check_landed(self, asked: _ClientRequest, event: Landed) -> None:
        """Every cell of the prompt is there, the right one in the right place; and what is counted of it is true."""
        sequence = self._target(event.key)
        if sequence is None:
            self.world.violate("one outcome", f"{self.name}: {event.key} landed without blocks")
            return
        ids = asked.request.prompt_ids
        tags = tags_of(ids)
        if problem := self.cache.problem(sequence.blocks, tags, is_checked=self.is_checked):
            self.world.violate("foreign byte", f"{self.name}: {event.key}: {problem}")
        if event.aux.token_id != asked.expected[0]:
            self.world.violate("foreign aux", f"{self.name}: {event.key} got {event.aux}, and not {asked.expected[0]}")
        self._model.learn(tags)
        stats, executor = event.stats, self.executor if asked.mode is Mode.PUSH else Executor.TARGET_READS
        cells = (len(ids) - sequence.computed) * self.cache.shape.cells_of_token if executor is Executor.TARGET_READS else 0
        expected = (cells, cells, executor is Executor.SOURCE_WRITES)
        if (stats.bytes_planned, stats.bytes_moved, stats.source_writes) != expected:
            self.world.find("counted", f"{self.name}: {event.key}: {stats}, and not {expected}")

    def _on_problem(self, problem: str) -> None:
        self.world.violate("foreign byte", f"{self.name}: in a step of the model: {problem}")

    # Blocks.

    def _target(self, key: HandoffKey) -> EngineSequence | None:
        """The request whose blocks are being filled."""
        sequence: EngineSequence | None = vars(self._core)["_targets"].get(key)
        return sequence if sequence is not None and sequence.status is SequenceStatus.FETCHING else None

    def allocation(self, key: HandoffKey) -> int:
        sequence = self._target(key)
        return 0 if sequence is None else sequence.number + 1

    def write_problem(self, at: int, copy: CopyId, allowed: int | None) -> str:
        block, slot = self.cache.shape.slot_at(at)
        sequence = self._target(copy.key)
        if sequence is None or sequence.number + 1 != allowed or block not in sequence.blocks:
            return f"block {block} was written for {copy} of {allowed}, which does not have it"
        position = sequence.blocks.index(block) * self.cache.block_tokens + slot
        if not sequence.computed <= position < sequence.prompt_tokens:
            return f"token {position} was written for {copy}, which needs {sequence.computed} to {sequence.prompt_tokens}"
        return ""

    def check(self) -> None:
        if self._is_changed:
            self._is_changed = False
            try:
                self._core.check_integrity()
            except Bug as error:
                self.world.violate("blocks conserved", f"{self.name}: {error}")

    @property
    def live(self) -> int:
        core = vars(self._core)
        return len({id(each) for name in ("_live", "_sources", "_targets") for each in core[name].values()})

    @property
    def preempted_total(self) -> int:
        """How often the engine has taken blocks from a request that ran."""
        return self._scheduler.preemptions_total

    @property
    def cached_tokens_total(self) -> int:
        """How many tokens of prompts were found in the prefix cache."""
        return self._scheduler.cached_tokens_total

    def blocks_out(self) -> int:
        return self._pool.total - self._pool.free
