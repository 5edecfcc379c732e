"""The requests of the embedded engine, and its outputs, token by token."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import HandoffKey, Incarnation, RequestId
from kvbaton.engines.handoff_params import HandoffParams, SourceParams
from kvbaton.errors import LocalError

__all__ = [
    "ApiCall",
    "EngineBusy",
    "FinishReason",
    "FromSource",
    "GenerationRequest",
    "RequestRecord",
    "Sampling",
    "Sink",
    "TokenOutput",
    "ToTarget",
    "handoff_of",
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. `temperature` 0 is greedy; `logprobs` is how many candidates to report (None: no logprobs)."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ToTarget:
    """This request is a prefill whose cache will be handed off: one token is computed, the blocks are then offered."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class FromSource:
    """This request's cache comes from a prefill instance."""

    key: HandoffKey
    source: ControlAddress
    source_incarnation: Incarnation | None = None


def handoff_of(params: HandoffParams, prompt_index: int, sample_index: int) -> ToTarget | FromSource:
    """The hand-off of one sample of one prompt."""
    key = HandoffKey(params.transfer_id, prompt_index, sample_index)
    if isinstance(params, SourceParams):
        return ToTarget(key)
    return FromSource(key, params.source, params.source_incarnation)


@dataclass(frozen=True, slots=True, eq=False)
class ApiCall:
    """The API request that sequences belong to, and its client: both have turns in the queue. Equal only to itself."""

    client: str = ""
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, one sample. Requests share cached prefixes only if they have the same `cache_salt`, as in vLLM."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    handoff: ToTarget | FromSource | None = None
    cache_salt: str = ""
    call: ApiCall = field(default_factory=ApiCall, compare=False)


class EngineBusy(LocalError):
    """Too many sequences wait; try again later, or at another instance."""

    retryable = True


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    CROWDED_OUT = "crowded_out"
    ERROR = "error"


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request, for `kvbaton verify`, the page and the metrics. Durations in seconds.

    For a handed-off request `queue_s` and `prefill_s` are those of the source, carried in the aux record.
    """

    handed_off: bool = False
    recomputed: bool = False
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    handover_s: float = 0.0
    first_token_s: float = 0.0
    bytes_planned: int = 0
    bytes_moved: int = 0
    transport: str = ""
    source_writes: bool = False


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One output of a request. The last one has a `finish_reason`; its `token_id` is -1 when it carries no token.

    `text` is what may be shown now: bytes of an incomplete character, and text that could still become a stop string, are
    held back until they are decided. A stop string itself is never shown.
    """

    token_id: int
    text: str
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    record: RequestRecord | None = None


Sink = Callable[[TokenOutput], None]
"""Where a request's outputs go; called from the engine's thread, must not wait and must not raise."""
