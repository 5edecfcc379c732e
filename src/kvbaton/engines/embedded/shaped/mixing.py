"""How the layers of each kind mix tokens, over a paged cache and on one rank: only its own heads, over its own memory.

What a rank returns is its part of a sum over all ranks of its stage. All arithmetic is in float64, and whatever is remembered
is rounded to the type of the cache and read back from there before it is used: so answers do not depend on how a prompt is cut
into chunks, nor, but for the last bits of a sum, on how the model is cut into ranks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.shaped.blueprint import Blueprint, Cut, Kind
from kvbaton.engines.embedded.shaped.memory import ShapedCache, Values
from kvbaton.engines.embedded.shaped.weights import Array

__all__ = ["Attention", "Mamba", "Mixer", "Mla", "Place", "rms_normed", "rows_of", "silu"]

_TILE = 64
_HIDDEN = -np.inf


class Place(NamedTuple):
    """Rows `first` .. `stop`-1 of a step are the tokens of `span`."""

    first: int
    stop: int
    span: TokenSpan

    @property
    def end(self) -> int:
        """The tokens of the sequence after this step."""
        return self.span.start + self.stop - self.first

    @property
    def positions(self) -> npt.NDArray[np.intp]:
        """Where the rows stand in their sequence."""
        return np.arange(self.span.start, self.end)

    def slots(self, block_tokens: int, first: int, end: int) -> npt.NDArray[np.intp]:
        """Where tokens `first` .. `end`-1 of the sequence lie in a plane of tokens."""
        tokens = np.arange(first, end)
        return self.span.blocks[tokens // block_tokens].astype(np.intp) * block_tokens + tokens % block_tokens


class Mixer(Protocol):
    """How one layer mixes tokens."""

    def mix(self, rows: Array, places: list[Place], cache: ShapedCache) -> Array:
        """Write what is to be remembered of `rows` into the cache, and return this rank's part of what is added to them."""


def rows_of(weights: Array, heads: range, size: int) -> Array:
    """The rows of a matrix, or entries of a vector, that belong to `heads` of `size` rows each."""
    return weights[heads.start * size : heads.stop * size]


def rms_normed(rows: Array, epsilon: float) -> Array:
    """Rows of mean square one."""
    normed: Array = rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + epsilon)
    return normed


def silu(values: Array) -> Array:
    """x times its logistic."""
    gated: Array = values / (1.0 + np.exp(-values))
    return gated


class Attention:
    """Grouped-query attention: to all tokens, to those in a window, or to the few that an index chooses."""

    def __init__(self, blueprint: Blueprint, layer: int, weights: dict[str, Array], cut: Cut) -> None:
        self._blueprint = blueprint
        self._layer = layer
        self._is_sliding = blueprint.kinds[layer] is Kind.SLIDING
        self._index = _Index(blueprint, layer, weights) if blueprint.kinds[layer] is Kind.SPARSE else None
        self._group = "sliding" if self._is_sliding else "full"
        size, heads, kv_heads = blueprint.head_size, cut.share(blueprint.heads), cut.share(blueprint.kv_heads)
        self._query = rows_of(weights["query"], heads, size) * size**-0.5
        self._key, self._value = (rows_of(weights[name], kv_heads, size) for name in ("key", "value"))
        self._out = weights["out"][:, heads.start * size : heads.stop * size]
        self._kv_heads = len(kv_heads)

    def mix(self, rows: Array, places: list[Place], cache: ShapedCache) -> Array:
        size, theta = self._blueprint.head_size, self._blueprint.rope_theta
        positions = np.concatenate([place.positions for place in places])
        queries = _rotated((rows @ self._query.T).reshape(len(rows), -1, size), positions, theta)
        keys = _rotated((rows @ self._key.T).reshape(len(rows), -1, size), positions, theta)
        values = (rows @ self._value.T).reshape(len(rows), -1, size)
        stored = [_by_token(cache.layer(self._group, name, self._layer)) for name in ("k", "v")]
        _store(stored[0], keys, places, cache.block_tokens)
        _store(stored[1], values, places, cache.block_tokens)
        chosen = None if self._index is None else self._index.choose(rows, positions, places, cache)
        seen = np.empty_like(queries)
        for number, place in enumerate(places):
            first = max(0, place.span.start - self._blueprint.window + 1) if self._is_sliding else 0
            slots = place.slots(cache.block_tokens, first, place.end)
            mask = self._mask(place, first) if chosen is None else chosen[number]
            grouped = queries[place.first : place.stop].reshape(place.stop - place.first, self._kv_heads, -1, size)
            seen[place.first : place.stop] = attend(grouped, stored[0][slots], stored[1][slots], mask).reshape(
                place.stop - place.first, -1, size
            )
        added: Array = seen.reshape(len(rows), -1) @ self._out.T
        return added

    def _mask(self, place: Place, first: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens from `first` on each row sees."""
        tokens, positions = np.arange(first, place.end), place.positions[:, None]
        seen: npt.NDArray[np.bool_] = tokens <= positions
        return seen & (tokens > positions - self._blueprint.window) if self._is_sliding else seen


class _Index:
    """Chooses the tokens that a sparse layer looks at, by small keys of their own. Every rank holds all of it."""

    def __init__(self, blueprint: Blueprint, layer: int, weights: dict[str, Array]) -> None:
        self._blueprint = blueprint
        self._layer = layer
        self._query, self._key = weights["index_query"], weights["index_key"]

    def choose(
        self, rows: Array, positions: npt.NDArray[np.intp], places: list[Place], cache: ShapedCache
    ) -> list[npt.NDArray[np.bool_]]:
        """Remember the index keys of `rows`; per place, which tokens of its sequence each row sees."""
        size, theta = self._blueprint.index_size, self._blueprint.rope_theta
        queries = _rotated((rows @ self._query.T).reshape(len(rows), -1, size), positions, theta)
        keys = _rotated((rows @ self._key.T).reshape(len(rows), 1, size), positions, theta)
        stored = _by_token(cache.layer("index", "index", self._layer))
        _store(stored, keys, places, cache.block_tokens)
        return [
            self._chosen(queries[place.first : place.stop], stored[place.slots(cache.block_tokens, 0, place.end), 0], place)
            for place in places
        ]

    def _chosen(self, queries: Array, keys: Values, place: Place) -> npt.NDArray[np.bool_]:
        scores = np.maximum(queries @ keys.T.astype(np.float64), 0.0).sum(axis=1)
        causal = np.arange(place.end) <= place.positions[:, None]
        scores = np.where(causal, scores + 1.0, _HIDDEN)
        top = self._blueprint.index_top
        if place.end <= top:
            return causal
        least = np.partition(scores, place.end - top, axis=1)[:, place.end - top, None]
        chosen: npt.NDArray[np.bool_] = (scores >= least) & causal
        return chosen


class Mla:
    """Latent attention: keys and values of all heads are made of one small vector per token, and only that is remembered."""

    def __init__(self, blueprint: Blueprint, layer: int, weights: dict[str, Array], cut: Cut) -> None:
        self._blueprint = blueprint
        self._layer = layer
        size, rope, latent, heads = blueprint.head_size, blueprint.rope_size, blueprint.latent_size, cut.share(blueprint.heads)
        scale = (size + rope) ** -0.5
        self._query = (rows_of(weights["query"], heads, size) * scale).reshape(len(heads), size, -1)
        self._query_rope = rows_of(weights["query_rope"], heads, rope) * scale
        self._key_up, self._value_up = (
            rows_of(weights[name], heads, size).reshape(len(heads), size, latent) for name in ("key_up", "value_up")
        )
        self._latent, self._key_rope = weights["latent"], weights["key_rope"]
        self._out = weights["out"][:, heads.start * size : heads.stop * size]

    def mix(self, rows: Array, places: list[Place], cache: ShapedCache) -> Array:
        rope, latent, theta = self._blueprint.rope_size, self._blueprint.latent_size, self._blueprint.rope_theta
        positions = np.concatenate([place.positions for place in places])
        remembered = np.concatenate(
            [rms_normed(rows @ self._latent.T, 1e-6)[:, None], _rotated((rows @ self._key_rope.T)[:, None], positions, theta)],
            axis=2,
        )
        stored = _by_token(cache.layer("mla", "latent", self._layer))
        _store(stored, remembered, places, cache.block_tokens)
        queries = np.einsum("rh,nsh,nsl->rnl", rows, self._query, self._key_up, optimize=True)
        ropes = _rotated((rows @ self._query_rope.T).reshape(len(rows), -1, rope), positions, theta)
        queries = np.concatenate([queries, ropes], axis=2)
        seen = np.empty((*queries.shape[:2], latent))
        for place in places:
            known = stored[place.slots(cache.block_tokens, 0, place.end)]
            mask = np.arange(place.end) <= place.positions[:, None]
            grouped = queries[place.first : place.stop, None]
            seen[place.first : place.stop] = attend(grouped, known, known[:, :, :latent], mask)[:, 0]
        values = np.einsum("rnl,nsl->rns", seen, self._value_up, optimize=True)
        added: Array = values.reshape(len(rows), -1) @ self._out.T
        return added


def attend(queries: Array, keys: Values, values: Values, mask: npt.NDArray[np.bool_]) -> Array:
    """What queries (rows, kv_heads, heads per KV head, size) see of keys and values (tokens, kv_heads, size)."""
    by_head = keys.transpose(1, 2, 0).astype(np.float64)
    kept = values.transpose(1, 0, 2).astype(np.float64)
    seen = np.empty((*queries.shape[:3], values.shape[2]))
    for first in range(0, len(queries), _TILE):
        tile = queries[first : first + _TILE].transpose(1, 2, 0, 3)
        scores = np.where(mask[first : first + _TILE], tile @ by_head[:, None], _HIDDEN)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        seen[first : first + _TILE] = (scores @ kept[:, None]).transpose(2, 0, 1, 3)
    return seen


def _by_token(plane: Values) -> Values:
    """(blocks, block_tokens, ...) as (tokens, ...), in place."""
    return plane.reshape(-1, *plane.shape[2:])


def _store(plane: Values, rows: Array, places: list[Place], block_tokens: int) -> None:
    slots = [place.slots(block_tokens, place.span.start, place.end) for place in places]
    plane[np.concatenate(slots)] = rows


def _rotated(rows: Array, positions: npt.NDArray[np.intp], theta: float) -> Array:
    """Rotary positions: neighbours are the two numbers that rotate together."""
    half = rows.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    turned = np.ascontiguousarray(rows).view(np.complex128) * np.exp(1j * angles)[:, None]
    rotated: Array = turned.view(np.float64)
    return rotated


class Mamba:
    """The heads of one rank, and the groups of B and C that they use; those may be held by several ranks."""

    def __init__(self, blueprint: Blueprint, layer: int, weights: dict[str, Array], cut: Cut) -> None:
        self._blueprint = blueprint
        self._layer = layer
        heads, groups = cut.share(blueprint.mamba_heads), cut.share(blueprint.mamba_groups)
        size, state = blueprint.head_size, blueprint.state_size
        parts = (("x", heads, size), ("b", groups, state), ("c", groups, state))
        self._project = np.concatenate([rows_of(weights[name], own, each) for name, own, each in parts])
        self._conv = np.concatenate([rows_of(weights[f"{name}_conv"], own, each) for name, own, each in parts])
        self._gate = rows_of(weights["gate"], heads, size)
        self._step, self._decay, self._skip = (rows_of(weights[name], heads, 1) for name in ("step", "decay", "skip"))
        self._out = weights["out"][:, heads.start * size : heads.stop * size]
        per_group = blueprint.mamba_heads // blueprint.mamba_groups
        self._group_of = np.arange(heads.start, heads.stop) // per_group - groups.start
        self._heads, self._groups = len(heads), len(groups)

    def mix(self, rows: Array, places: list[Place], cache: ShapedCache) -> Array:
        """Step the states through the tokens of each place."""
        conv, ssm = (cache.layer(name, name, self._layer) for name in ("conv", "ssm"))
        inputs = (rows @ self._project.T).astype(conv.dtype)
        steps = np.logaddexp(0.0, rows @ self._step.T)
        seen = np.empty((len(rows), self._heads, self._blueprint.head_size))
        for place in places:
            own, slot = slice(place.first, place.stop), int(place.span.blocks[0])
            if place.span.start == 0:
                conv[slot], ssm[slot] = 0.0, 0.0
            mixed = self._convolve(inputs[own], conv[slot])
            seen[own] = self._run(mixed, steps[own], ssm[slot])
        gate = silu(rows @ self._gate.T).reshape(seen.shape)
        added: Array = rms_normed(seen * gate, self._blueprint.norm_epsilon).reshape(len(rows), -1) @ self._out.T
        return added

    def _convolve(self, inputs: Values, state: Values) -> Array:
        """The convolution of each channel with its inputs; `state` keeps the last of them, as (units, channels, taps)."""
        taps = self._blueprint.conv_taps
        before = state.reshape(-1, taps - 1).T
        known = np.concatenate([before, inputs])
        mixed = sum(known[tap : tap + len(inputs)] * self._conv[:, tap] for tap in range(taps))
        state[...] = known[len(known) - taps + 1 :].T.reshape(state.shape)
        return silu(np.asarray(mixed, np.float64))

    def _run(self, mixed: Array, steps: Array, state: Values) -> Array:
        """Step the state of every head token by token; what is read from it after each step."""
        size, width = self._blueprint.head_size, self._blueprint.state_size
        inner, shared = self._heads * size, self._groups * width
        x = mixed[:, :inner].reshape(-1, self._heads, size)
        b = mixed[:, inner : inner + shared].reshape(-1, self._groups, width)[:, self._group_of]
        c = mixed[:, inner + shared :].reshape(-1, self._groups, width)[:, self._group_of]
        kept, added = np.exp(-self._decay * steps), steps[:, :, None] * x
        seen = np.empty_like(x)
        for token in range(len(x)):
            state[...] = state * kept[token, :, None, None] + added[token, :, :, None] * b[token, :, None]
            seen[token] = np.einsum("hsw,hw->hs", state, c[token], dtype=np.float64)
        seen += self._skip[:, None] * x
        return seen
