"""Checksums of spans: which pieces of a rank's memory belong to a span, in an order that both ends share, and what differs.

The order is layer, plane, token, head. It does not depend on strides or block sizes, so that both ranks of a leg get the same
sum for what it moves, whatever their layouts. Tokens that the target had cached are left out on both sides, because they
are not moved, and two instances that computed the same tokens may differ in rounding.
With `sampled`, both ends choose the same pieces of `PIECE_TOKENS` tokens, one in `ONE_IN` and at least one per layer and
plane, from the key, the span and the layer; nothing has to be agreed on the wire.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists, HandoffKey, Integrity, Span
from kvbaton.core.layout import Group, HeadRange, Layout, Plane
from kvbaton.core.pair import Share, channel_offsets, common_heads, join_runs, local_head
from kvbaton.core.segments import Places, block_places, check_list, segments_of, state_block
from kvbaton.errors import RangeError

__all__ = ["ONE_IN", "PIECE_TOKENS", "LegPart", "Pieces", "SpanSum", "plan_pieces", "sums_problem"]

Pieces = npt.NDArray[np.int64]
"""Shape (n, 2): offset from the start of the region, and bytes; in the order in which they are summed."""

Sums = Mapping[tuple[int, int], int]
"""(leg number, span number) -> checksum."""

PIECE_TOKENS = 16
"""Tokens of one sampled piece; pieces start at multiples of it."""

ONE_IN = 16
"""One piece in this many is sampled."""


class SpanSum(msgspec.Struct, frozen=True, array_like=True):
    """The checksum of what one leg moves of one span, as its source computed it."""

    leg: int
    span: int
    value: int


@dataclass(frozen=True, slots=True)
class LegPart:
    """What one leg moves: its share, and the layout of the rank at its other end."""

    share: Share
    other: Layout

    def heads(self, group: int, plane: int, layer: int) -> tuple[HeadRange, ...]:
        """The heads of one layer of a plane that are moved, by their number in the model."""
        shares = (each for each in self.share if (each.group, each.plane) == (group, plane) and layer in each.layers)
        return tuple(sorted((head for each in shares for head in each.heads), key=lambda each: each.start))


def plan_pieces(
    layout: Layout,
    blocks: BlockLists,
    key: HandoffKey,
    span: Span,
    cached_tokens: int,
    integrity: Integrity,
    total_tokens: int | None = None,
    part: LegPart | None = None,
) -> Pieces:
    """The pieces of this rank's region that are summed for `span`; raises RangeError for what does not exist.

    `total_tokens` is the length of the whole sequence, by default the end of the span. With `part`, only that part is summed.
    """
    if len(blocks) != len(layout.groups):
        raise RangeError(f"block lists are for {len(blocks)} groups where the layout has {len(layout.groups)}")
    first, total = max(span.first_token, cached_tokens), span.end_token if total_tokens is None else total_tokens
    requested = range(span.first_layer, span.end_layer)
    held = sorted(
        (layer, number, index)
        for number, group in enumerate(layout.groups)
        for index, layer in enumerate(group.layers)
        if layer in requested
    )
    if integrity is Integrity.OFF or not held:
        return np.empty((0, 2), np.int64)
    parts = [
        _layer_pieces(
            _Layer(layout.groups[number], index, *_part_of_layer(layout.groups[number], number, layer, part)),
            blocks[number],
            (first, span.end_token, total),
            f"{key} {span.number} {layer}" if integrity is Integrity.SAMPLED else "",
        )
        for layer, number, index in held
    ]
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer by its place in its group, the heads of each plane that are summed, and the group at the other end."""

    group: Group
    place: int
    heads: tuple[tuple[HeadRange, ...], ...]
    other: Group


def _part_of_layer(
    group: Group, number: int, layer: int, part: LegPart | None
) -> tuple[tuple[tuple[HeadRange, ...], ...], Group]:
    if part is None:
        return tuple(tuple(sorted(plane.heads, key=lambda each: each.start)) for plane in group.planes), group
    return tuple(part.heads(number, plane, layer) for plane in range(len(group.planes))), part.other.groups[number]


def _layer_pieces(layer: _Layer, ids: tuple[int, ...], tokens: tuple[int, int, int], seed: str) -> Pieces:
    """Pieces of all planes of one layer; sampled with a `seed`."""
    group = layer.group
    first, end = group.needed(*tokens)
    if group.is_state:
        rows, spread = _state_rows(group, ids) if tokens[1] == tokens[2] else _NO_ROWS, True
    elif first >= end or not any(layer.heads):
        return np.empty((0, 2), np.int64)
    else:
        check_list("own", group, ids, tokens[1], tokens[2])
        starts, ends = _sampled(seed, first, end) if seed else (np.array([first]), np.array([end]))
        rows, spread = _token_rows(layer, ids, starts, ends, tokens[2]), False
    parts = [
        _plane_pieces(plane, layer.place, heads, rows, spread)
        for plane, heads in zip(group.planes, layer.heads, strict=True)
        if any(each.count for each in heads)
    ]
    return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)


_Rows = tuple[Places, npt.NDArray[np.int64]]
_NO_ROWS: _Rows = (Places(*(np.empty(0, np.int64),) * 3), np.empty(0, np.int64))


def _state_rows(group: Group, ids: tuple[int, ...]) -> _Rows:
    zero = np.zeros(1, np.int64)
    return Places(np.array([state_block("own", group, ids)], np.int64), zero, zero), zero + 1


def _token_rows(
    layer: _Layer, ids: tuple[int, ...], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], total: int
) -> _Rows:
    """Where ranges of tokens lie, cut at page boundaries, and how many tokens each has; only tokens that both ends hold."""
    group = layer.group
    if group.tokens.size > 1 or layer.other.tokens.size > 1:
        # Context parallelism: what the other end does not hold is moved by another leg, and must not be in this sum.
        own = segments_of(group, layer.other, int(starts[0]), int(ends[-1]), total)
        return block_places("own", group, ids, own.source), own.counts
    size = group.page_tokens
    owner, page = _spread(starts // size, -(-ends // size))
    low, high = np.maximum(starts[owner], page * size), np.minimum(ends[owner], (page + 1) * size)
    return block_places("own", group, ids, low), high - low


def _plane_pieces(plane: Plane, layer: int, heads: Sequence[HeadRange], rows: _Rows, is_state: bool) -> Pieces:
    places, counts = rows
    at = places.blocks * plane.block_stride + places.pages * plane.page_stride + places.tokens * plane.token_stride
    at = at + plane.layer_offsets[layer]
    pieces = _token_pieces(plane, heads)
    if len(pieces) == 1 and pieces[0, 1] == plane.token_stride and not is_state:
        return np.stack([at + pieces[0, 0], counts * plane.token_stride], axis=1)
    owner, token = _spread(np.zeros_like(counts), counts)
    offsets = (at[owner] + token * plane.token_stride)[:, None] + pieces[:, 0]
    return np.stack([offsets.reshape(-1), np.tile(pieces[:, 1], len(owner))], axis=1)


def _token_pieces(plane: Plane, heads: Sequence[HeadRange]) -> Pieces:
    """(offset, bytes) of one token: heads in the order of the model, then channels."""
    channels = np.zeros(1, np.int64) if plane.is_channel_contiguous else channel_offsets(plane)
    firsts = [(local_head(plane, part.start), part.count) for each in heads for part in common_heads([each], plane.heads)]
    held = np.concatenate([np.arange(first, first + count) for first, count in firsts])
    offsets = (held[:, None] * plane.head_stride + channels).reshape(-1)
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
    """Every number from each of `firsts` up to its end, with the index of its range."""
    counts = ends - firsts
    owner = np.repeat(np.arange(len(firsts)), counts)
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, firsts[owner] + within


def sums_problem(spans: Iterable[Span], ours: Sums, theirs: Sums) -> str:
    """The first sum in which target and source differ, as a sentence; empty when there is none."""
    of = {span.number: span for span in spans}
    for leg, number in sorted(ours.keys() | theirs.keys()):
        here, there, span = ours.get((leg, number)), theirs.get((leg, number)), of.get(number)
        if here != there:
            what = (
                f"tokens {span.first_token} to {span.end_token}, layers {span.first_layer} to {span.end_layer}"
                if span is not None
                else "which was never announced"
            )
            return (
                f"checksum of span {number} ({what}) in leg {leg} is {_shown(here)} at the target and {_shown(there)} at the "
                "source; send the request again, and check the transport if it happens again"
            )
    return ""


def _shown(value: int | None) -> str:
    return "missing" if value is None else f"{value:08x}"
