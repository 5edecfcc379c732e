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
    """One kernel launch. Offsets and lengths are in units, offsets relative to the floors of the two placements."""

    unit_bytes: int
    piece_bytes: int
    pieces: int
    pieces_per_run: int
    run_bytes: int
    """Length of every run; 0 when `lengths` says it for each."""
    offsets: npt.NDArray[Any]
    """Source and target offset of every run; uint32, or int64 where that is not enough."""
    lengths: npt.NDArray[np.int32]
    """Length of every run where they differ; otherwise empty."""

    @property
    def table_bytes(self) -> int:
        """Size of what the kernel has to be told."""
        return self.offsets.nbytes + self.lengths.nbytes

    @property
    def rows(self) -> int:
        """Pieces side by side in a tile."""
        return max(1, TILE_BYTES // self.piece_bytes) if self.unit_bytes == LINE_BYTES else 8

    @property
    def warps(self) -> int:
        """Groups of 32 threads per program."""
        return 4

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
    columns = (columns if is_uniform else _cut(columns, piece)) >> np.uint64(unit.bit_length() - 1)
    offsets = np.empty((columns.shape[1], 2), np.uint32 if extent // unit < _NARROW else np.int64)
    offsets[:, 0], offsets[:, 1] = columns[0], columns[1]
    own_lengths = columns[2, : 0 if is_uniform else None].astype(np.int32)
    return Launch(unit, piece, len(offsets) * per_run, per_run, first if is_uniform else 0, offsets, own_lengths)


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
