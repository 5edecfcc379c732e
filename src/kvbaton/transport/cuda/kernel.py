"""The kernel that copies runs of bytes. Imports Triton: import it only where a GPU is used."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_pieces"]


@triton.jit(do_not_specialize=["pieces", "pieces_per_run", "run_units"])
def copy_pieces(
    source,
    target,
    offsets,
    lengths,
    pieces,
    pieces_per_run,
    run_units,
    UNIT: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    RAGGED: tl.constexpr,  # noqa: N803
):
    """Copy `ROWS` pieces of `PIECE` units of `UNIT` bytes per program, `STEP` units of each at a time; addresses are numbers.

    `offsets` holds a source and a target offset per run, two uint32 or with `WIDE` two int64; `RAGGED`: `lengths` holds its
    length too, and it is one piece. Otherwise every run has `run_units`, in `pieces_per_run` pieces. `EVEN`: every piece is
    full. Offsets and lengths are in units, and may lie in memory of the host.
    """
    if UNIT == 16:
        element = tl.int32
    elif UNIT == 8:
        element = tl.int64
    elif UNIT == 4:
        element = tl.int32
    elif UNIT == 2:
        element = tl.int16
    else:
        element = tl.int8
    lanes: tl.constexpr = 4 if UNIT == 16 else 1

    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = piece < pieces
    run = piece // pieces_per_run
    skip = (piece - run * pieces_per_run) * PIECE
    if WIDE:
        entry = offsets.to(tl.pointer_type(tl.int64)) + run * 2
        read_at = tl.load(entry, mask=live, other=0) + skip
        write_at = tl.load(entry + 1, mask=live, other=0) + skip
    else:
        both = tl.load(offsets.to(tl.pointer_type(tl.uint64)) + run, mask=live, other=0)
        read_at = (both & 0xFFFFFFFF).to(tl.int64) + skip
        write_at = (both >> 32).to(tl.int64) + skip

    if RAGGED:
        left = tl.load(lengths.to(tl.pointer_type(tl.int32)) + run, mask=live, other=0) * lanes
    else:
        left = tl.where(live, run_units - skip, 0) * lanes

    reads = tl.multiple_of((source + read_at * UNIT).to(tl.pointer_type(element)), UNIT)[:, None]
    writes = tl.multiple_of((target + write_at * UNIT).to(tl.pointer_type(element)), UNIT)[:, None]
    for step in tl.static_range(PIECE // STEP):
        column = step * STEP * lanes + tl.arange(0, STEP * lanes)[None, :]
        here = live[:, None] & (column >= 0) if EVEN else column < left[:, None]
        tl.store(writes + column, tl.load(reads + column, mask=here), mask=here)
