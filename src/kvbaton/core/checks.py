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
from kvbaton.core.layout import Group, Layout, Plane
from kvbaton.core.pair import channel_offsets, join_runs
from kvbaton.core.segments import Places, block_places, check_list, segments_of, state_block
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
    layout: Layout,
    blocks: BlockLists,
    key: HandoffKey,
    span: Span,
    cached_tokens: int,
    integrity: Integrity,
    total_tokens: int | None = None,
) -> Pieces:
    """The pieces of this rank's region that are summed for `span`; raises RangeError for what does not exist.

    `total_tokens` is the length of the whole sequence, the end of the span unless told.
    """
    if len(blocks) != len(layout.groups):
        raise RangeError(f"block lists are for {len(blocks)} groups where the layout has {len(layout.groups)}")
    first, total = max(span.first_token, cached_tokens), span.end_token if total_tokens is None else total_tokens
    wanted = range(span.first_layer, span.end_layer)
    held = sorted(
        (layer, number, index)
        for number, group in enumerate(layout.groups)
        for index, layer in enumerate(group.layers)
        if layer in wanted
    )
    if integrity is Integrity.OFF or not held:
        return np.empty((0, 2), np.int64)
    parts = [
        _layer_pieces(layout.groups[number], index, blocks[number], (first, span.end_token, total), seed)
        for layer, number, index in held
        for seed in [f"{key} {span.number} {layer}" if integrity is Integrity.SAMPLED else ""]
    ]
    return np.concatenate(parts)


def _layer_pieces(group: Group, layer: int, ids: tuple[int, ...], tokens: tuple[int, int, int], seed: str) -> Pieces:
    """Pieces of all planes of one layer; sampled with a `seed`."""
    first, end = group.needed(*tokens)
    if group.is_state:
        rows, spread = _state_rows(group, ids) if tokens[1] == tokens[2] else _NO_ROWS, True
    elif first >= end:
        return np.empty((0, 2), np.int64)
    else:
        check_list("own", group, ids, tokens[1], tokens[2])
        starts, ends = _sampled(seed, first, end) if seed else (np.array([first]), np.array([end]))
        rows, spread = _token_rows(group, ids, starts, ends, tokens[2]), False
    return np.concatenate([_plane_pieces(plane, layer, rows, spread) for plane in group.planes if plane.head_count])


_Rows = tuple[Places, npt.NDArray[np.int64]]
_NO_ROWS: _Rows = (Places(*(np.empty(0, np.int64),) * 3), np.empty(0, np.int64))


def _state_rows(group: Group, ids: tuple[int, ...]) -> _Rows:
    zero = np.zeros(1, np.int64)
    return Places(np.array([state_block("own", group, ids)], np.int64), zero, zero), zero + 1


def _token_rows(
    group: Group, ids: tuple[int, ...], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], total: int
) -> _Rows:
    """Where stretches of tokens lie, cut at the edges of pages, and how many tokens each has."""
    if group.tokens.size > 1:
        own = segments_of(group, group, int(starts[0]), int(ends[-1]), total)
        return block_places("own", group, ids, own.source), own.counts
    size = group.page_tokens
    owner, page = _spread(starts // size, -(-ends // size))
    low, high = np.maximum(starts[owner], page * size), np.minimum(ends[owner], (page + 1) * size)
    return block_places("own", group, ids, low), high - low


def _plane_pieces(plane: Plane, layer: int, rows: _Rows, is_state: bool) -> Pieces:
    places, counts = rows
    at = places.blocks * plane.block_stride + places.pages * plane.page_stride + places.tokens * plane.token_stride
    at = at + plane.layer_offsets[layer]
    pieces = _token_pieces(plane)
    if len(pieces) == 1 and pieces[0, 1] == plane.token_stride and not is_state:
        return np.stack([at + pieces[0, 0], counts * plane.token_stride], axis=1)
    owner, token = _spread(np.zeros_like(counts), counts)
    offsets = (at[owner] + token * plane.token_stride)[:, None] + pieces[:, 0]
    return np.stack([offsets.reshape(-1), np.tile(pieces[:, 1], len(owner))], axis=1)


def _token_pieces(plane: Plane) -> Pieces:
    """(offset, bytes) of one token: heads by their number in the model, then channels."""
    channels = np.zeros(1, np.int64) if plane.is_channel_contiguous else channel_offsets(plane)
    starts = np.cumsum([0, *(each.count for each in plane.heads)])
    order = sorted(range(len(plane.heads)), key=lambda index: plane.heads[index].start)
    heads = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in order])
    offsets = (heads[:, None] * plane.head_stride + channels).reshape(-1)
    sizes = np.full(len(offsets), plane.head_bytes // len(channels), np.int64)
    joined = join_runs(np.stack([offsets, offsets, sizes], axis=1))
    return joined[:, 1:]


def _sampled(seed: str, first: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First tokens and ends of the pieces that are chosen for one layer."""
    count = -(-end // PIECE_TOKENS) - first // PIECE_TOKENS
    pick = zlib.crc32(seed.encode()) % min(ONE_IN, count)
    starts = (first // PIECE_TOKENS + np.arange(pick, count, ONE_IN, dtype=np.int64)) * PIECE_TOKENS
    return np.maximum(starts, first), np.minimum(starts + PIECE_TOKENS, end)


def _spread(firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every number from each of `firsts` up to its end, with the index of the range it came from."""
    counts = ends - firsts
    owner = np.repeat(np.arange(len(firsts)), counts)
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, firsts[owner] + within


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
