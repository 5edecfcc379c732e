"""From runs to what one kernel launch needs. NumPy alone.

Each program of the kernel copies a *tile*: some rows of one *piece* each, step by step. A piece is a power of two of bytes, so
that every thread of a row moves 16 bytes at a time; a run is one or more pieces, the last of which may be shorter. Runs of one
length (the rule: pages, or slices of pages) need two numbers each, and the kernel works out the pieces; others are cut here,
and need a third. Runs that do not start and end on 16 bytes go into a launch of their own, with the largest unit that fits
them all.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.core.strips import Numbers, Runs
from kvbaton.errors import RangeError

__all__ = ["LINE_BYTES", "Launch", "Placement", "Segment", "TILES", "Tile", "WASTE", "best_piece", "launches_for", "piece_of"]

_BYTES = 2

LINE_BYTES = 16
"""What one thread moves at a time."""


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
        self.floor = lowest - lowest % LINE_BYTES
        self.extent = max(segment.address + segment.segment_bytes for segment in self._segments) - self.floor
        shifts = [segment.address - self.floor - segment.offset for segment in self._segments]
        self._shifts = np.array(shifts, np.int64).astype(np.uint64)
        numbers = [(segment.offset, segment.end, segment.address) for segment in self._segments]
        self._words = (ctypes.c_uint64 * (3 * len(numbers)))(*(number for row in numbers for number in row))
        self._placement = (ctypes.c_uint64 * 3)(ctypes.addressof(self._words), len(numbers), self.floor)
        self.address = ctypes.addressof(self._placement)
        """Where `struct placement` of gpu_strips.c is, for as long as this object lives."""
        self.shift = shifts[0]
        """From an offset in the first segment to its distance from `floor`."""
        self.is_one = len(self._segments) == 1 and not self._segments[0].offset
        """Whether all of the region is one piece of memory."""

    def check(self, runs: Runs, column: int, side: str) -> None:
        """Raise RangeError, naming the run, when one lies where the region holds no memory; `column` 0 is the source's."""
        if self.is_one:
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

    def locate_whole(self, starts: Numbers, low: int, high: int) -> Numbers | None:
        """Distances from `floor` to `starts`; None unless from each on, the bytes from `low` to `high` are one segment."""
        index = self._index((starts + low).view(np.uint64))
        if int(index.min()) < 0 or ((starts + high).view(np.uint64) > self._ends[index]).any():
            return None
        return starts + self._shifts[index].view(np.int64)

    def _index(self, offsets: Runs) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._starts, offsets, side="right") - 1

    def _covered_to(self, offsets: Runs) -> Runs:
        """Up to where memory goes on without a gap from `offsets`; the offset itself where there is none."""
        reach = self._ends.copy()
        for index in range(len(reach) - 2, -1, -1):
            if self._starts[index + 1] == self._ends[index]:
                reach[index] = reach[index + 1]
        return reach[self._index(offsets)]


class Tile(NamedTuple):
    """What one program of the kernel copies: rows of a piece each, so many bytes of each at a time, by so many warps."""

    rows: int
    step_bytes: int
    warps: int


TILES = {
    32 << 10: Tile(1, 4 << 10, 8),
    16 << 10: Tile(1, 4 << 10, 8),
    8 << 10: Tile(1, 4 << 10, 4),
    4 << 10: Tile(2, 4 << 10, 8),
    2 << 10: Tile(4, 2 << 10, 1),
    1 << 10: Tile(4, 1 << 10, 2),
    512: Tile(32, 512, 1),
    256: Tile(32, 256, 1),
    128: Tile(64, 128, 2),
}
"""The best tile for each size of piece, largest first, as measured on an H200 (the kernel reads its table from the host)."""

_BYTE_TILE = Tile(8, 512, 4)
WASTE = 1.07
"""How much more than there is the pieces may cover."""
_HALF_WORD = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch. Offsets and lengths are in units, offsets relative to the floors of the two placements."""

    unit_bytes: int
    piece_bytes: int
    pieces: int
    pieces_per_run: int
    run_bytes: int
    """Length of every run; 0 when `lengths` has it for each."""
    offsets: npt.NDArray[Any]
    """Source and target offset of every run: the halves of a uint64, source in the lower one, or two int64."""
    lengths: npt.NDArray[np.int32]
    """Length of every run where they differ; otherwise empty."""

    @property
    def tables(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """What the kernel reads."""
        return self.offsets, self.lengths

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the kernel is called with behind the addresses."""
        return self.pieces, self.pieces_per_run, self.run_bytes // self.unit_bytes

    @property
    def constants(self) -> tuple[int, ...]:
        """What it is compiled for."""
        unit, tile = self.unit_bytes, self.tile
        is_wide, is_ragged = self.offsets.dtype == np.int64, self.run_bytes == 0
        return unit, self.piece_bytes // unit, tile.step_bytes // unit, tile.rows, is_wide, self.is_even, is_ragged

    @property
    def tile(self) -> Tile:
        """What one program copies."""
        return TILES[self.piece_bytes] if self.unit_bytes == LINE_BYTES else _BYTE_TILE

    @property
    def programs(self) -> int:
        """How many programs there are."""
        return -(-self.pieces // self.tile.rows)

    @property
    def is_even(self) -> bool:
        """Whether every piece is full."""
        return self.run_bytes > 0 and self.run_bytes % self.piece_bytes == 0


def launches_for(runs: Runs, source: Placement, target: Placement) -> list[Launch]:
    """The launches, one as a rule, that make the copies of `runs`, which have no empty ones and lie inside both placements."""
    runs = target.cut(source.cut(runs, 0), 1)
    if not len(runs):
        return []
    columns = _Columns(source.locate(runs[:, 0]), target.locate(runs[:, 1]), np.ascontiguousarray(runs[:, 2]))
    extent = max(source.extent, target.extent)
    unit = columns.unit()
    if unit == LINE_BYTES:
        return [_launch(columns, unit, extent)]
    odd = columns.are_odd()
    if odd.all():
        return [_launch(columns, unit, extent)]
    return [_launch(columns.part(~odd), LINE_BYTES, extent), _launch(columns.part(odd), unit, extent)]


class _Columns(NamedTuple):
    """Runs by column: where they are read, where they are written, how long they are."""

    source: Runs
    target: Runs
    lengths: Runs

    def unit(self) -> int:
        """The largest power of two, up to a line, that divides every number."""
        together = LINE_BYTES
        for column in self:
            together |= int(np.bitwise_or.reduce(column))
        return together & -together

    def are_odd(self) -> npt.NDArray[np.bool_]:
        """Which runs do not lie on lines."""
        bits = (self.source | self.target | self.lengths) & np.uint64(LINE_BYTES - 1)
        return np.asarray(bits != 0, np.bool_)

    def part(self, which: npt.NDArray[np.bool_]) -> _Columns:
        """Some of them."""
        return _Columns(*(column[which] for column in self))

    def cut(self, piece: int) -> _Columns:
        """Cut into pieces, the last one of each run perhaps shorter."""
        counts = -(-self.lengths.astype(np.int64) // piece)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        skip = (within * piece).astype(np.uint64)
        source, target, left = (np.repeat(column, counts) for column in self)
        return _Columns(source + skip, target + skip, np.minimum(left - skip, np.uint64(piece)))


def _launch(columns: _Columns, unit: int, extent: int) -> Launch:
    lengths = columns.lengths
    first = int(lengths[0])
    is_uniform = bool((lengths == lengths[0]).all())
    piece = best_piece(lengths[:1] if is_uniform else lengths) if unit == LINE_BYTES else _BYTE_TILE.step_bytes
    per_run = -(-first // piece) if is_uniform else 1
    if not is_uniform:
        columns = columns.cut(piece)
    offsets = _pack(columns, unit.bit_length() - 1, extent)
    own_lengths = (columns.lengths[: 0 if is_uniform else None] // unit).astype(np.int32)
    return Launch(unit, piece, len(offsets) * per_run, per_run, first if is_uniform else 0, offsets, own_lengths)


def _pack(columns: _Columns, shift: int, extent: int) -> npt.NDArray[Any]:
    """Source and target offset of each run, in units: in one word, or in two where they are too large for half of one."""
    if extent >> shift < _HALF_WORD:
        packed: npt.NDArray[Any] = columns.source >> np.uint64(shift)
        packed |= columns.target << np.uint64(32 - shift)
        return packed
    return np.stack([columns.source >> np.uint64(shift), columns.target >> np.uint64(shift)], axis=1).astype(np.int64)


def best_piece(lengths: Runs) -> int:
    """The largest piece that leaves few threads without work."""
    return piece_of(int(lengths[0])) if len(lengths) == 1 else _best_piece(lengths)


@functools.lru_cache(maxsize=1024)
def piece_of(length: int) -> int:
    """The same for runs of one length."""
    return _best_piece(np.array([length], np.uint64))


def _best_piece(lengths: Runs) -> int:
    total = float(lengths.sum())
    best, least = 0, float("inf")
    for piece in TILES:
        covered = float((-(-lengths.astype(np.int64) // piece)).sum()) * piece
        if covered <= total * WASTE:
            return piece
        if covered < least:
            best, least = piece, covered
    return best
