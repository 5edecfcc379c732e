"""Which groups of cache a model has, and which slice of each one rank holds: the plan of its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbaton.engines.embedded.shaped.blueprint import Blueprint, Kind
from kvbaton.engines.embedded.shaped.cut import Cut

__all__ = ["GroupSpec", "PlaneSpec", "conv_units", "group_specs"]

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

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return math.prod(self.head_shape)


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
