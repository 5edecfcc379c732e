"""Plans on a GPU: one launch per strip, whose kernel works out the runs from slots, places and the pattern of a token.

What the host does costs per slot and per place, not per run, and the table is as short. A strip goes this way when its numbers
are whole lines and what it reaches from a slot lies in one piece of memory on either side: layers are tensors of their own, and
a slot is where a layer begins. Other plans are unrolled, and copied as runs (`launch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbaton.core.strips import Numbers, Plan, Strip, TokenPattern
from kvbaton.transport.cuda.launch import LINE_BYTES, TILES, WASTE, Placement, Tile, best_piece, piece_of

__all__ = ["StripLaunch", "strip_launches"]

_FEW_TOKENS = 16
"""Places of uneven counts are cut to so many tokens, where the kernel would have too many programs without work."""

_MOST_PIECES = 2**31 - 1
_MOST_WASTE = 8
_NO_ITEMS: Numbers = np.empty((0, 3), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StripLaunch:
    """One launch over a strip. Slots have the distances from the floors of the two placements; the rest is as in the strip."""

    piece_bytes: int
    pieces: int
    tokens: int
    """Most tokens of a place; 1 where places have bytes."""
    has_tokens: bool
    pieces_per_item: int
    is_even: bool
    """Whether every run has `run_bytes`, and its pieces are full."""
    run_bytes: int
    steps: tuple[int, int]
    slots: Numbers
    """Source and target offset; that of a token's only item is added."""
    places: Numbers
    items: Numbers
    """Empty where a token is one item."""

    @property
    def tile(self) -> Tile:
        """What one program copies."""
        return TILES[self.piece_bytes]

    @property
    def programs(self) -> int:
        """How many programs there are."""
        return -(-self.pieces // self.tile.rows)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the kernel is called with behind the addresses."""
        counts = (self.pieces, len(self.places), self.tokens, max(1, len(self.items)), self.pieces_per_item)
        return *counts, *self.steps, self.run_bytes

    @property
    def constants(self) -> tuple[int, ...]:
        """What it is compiled for."""
        tile = self.tile
        return self.piece_bytes, tile.step_bytes, tile.rows, self.has_tokens, len(self.items) > 0, self.is_even

    @property
    def tables(self) -> tuple[Numbers, Numbers, Numbers]:
        """What the kernel reads."""
        return self.slots, self.places, self.items


def strip_launches(plan: Plan, source: Placement, target: Placement) -> list[StripLaunch] | None:
    """The launches that copy a plan, which was checked and has no empty runs; None where it has to be unrolled."""
    launches = []
    for strip in plan.strips:
        if not len(strip.slots) or not len(strip.places):
            continue
        slots = _placed(strip, source, target)
        if slots is None or not _are_lines(strip, slots):
            return None
        launch = _of_tokens(slots, strip.places, strip.pattern) if strip.pattern else _of_places(slots, strip.places)
        if launch.pieces > _MOST_PIECES or _is_idle(launch):
            return None
        launches.append(launch)
    return launches


def _of_tokens(slots: Numbers, places: Numbers, pattern: TokenPattern) -> StripLaunch:
    items, steps = pattern.items, (pattern.source_step, pattern.target_step)
    lengths = items[:, 2].view(np.uint64)
    longest, is_single = int(lengths.max()), len(items) == 1
    is_uniform = is_single or int(lengths.min()) == longest
    piece = piece_of(longest) if is_uniform else best_piece(lengths)
    counts = places[:, 2]
    tokens = int(counts.max())
    if tokens > _FEW_TOKENS and tokens * len(places) > WASTE * int(counts.sum()):
        places, tokens = _cut(places, _FEW_TOKENS, steps), _FEW_TOKENS
    per_item = -(-longest // piece)
    pieces = len(slots) * len(places) * tokens * len(items) * per_item
    is_even = is_uniform and longest % piece == 0
    if is_single:
        slots, items = slots + items[0, :2], items[:0]
    return StripLaunch(piece, pieces, tokens, True, per_item, is_even, longest, steps, slots, places, items)


def _of_places(slots: Numbers, places: Numbers) -> StripLaunch:
    counts = places[:, 2]
    most, total = int(counts.max()), int(counts.sum())
    is_uniform = most * len(counts) == total
    piece = piece_of(most) if is_uniform else best_piece(counts.view(np.uint64))
    per_place = -(-most // piece)
    if not is_uniform and per_place * piece * len(counts) > WASTE * total:
        places, per_place = _cut(places, piece, (1, 1)), 1
    pieces = len(slots) * len(places) * per_place
    is_even = is_uniform and most % piece == 0
    return StripLaunch(piece, pieces, 1, False, per_place, is_even, most, (0, 0), slots, places, _NO_ITEMS)


def _is_idle(launch: StripLaunch) -> bool:
    """Whether most threads would have nothing to do: items of very different lengths."""
    covered = launch.pieces_per_item * launch.piece_bytes * len(launch.items)
    return covered > _MOST_WASTE * int(launch.items[:, 2].sum()) and len(launch.items) > 0


def _placed(strip: Strip, source: Placement, target: Placement) -> Numbers | None:
    """The slots, from the floors of both placements; None when what one reaches is not one piece of memory."""
    slots = np.empty((len(strip.slots), 2), np.int64)
    for side, placement in enumerate((source, target)):
        starts = strip.slots[:, side]
        moved = starts + placement.shift if placement.is_one else placement.locate_whole(starts, *_reach(strip, side))
        if moved is None:
            return None
        slots[:, side] = moved
    return slots


def _reach(strip: Strip, side: int) -> tuple[int, int]:
    """The first byte that a slot reaches, and the one behind the last."""
    starts, counts = strip.places[:, side], strip.places[:, 2]
    if strip.pattern is None:
        return int(starts.min()), int((starts + counts).max())
    items, step = strip.pattern.items, (strip.pattern.source_step, strip.pattern.target_step)[side]
    high = int((starts + (counts - 1) * step).max()) + int((items[:, side] + items[:, 2]).max())
    return int(starts.min()) + int(items[:, side].min()), high


def _are_lines(strip: Strip, slots: Numbers) -> bool:
    """Whether every run starts and ends on a line."""
    places, pattern = strip.places, strip.pattern
    bits = int(np.bitwise_or.reduce(places[:, 0] | places[:, 1])) | int(np.bitwise_or.reduce(slots, axis=None))
    if pattern is None:
        bits |= int(np.bitwise_or.reduce(places[:, 2]))
    else:
        bits |= int(np.bitwise_or.reduce(pattern.items, axis=None)) | pattern.source_step | pattern.target_step
    return bits % LINE_BYTES == 0


def _cut(places: Numbers, most: int, steps: tuple[int, int]) -> Numbers:
    """Places of at most `most` each; a step is how far the source and the target of the next one of a count lie."""
    counts = places[:, 2]
    parts = -(-counts // most)
    skip = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    rows = np.repeat(places, parts, axis=0)
    rows[:, 0] += skip * steps[0]
    rows[:, 1] += skip * steps[1]
    rows[:, 2] = np.minimum(rows[:, 2] - skip, most)
    return rows
