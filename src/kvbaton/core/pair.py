"""What two ranks have in common: the part of a plan that depends on their layouts alone, computed once and cached.

Source and target slices are intersected plane by plane: layers, heads, channels. The result is a `Piece`: the runs of one
token (or of all tokens of a page, where those are contiguous) and the offsets of its layers. The block lists of a request only
multiply it. Layouts that do not fit are refused here, with the field and both values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvbaton.core.layout import Group, HeadRange, Layout, Plane
from kvbaton.core.strips import Numbers, TokenPattern, unroll_places
from kvbaton.errors import Incompatible

__all__ = [
    "GroupPair",
    "Pair",
    "Piece",
    "PlaneShare",
    "Share",
    "Slots",
    "channel_offsets",
    "check_groups",
    "common_heads",
    "join_runs",
    "local_head",
    "pair_layouts",
]

_GROUP_FIELDS = ("kind", "window", "whole_blocks")
_PLANE_FIELDS = ("name", "dtype", "element_bytes", "total_heads", "head_size")
_WHOLE_FIELDS = ("block_tokens", "page_tokens", "tokens")
_WHOLE_PLANE_FIELDS = ("channels", "page_stride", "token_stride")
_INNER_HEAD_FIELDS = ("heads", "head_stride")
_MOST_RANGES = 1024
# A peer's card can ask for any number of channels; beyond this one token alone would take megabytes of runs to plan.
_MOST_RUNS = 1 << 20
_MOST_PAGE_RUNS = 1 << 16
"""Runs of a page that are compared with each other when two layouts are paired."""


@dataclass(frozen=True, slots=True)
class PlaneShare:
    """What a leg moves of one plane of one group: these heads of these layers."""

    group: int
    plane: int
    layers: frozenset[int]
    heads: tuple[HeadRange, ...]


Share = tuple[PlaneShare, ...]
"""The part of a hand-off that one leg moves."""


class Slots(NamedTuple):
    """Where layers and outer planes start: as runs without bytes, of shape (slots, 1, 3), and as numbers of Python."""

    rows: Numbers
    starts: list[tuple[int, int]]
    """At the source and at the target."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Planes of one group with the same strides and the same share on both sides.

    `runs` (source offset, target offset, bytes) are those of one token, sorted by target offset. With `joins_tokens` each of
    them continues through the tokens of a page. `slots` (source offset, target offset) are added for each layer and outer
    plane; `slot_layers` is the layer of each slot. With `slots_in_block`, all layers of a block lie inside the block.
    `pattern` is that of one token, where the runs of a page's tokens are never joined.
    """

    source: Plane
    target: Plane
    runs: Numbers
    joins_tokens: bool
    slots: Numbers
    slot_layers: Numbers
    slots_in_block: bool
    pattern: TokenPattern | None = None
    first_run: tuple[int, int, int] = dataclasses.field(default=(0, 0, 0), init=False, repr=False, compare=False)
    """The first of `runs`, as numbers of Python."""
    _slots: dict[tuple[int, int] | None, Slots] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.runs):
            object.__setattr__(self, "first_run", tuple(self.runs[0].tolist()))

    def slots_of(self, layers: range | None) -> Slots:
        """The slots of some global layers, or of all. Not to be changed.

        Kept: an engine announces the same ranges of layers again and again.
        """
        asked = None if layers is None else (layers.start, layers.stop)
        found = self._slots.get(asked)
        if found is None:
            slots = self.slots
            if layers is not None:
                slots = slots[(self.slot_layers >= layers.start) & (self.slot_layers < layers.stop)]
            rows = np.zeros((len(slots), 1, 3), np.int64)
            rows[:, 0, :2] = slots
            if len(self._slots) >= _MOST_RANGES:
                self._slots.clear()  # a message may name any layers
            found = self._slots[asked] = Slots(rows, [(source, target) for source, target in slots.tolist()])
        return found


@dataclass(frozen=True, slots=True)
class GroupPair:
    """One group of both layouts, and what of it a leg moves."""

    source: Group
    target: Group
    pieces: tuple[Piece, ...]
    is_page_by_page: bool = False
    """Whether a block of the one side is a block of the other, and one run in each piece. Nearly always, with equal TP."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two layouts that fit together, intersected; made by `pair_layouts`."""

    source: Layout
    target: Layout
    groups: tuple[GroupPair, ...]


def pair_layouts(source: Layout, target: Layout, share: Share | None = None) -> Pair:
    """Intersect two layouts, or the `share` of a leg between them; raises Incompatible with the field and both values.

    Cached: most peers have the same layouts as an earlier peer.
    """
    return _pair_layouts(source, target, share)


@lru_cache(maxsize=256)
def _pair_layouts(source: Layout, target: Layout, share: Share | None) -> Pair:
    check_groups(source, target)
    for layout, mine in ((target, True), (source, False)):
        if problem := layout.problem():
            raise Incompatible("layout", problem if mine else "fine", "fine" if mine else problem)
    groups = []
    for index, (theirs, ours) in enumerate(zip(source.groups, target.groups, strict=True)):
        shares = _everything(index, theirs, ours) if share is None else [each for each in share if each.group == index]
        pieces = tuple(_pieces(index, theirs, ours, shares))
        groups.append(GroupPair(theirs, ours, pieces, _is_page_by_page(theirs, ours, pieces)))
    return Pair(source, target, tuple(groups))


def _is_page_by_page(source: Group, target: Group, pieces: Sequence[Piece]) -> bool:
    return (
        source.block_tokens == target.block_tokens > 0
        and all(group.page_tokens == group.block_tokens and group.tokens.size == 1 for group in (source, target))
        and all(piece.joins_tokens and len(piece.runs) == 1 for piece in pieces)
    )


def check_groups(source: Layout, target: Layout) -> None:
    """Raise Incompatible for layouts of different models: groups, kinds, planes, types and sizes."""
    if len(source.groups) != len(target.groups):
        raise Incompatible("layout groups", _kinds(target), _kinds(source))
    for index, (theirs, ours) in enumerate(zip(source.groups, target.groups, strict=True)):
        _check_group(index, theirs, ours)


def _kinds(layout: Layout) -> str:
    return f"{len(layout.groups)} ({', '.join(group.kind for group in layout.groups)})"


def _check_group(index: int, source: Group, target: Group) -> None:
    _check_fields(f"layout group {index}", source, target, _GROUP_FIELDS)
    where = f"layout group {index} ({target.kind})"
    if source.is_state != target.is_state:
        raise Incompatible(f"{where} block_tokens", target.block_tokens, source.block_tokens)
    if target.moves_pages:
        # The first block of a window is moved whole, and a source with smaller blocks may not have all of it.
        _check_fields(where, source, target, ("block_tokens",))
    if len(source.planes) != len(target.planes):
        raise Incompatible(f"{where} planes", _plane_names(target), _plane_names(source))
    for theirs, ours in zip(source.planes, target.planes, strict=True):
        _check_fields(f"{where} plane {ours.name}", theirs, ours, _PLANE_FIELDS)
    if target.whole_blocks:
        _check_fields(f"{where}, whose blocks are moved whole,", source, target, _WHOLE_FIELDS)
        for theirs, ours in zip(source.planes, target.planes, strict=True):
            if common_heads(theirs.heads, ours.heads):
                is_by_head = source.has_outer_heads(theirs) and target.has_outer_heads(ours)
                fields = _WHOLE_PLANE_FIELDS if is_by_head else (*_WHOLE_PLANE_FIELDS, *_INNER_HEAD_FIELDS)
                _check_fields(f"{where} plane {ours.name}, moved whole,", theirs, ours, fields)


def _plane_names(group: Group) -> str:
    return ", ".join(plane.name for plane in group.planes)


def _check_fields(where: str, source: Group | Plane, target: Group | Plane, fields: Iterable[str]) -> None:
    for field in fields:
        ours, theirs = getattr(target, field), getattr(source, field)
        if ours != theirs:
            raise Incompatible(f"{where} {field}", ours, theirs)


def _everything(index: int, source: Group, target: Group) -> list[PlaneShare]:
    layers = frozenset(source.layers) & frozenset(target.layers)
    return [
        PlaneShare(index, number, layers, common_heads(theirs.heads, ours.heads))
        for number, (theirs, ours) in enumerate(zip(source.planes, target.planes, strict=True))
    ]


def common_heads(some: Sequence[HeadRange], others: Sequence[HeadRange]) -> tuple[HeadRange, ...]:
    """The heads that both hold, in ranges that neither side splits."""
    both = [(max(one.start, two.start), min(one.end, two.end)) for one in some for two in others]
    return tuple(HeadRange(start, end - start) for start, end in sorted(both) if start < end)


def _pieces(index: int, source: Group, target: Group, shares: Sequence[PlaneShare]) -> Iterable[Piece]:
    """One piece per set of planes with the same strides on both sides and the same share: keys and values, nearly always.

    Planes in one piece are planned once, and neighbouring ones are joined into longer runs.
    """
    left = [share for share in shares if share.layers and share.heads]
    while left:
        first = left[0]
        alike = [share for share in left if _is_alike(source, target, first, share)]
        left = [share for share in left if share not in alike]
        yield _piece(index, source, target, alike)


def _is_alike(source: Group, target: Group, one: PlaneShare, other: PlaneShare) -> bool:
    if one is other:
        return True
    if (one.layers, one.heads) != (other.layers, other.heads) or one.plane == other.plane:
        return False
    return all(group.planes[one.plane].alike(group.planes[other.plane]) for group in (source, target))


def _piece(index: int, source: Group, target: Group, shares: Sequence[PlaneShare]) -> Piece:
    layers = sorted(shares[0].layers)
    theirs, ours = source.planes[shares[0].plane], target.planes[shares[0].plane]
    places = np.stack([_layer_places(group, shares, layers) for group in (source, target)], axis=2)
    steps = places[0] - places[0, 0]
    is_inner = len(steps) == 1 or _in_block((theirs, ours), places - places[:, :1], steps)
    runs = _token_runs(index, theirs, ours, shares[0].heads, steps if is_inner else steps[:1])
    slots = places[:, :1] if is_inner else places
    slot_layers = np.repeat(np.asarray(layers, np.int64), slots.shape[1])
    slots, slot_layers = _without_aliases(index, slots.reshape(-1, 2), slot_layers)
    joins = bool((runs[:, 2] == ours.token_stride).all()) and theirs.token_stride == ours.token_stride
    extent = np.concatenate([runs[:, :2].min(axis=0), (runs[:, :2] + runs[:, 2:]).max(axis=0)])
    in_block = _slots_in_block((source, target), (theirs, ours), slots, extent)
    # Planes may lie in memory in another order than in the layout: no offset of a run may be negative, as `Strip` adds them.
    slots = slots + extent[:2]
    runs = runs - np.array([*extent[:2], 0], np.int64)
    pattern = None if joins else _token_pattern(source, target, theirs, ours, runs)
    return Piece(theirs, ours, runs, joins, slots, slot_layers, in_block, pattern)


def _token_pattern(source: Group, target: Group, theirs: Plane, ours: Plane, runs: Numbers) -> TokenPattern | None:
    """The pattern of a token; None where runs of two tokens of a page can be neighbours on both sides, or for a state.

    A single run per token cannot: it would continue through the page.
    """
    pattern = TokenPattern(runs, theirs.token_stride, ours.token_stride)
    tokens = min(source.page_tokens, target.page_tokens)
    if source.is_state:
        return None
    if len(runs) > 1:
        if len(runs) * tokens > _MOST_PAGE_RUNS:
            return None
        page = unroll_places(np.array([[0, 0, tokens]], np.int64), pattern)
        if len(join_runs(page[np.argsort(page[:, 1], kind="stable")])) < len(page):
            return None
    return pattern


def _layer_places(group: Group, shares: Sequence[PlaneShare], layers: Sequence[int]) -> Numbers:
    """Offsets, one row per layer and one column per plane."""
    at = {layer: place for place, layer in enumerate(group.layers)}
    chosen = [at[layer] for layer in layers]
    planes = [np.asarray(group.planes[share.plane].layer_offsets, np.int64)[chosen] for share in shares]
    return np.stack(planes, axis=1)


def _in_block(planes: tuple[Plane, Plane], steps_by_layer: Numbers, steps: Numbers) -> bool:
    """Whether the planes of a block lie within it on both sides, at the same distances in every layer.

    Then K and V of a token are runs of one block and can become one run; else each plane is a slot of its own.
    """
    if not (steps_by_layer == steps[None]).all():
        return False
    spread = steps.max(axis=0) - steps.min(axis=0)
    return all(int(width) < plane.block_stride for width, plane in zip(spread, planes, strict=True))


def _slots_in_block(groups: tuple[Group, Group], planes: tuple[Plane, Plane], slots: Numbers, extent: Numbers) -> bool:
    """Whether all layers of a block lie within it on both sides (cross-layer blocks): layers are then joined before blocks."""
    if len(slots) < 2:
        return False
    spread = slots.max(axis=0) - slots.min(axis=0)
    for side, (group, plane) in enumerate(zip(groups, planes, strict=True)):
        tokens = 0 if group.is_state else (group.page_tokens - 1) * plane.token_stride
        width = int(spread[side] + extent[side + 2] - extent[side]) + tokens
        if width > plane.block_stride:
            return False
    return True


def _without_aliases(index: int, slots: Numbers, layers: Numbers) -> tuple[Numbers, Numbers]:
    """Move layers that share their memory once; raises Incompatible where only the target's do."""
    _, first, group = np.unique(slots[:, 1], return_index=True, return_inverse=True)
    if len(first) == len(slots):
        return slots, layers
    kept = first[group.reshape(-1)]
    differ = np.flatnonzero(slots[kept, 0] != slots[:, 0])
    if len(differ):
        one, two = int(layers[kept[differ[0]]]), int(layers[differ[0]])
        raise Incompatible(f"layout group {index} memory of layers {one} and {two}", "shared", "apart")
    chosen = np.sort(first)
    return slots[chosen], layers[chosen]


def _token_runs(index: int, source: Plane, target: Plane, heads: Sequence[HeadRange], steps: Numbers) -> Numbers:
    """Runs (source offset, target offset, bytes) of one token: planes at `steps`, heads and channels; fewest, by target."""
    runs = _channel_runs(index, source, target)
    places = _head_places(source, target, heads, runs)
    for side in (places, np.concatenate([steps, np.zeros((len(steps), 1), np.int64)], axis=1)):
        if len(side) * len(runs) > _MOST_RUNS:
            raise Incompatible(f"layout group {index} runs per token", f"at most {_MOST_RUNS}", len(side) * len(runs))
        added = side[:, None] + runs[None]
        added[:, :, 2] = np.maximum(side[:, None, 2], runs[None, :, 2])
        runs = added.reshape(-1, 3)
    return join_runs(runs[np.argsort(runs[:, 1], kind="stable")])


def _channel_runs(index: int, source: Plane, target: Plane) -> Numbers:
    if source.is_channel_contiguous and target.is_channel_contiguous:
        return np.array([[0, 0, source.head_bytes]], np.int64)
    if source.head_size > _MOST_RUNS:
        raise Incompatible(f"layout group {index} runs per token", f"at most {_MOST_RUNS}", source.head_size)
    columns = [channel_offsets(plane) for plane in (source, target)]
    runs = np.stack([*columns, np.full(source.head_size, source.element_bytes, np.int64)], axis=1)
    return join_runs(runs[np.argsort(runs[:, 1], kind="stable")])


def channel_offsets(plane: Plane) -> Numbers:
    """The offsets of the elements of a head from its first byte."""
    offsets = np.zeros(1, np.int64)
    for axis in plane.channels:
        offsets = (offsets[:, None] + np.arange(axis.count, dtype=np.int64) * axis.stride).reshape(-1)
    return offsets


def _head_places(source: Plane, target: Plane, heads: Sequence[HeadRange], channels: Numbers) -> Numbers:
    """(source offset, target offset, bytes) of the heads; the bytes are 0 unless whole heads are contiguous."""
    is_packed = len(channels) == 1 and source.head_stride == target.head_stride == source.head_bytes
    parts = []
    for each in common_heads(common_heads(source.heads, target.heads), heads):
        first = np.array([local_head(source, each.start), local_head(target, each.start)], np.int64)
        strides = np.array([source.head_stride, target.head_stride], np.int64)
        if is_packed:
            parts.append(np.array([[*(first * strides), each.count * source.head_bytes]], np.int64))
        else:
            # One more than allowed is enough for the caller to refuse; a count from a peer's card may be 2^62.
            count = np.arange(min(each.count, _MOST_RUNS + 1), dtype=np.int64)[:, None]
            parts.append(np.concatenate([(first + count) * strides, np.zeros_like(count)], axis=1))
    return np.concatenate(parts)


def local_head(plane: Plane, head: int) -> int:
    """The position of one of the model's heads among those that this rank holds."""
    before = 0
    for each in plane.heads:
        if each.start <= head < each.end:
            return before + head - each.start
        before += each.count
    raise AssertionError(f"head {head} is not in {plane.heads}")


def join_runs(runs: Numbers) -> Numbers:
    """Join consecutive runs that are contiguous on both sides."""
    if len(runs) < 2:
        return runs
    sources, targets, sizes = runs.T
    apart = sources[1:] - sources[:-1] != sizes[:-1]
    apart |= targets[1:] - targets[:-1] != sizes[:-1]
    firsts = np.flatnonzero(apart) + 1
    if len(firsts) == len(runs) - 1:
        return runs
    firsts = np.concatenate([[0], firsts])
    return np.concatenate([runs[firsts, :2], np.add.reduceat(runs[:, 2], firsts)[:, None]], axis=1)
