"""The engine without its thread: takes requests, runs the model step by step, asks for hand-offs and hears how they end.

Belongs to one thread at a time. What a request's sink, the port or the model raise is logged and told to the requests that
it concerns; it never leaves `step`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvbaton.agent.engine_port import (
    Allocation,
    Drained,
    EngineEvent,
    Granted,
    HandoffPort,
    Landed,
    Offer,
    SourceEnded,
    SourceRequest,
    TargetEnded,
)
from kvbaton.config import OnFailure
from kvbaton.core.handoff import HandoffKey, Mode, Outcome, RequestId
from kvbaton.core.timeline import Note, Observer, Side, Stage, no_observer
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.engines.embedded.request import FinishReason, FromSource, GenerationRequest, Sink, TokenOutput
from kvbaton.engines.embedded.sampling import Sampled, sample
from kvbaton.engines.embedded.scheduler import Chunk, Scheduler
from kvbaton.engines.embedded.seams import EngineCache, EngineModel
from kvbaton.engines.embedded.sequence import Phase, Sequence, prompt_digest
from kvbaton.engines.embedded.settings import EngineSettings
from kvbaton.engines.embedded.stats import Counters, EngineStats
from kvbaton.engines.embedded.streaming import StepStream, tell_cached
from kvbaton.errors import BadRequest, Bug

__all__ = ["EngineCore"]

_logger = logging.getLogger(__name__)

_NOT_STARTED = "the hand-off could not be started; see the log"


class EngineCore:
    """Everything an engine does, on the caller's thread."""

    def __init__(
        self,
        loaded: EngineModel,
        cache: EngineCache,
        port: HandoffPort | None,
        settings: EngineSettings,
        clock: Callable[[], float],
        observe: Observer = no_observer,
    ) -> None:
        self._observe = observe
        self._loaded = loaded
        self._cache = cache
        self._port = port
        self._settings = settings
        self._clock = clock
        pool = BlockPool(cache.blocks, cache.block_tokens)
        self._limit = min(loaded.config.context_tokens, pool.capacity_tokens)
        self._pushes = settings.handoff.mode is Mode.PUSH
        self._scheduler = Scheduler(
            pool,
            max_sequences=settings.max_sequences,
            step_tokens=settings.step_tokens,
            reserved_blocks=pool.blocks_for(self._limit) if self._pushes else None,
        )
        self._counters = Counters()
        self._numbers = itertools.count()
        self._live: dict[RequestId, Sequence] = {}
        self._sources: dict[HandoffKey, Sequence] = {}
        self._targets: dict[HandoffKey, Sequence] = {}
        self._sinkless: list[Sequence] = []
        self._uncancelled: list[Sequence] = []

    @property
    def queued(self) -> int:
        """Requests that have no place among the running ones yet; may be read from any thread."""
        return self._scheduler.queued

    def check(self, request: GenerationRequest) -> None:
        """Raise BadRequest for what can never run here; may be called from any thread."""
        prompt, vocabulary = request.prompt_ids, self._loaded.config.vocab_size
        if not prompt:
            raise BadRequest("prompt", "the prompt has no tokens; send at least one")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise BadRequest("prompt", f"token ids from {min(prompt)} to {max(prompt)}; the model has 0 to {vocabulary - 1}")
        if request.sampling.max_tokens < 1:
            raise BadRequest("max_tokens", f"max_tokens is {request.sampling.max_tokens}; it must be at least 1")
        if "" in request.sampling.stop:
            raise BadRequest("stop", "a stop string is empty; leave it out")
        if len(prompt) + 1 > self._limit:
            raise BadRequest("prompt", self._too_long(len(prompt)))
        if request.handoff is not None and self._port is None:
            raise BadRequest("kv_transfer_params", "this instance takes no part in hand-offs; send the request without it")

    def add(self, request: GenerationRequest, sink: Sink, submitted_s: float) -> None:
        """Queue a request that passed `check`. A second one of the same name or hand-off is answered with an error."""
        sequence = Sequence(
            request,
            sink,
            self._loaded.tokenizer,
            number=next(self._numbers),
            limit=self._limit,
            cache=self._cache,
            submitted_s=submitted_s,
        )
        if request.request_id in self._live:
            error = f"request {request.request_id} is under way already"
            self.decline(request, error)
            self._emit(sequence, sequence.end(FinishReason.ERROR, error))
            return
        if request.handoff is not None and (problem := self._expect(sequence)):
            self._emit(sequence, sequence.end(FinishReason.ERROR, problem))
            return
        self._live[request.request_id] = sequence
        self._counters.prompt_tokens += sequence.prompt_tokens
        self._scheduler.add(sequence)

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up; unknown ones are ignored. Blocks of a hand-off come back when the port says that it has ended."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._give_up(sequence, FinishReason.CANCELLED, "cancelled by the caller")

    def decline(self, request: GenerationRequest, reason: str) -> None:
        """A request was refused before it got here: let its source go, unless another request lives under the same key."""
        handoff = request.handoff
        if isinstance(handoff, FromSource) and handoff.key not in self._targets:
            wanted = self._wanted(request)
            self._tell_port(handoff.key, lambda port: port.decline(wanted, reason))

    def end_all(self, reason: FinishReason, error: str) -> None:
        """Give every live request up."""
        for sequence in tuple(self._live.values()):
            self._give_up(sequence, reason, error)

    def step(self) -> bool:
        """Take what the port tells, admit, run the model once, and tell the sinks; false when there was nothing to do."""
        events = self._port.events() if self._port is not None else []
        for event in events:
            self._take(event)
        while self._sinkless:
            self._give_up(self._sinkless.pop(), FinishReason.CANCELLED, "its outputs could not be delivered")
        self._cancel_again()
        now = self._clock()
        for sequence in self._scheduler.admit(now):
            self._start(sequence, now)
        is_late = self._end_ungranted(now)
        plan = self._scheduler.plan()
        for sequence in plan.retracted:
            self._retract(sequence)
        if plan.chunks:
            self._run(plan.chunks)
        return bool(plan.chunks or events or is_late or self._sinkless)

    def stats(self) -> EngineStats:
        """A snapshot of the counters and of the pool."""
        return self._counters.snapshot(self._scheduler)

    def check_integrity(self) -> None:
        """Raise Bug when the pool's books are wrong; takes time in proportion to the pool."""
        self._scheduler.pool.check_integrity()

    def _too_long(self, prompt_tokens: int) -> str:
        context, capacity = self._loaded.config.context_tokens, self._scheduler.pool.capacity_tokens
        return (
            f"the prompt has {prompt_tokens} tokens and needs room for one more; the model's context is {context} tokens "
            f"and the cache holds {capacity}; send at most {self._limit - 1}"
        )

    def _expect(self, sequence: Sequence) -> str:
        """Tell the agents of a hand-off to come; returns why that is not possible."""
        key, request = sequence.key, sequence.request
        side = self._sources if sequence.is_source else self._targets
        if side.setdefault(key, sequence) is not sequence:
            return f"hand-off {key} is under way already"
        self._note(sequence, Stage.ARRIVED, sequence.submitted_s)
        digest, wanted = prompt_digest(request), None if sequence.is_source else self._wanted(request)
        if not self._tell_port(
            key, lambda port: port.expect_target(key, digest) if wanted is None else port.expect_source(wanted)
        ):
            del side[key]
            return _NOT_STARTED
        return ""

    def _start(self, sequence: Sequence, now: float) -> None:
        """A sequence has left the queue: its cache is fetched, or its prefill begins with what is cached of it."""
        if sequence.phase is Phase.FETCHING:
            self._note(sequence, Stage.ALLOCATED, now)
            self._pull(sequence)
        elif sequence.is_source:
            self._note(sequence, Stage.STARTED, now)
            if self._pushes and sequence.computed:
                self._tell_cached(sequence)

    def _tell_cached(self, sequence: Sequence) -> None:
        layers = self._loaded.config.layers
        if not self._tell_port(sequence.key, lambda port: tell_cached(port, sequence, layers)):
            self._give_up(sequence, FinishReason.ERROR, _NOT_STARTED)

    def _end_ungranted(self, now: float) -> bool:
        """End the sources that have waited too long for a grant; whether there were any."""
        limit_s = self._settings.defer_timeout_s
        late = self._scheduler.ungranted_since(now - limit_s)
        reserve = self._scheduler.pool.blocks_for(self._limit)
        error = (
            f"no grant of a target for {limit_s:g} s (defer_timeout), and without one {reserve} blocks have to stay free; "
            "see whether the decode instance has the request, or give this one more blocks"
        )
        for sequence in late:
            self._give_up(sequence, FinishReason.ERROR, error)
        return bool(late)

    def _retract(self, sequence: Sequence) -> None:
        if not self._tell_port(sequence.key, lambda port: port.retract(sequence.key)):
            self._give_up(sequence, FinishReason.ERROR, "the hand-off could not be taken back; see the log")

    def _run(self, chunks: list[Chunk]) -> None:
        self._counters.steps += 1
        stream = self._stream(chunks)
        try:
            logits = self._loaded.model.forward([chunk.span() for chunk in chunks], self._cache, stream)
        except Exception as error:
            _logger.exception("the model failed in a step of %d sequences", len(chunks))
            for chunk in chunks:
                self._give_up(chunk.sequence, FinishReason.ERROR, f"the model failed: {error!r}")
            return
        for chunk, row in zip(chunks, logits, strict=True):
            completes = chunk.completes
            self._note_computed(chunk)
            self._scheduler.complete(chunk)
            if stream is not None and stream.failed and chunk.sequence.is_source:
                self._give_up(chunk.sequence, FinishReason.ERROR, "the hand-off could not go on; see the log")
            elif completes:
                self._choose(chunk.sequence, row)

    def _stream(self, chunks: list[Chunk]) -> StepStream | None:
        """Who tells the agents of each layer of this step; nobody, when nothing of it is pushed."""
        for chunk in chunks:
            if chunk.sequence.record.handed_off and not chunk.sequence.is_first_step_noted:
                chunk.sequence.is_first_step_noted = True
                self._note(chunk.sequence, Stage.FIRST_STEP, self._clock())
        pushed = [chunk for chunk in chunks if chunk.sequence.is_source] if self._pushes else []
        return StepStream(self._port, pushed) if self._port is not None and pushed else None

    def _choose(self, sequence: Sequence, row: npt.NDArray[np.float32]) -> None:
        sampling = sequence.request.sampling
        if sequence.is_source and sampling.logprobs is None:
            sampling = dataclasses.replace(sampling, logprobs=0)
        try:
            sampled = sample(row, sampling, sequence.output_tokens, sequence.seed)
        except Exception as error:
            _logger.exception("no token could be chosen for request %s", sequence.request.request_id)
            self._give_up(sequence, FinishReason.ERROR, f"no token could be chosen: {error!r}")
            return
        self._counters.generated_tokens += 1
        if sequence.is_source:
            self._offer(sequence, sampled)
        else:
            self._append(sequence, sampled)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        output = sequence.append(sampled, self._clock())
        if output.finish_reason is not None:
            self._drop(sequence)
        self._emit(sequence, output)

    def _offer(self, sequence: Sequence, sampled: Sampled) -> None:
        """The offer stands before the caller hears of the token, so that a target which comes at once finds it."""
        output = sequence.append(sampled, self._clock())
        self._scheduler.hold(sequence)
        offer = Offer(sequence.key, sequence.block_lists, sequence.prompt_tokens, sequence.aux(sampled))
        if not self._tell_port(sequence.key, lambda port: port.offer(offer)):
            self._cancel(sequence)
            if not sequence.spans_told:
                self._drop(sequence)
        self._emit(sequence, output)

    def _pull(self, sequence: Sequence) -> None:
        cached_tokens = sequence.computed
        fresh = sequence.blocks[cached_tokens // self._cache.block_tokens :]
        if self._settings.poison and fresh:
            self._cache.poison(fresh)
        allocation = Allocation(self._wanted(sequence.request), sequence.block_lists, sequence.prompt_tokens, cached_tokens)
        if not self._tell_port(sequence.key, lambda port: port.allocated(allocation)):
            self._cancel(sequence)
            self._end(sequence, FinishReason.ERROR, _NOT_STARTED)

    def _tell_port(self, key: HandoffKey, call: Callable[[HandoffPort], None]) -> bool:
        try:
            if self._port is not None:
                call(self._port)
        except Exception:
            _logger.exception("hand-off %s: the agents refused a call that must not fail", key)
            return False
        return True

    def _cancel(self, sequence: Sequence) -> None:
        """Have the agents give a hand-off up; what they do not take now is told them again, step by step."""
        if not self._tell_cancel(sequence) and sequence not in self._uncancelled:
            self._uncancelled.append(sequence)

    def _cancel_again(self) -> None:
        while self._uncancelled and self._tell_cancel(self._uncancelled[0]):
            self._uncancelled.pop(0)

    def _tell_cancel(self, sequence: Sequence) -> bool:
        if not self._has_open_handoff(sequence):
            return True
        return self._tell_port(sequence.key, lambda port: port.cancel(sequence.key))

    def _take(self, event: EngineEvent) -> None:
        match event:
            case Granted():
                if (sequence := self._sources.get(event.key)) is not None:
                    self._scheduler.granted(sequence)
            case Drained():
                sequence = self._sources.get(event.key)
                if sequence is not None and sequence.phase is Phase.RETRACTING:
                    (self._drop if sequence.has_ended else self._scheduler.drained)(sequence)
            case _:
                self._take_end(event)

    def _take_end(self, event: SourceEnded | Landed | TargetEnded) -> None:
        """Every hand-off ends with one event; until then its key stays taken, even if its request is long over."""
        side = self._sources if isinstance(event, SourceEnded) else self._targets
        sequence = side.pop(event.key, None)
        if sequence is None:
            _logger.warning("hand-off %s: ignored %s, this engine has no such hand-off", event.key, type(event).__name__)
            return
        outcome = Outcome.DELIVERED if isinstance(event, Landed) else event.outcome
        self._counters.handoff("source" if side is self._sources else "target", outcome)
        if sequence.phase is Phase.FINISHED:
            return
        if isinstance(event, Landed):
            self._land(sequence, event)
            return
        reason = event.reason or f"the hand-off ended as {outcome}"
        if outcome is Outcome.CANCELLED or sequence.is_source:
            self._end(sequence, FinishReason.CANCELLED if outcome is Outcome.CANCELLED else FinishReason.ERROR, reason)
        else:
            self._fail(sequence, reason)

    def _land(self, sequence: Sequence, event: Landed) -> None:
        aux, vocabulary = event.aux, self._loaded.config.vocab_size
        named = (aux.token_id, *(token for token, _ in aux.top_logprobs))
        unknown = next((token for token in named if not 0 <= token < vocabulary), None)
        if unknown is not None:
            self._fail(sequence, f"the source's aux record names token {unknown}; the model has 0 to {vocabulary - 1}")
            return
        sequence.landed(aux, event.stats, self._clock())
        self._scheduler.land(sequence)
        if sequence.has_ended:
            self._drop(sequence)
        else:
            self._append(sequence, Sampled(aux.token_id, aux.logprob, aux.top_logprobs))

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """The cache of this request will not come: it fails, or is computed here, as the settings say."""
        if self._settings.handoff.on_failure is OnFailure.RECOMPUTE and not sequence.has_ended:
            _logger.warning("hand-off %s failed, its prompt is computed here: %s", sequence.key, reason)
            self._scheduler.compute_here(sequence)
        else:
            self._end(sequence, FinishReason.ERROR, reason)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        self._drop(sequence)
        self._emit(sequence, sequence.end(reason, error))

    def _give_up(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        """End a request early; blocks that a peer may touch stay held until the port says that the hand-off is over."""
        self._cancel(sequence)
        if sequence.spans_told and sequence.phase in (Phase.PREFILLING, Phase.DECODING):
            self._scheduler.hold(sequence)
        elif sequence.phase not in (Phase.FETCHING, Phase.HELD, Phase.RETRACTING, Phase.FINISHED):
            self._drop(sequence)
        self._emit(sequence, sequence.end(reason, error))

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence and take its blocks back."""
        self._scheduler.finish(sequence)
        del self._live[sequence.request.request_id]

    def _has_open_handoff(self, sequence: Sequence) -> bool:
        if sequence.request.handoff is None:
            return False
        return (self._sources if sequence.is_source else self._targets).get(sequence.key) is sequence

    def _emit(self, sequence: Sequence, output: TokenOutput) -> None:
        """Tell the sink, up to and including the first output that ends the request."""
        if sequence.has_ended:
            return
        if output.finish_reason is not None:
            sequence.has_ended = True
            self._counters.finished[output.finish_reason.value] += 1
        try:
            sequence.sink(output)
        except Exception:
            _logger.exception("the sink of request %s failed; the request is cancelled", sequence.request.request_id)
            self._sinkless.append(sequence)
            if not sequence.has_ended:
                sequence.has_ended = True
                self._counters.finished[FinishReason.CANCELLED.value] += 1

    def _wanted(self, request: GenerationRequest) -> SourceRequest:
        handoff = request.handoff
        if not isinstance(handoff, FromSource):
            raise Bug(f"request {request.request_id} has no source to pull from")
        mode = self._settings.handoff.mode
        digest = prompt_digest(request) if request.prompt_ids else ""
        return SourceRequest(handoff.key, digest, handoff.source, handoff.source_incarnation, mode)

    def _note(self, sequence: Sequence, stage: Stage, at: float) -> None:
        side = Side.SOURCE if sequence.is_source else Side.TARGET
        self._observe(Note(sequence.key, side, stage, at))

    def _note_computed(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if sequence.is_source:
            first, layers = sequence.computed, self._loaded.config.layers
            note = Note(
                sequence.key,
                Side.SOURCE,
                Stage.COMPUTED,
                self._clock(),
                first_token=first,
                end_token=first + chunk.count,
                end_layer=layers,
            )
            self._observe(note)
