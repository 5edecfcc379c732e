"""The cache memory of one rank: every plane of every group in one allocation that a transport can register as one region."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.engines.embedded.cache import POISON_WORD, cache_memory
from kvbaton.engines.embedded.shaped.blueprint import Blueprint
from kvbaton.engines.embedded.shaped.cut import WHOLE, Cut
from kvbaton.engines.embedded.shaped.groups import GroupSpec, PlaneSpec, group_specs
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region

__all__ = ["ShapedCache", "lists_of"]

_ALIGNED = 64


class ShapedCache:
    """The planes of one rank. All groups use the same block numbers; the state of a request lies under that of its first block.

    A plane of tokens has the shape (layers, blocks, block_tokens, heads, ...), one of a state (layers, blocks, heads, ...).
    """

    def __init__(self, blueprint: Blueprint, blocks: int, block_tokens: int, cut: Cut = WHOLE) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ConfigError(f"a cache of {blocks} blocks of {block_tokens} tokens cannot be made; both must be at least 1")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.groups = group_specs(blueprint, cut)
        self._shares_prefixes = blueprint.shares_prefixes
        shapes = [(group, plane, self._shape(group, plane)) for group in self.groups for plane in group.planes]
        sizes = [-(-int(np.prod(shape, dtype=np.int64)) * 4 // _ALIGNED) * _ALIGNED for _, _, shape in shapes]
        self._shared = cache_memory(max(sum(sizes), _ALIGNED), blocks)
        self._planes: dict[tuple[str, str], npt.NDArray[np.float32]] = {}
        at = 0
        for (group, plane, shape), size in zip(shapes, sizes, strict=True):
            count = int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(self._shared.array, np.float32, count, at)
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

    def plane(self, kind: str, name: str) -> npt.NDArray[np.float32]:
        """All layers of one plane."""
        return self._planes[kind, name]

    def offset(self, kind: str, name: str) -> int:
        """Where a plane begins in the region."""
        start: int = self._planes[kind, name].ctypes.data - self._shared.array.ctypes.data
        return start

    def layer(self, kind: str, name: str, layer: int) -> npt.NDArray[np.float32]:
        """One plane of the layer with this global number."""
        group = next(group for group in self.groups if group.kind == kind)
        values: npt.NDArray[np.float32] = self._planes[kind, name][group.layers.index(layer)]
        return values

    def block_lists(self, blocks: Sequence[int]) -> BlockLists:
        """The blocks of one sequence as agents want them: one list per group."""
        return lists_of(self.groups, blocks)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks`, in all layers and planes, with `POISON_WORD`."""
        chosen = np.asarray(blocks, np.intp)
        for plane in self._planes.values():
            plane.view(np.uint32)[:, chosen] = POISON_WORD

    def _shape(self, group: GroupSpec, plane: PlaneSpec) -> tuple[int, ...]:
        tokens = () if group.is_state else (self.block_tokens,)
        return (len(group.layers), self.blocks, *tokens, plane.head_count, *plane.head_shape)


def lists_of(groups: Sequence[GroupSpec], blocks: Sequence[int]) -> BlockLists:
    """One block list per group: all blocks, or only the first where that stands for the request."""
    every = tuple(blocks)
    return tuple(every[:1] if group.is_state else every for group in groups)
