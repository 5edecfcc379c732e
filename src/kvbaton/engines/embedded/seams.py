"""The seams inside the engine: what it needs of a model and of a cache, whether those live here or in rank processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.model import TokenSpan, Written
from kvbaton.engines.embedded.text_stream import TokenDecoder

__all__ = ["EngineCache", "EngineModel", "EngineTokenizer", "PromptTokenizer", "ModelInfo", "StepModel"]


class StepModel(Protocol):
    """Runs steps over the cache that was made for it."""

    def forward(self, spans: Sequence[TokenSpan], cache: Any, written: Written | None = None) -> npt.NDArray[np.float32]:
        """Run every token of `spans` and return the logits that follow each span, (len(spans), vocab_size)."""


class PromptTokenizer(Protocol):
    """A tokenizer as the HTTP server needs it."""

    @property
    def longest_token_bytes(self) -> int:
        """UTF-8 bytes of the longest token: a text of N bytes has at least N divided by this many tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The token ids of `text`."""

    def token_text(self, token_id: int) -> str:
        """One token as text on its own."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a conversation, special tokens included."""


class EngineTokenizer(PromptTokenizer, TokenDecoder, Protocol):
    """A tokenizer that also decodes."""


class ModelInfo(Protocol):
    """A model as the HTTP server needs it. `fingerprint` is the same in every process for the same model."""

    @property
    def config(self) -> ModelConfig:
        """Its dimensions."""

    @property
    def tokenizer(self) -> PromptTokenizer:
        """Its tokenizer."""

    @property
    def name(self) -> str:
        """The name under which it is served."""

    @property
    def fingerprint(self) -> str:
        """A digest of its weights and dimensions."""


class EngineModel(ModelInfo, Protocol):
    """A model that an engine can run."""

    @property
    def model(self) -> StepModel:
        """Runs its steps."""

    @property
    def tokenizer(self) -> EngineTokenizer:
        """Its tokenizer, which also decodes."""


class EngineCache(Protocol):
    """The cache as the scheduler sees it."""

    @property
    def blocks(self) -> int:
        """How many blocks there are."""

    @property
    def block_tokens(self) -> int:
        """How many tokens a block holds."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether full blocks may serve other prompts with the same beginning."""

    def block_lists(self, blocks: Sequence[int]) -> BlockLists:
        """The blocks of one sequence: one list per group of the layout."""

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks` with a pattern that is far from any real content."""
