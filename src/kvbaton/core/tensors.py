"""From a tensor's shape, strides and type to a group: an engine names its axes and the heads that it holds, nothing else."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbaton.core.layout import Axis, Group, HeadRange, Plane, TokenSplit
from kvbaton.errors import ConfigError

__all__ = ["LayerTensor", "dense_tensor", "read_axes", "split_layers", "tensor_group"]

_NAMES = ("plane", "block", "page", "token", "head", "channel")
_NONE = Axis(1, 0)


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """A tensor of one layer, or of all: its offset in the region and the strides of its axes, in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    element_bytes: int


def dense_tensor(shape: tuple[int, ...], dtype: str, element_bytes: int) -> LayerTensor:
    """A tensor without gaps, outermost axis first, at the start of the region."""
    steps = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=element_bytes)
    return LayerTensor(0, shape, tuple(reversed(list(steps))), dtype, element_bytes)


def split_layers(tensor: LayerTensor) -> list[LayerTensor]:
    """The tensor of each layer, for a cache whose outermost axis is the layer."""
    step, *strides = tensor.strides
    return [
        LayerTensor(tensor.offset + layer * step, tensor.shape[1:], tuple(strides), tensor.dtype, tensor.element_bytes)
        for layer in range(tensor.shape[0])
    ]


def read_axes(tensor: LayerTensor, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, tuple[Axis, ...]]:
    """What each axis of a tensor means, by name: plane, block, page, token, head, channel.

    An axis that combines several, such as K and V fused in the last axis, is written `plane*channel`, the outer one first;
    `sizes` has the counts of its inner ones. A name that occurs twice (channels in two axes) has several axes, outermost first.
    """
    if len(axes) != len(tensor.shape):
        raise ConfigError(f"the tensor has the shape {tensor.shape}, which is not {len(axes)} axes: {', '.join(axes)}")
    found: dict[str, tuple[Axis, ...]] = {}
    for text, count, stride in zip(axes, tensor.shape, tensor.strides, strict=True):
        for name, axis in _split_axis(text, count, stride, sizes):
            if name not in _NAMES or (name in found and name != "channel"):
                raise ConfigError(f"axis {name!r} of {', '.join(axes)}: each of {', '.join(_NAMES)} may occur once")
            found[name] = (*found.get(name, ()), axis)
    return found


def _split_axis(text: str, count: int, stride: int, sizes: Mapping[str, int]) -> list[tuple[str, Axis]]:
    """The parts of one axis, outermost first."""
    outer, *inner = text.split("*")
    counts = [sizes.get(name, 0) for name in inner]
    within = math.prod(counts)
    if inner and (within < 1 or count % within):
        raise ConfigError(f"axis {text!r} has {count} elements, which are not whole parts of {inner} with {counts}")
    parts = []
    for name, each in zip(reversed(inner), reversed(counts), strict=True):
        parts.append((name, Axis(each, stride)))
        stride *= each
    return [(outer, Axis(count // within, stride)), *reversed(parts)]


def tensor_group(
    kind: str,
    layers: Sequence[int],
    tensors: Sequence[LayerTensor],
    axes: Sequence[str],
    *,
    heads: tuple[HeadRange, ...],
    total_heads: int,
    planes: tuple[str, ...] = ("k", "v"),
    sizes: Mapping[str, int] | None = None,
    window: int = 0,
    tokens: TokenSplit | None = None,
    whole_blocks: bool = False,
) -> Group:
    """The group of layers with one tensor each; raises ConfigError for tensors that differ or contradict the arguments."""
    first = _common(tensors)
    found = read_axes(first, axes, sizes or {})
    plane, block, page, token, head = (found.get(name, (_NONE,))[0] for name in _NAMES[:-1])
    held = sum(each.count for each in heads)
    if plane.count != len(planes) or head.count != held or "block" not in found:
        raise ConfigError(
            f"the tensor has {plane.count} planes and {head.count} heads in {', '.join(axes)}; "
            f"{len(planes)} ({', '.join(planes)}) and {held} were given, in blocks"
        )
    each = tuple(
        Plane(
            name=name,
            dtype=first.dtype,
            element_bytes=first.element_bytes,
            heads=heads,
            total_heads=total_heads,
            channels=found.get("channel", (Axis(1, first.element_bytes),)),
            layer_offsets=tuple(tensor.offset + index * plane.stride for tensor in tensors),
            block_stride=block.stride,
            page_stride=page.stride,
            token_stride=token.stride,
            head_stride=head.stride,
        )
        for index, name in enumerate(planes)
    )
    page_tokens = token.count if "token" in found else 0
    return Group(
        kind=kind,
        layers=tuple(layers),
        blocks=block.count,
        block_tokens=page.count * page_tokens,
        page_tokens=page_tokens,
        planes=each,
        window=window,
        tokens=tokens or TokenSplit(),
        whole_blocks=whole_blocks,
    )


def _common(tensors: Sequence[LayerTensor]) -> LayerTensor:
    if not tensors:
        raise ConfigError("a group has no tensors; leave it out, or pass the tensors of its layers")
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        for field in ("shape", "strides", "dtype", "element_bytes"):
            if getattr(tensor, field) != getattr(first, field):
                ours, theirs = getattr(first, field), getattr(tensor, field)
                raise ConfigError(f"tensors 0 and {number} of a group differ in {field}: {ours} and {theirs}; make two groups")
    return first
