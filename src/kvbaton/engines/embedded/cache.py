"""Cache memory: one allocation per rank that a transport can register as one region, and the paged cache of Llama models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.core.aux_area import AuxArea
from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import Layout, uniform_group
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
        """The layout of the region: one group of all layers with full attention."""
        layers, planes, blocks, block_tokens, heads, head_size = self.data.shape
        layer_stride, plane_stride, block_stride, token_stride, head_stride, element_bytes = self.data.strides
        group = uniform_group(
            kind="full",
            layers=tuple(range(layers)),
            planes=planes,
            blocks=blocks,
            block_tokens=block_tokens,
            head_start=0,
            heads=heads,
            total_heads=heads,
            head_size=head_size,
            dtype=str(self.data.dtype),
            element_bytes=element_bytes,
            layer_offsets=tuple(layer * layer_stride for layer in range(layers)),
            plane_stride=plane_stride,
            block_stride=block_stride,
            token_stride=token_stride,
            head_stride=head_stride,
        )
        return Layout(region_bytes=self.data.nbytes, groups=(group,))

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
