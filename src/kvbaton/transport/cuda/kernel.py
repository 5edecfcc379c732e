"""The kernels that copy runs of bytes, and the runs of a strip. Imports Triton: import it only where a GPU is used."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_pieces", "copy_strip"]


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


@triton.jit(
    do_not_specialize=["pieces", "places", "tokens", "items", "pieces_per_item", "source_step", "target_step", "run_bytes"]
)
def copy_strip(
    source,
    target,
    slot_table,
    place_table,
    item_table,
    pieces,
    places,
    tokens,
    items,
    pieces_per_item,
    source_step,
    target_step,
    run_bytes,
    PIECE: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    ITEMS: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
):
    """Copy `ROWS` pieces of `PIECE` bytes per program, `STEP` bytes of each at a time, 16 by 16; addresses are numbers.

    The pieces are those of a strip: of every item, of every token, of every place, at every slot. The tables are rows of int64:
    source offset, target offset and, of places and items, a count. `TOKENS`: the count of a place is tokens, at most `tokens`;
    otherwise it is bytes, and there is one token. `ITEMS`: a token has `items`, each with a length of its own; otherwise one.
    `EVEN`: every run has `run_bytes`, and its pieces are full; without it, that is the length of a token's only item.
    """
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = piece < pieces
    token_at = piece // (items * pieces_per_item)
    within = piece - token_at * (items * pieces_per_item)
    place_at = token_at // tokens
    token = token_at - place_at * tokens
    slot = place_at // places
    place = place_at - slot * places
    item = within // pieces_per_item
    skip = (within - item * pieces_per_item).to(tl.int64) * PIECE

    slots = slot_table.to(tl.pointer_type(tl.int64)) + slot * 2
    rows = place_table.to(tl.pointer_type(tl.int64)) + place * 3
    read_at = tl.load(slots, mask=live, other=0) + tl.load(rows, mask=live, other=0) + skip
    write_at = tl.load(slots + 1, mask=live, other=0) + tl.load(rows + 1, mask=live, other=0) + skip
    if TOKENS:
        live = live & (token < tl.load(rows + 2, mask=live, other=0))
        read_at += token.to(tl.int64) * source_step
        write_at += token.to(tl.int64) * target_step
        count = run_bytes
    elif EVEN:
        count = run_bytes
    else:
        count = tl.load(rows + 2, mask=live, other=0)
    if ITEMS:
        entry = item_table.to(tl.pointer_type(tl.int64)) + item * 3
        read_at += tl.load(entry, mask=live, other=0)
        write_at += tl.load(entry + 1, mask=live, other=0)
        count = tl.load(entry + 2, mask=live, other=0)
    left = tl.where(live, count - skip, 0) // 4

    reads = tl.multiple_of((source + read_at).to(tl.pointer_type(tl.int32)), 16)[:, None]
    writes = tl.multiple_of((target + write_at).to(tl.pointer_type(tl.int32)), 16)[:, None]
    for step in tl.static_range(PIECE // STEP):
        column = step * (STEP // 4) + tl.arange(0, STEP // 4)[None, :]
        here = live[:, None] & (column >= 0) if EVEN else column < left[:, None]
        tl.store(writes + column, tl.load(reads + column, mask=here), mask=here)
