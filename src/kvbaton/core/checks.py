"""Checksums of spans: which pieces of a rank's memory belong to a span, in an order that both ends share, and what differs.

The order is layer, plane, token, head. It does not depend on strides or block sizes, so that both ranks of a leg get the same
sum for what it moves, whatever their layouts. Tokens that the target had cached are left out on both sides, because they
are not moved, and two instances that computed the same tokens may differ in rounding.
With `sampled`, both ends choose the same pieces of `PIECE_TOKENS` tokens, one in `ONE_IN` and at least one per layer and
plane, from the key, the span and the layer; nothing has to be agreed on the wire.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists, HandoffKey, Integrity, Span
from kvbaton.core.layout import Group, HeadRange, Layout, Plane
from kvbaton.core.pair import Share, channel_offsets, common_heads, join_runs, local_head
from kvbaton.core.segments import Numbers, Places, block_places, check_list, segments_of, state_block
from kvbaton.errors import RangeError

__all__ = ["ONE_IN", "PIECE_TOKENS", "LegPart", "PiecePlanner", "Pieces", "SpanSum", "plan_pieces", "sums_problem"]

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
    """The pieces of this rank's region that are summed for `span`; see `PiecePlanner.plan`."""
    return PiecePlanner(layout, part).plan(blocks, key, span, cached_tokens, integrity, total_tokens)


class PiecePlanner:
    """Plans what one rank sums of a leg, or with no `part`, of all that it holds.

    What depends on the layouts alone is worked out once. What the layers of a chunk have in common, the places of its
    tokens, is kept from one span to the next: an engine reports a chunk layer by layer.
    """

    def __init__(self, layout: Layout, part: LegPart | None = None) -> None:
        self._groups = layout.groups
        self._part = part
        others = layout.groups if part is None else part.other.groups
        self._rows = [_RowsOfChunk(group, other) for group, other in zip(layout.groups, others, strict=True)]

    @functools.cached_property
    def _layers(self) -> list[_Layer]:
        """Worked out with the first sum: most peers never ask for one."""
        layers = (
            _Layer(layer, number, _planes(group, number, index, layer, self._part))
            for number, group in enumerate(self._groups)
            for index, layer in enumerate(group.layers)
        )
        return sorted(layers, key=lambda each: (each.layer, each.group))

    def plan(
        self,
        blocks: BlockLists,
        key: HandoffKey,
        span: Span,
        cached_tokens: int,
        integrity: Integrity,
        total_tokens: int | None = None,
    ) -> Pieces:
        """The pieces of the region that are summed for `span`; raises RangeError for what does not exist.

        `total_tokens` is the length of the whole sequence, by default the end of the span.
        """
        if len(blocks) != len(self._groups):
            raise RangeError(f"block lists are for {len(blocks)} groups where the layout has {len(self._groups)}")
        first, total = max(span.first_token, cached_tokens), span.end_token if total_tokens is None else total_tokens
        parts: list[Pieces] = []
        for each in self._layers if integrity is not Integrity.OFF else ():
            if span.first_layer <= each.layer < span.end_layer and each.planes:
                rows = self._rows[each.group].of(blocks[each.group], first, span.end_token, total)
                if rows is not None:
                    pick = None if integrity is Integrity.FULL else zlib.crc32(f"{key} {span.number} {each.layer}".encode())
                    parts += rows.pieces(each.planes, pick)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class _PlanePart:
    """One plane of one layer, where there is something to sum: where its layer starts, and (offset, bytes) of one token.

    With `joins_tokens`, the tokens of a page are one piece.
    """

    offset: int
    strides: tuple[int, int, int]
    pieces: Pieces
    joins_tokens: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    layer: int
    group: int
    planes: tuple[_PlanePart, ...]


def _planes(group: Group, number: int, index: int, layer: int, part: LegPart | None) -> tuple[_PlanePart, ...]:
    heads = [plane.heads if part is None else part.heads(number, place, layer) for place, plane in enumerate(group.planes)]
    return tuple(
        _plane_part(group, plane, index, each)
        for plane, each in zip(group.planes, heads, strict=True)
        if any(some.count for some in each)
    )


def _plane_part(group: Group, plane: Plane, index: int, heads: Sequence[HeadRange]) -> _PlanePart:
    pieces = _token_pieces(plane, sorted(heads, key=lambda each: each.start))
    joins = len(pieces) == 1 and int(pieces[0, 1]) == plane.token_stride and not group.is_state
    strides = plane.block_stride, plane.page_stride, plane.token_stride
    return _PlanePart(plane.layer_offsets[index], strides, pieces, joins)


class _RowsOfChunk:
    """The places of the tokens of one chunk in the blocks of one group; the last chunk is kept."""

    def __init__(self, group: Group, other: Group) -> None:
        self._group = group
        self._other = other
        self._chunk: tuple[tuple[int, ...], int, int, int] = ((), 0, 0, 0)
        self._kept: _Rows | None = None

    def of(self, ids: tuple[int, ...], first_token: int, end_token: int, total: int) -> _Rows | None:
        """The rows of these tokens; None when none of them is summed in this group."""
        chunk = ids, first_token, end_token, total
        if chunk[1:] != self._chunk[1:] or (ids is not self._chunk[0] and ids != self._chunk[0]):
            self._kept = self._find(ids, first_token, end_token, total)
            self._chunk = chunk
        return self._kept

    def _find(self, ids: tuple[int, ...], first_token: int, end_token: int, total: int) -> _Rows | None:
        group = self._group
        first, end = group.needed(first_token, end_token, total)
        if group.is_state:
            return _state_rows(group, ids) if end_token == total else None
        if first >= end:
            return None
        check_list("own", group, ids, end_token, total)
        if group.tokens.size > 1 or self._other.tokens.size > 1:
            return _SplitRows(group, self._other, ids, (first, end, total))
        return _token_rows(group, ids, first, end)


class _Rows:
    """Ranges of tokens that lie together: their places, how many tokens each has, and where the pieces to sample begin.

    `firsts` has the row with which each piece of `PIECE_TOKENS` tokens begins, and the end; None where a state is summed whole.
    """

    def __init__(self, places: Places, counts: Numbers, firsts: Numbers | None) -> None:
        self._places = places
        self._counts = counts
        self._firsts = firsts
        self._at: dict[tuple[int, int, int], Numbers] = {}

    def pieces(self, planes: Sequence[_PlanePart], pick: int | None) -> Iterator[Pieces]:
        """The pieces of each plane of a layer; with a `pick`, those of a sample that it chooses."""
        rows = slice(None) if pick is None or self._firsts is None else self._sampled(self._firsts, pick)
        counts = self._counts[rows]
        for plane in planes:
            yield _plane_pieces(plane, self._offsets(plane.strides)[rows], counts)

    def _sampled(self, firsts: Numbers, pick: int) -> slice | Numbers:
        count = len(firsts) - 1
        chosen = slice(pick % min(ONE_IN, count), None, ONE_IN)
        if int(firsts[-1]) == count:
            return chosen
        return _spread(firsts[:-1][chosen], firsts[1:][chosen])[1]

    def _offsets(self, strides: tuple[int, int, int]) -> Numbers:
        """Where the rows lie in a plane with these strides; keys and values of all layers share them, nearly always."""
        at = self._at.get(strides)
        if at is None:
            block, page, token = strides
            places = self._places
            at = self._at[strides] = places.blocks * block + places.pages * page + places.tokens * token
        return at


class _SplitRows(_Rows):
    """Context parallelism: what the other end does not hold is moved by another leg, and must not be in this sum."""

    def __init__(self, group: Group, other: Group, ids: tuple[int, ...], tokens: tuple[int, int, int]) -> None:
        self._group, self._other, self._ids = group, other, ids
        self._first, self._end, self._total = tokens

    def pieces(self, planes: Sequence[_PlanePart], pick: int | None) -> Iterator[Pieces]:
        first, end = self._first, self._end
        if pick is not None:
            starts, ends = _sampled(pick, first, end)
            first, end = int(starts[0]), int(ends[-1])
        own = segments_of(self._group, self._other, first, end, self._total)
        places = block_places("own", self._group, self._ids, own.source)
        return _Rows(places, own.counts, None).pieces(planes, None)


def _state_rows(group: Group, ids: tuple[int, ...]) -> _Rows:
    zero = np.zeros(1, np.int64)
    return _Rows(Places(np.array([state_block("own", group, ids)], np.int64), zero, zero), zero + 1, None)


def _token_rows(group: Group, ids: tuple[int, ...], first: int, end: int) -> _Rows:
    """Tokens cut at page boundaries, and at those of the pieces that may be sampled."""
    size = math.gcd(group.page_tokens, PIECE_TOKENS)
    starts = np.arange(first // size * size, end, size, dtype=np.int64)
    starts[0] = first
    counts = np.empty_like(starts)
    counts[:-1], counts[-1] = starts[1:] - starts[:-1], end - starts[-1]
    firsts = np.flatnonzero(np.diff(starts // PIECE_TOKENS, prepend=-1))
    return _Rows(block_places("own", group, ids, starts), counts, np.append(firsts, len(starts)))


def _plane_pieces(plane: _PlanePart, at: Numbers, counts: Numbers) -> Pieces:
    if plane.joins_tokens:
        pieces = np.empty((len(at), 2), np.int64)
        np.add(at, plane.offset + int(plane.pieces[0, 0]), out=pieces[:, 0])
        np.multiply(counts, plane.strides[2], out=pieces[:, 1])
        return pieces
    owner, token = _spread(np.zeros_like(counts), counts)
    offsets = (at[owner] + (plane.offset + token * plane.strides[2]))[:, None] + plane.pieces[:, 0]
    return np.stack([offsets.reshape(-1), np.tile(plane.pieces[:, 1], len(owner))], axis=1)


def _token_pieces(plane: Plane, heads: Sequence[HeadRange]) -> Pieces:
    """(offset, bytes) of one token: heads in the order of the model, then channels."""
    channels = np.zeros(1, np.int64) if plane.is_channel_contiguous else channel_offsets(plane)
    firsts = [(local_head(plane, part.start), part.count) for each in heads for part in common_heads([each], plane.heads)]
    held = np.concatenate([np.arange(first, first + count) for first, count in firsts])
    offsets = (held[:, None] * plane.head_stride + channels).reshape(-1)
    sizes = np.full(len(offsets), plane.head_bytes // len(channels), np.int64)
    joined = join_runs(np.stack([offsets, offsets, sizes], axis=1))
    return joined[:, 1:]


def _sampled(pick: int, first: int, end: int) -> tuple[Numbers, Numbers]:
    """First tokens and ends of the pieces that are chosen for one layer."""
    count = -(-end // PIECE_TOKENS) - first // PIECE_TOKENS
    starts = (first // PIECE_TOKENS + np.arange(pick % min(ONE_IN, count), count, ONE_IN, dtype=np.int64)) * PIECE_TOKENS
    return np.maximum(starts, first), np.minimum(starts + PIECE_TOKENS, end)


def _spread(firsts: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
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
