"""What a rank's cache memory looks like: groups of layers, their blocks, and where each byte of them lies.

A group is a block table: layers that get the same blocks. A plane is one tensor per layer of a group: the keys, the values, a
latent, the scales of an index, a Mamba state. Memory is described by the strides of its planes alone, so that no axis order,
padding or nesting is a special case: NHD and HND, vLLM's fused K/V, SGLang's separate K and V tensors. `docs/layouts.md` has
pictures.

A layout may come from a peer. `problem` is called before any offset is computed from it: it rejects numbers with which 64-bit
arithmetic would overflow, strides that overlap, and bytes beyond the region.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "CHUNKED",
    "CONV",
    "FULL",
    "INDEX",
    "MLA",
    "SLIDING",
    "SLIDING_PAGES",
    "SSM",
    "Axis",
    "Group",
    "HeadRange",
    "Layout",
    "Plane",
    "TokenSplit",
    "numbers_text",
]

MAX_REGION_BYTES = 1 << 62
"""Offsets are signed 64-bit integers in NumPy; the margin keeps sums of a few of them from overflowing."""

FULL = "full"
"""Keys and values of every token."""
SLIDING = "sliding"
"""Keys and values of the last tokens."""
SLIDING_PAGES = "sliding pages"
"""The same, from the start of the block on in which the window starts: for engines whose prefix cache keeps such a block whole,
and reads all of it for a later, shorter prompt."""
CHUNKED = "chunked local"
"""Keys and values of the tokens that are in the same chunk as the next one, from the start of a block on, too."""
MLA = "mla"
"""The compressed keys and values of multi-head latent attention."""
INDEX = "index"
"""Index keys of sparse attention."""
CONV = "conv"
"""State of a Mamba convolution."""
SSM = "ssm"
"""State of a Mamba state space model."""


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """`count` elements, each `stride` bytes after the previous one."""

    count: int
    stride: int


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    """`count` of the model's heads from `start` on; channels where those are divided among ranks, as in a Mamba convolution."""

    start: int
    count: int

    @property
    def end(self) -> int:
        """The first head after these."""
        return self.start + self.count


class TokenSplit(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens of a sequence rank `rank` of `size` context-parallel ranks holds.

    With `interleave`, ranks take turns of that many tokens (vLLM's decode context parallelism). With 0, each holds one
    contiguous range of whole blocks, as even as possible, the first ranks one block more.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 0


class Plane(msgspec.Struct, frozen=True):
    """One tensor per layer. All strides and offsets are bytes; offsets count from the start of the registered region.

    The element of (layer, block, token, head, channel) lies at `layer_offsets[layer] + block*block_stride +
    token//page_tokens*page_stride + token%page_tokens*token_stride + head*head_stride` plus the channel's place in `channels`,
    with `layer` counted within the group's layers and `head` within the `heads` that this rank holds, range after range.
    `channels` are the axes of one head, outermost first; nearly always one axis without gaps.
    """

    name: str
    dtype: str
    element_bytes: int
    heads: tuple[HeadRange, ...]
    total_heads: int
    channels: tuple[Axis, ...]
    layer_offsets: tuple[int, ...]
    block_stride: int
    page_stride: int
    token_stride: int
    head_stride: int

    @property
    def head_count(self) -> int:
        """How many heads this rank holds."""
        return sum(each.count for each in self.heads)

    @property
    def head_size(self) -> int:
        """Elements of one head of one token."""
        return math.prod(axis.count for axis in self.channels)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.head_size * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all heads of this rank."""
        return self.head_count * self.head_bytes

    @property
    def is_channel_contiguous(self) -> bool:
        """Whether the elements of a head are contiguous."""
        return _is_dense([axis for axis in self.channels if axis.count > 1], self.element_bytes)

    def alike(self, other: Plane) -> bool:
        """Whether both have the same strides and heads, so that one set of runs serves both at different offsets."""
        names = ("element_bytes", "heads", "channels", "block_stride", "page_stride", "token_stride", "head_stride")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class Group(msgspec.Struct, frozen=True):
    """Layers that share one block table.

    A block holds `block_tokens` tokens, in kernel pages of `page_tokens` each; with 0 it holds the state of a whole request,
    and each request has one. Only the last `window` tokens of a sequence are needed, or all with 0; of kind `chunked local`,
    those after the last multiple of it.
    With `whole_blocks` only the engine knows the order inside a block (vLLM's CPU kernels reorder it), so blocks are never
    moved in part; the strides then only state which bytes a block has. Where each head has a piece of the block to itself
    (`has_outer_heads`), the order is the head's own, and heads are moved one by one, whole.
    """

    kind: str
    layers: tuple[int, ...]
    blocks: int
    block_tokens: int
    page_tokens: int
    planes: tuple[Plane, ...]
    window: int = 0
    tokens: TokenSplit = TokenSplit()
    whole_blocks: bool = False

    @property
    def is_state(self) -> bool:
        """Whether a block holds the state of a request, whatever its length."""
        return self.block_tokens == 0

    @property
    def moves_pages(self) -> bool:
        """Whether a window is moved from the start of a block on; the groups of a draft model are called after their kind."""
        return self.kind.startswith((SLIDING_PAGES, CHUNKED))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token (or state) in one layer, all planes and heads of this rank."""
        return sum(plane.token_bytes for plane in self.planes)

    def has_outer_heads(self, plane: Plane) -> bool:
        """Whether all tokens of a block of one head lie together, before those of the next head."""
        return plane.head_stride >= self.block_tokens * plane.token_stride > 0

    def needed(self, first_token: int, end_token: int, total_tokens: int) -> tuple[int, int]:
        """Which of these tokens have to be moved: those in the window, rounded out where blocks are moved whole."""
        if self.window:
            is_chunked = self.kind.startswith(CHUNKED)
            start = total_tokens // self.window * self.window if is_chunked else total_tokens - self.window
            first_token = max(first_token, start)
        if first_token >= end_token:
            return end_token, end_token
        if self.moves_pages:
            first_token = first_token // self.block_tokens * self.block_tokens
        # Where ranks take turns, a block of this rank spans the tokens of all ranks' blocks.
        turns = self.tokens.size if self.tokens.interleave else 1
        size = self.block_tokens * turns if self.whole_blocks else 1
        return first_token // size * size, -(-end_token // size) * size

    @property
    def end(self) -> int:
        """First byte after the last one of this group; strides are positive, `problem` checks that first."""
        return max((self._plane_end(plane) for plane in self.planes), default=0)

    def axes(self, plane: Plane) -> tuple[Axis, ...]:
        """Every axis of one layer of a plane."""
        pages, page = (self.block_tokens // self.page_tokens, self.page_tokens) if not self.is_state else (1, 1)
        return (
            Axis(self.blocks, plane.block_stride),
            Axis(pages, plane.page_stride),
            Axis(page, plane.token_stride),
            Axis(plane.head_count, plane.head_stride),
            *plane.channels,
        )

    def _plane_end(self, plane: Plane) -> int:
        if not (plane.head_count and plane.layer_offsets):
            return 0
        reach = sum((axis.count - 1) * axis.stride for axis in self.axes(plane))
        return max(plane.layer_offsets) + reach + plane.element_bytes

    def _most_bytes(self, plane: Plane) -> int:
        """An upper bound of every offset that is computed. A stride counts even where it is never used (one head, no blocks):

        NumPy multiplies it all the same, and one of 2^63 in a peer's card would overflow.
        """
        reach = sum(max(axis.count - 1, 1) * abs(axis.stride) for axis in self.axes(plane))
        return max(plane.layer_offsets, default=0) + reach + plane.head_bytes

    def problem(self, region_bytes: int) -> str:
        """What is wrong with this group in a region of that size; empty when nothing is."""
        return (
            self._size_problem()
            or next(filter(None, (self._plane_problem(plane) for plane in self.planes)), "")
            or ("" if self.end <= min(region_bytes, MAX_REGION_BYTES) else f"bytes up to {self.end} of {region_bytes}")
        )

    def _size_problem(self) -> str:
        if self.blocks < 0 or self.block_tokens < 0 or self.window < 0:
            return f"{self.blocks} blocks of {self.block_tokens} tokens, window {self.window}"
        if not self.is_state and (self.page_tokens < 1 or self.block_tokens % self.page_tokens):
            return f"pages of {self.page_tokens} tokens in blocks of {self.block_tokens}"
        split = self.tokens
        if not (0 <= split.rank < split.size and 0 <= split.size * split.interleave <= MAX_REGION_BYTES):
            return f"token split {split.rank} of {split.size} by {split.interleave}"
        if len(set(self.layers)) < len(self.layers):
            return f"a layer twice in {numbers_text(self.layers)}"
        if min(self.layers, default=0) < 0:
            return f"layer {min(self.layers)}"
        return ""

    def _plane_problem(self, plane: Plane) -> str:
        if len(plane.layer_offsets) != len(self.layers):
            return f"{plane.name}: layer_offsets {len(plane.layer_offsets)} for {len(self.layers)} layers"
        if plane.element_bytes < 1 or plane.head_size < 1 or min(axis.count for axis in self.axes(plane)) < 0:
            return f"{plane.name}: {plane.head_count} heads of {plane.head_size} elements of {plane.element_bytes} bytes"
        if problem := _ranges_problem(plane.heads, plane.total_heads):
            return f"{plane.name}: {problem}"
        if min(plane.layer_offsets, default=0) < 0:
            return f"{plane.name}: layer_offsets from {min(plane.layer_offsets)}"
        if (most := self._most_bytes(plane)) > MAX_REGION_BYTES:
            return f"{plane.name}: offsets and strides of {most} bytes in all, where {MAX_REGION_BYTES} can be counted"
        return (
            "" if _is_nested(self.axes(plane), plane.element_bytes) else f"{plane.name}: strides that overlap or are negative"
        )


class Layout(msgspec.Struct, frozen=True):
    """The cache memory of one rank: one region of `region_bytes`, cut into groups."""

    region_bytes: int
    groups: tuple[Group, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The global indices of all layers, in order, each once."""
        return tuple(sorted({layer for group in self.groups for layer in group.layers}))

    def problem(self) -> str:
        """What is wrong with this layout, with the number of the group; empty when nothing is."""
        if self.region_bytes < 0:
            return f"region_bytes {self.region_bytes}"
        for index, group in enumerate(self.groups):
            if problem := group.problem(self.region_bytes):
                return f"group {index}: {problem}"
        return ""


def numbers_text(values: Sequence[int]) -> str:
    """`0-3` for consecutive numbers, `0, 64 .. 448` for equal steps, else the numbers, or how many there are."""
    if len(values) < 3:
        return ", ".join(map(str, values)) or "none"
    steps = {after - before for before, after in itertools.pairwise(values)}
    if steps == {1}:
        return f"{values[0]}-{values[-1]}"
    if len(steps) == 1:
        return f"{values[0]}, {values[1]} .. {values[-1]}"
    return ", ".join(map(str, values)) if len(values) <= 8 else f"{values[0]}, {values[1]} and {len(values) - 2} others"


def _ranges_problem(ranges: tuple[HeadRange, ...], total: int) -> str:
    ordered = sorted((each.start, each.end) for each in ranges)
    for (_, end), (start, _) in itertools.pairwise(ordered):
        if start < end:
            return f"head {start} twice"
    if any(each.count < 0 for each in ranges) or (ordered and not (ordered[0][0] >= 0 and ordered[-1][1] <= total)):
        return f"heads {[tuple(pair) for pair in ordered]} of {total}"
    return ""


def _is_dense(axes: Sequence[Axis], element_bytes: int) -> bool:
    step = element_bytes
    for axis in reversed(axes):
        if axis.stride != step:
            return False
        step *= axis.count
    return True


def _is_nested(axes: Iterable[Axis], element_bytes: int) -> bool:
    """Whether each axis steps over everything inside it, so that no two elements share a byte."""
    extent = element_bytes
    for axis in sorted((axis for axis in axes if axis.count > 1), key=lambda axis: axis.stride):
        if axis.stride < extent or axis.stride > MAX_REGION_BYTES or axis.count > MAX_REGION_BYTES:
            return False
        extent += (axis.count - 1) * axis.stride
    return True
