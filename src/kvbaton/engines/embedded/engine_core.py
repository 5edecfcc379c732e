"""The engine without its thread: takes requests, runs the model step by step, starts hand-offs and takes their ends.

Belongs to one thread at a time. What a sink, the port or the model raises is logged and ends the requests concerned; it never
leaves `step`. A request and its hand-off end separately: a client may leave while a peer still reads the blocks. So `_live`
holds requests until their blocks are back, and `_sources` and `_targets` hold hand-offs until the port has reported their end.
No key is used again, and no block freed, before that.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvbaton.agent import engine_port
from kvbaton.config import OnFailure
from kvbaton.core.grants import Reserve
from kvbaton.core.handoff import HandoffKey, Mode, Outcome, RequestId
from kvbaton.core.timeline import Note, Observer, Side, Stage, no_observer
from kvbaton.engines.embedded.fair_queue import Crowd
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.engines.embedded.request import FinishReason, FromSource, GenerationRequest, Sink, TokenOutput
from kvbaton.engines.embedded.sampling import Sampled, sample
from kvbaton.engines.embedded.scheduler import ScheduledChunk, Scheduler
from kvbaton.engines.embedded.seams import EngineCache, EngineModel
from kvbaton.engines.embedded.sequence import Sequence, SequenceStatus, prompt_digest
from kvbaton.engines.embedded.settings import EngineSettings
from kvbaton.engines.embedded.stats import Counters, EngineStats
from kvbaton.engines.embedded.streaming import StepStream, announce_cached
from kvbaton.errors import BadRequest, Bug

__all__ = ["EngineCore"]

_logger = logging.getLogger(__name__)

_NOT_STARTED = "the hand-off could not be started; see the log"


@dataclass(eq=False, repr=False)
class EngineCore:
    """Everything an engine does, on the caller's thread."""

    _loaded: EngineModel
    _cache: EngineCache
    _port: engine_port.HandoffPort | None
    _settings: EngineSettings
    _clock: Callable[[], float]
    _observe: Observer = no_observer

    def __post_init__(self) -> None:
        pool = BlockPool(self._cache.blocks, self._cache.block_tokens)
        self._limit = min(self._loaded.config.context_tokens, pool.capacity_tokens)
        self._pushes = self._settings.handoff.mode is Mode.PUSH
        self._scheduler = Scheduler(
            pool,
            max_sequences=self._settings.max_sequences,
            step_tokens=self._settings.step_tokens,
            reserve=Reserve.of(
                self._settings.handoff.mode,
                largest=pool.blocks_for(self._limit),
                total=pool.total,
                both_roles=self._settings.has_both_roles,
            ),
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
        """Requests that are not among the running ones yet; may be read from any thread."""
        return self._scheduler.queued

    def largest(self) -> Crowd | None:
        """The request that makes room when the queue is full."""
        return self._scheduler.largest()

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
        """Queue a request that passed `check`. A second one with the same id or hand-off ends with an error."""
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
        if self._scheduler.queued > self._settings.max_waiting and (crowd := self._scheduler.largest()) is not None:
            most = self._settings.max_waiting
            error = f"{crowd.sequences} sequences of the request wait, and max_waiting is {most} for all; try again later"
            self._abort(crowd.newest, FinishReason.CROWDED_OUT, error)

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request; unknown ones are ignored. Blocks of a hand-off are freed when the port reports its end."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._abort(sequence, FinishReason.CANCELLED, "cancelled by the caller")

    def decline(self, request: GenerationRequest, reason: str) -> None:
        """A request was refused before it got here: have its source release, unless another request has the same key."""
        handoff = request.handoff
        if isinstance(handoff, FromSource) and handoff.key not in self._targets:
            source = self._expected_source(request)
            self._call_port(handoff.key, lambda port: port.decline(source, reason))

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End every live request early."""
        for sequence in tuple(self._live.values()):
            self._abort(sequence, reason, error)

    def step(self) -> bool:
        """Take the port's events, admit, run the model once, and feed the sinks; false when there was nothing to do."""
        events = self._port.events() if self._port is not None else []
        for event in events:
            self._take(event)
        while self._sinkless:
            self._abort(self._sinkless.pop(), FinishReason.CANCELLED, "its outputs could not be delivered")
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
        """Raise Bug when the pool's counts are wrong; takes time in proportion to the pool."""
        self._scheduler.pool.check_integrity()

    def _too_long(self, prompt_tokens: int) -> str:
        context, capacity = self._loaded.config.context_tokens, self._scheduler.pool.capacity_tokens
        return (
            f"the prompt has {prompt_tokens} tokens and needs room for one more; the model's context is {context} tokens "
            f"and the cache holds {capacity}; send at most {self._limit - 1}"
        )

    def _expect(self, sequence: Sequence) -> str:
        """Announce a coming hand-off to the agents; returns why that is not possible."""
        key, request = sequence.key, sequence.request
        side = self._sources if sequence.is_source else self._targets
        if side.setdefault(key, sequence) is not sequence:
            return f"hand-off {key} is under way already"
        self._note(sequence, Stage.ARRIVED, sequence.submitted_s)
        digest, source = prompt_digest(request), None if sequence.is_source else self._expected_source(request)
        if not self._call_port(
            key, lambda port: port.expect_target(key, digest) if source is None else port.expect_source(source)
        ):
            del side[key]
            return _NOT_STARTED
        return ""

    def _start(self, sequence: Sequence, now: float) -> None:
        """A sequence has left the queue: its cache is fetched, or its prefill begins with what is cached of it."""
        if sequence.status is SequenceStatus.FETCHING:
            self._note(sequence, Stage.ALLOCATED, now)
            self._send_allocation(sequence)
        elif sequence.is_source:
            self._note(sequence, Stage.STARTED, now)
            if self._pushes and sequence.computed:
                self._announce_cached(sequence)

    def _announce_cached(self, sequence: Sequence) -> None:
        layers = self._loaded.config.layers
        if not self._call_port(sequence.key, lambda port: announce_cached(port, sequence, layers)):
            self._abort(sequence, FinishReason.ERROR, _NOT_STARTED)

    def _end_ungranted(self, now: float) -> bool:
        """End the sources that have waited too long for a grant; true when there were any."""
        if not self._pushes:
            return False
        limit_s, reserve = self._settings.defer_timeout_s, self._scheduler.reserve.source
        late = self._scheduler.ungranted_since(now - limit_s)
        error = (
            f"no grant of a target for {limit_s:g} s (defer_timeout), and without one {reserve} blocks have to stay free; "
            "see whether the decode instance has the request, or give this one more blocks"
        )
        for sequence in late:
            self._abort(sequence, FinishReason.ERROR, error)
        return bool(late)

    def _retract(self, sequence: Sequence) -> None:
        if not self._call_port(sequence.key, lambda port: port.retract(sequence.key)):
            self._abort(sequence, FinishReason.ERROR, "the hand-off could not be retracted; see the log")

    def _run(self, chunks: list[ScheduledChunk]) -> None:
        self._counters.steps += 1
        stream = self._stream(chunks)
        try:
            logits = self._loaded.model.forward([chunk.span() for chunk in chunks], self._cache, stream)
        except Exception as error:
            _logger.exception("the model failed in a step of %d sequences", len(chunks))
            for chunk in chunks:
                self._abort(chunk.sequence, FinishReason.ERROR, f"the model failed: {error!r}")
            return
        for chunk, row in zip(chunks, logits, strict=True):
            completes = chunk.completes
            self._note_computed(chunk)
            self._scheduler.complete(chunk)
            if stream is not None and stream.failed and chunk.sequence.is_source:
                self._abort(chunk.sequence, FinishReason.ERROR, "the hand-off could not go on; see the log")
            elif completes:
                self._choose(chunk.sequence, row)

    def _stream(self, chunks: list[ScheduledChunk]) -> StepStream | None:
        """The listener that announces each layer of this step to the agents; None when no source of it is pushed."""
        for chunk in chunks:
            if chunk.sequence.record.handed_off and not chunk.sequence.is_first_step_noted:
                chunk.sequence.is_first_step_noted = True
                self._note(chunk.sequence, Stage.FIRST_STEP, self._clock())
        pushed = [chunk for chunk in chunks if chunk.sequence.is_source] if self._pushes else []
        return StepStream(self._port, pushed) if self._port is not None and pushed else None

    def _choose(self, sequence: Sequence, row: npt.NDArray[np.float32]) -> None:
        sampling = sequence.request.sampling
        if sequence.is_source and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        try:
            sampled = sample(row, sampling, sequence.output_tokens, sequence.seed)
        except Exception as error:
            _logger.exception("no token could be chosen for request %s", sequence.request.request_id)
            self._abort(sequence, FinishReason.ERROR, f"no token could be chosen: {error!r}")
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
        """Hold the blocks and offer them to the target."""
        output = sequence.append(sampled, self._clock())
        # Offer before the output: a router sends the decode request as soon as it has this token, and in pull a target that
        # asks for a hand-off which is not held is refused for good.
        self._scheduler.hold(sequence)
        offer = engine_port.Offer(sequence.key, sequence.block_lists, sequence.prompt_tokens, sequence.aux(sampled))
        if not self._call_port(sequence.key, lambda port: port.offer(offer)):
            self._cancel(sequence)
            # Once a span is announced a target may be reading; then only SourceEnded frees the blocks.
            if not sequence.spans_announced:
                self._drop(sequence)
        self._emit(sequence, output)

    def _send_allocation(self, sequence: Sequence) -> None:
        cached_tokens = sequence.computed
        fresh = sequence.blocks[cached_tokens // self._cache.block_tokens :]
        if self._settings.poison and fresh:
            self._cache.poison(fresh)
        source = self._expected_source(sequence.request)
        allocation = engine_port.Allocation(source, sequence.block_lists, sequence.prompt_tokens, cached_tokens)
        if not self._call_port(sequence.key, lambda port: port.allocated(allocation)):
            self._cancel(sequence)
            self._end(sequence, FinishReason.ERROR, _NOT_STARTED)

    def _call_port(self, key: HandoffKey, call: Callable[[engine_port.HandoffPort], None]) -> bool:
        try:
            if self._port is not None:
                call(self._port)
        except Exception:
            _logger.exception("hand-off %s: the agents refused a call that must not fail", key)
            return False
        return True

    def _cancel(self, sequence: Sequence) -> None:
        """Cancel a hand-off at the agents; a call that they refuse is repeated in the next steps."""
        if not self._send_cancel(sequence) and sequence not in self._uncancelled:
            self._uncancelled.append(sequence)

    def _cancel_again(self) -> None:
        while self._uncancelled and self._send_cancel(self._uncancelled[0]):
            self._uncancelled.pop(0)

    def _send_cancel(self, sequence: Sequence) -> bool:
        if not self._has_open_handoff(sequence):
            return True
        return self._call_port(sequence.key, lambda port: port.cancel(sequence.key))

    def _take(self, event: engine_port.EngineEvent) -> None:
        match event:
            case engine_port.Granted():
                if (sequence := self._sources.get(event.key)) is not None:
                    self._scheduler.granted(sequence)
            case engine_port.Drained():
                sequence = self._sources.get(event.key)
                if sequence is not None and sequence.status is SequenceStatus.RETRACTING:
                    (self._drop if sequence.has_ended else self._scheduler.drained)(sequence)
            case _:
                self._take_end(event)

    def _take_end(self, event: engine_port.SourceEnded | engine_port.Landed | engine_port.TargetEnded) -> None:
        """Every hand-off ends with exactly one event; until then its key stays in use, even if its request is over."""
        side = self._sources if isinstance(event, engine_port.SourceEnded) else self._targets
        sequence = side.pop(event.key, None)
        if sequence is None:
            _logger.warning("hand-off %s: ignored %s, this engine has no such hand-off", event.key, type(event).__name__)
            return
        outcome = Outcome.DELIVERED if isinstance(event, engine_port.Landed) else event.outcome
        self._counters.handoff("source" if side is self._sources else "target", outcome)
        if sequence.status is SequenceStatus.FINISHED:
            # The request ended before any of its blocks was announced, and they were freed then.
            return
        if isinstance(event, engine_port.Landed):
            self._land(sequence, event)
            return
        reason = event.reason or f"the hand-off ended as {outcome}"
        if outcome is Outcome.CANCELLED or sequence.is_source:
            self._end(sequence, FinishReason.CANCELLED if outcome is Outcome.CANCELLED else FinishReason.ERROR, reason)
        else:
            self._fail(sequence, reason)

    def _land(self, sequence: Sequence, event: engine_port.Landed) -> None:
        aux, vocabulary = event.aux, self._loaded.config.vocab_size
        named = (aux.token_id, *(token for token, _ in aux.top_logprobs))
        unknown = next((token for token in named if not 0 <= token < vocabulary), None)
        if unknown is not None:
            self._fail(sequence, f"the source's aux record names token {unknown}; the model has 0 to {vocabulary - 1}")
            return
        self._counters.moved_bytes += event.stats.bytes_moved
        sequence.landed(aux, event.stats, self._clock())
        self._scheduler.land(sequence)
        if sequence.has_ended:
            self._drop(sequence)
        else:
            self._append(sequence, Sampled(aux.token_id, aux.logprob, aux.top_logprobs))

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """The cache of this request will not arrive: end it, or compute its prompt here, as `on_failure` sets."""
        if self._settings.handoff.on_failure is OnFailure.RECOMPUTE and not sequence.has_ended:
            _logger.warning("hand-off %s failed, its prompt is computed here: %s", sequence.key, reason)
            self._scheduler.compute_here(sequence)
        else:
            self._end(sequence, FinishReason.ERROR, reason)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        self._drop(sequence)
        self._emit(sequence, sequence.end(reason, error))

    def _abort(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        """End a request early; blocks that a peer may touch stay held until the port reports the end of the hand-off."""
        self._cancel(sequence)
        if sequence.spans_announced and sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.DECODING):
            self._scheduler.hold(sequence)
        elif not (sequence.is_held or sequence.status is SequenceStatus.FINISHED):
            self._drop(sequence)
        self._emit(sequence, sequence.end(reason, error))

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        self._scheduler.finish(sequence)
        del self._live[sequence.request.request_id]

    def _has_open_handoff(self, sequence: Sequence) -> bool:
        if sequence.request.handoff is None:
            return False
        return (self._sources if sequence.is_source else self._targets).get(sequence.key) is sequence

    def _emit(self, sequence: Sequence, output: TokenOutput) -> None:
        """Pass an output to the sink, up to and including the first one that ends the request."""
        if sequence.has_ended:
            return
        if output.finish_reason is not None:
            sequence.has_ended = True
            self._counters.finished[output.finish_reason.value] += 1
        try:
            sequence.sink(output)
        except Exception:
            _logger.exception("the sink of request %s failed; the request is cancelled", sequence.request.request_id)
            # Cancelled in the next step and not here: `_abort` ends in `_emit`, whose callers still work on the sequence.
            self._sinkless.append(sequence)
            if not sequence.has_ended:
                sequence.has_ended = True
                self._counters.finished[FinishReason.CANCELLED.value] += 1

    def _expected_source(self, request: GenerationRequest) -> engine_port.SourceRequest:
        handoff = request.handoff
        if not isinstance(handoff, FromSource):
            raise Bug(f"request {request.request_id} has no source")
        mode = self._settings.handoff.mode
        digest = prompt_digest(request) if request.prompt_ids else ""
        return engine_port.SourceRequest(handoff.key, digest, handoff.source, handoff.source_incarnation, mode)

    def _note(self, sequence: Sequence, stage: Stage, at: float) -> None:
        side = Side.SOURCE if sequence.is_source else Side.TARGET
        self._observe(Note(sequence.key, side, stage, at))

    def _note_computed(self, chunk: ScheduledChunk) -> None:
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
