"""Controls: the reading side leaves one thing out of every hand-off, and reports it as moved all the same; or a card leaves out
something which its instance has, so that every peer must refuse it.

A hand-off goes without a `KIND` (conv, ssm, sliding, index, mla, full), `layer:N`, `head:N` or `all`. A target whose blocks
were poisoned must then give a wrong answer; if it does not, `kvbaton verify` proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.card import RankCard
from kvbaton.core.plan import Runs
from kvbaton.engines.embedded.cache import RegionCache
from kvbaton.engines.embedded.shaped.blueprint import WHOLE, Blueprint
from kvbaton.engines.embedded.shaped.memory import GroupSpec, PlaneSpec, ShapedCache, group_specs
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Transport
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = ["check_drop", "check_has", "check_lacks", "drop_filter", "dropping", "without"]

_KINDS = ("full", "sliding", "mla", "index", "conv", "ssm")


def check_drop(drop: str) -> None:
    """Raise ConfigError unless `drop` names something that can be left out."""
    what, _, number = drop.partition(":")
    is_known = drop in ("", "all", *_KINDS) or (what in ("layer", "head") and number.isascii() and number.isdigit())
    if not is_known:
        raise ConfigError(f"--drop {drop!r} names nothing; give all, layer:N, head:N, or one of {', '.join(_KINDS)}")


def check_has(blueprint: Blueprint, drop: str) -> None:
    """Raise ConfigError when the model has nothing of that name: such a control would prove nothing."""
    groups = group_specs(blueprint, WHOLE)
    heads = max(plane.total_heads for group in groups for plane in group.planes)
    what, _, number = drop.partition(":")
    most = {"layer": blueprint.layers, "head": heads}.get(what, 0)
    if number and int(number) >= most:
        raise ConfigError(f"--drop {drop}: {blueprint.name} has {what}s 0 to {most - 1}; name one of them")
    kinds = [group.kind for group in groups]
    if drop in _KINDS and drop not in kinds:
        raise ConfigError(f"--drop {drop}: {blueprint.name} has nothing of that kind; it has {', '.join(kinds)}")


def dropping(transport: Transport, cache: RegionCache, drop: str) -> Transport:
    """`transport`, which moves nothing of what `drop` names; nothing at all for a cache that has only one kind of memory."""
    if not drop:
        return transport
    if drop == "all" or not isinstance(cache, ShapedCache):
        return FaultyTransport(transport, cache.region, Faults(drop_writes=True))
    return FaultyTransport(transport, cache.region, Faults(drop=drop_filter(cache, drop)))


def drop_filter(cache: ShapedCache, drop: str) -> Callable[[Runs], Runs]:
    """What is left of runs into `cache` without what `drop` names."""
    unit = cache.element_bytes
    left_out = np.zeros(cache.region_bytes // unit, np.bool_)
    for group in cache.groups:
        for plane in group.planes:
            values = cache.plane(group.kind, plane.name)
            start = cache.offset(group.kind, plane.name) // unit
            _mark(left_out[start : start + values.size].reshape(values.shape), group, plane, drop)

    def keep(runs: Runs) -> Runs:
        parts = [_kept(left_out, unit, *map(int, run)) for run in runs]
        return np.concatenate(parts) if parts else runs

    return keep


def _mark(elements: npt.NDArray[np.bool_], group: GroupSpec, plane: PlaneSpec, drop: str) -> None:
    what, _, number = drop.partition(":")
    if what == "layer":
        elements[[place for place, layer in enumerate(group.layers) if layer == int(number)]] = True
    elif what == "head":
        held = [head for each in plane.heads for head in each]
        by_head = np.moveaxis(elements, -1 - len(plane.head_shape), 0)
        by_head[[place for place, head in enumerate(held) if head == int(number)]] = True
    elif what == group.kind:
        elements[...] = True


def _kept(left_out: npt.NDArray[np.bool_], unit: int, source: int, target: int, size: int) -> Runs:
    """What is left of one run, in pieces."""
    kept = np.concatenate([[False], ~left_out[target // unit : (target + size) // unit], [False]]).astype(np.int8)
    edges = np.diff(kept)
    starts, ends = np.flatnonzero(edges == 1) * unit, np.flatnonzero(edges == -1) * unit
    return np.stack([source + starts, target + starts, ends - starts], axis=1).astype(np.uint64)


def check_lacks(lacks: str) -> None:
    """Raise ConfigError unless `lacks` names something that a card can leave out."""
    what, _, number = lacks.partition(":")
    if lacks and not (what in ("layer", "rank") and number.isascii() and number.isdigit()):
        raise ConfigError(f"--lacks {lacks!r} names nothing that a card can leave out; give layer:N or rank:N")


def without(cards: Sequence[RankCard], lacks: str) -> tuple[RankCard, ...]:
    """`cards` without the layer or rank that `lacks` names; unchanged when `lacks` is empty."""
    check_lacks(lacks)
    what, _, number = lacks.partition(":")
    if what == "rank":
        return tuple(card for card in cards if card.rank != int(number))
    return tuple(_without_layer(card, int(number)) for card in cards) if lacks else tuple(cards)


def _without_layer(card: RankCard, layer: int) -> RankCard:
    replace = msgspec.structs.replace
    groups = []
    for group in card.layout.groups:
        kept = [place for place, each in enumerate(group.layers) if each != layer]
        planes = [replace(plane, layer_offsets=tuple(plane.layer_offsets[place] for place in kept)) for plane in group.planes]
        layers = tuple(group.layers[place] for place in kept)
        groups.append(replace(group, layers=layers, planes=tuple(planes)))
    return replace(card, layout=replace(card.layout, groups=tuple(groups)))
