"""Keys and values that one engine keeps in the channels of a head, keys first, and the other as tensors of their own.

An engine describes what it has: vLLM one plane `kv`, which its own pairs move in the longest runs. Only where the other end has
the planes `k` and `v`, the fused one is read as two: planes at a distance, with the strides that it has anyway. What fits
neither way is left as it is, and refused by name where layouts are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.core.layout import MLA, Axis, Group, Layout, Plane

__all__ = ["split_fused"]

_FUSED = ("kv",)
_APART = ("k", "v")


def split_fused(layouts: Sequence[Layout], others: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of the ranks of an instance, with fused planes in two where its peer, with `others`, has two."""
    theirs = others[0].groups if others else ()
    if not any(_is_split(group, other) for each in layouts for group, other in zip(each.groups, theirs, strict=False)):
        return tuple(layouts)
    return tuple(_split_layout(each, theirs) for each in layouts)


def _split_layout(layout: Layout, others: Sequence[Group]) -> Layout:
    if len(layout.groups) != len(others):
        return layout
    groups = (
        _split(group, other) if _is_split(group, other) else group for group, other in zip(layout.groups, others, strict=True)
    )
    return msgspec.structs.replace(layout, groups=tuple(groups))


def _is_split(group: Group, other: Group) -> bool:
    if _names(group) != _FUSED or _names(other) != _APART or group.whole_blocks or group.kind == MLA:
        return False
    (fused,) = group.planes
    return len(fused.channels) == 1 and fused.channels[0].count == sum(plane.head_size for plane in other.planes)


def _names(group: Group) -> tuple[str, ...]:
    return tuple(plane.name for plane in group.planes)


def _split(group: Group, other: Group) -> Group:
    (fused,), (keys, _) = group.planes, other.planes
    (axis,) = fused.channels
    split = (_part(fused, "k", 0, keys.head_size), _part(fused, "v", keys.head_size, axis.count - keys.head_size))
    return msgspec.structs.replace(group, planes=split)


def _part(fused: Plane, name: str, first: int, count: int) -> Plane:
    """So many channels of each head from `first` on, as a plane."""
    (axis,) = fused.channels
    offsets = tuple(offset + first * axis.stride for offset in fused.layer_offsets)
    return msgspec.structs.replace(fused, name=name, channels=(Axis(count, axis.stride),), layer_offsets=offsets)
