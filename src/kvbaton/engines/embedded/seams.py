"""The seams inside the engine: what it needs of a model and of a cache, whether those live here or in rank processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.model import Span, Written
from kvbaton.engines.embedded.tokenizer import Tokenizer

__all__ = ["EngineCache", "EngineModel", "StepModel"]


class StepModel(Protocol):
    """Runs steps over the cache that was made for it."""

    def forward(self, spans: Sequence[Span], cache: Any, written: Written | None = None) -> npt.NDArray[np.float32]:
        """Run every token of `spans` and return the logits that follow each span, (len(spans), vocab_size)."""


class EngineModel(Protocol):
    """A model that an engine can serve. `fingerprint` is the same in every process for the same model."""

    @property
    def config(self) -> ModelConfig:
        """Its dimensions."""

    @property
    def model(self) -> StepModel:
        """What runs its steps."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def name(self) -> str:
        """How it is called."""

    @property
    def fingerprint(self) -> str:
        """What it is."""


class EngineCache(Protocol):
    """The cache as the engine's books see it."""

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
        """The blocks of one sequence as agents want them: one list per group."""

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks` with a pattern that is far from any real content."""
