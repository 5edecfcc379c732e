"""A small scheduler with the habits of vLLM's: it drives the scheduler half of the connector with vLLM's calls, in its order.

Theory of operation. Requests wait, run, and end. In each step the running ones come first; when there is no block for one, the
request that began last loses its own and waits again. Then waiting ones begin: of each the prefix cache is asked, then the
connector, then there are blocks, and then a request runs, or waits until its cache was loaded. A prompt that is longer than a
step runs in chunks. Several steps may be under way at once (`depth`): each later stage of a pipeline has one, and with
`is_async` one more is built before the output of the step before it is taken. So

- a request that has ended, or was aborted, is computed once more by a step that is under way;
- what such a step computes of a request that was preempted meanwhile does not count: a source computes it again;
- blocks are free while a step that is under way still writes to them. With `has_fence`, as in vLLM from 0.32 on where an
  instance is a target, they are given back when no such step is left.

Blocks of a prompt enter the prefix cache when they are allocated, as in vLLM: whatever uses them runs later on the same ranks.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.engines.embedded.pool import BlockPool, PrefixDigests
from kvbaton.engines.vllm.orders import StepOrders, StepReport
from kvbaton.engines.vllm.scheduler_half import Computing, SchedulerHalf
from kvbaton.errors import Bug

__all__ = ["ScheduledTokens", "VllmStep", "StepResult", "VllmRequest", "VllmScheduler", "VllmStatus", "all_of"]


class VllmStatus(enum.Enum):
    """Where a request stands, in vLLM's words: the connector reads those of the ends."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_end(self) -> bool:
        """Whether a request with it is over."""
        return self.name.startswith("FINISHED")


@dataclass(eq=False, slots=True)
class VllmRequest:
    """A request as vLLM has it, as far as the connector and this scheduler read it."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: Sequence[int] | None
    expected: Sequence[int]
    """The prompt, and every token that has to follow."""
    max_tokens: int
    stops_after: int
    """After how many tokens the model ends its answer, which no scheduler knows before it has them."""
    digests: PrefixDigests
    status: VllmStatus = VllmStatus.WAITING
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    abort_immediately: bool = False
    blocks: list[int] = field(default_factory=list)
    placeholders: int = 0
    """Tokens that are being sampled, and whose successors may be scheduled."""
    tokens_in_flight: int = 0
    stale_tokens: int = 0
    """Of those in flight, what was scheduled before the request was preempted."""
    drops_stale: bool = False
    preemptions: int = 0
    last_step: int = 0
    decodes_from: int = 0
    """From which step on its next token may be computed: the last stage has to have sampled the one before."""
    cached_tokens: int = 0
    load_number: int = 0
    """Counts allocations that wait for a load; 0 without one."""

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        """The prompt, and what was generated."""
        return self.num_prompt_tokens + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """What a step computes of one request: tokens `first` to `end`, into its blocks as they were then."""

    request: VllmRequest
    first: int
    end: int
    blocks: tuple[int, ...]
    preemptions: int
    samples: bool

    @property
    def is_stale(self) -> bool:
        """Whether the request has lost the blocks since, or is over: what a step reads and writes there is of no use."""
        return self.request.preemptions != self.preemptions or self.request.status.is_end


@dataclass(frozen=True, slots=True)
class VllmStep:
    """One step, as it is sent to the workers."""

    number: int
    orders: StepOrders
    computing: tuple[ScheduledTokens, ...]


@dataclass(slots=True)
class StepResult:
    """What all workers together report of a step: ids count when each worker has reported them."""

    sending: list[str]
    receiving: list[str]
    failed: set[str]
    report: StepReport


class VllmScheduler:
    """One instance's scheduler. `ended` is called with each request that is over, and what the connector adds to its answer.

    `settled` is called before vLLM takes a sending or receiving for finished. `broken` gets what would make vLLM fail.
    """

    def __init__(
        self,
        half: SchedulerHalf,
        pool: BlockPool,
        *,
        step_tokens: int,
        most_running: int,
        stages: int,
        is_async: bool,
        has_fence: bool,
        is_source: bool,
        recomputes: bool,
        ended: Callable[[VllmRequest, dict[str, Any] | None], None],
        settled: Callable[[VllmRequest, bool, bool], None],
        broken: Callable[[str, str], None],
    ) -> None:
        self._half = half
        self.pool = pool
        self._step_tokens = step_tokens
        self._most_running = most_running
        self._stages = stages
        self._is_async = is_async
        self.depth = stages + is_async
        self._has_fence = has_fence and self.depth > 1
        self._is_source = is_source
        self._recomputes = recomputes
        self._ended = ended
        self._settled = settled
        self._broken = broken
        self.requests: dict[str, VllmRequest] = {}
        self._running: list[VllmRequest] = []
        self._waiting: deque[VllmRequest] = deque()
        self._holding: deque[VllmRequest] = deque()
        """Those that wait and have blocks: they are looked at first."""
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._preempted: list[str] = []
        self._has_ends = False
        self._steps = 0
        self._taken_steps = 0
        self._deferred: deque[tuple[int, list[int]]] = deque()
        self._loads = 0
        self.preempted_total = 0
        self.cached_tokens_total = 0

    # Requests.

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to step for: a request, or an end that the workers have not been sent yet."""
        return bool(self.requests) or self._has_ends

    def add(self, request: VllmRequest) -> None:
        """A request was admitted; or refused before, and then its end follows at once."""
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self._half.begin(request)
        if request.abort_immediately:
            self.abort(request.request_id)

    def abort(self, request_id: str, status: VllmStatus = VllmStatus.FINISHED_ABORTED) -> None:
        """End a request from outside; one that has ended is left alone, even if its blocks are still needed."""
        request = self.requests.get(request_id)
        if request is None or request.status.is_end:
            return
        for queue in (self._running, self._waiting, self._holding):
            if request in queue:
                queue.remove(request)
        is_loading = request.status is VllmStatus.WAITING_FOR_REMOTE_KVS and request_id not in self._loaded
        self._loaded.discard(request_id)
        self._failed.discard(request_id)
        self._end(request, status, keeps_blocks=is_loading)

    def _end(self, request: VllmRequest, status: VllmStatus, *, keeps_blocks: bool = False) -> None:
        request.status = status
        used = self.pool.blocks_for(request.num_computed_tokens)
        is_kept, params = self._half.finish(request, (tuple(request.blocks[:used]),))
        self._has_ends = True
        if not (is_kept or keeps_blocks):
            self._forget(request)
        self._ended(request, params)

    def _forget(self, request: VllmRequest) -> None:
        self._free(request)
        del self.requests[request.request_id]

    # Blocks.

    def _can_free(self, request: VllmRequest) -> bool:
        return not self._has_fence or request.last_step <= self._taken_steps

    def _free(self, request: VllmRequest) -> None:
        blocks, request.blocks = request.blocks, []
        request.load_number = 0
        if not blocks:
            return
        if self._can_free(request):
            self.pool.release(blocks)
        else:
            self._deferred.append((self._steps, blocks))

    def _return_deferred(self) -> None:
        while self._deferred and self._deferred[0][0] <= self._taken_steps:
            self.pool.release(self._deferred.popleft()[1])

    def _grow(self, request: VllmRequest, tokens: int) -> bool:
        """Give a request blocks for so many tokens, if there are any."""
        needed = self.pool.blocks_for(tokens) - len(request.blocks)
        if needed > 0:
            if not self.pool.can_allocate(needed):
                return False
            request.blocks += self.pool.allocate(needed)
        self._publish(request, tokens)
        return True

    def _publish(self, request: VllmRequest, tokens: int) -> None:
        digests = request.digests.of(request.expected, min(tokens, request.num_tokens))
        self.pool.register(request.blocks[: len(digests)], digests)

    def check(self) -> None:
        """Raise Bug unless every reference to a block is that of a request, or of one that was freed too early."""
        self.pool.check_integrity()
        uses = Counter(block for request in self.requests.values() for block in request.blocks)
        uses.update(block for _, blocks in self._deferred for block in blocks)
        counted: list[int] = vars(self.pool)["_uses"]
        if counted != [uses.get(block, 0) for block in range(len(counted))]:
            raise Bug(f"requests have {dict(uses)}, and the pool counts {counted}")

    # A step.

    def schedule(self) -> VllmStep:
        """Choose what the next step computes, and let the connector give its orders."""
        self._steps += 1
        budget = self._step_tokens
        scheduled: list[ScheduledTokens] = []
        was_preempted = self.preempted_total
        for request in list(self._running):
            if request.status is not VllmStatus.RUNNING or budget <= 0:
                continue
            count = min(budget, self._due(request))
            if count <= 0:
                continue
            if not self._make_room(request, request.num_computed_tokens + count):
                break
            scheduled.append(self._take(request, count))
            budget -= count
        if self.preempted_total == was_preempted:
            self._start_waiting(scheduled, budget)
        computing = [Computing(each.request.request_id, each.first, each.end - each.first) for each in scheduled]
        orders = self._half.orders(computing, self._preempted, self._blocks_of, bool(scheduled))
        self._preempted = []
        self._has_ends = False
        for each in scheduled:
            self._advance(each)
        return VllmStep(self._steps, orders, tuple(scheduled))

    def _blocks_of(self, request_id: str) -> Sequence[Sequence[int]]:
        return (self.requests[request_id].blocks,)

    def _due(self, request: VllmRequest) -> int:
        """How many tokens of a running request can be computed now."""
        is_decoding = request.num_computed_tokens >= request.num_prompt_tokens
        sampled = len(request.output_token_ids) + request.placeholders
        if is_decoding and (sampled >= request.max_tokens or self._steps < request.decodes_from):
            return 0
        return request.num_tokens + request.placeholders - request.num_computed_tokens

    def _make_room(self, request: VllmRequest, tokens: int) -> bool:
        """Find blocks for a running request, from those that began after it, or before itself at last."""
        while not self._grow(request, tokens):
            last = self._running[-1]
            if not self._can_free(last):
                return False
            self._running.pop()
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: VllmRequest) -> None:
        self._free(request)
        request.status = VllmStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.drops_stale = self._is_source or (request.drops_stale and request.stale_tokens > 0)
        request.stale_tokens = request.tokens_in_flight
        request.placeholders = 0
        request.preemptions += 1
        self.preempted_total += 1
        self._waiting.appendleft(request)
        self._preempted.append(request.request_id)

    def _start_waiting(self, scheduled: list[ScheduledTokens], budget: int) -> None:
        skipped: list[VllmRequest] = []
        while budget > 0 and len(self._running) < self._most_running:
            queue = self._holding or self._waiting
            if not queue:
                break
            request = queue[0]
            if not self._is_ready(request):
                skipped.append(queue.popleft())
                continue
            cached, external = self._look_up(request)
            if external is None:
                skipped.append(queue.popleft())
                continue
            count = self._admit(request, cached, external, budget)
            if count is None:
                break
            queue.popleft()
            if external:
                skipped.append(request)
                continue
            self._running.append(request)
            request.status = VllmStatus.RUNNING
            scheduled.append(self._take(request, count))
            budget -= count
        for request in reversed(skipped):
            (self._holding if request.blocks else self._waiting).appendleft(request)

    def _is_ready(self, request: VllmRequest) -> bool:
        if request.status is VllmStatus.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self._loaded:
                return False
            self._loaded.discard(request.request_id)
            self._take_load(request)
        return not request.stale_tokens or request.drops_stale

    def _take_load(self, request: VllmRequest) -> None:
        """A load is over: its blocks enter the prefix cache, or are given back."""
        request.status = VllmStatus.PREEMPTED if request.preemptions else VllmStatus.WAITING
        request.load_number = 0
        if request.request_id in self._failed:
            self._failed.discard(request.request_id)
            self._free(request)
        else:
            self._publish(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1

    def _look_up(self, request: VllmRequest) -> tuple[list[int], int | None]:
        """The blocks of the prompt in the prefix cache, and how many tokens behind them the connector will load."""
        if request.num_computed_tokens:
            return [], 0
        cached = self.pool.match_prefix(request.digests.of(request.expected, request.num_tokens - 1))
        return cached, self._half.matched_tokens(request, len(cached) * self.pool.block_tokens)

    def _admit(self, request: VllmRequest, cached: list[int], external: int, budget: int) -> int | None:
        """Give a waiting request blocks; how many of its tokens are computed in this step. None when there are no blocks."""
        computed = request.num_computed_tokens or len(cached) * self.pool.block_tokens + external
        count = 0 if external else min(budget, request.num_tokens - computed)
        held = len(request.blocks) + len(cached)
        needed = max(0, self.pool.blocks_for(computed + count) - held)
        # vLLM lets a prompt begin when all of it would fit, and a load when what prefills will still need is left.
        whole = needed if external else max(needed, self.pool.blocks_for(request.num_tokens) - held)
        reserved = self._reserved() if external else 0
        if self.pool.free_beside(cached) - reserved < whole:
            return None
        self.pool.acquire(cached)
        request.blocks += cached
        request.blocks += self.pool.allocate(needed)
        self.cached_tokens_total += len(cached) * self.pool.block_tokens
        request.num_computed_tokens = computed
        if external:
            self._loads += 1
            request.load_number = self._loads
            request.cached_tokens = computed - external
            request.status = VllmStatus.WAITING_FOR_REMOTE_KVS
        else:
            self._publish(request, computed + count)
        self._half.allocated(request, (tuple(request.blocks),), external)
        return count

    def _reserved(self) -> int:
        """Blocks that prompts which have begun, or are being loaded, will still take."""
        begun = [each for each in self._running if each.num_computed_tokens < each.num_tokens]
        begun += [each for each in self.requests.values() if each.status is VllmStatus.WAITING_FOR_REMOTE_KVS]
        return sum(max(0, self.pool.blocks_for(each.num_tokens) - len(each.blocks)) for each in begun)

    def _take(self, request: VllmRequest, count: int) -> ScheduledTokens:
        first = request.num_computed_tokens
        samples = first + count >= request.num_tokens + request.placeholders
        return ScheduledTokens(request, first, first + count, tuple(request.blocks), request.preemptions, samples)

    def _advance(self, each: ScheduledTokens) -> None:
        request, count = each.request, each.end - each.first
        request.num_computed_tokens += count
        request.tokens_in_flight += count
        request.last_step = self._steps
        if each.samples and self._is_async:
            request.placeholders += 1
        request.decodes_from = self._steps + self._stages

    # What a step has brought.

    def take(self, step: VllmStep, result: StepResult) -> None:
        """All workers have reported a step; steps are taken in order."""
        self._taken_steps = step.number
        self._return_deferred()
        failed = [name for name in sorted(result.failed) if self._is_loading(name)]
        if self._recomputes:
            for request_id in failed:
                self.requests[request_id].num_computed_tokens = 0
                self._failed.add(request_id)
        for each in step.computing:
            self._take_tokens(each)
        if not self._recomputes:
            for request_id in failed:
                self.abort(request_id, VllmStatus.FINISHED_ERROR)
        self._half.take_report(result.report)
        for request_id in result.receiving:
            self._take_receiving(request_id, is_failed=request_id in result.failed)
        for request_id in result.sending:
            self._take_sending(request_id)

    def _is_loading(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.status is VllmStatus.WAITING_FOR_REMOTE_KVS

    def _take_tokens(self, each: ScheduledTokens) -> None:
        request, count = each.request, each.end - each.first
        request.tokens_in_flight -= count
        is_stale = request.stale_tokens > 0
        if is_stale:
            request.stale_tokens -= count
        if request.status.is_end or (is_stale and request.drops_stale) or not each.samples:
            return
        request.output_token_ids.append(request.expected[each.end])
        if self._is_async and not is_stale:
            request.placeholders -= 1
        if len(request.output_token_ids) >= request.stops_after:
            for queue in (self._running, self._waiting, self._holding):
                if request in queue:
                    queue.remove(request)
            self._end(request, VllmStatus.FINISHED_LENGTH_CAPPED)

    def _take_receiving(self, request_id: str, *, is_failed: bool) -> None:
        request = self.requests.get(request_id)
        if request is None or not (request.status.is_end or self._is_loading(request_id)) or request_id in self._loaded:
            self._broken("one outcome", f"{request_id} has finished receiving, and vLLM does not wait for it")
            return
        self._settled(request, False, is_failed)
        if request.status.is_end:
            self._forget(request)
        else:
            self._loaded.add(request_id)

    def _take_sending(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or not request.status.is_end:
            self._broken("one outcome", f"{request_id} has finished sending, and vLLM does not wait for it")
            return
        self._settled(request, True, False)
        self._forget(request)


def all_of(reported: Iterable[str], counts: Counter[str], workers: int) -> list[str]:
    """Which ids every worker has reported by now; `counts` has those that some have."""
    counts.update(reported)
    whole = sorted(name for name, count in counts.items() if count >= workers)
    for name in whole:
        del counts[name]
    return whole
