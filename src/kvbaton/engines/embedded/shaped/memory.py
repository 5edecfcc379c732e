"""The cache memory of one rank: every plane of every group in one allocation that a transport can register as one region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.engines.embedded.cache import POISON_BYTE, cache_memory
from kvbaton.engines.embedded.shaped.blueprint import Blueprint
from kvbaton.engines.embedded.shaped.cut import WHOLE, Cut
from kvbaton.engines.embedded.shaped.groups import GroupSpec, PlaneSpec, group_specs
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region

__all__ = ["CACHE_DTYPES", "ShapedCache", "Values", "check_dtype", "lists_of"]

Values = npt.NDArray[np.floating[Any]]
"""What a cache holds, in the type that it was made with."""

CACHE_DTYPES = ("float32", "float16")
"""The types that a cache can have."""

_ALIGNED = 64


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for a type that a cache cannot have."""
    if dtype not in CACHE_DTYPES:
        raise ConfigError(f"cache dtype {dtype!r} is not known; give {' or '.join(CACHE_DTYPES)}")


class ShapedCache:
    """The planes of one rank. All groups use the same block numbers; the state of a request lies under that of its first block.

    A plane of tokens has the shape (layers, blocks, block_tokens, heads, ...), one of a state (layers, blocks, heads, ...).
    """

    def __init__(
        self, blueprint: Blueprint, blocks: int, block_tokens: int, cut: Cut = WHOLE, dtype: str = CACHE_DTYPES[0]
    ) -> None:
        check_dtype(dtype)
        if blocks < 1 or block_tokens < 1:
            raise ConfigError(f"a cache of {blocks} blocks of {block_tokens} tokens cannot be made; both must be at least 1")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.groups = group_specs(blueprint, cut)
        self._shares_prefixes = blueprint.shares_prefixes
        shapes = [(group, plane, self._shape(group, plane)) for group in self.groups for plane in group.planes]
        self.element_bytes = np.dtype(dtype).itemsize
        counts = [int(np.prod(shape, dtype=np.int64)) for _, _, shape in shapes]
        sizes = [-(-count * self.element_bytes // _ALIGNED) * _ALIGNED for count in counts]
        self._shared = cache_memory(max(sum(sizes), _ALIGNED), blocks)
        self._planes: dict[tuple[str, str], Values] = {}
        at = 0
        for (group, plane, shape), count, size in zip(shapes, counts, sizes, strict=True):
            values: Values = np.frombuffer(self._shared.array, dtype, count, at)
            self._planes[group.kind, plane.name] = values.reshape(shape)
            at += size

    @property
    def memory(self) -> memoryview:
        """The whole region as writable bytes."""
        return self.region.view

    @property
    def region(self) -> Region:
        """The same for a transport: memory that other processes of this host can map and read."""
        return self._shared.region

    @property
    def region_bytes(self) -> int:
        """The size of the region."""
        return self._shared.array.nbytes

    @property
    def shares_prefixes(self) -> bool:
        """Whether full blocks may serve other prompts with the same beginning."""
        return self._shares_prefixes

    def plane(self, kind: str, name: str) -> Values:
        """All layers of one plane."""
        return self._planes[kind, name]

    def offset(self, kind: str, name: str) -> int:
        """Where a plane begins in the region."""
        start: int = self._planes[kind, name].ctypes.data - self._shared.array.ctypes.data
        return start

    def layer(self, kind: str, name: str, layer: int) -> Values:
        """One plane of the layer with this global number."""
        group = next(group for group in self.groups if group.kind == kind)
        values: Values = self._planes[kind, name][group.layers.index(layer)]
        return values

    def block_lists(self, blocks: Sequence[int]) -> BlockLists:
        """The blocks of one sequence as agents want them: one list per group."""
        return lists_of(self.groups, blocks)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks`, in all layers and planes, with `POISON_BYTE`."""
        chosen = np.asarray(blocks, np.intp)
        for plane in self._planes.values():
            plane[:, chosen] = np.frombuffer(bytes([POISON_BYTE] * self.element_bytes), plane.dtype)[0]

    def _shape(self, group: GroupSpec, plane: PlaneSpec) -> tuple[int, ...]:
        tokens = () if group.is_state else (self.block_tokens,)
        return (len(group.layers), self.blocks, *tokens, plane.head_count, *plane.head_shape)


def lists_of(groups: Sequence[GroupSpec], blocks: Sequence[int]) -> BlockLists:
    """One block list per group: all blocks, or only the first where that stands for the request."""
    every = tuple(blocks)
    return tuple(every[:1] if group.is_state else every for group in groups)
