"""The cache memory of one rank: which groups of cache a model has, which slice of each the rank holds, and every plane of every
group in one allocation that a transport can register as one region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import Axis, Group, HeadRange, Layout, Plane
from kvbaton.engines.embedded.cache import POISON_BYTE, RegionCache
from kvbaton.engines.embedded.shaped.blueprint import WHOLE, Blueprint, Cut, Kind
from kvbaton.errors import ConfigError

__all__ = [
    "CACHE_DTYPES",
    "GroupSpec",
    "PlaneSpec",
    "ShapedCache",
    "Values",
    "check_dtype",
    "conv_units",
    "group_specs",
    "lists_of",
]

Ranges = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One tensor per layer: the global heads that this rank holds of `total_heads`, each of the shape `head_shape`."""

    name: str
    heads: Ranges
    total_heads: int
    head_shape: tuple[int, ...]

    @property
    def head_count(self) -> int:
        """How many heads this rank holds."""
        return sum(map(len, self.heads))


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers of one kind of cache, those of this rank's stage only. A state has one block per request, whatever its length.

    `window` is how many of the last tokens the next one needs; 0 means all.
    """

    kind: str
    layers: tuple[int, ...]
    planes: tuple[PlaneSpec, ...]
    window: int = 0
    is_state: bool = False


def group_specs(blueprint: Blueprint, cut: Cut) -> tuple[GroupSpec, ...]:
    """Every group of the model in an order that all ranks share; one without layers here is empty, and still there."""
    stage = cut.layers(blueprint.layers)

    def here(*kinds: Kind) -> tuple[int, ...]:
        return tuple(layer for layer in blueprint.layers_of(*kinds) if layer in stage)

    pairs, specs = _keys_and_values(blueprint, cut), []
    if blueprint.layers_of(Kind.FULL, Kind.SPARSE):
        specs.append(GroupSpec("full", here(Kind.FULL, Kind.SPARSE), pairs))
    if blueprint.layers_of(Kind.SLIDING):
        specs.append(GroupSpec("sliding", here(Kind.SLIDING), pairs, window=blueprint.window - 1))
    if blueprint.layers_of(Kind.MLA):
        specs.append(GroupSpec("mla", here(Kind.MLA), (_latent(blueprint),)))
    if blueprint.layers_of(Kind.SPARSE):
        specs.append(GroupSpec("index", here(Kind.SPARSE), (_index(blueprint),)))
    if blueprint.layers_of(Kind.MAMBA):
        specs.append(GroupSpec("conv", here(Kind.MAMBA), (_conv(blueprint, cut),), is_state=True))
        specs.append(GroupSpec("ssm", here(Kind.MAMBA), (_ssm(blueprint, cut),), is_state=True))
    return tuple(specs)


def conv_units(blueprint: Blueprint, cut: Cut) -> Ranges:
    """The units of a convolution's channels that a rank holds: those of its own heads, then its B and its C.

    A unit is one head of x, or one group of B or C; the whole convolution is [x of all heads | B of all groups | C of all].
    """
    own, groups = cut.share(blueprint.mamba_heads), cut.share(blueprint.mamba_groups)
    first_b = blueprint.mamba_heads
    first_c = first_b + blueprint.mamba_groups
    return (own, *(range(first + groups.start, first + groups.stop) for first in (first_b, first_c)))


def _keys_and_values(blueprint: Blueprint, cut: Cut) -> tuple[PlaneSpec, ...]:
    heads = (cut.share(blueprint.kv_heads),)
    return tuple(PlaneSpec(name, heads, blueprint.kv_heads, (blueprint.head_size,)) for name in ("k", "v"))


def _latent(blueprint: Blueprint) -> PlaneSpec:
    return PlaneSpec("latent", (range(1),), 1, (blueprint.latent_size + blueprint.rope_size,))


def _index(blueprint: Blueprint) -> PlaneSpec:
    return PlaneSpec("index", (range(1),), 1, (blueprint.index_size,))


def _conv(blueprint: Blueprint, cut: Cut) -> PlaneSpec:
    total = blueprint.mamba_heads + 2 * blueprint.mamba_groups
    return PlaneSpec("conv", conv_units(blueprint, cut), total, (blueprint.head_size, blueprint.conv_taps - 1))


def _ssm(blueprint: Blueprint, cut: Cut) -> PlaneSpec:
    shape = (blueprint.head_size, blueprint.state_size)
    return PlaneSpec("ssm", (cut.share(blueprint.mamba_heads),), blueprint.mamba_heads, shape)


Values = npt.NDArray[np.floating[Any]]
"""What a cache holds, in the type that it was made with."""

CACHE_DTYPES = ("float32", "float16")
"""The types that a cache can have."""

_ALIGNED = 64


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for a type that a cache cannot have."""
    if dtype not in CACHE_DTYPES:
        raise ConfigError(f"cache dtype {dtype!r} is not known; give {' or '.join(CACHE_DTYPES)}")


class ShapedCache(RegionCache):
    """The planes of one rank. All groups use the same block numbers; a state lies under that of its request's first block.

    A plane of tokens has the shape (layers, blocks, block_tokens, heads, ...), one of a state (layers, blocks, heads, ...).
    """

    def __init__(
        self, blueprint: Blueprint, blocks: int, block_tokens: int, cut: Cut = WHOLE, dtype: str = CACHE_DTYPES[0]
    ) -> None:
        check_dtype(dtype)
        super().__init__(blocks, block_tokens)
        self.groups = group_specs(blueprint, cut)
        self.shares_prefixes = blueprint.shares_prefixes
        shapes = [(group, plane, self._shape(group, plane)) for group in self.groups for plane in group.planes]
        self.element_bytes = np.dtype(dtype).itemsize
        counts = [int(np.prod(shape, dtype=np.int64)) for _, _, shape in shapes]
        sizes = [-(-count * self.element_bytes // _ALIGNED) * _ALIGNED for count in counts]
        memory = self._allocate(max(sum(sizes), _ALIGNED))
        self.region_bytes = memory.nbytes
        self._planes: dict[tuple[str, str], Values] = {}
        at = 0
        for (group, plane, shape), count, size in zip(shapes, counts, sizes, strict=True):
            values: Values = np.frombuffer(memory, dtype, count, at)
            self._planes[group.kind, plane.name] = values.reshape(shape)
            at += size

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
        """The blocks of one sequence: one list per group of the layout."""
        return lists_of(self.groups, blocks)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks`, in all layers and planes, with `POISON_BYTE`."""
        chosen = np.asarray(blocks, np.intp)
        for plane in self._planes.values():
            plane[:, chosen] = np.frombuffer(bytes([POISON_BYTE] * self.element_bytes), plane.dtype)[0]

    def layout(self) -> Layout:
        """Every plane by its own strides."""
        groups = tuple(
            Group(
                kind=group.kind,
                layers=group.layers,
                blocks=self.blocks,
                block_tokens=0 if group.is_state else self.block_tokens,
                page_tokens=0 if group.is_state else self.block_tokens,
                planes=tuple(self._plane_layout(group, plane) for plane in group.planes),
                window=group.window,
            )
            for group in self.groups
        )
        return Layout(region_bytes=self.region_bytes, groups=groups)

    def _plane_layout(self, group: GroupSpec, plane: PlaneSpec) -> Plane:
        values, start = self.plane(group.kind, plane.name), self.offset(group.kind, plane.name)
        layer_stride, block_stride, *inner = values.strides
        token_stride, head_stride, *channels = [0, *inner] if group.is_state else inner
        return Plane(
            name=plane.name,
            dtype=str(values.dtype),
            element_bytes=values.itemsize,
            heads=tuple(HeadRange(each.start, len(each)) for each in plane.heads),
            total_heads=plane.total_heads,
            channels=tuple(Axis(count, stride) for count, stride in zip(plane.head_shape, channels, strict=True)),
            layer_offsets=tuple(start + place * layer_stride for place in range(len(group.layers))),
            block_stride=block_stride,
            page_stride=0,
            token_stride=token_stride,
            head_stride=head_stride,
        )

    def _shape(self, group: GroupSpec, plane: PlaneSpec) -> tuple[int, ...]:
        tokens = () if group.is_state else (self.block_tokens,)
        return (len(group.layers), self.blocks, *tokens, plane.head_count, *plane.head_shape)


def lists_of(groups: Sequence[GroupSpec], blocks: Sequence[int]) -> BlockLists:
    """One block list per group: all blocks, or only the first where that stands for the request."""
    every = tuple(blocks)
    return tuple(every[:1] if group.is_state else every for group in groups)
