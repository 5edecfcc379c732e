"""The scheduler half of the connector: the calls of vLLM's scheduler, turned into orders for the worker half.

A request that asks for a hand-off goes through here once: it begins, blocks are allocated (several times when it is preempted),
and it finishes. A target asks for its cache once; after that, whatever became of it, it is a plain request here, so a
preempted one, or one whose load failed, is computed locally. What a client got wrong becomes a load that fails, and vLLM's
policy decides between an error and local computing. A load that can only fail takes one block, not those of the whole prompt.

In push a prefill can be over long before its target has blocks, and then its own blocks wait. So that two instances whose
caches are full never wait for each other, such prefills leave room for the largest request: a prefill starts in that room only
when its target has granted it blocks. What others that have begun without a grant will still need is not free either.

vLLM overrules the connector for requests that may not read the prefix cache (prompt_logprobs): it computes all of their prompt
at once. Where such a request has to wait or to fail, the half takes that mark from it when it is asked, because vLLM looks at
the mark right after that, and gives it back at the end of the step, because vLLM looks into the prefix cache before it asks.

Belongs to vLLM's scheduler thread. Decides nothing about hand-offs.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbaton.agent.engine_port import Allocation, Offer, SourceRequest
from kvbaton.core.grants import may_start_prefill
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Mode
from kvbaton.engines.vllm.orders import (
    ComputedChunk,
    FailLoad,
    Order,
    SourceBegins,
    SourceCancels,
    SourceOffers,
    SourceRetracts,
    SourceWithdraws,
    StepOrders,
    StepReport,
    TargetAllocates,
    TargetBegins,
    TargetCancels,
    TargetDeclines,
)
from kvbaton.engines.vllm.requests import (
    AutomaticIds,
    EngineRequest,
    HandoffInfo,
    RequestedHandoff,
    SourceCheck,
    SourceParams,
    answer_params,
    is_refused,
    named,
    prompt_digest,
    read_handoff,
    shorten_prompt,
)
from kvbaton.engines.vllm.specs import TokenCounts

__all__ = ["Computing", "Room", "SchedulerHalf"]

_COMPLETE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})
_MAX_TOKEN_ID = 1 << 62


@dataclass(frozen=True, slots=True)
class Computing:
    """One request in a step: how many of its tokens were there before, and how many come."""

    request_id: str
    computed_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Room:
    """So many blocks are kept free for prefills that a target has granted blocks for; `held_blocks` counts those of a request.

    Others wait for their grant, however long their turn takes; but when for `wait_s` no prefill's turn has come, no longer.
    """

    blocks: int
    wait_s: float
    free_blocks: Callable[[], int]
    held_blocks: Callable[[str], int]
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class _ScheduledSource:
    request: EngineRequest
    key: HandoffKey
    params: SourceParams
    tokens: int
    """How many tokens are handed over."""
    announced_tokens: int = 0
    is_granted: bool = False
    is_over: bool = False
    waits_since: float | None = None


class _LoadPhase(enum.Enum):
    WAITING = enum.auto()
    LOADING = enum.auto()
    SPENT = enum.auto()


@dataclass(slots=True)
class _ScheduledTarget:
    tokens: int
    wanted: SourceRequest | None
    problem: str
    phase: _LoadPhase = _LoadPhase.WAITING
    is_over: bool = False
    cached_tokens: int = 0
    record: dict[str, Any] | None = None

    @property
    def can_only_fail(self) -> bool:
        """Whether nothing will be sent for it, whatever it asks for."""
        return self.wanted is None or self.is_over


class SchedulerHalf:
    """One instance's part. It may be asked to be a source, a target, or both, as its role allows."""

    def __init__(
        self,
        mode: Mode,
        counts: TokenCounts,
        is_source: bool,
        is_target: bool,
        room: Room | None = None,
        sources: SourceCheck | None = None,
    ) -> None:
        self._mode = mode
        self._counts = counts
        self._is_source = is_source
        self._is_target = is_target
        self._room = room
        self._source_check = sources
        self._info: HandoffInfo | None = None
        self._sources: dict[str, _ScheduledSource] = {}
        self._targets: dict[str, _ScheduledTarget] = {}
        self._orders: list[Order] = []
        self._unstepped: dict[str, HandoffKey] = {}
        self._begun: set[str] = set()
        self._unmarked: list[EngineRequest] = []
        self._automatic = AutomaticIds()
        self._progress_at = 0.0
        self._step = 0

    @property
    def live(self) -> int:
        """Requests that take part in a hand-off here."""
        return len(self._sources) + len(self._targets)

    def meet_worker(self, info: HandoffInfo) -> None:
        """The worker is there and listens at this address."""
        self._info = info

    # The scheduler's calls.

    def begin(self, request: EngineRequest) -> None:
        """A request was admitted."""
        requested = read_handoff(request, self._mode, self._automatic, self._source_check)
        if requested is None:
            return
        problem = self._problem(requested)
        if not problem and requested.source is not None and requested.key is not None:
            tokens = self._source_tokens(request)
            self._sources[request.request_id] = _ScheduledSource(request, requested.key, requested.source, tokens)
            self._unstepped[request.request_id] = requested.key
            self._orders.append(SourceBegins(request.request_id, requested.key, prompt_digest(request)))
            if self._counts.backoff and tokens:
                shorten_prompt(request, tokens)
            return
        if requested.wanted is not None and is_refused(request):
            self._orders.append(TargetDeclines(request.request_id, replace(requested.wanted, prompt="")))
            return
        problem = problem and f"{named(request)}: {problem}"
        tokens = request.num_prompt_tokens if problem else self._counts.handed(request.num_prompt_tokens)
        target = _ScheduledTarget(tokens, None if problem else requested.wanted, problem)
        self._targets[request.request_id] = target
        if target.wanted is not None:
            self._orders.append(TargetBegins(request.request_id, target.wanted))

    def _source_tokens(self, request: EngineRequest) -> int:
        """How many tokens a source hands over. Nothing, where its prompt must be one token shorter and cannot be."""
        is_whole = request.skip_reading_prefix_cache or getattr(request, "prompt_embeds", None) is not None
        return 0 if self._counts.backoff and is_whole else self._counts.handed(request.num_prompt_tokens)

    def _problem(self, requested: RequestedHandoff) -> str:
        """Why a hand-off cannot be: its request waits for a load that fails, whichever side it asked to be."""
        if requested.problem:
            return requested.problem
        if requested.source is None:
            return "" if self._is_target else "this instance is no target (kv_role)"
        if not self._is_source:
            return "this instance is no source (kv_role)"
        is_taken = any(source.key == requested.key for source in self._sources.values())
        return f"transfer_id: {requested.key} is under way already" if is_taken else ""

    def matched_tokens(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """How many tokens after the first `computed_tokens` a source will send; None: ask again later. Asked often."""
        source = self._sources.get(request.request_id)
        if source is not None and not _has_answered(request):
            problem = self._why_never(source)
            if problem:
                self._withdraw(source, problem)
            elif self._lacks_grant(source):
                self._take_mark(request)
                return None
        target = self._targets.get(request.request_id)
        if target is None or target.phase is not _LoadPhase.WAITING:
            return 0
        left = max(0, target.tokens - computed_tokens)
        if not target.can_only_fail:
            return left
        self._take_mark(request)
        return min(left, self._counts.chunk)

    def _take_mark(self, request: EngineRequest) -> None:
        """Have vLLM heed the answer."""
        if request.skip_reading_prefix_cache:
            request.skip_reading_prefix_cache = False
            self._unmarked.append(request)

    def _give_marks_back(self) -> None:
        for request in self._unmarked:
            request.skip_reading_prefix_cache = True
        self._unmarked.clear()

    def _lacks_grant(self, source: _ScheduledSource) -> bool:
        """Whether a prefill would take the last blocks, and no target has blocks for it yet."""
        if self._mode is not Mode.PUSH or source.is_granted or self._room is None:
            return False
        return not may_start_prefill(
            free_blocks=self._room.free_blocks() - self._owed_blocks(source, self._room),
            needed_blocks=self._blocks_of(source),
            reserved_blocks=self._room.blocks,
            has_grant=False,
        )

    def _blocks_of(self, source: _ScheduledSource) -> int:
        return self._counts.blocks(source.request.num_prompt_tokens)

    def _owed_blocks(self, but: _ScheduledSource, room: Room) -> int:
        """What prefills other than `but` will still take that have begun without a grant."""
        begun = [self._sources[name] for name in self._begun]
        waiting = [source for source in begun if source is not but and not source.is_granted]
        return sum(max(0, self._blocks_of(each) - room.held_blocks(each.request.request_id)) for each in waiting)

    def _why_never(self, source: _ScheduledSource) -> str:
        """Why a prefill that has not begun need not begin at all."""
        if source.is_over:
            return f"{source.key} ended before its prefill began"
        if self._room is None or not self._lacks_grant(source):
            source.waits_since = None
            return ""
        now = self._room.clock()
        if source.waits_since is None:
            source.waits_since = now
        if now - max(source.waits_since, self._progress_at) < self._room.wait_s:
            return ""
        target = source.params.target()
        named_target = "its target" if target is None else f"its target {target}"
        return (
            f"there is no room to start {source.key} before {named_target} has blocks, and for {self._room.wait_s:g} s no"
            " target had blocks for any prefill"
        )

    def _withdraw(self, source: _ScheduledSource, problem: str) -> None:
        """Make a prefill a load that fails."""
        request = source.request
        del self._sources[request.request_id]
        self._begun.discard(request.request_id)
        self._unstepped.pop(request.request_id, None)
        self._orders.append(SourceWithdraws(request.request_id, source.key))
        self._targets[request.request_id] = _ScheduledTarget(request.num_prompt_tokens, None, f"{named(request)}: {problem}")

    def allocated(self, request: EngineRequest, blocks: BlockLists, external_tokens: int) -> None:
        """There are blocks; `external_tokens` of them are to be filled by the source, none after the first time."""
        if request.request_id in self._sources:
            self._begun.add(request.request_id)
        target = self._targets.get(request.request_id)
        if target is None or target.phase is not _LoadPhase.WAITING:
            return
        if not external_tokens:
            target.phase = _LoadPhase.SPENT
            if target.wanted is not None:
                self._orders.append(TargetCancels(request.request_id, target.wanted.key))
            return
        target.phase = _LoadPhase.LOADING
        if target.wanted is None:
            self._orders.append(FailLoad(request.request_id, target.problem))
        elif target.is_over:
            self._orders.append(TargetCancels(request.request_id, target.wanted.key))
            problem = f"{named(request)}: {target.wanted.key} ended before there were blocks for it"
            self._orders.append(FailLoad(request.request_id, problem))
        else:
            target.cached_tokens = target.tokens - external_tokens
            allocation = Allocation(target.wanted, blocks, target.tokens, target.cached_tokens)
            self._orders.append(TargetAllocates(request.request_id, allocation))

    def finish(self, request: EngineRequest, blocks: BlockLists) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: whether its blocks must stay until the sending is reported, and what its answer carries."""
        self._begun.discard(request.request_id)
        self._unstepped.pop(request.request_id, None)
        source = self._sources.pop(request.request_id, None)
        if source is not None:
            return self._finish_source(request, source, blocks)
        target = self._targets.pop(request.request_id, None)
        if target is None:
            return False, None
        if target.wanted is not None and target.phase is not _LoadPhase.SPENT:
            self._orders.append(TargetCancels(request.request_id, target.wanted.key))
        return False, self._target_record(request, target)

    def _finish_source(
        self, request: EngineRequest, source: _ScheduledSource, blocks: BlockLists
    ) -> tuple[bool, dict[str, Any] | None]:
        is_complete = request.num_computed_tokens >= request.num_prompt_tokens
        if request.status.name not in _COMPLETE or not is_complete or self._info is None:
            self._orders.append(SourceCancels(request.request_id, source.key))
            return True, None
        if not source.tokens:
            # A prompt of one token, where one less is handed over: the target knows that too, and computes it. Or one that had
            # to be computed whole: its target computes all of it too, or its load fails.
            self._orders.append(SourceCancels(request.request_id, source.key))
            return True, answer_params(source.params, self._info)
        first = next(iter(request.output_token_ids), 0)
        offer = Offer(source.key, blocks, source.tokens, Aux(min(first, _MAX_TOKEN_ID), 0.0))
        self._orders.append(SourceOffers(request.request_id, offer))
        return True, answer_params(source.params, self._info)

    def _target_record(self, request: EngineRequest, target: _ScheduledTarget) -> dict[str, Any]:
        record = target.record or {"handed_off": False}
        recomputed = target.record is None and request.status.name in _COMPLETE
        return {"kvbaton": {**record, "cached_tokens": target.cached_tokens, "recomputed": recomputed}}

    # The step.

    def orders(
        self,
        computing: Iterable[Computing],
        preempted: Iterable[str],
        block_ids: Callable[[str], Sequence[Sequence[int]]],
        has_forward: bool,
    ) -> StepOrders:
        """Everything for the worker's next step; asked once per step."""
        self._give_marks_back()
        for request_id in preempted:
            self._begun.discard(request_id)
            source = self._sources.get(request_id)
            if source is not None and source.announced_tokens:
                source.announced_tokens = 0
                self._orders.append(SourceRetracts(request_id, source.key))
        computing = tuple(computing)
        chunks = tuple(self._chunks(computing, block_ids)) if self._mode is Mode.PUSH and self._sources else ()
        orders, self._orders = tuple(self._orders), []
        self._step += 1
        return StepOrders(orders, chunks, has_forward, self._first_steps(computing), self._step)

    def _first_steps(self, computing: Iterable[Computing]) -> tuple[HandoffKey, ...]:
        if not self._unstepped:
            return ()
        stepped = [self._unstepped.pop(each.request_id, None) for each in computing]
        return tuple(key for key in stepped if key is not None)

    def _chunks(
        self, computing: Iterable[Computing], block_ids: Callable[[str], Sequence[Sequence[int]]]
    ) -> Iterable[ComputedChunk]:
        """What is new of each source, in whole blocks: the rest of one may still be written in the next step.

        What a source found in the prefix cache counts as new, because others of the same step may be computing it.
        """
        for each in computing:
            source = self._sources.get(each.request_id)
            if source is None:
                continue
            end = min(each.computed_tokens + each.tokens, source.tokens)
            if each.computed_tokens + each.tokens < source.request.num_prompt_tokens:
                end -= end % self._counts.chunk
            if end > source.announced_tokens:
                blocks = tuple(tuple(ids) for ids in block_ids(each.request_id))
                yield ComputedChunk(each.request_id, source.key, blocks, source.announced_tokens, end)
                source.announced_tokens = end

    def take_report(self, report: StepReport) -> None:
        """What the worker reports after a step."""
        if self._room is not None and (report.granted or report.ended & self._sources.keys()):
            self._progress_at = self._room.clock()
        for request_id in report.granted & self._sources.keys():
            self._sources[request_id].is_granted = True
        for request_id in report.ended & self._sources.keys():
            self._sources[request_id].is_over = True
        for request_id in report.ended & self._targets.keys():
            self._targets[request_id].is_over = True
        for request_id, record in report.landed.items():
            if (target := self._targets.get(request_id)) is not None:
                target.record = record
                if target.wanted is not None:
                    self._unstepped[request_id] = target.wanted.key


def _has_answered(request: EngineRequest) -> bool:
    """Whether its client has tokens. What was preempted then is computed to its end, whatever became of its hand-off."""
    return next(iter(request.output_token_ids), None) is not None
