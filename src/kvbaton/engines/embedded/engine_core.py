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
    Drained,
    EngineEvent,
    Granted,
    HandoffPort,
    Landed,
    Offer,
    Pull,
    SourceEnded,
    SourceWanted,
)
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.core.handoff import HandoffKey, Outcome, RequestId
from kvbaton.core.timeline import Observer, nobody
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.engines.embedded.request import FinishReason, FromSource, GenerationRequest, Sink, TokenOutput
from kvbaton.engines.embedded.sampling import Sampled, sample
from kvbaton.engines.embedded.scheduler import Chunk, Scheduler
from kvbaton.engines.embedded.sequence import Phase, Sequence
from kvbaton.engines.embedded.stats import Counters, EngineStats
from kvbaton.engines.embedded.weights import LoadedModel
from kvbaton.errors import BadRequest, Bug, ConfigError

__all__ = ["EngineCore", "EngineSettings"]

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """How much an engine takes on at once. `step_tokens` bounds a step, so that prefill does not starve decode."""

    step_tokens: int = 256
    max_sequences: int = 64
    max_waiting: int = 4096
    poison: bool = False
    """Whether to fill the blocks of a target with a pattern before they are granted, so that a missing write shows."""
    handoff: HandoffSettings = DEFAULT_HANDOFF
    idle_wait_s: float = 0.5
    """How long an idle engine waits before it looks round again without having been woken."""
    close_s: float = 30.0
    """How long `close` waits for the step under way."""

    def __post_init__(self) -> None:
        for name in ("step_tokens", "max_sequences", "max_waiting", "idle_wait_s", "close_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")


class EngineCore:
    """Everything an engine does, on the caller's thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: PagedCache,
        port: HandoffPort | None,
        settings: EngineSettings,
        clock: Callable[[], float],
        observe: Observer = nobody,
    ) -> None:
        self._observe = observe
        self._loaded = loaded
        self._cache = cache
        self._port = port
        self._settings = settings
        self._clock = clock
        pool = BlockPool(cache.blocks, cache.block_tokens)
        self._scheduler = Scheduler(pool, max_sequences=settings.max_sequences, step_tokens=settings.step_tokens)
        self._limit = min(loaded.config.context_tokens, pool.capacity_tokens)
        self._counters = Counters()
        self._numbers = itertools.count()
        self._live: dict[RequestId, Sequence] = {}
        self._sources: dict[HandoffKey, Sequence] = {}
        self._targets: dict[HandoffKey, Sequence] = {}
        self._sinkless: list[Sequence] = []

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
            block_tokens=self._cache.block_tokens,
            submitted_s=submitted_s,
        )
        if request.request_id in self._live:
            self._emit(sequence, sequence.end(FinishReason.ERROR, f"request {request.request_id} is under way already"))
            return
        if request.handoff is not None:
            side = self._sources if sequence.is_source else self._targets
            if side.setdefault(sequence.key, sequence) is not sequence:
                self._emit(sequence, sequence.end(FinishReason.ERROR, f"hand-off {sequence.key} is under way already"))
                return
            if not self._tell_port(sequence.key, lambda port: self._expect(port, sequence)):
                del side[sequence.key]
                self._emit(sequence, sequence.end(FinishReason.ERROR, "the hand-off could not be started; see the log"))
                return
        self._live[request.request_id] = sequence
        self._counters.prompt_tokens += sequence.prompt_tokens
        self._scheduler.add(sequence)

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up; unknown ones are ignored. Blocks of a hand-off come back when the port says that it has ended."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._give_up(sequence, FinishReason.CANCELLED, "cancelled by the caller")

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
        for sequence in self._scheduler.admit(self._clock()):
            self._pull(sequence)
        chunks = self._scheduler.plan()
        if chunks:
            self._run(chunks)
        return bool(chunks or events or self._sinkless)

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

    def _run(self, chunks: list[Chunk]) -> None:
        self._counters.steps += 1
        try:
            logits = self._loaded.model.forward([chunk.span() for chunk in chunks], self._cache)
        except Exception as error:
            _logger.exception("the model failed in a step of %d sequences", len(chunks))
            for chunk in chunks:
                self._give_up(chunk.sequence, FinishReason.ERROR, f"the model failed: {error!r}")
            return
        for chunk, row in zip(chunks, logits, strict=True):
            completes = chunk.completes
            self._scheduler.complete(chunk)
            if completes:
                self._choose(chunk.sequence, row)

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
        offer = Offer(sequence.key, (tuple(sequence.blocks),), sequence.prompt_tokens, sequence.aux(sampled))
        if not self._tell_port(sequence.key, lambda port: port.offer(offer)):
            del self._sources[sequence.key]
            self._drop(sequence)
        self._emit(sequence, output)

    def _pull(self, sequence: Sequence) -> None:
        cached_tokens = sequence.computed
        fresh = sequence.blocks[cached_tokens // self._cache.block_tokens :]
        if self._settings.poison and fresh:
            self._cache.poison(fresh)
        blocks = (tuple(sequence.blocks),)
        pull = Pull(self._wanted(sequence), blocks, sequence.prompt_tokens, cached_tokens)
        if not self._tell_port(sequence.key, lambda port: port.pull(pull)):
            del self._targets[sequence.key]
            self._drop(sequence)
            self._emit(sequence, sequence.end(FinishReason.ERROR, "the hand-off could not be started; see the log"))

    def _tell_port(self, key: HandoffKey, call: Callable[[HandoffPort], None]) -> bool:
        try:
            if self._port is not None:
                call(self._port)
        except Exception:
            _logger.exception("hand-off %s: the agents refused a call that must not fail", key)
            return False
        return True

    def _take(self, event: EngineEvent) -> None:
        """Every hand-off ends with one event; until then its key stays taken, even if its request is long over."""
        if isinstance(event, Granted | Drained):
            return
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
        self._drop(sequence)
        ending = FinishReason.CANCELLED if outcome is Outcome.CANCELLED else FinishReason.ERROR
        self._emit(sequence, sequence.end(ending, event.reason or f"the hand-off ended as {outcome}"))

    def _land(self, sequence: Sequence, event: Landed) -> None:
        aux, vocabulary = event.aux, self._loaded.config.vocab_size
        if not 0 <= aux.token_id < vocabulary:
            self._drop(sequence)
            error = f"the source's first token is {aux.token_id}; the model has 0 to {vocabulary - 1}"
            self._emit(sequence, sequence.end(FinishReason.ERROR, error))
            return
        sequence.landed(aux, event.stats, self._clock())
        self._scheduler.land(sequence)
        if sequence.has_ended:
            self._drop(sequence)
        else:
            self._append(sequence, Sampled(aux.token_id, aux.logprob, aux.top_logprobs))

    def _give_up(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        """End a request early; blocks that a peer may touch stay held until the port says that the hand-off is over."""
        if self._has_open_handoff(sequence):
            self._tell_port(sequence.key, lambda port: port.cancel(sequence.key))
        if sequence.phase not in (Phase.FETCHING, Phase.HELD, Phase.FINISHED):
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

    def _expect(self, port: HandoffPort, sequence: Sequence) -> None:
        if sequence.is_source:
            port.expect_target(sequence.key, sequence.prompt_digest)
        else:
            port.expect_source(self._wanted(sequence))

    def _wanted(self, sequence: Sequence) -> SourceWanted:
        handoff = sequence.request.handoff
        if not isinstance(handoff, FromSource):
            raise Bug(f"request {sequence.request.request_id} has no source to pull from")
        mode = self._settings.handoff.mode
        return SourceWanted(handoff.key, sequence.prompt_digest, handoff.source, handoff.source_incarnation, mode)
