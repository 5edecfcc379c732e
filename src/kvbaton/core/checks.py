"""Checksums of spans: which pieces of a rank's memory belong to a span, in an order that both ends share, and what differs.

The order is layer, plane, token, head. It does not depend on strides or block sizes, so that both ranks of a leg get the same
sum for what it moves, whatever their layouts. Tokens that the target had cached are left out on both sides, because they
are not moved, and two instances that computed the same tokens may differ in rounding.
With `sampled`, both ends choose the same pieces of `PIECE_TOKENS` tokens, one in `ONE_IN` and at least one per layer and
plane, from the key, the span and the layer; nothing has to be agreed on the wire.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists, HandoffKey, Integrity, Span, span_rows
from kvbaton.core.layout import Group, HeadRange, Layout, Plane
from kvbaton.core.pair import Share, channel_offsets, common_heads, join_runs, local_head
from kvbaton.core.segments import Numbers, Places, block_places, check_list, segments_of, state_block
from kvbaton.errors import RangeError

__all__ = [
    "ONE_IN",
    "PIECE_TOKENS",
    "BlockGrid",
    "BlockSums",
    "LegPart",
    "PiecePlanner",
    "Pieces",
    "SpanSum",
    "size_worth_summing",
    "span_size",
    "sums_problem",
]

Pieces = npt.NDArray[np.int64]
"""Shape (n, 2): offset from the start of the region, and bytes; in the order in which they are summed."""

Sums = Mapping[tuple[int, int], int]
"""(leg number, span number) -> checksum."""

PIECE_TOKENS = 16
"""Tokens of one sampled piece; pieces start at multiples of it."""

ONE_IN = 16
"""One piece in this many is sampled."""

_WORTH_SUMMING_BYTES = 8 << 20
"""What is summed before the last span is known is at least about so much at a time: with the loop in C about a millisecond."""

_FEW_PIECES = 128
"""Up to about so many sampled pieces are planned one by one: NumPy takes as long for any array, however short."""


class SpanSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The checksum of what one leg moves of one span, as its source computed it."""

    leg: int
    span: int
    value: int


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """A cache of blocks of `PIECE_TOKENS` tokens, each of which is one piece of the same size in every plane of every layer.

    `offsets` has where each plane of each layer begins, layer by layer, from the layer `first` on.
    """

    blocks: int
    block_stride: int
    piece_bytes: int
    first: int
    planes: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Which pieces of a grid are summed, in short form: those of these spans in these blocks, or with a `seed`, a sample.

    Nothing of it was checked. What a loop in C does not take is left to `PiecePlanner.plan_spans`: it plans the same pieces, or
    names what is wrong.
    """

    grid: BlockGrid
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    cached_tokens: int
    seed: int | None


def span_size(span: Span) -> int:
    """How much is in a span: its tokens, counted in each of its layers."""
    return (span.end_token - span.first_token) * (span.end_layer - span.first_layer)


def size_worth_summing(layouts: Iterable[Layout]) -> int:
    """How much, as `span_size` counts it, should wait before ranks with these layouts are ordered to sum it."""
    token_bytes = max((group.token_bytes for layout in layouts for group in layout.groups if not group.is_state), default=0)
    return max(1, _WORTH_SUMMING_BYTES // max(1, token_bytes))


@dataclass(frozen=True, slots=True)
class LegPart:
    """What one leg moves: its share, and the layout of the rank at its other end."""

    share: Share
    other: Layout

    def heads(self, group: int, plane: int, layer: int) -> tuple[HeadRange, ...]:
        """The heads of one layer of a plane that are moved, by their number in the model."""
        shares = (each for each in self.share if (each.group, each.plane) == (group, plane) and layer in each.layers)
        return tuple(sorted((head for each in shares for head in each.heads), key=lambda each: each.start))


class PiecePlanner:
    """Plans what one rank sums of a leg, or with no `part`, of all that it holds.

    What depends on the layouts alone is worked out once. What the layers of a chunk have in common, the places of its
    tokens, is kept from one span to the next: an engine reports a chunk layer by layer.
    """

    def __init__(self, layout: Layout, part: LegPart | None = None) -> None:
        self._groups = layout.groups
        self._part = part
        self._seeded: tuple[HandoffKey | None, int] = (None, 0)
        others = layout.groups if part is None else part.other.groups
        self._rows = [_ChunkRows(group, other) for group, other in zip(layout.groups, others, strict=True)]

    @functools.cached_property
    def _layers(self) -> dict[int, list[_Layer]]:
        """By the number of the layer, in order. Worked out with the first sum: most peers never ask for one."""
        layers: dict[int, list[_Layer]] = {}
        for layer in sorted({layer for group in self._groups for layer in group.layers}):
            groups = [(number, group) for number, group in enumerate(self._groups) if layer in group.layers]
            parts = [(number, _planes(group, number, group.layers.index(layer), layer, self._part)) for number, group in groups]
            layers[layer] = [_Layer(layer, number, planes) for number, planes in parts if planes]
        return layers

    def plan(
        self,
        blocks: BlockLists,
        key: HandoffKey,
        span: Span,
        cached_tokens: int,
        integrity: Integrity,
        total_tokens: int | None = None,
    ) -> list[Pieces]:
        """The pieces of the region that are summed for `span`, one part per layer and plane, in the order of the sum.

        `total_tokens` is the length of the whole sequence, by default the end of the span. Raises RangeError for what does
        not exist.
        """
        if len(blocks) != len(self._groups):
            raise RangeError(f"block lists are for {len(blocks)} groups where the layout has {len(self._groups)}")
        first, total = max(span.first_token, cached_tokens), span.end_token if total_tokens is None else total_tokens
        parts: list[Pieces] = []
        if integrity is Integrity.OFF:
            return parts
        for each in self._in_span(span):
            rows = self._rows[each.group].of(blocks[each.group], first, span.end_token, total)
            if rows is not None:
                pick = (
                    None
                    if integrity is Integrity.FULL
                    else zlib.crc32(f" {span.number} {each.layer}".encode(), self._crc_of(key))
                )
                parts += rows.pieces(each.planes, pick)
        return parts

    def plan_spans(
        self,
        blocks: BlockLists,
        key: HandoffKey,
        spans: tuple[Span, ...],
        cached_tokens: int,
        integrity: Integrity,
        total_tokens: int | None = None,
    ) -> tuple[Pieces, list[int]]:
        """What `plan` makes of each of these spans, as one array, and how many pieces each has. Raises RangeError as `plan`."""
        planned: list[Pieces] = []
        counts: list[int] = []
        for row in span_rows(spans):
            together = self.plan_row(blocks, key, row, cached_tokens, integrity, total_tokens)
            if together is not None:
                planned.append(together[0])
                counts += together[1]
                continue
            for span in row:
                parts = self.plan(blocks, key, span, cached_tokens, integrity, total_tokens)
                planned += parts
                counts.append(sum(map(len, parts)))
        if len(planned) == 1:
            return planned[0], counts
        return np.concatenate(planned) if planned else np.empty((0, 2), np.int64), counts

    def block_sums(
        self, blocks: BlockLists, key: HandoffKey, spans: tuple[Span, ...], cached_tokens: int, integrity: Integrity
    ) -> BlockSums | None:
        """What `plan_spans` makes of these spans, in short form; None where a cache is not one grid of blocks."""
        if self._grid is None or len(blocks) != 1 or integrity is Integrity.OFF:
            return None
        seed = self._crc_of(key) if integrity is Integrity.SAMPLED else None
        return BlockSums(self._grid, blocks[0], spans, cached_tokens, seed)

    @functools.cached_property
    def _grid(self) -> BlockGrid | None:
        even = self._even
        if even is None or len(self._groups) != 1:
            return None
        (group,), rows = self._groups, self._rows[0]
        is_whole = not (group.window or group.whole_blocks or group.moves_pages)
        is_plain = is_whole and group.tokens.size == rows.other.tokens.size == 1
        if not is_plain or not group.block_tokens == group.page_tokens == PIECE_TOKENS:
            return None
        offsets = tuple(offset for planes in even.offsets for offset in planes)
        planes, (stride, _, token_bytes) = len(even.offsets[0]), even.strides
        return BlockGrid(group.blocks, stride, PIECE_TOKENS * token_bytes, even.first, planes, offsets)

    def plan_row(
        self,
        blocks: BlockLists,
        key: HandoffKey,
        spans: Sequence[Span],
        cached_tokens: int,
        integrity: Integrity,
        total_tokens: int | None = None,
    ) -> tuple[Pieces, list[int]] | None:
        """What `plan` makes of each of these spans, as one array, and how many pieces each has; None where it takes `plan`.

        The spans have the same tokens, and layers that follow each other: a chunk, as an engine reports it. In nearly all
        caches its layers differ in one offset only, so that all of it is one sum of two arrays. Raises RangeError as `plan`.
        """
        even = self._even
        if even is None or integrity is Integrity.OFF or len(blocks) != len(self._groups):
            return None
        first_layer, end_layer = spans[0].first_layer - even.first, spans[-1].end_layer - even.first
        least = 1 if integrity is Integrity.SAMPLED else 2  # of one layer alone, `plan` is quicker where all of it is summed
        if not 0 <= first_layer <= end_layer - least < end_layer <= len(even.shifts):
            return None
        if any(span.first_layer >= span.end_layer for span in spans):
            # A peer may announce anything; such a span has nothing to sum, and is refused when all of them are in.
            return None
        first, end = max(spans[0].first_token, cached_tokens), spans[0].end_token
        rows = self._rows[even.group].of(blocks[even.group], first, end, end if total_tokens is None else total_tokens)
        if rows is None or not rows.is_even:
            return None
        chosen = even.cut(first_layer, end_layer)
        if integrity is Integrity.FULL:
            pieces = rows.pieces_of_layers(chosen)
            count = len(pieces) // (end_layer - first_layer)
            return pieces, [count * (span.end_layer - span.first_layer) for span in spans]
        seed = self._crc_of(key)
        picks = [
            zlib.crc32(f" {span.number} {layer}".encode(), seed)
            for span in spans
            for layer in range(span.first_layer, span.end_layer)
        ]
        pieces, per_layer = rows.sample_of_layers(chosen, picks)
        if len(per_layer) == len(spans):
            return pieces, list(per_layer)
        counts = iter(per_layer)
        return pieces, [sum(itertools.islice(counts, span.end_layer - span.first_layer)) for span in spans]

    @functools.cached_property
    def _even(self) -> _EvenLayers | None:
        """All layers as one array of offsets, where they have that in common; else None."""
        numbers, layers = list(self._layers), [each for some in self._layers.values() for each in some]
        planes = [plane for each in layers for plane in each.planes]
        shifts = [plane.shift for plane in planes if plane.shift is not None]
        is_even = (
            len(layers) == len(numbers) > 0
            and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            and len({each.group for each in layers}) == 1
            and len({len(each.planes) for each in layers}) == 1
            and len(shifts) == len(planes)
            and len({plane.strides for plane in planes}) == 1
        )
        if not is_even:
            return None
        offsets = [[int(plane.shift[0]) for plane in each.planes if plane.shift is not None] for each in layers]
        by_layer = np.array(shifts).reshape(len(layers), -1, 1, 2)
        return _EvenLayers(numbers[0], layers[0].group, planes[0].strides, by_layer, offsets)

    def _crc_of(self, key: HandoffKey) -> int:
        if key is not self._seeded[0]:
            self._seeded = key, zlib.crc32(str(key).encode())
        return self._seeded[1]

    def _in_span(self, span: Span) -> Iterable[_Layer]:
        if span.end_layer - span.first_layer == 1:
            return self._layers.get(span.first_layer, ())
        # Not a loop over the layers of the span: a message may name any number of them.
        return (each for layer, some in self._layers.items() if span.first_layer <= layer < span.end_layer for each in some)


@dataclass(frozen=True, slots=True)
class _PlanePart:
    """One plane of one layer, where there is something to sum: where its layer starts, and (offset, bytes) of one token.

    Where the tokens of a page are one piece, `shift` is what is added to that piece instead.
    """

    offset: int
    strides: tuple[int, int, int]
    pieces: Pieces
    shift: Numbers | None


@dataclass(frozen=True, slots=True)
class _Layer:
    layer: int
    group: int
    planes: tuple[_PlanePart, ...]


@dataclass(frozen=True, slots=True)
class _EvenLayers:
    """Layers of one group that follow each other and differ in where they start only: `shifts` by layer and plane.

    `offsets` has the same as plain numbers.
    """

    first: int
    group: int
    strides: tuple[int, int, int]
    shifts: Pieces
    offsets: list[list[int]]

    def cut(self, first: int, end: int) -> _EvenLayers:
        """Those from the first index up to the end."""
        if first == 0 and end == len(self.offsets):
            return self
        return _EvenLayers(self.first + first, self.group, self.strides, self.shifts[first:end], self.offsets[first:end])


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
    strides, offset = (plane.block_stride, plane.page_stride, plane.token_stride), plane.layer_offsets[index]
    return _PlanePart(offset, strides, pieces, np.array([offset + int(pieces[0, 0]), 0], np.int64) if joins else None)


class _ChunkRows:
    """The places of the tokens of one chunk in the blocks of one group; the last chunk is kept."""

    def __init__(self, group: Group, other: Group) -> None:
        self._group = group
        self.other = other
        self._chunk: tuple[tuple[int, ...], int, int, int] = ((), 0, 0, 0)
        self._kept: _TokenRows | None = None

    def of(self, ids: tuple[int, ...], first_token: int, end_token: int, total: int) -> _TokenRows | None:
        """The rows of these tokens; None when none of them is summed in this group."""
        chunk = ids, first_token, end_token, total
        if chunk[1:] != self._chunk[1:] or (ids is not self._chunk[0] and ids != self._chunk[0]):
            self._kept = self._find(ids, first_token, end_token, total)
            self._chunk = chunk
        return self._kept

    def _find(self, ids: tuple[int, ...], first_token: int, end_token: int, total: int) -> _TokenRows | None:
        group = self._group
        first, end = group.needed(first_token, end_token, total)
        if group.is_state:
            return _state_rows(group, ids) if end_token == total else None
        if first >= end:
            return None
        check_list("own", group, ids, end_token, total)
        if group.tokens.size > 1 or self.other.tokens.size > 1:
            return _SplitRows(group, self.other, ids, (first, end, total))
        if group.block_tokens == group.page_tokens == PIECE_TOKENS:
            chosen = ids[first // PIECE_TOKENS : -(-end // PIECE_TOKENS)]
            # What is wrong with a list is found out and named below.
            if min(chosen) >= 0 and max(chosen) < group.blocks and len(set(chosen)) == len(chosen):
                return _PieceRows(chosen, first, end)
        return _token_rows(group, ids, first, end)


class _TokenRows:
    """Ranges of tokens that lie together: their places, and how many tokens each has.

    `candidates` is how many pieces of `PIECE_TOKENS` tokens there are to sample, 0 where everything is summed. Each is one
    row, unless `firsts` has the row with which each of them begins, and the end.
    """

    def __init__(self, places: Places, counts: Numbers, candidates: int = 0, firsts: Numbers | None = None) -> None:
        self._places = places
        self._counts = counts
        self._candidates = candidates
        self._firsts = firsts
        self._wholes: dict[tuple[int, int, int], Pieces] = {}

    @property
    def is_even(self) -> bool:
        """Whether a piece that may be sampled is one row, so that layers can be planned together."""
        return self._firsts is None

    def pieces_of_layers(self, layers: _EvenLayers) -> Pieces:
        """The pieces of every plane of several layers."""
        return (self._whole(layers.strides) + layers.shifts).reshape(-1, 2)

    def sample_of_layers(self, layers: _EvenLayers, picks: Sequence[int]) -> tuple[Pieces, Sequence[int]]:
        """Those of a sample, for which each layer has a pick, and how many there are in each layer."""
        shifts, count = layers.shifts, self._candidates
        planes = shifts.shape[1]
        if not count:
            pieces = self.pieces_of_layers(layers)
            return pieces, [len(pieces) // len(picks)] * len(picks)
        every, whole = min(ONE_IN, count), self._whole(layers.strides)
        chosen = [range(pick % every, count, ONE_IN) for pick in picks]
        per_layer = [len(each) * planes for each in chosen]
        if min(per_layer) == max(per_layer):
            return (whole[[list(each) for each in chosen]][:, None] + shifts).reshape(-1, 2), per_layer
        rows = [row for each in chosen for row in (*each,) * planes]
        counts = [len(each) for each in chosen for _ in range(planes)]
        return whole[rows] + np.repeat(shifts.reshape(-1, 2), counts, axis=0), per_layer

    def pieces(self, planes: Sequence[_PlanePart], pick: int | None) -> list[Pieces]:
        """The pieces of each plane of a layer; with a `pick`, those of a sample that it chooses."""
        rows = slice(None) if pick is None or not self._candidates else self._sampled(pick)
        return [
            _token_by_token(plane, self._whole(plane.strides)[rows], self._counts[rows])
            if plane.shift is None
            else self._whole(plane.strides)[rows] + plane.shift
            for plane in planes
        ]

    def _sampled(self, pick: int) -> slice | Numbers:
        chosen = slice(pick % min(ONE_IN, self._candidates), None, ONE_IN)
        firsts = self._firsts
        return chosen if firsts is None else _spread(firsts[:-1][chosen], firsts[1:][chosen])[1]

    def _whole(self, strides: tuple[int, int, int]) -> Pieces:
        """Where the rows lie in a plane with these strides, and their bytes; all planes of all layers share them, mostly."""
        whole = self._wholes.get(strides)
        if whole is None:
            block, page, token = strides
            places = self._places
            at = places.blocks * block + places.pages * page + places.tokens * token
            whole = self._wholes[strides] = np.stack([at, self._counts * token], axis=1)
        return whole


class _PieceRows(_TokenRows):
    """Blocks of `PIECE_TOKENS` tokens: each is one row, and one piece to sample. Only the first and the last can be cut."""

    def __init__(self, ids: tuple[int, ...], first: int, end: int) -> None:
        self._ids = ids
        self._cut_at_start, self._cut_at_end = first % PIECE_TOKENS, -end % PIECE_TOKENS
        self._candidates = len(ids)
        self._firsts = None
        self._wholes = {}

    def sample_of_layers(self, layers: _EvenLayers, picks: Sequence[int]) -> tuple[Pieces, Sequence[int]]:
        ids, planes = self._ids, len(layers.offsets[0])
        if self._cut_at_start or self._cut_at_end or len(ids) * len(picks) * planes > ONE_IN * _FEW_PIECES:
            return super().sample_of_layers(layers, picks)
        block, _, token = layers.strides
        every, piece_bytes = min(ONE_IN, len(ids)), PIECE_TOKENS * token
        numbers: list[int] = []
        counts: list[int] = []
        for pick, offsets in zip(picks, layers.offsets, strict=True):
            chosen = ids[pick % every :: ONE_IN]
            numbers += [number for offset in offsets for each in chosen for number in (each * block + offset, piece_bytes)]
            counts.append(len(chosen) * planes)
        return np.array(numbers, np.int64).reshape(-1, 2), counts

    @functools.cached_property
    def _counts(self) -> Numbers:  # type: ignore[override]
        counts = np.full(len(self._ids), PIECE_TOKENS, np.int64)
        counts[0] -= self._cut_at_start
        counts[-1] -= self._cut_at_end
        return counts

    def _whole(self, strides: tuple[int, int, int]) -> Pieces:
        whole = self._wholes.get(strides)
        if whole is None:
            block, _, token = strides
            whole = self._wholes[strides] = np.empty((len(self._ids), 2), np.int64)
            whole[:, 0] = self._ids
            whole[:, 0] *= block
            whole[:, 1] = PIECE_TOKENS * token
            if self._cut_at_start:
                whole[0] += (self._cut_at_start * token, -self._cut_at_start * token)
            if self._cut_at_end:
                whole[-1, 1] -= self._cut_at_end * token
        return whole


class _SplitRows(_TokenRows):
    """Context parallelism: what the other end does not hold is moved by another leg, and must not be in this sum."""

    def __init__(self, group: Group, other: Group, ids: tuple[int, ...], tokens: tuple[int, int, int]) -> None:
        self._group, self._other, self._ids = group, other, ids
        self._first, self._end, self._total = tokens

    @property
    def is_even(self) -> bool:
        return False

    def pieces(self, planes: Sequence[_PlanePart], pick: int | None) -> list[Pieces]:
        first, end = self._first, self._end
        if pick is not None:
            starts, ends = _sampled(pick, first, end)
            first, end = int(starts[0]), int(ends[-1])
        own = segments_of(self._group, self._other, first, end, self._total)
        places = block_places("own", self._group, self._ids, own.source)
        return _TokenRows(places, own.counts).pieces(planes, None)


def _state_rows(group: Group, ids: tuple[int, ...]) -> _TokenRows:
    zero = np.zeros(1, np.int64)
    return _TokenRows(Places(np.array([state_block("own", group, ids)], np.int64), zero, zero), zero + 1)


def _token_rows(group: Group, ids: tuple[int, ...], first: int, end: int) -> _TokenRows:
    """Tokens cut at page boundaries, and at those of the pieces that may be sampled."""
    size = math.gcd(group.page_tokens, PIECE_TOKENS)
    starts = np.arange(first // size * size, end, size, dtype=np.int64)
    starts[0] = first
    counts = np.empty_like(starts)
    counts[:-1], counts[-1] = starts[1:] - starts[:-1], end - starts[-1]
    candidates = -(-end // PIECE_TOKENS) - first // PIECE_TOKENS
    firsts = None
    if candidates < len(starts):
        firsts = np.append(np.flatnonzero(np.diff(starts // PIECE_TOKENS, prepend=-1)), len(starts))
    return _TokenRows(block_places("own", group, ids, starts), counts, candidates, firsts)


def _token_by_token(plane: _PlanePart, rows: Pieces, counts: Numbers) -> Pieces:
    owner, token = _spread(np.zeros_like(counts), counts)
    offsets = (rows[owner, 0] + (plane.offset + token * plane.strides[2]))[:, None] + plane.pieces[:, 0]
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
    if ours == theirs:
        return ""
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
