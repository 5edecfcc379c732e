"""Runs as arrays: the check that every transport makes before it accepts them, and a cursor that cuts them into slices."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from kvbaton.errors import RangeError
from kvbaton.transport.base import Batch, Direction, Runs
from kvbaton.transport.loops import Loops

__all__ = ["MAX_SLICE_RUNS", "RunCursor", "check_batch", "check_offsets", "check_runs"]

MAX_SLICE_RUNS = 1024
"""Most runs in one slice; also what one system call takes on Linux."""

_SOURCE, _TARGET, _BYTES = 0, 1, 2
_MAX_SLOTS_PER_RUN = 256


def check_batch(batch: Batch, own_bytes: int, peer_bytes: int, loops: Loops | None = None) -> Runs:
    """The runs of `batch`, checked as `check_runs` does; whose region is the source depends on the direction."""
    if batch.direction is Direction.READ:
        return check_runs(batch.runs, peer_bytes, own_bytes, loops)
    return check_runs(batch.runs, own_bytes, peer_bytes, loops)


def check_runs(runs: Runs, source_bytes: int, target_bytes: int, loops: Loops | None = None) -> Runs:
    """A private copy of `runs` without the empty ones, each column in one piece; `loops` make it quicker.

    Raises RangeError, naming the run, when one leaves the source region or the target region, or when two target runs overlap.
    """
    if runs.dtype != np.uint64 or runs.ndim != 2 or runs.shape[1] != 3:
        raise RangeError(f"runs must be a uint64 array of shape (n, 3), not {runs.dtype} of shape {runs.shape}")
    if loops is not None and (checked := loops.checked(runs, source_bytes, target_bytes)) is not None:
        return checked
    own = np.array(runs, order="F")
    check_offsets(own[:, _SOURCE], own[:, _BYTES], source_bytes, "source")
    check_offsets(own[:, _TARGET], own[:, _BYTES], target_bytes, "target")
    if not own[:, _BYTES].all():
        own = np.asfortranarray(own[own[:, _BYTES] > 0])
    _check_overlap(own)
    return own


def check_offsets(offsets: Runs, lengths: Runs, region_bytes: int, side: str) -> None:
    """Raise RangeError unless every piece lies inside a region of `region_bytes`; sums near 2^64 do not wrap."""
    limit = np.uint64(region_bytes)
    if not len(lengths) or (lengths.max() <= limit and offsets.max() <= limit and (offsets + lengths).max() <= limit):
        return
    outside = (lengths > limit) | (offsets > limit - np.minimum(lengths, limit))
    if outside.any():
        row = int(outside.argmax())
        raise RangeError(
            f"run {row}: {side} offset {offsets[row]} with {lengths[row]} bytes lies outside the {side} region of "
            f"{region_bytes} bytes"
        )


class RunCursor:
    """A place in a list of runs, counted in bytes; hands out the next runs in slices. `place` is for loops in C."""

    def __init__(self, runs: Runs) -> None:
        self.runs = self._runs = runs
        self.place = np.zeros(2, np.uint64)
        self.total_bytes = int(runs[:, _BYTES].sum())
        self.done_bytes = 0

    @property
    def remaining_bytes(self) -> int:
        """Bytes behind the cursor's place."""
        return self.total_bytes - self.done_bytes

    @functools.cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self._runs[:, _BYTES], dtype=np.int64)

    def peek(self, max_bytes: int, max_runs: int = MAX_SLICE_RUNS) -> Runs:
        """The next runs, cut so that they hold at most `max_bytes` in at most `max_runs` pieces; not to be changed."""
        if not self.remaining_bytes:
            return self._runs[:0]
        if not self.done_bytes and self.total_bytes <= max_bytes and len(self._runs) <= max_runs:
            return self._runs
        stop = min(self.done_bytes + max_bytes, self.total_bytes)
        first = int(np.searchsorted(self._ends, self.done_bytes, side="right"))
        last = min(int(np.searchsorted(self._ends, stop)), first + max_runs - 1)
        window = self._runs[first : last + 1].copy()
        skip = np.uint64(self.done_bytes - int(self._ends[first]) + int(self._runs[first, _BYTES]))
        window[0] += np.array([skip, skip, 0], np.uint64)
        window[0, _BYTES] -= skip
        window[-1, _BYTES] -= np.uint64(max(int(self._ends[last]) - stop, 0))
        return window

    def advance(self, count: int) -> None:
        """Move the place on by `count` bytes."""
        self.done_bytes += count


def _is_grid(starts: Runs, lengths: Runs) -> bool:
    """Whether all are pages of one size, each in a slot of its own: then nothing overlaps. Quick, where sorting is not."""
    length = lengths[0]
    if not (lengths == length).all():
        return False
    slots, rests = np.divmod(starts, length)
    slot_count = int(slots.max()) + 1
    if slot_count > _MAX_SLOTS_PER_RUN * len(starts) or rests.min() != rests.max():
        return False
    taken = np.zeros(slot_count, np.bool_)
    taken[slots.view(np.int64)] = True  # unsigned indices are twenty times slower
    return int(np.count_nonzero(taken)) == len(starts)


def _check_overlap(runs: Runs) -> None:
    """Raise RangeError when two target runs overlap. Sorting starts and ends apart is quick, and shows whether any two do."""
    starts = runs[:, _TARGET]
    ends = starts + runs[:, _BYTES]
    in_order = bool((starts[1:] >= ends[:-1]).all())
    if in_order or _is_grid(starts, runs[:, _BYTES]) or bool((np.sort(starts)[1:] >= np.sort(ends)[:-1]).all()):
        return
    order = np.argsort(starts)
    at = int((starts[order][1:] < ends[order][:-1]).argmax())
    lower, upper = runs[order[at]], runs[order[at + 1]]
    raise RangeError(
        f"target runs overlap: offset {lower[_TARGET]} with {lower[_BYTES]} bytes and offset {upper[_TARGET]} with "
        f"{upper[_BYTES]} bytes"
    )
