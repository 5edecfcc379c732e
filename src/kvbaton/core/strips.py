"""Runs in short form: what repeats is written down once.

A hand-off of a long prompt can be millions of runs, and nearly all of it repeats: each layer has the runs of the first one, and
where heads are split, each token those of the token before it. A `Strip` keeps the parts of that product apart: slots (where
layers and planes begin), places (where the request's blocks lie) and, where tokens are runs of their own, the pattern of a
token. A `Plan` is a few strips. It is planned, checked, cut and posted at a cost per block, and unrolled where bytes move.

The order of its runs is: strips, their slots, the places of a slot, the tokens of a place, the items of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "NO_RUNS",
    "NO_SLOT",
    "Numbers",
    "Plan",
    "Runs",
    "Strip",
    "TokenPattern",
    "count_bytes",
    "count_runs",
    "cut_runs",
    "each_token",
    "sum_runs",
    "unroll",
    "unroll_places",
]

Numbers = npt.NDArray[np.int64]

Runs = npt.NDArray[np.uint64]
"""Shape (n, 3): source offset, target offset, bytes; offsets count from the start of each side's region."""

NO_RUNS: Runs = np.empty((0, 3), np.uint64)
NO_SLOT: Numbers = np.zeros((1, 3), np.int64)
"""The slots of a strip whose places are counted from the start of both regions."""

_FEW_SIZES = 64
"""Up to so many sizes are added without NumPy, of which a sum costs as much."""

_TOGETHER = 16
"""Runs that are added as one row of NumPy; measured: rows of 3 numbers are dominated by the cost per row."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPattern:
    """The runs of one token (`items`: source offset, target offset, bytes), and how far the next token lies behind it."""

    items: Numbers
    source_step: int
    target_step: int


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """Every place, at every slot; offsets are added. No array of it may be changed: plans share them.

    `slots` has the shape (n, 3): source offset, target offset, and a column that is not used. `places` has it too: source
    offset, target offset, and a count. Without a pattern the count is bytes, and a place is one run; with a pattern it is
    tokens, and each is as many runs as the pattern has items.
    """

    slots: Numbers
    places: Numbers
    pattern: TokenPattern | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot moves."""
        counted = int(self.places[:, 2].sum())
        return counted if self.pattern is None else counted * int(self.pattern.items[:, 2].sum())

    @property
    def slot_runs(self) -> int:
        """Runs of one slot."""
        if self.pattern is None:
            return len(self.places)
        return int(self.places[:, 2].sum()) * len(self.pattern.items)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The runs of these strips."""

    strips: tuple[Strip, ...]

    @property
    def run_count(self) -> int:
        """How many runs it unrolls to."""
        return sum(len(strip.slots) * strip.slot_runs for strip in self.strips)

    @property
    def wire_bytes(self) -> int:
        """Bytes that it moves."""
        return sum(len(strip.slots) * strip.slot_bytes for strip in self.strips)


def count_runs(runs: Runs | Plan) -> int:
    """How many runs these are."""
    return runs.run_count if isinstance(runs, Plan) else len(runs)


def count_bytes(runs: Runs | Plan) -> int:
    """How many bytes these runs move."""
    if isinstance(runs, Plan):
        return runs.wire_bytes
    sizes = runs[:, 2]
    return sum(sizes.tolist()) if len(sizes) <= _FEW_SIZES else int(sizes.sum())


def unroll(runs: Runs | Plan) -> Runs:
    """All runs of a plan, one by one; runs that are not in short form are returned as they are."""
    if not isinstance(runs, Plan):
        return runs
    parts = [
        _slot_by_slot(unroll_places(strip.places, strip.pattern), strip.slots[:, :2]).view(np.uint64) for strip in runs.strips
    ]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_RUNS


def unroll_places(places: Numbers, pattern: TokenPattern | None) -> Numbers:
    """The runs of one slot, counted from where it begins."""
    if pattern is None:
        return places
    at = each_token(places, pattern.source_step, pattern.target_step)
    return sum_runs(pattern.items[None], at[:, None, :2])


def each_token(places: Numbers, source_step: int, target_step: int) -> Numbers:
    """One row per token of each place, with a count of 1."""
    counts = places[:, 2]
    owner = np.repeat(np.arange(len(counts)), counts)
    token = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = places[owner]
    rows[:, 0] += token * source_step
    rows[:, 1] += token * target_step
    rows[:, 2] = 1
    return rows


def sum_runs(runs: Numbers, offsets: Numbers) -> Numbers:
    """Every run at every pair of offsets, broadcast; column by column, because NumPy is slow on inner axes of length 3."""
    out = np.empty((max(len(runs), len(offsets)), max(runs.shape[1], offsets.shape[1]), 3), np.int64)
    if not (len(runs) and len(offsets)):
        return out[:0].reshape(-1, 3)
    for column in range(2):
        np.add(runs[:, :, column], offsets[:, :, column], out=out[:, :, column])
    out[:, :, 2] = runs[:, :, 2]
    return out.reshape(-1, 3)


def _slot_by_slot(runs: Numbers, slots: Numbers) -> Numbers:
    """Every run at every slot, slot after slot; several runs are added as one long row."""
    width, whole = _TOGETHER * 3, len(runs) // _TOGETHER * _TOGETHER * 3
    rows: Numbers = np.zeros((len(slots), _TOGETHER, 3), np.int64)
    rows[:, :, :2] = slots[:, None]
    rows = rows.reshape(len(slots), width)
    flat, out = runs.reshape(-1), np.empty((len(slots), runs.size), np.int64)
    many = out[:, :whole].reshape(len(slots), whole // width, width)
    np.add(flat[:whole].reshape(whole // width, width), rows[:, None], out=many)
    np.add(flat[whole:], rows[:, : runs.size - whole], out=out[:, whole:])
    return out.reshape(len(slots) * len(runs), 3)


def cut_runs(runs: Runs | Plan, runs_bytes: int, most_bytes: int) -> Iterable[Runs | Plan]:
    """Runs in parts of at most about `most_bytes`, none of them empty; `runs_bytes` is what they move together.

    A part of a plan is a plan: some slots, or some places of one slot. One place is not cut.
    """
    if runs_bytes <= most_bytes:
        return (runs,) if runs_bytes else ()
    if isinstance(runs, Plan):
        return _cut_plan(runs, most_bytes)
    return (part for part in np.split(runs, _cuts(runs[:, 2], most_bytes)) if len(part))


def _cut_plan(plan: Plan, most_bytes: int) -> Iterator[Plan]:
    held: list[Strip] = []
    held_bytes = 0
    for strip in plan.strips:
        for part, part_bytes in _cut_strip(strip, most_bytes):
            if held and held_bytes + part_bytes > most_bytes:
                yield Plan(tuple(held))
                held, held_bytes = [], 0
            held.append(part)
            held_bytes += part_bytes
    if held:
        yield Plan(tuple(held))


def _cut_strip(strip: Strip, most_bytes: int) -> Iterator[tuple[Strip, int]]:
    """Parts of a strip, with their bytes."""
    slot_bytes, slots = strip.slot_bytes, strip.slots
    if slot_bytes <= most_bytes:
        count = most_bytes // slot_bytes if slot_bytes else len(slots)
        for first in range(0, len(slots), count):
            some = slots[first : first + count]
            yield Strip(some, strip.places, strip.pattern), len(some) * slot_bytes
        return
    item_bytes = 1 if strip.pattern is None else int(strip.pattern.items[:, 2].sum())
    # Parts of one size: the last one would be short otherwise, of every slot.
    share = -(-slot_bytes // -(-slot_bytes // most_bytes))
    parts = [part for part in np.split(strip.places, _cuts(strip.places[:, 2] * item_bytes, share)) if len(part)]
    sizes = [int(part[:, 2].sum()) * item_bytes for part in parts]
    for index in range(len(slots)):
        for part, part_bytes in zip(parts, sizes, strict=True):
            yield Strip(slots[index : index + 1], part, strip.pattern), part_bytes


def _cuts(sizes: npt.NDArray[np.int64] | npt.NDArray[np.uint64], most_bytes: int) -> npt.NDArray[np.intp]:
    """Where to cut a list of sizes: a part ends before the first one whose last byte is in the next `most_bytes`."""
    last = np.cumsum(sizes, dtype=np.int64) - 1
    return np.flatnonzero(np.diff(last // most_bytes)) + 1
