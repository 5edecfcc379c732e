"""From the tensors that vLLM registers to layouts and a region: what each axis means, where each byte lies.

vLLM 0.32 registers one tensor per layer. That of an attention layer has the axes (blocks, KV heads, tokens, channels); keys and
values share the channels of a head. On CPUs the shape is not the truth: the attention kernels keep the keys and values that one
head has of a block in an order of their own, so heads are moved one by one, each of them whole. On GPUs it is, and views may
have their axes in another order in memory (LBNHC, the default there: tokens before heads), also a different one on each side. A
tensor of states is raw bytes: the state tensors of a request, one after the other, and padding.

Layers of one block list may differ (a draft model has other heads than its target), so a block list becomes one group of the
layout per kind of layer. Each rank describes its own layers; the layouts of an instance are made from the descriptions of all
of its ranks, because a stage that has no layer of a group still has that group, and because layers are numbered over all
stages. What is not understood is refused by name: other axes, blocks in pieces, layers of one list that share memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import Axis, Group, HeadRange, Layout, Plane
from kvbaton.core.segments import HOLE
from kvbaton.core.tensors import LayerTensor, tensor_group
from kvbaton.core.topology import Shape
from kvbaton.engines.vllm.device import BlockRows, EngineDevice, HostDevice
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region

__all__ = [
    "CacheTensor",
    "InstanceCaches",
    "LayerCache",
    "LayerSpec",
    "RankCaches",
    "RegisteredCache",
    "StatePart",
    "instance_caches",
    "read_tensors",
]

POISON_BYTE = 0x4B
NULL_BLOCK = 0
"""vLLM's entry for a block that has left its window, or was never needed."""

_IDENTITY = ("kind", "block_tokens", "page_tokens", "window", "whole_blocks")
_PLANE_IDENTITY = ("name", "dtype", "element_bytes", "total_heads", "head_size")


@dataclass(frozen=True, slots=True)
class StatePart:
    """One state tensor of a request: its shape, and which of the model's units this rank holds along `axis`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    axis: int
    units: tuple[HeadRange, ...]
    total_units: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the state of one request."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What vLLM states about the cache of one layer of this rank; `block_list` is the number of its block list.

    A layer with `states` keeps one block per request, whatever its length.
    """

    block_tokens: int
    heads: tuple[HeadRange, ...] = ()
    total_heads: int = 1
    kind: str = "full"
    block_list: int = 0
    window: int = 0
    is_draft: bool = False
    states: tuple[StatePart, ...] = ()
    whole_blocks: bool = False
    """Whether the kernels keep an order of their own inside a block, on every device."""

    @property
    def head_count(self) -> int:
        """How many KV heads this rank holds."""
        return sum(each.count for each in self.heads)


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One layer's cache: where it lies and how its axes step, in bytes."""

    layer: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    element_bytes: int

    @property
    def end(self) -> int:
        """First address after the last byte."""
        return (
            self.address
            + sum((count - 1) * step for count, step in zip(self.shape, self.strides, strict=True))
            + self.element_bytes
        )


class LayerCache(msgspec.Struct, frozen=True):
    """One layer of one rank, as a group of its own."""

    name: str
    block_list: int
    is_draft: bool
    group: Group


class RankCaches(msgspec.Struct, frozen=True):
    """What one rank registered."""

    region_bytes: int
    layers: tuple[LayerCache, ...]


class InstanceCaches(msgspec.Struct, frozen=True):
    """The layouts of all ranks of an instance, and what of vLLM their groups and layers are."""

    layouts: tuple[Layout, ...]
    block_lists: tuple[int, ...]
    """The number of the block list of each group."""
    drafts: frozenset[int]
    """Groups of layers that belong to a draft model."""
    numbers: dict[str, int]
    """Layer name to the layer's number in the layouts."""

    def lists(self, given: BlockLists) -> BlockLists:
        """vLLM's block lists, one per group of the layout; a block that left its window becomes a hole."""
        groups = self.layouts[0].groups
        return tuple(
            _with_holes(given[number]) if group.window else given[number]
            for number, group in zip(self.block_lists, groups, strict=True)
        )


class RegisteredCache:
    """The memory that vLLM registered on this rank. Keeps nothing alive itself."""

    def __init__(
        self, tensors: Sequence[CacheTensor], specs: Mapping[str, LayerSpec], device: EngineDevice | None = None
    ) -> None:
        if not tensors:
            raise ConfigError("vLLM registered no KV cache; a model without attention or state cannot be handed over")
        self.device: EngineDevice = device or HostDevice()
        self._ranges = [(tensor.address, tensor.end - tensor.address) for tensor in tensors]
        self.address = min(tensor.address for tensor in tensors)
        self.region_bytes = max(tensor.end for tensor in tensors) - self.address
        for tensor in tensors:
            if tensor.layer not in specs:
                raise ConfigError(f"vLLM registered a cache for {tensor.layer}, which is in none of its kv_cache_groups")
        _check_apart(tensors, specs)
        self.caches = RankCaches(self.region_bytes, tuple(self._layer(each, specs[each.layer]) for each in tensors))

    @property
    def region(self) -> Region:
        """Everything from the first to the last registered byte."""
        return self.device.region(self._ranges)

    def poison(self, layout: Layout, blocks: BlockLists, cached_tokens: int) -> None:
        """Fill the blocks of every group, but for those of the cached tokens, with a pattern that no real cache holds."""
        for group, ids in zip(layout.groups, blocks, strict=True):
            first = 0 if group.is_state else cached_tokens // group.block_tokens
            chosen = [number for number in ids[first:] if number != HOLE]
            for plane in group.planes:
                size = sum((axis.count - 1) * axis.stride for axis in group.axes(plane)[1:]) + plane.element_bytes
                for offset in plane.layer_offsets:
                    rows = BlockRows(self.address + offset, group.blocks, size, plane.block_stride)
                    self.device.fill_blocks(rows, chosen, POISON_BYTE)

    def _layer(self, tensor: CacheTensor, spec: LayerSpec) -> LayerCache:
        offset = tensor.address - self.address
        whole = self.device.reorders_blocks or spec.whole_blocks
        group = _states(tensor, spec, offset) if spec.states else _attention(tensor, spec, offset, whole_blocks=whole)
        return LayerCache(tensor.layer, spec.block_list, spec.is_draft, group)


def read_tensors(caches: Mapping[str, Any]) -> list[CacheTensor]:
    """Describe what `register_kv_caches` got, in the order of its layers. Raises ConfigError for what is not in main memory."""
    tensors = []
    for layer, tensor in caches.items():
        if not hasattr(tensor, "data_ptr"):
            raise ConfigError(f"layer {layer}: vLLM registered a {type(tensor).__name__} as its cache, not one tensor")
        size = tensor.element_size()
        strides = tuple(step * size for step in tensor.stride())
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(CacheTensor(layer, tensor.data_ptr(), tuple(tensor.shape), strides, dtype, size))
    return tensors


def instance_caches(shape: Shape, ranks: Sequence[RankCaches], has_drafts: bool = True) -> InstanceCaches:
    """The layouts of an instance, in the order of its ranks. Layers are numbered by their names, those of drafts last.

    Without `has_drafts`, layers of a draft model are left out.
    """
    if not has_drafts:
        ranks = [RankCaches(each.region_bytes, tuple(layer for layer in each.layers if not layer.is_draft)) for each in ranks]
    drafts = {layer.name: layer.is_draft for rank in ranks for layer in rank.layers}
    ordered = sorted(drafts, key=lambda name: (drafts[name], _natural(name)))
    numbers = {name: number for number, name in enumerate(ordered)}
    firsts: dict[tuple[Any, ...], int] = {}
    for layer in (layer for rank in ranks for layer in rank.layers):
        firsts[_identity(layer)] = min(numbers[layer.name], firsts.get(_identity(layer), len(numbers)))
    keys = sorted(firsts, key=lambda key: (key[:2], firsts[key]))
    layouts = []
    for number, rank in enumerate(ranks):
        beside = [ranks[other] for other in range(number % shape.tp, len(ranks), shape.tp)]
        layouts.append(Layout(rank.region_bytes, tuple(_group(key, rank, beside, numbers) for key in keys)))
    places = frozenset(place for place, key in enumerate(keys) if key[1])
    return InstanceCaches(tuple(layouts), tuple(key[0] for key in keys), places, numbers)


def _group(key: tuple[Any, ...], rank: RankCaches, beside: Sequence[RankCaches], numbers: Mapping[str, int]) -> Group:
    """The group of all layers of this identity; without layers, with the sizes that a stage has which holds some."""
    own = sorted((each for each in rank.layers if _identity(each) == key), key=lambda each: numbers[each.name])
    like = own or [layer for other in beside for layer in other.layers if _identity(layer) == key]
    if not like:
        raise ConfigError("ranks of one pipeline have no layer in common with the other ranks of their stages; check the shape")
    first = like[0].group
    for each in own:
        if (problem := _difference(first, each.group)) is not None:
            raise ConfigError(
                f"layers {like[0].name} and {each.name} share a block list and differ in {problem}; such caches cannot be"
                " handed over so far"
            )
    planes = tuple(
        msgspec.structs.replace(plane, layer_offsets=tuple(each.group.planes[place].layer_offsets[0] for each in own))
        for place, plane in enumerate(first.planes)
    )
    return msgspec.structs.replace(first, layers=tuple(numbers[each.name] for each in own), planes=planes)


def _difference(one: Group, other: Group) -> str | None:
    if one.blocks != other.blocks:
        return f"blocks ({one.blocks} and {other.blocks})"
    for ours, theirs in zip(one.planes, other.planes, strict=True):
        if not ours.alike(theirs):
            return f"the strides or heads of {ours.name}"
    return None


def _identity(layer: LayerCache) -> tuple[Any, ...]:
    """What layers of one group have in common on every rank, however the instance is cut."""
    group = layer.group
    planes = tuple(tuple(getattr(plane, name) for name in _PLANE_IDENTITY) for plane in group.planes)
    return layer.block_list, layer.is_draft, tuple(getattr(group, name) for name in _IDENTITY), planes


def _natural(name: str) -> list[str | int]:
    """Layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _with_holes(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(HOLE if number == NULL_BLOCK else number for number in ids) if NULL_BLOCK in ids else ids


def _attention(tensor: CacheTensor, spec: LayerSpec, offset: int, *, whole_blocks: bool) -> Group:
    understood = f"(blocks, {spec.head_count} heads, {spec.block_tokens} tokens, channels)"
    if len(tensor.shape) != 4 or tensor.shape[1:3] != (spec.head_count, spec.block_tokens):
        raise ConfigError(f"the cache of {tensor.layer} has the shape {tensor.shape}; {understood} is understood")
    tokens, channels = tensor.shape[2:]
    token_bytes = channels * tensor.element_bytes
    dense = (tokens * token_bytes, token_bytes, tensor.element_bytes)
    steps = dense if whole_blocks else tensor.strides[1:]
    if any(step != given for step, given, count in zip(steps, tensor.strides[1:], tensor.shape[1:], strict=True) if count > 1):
        raise ConfigError(
            f"the blocks of {tensor.layer} are in pieces (shape {tensor.shape}, steps of {tensor.strides} bytes); "
            "only blocks in one piece can be handed over so far"
        )
    layer = LayerTensor(offset, tensor.shape, (tensor.strides[0], *steps), tensor.dtype, tensor.element_bytes)
    return tensor_group(
        spec.kind,
        (0,),
        (layer,),
        ("block", "head", "token", "channel"),
        heads=spec.heads,
        total_heads=spec.total_heads,
        planes=("kv",),
        window=spec.window,
        whole_blocks=whole_blocks,
    )


def _states(tensor: CacheTensor, spec: LayerSpec, offset: int) -> Group:
    held, block_bytes = sum(part.size_bytes for part in spec.states), math.prod(tensor.shape[1:]) * tensor.element_bytes
    inner = tensor.end - tensor.address - (tensor.shape[0] - 1) * tensor.strides[0]
    if held > block_bytes or inner != block_bytes:
        shapes = ", ".join(f"{part.name} {part.shape} {part.dtype}" for part in spec.states)
        raise ConfigError(f"the state of {tensor.layer} has the shape {tensor.shape}, which has no room for {shapes} at once")
    starts = itertools.accumulate((part.size_bytes for part in spec.states), initial=offset)
    planes = tuple(_state_plane(part, start, tensor.strides[0]) for part, start in zip(spec.states, starts, strict=False))
    return Group(kind=spec.kind, layers=(0,), blocks=tensor.shape[0], block_tokens=0, page_tokens=0, planes=planes)


def _state_plane(part: StatePart, offset: int, block_stride: int) -> Plane:
    steps = [math.prod(part.shape[place + 1 :]) * part.element_bytes for place in range(len(part.shape))]
    channels = tuple(
        Axis(count, step) for place, (count, step) in enumerate(zip(part.shape, steps, strict=True)) if place != part.axis
    )
    return Plane(
        name=part.name,
        dtype=part.dtype,
        element_bytes=part.element_bytes,
        heads=part.units,
        total_heads=part.total_units,
        channels=channels or (Axis(1, part.element_bytes),),
        layer_offsets=(offset,),
        block_stride=block_stride,
        page_stride=0,
        token_stride=0,
        head_stride=steps[part.axis],
    )


def _check_apart(tensors: Sequence[CacheTensor], specs: Mapping[str, LayerSpec]) -> None:
    """Layers of one block list have memory of their own; those of several share it, and each block id is of one list."""
    ordered = sorted(tensors, key=lambda tensor: (specs[tensor.layer].block_list, tensor.address))
    for tensor, following in itertools.pairwise(ordered):
        is_one_list = specs[tensor.layer].block_list == specs[following.layer].block_list
        if is_one_list and following.address < tensor.end and _overlap(tensor, following):
            raise ConfigError(
                f"layers {tensor.layer} and {following.layer} share memory; such caches cannot be handed over so far"
            )


def _overlap(one: CacheTensor, other: CacheTensor) -> bool:
    """Whether two tensors share a byte, unless each block of theirs has room for the other between its own bytes."""
    inner = CacheTensor("", 0, one.shape[1:], one.strides[1:], one.dtype, one.element_bytes).end
    distance = (other.address - one.address) % one.strides[0]
    return not inner <= distance <= one.strides[0] - inner
