"""Checksums of spans: which pieces of a rank's memory belong to a span, in an order that both ends share, and what differs.

The order is layer, plane, token, head, and does not depend on strides or block sizes, so that two ranks which hold the same
tokens and heads get the same sum however their memory is laid out. What the target had cached is left out on both sides.
With `sampled`, both ends choose the same pieces of `PIECE_TOKENS` tokens, one in `ONE_IN` and at least one per layer and
plane, from the key, the span and the layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists, HandoffKey, Integrity, Span
from kvbaton.core.layout import Group, Layout
from kvbaton.core.plan import block_ids
from kvbaton.errors import RangeError

__all__ = ["ONE_IN", "PIECE_TOKENS", "Pieces", "SpanSum", "Sums", "plan_pieces", "sums_problem"]

Pieces = npt.NDArray[np.int64]
"""Shape (n, 2): offset from the start of the region, and bytes; in the order in which they are summed."""

Sums = Mapping[tuple[int, int], int]
"""(rank, span number) -> checksum."""

PIECE_TOKENS = 16
"""Tokens of one sampled piece; pieces start at multiples of it."""

ONE_IN = 16
"""Of so many pieces one is sampled."""


class SpanSum(msgspec.Struct, frozen=True, array_like=True):
    """The checksum of one span on one rank, as its source computed it."""

    rank: int
    span: int
    value: int


def plan_pieces(
    layout: Layout, blocks: BlockLists, key: HandoffKey, span: Span, cached_tokens: int, integrity: Integrity
) -> Pieces:
    """The pieces of this rank's region that are summed for `span`; raises RangeError for what does not exist."""
    if len(blocks) != len(layout.groups):
        raise RangeError(f"block lists are for {len(blocks)} groups where the layout has {len(layout.groups)}")
    first = max(span.first_token, cached_tokens)
    wanted = range(span.first_layer, span.end_layer)
    held = sorted(
        (layer, number, index)
        for number, group in enumerate(layout.groups)
        for index, layer in enumerate(group.layers)
        if layer in wanted
    )
    if integrity is Integrity.OFF or first >= span.end_token or not held:
        return np.empty((0, 2), np.int64)
    ids = {number: _ids(layout.groups[number], blocks[number], first, span.end_token) for _, number, _ in held}
    parts = []
    for layer, number, index in held:
        group = layout.groups[number]
        low, high = group.reach(first, span.end_token)
        seed = f"{key} {span.number} {layer}"
        ranges = (np.array([low]), np.array([high])) if integrity is Integrity.FULL else _sampled(seed, low, high)
        parts.append(_over_planes(group, index, _in_plane(group, ids[number], low // group.block_tokens, *ranges)))
    return np.concatenate(parts)


def _ids(group: Group, ids: tuple[int, ...], first: int, end: int) -> npt.NDArray[np.int64]:
    return block_ids("own", group, ids, first // group.block_tokens, -(-end // group.block_tokens))


def _sampled(seed: str, first: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First tokens and ends of the pieces that are chosen for one layer."""
    count = -(-end // PIECE_TOKENS) - first // PIECE_TOKENS
    pick = zlib.crc32(seed.encode()) % min(ONE_IN, count)
    starts = (first // PIECE_TOKENS + np.arange(pick, count, ONE_IN, dtype=np.int64)) * PIECE_TOKENS
    return np.maximum(starts, first), np.minimum(starts + PIECE_TOKENS, end)


def _in_plane(
    group: Group,
    ids: npt.NDArray[np.int64],
    first_block: int,
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> Pieces:
    """Pieces within one plane of one layer: one per block of each range of tokens, or per head where heads lie apart."""
    size = group.block_tokens
    owner, block = _spread(starts // size, -(-ends // size))
    low = np.maximum(starts[owner], block * size)
    high = np.minimum(ends[owner], (block + 1) * size)
    at = ids[block - first_block] * group.block_stride - block * size * group.token_stride
    if group.is_token_contiguous:
        return np.stack([at + low * group.token_stride, (high - low) * group.token_bytes], axis=1)
    piece, token = _spread(low, high)
    heads = np.arange(group.heads, dtype=np.int64) * group.head_stride
    offsets = ((at[piece] + token * group.token_stride)[:, None] + heads).reshape(-1)
    return np.stack([offsets, np.full(len(offsets), group.head_bytes, np.int64)], axis=1)


def _spread(firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every number from each of `firsts` up to its end, with the index of the range it came from."""
    counts = ends - firsts
    owner = np.repeat(np.arange(len(firsts)), counts)
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, firsts[owner] + within


def _over_planes(group: Group, layer: int, in_plane: Pieces) -> Pieces:
    bases = np.zeros((group.planes, 1, 2), np.int64)
    bases[:, 0, 0] = group.layer_offsets[layer] + np.arange(group.planes) * group.plane_stride
    return (bases + in_plane[None]).reshape(-1, 2)


def sums_problem(spans: Iterable[Span], ranks: Iterable[int], ours: Sums, theirs: Sums) -> str:
    """Why the target's sums are not those of the source; empty when every span of every rank has the same one."""
    of = list(spans)
    for rank in ranks:
        for span in of:
            here, there = ours.get((rank, span.number)), theirs.get((rank, span.number))
            if here is None or here != there:
                what = f"tokens {span.first_token} to {span.end_token}, layers {span.first_layer} to {span.end_layer}"
                return (
                    f"checksum of span {span.number} ({what}) on rank {rank} is {_shown(here)} at the target and "
                    f"{_shown(there)} at the source; send the request again, and check the transport if it happens again"
                )
    return ""


def _shown(value: int | None) -> str:
    return "missing" if value is None else f"{value:08x}"
