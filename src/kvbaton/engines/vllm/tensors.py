"""From the tensors that vLLM registers to a layout and a region: what each axis means, where each byte lies.

vLLM 0.32 registers one tensor per layer with the axes (blocks, KV heads, tokens, channels); keys and values share the channels
of a head. Tensors may be slices of one storage, or storages of their own, and views whose axes lie in another order in memory
(LBNHC, the default on GPUs: tokens before heads). On CPUs the shape is not the truth: the attention kernels keep keys and
values of a block in an order of their own, so blocks are only moved whole. On GPUs it is, so two instances may have their axes
in different orders. What is not understood is refused by name: other axes, blocks in pieces, several groups, layers that share
memory.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.tensors import LayerTensor, tensor_group
from kvbaton.engines.vllm.device import EngineDevice, HostDevice
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region

__all__ = ["CacheSpec", "CacheTensor", "RegisteredCache", "read_tensors"]

POISON_BYTE = 0x4B


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What vLLM states about its one group of layers."""

    block_tokens: int
    heads: int
    total_heads: int
    kind: str = "full"


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


class RegisteredCache:
    """The memory that vLLM registered: its layout, its region, and the index of each layer. Keeps nothing alive itself."""

    def __init__(self, tensors: Sequence[CacheTensor], spec: CacheSpec, device: EngineDevice | None = None) -> None:
        _check(tensors, spec)
        self._tensors = tuple(tensors)
        self.device: EngineDevice = device or HostDevice()
        self.address = min(tensor.address for tensor in tensors)
        self.region_bytes = max(tensor.end for tensor in tensors) - self.address
        self.layer_index = {tensor.layer: index for index, tensor in enumerate(tensors)}
        self.layout = _layout(self._tensors, spec, self.address, self.region_bytes, self.device.reorders_blocks)

    @property
    def region(self) -> Region:
        """Everything from the first to the last registered byte."""
        return self.device.region([(tensor.address, tensor.end - tensor.address) for tensor in self._tensors])

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill these blocks of every layer with a pattern that no real cache holds."""
        ids = list(blocks)
        for layer, tensor in enumerate(self._tensors):
            if not self.device.fill_blocks(layer, ids, POISON_BYTE):
                self._bytes(tensor)[np.asarray(ids, np.intp)] = POISON_BYTE

    def _bytes(self, tensor: CacheTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        memory = (ctypes.c_uint8 * (tensor.end - tensor.address)).from_address(tensor.address)
        shape, strides = (*tensor.shape, tensor.element_bytes), (*tensor.strides, 1)
        return np.lib.stride_tricks.as_strided(np.frombuffer(memoryview(memory), np.uint8), shape, strides)


def read_tensors(caches: Mapping[str, Any]) -> list[CacheTensor]:
    """Describe what `register_kv_caches` got, in the order of its layers. Raises ConfigError for what is not one tensor."""
    tensors = []
    for layer, tensor in caches.items():
        if not hasattr(tensor, "data_ptr"):
            raise ConfigError(f"layer {layer}: vLLM registered a {type(tensor).__name__} as its cache, not one tensor")
        size = tensor.element_size()
        strides = tuple(step * size for step in tensor.stride())
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(CacheTensor(layer, tensor.data_ptr(), tuple(tensor.shape), strides, dtype, size))
    return tensors


def _check(tensors: Sequence[CacheTensor], spec: CacheSpec) -> None:
    if not tensors:
        raise ConfigError("vLLM registered no KV cache; a model without attention cannot be handed over so far")
    first = tensors[0]
    for tensor in tensors:
        for field in ("shape", "strides", "dtype"):
            if getattr(tensor, field) != getattr(first, field):
                raise ConfigError(
                    f"layers differ in {field}: {first.layer} has {getattr(first, field)}, {tensor.layer} "
                    f"{getattr(tensor, field)}; only models with one kind of layers can be handed over so far"
                )
    wanted = f"(blocks, {spec.heads} heads, {spec.block_tokens} tokens, channels)"
    if len(first.shape) != 4 or first.shape[1] != spec.heads or first.shape[2] != spec.block_tokens:
        raise ConfigError(f"the cache of {first.layer} has the shape {first.shape}; {wanted} is understood")
    block_bytes = math.prod(first.shape[1:]) * first.element_bytes
    if first.end - first.address != (first.shape[0] - 1) * first.strides[0] + block_bytes:
        raise ConfigError(
            f"the blocks of {first.layer} are in pieces (shape {first.shape}, steps of {first.strides} bytes); "
            "only blocks in one piece can be handed over so far"
        )
    ordered = sorted(tensors, key=lambda tensor: tensor.address)
    for tensor, following in itertools.pairwise(ordered):
        if following.address < tensor.end and _overlap(tensor, following):
            raise ConfigError(
                f"layers {tensor.layer} and {following.layer} share memory; such caches cannot be handed over so far"
            )


def _overlap(one: CacheTensor, other: CacheTensor) -> bool:
    """Whether two tensors share a byte, unless each block of theirs has room for the other between its own bytes."""
    inner = CacheTensor("", 0, one.shape[1:], one.strides[1:], one.dtype, one.element_bytes).end
    distance = (other.address - one.address) % one.strides[0]
    return not inner <= distance <= one.strides[0] - inner


def _layout(tensors: Sequence[CacheTensor], spec: CacheSpec, address: int, region_bytes: int, whole_blocks: bool) -> Layout:
    first = tensors[0]
    blocks, heads, block_tokens, channels = first.shape
    shape, head_bytes = (blocks, block_tokens, heads, channels), channels * first.element_bytes
    block_step, head_step, token_step, channel_step = first.strides
    if whole_blocks:
        # Tokens before heads, because the planner joins tokens, and only the block's extent matters.
        token_step, head_step, channel_step = heads * head_bytes, head_bytes, first.element_bytes
    strides = (block_step, token_step, head_step, channel_step)
    group = tensor_group(
        spec.kind,
        range(len(tensors)),
        [LayerTensor(tensor.address - address, shape, strides, first.dtype, first.element_bytes) for tensor in tensors],
        ("block", "token", "head", "channel"),
        heads=(HeadRange(0, heads),),
        total_heads=spec.total_heads,
        planes=("kv",),
        whole_blocks=whole_blocks,
    )
    return Layout(region_bytes, (group,))
