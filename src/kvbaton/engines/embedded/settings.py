"""The settings of an embedded engine and of its HTTP server: how much they take at once, and how long they wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.errors import ConfigError

__all__ = ["DEFAULT_HTTP", "DEFAULT_INSTANCE", "EngineSettings", "HttpSettings", "InstanceOptions"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How much an engine runs at once. `step_tokens` bounds a step, so that prefill does not starve decode."""

    step_tokens: int = 256
    max_sequences: int = 64
    max_waiting: int = 4096
    """Sequences (prompts times `n`, over all requests) that may wait; more are refused, or the largest request makes room."""
    poison: bool = False
    """Whether to fill the blocks of a target with a pattern before they are granted, so that a missing write shows."""
    handoff: HandoffSettings = DEFAULT_HANDOFF
    has_both_roles: bool = False
    """Whether it is the source of some hand-offs and the target of others, which then share its blocks."""
    defer_timeout_s: float = 60.0
    """How long a source that may not start without a grant waits for it."""
    idle_wait_s: float = 0.5
    """How long an idle engine sleeps when nothing wakes it."""
    close_s: float = 30.0
    """How long `close` waits for the step under way."""

    def __post_init__(self) -> None:
        for name in ("step_tokens", "max_sequences", "max_waiting", "defer_timeout_s", "idle_wait_s", "close_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What one HTTP request may hold, checked before any of it is tokenized, and what its response shows.

    A tokenizer needs many times the memory of its text, so a limit in tokens comes too late: it is known only afterwards.
    The command line reads its options off this class.

    Parameters
    ----------
    max_prompt_bytes
        UTF-8 bytes of one prompt or conversation; 0: the context length times the longest token.
    max_request_bytes
        UTF-8 bytes of all prompts of a request; 0: four times `--max-prompt-bytes`.
    max_body_bytes
        bytes of a request body; 0: 1 MiB and twice `--max-request-bytes`.
    max_request_sequences
        sequences of one request: prompts times `n`.
    show_details
        whether responses show cached tokens, timings and addresses, from which a client learns about others; by default not
        where KVBATON_API_KEY or KVBATON_INSTANCE_API_KEY is set.
    keyed_metrics
        /metrics only for holders of the cluster key: its token in the header x-kvbaton-key, or as a bearer token.
    """

    max_prompt_bytes: int = 0
    max_request_bytes: int = 0
    max_body_bytes: int = 0
    max_request_sequences: int = 256
    show_details: bool | None = None
    keyed_metrics: bool = False

    def __post_init__(self) -> None:
        for name in ("max_prompt_bytes", "max_request_bytes", "max_body_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 (derived from the model) or above")
        if self.max_request_sequences < 1:
            raise ConfigError(f"max_request_sequences is {self.max_request_sequences}; it must be at least 1")


DEFAULT_HTTP = HttpSettings()
"""Every limit derived from the model."""


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """What an instance serves, where, and with how much memory. The command line reads its options off this class.

    Parameters
    ----------
    role
        prefill and decode instances hand caches over; `both` answers clients by itself.
    model
        `smollm2`, `tiny`, a .gguf file, a directory of Hugging Face safetensors, or a small model of some kind of cache:
        `tiny-gqa2`, `-gqa4`, `-gqa6`, `-gqa8`, `-mqa`, `-mla`, `-swa`, `-mamba`, `-nsa`; with another seed as
        `tiny-gqa2:1`, with other sizes as `tiny-mamba@conv_taps=6`.
    host
        where to listen for HTTP and control messages.
    port
        port of the OpenAI-compatible API.
    control_port
        port on which other instances reach this one.
    blocks
        blocks of the KV cache.
    block_tokens
        tokens per block.
    cache_dtype
        type of the numbers in the cache: `float32`, or `float16` for the small models.
    model_id
        stands for the model where instances of another engine serve the same one (SGLang's setting `fingerprint`); with it,
        caches can be handed over between the two.
    drain_timeout_s
        how long requests and hand-offs in flight may go on when this process is asked to end; routers get its goodbye first.
    """

    role: Literal["prefill", "decode", "both"] = "both"
    model: str = "smollm2"
    host: str = "127.0.0.1"
    port: int = 8100
    control_port: int = 8101
    blocks: int = 2048
    block_tokens: int = 16
    cache_dtype: str = "float32"
    model_id: str = ""
    drain_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s is {self.drain_timeout_s}; it must be 0 or above")


DEFAULT_INSTANCE = InstanceOptions()
