"""Random weights of a sane scale, made from a seed: the same in every process, so that no rank needs a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.shaped.blueprint import Blueprint, Kind
from kvbaton.engines.embedded.tiny import readable_tokens

__all__ = ["Array", "ShapedLayerWeights", "ShapedWeights", "make_weights", "weights_fingerprint"]

Array = npt.NDArray[np.float64]

_RARE = 0.2


@dataclass(frozen=True, slots=True)
class ShapedLayerWeights:
    """The matrices of one layer by name, each (outputs, inputs), of the whole model."""

    mixing: dict[str, Array]
    ffn: dict[str, Array]


@dataclass(frozen=True, slots=True)
class ShapedWeights:
    """All weights of a model, uncut."""

    embedding: Array
    head: Array
    layers: tuple[ShapedLayerWeights, ...] = field(default=())


class _Draw:
    """Draws matrices one after another; the order is part of what a seed means."""

    def __init__(self, blueprint: Blueprint) -> None:
        digest = hashlib.blake2b(blueprint.name.encode(), digest_size=4).digest()
        self._rng = np.random.default_rng([blueprint.seed, int.from_bytes(digest, "little")])

    def matrix(self, outputs: int, inputs: int, gain: float) -> Array:
        """Normal, scaled so that rows of length one stay of about that length times `gain`."""
        return np.asarray(self._rng.standard_normal((outputs, inputs)) * gain / np.sqrt(inputs), np.float64)

    def uniform(self, low: float, high: float, *shape: int) -> Array:
        """Evenly between two values."""
        return self._rng.uniform(low, high, shape)


def make_weights(blueprint: Blueprint) -> ShapedWeights:
    """Draw all weights of a model."""
    draw, readable = _Draw(blueprint), readable_tokens()
    embedding = draw.matrix(len(readable), blueprint.hidden_size, np.sqrt(blueprint.hidden_size))
    head = draw.matrix(len(readable), blueprint.hidden_size, 3.0) * np.where(readable, 1.0, _RARE)[:, None]
    layers = tuple(ShapedLayerWeights(_mixing(blueprint, kind, draw), _ffn(blueprint, draw)) for kind in blueprint.kinds)
    return ShapedWeights(embedding, head, layers)


def weights_fingerprint(blueprint: Blueprint, weights: ShapedWeights) -> str:
    """The same in every process for the same model, and different between models."""
    digest = hashlib.blake2b(msgspec.json.encode(blueprint), digest_size=16)
    for tensor in (weights.embedding, weights.head, *(t for layer in weights.layers for t in layer.mixing.values())):
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def _mixing(blueprint: Blueprint, kind: Kind, draw: _Draw) -> dict[str, Array]:
    if kind is Kind.MLA:
        return _latent(blueprint, draw)
    if kind is Kind.MAMBA:
        return _mamba(blueprint, draw)
    weights = _attention(blueprint, draw)
    return weights | (_index(blueprint, draw) if kind is Kind.SPARSE else {})


def _attention(blueprint: Blueprint, draw: _Draw) -> dict[str, Array]:
    hidden, query, kv = blueprint.hidden_size, blueprint.heads * blueprint.head_size, blueprint.kv_heads * blueprint.head_size
    return {
        "query": draw.matrix(query, hidden, 1.6),
        "key": draw.matrix(kv, hidden, 1.6),
        "value": draw.matrix(kv, hidden, 2.0),
        "out": draw.matrix(hidden, query, 2.0),
    }


def _index(blueprint: Blueprint, draw: _Draw) -> dict[str, Array]:
    hidden = blueprint.hidden_size
    return {
        "index_query": draw.matrix(blueprint.index_heads * blueprint.index_size, hidden, 1.6),
        "index_key": draw.matrix(blueprint.index_size, hidden, 1.6),
    }


def _latent(blueprint: Blueprint, draw: _Draw) -> dict[str, Array]:
    hidden, heads, size, latent = blueprint.hidden_size, blueprint.heads, blueprint.head_size, blueprint.latent_size
    return {
        "query": draw.matrix(heads * size, hidden, 1.6),
        "query_rope": draw.matrix(heads * blueprint.rope_size, hidden, 1.2),
        "latent": draw.matrix(latent, hidden, 1.6),
        "key_rope": draw.matrix(blueprint.rope_size, hidden, 1.2),
        "key_up": draw.matrix(heads * size, latent, 1.2),
        "value_up": draw.matrix(heads * size, latent, 1.6),
        "out": draw.matrix(hidden, heads * size, 2.0),
    }


def _mamba(blueprint: Blueprint, draw: _Draw) -> dict[str, Array]:
    hidden, heads = blueprint.hidden_size, blueprint.mamba_heads
    inner, shared = heads * blueprint.head_size, blueprint.mamba_groups * blueprint.state_size
    return {
        "x": draw.matrix(inner, hidden, 1.5),
        "b": draw.matrix(shared, hidden, 1.5),
        "c": draw.matrix(shared, hidden, 1.5),
        "gate": draw.matrix(inner, hidden, 1.5),
        "step": draw.matrix(heads, hidden, 0.5),
        "x_conv": draw.uniform(0.2, 0.9, inner, blueprint.conv_taps),
        "b_conv": draw.uniform(0.2, 0.9, shared, blueprint.conv_taps),
        "c_conv": draw.uniform(0.2, 0.9, shared, blueprint.conv_taps),
        "decay": draw.uniform(0.02, 0.3, heads),
        "skip": draw.uniform(0.5, 1.0, heads),
        "out": draw.matrix(hidden, inner, 2.0),
    }


def _ffn(blueprint: Blueprint, draw: _Draw) -> dict[str, Array]:
    hidden, ffn = blueprint.hidden_size, blueprint.ffn_size
    return {"gate": draw.matrix(ffn, hidden, 1.0), "up": draw.matrix(ffn, hidden, 1.0), "down": draw.matrix(hidden, ffn, 1.5)}
