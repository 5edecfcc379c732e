"""A synthetic cache in which every word identifies its hand-off and place, so that a foreign, missing or stale byte shows.

Its pool hands out what was freed last first: a late write would show.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists, HandoffKey, Span
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.tensors import LayerTensor, split_layers, tensor_group
from kvbaton.errors import Bug, ConfigError
from kvbaton.transport.base import Region
from kvbaton.transport.shared_memory import SharedMemory

__all__ = ["SMALL", "BarePool", "CacheShape", "TaggedPages", "spans_of"]

Words = npt.NDArray[np.uint32]

_POISON = 0x4B4B4B4B
"""What target blocks hold before they are granted."""

_ODD = 2_654_435_761
_PLANES = 2


class CacheShape(msgspec.Struct, frozen=True):
    """What a synthetic cache looks like: layers, tokens per block, and bytes of one token in one plane of one layer."""

    layers: int = 4
    block_tokens: int = 16
    token_bytes: int = 256

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.token_bytes % 4:
            raise ConfigError(f"token_bytes is {self.token_bytes}; it must be a multiple of 4")

    @property
    def words(self) -> int:
        """Words of four bytes of one token in one plane of one layer."""
        return self.token_bytes // 4

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the cache of so many tokens."""
        return tokens * self.layers * _PLANES * self.token_bytes


SMALL = CacheShape()
"""2 KiB per token: many hand-offs fit into little memory."""


@functools.lru_cache(maxsize=8192)
def _tag_of(key: HandoffKey) -> Words:
    """What is added to every word of this hand-off's cache: an array of one, which NumPy need not convert each time."""
    return np.array(zlib.crc32(str(key).encode()) | 1, np.uint32)


def _index_of(ids: tuple[int, ...]) -> slice | npt.NDArray[np.intp]:
    """Blocks as an index: a slice where they lie side by side, in either direction, which NumPy need not gather."""
    first, last, count = ids[0], ids[-1], len(ids)
    if ids == tuple(range(first, first + count)):
        return slice(first, last + 1)
    if ids == tuple(range(first, first - count, -1)):
        return slice(first, last - 1 if last else None, -1)
    return np.array(ids, np.intp)


def spans_of(shape: CacheShape, tokens: int, chunk_tokens: int) -> tuple[Span, ...]:
    """The spans of a prefill that runs chunk by chunk, and layer by layer within each. A chunk is whole blocks."""
    if chunk_tokens < 1 or chunk_tokens % shape.block_tokens:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}; it must be a multiple of block_tokens ({shape.block_tokens})")
    cuts = [(first, layer) for first in range(0, tokens, chunk_tokens) for layer in range(shape.layers)]
    return tuple(
        Span(number, first, min(first + chunk_tokens, tokens), layer, layer + 1) for number, (first, layer) in enumerate(cuts)
    )


class TaggedPages:
    """One region of `blocks` blocks. Each word of a hand-off's cache holds its place (layer, plane, token) plus its tag."""

    def __init__(self, shape: CacheShape, blocks: int, most_tokens: int) -> None:
        self.shape = shape
        self.blocks = blocks
        page = (shape.block_tokens, shape.words)
        whole = (shape.layers, _PLANES, blocks, *page)
        self._shared = SharedMemory(int(np.prod(whole, dtype=np.int64)) * 4)
        self.data: Words = np.frombuffer(self._shared.array, np.uint32).reshape(whole)
        places = (shape.layers, _PLANES, shape.blocks_for(most_tokens), *page)
        count = int(np.prod(places, dtype=np.int64))
        self._places: Words = (np.arange(count, dtype=np.uint64) * _ODD).astype(np.uint32).reshape(places)
        # Both planes of a page of one layer, by layer and page: to slice them anew costs twice what it costs to fill them.
        self._pages = [[self.data[layer, :, block] for block in range(blocks)] for layer in range(shape.layers)]
        self._page_places = [[self._places[layer, :, page] for page in range(places[2])] for layer in range(shape.layers)]
        self._first_words = self.data[:, :, :, 0]
        self._first_places = np.ascontiguousarray(self._places[:, :, :, 0])

    @property
    def region(self) -> Region:
        """The memory for a transport; other processes of this host can map and read it."""
        return self._shared.region

    def layout(self) -> Layout:
        """Describe the region: one group of all layers."""
        axes, data = ("plane", "block", "token", "head*channel"), self.data
        layers = split_layers(LayerTensor(0, data.shape, data.strides, "uint32", data.itemsize))
        sizes, heads = {"channel": self.shape.words}, (HeadRange(0, 1),)
        group = tensor_group("full", range(len(layers)), layers, axes, heads=heads, total_heads=1, sizes=sizes)
        return Layout(region_bytes=self.data.nbytes, groups=(group,))

    def poison(self, blocks: BlockLists) -> None:
        """Fill blocks with a pattern that belongs to no hand-off."""
        self.data[:, :, _index_of(blocks[0])] = _POISON

    def poison_sample(self, blocks: BlockLists) -> None:
        """Fill what `foreign_sample` looks at with that pattern, and leave the rest as it is."""
        self._first_words[:, :, _index_of(blocks[0])] = _POISON

    def write(self, key: HandoffKey, blocks: BlockLists, span: Span) -> None:
        """Compute one span, as a model would: fill the pages it lies in with what belongs to `key`.

        Page by page: a span has few, and lists as indices cost more than all that the agents do for it.
        """
        size, tag, ids = self.shape.block_tokens, _tag_of(key), blocks[0]
        numbers = range(span.first_token // size, self.shape.blocks_for(span.end_token))
        for layer in range(span.first_layer, span.end_layer):
            pages, places = self._pages[layer], self._page_places[layer]
            for number in numbers:
                np.add(places[number], tag, pages[ids[number]])

    def foreign_bytes(self, key: HandoffKey, blocks: BlockLists, tokens: int) -> int:
        """How many bytes of the first `tokens` tokens are not those of `key`, and how many beyond them are no longer poison."""
        ids = np.asarray(blocks[0], np.intp)
        by_token = (self.shape.layers, _PLANES, len(ids) * self.shape.block_tokens, self.shape.words)
        found = self.data[:, :, ids].reshape(by_token)
        wanted = (self._places[:, :, : len(ids)] + _tag_of(key)).reshape(by_token)
        wanted[:, :, tokens:] = _POISON
        return int(np.count_nonzero(found.view(np.uint8) != wanted.view(np.uint8)))

    def foreign_sample(self, key: HandoffKey, blocks: BlockLists, tokens: int) -> int:
        """How many bytes of the first token of each block, in all layers and planes, are not those of `key`; cheap."""
        ids = blocks[0][: self.shape.blocks_for(tokens)]
        wanted = self._first_places[:, :, : len(ids)] + _tag_of(key)
        return int(np.count_nonzero(self._first_words[:, :, _index_of(ids)] != wanted)) * 4


class BarePool:
    """Hands out blocks of one group, last in first out."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = list(range(blocks))
        self._is_free = [True] * blocks

    @property
    def in_use(self) -> int:
        """Blocks that are taken."""
        return self.total - len(self._free)

    def take(self, count: int) -> BlockLists | None:
        """So many blocks, or None when there are not enough."""
        if count > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(count))
        self._mark(taken, False)
        return (taken,)

    def give(self, blocks: BlockLists) -> None:
        """Take blocks back. Raises Bug for one that is free already."""
        for each in blocks:
            self._mark(each, True)
            self._free.extend(each)

    def _mark(self, blocks: Sequence[int], free: bool) -> None:
        for block in blocks:
            if self._is_free[block] is free:
                raise Bug(f"block {block} is {'given back' if free else 'taken'} twice")
            self._is_free[block] = free
