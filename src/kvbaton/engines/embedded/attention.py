"""Attention over a paged cache: where a sequence's keys and values lie, and the products and softmax over them.

A sequence whose blocks have consecutive ids is read in place, as a view. One that is cut into a few pieces is read piece
by piece, and only a badly scattered one is gathered into a buffer first. Queries are taken in tiles, so that nearly all
work above the causal diagonal is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Extent", "Rows", "SequenceReader", "Workspace", "attend", "block_extents"]

Array = npt.NDArray[np.float32]

_TOKENS_PER_PIECE = 256
_TILE_ELEMENTS = 1 << 18
_PADDED_SHARE = 1.25
_MIN_TILE, _MAX_TILE = 16, 128


class Workspace:
    """Named scratch buffers that grow to the largest size requested and are then reused; contents do not survive."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def take(self, name: str, *shape: int) -> Array:
        """A contiguous array of `shape`, valid until the next `take` of the same name."""
        size = 1
        for length in shape:
            size *= length
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size].reshape(shape)


class Extent(NamedTuple):
    """Tokens `first` .. `stop`-1 of a sequence lie side by side in the cache, from `slot` on."""

    first: int
    stop: int
    slot: int

    @property
    def slot_stop(self) -> int:
        """The slot after the last."""
        return self.slot + self.stop - self.first


def block_extents(blocks: npt.NDArray[np.int32], tokens: int, block_tokens: int) -> list[Extent]:
    """Cut the first `tokens` tokens of a block table into the fewest extents."""
    used = blocks[: -(-tokens // block_tokens)]
    cuts = [0, *(np.flatnonzero(np.diff(used) != 1) + 1).tolist(), len(used)]
    return [
        Extent(start * block_tokens, min(stop * block_tokens, tokens), int(used[start]) * block_tokens)
        for start, stop in pairwise(cuts)
    ]


class SequenceReader:
    """Finds the keys and values of the first `tokens` tokens of one sequence in any layer of `data`, a paged cache."""

    def __init__(self, data: Array, blocks: npt.NDArray[np.int32], tokens: int) -> None:
        block_tokens = data.shape[3]
        extents = block_extents(blocks, tokens, block_tokens)
        self.tokens = tokens
        self._data = data
        self._blocks = blocks[: -(-tokens // block_tokens)]
        self._scattered = len(extents) > 1 + tokens // _TOKENS_PER_PIECE
        by_token = data.reshape(*data.shape[:2], -1, *data.shape[4:])
        self._pieces = [] if self._scattered else [(one.first, by_token[:, :, one.slot : one.slot_stop]) for one in extents]

    def keys(self, layer: int, work: Workspace) -> list[tuple[int, Array]]:
        """(first token, keys as (kv_heads, head_size, tokens)) of each piece; valid until `work` gathers keys again."""
        return [(first, piece.transpose(1, 2, 0)) for first, piece in self._plane(layer, 0, work)]

    def values(self, layer: int, work: Workspace) -> list[tuple[int, Array]]:
        """(first token, values as (kv_heads, tokens, head_size)) of each piece; valid until `work` gathers values again."""
        return [(first, piece.transpose(1, 0, 2)) for first, piece in self._plane(layer, 1, work)]

    def _plane(self, layer: int, plane: int, work: Workspace) -> list[tuple[int, Array]]:
        if not self._scattered:
            return [(first, piece[layer, plane]) for first, piece in self._pieces]
        stored = self._data[layer, plane]
        gathered = work.take(f"plane {plane}", len(self._blocks), *stored.shape[1:])
        np.take(stored, self._blocks, axis=0, out=gathered, mode="clip")
        return [(0, gathered.reshape(-1, *stored.shape[2:])[: self.tokens])]


class Rows(NamedTuple):
    """Rows `first` .. `stop`-1 of a step are the last tokens that `reader` covers."""

    first: int
    stop: int
    reader: SequenceReader

    @property
    def length(self) -> int:
        """How many rows."""
        return self.stop - self.first


def attend(queries: Array, sequences: Sequence[Rows], layer: int, out: Array, work: Workspace) -> None:
    """Write to `out` what every query sees of its own sequence.

    `queries` and `out` have the shape (rows, kv_heads, heads per KV head, head_size), and queries are already scaled.
    """
    for batch in _similar(sorted((rows for rows in sequences if rows.length == 1), key=_tokens)):
        _attend_singles(queries, batch, layer, out, work)
    for rows in sequences:
        if rows.length > 1:
            _attend_many(queries[rows.first : rows.stop], rows.reader, layer, out[rows.first : rows.stop], work)


def _attend_many(queries: Array, reader: SequenceReader, layer: int, out: Array, work: Workspace) -> None:
    """Many queries of one sequence, tile by tile; each tile ends at the causal diagonal."""
    keys, values = reader.keys(layer, work), reader.values(layer, work)
    rows, kv_heads, group, head_size = queries.shape
    for first, stop in _tiles(rows, reader.tokens * kv_heads * group):
        tile, seen_tokens = stop - first, reader.tokens - rows + stop
        packed = work.take("queries", kv_heads, group, tile, head_size)
        packed[...] = queries[first:stop].transpose(1, 2, 0, 3)
        scores = work.take("scores", kv_heads, group * tile, seen_tokens)
        _scores(packed.reshape(kv_heads, -1, head_size), keys, scores)
        diagonal = scores.reshape(kv_heads, group, tile, seen_tokens)[..., seen_tokens - tile :]
        diagonal += _causal_mask(tile)
        _exponentials(scores)
        seen = work.take("seen", kv_heads, group * tile, head_size)
        _weighted_values(scores, values, seen)
        seen /= scores.sum(axis=2, keepdims=True)
        out[first:stop] = seen.reshape(packed.shape).transpose(2, 0, 1, 3)


def _tokens(rows: Rows) -> int:
    return rows.reader.tokens


def _similar(singles: Sequence[Rows]) -> Iterator[Sequence[Rows]]:
    """Cut what is sorted by length so that padding to the longest of a part wastes little."""
    first = 0
    for index in range(1, len(singles)):
        if _tokens(singles[index]) > _PADDED_SHARE * _tokens(singles[first]):
            yield singles[first:index]
            first = index
    if singles:
        yield singles[first:]


def _attend_singles(queries: Array, singles: Sequence[Rows], layer: int, out: Array, work: Workspace) -> None:
    """One query each: the products one by one, the softmax of all of them at once."""
    _, kv_heads, group, _ = queries.shape
    scores = work.take("scores", len(singles), kv_heads, group, _tokens(singles[-1]))
    for index, (row, _, reader) in enumerate(singles):
        _scores(queries[row], reader.keys(layer, work), scores[index, :, :, : reader.tokens])
        scores[index, :, :, reader.tokens :] = -np.inf
    _exponentials(scores)
    totals = scores.sum(axis=3, keepdims=True)
    for index, (row, _, reader) in enumerate(singles):
        seen = out[row]
        _weighted_values(scores[index, :, :, : reader.tokens], reader.values(layer, work), seen)
        seen /= totals[index]


def _scores(queries: Array, pieces: list[tuple[int, Array]], scores: Array) -> None:
    """Products of queries and keys, for as many tokens as `scores` has columns."""
    for first, keys in pieces:
        part = scores[:, :, first : first + keys.shape[2]]
        if part.shape[2]:
            np.matmul(queries, keys[:, :, : part.shape[2]], out=part)


def _weighted_values(weights: Array, pieces: list[tuple[int, Array]], out: Array) -> None:
    """Sums of values, for as many tokens as `weights` has columns."""
    for first, values in pieces:
        part = weights[:, :, first : first + values.shape[1]]
        if first == 0:
            np.matmul(part, values[:, : part.shape[2]], out=out)
        elif part.shape[2]:
            out += part @ values[:, : part.shape[2]]


def _exponentials(scores: Array) -> None:
    """Exponentials relative to the largest of each row, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)


def _tiles(rows: int, row_elements: int) -> Iterator[tuple[int, int]]:
    tile = min(max(_TILE_ELEMENTS // row_elements, _MIN_TILE), _MAX_TILE)
    for first in range(0, rows, tile):
        yield first, min(first + tile, rows)


def _causal_mask(tile: int) -> Array:
    return np.triu(np.full((tile, tile), -np.inf, np.float32), 1)
