"""From two layouts and two block lists to the runs of a leg.

The part that depends only on the pair of ranks (`Pair`) is worked out once per pair of cards and refuses what does not fit,
naming the field and both values. The part that depends on the request (`plan_runs`) only looks at block lists; it is
vectorised over blocks, planes and layers, and joins neighbours that are neighbours on both sides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import Group, Layout
from kvbaton.errors import Incompatible, RangeError

__all__ = ["BlockRuns", "Pair", "Runs", "block_ids", "pair_layouts", "plan_blocks", "plan_layers", "plan_runs"]

Runs = npt.NDArray[np.uint64]
"""Shape (n, 3): source offset, target offset, bytes; offsets count from the start of each side's region."""

BlockRuns = tuple[npt.NDArray[np.int64], ...]
"""Per group the runs within one plane of one layer, as offsets from where that plane starts."""

_MUST_AGREE = (
    "kind",
    "layers",
    "planes",
    "dtype",
    "element_bytes",
    "head_size",
    "total_heads",
    "head_start",
    "heads",
    "block_tokens",
    "whole_blocks",
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two layouts that fit together; made by `pair_layouts`."""

    source: Layout
    target: Layout


def pair_layouts(source: Layout, target: Layout) -> Pair:
    """Check that a cache in `source` can be copied into `target`; raises Incompatible with the field and both values."""
    if len(source.groups) != len(target.groups):
        raise Incompatible("layout groups", len(target.groups), len(source.groups))
    for index, (ours, theirs) in enumerate(zip(target.groups, source.groups, strict=True)):
        for field in _MUST_AGREE:
            if getattr(ours, field) != getattr(theirs, field):
                raise Incompatible(f"layout group {index} {field}", getattr(ours, field), getattr(theirs, field))
        if not len(ours.layer_offsets) == len(theirs.layer_offsets) == len(ours.layers):
            raise Incompatible(f"layout group {index} layer_offsets", _placed(ours), _placed(theirs))
        if not (ours.is_within(target.region_bytes) and theirs.is_within(source.region_bytes)):
            here, there = _bounds(ours, target), _bounds(theirs, source)
            raise Incompatible(f"layout group {index} bytes within their region", here, there)
    return Pair(source, target)


def _placed(group: Group) -> str:
    return f"{len(group.layer_offsets)} for {len(group.layers)} layers"


def _bounds(group: Group, layout: Layout) -> str:
    return f"up to {group.end} of {layout.region_bytes}"


def plan_runs(
    pair: Pair,
    source_blocks: BlockLists,
    target_blocks: BlockLists,
    first_token: int,
    tokens: int,
    layers: range | None = None,
) -> Runs:
    """Runs that copy tokens `first_token` up to `tokens` of every layer, or of the global `layers` given.

    Raises RangeError for what does not exist.
    """
    return plan_layers(pair, plan_blocks(pair, source_blocks, target_blocks, first_token, tokens), layers)


def plan_blocks(pair: Pair, source_blocks: BlockLists, target_blocks: BlockLists, first_token: int, tokens: int) -> BlockRuns:
    """The part of a plan that is the same for every layer. Raises RangeError for what does not exist."""
    if first_token < 0:
        raise RangeError(f"first_token is {first_token}; it must not be negative")
    groups = len(pair.target.groups)
    for side, lists in (("source", source_blocks), ("target", target_blocks)):
        if len(lists) != groups:
            raise RangeError(f"{side} block lists are for {len(lists)} groups where the layout has {groups}")
    return tuple(
        _block_runs(source, target, source_list, target_list, first_token, tokens)
        for source, target, source_list, target_list in zip(
            pair.source.groups, pair.target.groups, source_blocks, target_blocks, strict=True
        )
    )


def plan_layers(pair: Pair, blocks: BlockRuns, layers: range | None = None) -> Runs:
    """The runs of every layer, or of the global `layers` given, from the part that is the same for all."""
    parts = [
        _repeat_over_layers(source, target, in_block, layers)
        for source, target, in_block in zip(pair.source.groups, pair.target.groups, blocks, strict=True)
    ]
    return np.concatenate(parts) if parts else np.empty((0, 3), np.uint64)


def _block_runs(
    source: Group, target: Group, source_list: tuple[int, ...], target_list: tuple[int, ...], first_token: int, tokens: int
) -> npt.NDArray[np.int64]:
    """Runs within one plane of one layer."""
    if first_token >= tokens:
        return np.empty((0, 3), np.int64)
    size = source.block_tokens
    first_token, tokens = source.reach(first_token, tokens)
    first, last = first_token // size, -(-tokens // size)
    source_ids = block_ids("source", source, source_list, first, last)
    target_ids = block_ids("target", target, target_list, first, last)
    starts = np.arange(first, last, dtype=np.int64) * size
    lows = np.maximum(starts, first_token) - starts
    counts = np.minimum(starts + size, tokens) - starts - lows
    source_at = source_ids * source.block_stride + lows * source.token_stride
    target_at = target_ids * target.block_stride + lows * target.token_stride
    if source.is_token_contiguous and target.is_token_contiguous:
        return _join_neighbours(source_at, target_at, counts * source.token_bytes)
    return _head_runs(source, target, source_at, target_at, counts)


def _head_runs(
    source: Group,
    target: Group,
    source_at: npt.NDArray[np.int64],
    target_at: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Runs where the heads of a token lie apart on one side at least: per head of a block, or per head of a token."""
    if not (source.is_head_contiguous and target.is_head_contiguous):
        owner = np.repeat(np.arange(len(counts)), counts)
        token = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        source_at = source_at[owner] + token * source.token_stride
        target_at = target_at[owner] + token * target.token_stride
        counts = np.ones(len(owner), np.int64)
    head = np.arange(source.heads, dtype=np.int64)
    source_at = (source_at[:, None] + head * source.head_stride).reshape(-1)
    target_at = (target_at[:, None] + head * target.head_stride).reshape(-1)
    return _join_neighbours(source_at, target_at, np.repeat(counts * source.head_bytes, source.heads))


def block_ids(side: str, group: Group, ids: tuple[int, ...], first: int, last: int) -> npt.NDArray[np.int64]:
    """Blocks `first` up to `last` of a block list; raises RangeError for those that do not exist."""
    if len(ids) < last:
        raise RangeError(f"{side} block list has {len(ids)} blocks where {last} are needed")
    chosen = ids[first:last]
    if len(set(chosen)) < len(chosen):
        twice = Counter(chosen).most_common(1)[0][0]
        raise RangeError(f"{side} block {twice} is listed twice; each block holds other tokens")
    try:
        wanted = np.asarray(chosen, dtype=np.int64)
    except OverflowError:
        raise RangeError(f"{side} block {max(ids, key=abs)} is outside 0..{group.blocks - 1}") from None
    bad = wanted[(wanted < 0) | (wanted >= group.blocks)]
    if bad.size:
        raise RangeError(f"{side} block {int(bad[0])} is outside 0..{group.blocks - 1}")
    return wanted


def _join_neighbours(
    source_at: npt.NDArray[np.int64], target_at: npt.NDArray[np.int64], run_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    ends = np.arange(1, len(run_bytes))
    apart = (source_at[ends] != source_at[ends - 1] + run_bytes[ends - 1]) | (
        target_at[ends] != target_at[ends - 1] + run_bytes[ends - 1]
    )
    heads = np.concatenate([[0], ends[apart]])
    return np.stack([source_at[heads], target_at[heads], np.add.reduceat(run_bytes, heads)], axis=1)


def _repeat_over_layers(source: Group, target: Group, in_block: npt.NDArray[np.int64], layers: range | None) -> Runs:
    chosen = [index for index, layer in enumerate(source.layers) if layers is None or layer in layers]
    plane = np.arange(source.planes, dtype=np.int64)
    bases = np.zeros((len(chosen) * source.planes, 1, 3), np.int64)
    for column, group in enumerate((source, target)):
        offsets = np.asarray(group.layer_offsets, np.int64)[chosen]
        bases[:, 0, column] = (offsets[:, None] + plane * group.plane_stride).reshape(-1)
    return (bases + in_block[None]).reshape(-1, 3).astype(np.uint64)
