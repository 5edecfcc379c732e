"""What a rank's cache memory looks like: groups of layers, their blocks, and where each byte of them lies."""

from __future__ import annotations

import hashlib

import msgspec

__all__ = ["Group", "Layout"]

_MAX_REGION_BYTES = 1 << 62


class Group(msgspec.Struct, frozen=True):
    """Layers that share one block table. All strides and offsets are bytes from the start of the registered region.

    The byte of (layer, plane, block, token, head) lies at
    `layer_offsets[layer] + plane*plane_stride + block*block_stride + token*token_stride + head*head_stride`,
    with `layer` counted within `layers` and `head` within the `heads` that this rank holds. Layers may lie anywhere.
    With `whole_blocks` only the engine knows what lies where inside a block, so blocks are never moved in part; the strides
    then say no more than which bytes a block has.
    """

    kind: str
    layers: tuple[int, ...]
    planes: int
    blocks: int
    block_tokens: int
    head_start: int
    heads: int
    total_heads: int
    head_size: int
    dtype: str
    element_bytes: int
    layer_offsets: tuple[int, ...]
    plane_stride: int
    block_stride: int
    token_stride: int
    head_stride: int
    whole_blocks: bool = False

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane."""
        return self.head_size * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane of one layer, all heads of this rank."""
        return self.heads * self.head_bytes

    @property
    def is_token_contiguous(self) -> bool:
        """Whether the tokens of a block lie side by side, so that any span of them is one run."""
        heads_packed = self.heads == 1 or self.head_stride == self.head_bytes
        return heads_packed and self.token_stride == self.token_bytes

    @property
    def is_head_contiguous(self) -> bool:
        """Whether the tokens of one head of a block lie side by side."""
        return self.token_stride == self.head_bytes

    def reach(self, first_token: int, end_token: int) -> tuple[int, int]:
        """The tokens that have to be moved so that these are: up to the edges of their blocks where those are moved whole."""
        size = self.block_tokens if self.whole_blocks else 1
        return first_token // size * size, -(-end_token // size) * size

    @property
    def end(self) -> int:
        """First byte after the last one of this group, strides being positive."""
        counts = (self.planes, self.blocks, self.block_tokens, self.heads)
        reach = sum((count - 1) * stride for count, stride in zip(counts, self._strides, strict=True))
        return max(self.layer_offsets, default=0) + reach + self.head_bytes

    def is_within(self, region_bytes: int) -> bool:
        """Whether every byte of this group lies in a region of that size, and offsets in it can be counted in 64 bits."""
        is_countable = min(self.layer_offsets, default=0) >= 0 and min(self._strides) >= 0
        return is_countable and max(self._strides) <= _MAX_REGION_BYTES and self.end <= min(region_bytes, _MAX_REGION_BYTES)

    @property
    def _strides(self) -> tuple[int, ...]:
        return self.plane_stride, self.block_stride, self.token_stride, self.head_stride


class Layout(msgspec.Struct, frozen=True):
    """The cache memory of one rank: one region of `region_bytes`, cut into groups."""

    region_bytes: int
    groups: tuple[Group, ...]

    def fingerprint(self) -> str:
        """Short digest of everything in this layout; equal layouts have equal digests."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()
