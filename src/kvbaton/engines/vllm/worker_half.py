"""The worker half of the connector: carries out what the scheduler half orders, announces computed layers, reports ends.

Theory of operation. vLLM calls the worker once per step: orders first, then the forward with one hook per layer, then the
question what has finished. Every id is reported exactly once, and only while vLLM waits for it: a sending is reported when
the scheduler half has offered or cancelled it (from then on vLLM keeps the blocks) and the source side has ended, in either
order; a receiving when blocks were allocated for it and the target side has ended. A receiving that did not land is reported
as failed too, and vLLM's own policy decides what becomes of the request.

An instance of several ranks has one `WorkerHalf`, in the worker of rank 0, where its coordinator runs. Every other worker
has a `FollowerHalf`: it reports computed layers to the first rank, and to vLLM what the first rank reports, in the same step,
because vLLM counts the workers that have reported an id. It decides nothing.

Belongs to vLLM's worker thread; the agents' thread only sets `news`, and `set_callable` and `hurry` may be called by any.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from kvbaton.agent.engine_port import (
    Allocation,
    Drained,
    EngineEvent,
    Granted,
    HandoffPort,
    HandoffStats,
    Landed,
    Offer,
    SourceEnded,
    TargetEnded,
)
from kvbaton.agent.ports import Clock
from kvbaton.core.handoff import BlockLists, HandoffKey, Outcome, Span
from kvbaton.core.timeline import Observer, Side, Stage, no_observer, note
from kvbaton.engines.handoff_params import shown_seconds
from kvbaton.engines.vllm.computed_spans import ComputedSpans, LayerGroups
from kvbaton.engines.vllm.counts import Counts
from kvbaton.engines.vllm.device import Gate, OpenGate
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
from kvbaton.engines.vllm.rank_links import LayersDone, RankLinks, StepCleared, StepEnded, StepReached
from kvbaton.engines.vllm.reached_steps import ReachedSteps
from kvbaton.errors import KVBatonError

__all__ = ["Finished", "FollowerHalf", "News", "WorkerHalf", "WorkerSource", "WorkerTarget", "idle_wait_s"]

log = logging.getLogger(__name__)

_IDLE_WAIT_S, _LONGEST_IDLE_WAIT_S = 0.02, 0.06
"""How long a step without a forward waits for news at most, where no new request can end it; see `idle_wait_s`."""

_CALLED_IDLE_WAIT_S = 0.25
"""The same where one can. What else vLLM looks for between steps waits for so long: calls of its API other than new requests,
and aborts; these for two steps with async scheduling, where the next one is built already."""

_QUIET_SHARE = 0.5
"""How long such a step waits, as a share of the time in which nothing has happened: what vLLM looks for in each step
without a report is then seen late by no more than that share of the time that it took."""

_HURRIED_STEPS = 2
"""Steps that must not wait after a call: with async scheduling the next one was built before the request was known."""

_FOLLOW_S = 60.0
"""How long another rank waits for what the first one has to report of a step. What comes later is reported later."""


def idle_wait_s(cores: int) -> float:
    """How long a step without a forward waits for news at most, where a process may use so many cores and no request ends it.

    vLLM steps all the time while a request waits for its cache, and each step takes two or three milliseconds of a core. With
    few cores, the prefill that is waited for may need that very core: the fewer there are, the longer a step waits. Long waits
    would keep a new request waiting that comes meanwhile, for nothing where cores are many.
    """
    return max(_IDLE_WAIT_S, min(_LONGEST_IDLE_WAIT_S, 12 * _IDLE_WAIT_S / cores))


class News(Protocol):
    """What the worker waits for: a `threading.Event`, or in the simulator one of a virtual thread."""

    def set(self) -> None:
        """End the wait."""

    def wait(self, timeout: float) -> bool:
        """Wait until the agents have something to report, at most so long."""

    def clear(self) -> None:
        """What was reported is about to be taken."""


@dataclass(slots=True)
class Finished:
    """What is reported to vLLM after a step: requests that have finished sending or receiving; failed ones are in both."""

    sending: set[str] = field(default_factory=set)
    receiving: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)

    def __bool__(self) -> bool:
        return bool(self.sending or self.receiving or self.report)

    def of_step(self, step: int) -> StepEnded:
        """What the first rank sends to the others, which report the same ids after this step."""
        return StepEnded(step, frozenset(self.sending), frozenset(self.receiving), frozenset(self.failed))


@dataclass(slots=True)
class WorkerSource:
    """A prefill that has begun here."""

    request_id: str
    begun_at: float
    is_kept: bool = False
    is_withdrawn: bool = False
    """Whether vLLM waits for nothing of it any more."""
    has_ended: bool = False


@dataclass(slots=True)
class WorkerTarget:
    """A load that has begun here, or waits for blocks."""

    request_id: str
    begun_at: float
    is_allocated: bool = False
    is_over: bool = False
    end: Landed | TargetEnded | None = None


class WorkerHalf:
    """An instance's part. `news` is set by the agents when there are events; `poison` spoils blocks before they are granted.

    `groups` has the layers of this rank; `lists` turns vLLM's block lists into those of the layout, as `spans` does too.
    `observe` gets what vLLM does; the agents have an observer of their own. `cleared` is called with the number of a step when
    what was retracted before it is drained. `busy` is called when a step begins and ends: vLLM takes requests in between only.
    `gate` opens for layers when the device has computed them, `reached` for blocks when every rank has reached their step.
    A step without a forward waits for news: at first shortly, at most for `idle_wait_s`, and longer while a new request ends
    the wait, see `set_callable`.
    """

    def __init__(
        self,
        port: HandoffPort,
        spans: ComputedSpans,
        groups: LayerGroups,
        news: News,
        drain_s: float,
        poison: Callable[[BlockLists, int], None] | None = None,
        observe: Observer = no_observer,
        lists: Callable[[BlockLists], BlockLists] = lambda given: given,
        cleared: Callable[[int], None] = lambda _: None,
        busy: Callable[[bool], None] = lambda _: None,
        gate: Gate | None = None,
        reached: ReachedSteps | None = None,
        *,
        has_drafts: bool = False,
        clock: Clock = time.monotonic,
        idle_wait_s: float = _IDLE_WAIT_S,
    ) -> None:
        self._port = port
        self._idle_wait_s = idle_wait_s
        self._is_callable = False
        self._called = threading.Event()
        self._hurried_steps = 0
        self._hurried_at = -math.inf
        self._quiet_since = clock()
        self._clock = clock
        self._has_drafts = has_drafts
        self._gate = gate or OpenGate()
        self._reached = reached or ReachedSteps()
        self._spans = spans
        self._groups = groups
        self._lists = lists
        self._cleared = cleared
        self._busy = busy
        self._step = 0
        self._news = news
        self._drain_s = drain_s
        self._poison = poison
        self._observe = observe
        self._sources: dict[HandoffKey, WorkerSource] = {}
        self._targets: dict[HandoffKey, WorkerTarget] = {}
        self._chunks: tuple[ComputedChunk, ...] = ()
        self._has_forward = False
        self._follows_forward = False
        self._has_reported = False
        self._undrained: set[HandoffKey] = set()
        self._finished = Finished()
        self.counts = Counts()

    @property
    def step(self) -> int:
        """The number of the step that was begun last."""
        return self._step

    @property
    def live(self) -> int:
        """Hand-offs that have not ended, or whose end was not reported to vLLM yet."""
        return len(self._sources) + len(self._targets)

    def begin_step(self, orders: StepOrders) -> None:
        """Carry the orders out; returns when nothing that the forward may overwrite is announced any more."""
        self._chunks = orders.chunks
        self._step = orders.number
        self._follows_forward = self._has_forward
        self._has_forward = orders.has_forward
        self._groups.begin(orders.chunks)
        self._busy(True)
        if orders.orders:
            self._quiet_since = self._clock()
        retracts = False
        for order in orders.orders:
            retracts |= isinstance(order, SourceRetracts)
            try:
                self._carry_out(order)
            except KVBatonError:
                log.exception("hand-off %s: the agents refused a call that must not fail", _key(order))
                self._refused(order)
        if self._undrained:
            self._wait_drained()
        if retracts:
            self._cleared(self._step)
        self._spans.begin(self._step, self._live_chunks())
        for key in orders.first_steps:
            if (source := self._sources.get(key)) is not None:
                self.counts.queued(Side.SOURCE, self._note(key, Side.SOURCE, Stage.STARTED) - source.begun_at)
            else:
                self._note(key, Side.TARGET, Stage.FIRST_STEP)

    def layer_computed(self, layer: int) -> None:
        """This step's keys and values of one layer are in the cache: announce them, now and then, while others compute."""
        if layers := self._groups.computed(layer):
            self._report(layers)

    def forward_done(self) -> None:
        """The forward is over: announce the rest, and layers that had no hook."""
        if layers := self._groups.rest():
            self._report(layers)
        for chunk in self._chunks:
            span = Span(0, chunk.first_token, chunk.end_token, 0, len(self._groups.layers))
            self._note(chunk.key, Side.SOURCE, Stage.COMPUTED, span)
        self._chunks = ()

    def _report(self, layers: Sequence[int]) -> None:
        keys = [chunk.key for chunk in self._chunks]
        self._gate.when_computed(partial(self._spans.computed, self._step, layers), partial(self._give_up, keys))

    def _give_up(self, keys: list[HandoffKey]) -> None:
        """What was computed cannot be announced: the sources end, and so do their targets."""
        for key in keys:
            try:
                self._port.cancel(key, Side.SOURCE)
            except KVBatonError:
                log.exception("hand-off %s: could not be given up", key)

    def _live_chunks(self) -> list[ComputedChunk]:
        sources = [(chunk, self._source(chunk.key, chunk.request_id)) for chunk in self._chunks]
        return [chunk for chunk, source in sources if source is not None and not source.has_ended]

    def end_step(self) -> Finished:
        """What has finished since the last call; a step without a forward waits a moment for it."""
        self._busy(False)
        self._take_events()
        # vLLM with async scheduling takes what a step has computed or reported after the step that follows, so that one must
        # not wait.
        must_not_wait = self._finished or self._has_reported or self._has_forward or self._follows_forward
        if self._is_hurried() or must_not_wait:
            self._quiet_since = self._clock()
        elif self.live:
            self._news.wait(self._wait_s())
            self._take_events()
        finished, self._finished = self._finished, Finished()
        self._has_reported = bool(finished)
        return finished

    def set_callable(self, is_callable: bool) -> None:
        """Whether `hurry` will be called when a request comes in: only then may steps wait for long."""
        self._is_callable = is_callable
        self.hurry()

    def hurry(self) -> None:
        """A request has come in, which vLLM takes up between two steps: end this one, and do not wait in one built before."""
        self._called.set()
        self._news.set()

    def _is_hurried(self) -> bool:
        if self._called.is_set():
            self._called.clear()
            now = self._clock()
            # Calls that follow each other closely find short waits, and would leave no pause between steps.
            if now - self._hurried_at >= _IDLE_WAIT_S:
                self._hurried_steps, self._hurried_at = _HURRIED_STEPS, now
            self._quiet_since = now
        if not self._hurried_steps:
            return False
        self._hurried_steps -= 1
        return True

    def _wait_s(self) -> float:
        longest_s = _CALLED_IDLE_WAIT_S if self._is_callable else self._idle_wait_s
        quiet_s = self._clock() - self._quiet_since
        return min(longest_s, max(_IDLE_WAIT_S, _QUIET_SHARE * quiet_s))

    def _carry_out(self, order: Order) -> None:
        match order:
            case SourceBegins():
                self._begin_source(order)
            case SourceRetracts():
                self._retract(order)
            case SourceOffers():
                self._offer(order)
            case SourceCancels():
                if self._keep(order.request_id, order.key):
                    self._spans.forget(order.key)
                    self._port.cancel(order.key, Side.SOURCE)
            case SourceWithdraws():
                self._withdraw(order)
            case TargetBegins():
                self._begin_target(order)
            case TargetDeclines():
                self._port.decline(order.wanted, "the target refused the request before admission")
            case TargetAllocates():
                self._allocate(order)
            case TargetCancels():
                self._cancel_target(order)
            case FailLoad():
                log.error("the load fails: %s", order.reason)
                self._report_failed(order.request_id)

    def _refused(self, order: Order) -> None:
        """Nothing was begun, offered or allocated, so no event will follow, and no peer can be using the blocks."""
        match order:
            case SourceBegins() | SourceCancels() | SourceWithdraws():
                self._end_source(order.key)
            case SourceOffers():
                self._end_source(order.offer.key)
            case TargetBegins():
                self._targets.pop(order.wanted.key, None)
                self._finished.report.ended.add(order.request_id)
            case TargetAllocates():
                self._targets.pop(order.allocation.key, None)
                self._report_failed(order.request_id)

    # Sources.

    def _begin_source(self, order: SourceBegins) -> None:
        if order.key in self._sources:
            # An idle vLLM takes no step: the end of the one before may have come long ago.
            self._take_events()
        if order.key in self._sources:
            log.error("hand-off %s: not taken up for request %s, it is under way already", order.key, order.request_id)
            self._finished.report.ended.add(order.request_id)
            return
        self._sources[order.key] = WorkerSource(order.request_id, self._note(order.key, Side.SOURCE, Stage.ARRIVED))
        self._port.expect_target(order.key, order.prompt)

    def _withdraw(self, order: SourceWithdraws) -> None:
        """Give a prefill up. Its key stays taken until its end has come: taken up again before that, the end of this one would
        pass for that of the next, whose blocks vLLM would get back while the agents still announce them."""
        source = self._source(order.key, order.request_id)
        if source is not None:
            source.is_withdrawn = True
            self._spans.forget(order.key)
            self._settle_source(order.key, source)
            if not source.has_ended:
                self._port.cancel(order.key, Side.SOURCE)

    def _retract(self, order: SourceRetracts) -> None:
        source = self._source(order.key, order.request_id)
        if source is None or source.has_ended or not self._spans.forget(order.key):
            return
        self._undrained.add(order.key)
        self._port.retract(order.key)

    def _offer(self, order: SourceOffers) -> None:
        key = order.offer.key
        if self._keep(order.request_id, key):
            offer = replace(order.offer, blocks=self._lists(order.offer.blocks))
            if self._has_drafts:
                # vLLM has the sampled token, but drafts afterwards: those layers may still be queued.
                self._gate.when_computed(partial(self._complete, offer), partial(self._give_up, [key]))
            else:
                self._complete(offer)

    def _complete(self, offer: Offer) -> None:
        self._spans.complete(offer.key)
        self._port.offer(offer)

    def _keep(self, request_id: str, key: HandoffKey) -> bool:
        """vLLM keeps the blocks from now on; whether there is still a hand-off to keep them for."""
        source = self._source(key, request_id)
        if source is None:
            self._finished.sending.add(request_id)
            return False
        source.is_kept = True
        self._settle_source(key, source)
        return not source.has_ended

    def _wait_drained(self) -> None:
        """Wait until retracted blocks may be written. The agents answer at once; one that is stuck confirms nothing either."""
        give_up_at = self._clock() + self._drain_s
        while self._undrained and (left_s := give_up_at - self._clock()) > 0:
            self._news.wait(left_s)
            self._take_events()
        for key in self._undrained:
            log.error("hand-off %s: not drained within %g s after it was retracted; giving it up", key, self._drain_s)
            try:
                self._port.cancel(key, Side.SOURCE)
            except KVBatonError:
                log.exception("hand-off %s: could not be given up", key)
        self._undrained.clear()

    # Targets.

    def _begin_target(self, order: TargetBegins) -> None:
        key = order.wanted.key
        if key in self._targets:
            self._take_events()
        if key in self._targets:
            log.error("hand-off %s: not taken up for request %s, it is under way already", key, order.request_id)
            self._finished.report.ended.add(order.request_id)
            return
        self._targets[key] = WorkerTarget(order.request_id, self._note(key, Side.TARGET, Stage.ARRIVED))
        self._port.expect_source(order.wanted)

    def _allocate(self, order: TargetAllocates) -> None:
        key = order.allocation.key
        target = self._target(key, order.request_id)
        if target is None:
            self._report_failed(order.request_id)
            return
        target.is_allocated = True
        self.counts.queued(Side.TARGET, self._note(key, Side.TARGET, Stage.ALLOCATED) - target.begun_at)
        if target.end is None:
            allocation = replace(order.allocation, blocks=self._lists(order.allocation.blocks))
            # Before the agents learn of the blocks: their first copy must find it.
            self._gate.allocating()
            self._reached.when_reached(self._step, key, partial(self._grant, allocation))
        self._settle_target(key, target)

    def _grant(self, allocation: Allocation) -> None:
        if self._poison is not None:
            self._poison(allocation.blocks, allocation.cached_tokens)
        self._port.allocated(allocation)

    def _cancel_target(self, order: TargetCancels) -> None:
        target = self._target(order.key, order.request_id)
        if target is not None:
            target.is_over = True
            self._reached.drop(order.key)
            self._settle_target(order.key, target)
            self._port.cancel(order.key, Side.TARGET)

    # What the agents decided.

    def _take_events(self) -> None:
        self._news.clear()
        for event in self._port.events():
            self._take(event)

    def _take(self, event: EngineEvent) -> None:
        match event:
            case Granted():
                if (source := self._sources.get(event.key)) is not None:
                    self._finished.report.granted.add(source.request_id)
            case Drained():
                self._undrained.discard(event.key)
            case SourceEnded():
                self._undrained.discard(event.key)
                self.counts.source_ended(event.outcome)
                self._end_source(event.key)
            case Landed() | TargetEnded():
                self._count_target(event)
                self._reached.drop(event.key)
                if (target := self._targets.get(event.key)) is not None:
                    target.end = event
                    if not (target.is_allocated or target.is_over):
                        self._finished.report.ended.add(target.request_id)
                    self._settle_target(event.key, target)

    def _count_target(self, event: Landed | TargetEnded) -> None:
        if isinstance(event, Landed):
            self.counts.target_ended(Outcome.DELIVERED, event.stats)
        else:
            self.counts.target_ended(event.outcome)

    def _end_source(self, key: HandoffKey) -> None:
        if (source := self._sources.get(key)) is not None:
            source.has_ended = True
            self._spans.forget(key)
            if not (source.is_kept or source.is_withdrawn):
                self._finished.report.ended.add(source.request_id)
            self._settle_source(key, source)

    def _settle_source(self, key: HandoffKey, source: WorkerSource) -> None:
        if source.has_ended and (source.is_kept or source.is_withdrawn):
            del self._sources[key]
            if source.is_kept:
                self._finished.sending.add(source.request_id)

    def _settle_target(self, key: HandoffKey, target: WorkerTarget) -> None:
        if target.end is None or not (target.is_allocated or target.is_over):
            return
        del self._targets[key]
        if target.is_allocated:
            if isinstance(target.end, Landed):
                self._finished.receiving.add(target.request_id)
                self._finished.report.landed[target.request_id] = _record(target.end.stats)
            else:
                self._report_failed(target.request_id)

    def _report_failed(self, request_id: str) -> None:
        self._finished.receiving.add(request_id)
        self._finished.failed.add(request_id)

    def _note(self, key: HandoffKey, side: Side, stage: Stage, span: Span | None = None) -> float:
        """Record the stage, and return the moment."""
        now = self._clock()
        self._observe(note(key, side, stage, now, span))
        return now

    def _source(self, key: HandoffKey, request_id: str) -> WorkerSource | None:
        source = self._sources.get(key)
        return source if source is not None and source.request_id == request_id else None

    def _target(self, key: HandoffKey, request_id: str) -> WorkerTarget | None:
        target = self._targets.get(key)
        return target if target is not None and target.request_id == request_id else None


def _key(order: Order) -> HandoffKey | str:
    """What an order is about, for a log line."""
    match order:
        case SourceOffers():
            return order.offer.key
        case TargetBegins() | TargetDeclines():
            return order.wanted.key
        case TargetAllocates():
            return order.allocation.key
        case FailLoad():
            return f"of request {order.request_id}"
    return order.key


def _record(stats: HandoffStats) -> dict[str, Any]:
    return {
        "handed_off": True,
        "bytes_planned": stats.bytes_planned,
        "bytes_moved": stats.bytes_moved,
        "handover_s": shown_seconds(stats.handover_s),
        "handoff_s": shown_seconds(stats.handover_s + stats.wire_s),
        "transport": stats.transport,
        "source_writes": stats.source_writes,
    }


class FollowerHalf:
    """The part of a rank other than the first: reports what it has computed, and to vLLM what the first rank reports."""

    def __init__(self, links: RankLinks, groups: LayerGroups, gate: Gate, *, clock: Clock = time.monotonic) -> None:
        self._links = links
        self._clock = clock
        self._gate = gate
        self._groups = groups
        self._step = 0
        self._cleared = -1
        self._ended = -1
        self._finished = Finished()

    def begin_step(self, orders: StepOrders) -> None:
        """Returns when nothing that the forward may overwrite is announced any more."""
        self._step = orders.number
        self._groups.begin(orders.chunks)
        if any(isinstance(order, TargetAllocates) for order in orders.orders):
            self._gate.allocating()
            self._links.send(StepReached(self._links.rank, self._step))
        if any(isinstance(order, SourceRetracts) for order in orders.orders):
            self._wait(lambda: self._cleared >= self._step, "is drained")

    def layer_computed(self, layer: int) -> None:
        """This step's keys and values of one layer are in the cache of this rank."""
        if layers := self._groups.computed(layer):
            self._report(layers)

    def forward_done(self) -> None:
        """The forward is over: report the rest, and layers that had no hook."""
        if layers := self._groups.rest():
            self._report(layers)

    def _report(self, layers: Sequence[int]) -> None:
        """A rank whose device has failed reports nothing: vLLM ends with it."""
        self._gate.when_computed(partial(self._links.send, LayersDone(self._step, tuple(layers))), lambda: None)

    def end_step(self) -> Finished:
        """What the first rank reports to vLLM in this step."""
        self._wait(lambda: self._ended >= self._step, "has ended")
        finished, self._finished = self._finished, Finished()
        return finished

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        until = self._clock() + _FOLLOW_S
        while not is_there() and not self._links.is_lost:
            left_s = until - self._clock()
            if left_s <= 0:
                log.error("the first rank has not reported for %g s that step %d %s", _FOLLOW_S, self._step, what)
                return
            self._take(self._links.receive(left_s))

    def _take(self, message: StepCleared | StepEnded | None) -> None:
        match message:
            case StepCleared():
                self._cleared = message.step
            case StepEnded():
                self._ended = message.step
                self._finished.sending |= message.sending
                self._finished.receiving |= message.receiving
                self._finished.failed |= message.failed
