"""What every simulated engine is to a run; and models of the two engines: they allocate, compute, preempt, decode and free as
real ones do, and check what they get. The engine of production is in `embedded_engine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import (
    Allocation,
    Drained,
    EngineEvent,
    Granted,
    Landed,
    Offer,
    SourceEnded,
    SourceRequest,
    TargetEnded,
)
from kvbaton.agent.rank_orders import CopyId
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.grants import may_start_prefill
from kvbaton.core.handoff import Aux, Executor, HandoffKey, Incarnation, Mode, Outcome, Span, TransferId
from kvbaton.core.lifecycle import SourceState, TargetState
from kvbaton.sim.memory import FREED, POISON, RankMemory, SimBlockPool, TaggedCell
from kvbaton.sim.watch import Watch
from kvbaton.sim.world import SimProcess, World

__all__ = ["Ended", "Fetch", "Prefill", "SimEngine", "SimPrompt", "SourceEngine", "TargetEngine"]

_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})

Ended = Callable[[HandoffKey, Outcome, str], None]


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """What one attempt of a client asks for: `tokens` tokens, the first `shared` of which are those of `prefix`."""

    key: HandoffKey
    number: int
    client: int
    tokens: int
    prefix: int
    shared: int
    mode: Mode
    chunk: int
    outputs: int = 1
    is_streamed: bool = True
    """Whether its spans are reported as they are computed; if not, the whole cache is offered when it is complete."""
    offer_after_s: float = 0.0
    """How long after its last span the cache is offered: the first token takes a while, too."""

    @property
    def digest(self) -> str:
        """What the tokens are."""
        return f"{self.client}/{self.tokens}"

    def content(self, token: int) -> str:
        """What the KV of a token depends on."""
        return f"prefix {self.prefix}" if token < self.shared else f"request {self.client}"


@dataclass(eq=False, kw_only=True)
class SimEngine:
    """An engine as a run and its instance see it: a coordinator behind a port, how each attempt ended, and whether it hangs."""

    world: World
    process: SimProcess
    name: str
    coordinator: Coordinator = field(init=False)
    port: Coordinator | Driver = field(init=False)
    """What it calls: the coordinator itself, or a driver, which passes that on a little later."""
    watch: Watch = field(init=False)
    executor: Executor = Executor.TARGET_READS
    """Which side copies in push."""
    is_checked: bool = False
    """Whether checksums guard every byte, so that not even a corrupt one may be served."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    silent_since: float = 0.0
    silent_until: float = 0.0
    """Until when it hangs: it takes no step, no request and no event."""
    stuck_until: float = 0.0
    """Until when it takes its steps, and starts and computes nothing in them."""
    refuse_next: int = 0
    refuses_whole: bool = False
    refuses_once: bool = False
    """Whether a transfer id that is refused as a whole is taken, or refused anew, when it comes again."""
    wake_agents: Callable[[], None] = field(default=lambda: None)
    """Has what was called for done now, and not with the next turn of the instance, whatever that is for."""

    @property
    def is_silent(self) -> bool:
        """Whether it hangs."""
        return self.world.now < self.silent_until

    @property
    def idle_until(self) -> float:
        """When it starts and computes something again; in the past while it works."""
        return max(self.silent_until, self.stuck_until)

    def start(self) -> None:
        """Coordinator, port and watch are set: from now on it may be called."""

    def prefill(self, prompt: SimPrompt, answer: Callable[[], None], ended: Ended) -> None:
        """A request arrives whose cache is to be handed off; `answer` is called when its prefill is complete."""
        raise NotImplementedError

    def fetch(self, prompt: SimPrompt, source: ControlAddress, incarnation: Incarnation | None, ended: Ended) -> None:
        """A request arrives whose cache comes from `source`."""
        raise NotImplementedError

    def cancel(self, key: HandoffKey) -> None:
        """The client is gone."""
        raise NotImplementedError

    def on_event(self, event: EngineEvent) -> None:
        """The coordinator has decided something."""
        raise NotImplementedError

    def schedule(self) -> None:
        """Start what fits."""
        raise NotImplementedError

    def preempt(self) -> bool:
        """Take the blocks of a prefill that is not finished; whether there was one."""
        return False

    def pause_rank(self, rank: int, until: float) -> None:
        """Let what the engine computes on one rank stand still, where its ranks have threads of their own."""

    def heal(self) -> None:
        """Forget the faults that have yet to strike."""
        self.refuse_next = 0

    def kept(self) -> Iterator[str]:
        """What the engine keeps although it has no request: each is a leak."""
        return iter(())

    def close(self) -> None:
        """The run is over: end what is not part of its world."""

    def check(self) -> None:
        """Blocks are conserved."""
        raise NotImplementedError

    def allocation(self, key: HandoffKey) -> int:
        """The number of the live allocation that is to be filled for `key`; 0 without one."""
        del key
        return 0

    def write_problem(self, at: int, copy: CopyId, allowed: int | None) -> str:
        """Why a copy must not write to this cell of a rank; `allowed` is the allocation that its grant was for."""
        raise NotImplementedError

    @property
    def live(self) -> int:
        """Requests that are not over."""
        raise NotImplementedError

    def blocks_out(self) -> int:
        """Blocks that are neither free nor merely cached."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class _Twin(SimEngine):
    """What both models have: memory and blocks of one token each."""

    pool: SimBlockPool
    memories: list[RankMemory]
    layers: int
    _allocations: int = 0

    def check(self) -> None:
        if self.pool.is_changed:
            self.pool.check()

    def blocks_out(self) -> int:
        return self.pool.total - len(self.pool.free)


@dataclass(slots=True, eq=False)
class Prefill:
    """A request at a source engine."""

    prompt: SimPrompt
    answer: Callable[[], None]
    ended: Ended
    blocks: list[int] = field(default_factory=list)
    attempt: int = 0
    computed: int = 0
    layer: int = 0
    spans: int = 0
    is_running: bool = False
    is_offered: bool = False
    is_retracting: bool = False
    has_grant: bool = False


@dataclass(eq=False, kw_only=True)
class SourceEngine(_Twin):
    """A prefill engine: computes chunk by chunk, layer by layer, and holds finished blocks until the hand-off has ended."""

    step_s: float = 0.002
    reserved: int = 0
    requests: dict[HandoffKey, Prefill] = field(default_factory=dict)
    waiting: deque[Prefill] = field(default_factory=deque)

    @property
    def live(self) -> int:
        return len(self.requests)

    def write_problem(self, at: int, copy: CopyId, allowed: int | None) -> str:
        del at, allowed
        return f"a write to source memory by {copy}"

    def prefill(self, prompt: SimPrompt, answer: Callable[[], None], ended: Ended) -> None:
        if prompt.key in self.requests:
            ended(prompt.key, Outcome.FAILED, "live already")
            return
        if self.refuse_next > 0:
            self.refuse_next -= 1
            self.outcomes[prompt.number] = Outcome.FAILED
            self.port.refuse(prompt.key, "the queue is full")
            ended(prompt.key, Outcome.FAILED, "refused")
            return
        self.requests[prompt.key] = Prefill(prompt, answer, ended)
        self.waiting.append(self.requests[prompt.key])
        self.watch.submitted(prompt.key, "source")
        self.port.expect_target(prompt.key, prompt.digest)
        self.schedule()

    def schedule(self) -> None:
        """Start what fits; work without a grant never takes the last blocks."""
        for request in [] if self.world.now < self.idle_until else list(self.waiting):
            if self.requests.get(request.prompt.key) is not request:
                self.waiting.remove(request)
            elif self.may_start(request):
                self.waiting.remove(request)
                self._start(request)

    def may_start(self, request: Prefill) -> bool:
        """Whether a prefill may take its blocks now."""
        return may_start_prefill(
            free_blocks=len(self.pool.free),
            needed_blocks=request.prompt.tokens,
            reserved_blocks=self.reserved,
            has_grant=request.has_grant,
        )

    def cancel(self, key: HandoffKey) -> None:
        if key in self.requests:
            record = self.coordinator.source.live.get(key)
            is_ending = record is None or record.state is SourceState.STOPPING
            self.watch.cancels(self.name, key, is_ending=is_ending)
            self.port.cancel(key)

    def preempt(self) -> bool:
        """Take the blocks of the youngest prefill that is not finished; whether there was one."""
        running = [r for r in self.requests.values() if r.blocks and not r.is_offered and not r.is_retracting]
        if not running:
            return False
        request = running[-1]
        request.is_running = False
        request.is_retracting = True
        self.watch.computes(request.prompt.key, is_complete=False)
        self.port.retract(request.prompt.key)
        return True

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case SourceEnded():
                self._on_ended(event)
            case Granted():
                if (request := self.requests.get(event.key)) is not None:
                    request.has_grant = True
                    self.schedule()
            case Drained():
                request = self.requests.get(event.key)
                if request is not None and request.is_retracting:
                    request.is_retracting = False
                    self._free(request)
                    self.waiting.append(request)
                    self.world.after(self.step_s, self.process, self.schedule)
            case _:
                self.world.violate("engine", f"{self.name}: {event} at a source")

    def _on_ended(self, event: SourceEnded) -> None:
        request = self.requests.pop(event.key, None)
        if request is None:
            self.world.violate("engine", f"{self.name}: the end of {event.key}, which it has not asked for or knows to be over")
            return
        if request.prompt.number in self.outcomes:
            self.world.violate("one outcome", f"{self.name}: {event.key} ended twice")
        self.outcomes[request.prompt.number] = event.outcome
        request.is_running = False
        self._free(request)
        request.ended(event.key, event.outcome, event.reason)
        self.world.after(self.step_s, self.process, self.schedule)

    def _start(self, request: Prefill) -> None:
        self._allocations += 1
        request.blocks = self.pool.allocate(request.prompt.tokens, self._allocations)
        request.attempt += 1
        request.computed = request.layer = request.spans = 0
        request.is_running = True
        attempt = request.attempt
        self.world.after(self.step_s, self.process, lambda: self._compute(request, attempt))

    def _compute(self, request: Prefill, attempt: int) -> None:
        """One layer of one chunk."""
        if not request.is_running or request.attempt != attempt:
            return
        if self.world.now < self.idle_until:
            self.world.at(self.idle_until, self.process, lambda: self._compute(request, attempt))
            return
        prompt = request.prompt
        end = min(request.computed + prompt.chunk, prompt.tokens)
        for token in range(request.computed, end):
            for rank, memory in enumerate(self.memories):
                cell = TaggedCell(prompt.content(token), token, request.layer, rank, attempt)
                memory.put(request.blocks[token], request.layer, cell)
        if prompt.mode is Mode.PUSH and prompt.is_streamed:
            span = Span(request.spans, request.computed, end, request.layer, request.layer + 1)
            request.spans += 1
            self.watch.computes(prompt.key, is_complete=False)
            # Engines allocate as they compute: what is announced first has fewer blocks than what follows it.
            self.port.spans_ready(prompt.key, (tuple(request.blocks[:end]),), (span,))
            record = self.coordinator.source.live.get(prompt.key)
            if record is not None and record.state is SourceState.STREAMING:
                self.watch.streams(self.name, prompt.key, span)
        request.layer += 1
        if request.layer == self.layers:
            request.layer, request.computed = 0, end
        if request.computed == prompt.tokens and prompt.offer_after_s:
            self.world.after(prompt.offer_after_s, self.process, lambda: self._finish_later(request, attempt))
        elif request.computed == prompt.tokens:
            self._finish(request)
        elif prompt.key in self.requests:
            self.world.after(self.step_s, self.process, lambda: self._compute(request, attempt))

    def _finish_later(self, request: Prefill, attempt: int) -> None:
        if request.is_running and request.attempt == attempt:
            self._finish(request)

    def _finish(self, request: Prefill) -> None:
        prompt = request.prompt
        if self.requests.get(prompt.key) is not request:
            return
        request.is_running = False
        request.is_offered = True
        aux = Aux(token_id=prompt.client, logprob=0.0)
        self.watch.computes(prompt.key, is_complete=True)
        self.port.offer(Offer(prompt.key, (tuple(request.blocks),), prompt.tokens, aux))
        request.answer()
        self.wake_agents()

    def _free(self, request: Prefill) -> None:
        for block in request.blocks:
            for memory in self.memories:
                memory.fill(block, FREED)
        self.pool.release(request.blocks)
        request.blocks = []


@dataclass(slots=True, eq=False)
class Fetch:
    """A request at a target engine."""

    prompt: SimPrompt
    request: SourceRequest
    ended: Ended
    allocation: int = 0
    blocks: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    is_landed: bool = False


@dataclass(eq=False, kw_only=True)
class TargetEngine(_Twin):
    """A decode engine with a prefix cache: allocates, has blocks filled, checks every cell before it decodes."""

    decode_s: float = 0.02
    refused: set[TransferId] = field(default_factory=set)
    """Requests that were refused as a whole, of which nothing more is taken."""
    requests: dict[HandoffKey, Fetch] = field(default_factory=dict)
    waiting: deque[Fetch] = field(default_factory=deque)
    prefixes: dict[tuple[str, int], int] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)

    @property
    def live(self) -> int:
        return len(self.requests)

    def heal(self) -> None:
        super().heal()
        self.refused.clear()

    def write_problem(self, at: int, copy: CopyId, allowed: int | None) -> str:
        block = at % self.pool.total
        holder = self.pool.holder.get(block)
        is_wrong = holder is None or holder != allowed
        return f"block {block} of allocation {holder} was written for {copy} of {allowed}" if is_wrong else ""

    def fetch(self, prompt: SimPrompt, source: ControlAddress, incarnation: Incarnation | None, ended: Ended) -> None:
        request = SourceRequest(prompt.key, prompt.digest, source, incarnation, prompt.mode)
        if prompt.key in self.requests:
            if self.refuse_next > 0 and self.refuses_whole:
                self._refuse(request)
            ended(prompt.key, Outcome.FAILED, "live already")
            return
        is_refused = prompt.key.transfer_id in self.refused
        if self.refuse_next > 0 or is_refused:
            self._record(prompt, Outcome.FAILED)
            if not is_refused:
                self._refuse(request)
            ended(prompt.key, Outcome.FAILED, "refused")
            return
        self.requests[prompt.key] = Fetch(prompt, request, ended)
        self.waiting.append(self.requests[prompt.key])
        self.watch.submitted(prompt.key, "target")
        self.port.expect_source(request)
        self.schedule()

    def schedule(self) -> None:
        """Grant blocks to what waits, first come first served."""
        while self.waiting and self.world.now >= self.idle_until:
            request = self.waiting[0]
            if self.requests.get(request.prompt.key) is not request:
                self.waiting.popleft()
                continue
            cached = self._match(request.prompt)
            needed = request.prompt.tokens - len(cached)
            if len(self.pool.free) < needed and not self._evict(needed, cached):
                return
            self.waiting.popleft()
            self._grant(request, cached, needed)

    def _refuse(self, request: SourceRequest) -> None:
        self.refuse_next -= 1
        if self.refuses_whole:
            self.refused |= set() if self.refuses_once else {request.key.transfer_id}
            request = replace(request, prompt="")
        self.watch.declined(request.key, is_whole=self.refuses_whole)
        self.port.decline(request, "the queue is full")

    def cancel(self, key: HandoffKey) -> None:
        request = self.requests.get(key)
        if request is not None and not request.is_landed:
            record = self.coordinator.target.live.get(key)
            self.watch.cancels(self.name, key, is_ending=record is None or record.state in _CLOSING)
            self.port.cancel(key)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case Landed():
                self._on_landed(event)
            case TargetEnded():
                self._on_ended(event)
            case _:
                self.world.violate("engine", f"{self.name}: {event} at a target")

    def allocation(self, key: HandoffKey) -> int:
        request = self.requests.get(key)
        return 0 if request is None else request.allocation

    def publish(self, request: Fetch) -> None:
        """Let later requests use the shared part of a prompt."""
        for token in range(len(request.cached), request.prompt.shared):
            name = (request.prompt.content(token), token)
            block = request.blocks[token - len(request.cached)]
            if name not in self.prefixes:
                self._check_block(request.prompt, token, block, None, "half-landed prefix")
                self.prefixes[name] = block
                self.pins[block] = self.pins.get(block, 0)

    def _grant(self, request: Fetch, cached: list[int], needed: int) -> None:
        self._allocations += 1
        request.allocation = self._allocations
        request.cached = cached
        for block in cached:
            self.pins[block] += 1
        request.blocks = self.pool.allocate(needed, request.allocation)
        for block in request.blocks:
            for memory in self.memories:
                memory.fill(block, POISON)
        blocks = (tuple(cached + request.blocks),)
        if needed:
            # Of what is cached altogether ranks report inside the engine's call, and here that waits for the next turn.
            self.watch.allocated(request.prompt.key)
        self.port.allocated(Allocation(request.request, blocks, request.prompt.tokens, len(cached)))

    def _on_landed(self, event: Landed) -> None:
        request = self.requests.get(event.key)
        if request is None or request.is_landed:
            self.world.violate("one outcome", f"{self.name}: {event.key} landed twice or after its end")
            return
        self._record(request.prompt, Outcome.DELIVERED)
        request.is_landed = True
        self._check_all(request, event)
        self._check_counts(request, event)
        self.publish(request)
        self.world.after(self.decode_s, self.process, lambda: self._decoded(request))

    def _check_all(self, request: Fetch, event: Landed) -> None:
        """No foreign byte: every cell is the right one, of one attempt of this very request."""
        prompt = request.prompt
        if event.aux.token_id != prompt.client:
            self.world.violate("foreign aux", f"{self.name}: {event.key} got the aux of request {event.aux.token_id}")
        attempts: set[int] = set()
        for token, block in enumerate(request.cached):
            self._check_block(prompt, token, block, None, "foreign byte")
        for offset, block in enumerate(request.blocks):
            self._check_block(prompt, len(request.cached) + offset, block, attempts, "foreign byte")
        if len(attempts) > 1:
            self.world.violate("mixed generations", f"{self.name}: {event.key} holds attempts {sorted(attempts)}")

    def _check_counts(self, request: Fetch, event: Landed) -> None:
        """What is reported to operators is true: which side moved it, and how much that was, where the target knows."""
        stats, executor = event.stats, Executor.TARGET_READS
        if request.prompt.mode is Mode.PUSH:
            executor = self.executor
        cells = len(request.blocks) * self.layers * len(self.memories) if executor is Executor.TARGET_READS else 0
        expected = (cells, cells, executor is Executor.SOURCE_WRITES)
        if (stats.bytes_planned, stats.bytes_moved, stats.source_writes) != expected:
            self.world.find("counted", f"{self.name}: {event.key}: {stats}, and not {expected}")
        self.watch.landed(self.name, event.key, request.prompt.mode, stats)

    def _check_block(self, prompt: SimPrompt, token: int, block: int, attempts: set[int] | None, rule: str) -> None:
        for rank, memory in enumerate(self.memories):
            for layer in range(self.layers):
                cell = memory.get(block, layer)
                wanted = (prompt.content(token), token, layer, rank)
                if cell.is_corrupt and self.is_checked:
                    self.world.violate("corrupt byte", f"{self.name}: {prompt.key} was served {cell} of block {block}")
                elif (cell.content, cell.token, cell.layer, cell.rank) != wanted:
                    self.world.violate(rule, f"{self.name}: {prompt.key} wanted {wanted}, block {block} holds {cell}")
                elif attempts is not None:
                    attempts.add(cell.attempt)

    def _decoded(self, request: Fetch) -> None:
        if self.world.now < self.idle_until:
            self.world.at(self.idle_until, self.process, lambda: self._decoded(request))
            return
        del self.requests[request.prompt.key]
        self._release(request)
        request.ended(request.prompt.key, Outcome.DELIVERED, "")

    def _on_ended(self, event: TargetEnded) -> None:
        request = self.requests.pop(event.key, None)
        if request is None or request.is_landed:
            self.world.violate("one outcome", f"{self.name}: {event.key} ended twice, or after it had landed")
            return
        self._record(request.prompt, event.outcome)
        self._release(request)
        request.ended(event.key, event.outcome, event.reason)

    def _record(self, prompt: SimPrompt, outcome: Outcome) -> None:
        if prompt.number in self.outcomes:
            self.world.violate("one outcome", f"{self.name}: {prompt.key} ended as {outcome} after another end")
        self.outcomes[prompt.number] = outcome

    def _release(self, request: Fetch) -> None:
        for block in request.cached:
            self.pins[block] -= 1
        kept = [block for block in request.blocks if block in self.pins]
        self.pool.release([block for block in request.blocks if block not in kept])
        for block in kept:
            self.pool.holder[block] = -1
        request.blocks = []
        self.schedule()

    def _match(self, prompt: SimPrompt) -> list[int]:
        blocks: list[int] = []
        for token in range(prompt.shared):
            block = self.prefixes.get((prompt.content(token), token))
            if block is None:
                break
            self._check_block(prompt, token, block, None, "half-landed prefix")
            blocks.append(block)
        return blocks

    def _evict(self, needed: int, keep: list[int]) -> bool:
        """Drop unpinned cached blocks until `needed` are free; whether that was enough."""
        in_use = {block for request in self.requests.values() for block in request.blocks}
        for name, block in list(self.prefixes.items()):
            if len(self.pool.free) >= needed:
                break
            if self.pins[block] == 0 and block not in keep and block not in in_use:
                del self.prefixes[name], self.pins[block]
                self.pool.release([block])
        return len(self.pool.free) >= needed

    def blocks_out(self) -> int:
        return super().blocks_out() - len(self.prefixes)
