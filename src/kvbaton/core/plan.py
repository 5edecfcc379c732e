"""From two layouts and two block lists to the runs of a leg.

The part that depends only on the pair of ranks (`Pair`, in `core/pair.py`) is computed once per pair of cards. The part that
depends on the request is here; it reads block lists only, is vectorised over blocks, tokens, heads, planes and layers, and
joins runs that are contiguous on both sides. Where there are many runs, the result is in short form (`core/strips.py`): layers
and planes are slots of a strip, and where no two tokens can be joined, a token is a pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.core.handoff import BlockLists
from kvbaton.core.pair import GroupPair, Pair, Piece, Slots, join_runs, pair_layouts
from kvbaton.core.segments import Numbers, Places, block_places, check_list, segments_of, state_block
from kvbaton.core.strips import (
    NO_RUNS,
    NO_SLOT,
    Plan,
    Runs,
    Strip,
    TokenPattern,
    each_token,
    sum_runs,
    unroll,
    unroll_places,
)
from kvbaton.errors import RangeError

__all__ = ["BlockRuns", "Runs", "pair_layouts", "plan_blocks", "plan_layers", "plan_runs"]

_FEW_RUNS = 1024
"""Up to so many runs are planned one by one: to take the short form apart again would cost more than it saves."""

_FEW_BLOCKS = 32
"""Up to so many blocks are planned without NumPy: each of its calls costs as much as a block does in Python."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """The runs of one layer where each token is runs of its own: places with a count of tokens, and the pattern of a token."""

    places: Numbers
    pattern: TokenPattern

    def __len__(self) -> int:
        return int(self.places[:, 2].sum()) * len(self.pattern.items)


FewRuns = list[int]
"""The runs of one layer of a few blocks: source offset, target offset and bytes of each, one behind the other.

Flat, because NumPy takes more than twice as long for a list of rows.
"""

LayerRuns = Numbers | TokenPlaces | FewRuns

BlockRuns = tuple[tuple[LayerRuns, ...], ...]
"""Per group and piece the runs of one layer, as offsets from where that layer starts."""


def plan_runs(
    pair: Pair,
    source_blocks: BlockLists,
    target_blocks: BlockLists,
    first_token: int,
    tokens: int,
    layers: range | None = None,
    *,
    total_tokens: int | None = None,
) -> Runs:
    """Runs that copy tokens `first_token` up to `tokens` of every layer, or of the global `layers` given.

    `total_tokens` is the length of the whole sequence, by default `tokens`: windows are counted from its end, and states move
    with its last tokens. Raises RangeError for blocks and tokens that do not exist.
    """
    blocks = plan_blocks(pair, source_blocks, target_blocks, first_token, tokens, total_tokens)
    return unroll(plan_layers(pair, blocks, layers))


def plan_blocks(
    pair: Pair,
    source_blocks: BlockLists,
    target_blocks: BlockLists,
    first_token: int,
    tokens: int,
    total_tokens: int | None = None,
) -> BlockRuns:
    """The part of a plan that is the same for every layer. Raises RangeError for blocks and tokens that do not exist."""
    total = tokens if total_tokens is None else total_tokens
    if first_token < 0:
        raise RangeError(f"first_token is {first_token}; it must not be negative")
    if tokens > total:
        raise RangeError(f"tokens up to {tokens} of a sequence of {total} were asked for")
    for side, lists in (("source", source_blocks), ("target", target_blocks)):
        if len(lists) != len(pair.groups):
            raise RangeError(f"{side} block lists are for {len(lists)} groups where the layout has {len(pair.groups)}")
    return tuple(
        [  # a list, not a generator: this is on the way of every span, and most layouts have one group
            _group_runs(group, source_list, target_list, first_token, tokens, total)
            for group, source_list, target_list in zip(pair.groups, source_blocks, target_blocks, strict=True)
        ]
    )


def plan_layers(pair: Pair, blocks: BlockRuns, layers: range | None = None) -> Runs | Plan:
    """The runs of every layer, or of the global `layers` given, from the part that is the same for all.

    In short form where they are many.
    """
    parts, count = [], 0
    for group, runs in zip(pair.groups, blocks, strict=True):
        for piece, in_layer in zip(group.pieces, runs, strict=True):
            if runs_in_layer := len(in_layer) // 3 if isinstance(in_layer, list) else len(in_layer):
                slots = piece.slots_of(layers)
                parts.append((piece, in_layer, slots))
                count += runs_in_layer * len(slots.starts)
    if count > _FEW_RUNS:
        return Plan(tuple(_strip(piece, in_layer, slots.rows) for piece, in_layer, slots in parts if slots.starts))
    if len(parts) == 1:
        return _over_slots(*parts[0])
    return np.concatenate([_over_slots(*part) for part in parts]) if parts else NO_RUNS


def _group_runs(
    pair: GroupPair, source_list: tuple[int, ...], target_list: tuple[int, ...], first_token: int, tokens: int, total: int
) -> tuple[LayerRuns, ...]:
    if pair.target.is_state:
        return _state_runs(pair, source_list, target_list) if tokens == total else _nothing(pair)
    first, end = pair.target.needed(first_token, tokens, total)
    if first >= end:
        return _nothing(pair)
    if pair.is_page_by_page and (few := _few_runs(pair, source_list, target_list, first, end)) is not None:
        return few
    check_list("source", pair.source, source_list, tokens, total)
    check_list("target", pair.target, target_list, tokens, total)
    segments = segments_of(pair.source, pair.target, first, end, total)
    source = block_places("source", pair.source, source_list, segments.source)
    target = block_places("target", pair.target, target_list, segments.target)
    return tuple(_piece_runs(piece, source, target, segments.counts) for piece in pair.pieces)


def _few_runs(
    pair: GroupPair, source_list: tuple[int, ...], target_list: tuple[int, ...], first: int, end: int
) -> tuple[FewRuns, ...] | None:
    """The runs of a few blocks of a pair that is page by page; None where there are many, or where anything is wrong.

    What is wrong with a list (too short, a block twice, one that does not exist) is found out and named where long ones are
    checked.
    """
    size = pair.source.block_tokens
    low, high = first // size, -(-end // size)
    count = high - low
    if not 0 < count <= _FEW_BLOCKS:
        return None
    sources, targets = source_list[low:high], target_list[low:high]
    if len(set(sources)) < count or len(set(targets)) < count:
        return None
    # In the order of target memory: a page is one range of bytes, so that pages lie there as their blocks are numbered.
    pages = sorted(zip(targets, sources, range(low, high), strict=True))
    if pages[0][0] < 0 or pages[-1][0] >= pair.target.blocks or min(sources) < 0 or max(sources) >= pair.source.blocks:
        return None
    return tuple([_join_few(piece, pages, (first, end), size) for piece in pair.pieces])


def _join_few(piece: Piece, pages: Sequence[tuple[int, int, int]], tokens: tuple[int, int], size: int) -> FewRuns:
    """The runs of pages (target block, source block, number in the sequence), of which the first and the last may be cut."""
    source_offset, target_offset, token_bytes = piece.first_run
    source_stride, target_stride = piece.source.block_stride, piece.target.block_stride
    first, end = tokens
    page_bytes = size * token_bytes
    joined: FewRuns = []
    begun_of = begun_at = begun_bytes = 0
    for target, source, number in pages:
        of, at, count = source * source_stride + source_offset, target * target_stride + target_offset, page_bytes
        if number * size < first:
            cut = first - number * size
            of += cut * piece.source.token_stride
            at += cut * piece.target.token_stride
            count -= cut * token_bytes
        if (number + 1) * size > end:
            count -= ((number + 1) * size - end) * token_bytes
        if begun_bytes and of == begun_of + begun_bytes and at == begun_at + begun_bytes:
            begun_bytes += count
        else:
            if begun_bytes:
                joined += (begun_of, begun_at, begun_bytes)
            begun_of, begun_at, begun_bytes = of, at, count
    joined += (begun_of, begun_at, begun_bytes)
    return joined


def _nothing(pair: GroupPair) -> tuple[Numbers, ...]:
    return (np.empty((0, 3), np.int64),) * len(pair.pieces)


def _state_runs(pair: GroupPair, source_list: tuple[int, ...], target_list: tuple[int, ...]) -> tuple[Numbers, ...]:
    source, target = state_block("source", pair.source, source_list), state_block("target", pair.target, target_list)
    return tuple(
        piece.runs + np.array([source * piece.source.block_stride, target * piece.target.block_stride, 0], np.int64)
        for piece in pair.pieces
    )


def _piece_runs(piece: Piece, source: Places, target: Places, counts: Numbers) -> LayerRuns:
    """Runs of one layer (and of its inner planes): segments times the runs of a token, in the order of target memory."""
    at = np.empty((len(counts), 3), np.int64)
    for column, (plane, places) in enumerate(((piece.source, source), (piece.target, target))):
        at[:, column] = places.blocks * plane.block_stride + places.tokens * plane.token_stride
        if places.pages.any():
            at[:, column] += places.pages * plane.page_stride
    at[:, 2] = counts
    at = _in_order(at)
    if not piece.joins_tokens:
        if (token_places := _token_places(piece.pattern, at)) is not None:
            return token_places
        at = each_token(at, piece.source.token_stride, piece.target.token_stride)
    runs = sum_runs(piece.runs[None], at[:, None, :2])
    if piece.joins_tokens:
        runs[:, 2] *= np.repeat(at[:, 2], len(piece.runs)) if len(piece.runs) > 1 else at[:, 2]
    return join_runs(_in_order(runs) if len(piece.runs) > 1 else runs)


def _in_order(runs: Numbers) -> Numbers:
    """Sorted by target offset, so that runs that can be joined are consecutive."""
    targets = runs[:, 1]
    if (targets[1:] > targets[:-1]).all():
        return runs
    return runs[np.argsort(targets, kind="stable")]


def _token_places(pattern: TokenPattern | None, at: Numbers) -> TokenPlaces | None:
    """Places in the order of target memory in short form; None where they are few, or where any two runs could be joined."""
    if pattern is None or not len(at):
        return None
    found = TokenPlaces(at, pattern)
    if len(found) <= _FEW_RUNS:
        return None
    first, last = pattern.items[0], pattern.items[-1]
    later, steps = at[1:], at[:-1, 2] - 1
    # Where a place ends on both sides, as seen from where the next one begins.
    source_ends = at[:-1, 0] + steps * pattern.source_step + int(last[0] + last[2] - first[0])
    target_ends = at[:-1, 1] + steps * pattern.target_step + int(last[1] + last[2] - first[1])
    if (later[:, 1] < target_ends).any() and len(pattern.items) > 1:
        return None  # places lie within each other: which runs are neighbours is found by sorting them
    return None if ((later[:, 1] == target_ends) & (later[:, 0] == source_ends)).any() else found


def _strip(piece: Piece, in_layer: LayerRuns, rows: Numbers) -> Strip:
    places, pattern = (in_layer.places, in_layer.pattern) if isinstance(in_layer, TokenPlaces) else (_listed(in_layer), None)
    if piece.slots_in_block and len(rows) > 1:
        return Strip(NO_SLOT, _within_blocks(unroll_places(places, pattern), rows))
    return Strip(rows[:, 0], places, pattern)


def _over_slots(piece: Piece, in_layer: LayerRuns, slots: Slots) -> Runs:
    runs = unroll_places(in_layer.places, in_layer.pattern) if isinstance(in_layer, TokenPlaces) else _listed(in_layer)
    if piece.slots_in_block and len(slots.starts) > 1:
        return _within_blocks(runs, slots.rows).view(np.uint64)
    few: Numbers = runs + slots.rows
    return few.reshape(-1, 3).view(np.uint64)


def _listed(runs: Numbers | FewRuns) -> Numbers:
    return np.array(runs, np.int64).reshape(-1, 3) if isinstance(runs, list) else runs


def _within_blocks(runs: Numbers, rows: Numbers) -> Numbers:
    """Runs of blocks that hold all layers: the layers of a block may be one run."""
    return join_runs(_in_order(sum_runs(runs[:, None], rows.reshape(1, -1, 3))))
