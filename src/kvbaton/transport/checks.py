"""What `post` checks before it accepts a batch: every run lies inside both regions, and no two target runs overlap.

Runs that are listed one by one are checked one by one (`check_runs`). A plan is checked as it is, at a cost per slot and per
place: the items of a token once, the places against each other, the slots against each other. Offsets add up, so the largest of
each part together are the largest offset of any run: the range check is exact. The overlap check is not: parts that lie within
each other in a way that it does not know are unrolled, and then checked one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.core.strips import Numbers, Plan, Runs, Strip, TokenPattern, unroll, unroll_places
from kvbaton.errors import RangeError
from kvbaton.transport.base import Batch, Direction
from kvbaton.transport.runs import Loops, StripTable, check_runs

__all__ = ["check_batch", "check_plan"]

_SIDES = ("source", "target")
_MOST_PAGE_RUNS = 1 << 16
"""Most runs of one place that are compared with each other before everything is unrolled."""

_TOO_FAR = 1 << 63
_NOWHERE = np.empty(0, np.int64)


def check_batch(batch: Batch, own_bytes: int, peer_bytes: int, loops: Loops | None = None) -> Runs | StripTable:
    """The runs of `batch` as a private copy, without empty ones, in the form that they have. Raises RangeError."""
    sizes = _sizes(batch, own_bytes, peer_bytes)
    return check_plan(batch.runs, *sizes, loops) if isinstance(batch.runs, Plan) else check_runs(batch.runs, *sizes, loops)


def _sizes(batch: Batch, own_bytes: int, peer_bytes: int) -> tuple[int, int]:
    """The bytes of the source region and of the target region, which depend on the direction."""
    return (peer_bytes, own_bytes) if batch.direction is Direction.READ else (own_bytes, peer_bytes)


def check_plan(plan: Plan, source_bytes: int, target_bytes: int, loops: Loops | None = None) -> StripTable:
    """A private copy of `plan` without empty runs; `loops` make it quicker.

    Raises RangeError, naming the strip, when a run leaves the source region or the target region, or when two target runs
    overlap.
    """
    table = StripTable(plan)
    if loops is not None and loops.passes(table, source_bytes, target_bytes):
        return table
    for number, strip in enumerate(table.plan.strips):
        for side, region_bytes in enumerate((source_bytes, target_bytes)):
            _check_reach(number, strip, side, region_bytes)
    own = Plan(tuple(_without_empty(table.plan)))
    total = sum(map(_exact_bytes, own.strips))
    if total > target_bytes:
        raise RangeError(f"target runs overlap: {total} bytes would go to a region of {target_bytes} bytes")
    if not _stands_apart(own):
        check_runs(unroll(own), source_bytes, target_bytes, loops)
    return StripTable(own)


def _check_reach(number: int, strip: Strip, side: int, region_bytes: int) -> None:
    """Raise RangeError unless every run of a strip lies inside a region; sums near 2^63 do not wrap."""
    pattern, name = strip.pattern, f"strip {number}: {_SIDES[side]}"
    places = strip.places if pattern is None else strip.places[strip.places[:, 2] != 0]
    if not len(strip.slots) or not len(places) or (pattern is not None and not len(pattern.items)):
        return
    offsets = {"slot": strip.slots[:, side], "place": places[:, side], "count": places[:, 2]}
    if pattern is not None:
        offsets |= {"item": pattern.items[:, side], "item bytes": pattern.items[:, 2]}
    for part, column in offsets.items():
        low, high = int(column.min()), int(column.max())
        # A count of tokens is no offset; it is limited by what its steps reach, and on the target side by the bytes.
        limit = region_bytes if part != "count" or pattern is None else _TOO_FAR
        if low < 0 or high > limit:
            _refuse(f"{name} {part} {low if low < 0 else high}", _SIDES[side], region_bytes)
    farthest = int(offsets["slot"].max()) + _farthest(places, pattern, side)
    if farthest > region_bytes:
        _refuse(f"{name} offsets up to {farthest}", _SIDES[side], region_bytes)


def _farthest(places: Numbers, pattern: TokenPattern | None, side: int) -> int:
    """Where the runs of a slot end; all numbers are known to be below 2^63."""
    starts, counts = places[:, side].view(np.uint64), places[:, 2].view(np.uint64)
    if pattern is None:
        return int((starts + counts).max())
    step = (pattern.source_step, pattern.target_step)[side]
    most = (int(counts.max()) - 1) * step
    reach = int((pattern.items[:, side].view(np.uint64) + pattern.items[:, 2].view(np.uint64)).max())
    if most >= _TOO_FAR:
        return most
    return int((starts + (counts - np.uint64(1)) * np.uint64(step)).max()) + reach


def _refuse(what: str, side: str, region_bytes: int) -> None:
    raise RangeError(f"{what} lies outside the {side} region of {region_bytes} bytes")


def _without_empty(plan: Plan) -> Iterator[Strip]:
    for strip in plan.strips:
        places, pattern = strip.places[strip.places[:, 2] != 0], strip.pattern
        if pattern is not None:
            pattern = TokenPattern(pattern.items[pattern.items[:, 2] != 0], pattern.source_step, pattern.target_step)
        if len(strip.slots) and len(places) and (pattern is None or len(pattern.items)):
            yield Strip(strip.slots, places, pattern)


def _exact_bytes(strip: Strip) -> int:
    """The bytes of a strip whose counts may be anything."""
    item_bytes = 1 if strip.pattern is None else int(sum(strip.pattern.items[:, 2].tolist()))
    return len(strip.slots) * int(sum(strip.places[:, 2].tolist())) * item_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Boxes:
    """Ranges of target memory."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def are_apart(self) -> bool:
        order = np.argsort(self.starts, kind="stable")
        return bool((self.starts[order][1:] >= self.ends[order][:-1]).all())

    def around(self) -> tuple[int, int]:
        return int(self.starts.min()), int(self.ends.max())


def _stands_apart(plan: Plan) -> bool:
    """Whether it is seen without unrolling that no two target runs overlap; every run lies inside the region."""
    boxes = [_boxes(strip) for strip in plan.strips]
    found = [each for each in boxes if each is not None]
    if len(found) < len(boxes):
        return False
    starts, ends = (np.concatenate([_NOWHERE, *column]) for column in ([b.starts for b in found], [b.ends for b in found]))
    return _Boxes(starts, ends).are_apart()


def _boxes(strip: Strip) -> _Boxes | None:
    """Ranges in which a strip's target runs lie, one or one per slot; None unless its runs are seen not to overlap."""
    starts, counts, slots = strip.places[:, 1], strip.places[:, 2], strip.slots[:, 1]
    if strip.pattern is None:
        places = _Boxes(starts, starts + counts)
    else:
        if int(counts.max()) * len(strip.pattern.items) > _MOST_PAGE_RUNS:
            return None
        page = unroll_places(np.array([[0, 0, int(counts.max())]], np.int64), strip.pattern)
        if not _Boxes(page[:, 1], page[:, 1] + page[:, 2]).are_apart():
            return None
        items = strip.pattern.items
        ends = starts + (counts - 1) * strip.pattern.target_step + int((items[:, 1] + items[:, 2]).max())
        places = _Boxes(starts + int(items[:, 1].min()), ends)
    if places.are_apart():
        low, high = places.around()
        layers = _Boxes(slots + low, slots + high)
        if layers.are_apart():
            return layers
    # The slots of a place lie beside each other, and then come those of the next: layers inside of blocks.
    widest = int((places.ends - places.starts).max())
    within = _Boxes(slots, slots + widest)
    first, last = int(slots.min()), int(slots.max())
    whole = _Boxes(places.starts + first, places.ends + last)
    if within.are_apart() and whole.are_apart():
        low, high = whole.around()
        return _Boxes(np.array([low]), np.array([high]))
    return None
