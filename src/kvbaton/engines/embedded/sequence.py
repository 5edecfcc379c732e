"""One request inside the engine: its tokens, its blocks, how many of its tokens are computed, and the text it may show."""

from __future__ import annotations

import enum
import hashlib
import secrets
from array import array

from kvbaton.agent.engine_port import HandoffStats
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey
from kvbaton.engines.embedded.pool import PrefixDigests, salt_key
from kvbaton.engines.embedded.request import (
    FinishReason,
    FromSource,
    GenerationRequest,
    RequestRecord,
    Sink,
    TokenOutput,
    ToTarget,
)
from kvbaton.engines.embedded.sampling import Sampled
from kvbaton.engines.embedded.seams import EngineCache
from kvbaton.engines.embedded.text_stream import StopFilter, TextStream, TokenDecoder
from kvbaton.errors import Bug

__all__ = ["SequenceStatus", "Sequence", "choose_seed", "prompt_digest"]


class SequenceStatus(enum.StrEnum):
    """What a live request is doing."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    FETCHING = "fetching"
    DECODING = "decoding"
    HELD = "held"
    RETRACTING = "retracting"
    FINISHED = "finished"


class Sequence:
    """The tokens of one request, prompt first; the cache of the first `computed` of them lies in `blocks`.

    `number` is the order of arrival, `place` that of admission. `limit` is the most tokens, prompt included, that the sequence
    may grow to. Of a source in push, `spans_announced` counts the spans of this attempt that were announced, `has_grant` is
    whether a target has blocks for it, and `ungranted_s` is when it began to wait for a grant.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        tokenizer: TokenDecoder,
        *,
        number: int,
        limit: int,
        cache: EngineCache,
        submitted_s: float,
    ) -> None:
        self._cache = cache
        self.request = request
        self.sink = sink
        self.number = number
        self.seed = choose_seed(request)
        self.status = SequenceStatus.WAITING
        self.tokens = list(request.prompt_ids)
        self.blocks: list[int] = []
        self.computed = 0
        self.record = RequestRecord()
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None
        self.place = 0
        self.has_ended = False
        self.has_grant = False
        self.ungranted_s = 0.0
        self.spans_announced = 0
        self.is_first_step_noted = False
        self._is_local = False
        self.limit = min(limit, self.prompt_tokens + (1 if self.is_source else request.sampling.max_tokens))
        self._digests = PrefixDigests(cache.block_tokens, request.cache_salt)
        self._eos_ids = frozenset() if request.sampling.ignore_eos else tokenizer.eos_ids
        self._text = TextStream(tokenizer)
        self._stops = StopFilter(request.sampling.stop)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt in the request."""
        return len(self.request.prompt_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens that the model has yet to run."""
        return len(self.tokens) - self.computed

    @property
    def key(self) -> HandoffKey:
        """The key of this request's hand-off; only for a request that has one."""
        if self.request.handoff is None:
            raise Bug(f"request {self.request.request_id} has no hand-off")
        return self.request.handoff.key

    @property
    def is_source(self) -> bool:
        """Whether the cache is to be handed off after prefill."""
        return isinstance(self.request.handoff, ToTarget)

    @property
    def is_held(self) -> bool:
        """Whether a hand-off refers to the blocks, so that they must not change before it has ended."""
        return self.status in (SequenceStatus.FETCHING, SequenceStatus.HELD, SequenceStatus.RETRACTING)

    @property
    def awaits_source(self) -> bool:
        """Whether the cache of the prompt has yet to arrive from a prefill instance."""
        return isinstance(self.request.handoff, FromSource) and not (self.record.handed_off or self._is_local)

    @property
    def block_lists(self) -> BlockLists:
        """The blocks, one list per group of the layout; costs time in proportion to their number."""
        return self._cache.block_lists(self.blocks)

    def digests(self, tokens: int) -> list[bytes]:
        """The prefix digests of the full blocks within the first `tokens` tokens; none where prefixes are not shared."""
        return self._digests.of(self.tokens, tokens) if self._cache.shares_prefixes else []

    def admitted(self, now: float, cached_tokens: int) -> None:
        """Record when the request first left the queue, and how much of its prompt was cached."""
        self.admitted_s = now
        self.record.queue_s = now - self.submitted_s
        self.record.cached_tokens = cached_tokens

    def landed(self, aux: Aux, stats: HandoffStats, now: float) -> None:
        """Record that the cache of the prompt has arrived from the source, and what that took."""
        record = self.record
        record.handed_off = True
        record.queue_s, record.prefill_s = aux.queue_s, aux.prefill_s
        record.handoff_s = now - (self.submitted_s if self.admitted_s is None else self.admitted_s)
        record.handover_s, record.transport = stats.handover_s, stats.transport
        record.bytes_planned, record.bytes_moved = stats.bytes_planned, stats.bytes_moved
        record.source_writes = stats.source_writes

    def preempted(self) -> None:
        """Forget the blocks; the tokens so far are run again when the request is admitted anew."""
        self.blocks, self.computed, self.status, self.spans_announced = [], 0, SequenceStatus.WAITING, 0
        self.record.recomputed |= self.record.handed_off

    def compute_here(self) -> None:
        """The source will send nothing: from now on this is a plain request, whose prompt is computed here."""
        self.blocks, self.computed, self.status = [], 0, SequenceStatus.WAITING
        self.admitted_s, self._is_local = None, True
        self.record.recomputed = True

    def append(self, sampled: Sampled, now: float) -> TokenOutput:
        """Add a sampled token; the output holds the text to show, and the finish reason if the request ends here."""
        if not self.output_tokens:
            self._note_first_token(now)
        self.tokens.append(sampled.token_id)
        text, reason = self._judge(sampled.token_id)
        return TokenOutput(
            token_id=sampled.token_id,
            text=text,
            logprob=sampled.logprob,
            top_logprobs=sampled.top_logprobs,
            finish_reason=reason,
            record=self.record if reason else None,
        )

    def end(self, reason: FinishReason, error: str) -> TokenOutput:
        """The output that ends the request early."""
        return TokenOutput(token_id=-1, text="", finish_reason=reason, error=error, record=self.record)

    def aux(self, sampled: Sampled) -> Aux:
        """What travels to the target beside the cache."""
        return Aux(
            token_id=sampled.token_id,
            logprob=sampled.logprob,
            top_logprobs=sampled.top_logprobs,
            queue_s=self.record.queue_s,
            prefill_s=self.record.prefill_s,
        )

    def _note_first_token(self, now: float) -> None:
        self.record.first_token_s = now - self.submitted_s
        if not self.record.handed_off and self.admitted_s is not None:
            self.record.prefill_s = now - self.admitted_s

    def _judge(self, token_id: int) -> tuple[str, FinishReason | None]:
        if token_id in self._eos_ids:
            return self._last_text(), FinishReason.STOP
        text = self._stops.feed(self._text.feed(token_id))
        if not self._stops.stopped and len(self.tokens) < self.limit:
            return text, None
        text += self._last_text()
        return text, FinishReason.STOP if self._stops.stopped else FinishReason.LENGTH

    def _last_text(self) -> str:
        return self._stops.feed(self._text.finish()) + self._stops.finish()


def prompt_digest(request: GenerationRequest) -> str:
    """A digest of the prompt and its cache salt: both sides of a hand-off must have the same.

    With the salt in it, a client that names another's transfer id gets its blocks only if it also knows the salt.
    """
    ids = array("q", request.prompt_ids).tobytes()
    return hashlib.blake2b(ids, digest_size=16, key=salt_key(request.cache_salt)).hexdigest()


def choose_seed(request: GenerationRequest) -> int:
    """The seed of the request; else one derived from the hand-off's key, so that both sides agree; else a random one."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    if request.handoff is not None:
        digest = hashlib.blake2b(str(request.handoff.key).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")
    return secrets.randbits(56)
