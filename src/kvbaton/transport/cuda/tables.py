"""From runs to what one kernel launch needs: a table of offsets in as few bytes as possible, and how to cut runs into pieces.

Each program of the kernel copies a *tile*: some rows of one *piece* each. A piece is a power of two of bytes, so that every
thread of a row moves 16 bytes at a time; a run is one or more pieces, the last of which may be shorter. Runs of one length
(the rule: pages, or slices of pages) need two numbers each, and the kernel works out the pieces; others are cut here, and
need a third.

Runs that do not start and end on 16 bytes go into a launch of their own, with the largest unit that fits them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.core.plan import Runs
from kvbaton.transport.cuda.placement import Placement

__all__ = ["LINE_BYTES", "TILE_BYTES", "Launch", "launches_for"]

LINE_BYTES = 16
"""What one thread moves at a time."""

TILE_BYTES = 16 << 10
"""What one program of the kernel copies."""

_PIECES = (16 << 10, 8 << 10, 4 << 10, 2 << 10, 1 << 10, 512, 256, 128)
_WASTE = 1.07
_BYTE_PIECE = 512
_NARROW = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch. Offsets and lengths in `table` are in units, relative to the floors of the two placements."""

    unit_bytes: int
    piece_bytes: int
    pieces: int
    pieces_per_run: int
    run_bytes: int
    """Length of every run; 0 when the third row of the table says it for each."""
    table: npt.NDArray[Any]
    """Rows: source offsets, target offsets and, for runs of different lengths, lengths; uint32, or int64 where needed."""

    @property
    def rows(self) -> int:
        """Pieces side by side in a tile."""
        return max(1, TILE_BYTES // self.piece_bytes) if self.unit_bytes == LINE_BYTES else 8

    @property
    def is_even(self) -> bool:
        """Whether every piece is full."""
        return self.run_bytes > 0 and self.run_bytes % self.piece_bytes == 0


def launches_for(runs: Runs, source: Placement, target: Placement) -> list[Launch]:
    """The launches, one as a rule, that make the copies of `runs`, which have no empty ones and lie inside both placements."""
    runs = target.cut(source.cut(runs, 0), 1)
    if not len(runs):
        return []
    columns = np.stack([source.locate(runs[:, 0]), target.locate(runs[:, 1]), runs[:, 2]])
    bits = columns[0] | columns[1] | columns[2]
    odd = (bits & np.uint64(LINE_BYTES - 1)) != 0
    extent = max(source.extent, target.extent)
    if not odd.any():
        return [_launch(columns, LINE_BYTES, extent)]
    if odd.all():
        return [_launch(columns, _unit(bits), extent)]
    return [_launch(columns[:, ~odd], LINE_BYTES, extent), _launch(columns[:, odd], _unit(bits[odd]), extent)]


def _unit(bits: Runs) -> int:
    """The largest power of two that divides all these numbers."""
    together = int(np.bitwise_or.reduce(bits))
    return min(together & -together, LINE_BYTES)


def _launch(columns: Runs, unit: int, extent: int) -> Launch:
    lengths = columns[2]
    first = int(lengths[0])
    is_uniform = bool((lengths == lengths[0]).all())
    piece = _piece(lengths[:1] if is_uniform else lengths) if unit == LINE_BYTES else _BYTE_PIECE
    per_run = -(-first // piece) if is_uniform else 1
    columns = columns[:2] if is_uniform else _cut(columns, piece)
    shift = np.uint64(unit.bit_length() - 1)
    table = (columns >> shift).astype(np.uint32 if extent // unit < _NARROW else np.int64)
    return Launch(unit, piece, table.shape[1] * per_run, per_run, first if is_uniform else 0, table)


def _piece(lengths: Runs) -> int:
    """The largest piece that leaves few threads without work."""
    total = float(lengths.sum())
    best, least = _PIECES[-1], float("inf")
    for piece in _PIECES:
        covered = float((-(-lengths.astype(np.int64) // piece)).sum()) * piece
        if covered <= total * _WASTE:
            return piece
        if covered < least:
            best, least = piece, covered
    return best


def _cut(columns: Runs, piece: int) -> Runs:
    """Runs cut into pieces, the last one of each perhaps shorter."""
    lengths = columns[2].astype(np.int64)
    counts = -(-lengths // piece)
    cut = np.repeat(columns, counts, axis=1)
    within = np.arange(cut.shape[1]) - np.repeat(np.cumsum(counts) - counts, counts)
    skip = (within * piece).astype(np.uint64)
    cut[:2] += skip
    cut[2] = np.minimum(cut[2] - skip, np.uint64(piece))
    return cut
