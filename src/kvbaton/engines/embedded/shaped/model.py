"""One rank's part of a model: its layers, its heads, and what it needs from the others to run a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.model import TokenSpan, Written
from kvbaton.engines.embedded.seams import StepModel
from kvbaton.engines.embedded.shaped.blueprint import WHOLE, Blueprint, Cut, Kind, find_blueprint
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.engines.embedded.shaped.mixing import Attention, Mamba, Mixer, Mla, Place, rms_normed, rows_of, silu
from kvbaton.engines.embedded.shaped.weights import Array, ShapedWeights, make_weights, weights_fingerprint
from kvbaton.engines.embedded.tiny import byte_tokenizer
from kvbaton.engines.embedded.tokenizer import Tokenizer
from kvbaton.errors import Bug

__all__ = ["LoadedShaped", "Reduce", "ShapedModel", "load_shaped", "shaped_config"]

Reduce = Callable[[Array], Array]
"""Adds up the parts of all ranks of a stage, in one order for all, and gives every rank the same sum."""


def alone(part: Array) -> Array:
    """The sum of a stage that has one rank."""
    return part


class ShapedModel:
    """Runs the layers of one rank. Not reentrant: one thread at a time."""

    def __init__(self, blueprint: Blueprint, weights: ShapedWeights, cut: Cut = WHOLE, reduce: Reduce = alone) -> None:
        self.blueprint = blueprint
        self.cut = cut
        self._reduce = reduce
        self._embedding, self._head = weights.embedding, weights.head
        self._layers = [
            (
                layer,
                _mixer(blueprint, layer, weights.layers[layer].mixing, cut),
                _FeedForward(weights.layers[layer].ffn, cut),
            )
            for layer in cut.layers(blueprint.layers)
        ]

    def forward(
        self, spans: Sequence[TokenSpan], cache: ShapedCache, written: Written | None = None
    ) -> npt.NDArray[np.float32]:
        """Run every token of `spans` through all layers, and return the logits that follow each span; for an uncut model.

        `written` is called for each layer as soon as what it remembers is in the cache.
        """
        return self.logits(self.run(self.embed(spans), spans, cache, written), spans)

    def embed(self, spans: Sequence[TokenSpan]) -> Array:
        """The rows with which the first stage begins."""
        token_ids = np.concatenate([span.token_ids for span in spans])
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= len(self._embedding):
            raise Bug(f"token ids {lowest} .. {highest} leave the vocabulary of {len(self._embedding)}")
        rows: Array = self._embedding[token_ids]
        return rows

    def run(self, hidden: Array, spans: Sequence[TokenSpan], cache: ShapedCache, written: Written | None = None) -> Array:
        """The rows after the layers of this rank's stage; the same on every rank of it."""
        places = _places(spans, cache)
        epsilon = self.blueprint.norm_epsilon
        for layer, mixer, feed_forward in self._layers:
            part = mixer.mix(rms_normed(hidden, epsilon), places, cache)
            if written is not None:
                written(layer)
            hidden = hidden + self._reduce(part)
            hidden = hidden + self._reduce(feed_forward.run(rms_normed(hidden, epsilon)))
        return hidden

    def logits(self, hidden: Array, spans: Sequence[TokenSpan]) -> npt.NDArray[np.float32]:
        """What follows each span, from the rows after the last stage."""
        last = np.cumsum([len(span.token_ids) for span in spans]) - 1
        return (rms_normed(hidden[last], self.blueprint.norm_epsilon) @ self._head.T).astype(np.float32)


def _mixer(blueprint: Blueprint, layer: int, weights: dict[str, Array], cut: Cut) -> Mixer:
    kinds: dict[Kind, type[Attention | Mla | Mamba]] = {Kind.MLA: Mla, Kind.MAMBA: Mamba}
    return kinds.get(blueprint.kinds[layer], Attention)(blueprint, layer, weights, cut)


class _FeedForward:
    def __init__(self, weights: dict[str, Array], cut: Cut) -> None:
        own = cut.share(len(weights["gate"]))
        self._gate, self._up = (rows_of(weights[name], own, 1) for name in ("gate", "up"))
        self._down = weights["down"][:, own.start : own.stop]

    def run(self, rows: Array) -> Array:
        added: Array = (silu(rows @ self._gate.T) * (rows @ self._up.T)) @ self._down.T
        return added


def _places(spans: Sequence[TokenSpan], cache: ShapedCache) -> list[Place]:
    places, first = [], 0
    for span in spans:
        stop = first + len(span.token_ids)
        place = Place(first, stop, span)
        if stop == first:
            raise Bug("a span has no tokens")
        if place.end > len(span.blocks) * cache.block_tokens:
            raise Bug(f"a span ends at token {place.end}, and its block table covers {len(span.blocks) * cache.block_tokens}")
        places.append(place)
        first = stop
    return places


@dataclass(frozen=True, slots=True)
class LoadedShaped:
    """A small model, uncut and ready to run. `fingerprint` is the same in every process for the same model."""

    blueprint: Blueprint
    config: ModelConfig
    model: StepModel
    tokenizer: Tokenizer
    name: str
    fingerprint: str


def load_shaped(model: str) -> LoadedShaped:
    """Make the model of this name. Raises ModelError when there is none."""
    blueprint = find_blueprint(model)
    weights = make_weights(blueprint)
    fingerprint = weights_fingerprint(blueprint, weights)
    tokenizer = Tokenizer(byte_tokenizer(), model)
    return LoadedShaped(
        blueprint, shaped_config(blueprint, len(weights.head)), ShapedModel(blueprint, weights), tokenizer, model, fingerprint
    )


def shaped_config(blueprint: Blueprint, vocab_size: int) -> ModelConfig:
    """The dimensions that all models have."""
    return ModelConfig(
        architecture=blueprint.name,
        layers=blueprint.layers,
        hidden_size=blueprint.hidden_size,
        heads=blueprint.heads,
        kv_heads=blueprint.kv_heads,
        head_size=blueprint.head_size,
        ffn_size=blueprint.ffn_size,
        vocab_size=vocab_size,
        context_tokens=blueprint.context_tokens,
        rope_theta=blueprint.rope_theta,
        norm_epsilon=blueprint.norm_epsilon,
        tied_head=False,
    )
