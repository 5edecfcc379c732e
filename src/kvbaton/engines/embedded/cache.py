"""Cache memory: one allocation per rank that a transport can register as one region, and the paged cache of Llama models."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.aux_area import AuxArea
from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import Axis, HeadRange, Layout
from kvbaton.core.tensors import LayerTensor, split_layers, tensor_group
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region
from kvbaton.transport.shared_memory import SharedMemory

__all__ = ["AUX_SLOTS", "POISON_BYTE", "PagedCache", "RegionCache"]

POISON_BYTE = 0x4B
"""What a poisoned block is filled with; as a float32 it is about 13 million, finite and far from any real key."""

AUX_SLOTS = 64
"""How many aux records can travel out of, or into, one instance by data at a time."""

_AUX_SLOT_BYTES = 4096


class RegionCache:
    """`blocks` blocks of `block_tokens` tokens in memory that other processes of this host can map and read."""

    aux_area: AuxArea | None = None
    """Where aux records may lie in the region; None without slots for them."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ConfigError(f"a cache of {blocks} blocks of {block_tokens} tokens cannot be made; both must be at least 1")
        self.blocks = blocks
        self.block_tokens = block_tokens

    @property
    def region(self) -> Region:
        """The whole region, as a transport registers it."""
        return self._shared.region

    @property
    def memory(self) -> memoryview:
        """The whole region as writable bytes."""
        return self.region.view

    def _allocate(self, region_bytes: int) -> npt.NDArray[np.uint8]:
        """Page-aligned memory with every page present, because a transport registers it. Raises ConfigError."""
        try:
            self._shared = SharedMemory(region_bytes)
        except ConfigError as error:
            raise ConfigError(
                f"no memory for a cache of {self.blocks} blocks ({region_bytes} bytes): {error}; use fewer blocks"
            ) from error
        return self._shared.array


class PagedCache(RegionCache):
    """K and V of every layer, cut into blocks, and `aux_slots` slots for aux records behind them.

    `data` has the shape (layers, 2, blocks, block_tokens, kv_heads, head_size); plane 0 holds keys, plane 1 values.
    """

    def __init__(self, config: ModelConfig, blocks: int, block_tokens: int, *, aux_slots: int = 0) -> None:
        super().__init__(blocks, block_tokens)
        shape = (config.layers, 2, blocks, block_tokens, config.kv_heads, config.head_size)
        region_bytes = int(np.prod(shape, dtype=np.int64)) * 4
        memory = self._allocate(region_bytes + aux_slots * _AUX_SLOT_BYTES)
        self.data: npt.NDArray[np.float32] = np.frombuffer(memory, np.float32, region_bytes // 4).reshape(shape)
        self.aux_area = AuxArea(region_bytes, aux_slots, _AUX_SLOT_BYTES) if aux_slots else None

    def layout(self) -> Layout:
        """Describe the region: one group of all layers with full attention."""
        data, axes = self.data, ("plane", "block", "token", "head", "channel")
        layers = split_layers(LayerTensor(0, data.shape, data.strides, str(data.dtype), data.itemsize))
        heads = HeadRange(0, data.shape[4])
        group = tensor_group("full", range(len(layers)), layers, axes, heads=(heads,), total_heads=heads.count)
        return Layout(region_bytes=self.data.nbytes, groups=(group,))

    def common_layout(self) -> Layout:
        """The same memory in the order of channels that other engines have: that of Hugging Face's rotary embedding.

        Here the two channels that rotate together are neighbours; there they are half a head apart.
        """
        layout = self.layout()
        (group,) = layout.groups
        half, size = self.data.shape[5] // 2, self.data.itemsize
        keys = msgspec.structs.replace(group.planes[0], channels=(Axis(2, size), Axis(half, 2 * size)))
        return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(group, planes=(keys, *group.planes[1:])),))

    @property
    def shares_prefixes(self) -> bool:
        """Whether full blocks may serve other prompts with the same beginning."""
        return True

    def block_lists(self, blocks: Sequence[int]) -> BlockLists:
        """The blocks of one sequence: one list per group of the layout."""
        return (tuple(blocks),)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks`, in all layers and both planes, with `POISON_BYTE`."""
        self.data.view(np.uint32)[:, :, np.asarray(blocks, np.intp)] = POISON_BYTE * 0x01010101
