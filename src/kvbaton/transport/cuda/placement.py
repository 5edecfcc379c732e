"""Where the bytes of a region lie in this process: from offsets in a region to addresses, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.core.plan import Runs
from kvbaton.errors import RangeError

__all__ = ["Placement", "Segment"]

_BYTES = 2
_LINE = 16


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A part of a region that is one piece of memory here."""

    offset: int
    segment_bytes: int
    address: int

    @property
    def end(self) -> int:
        """First offset behind it."""
        return self.offset + self.segment_bytes


class Placement:
    """The segments of one region, in order of their offsets; `floor` is an address at or below all of them, on 16 bytes."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(sorted(segments))
        self._starts = np.array([segment.offset for segment in self._segments], np.uint64)
        self._ends = np.array([segment.end for segment in self._segments], np.uint64)
        lowest = min(segment.address for segment in self._segments)
        self.floor = lowest - lowest % _LINE
        self.extent = max(segment.address + segment.segment_bytes for segment in self._segments) - self.floor
        shifts = [segment.address - self.floor - segment.offset for segment in self._segments]
        self._shifts = np.array(shifts, np.int64).astype(np.uint64)

    def check(self, runs: Runs, column: int, side: str) -> None:
        """Raise RangeError, naming the run, when one lies where the region holds no memory; `column` 0 is the source's."""
        if len(self._segments) == 1 and not self._segments[0].offset:
            return
        at, ends = runs[:, column], runs[:, column] + runs[:, _BYTES]
        bad = (self._index(at) < 0) | (self._covered_to(at) < ends)
        if (bad & (runs[:, _BYTES] > 0)).any():
            row = int((bad & (runs[:, _BYTES] > 0)).argmax())
            raise RangeError(
                f"run {row}: {side} offset {at[row]} with {runs[row, _BYTES]} bytes lies in a gap of the {side} region, "
                f"which has memory in {len(self._segments)} parts"
            )

    def cut(self, runs: Runs, column: int) -> Runs:
        """The same copies in runs that do not cross from one segment into the next; they must have passed `check`."""
        if len(self._segments) == 1:
            return runs
        pieces = []
        while len(runs):
            room = self._ends[self._index(runs[:, column])] - runs[:, column]
            first = runs.copy()
            first[:, _BYTES] = np.minimum(runs[:, _BYTES], room)
            pieces.append(first)
            crosses = runs[:, _BYTES] > room
            runs = runs[crosses] + room[crosses, None] * np.array([1, 1, 0], np.uint64)
            runs[:, _BYTES] -= room[crosses]
        return np.concatenate(pieces) if pieces else runs

    def locate(self, offsets: Runs) -> Runs:
        """Distances from `floor` to where the bytes at `offsets` lie."""
        if len(self._segments) > 1:
            return np.add(offsets, self._shifts[self._index(offsets)])
        return np.add(offsets, self._shifts) if self._shifts[0] else offsets

    def _index(self, offsets: Runs) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._starts, offsets, side="right") - 1

    def _covered_to(self, offsets: Runs) -> Runs:
        """Up to where memory goes on without a gap from `offsets`; the offset itself where there is none."""
        reach = self._ends.copy()
        for index in range(len(reach) - 2, -1, -1):
            if self._starts[index + 1] == self._ends[index]:
                reach[index] = reach[index + 1]
        return reach[self._index(offsets)]
