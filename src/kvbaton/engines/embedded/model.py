"""A Llama-family model in NumPy: root-mean-square norms, rotary positions, grouped-query attention, gated feed-forward.

Weights are prepared so that a step is few, large operations. They are kept as (outputs, inputs) and multiplied as
`x @ w.T`. Norm weights (but for the final one) are folded into the products that follow them, the attention scale into
the query rows, and the half of `silu(g) = g/2 * (1 + tanh(g/2))` into the gate rows. Query and key rows are ordered so
that the two numbers that rotate together are neighbours: a rotation is then one complex multiplication. In the last
layer only the last token of each span goes on after its keys and values are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.attention import Rows, SequenceReader, Workspace, attend
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.errors import Bug

__all__ = ["LayerWeights", "LlamaModel", "ModelWeights", "TokenSpan", "Written"]

Array = npt.NDArray[np.float32]

Written = Callable[[int], None]
"""Called with the number of a layer once its keys and values of this step are in the cache; the step writes there no more."""

_GATED_ROWS = 32
_ONE = np.float32(1.0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Tokens of one sequence to run in a step: `token_ids` stand at the positions from `start` on.

    `blocks` is the block table of the sequence; it covers at least `start + len(token_ids)` tokens.
    """

    token_ids: npt.NDArray[np.int32]
    start: int
    blocks: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The four products of one layer, each (outputs, inputs), prepared as the module docstring describes."""

    query_key_value: Array
    attention_out: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All weights of a model; `head` is `embedding` itself when they are tied."""

    embedding: Array
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Array


class LlamaModel:
    """Runs steps over a paged cache. Not reentrant: one thread at a time, because scratch memory is reused."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self._work = Workspace()
        self._length_epsilon = np.float32(config.norm_epsilon * config.hidden_size)
        self._rotations = np.empty((0, config.head_size // 2), np.complex64)

    def forward(self, spans: Sequence[TokenSpan], cache: PagedCache, written: Written | None = None) -> Array:
        """Run every token of `spans`, write their keys and values into `cache`, and return the logits that follow each span.

        The result has the shape (len(spans), vocab_size). `written` is called for each layer before the rest of it is computed.
        """
        step = _Step(spans, cache)
        hidden = self._embed(step.token_ids)
        rotation = self._rotation(step.positions)
        for layer, weights in enumerate(self.weights.layers):
            queries = self._project(hidden, weights, cache.data[layer], step.slots, rotation)
            if written is not None:
                written(layer)
            sequences = step.sequences
            if layer == self.config.layers - 1:
                hidden, queries, sequences = hidden[step.last_rows], queries[step.last_rows], step.last_sequences
            self._attend(hidden, weights, queries, sequences, layer)
            self._feed_forward(hidden, weights)
        return self._logits(hidden)

    def _embed(self, token_ids: npt.NDArray[np.int32]) -> Array:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= self.config.vocab_size:
            raise Bug(f"token ids {lowest} .. {highest} leave the vocabulary of {self.config.vocab_size}")
        return self.weights.embedding[token_ids]

    def _project(
        self,
        hidden: Array,
        weights: LayerWeights,
        planes: Array,
        slots: slice | npt.NDArray[np.intp],
        rotation: npt.NDArray[np.complex64],
    ) -> Array:
        """Queries of all rows; their keys and values go into the cache."""
        config, rows = self.config, len(hidden)
        query_size, kv_heads, head_size = config.query_size, config.kv_heads, config.head_size
        projected = self._product("projected", self._normed(hidden), weights.query_key_value)
        rotated = projected.view(np.complex64)[:, : (query_size + config.kv_size) // 2].reshape(rows, -1, head_size // 2)
        np.multiply(rotated, rotation, out=rotated)
        by_token = planes.reshape(2, -1, kv_heads, head_size)
        by_token[:, slots] = projected[:, query_size:].reshape(rows, 2, kv_heads, head_size).swapaxes(0, 1)
        return projected[:, :query_size].reshape(rows, kv_heads, -1, head_size)

    def _attend(self, hidden: Array, weights: LayerWeights, queries: Array, sequences: Sequence[Rows], layer: int) -> None:
        attended = self._work.take("attended", *queries.shape)
        attend(queries, sequences, layer, attended, self._work)
        hidden += self._product("added", attended.reshape(len(hidden), -1), weights.attention_out)

    def _feed_forward(self, hidden: Array, weights: LayerWeights) -> None:
        ffn_size = self.config.ffn_size
        gate_up = self._product("gate_up", self._normed(hidden), weights.gate_up)
        gated = self._work.take("gated", len(hidden), ffn_size)
        for first in range(0, len(hidden), _GATED_ROWS):
            rows = slice(first, first + _GATED_ROWS)
            gate = gate_up[rows, :ffn_size]
            part = np.tanh(gate, out=gated[rows])
            part += _ONE
            part *= gate
            part *= gate_up[rows, ffn_size:]
        hidden += self._product("added", gated, weights.down)

    def _logits(self, hidden: Array) -> Array:
        normed = self._normed(hidden)
        normed *= self.weights.final_norm
        return normed @ self.weights.head.T

    def _product(self, name: str, rows: Array, weight: Array) -> Array:
        return np.matmul(rows, weight.T, out=self._work.take(name, len(rows), len(weight)))

    def _normed(self, hidden: Array) -> Array:
        """Rows of length one; what is left of the norm, the square root of the row size, is in the weights."""
        length = np.vecdot(hidden, hidden)
        length += self._length_epsilon
        np.sqrt(length, out=length)
        normed = self._work.take("normed", *hidden.shape)
        np.divide(hidden, length[:, None], out=normed)
        return normed

    def _rotation(self, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.complex64]:
        needed = int(positions.max()) + 1
        if needed > len(self._rotations):
            half = self.config.head_size // 2
            frequencies = self.config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
            angles = np.arange(max(needed, 2 * len(self._rotations)), dtype=np.float64)[:, None] * frequencies
            self._rotations = np.exp(1j * angles).astype(np.complex64)
        return self._rotations[positions][:, None, :]


class _Step:
    """What every layer of one step needs: the position and slot of each row, and the rows of each sequence."""

    def __init__(self, spans: Sequence[TokenSpan], cache: PagedCache) -> None:
        self.token_ids = np.concatenate([span.token_ids for span in spans])
        self.sequences: list[Rows] = []
        positions: list[npt.NDArray[np.intp]] = []
        slots: list[npt.NDArray[np.intp]] = []
        first = 0
        for span in spans:
            _check(span, cache)
            stop, end = first + len(span.token_ids), span.start + len(span.token_ids)
            where = np.arange(span.start, end)
            positions.append(where)
            slots.append(
                span.blocks[where // cache.block_tokens].astype(np.intp) * cache.block_tokens + where % cache.block_tokens
            )
            self.sequences.append(Rows(first, stop, SequenceReader(cache.data, span.blocks, end)))
            first = stop
        self.positions = np.concatenate(positions)
        self.slots = _as_slice(np.concatenate(slots))
        self.last_rows = np.array([rows.stop - 1 for rows in self.sequences], np.intp)
        self.last_sequences = [Rows(row, row + 1, reader) for row, (_, _, reader) in enumerate(self.sequences)]


def _check(span: TokenSpan, cache: PagedCache) -> None:
    if not len(span.token_ids):
        raise Bug("a span has no tokens")
    covered = len(span.blocks) * cache.block_tokens
    if span.start + len(span.token_ids) > covered:
        raise Bug(f"a span ends at token {span.start + len(span.token_ids)}, and its block table covers {covered}")


def _as_slice(slots: npt.NDArray[np.intp]) -> slice | npt.NDArray[np.intp]:
    """Consecutive slots as a slice, which NumPy writes faster."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 == len(slots) and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return slots
