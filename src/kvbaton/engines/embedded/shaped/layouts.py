"""A rank's cache memory as agents and peers want it described."""

from __future__ import annotations

from kvbaton.core.layout import Axis, Group, HeadRange, Layout, Plane
from kvbaton.engines.embedded.shaped.groups import GroupSpec, PlaneSpec
from kvbaton.engines.embedded.shaped.memory import ShapedCache

__all__ = ["layout_of"]


def layout_of(cache: ShapedCache) -> Layout:
    """Describe every plane of the cache by its own strides."""
    groups = tuple(
        Group(
            kind=group.kind,
            layers=group.layers,
            blocks=cache.blocks,
            block_tokens=0 if group.is_state else cache.block_tokens,
            page_tokens=0 if group.is_state else cache.block_tokens,
            planes=tuple(_plane(cache, group, plane) for plane in group.planes),
            window=group.window,
        )
        for group in cache.groups
    )
    return Layout(region_bytes=cache.region_bytes, groups=groups)


def _plane(cache: ShapedCache, group: GroupSpec, plane: PlaneSpec) -> Plane:
    values, start = cache.plane(group.kind, plane.name), cache.offset(group.kind, plane.name)
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
