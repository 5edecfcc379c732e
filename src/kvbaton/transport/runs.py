"""Runs, as arrays or in short form: checked before a transport accepts them, cut into slices by a cursor, and copied at the
speed of `memcpy`. Pieces of a region are summed here too, for checksums.

A loop in Python costs as much per run as copying 4 KiB does. Where a C compiler was there, loops in C are used: they are
compiled when they are first needed, and kept in a directory of this user's cache that no other user can write to. Elsewhere
NumPy does it: runs of equal size are moved by the thousand, with one indexed read into a buffer that stays in the processor's
cache and one indexed write out of it, and long runs are copied one by one. None of them holds the interpreter's lock while
bytes move.
"""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.checks import ONE_IN, PIECE_TOKENS, BlockGrid, BlockSums, Pieces
from kvbaton.core.strips import NO_RUNS, NO_SLOT, Numbers, Plan, Runs, Strip, TokenPattern, count_bytes, unroll
from kvbaton.errors import ConfigError, RangeError

__all__ = [
    "CopyCrew",
    "Loops",
    "MAX_SLICE_RUNS",
    "Pages",
    "RegionSummer",
    "RunCopier",
    "RunCursor",
    "check_offsets",
    "check_runs",
    "compile_c",
    "StripTable",
    "VectorPlace",
    "load_loops",
]

_log = logging.getLogger("kvbaton.transport")

_NAMES = (
    "busy_poll",
    "check_runs",
    "copy_runs",
    "gpu_strips",
    "move_few",
    "plan_pages",
    "stamps",
    "strips",
    "sum_pieces",
    "vectors",
    "wait_flag",
)
_CODE = tuple(Path(__file__).with_name(f"{name}.c") for name in _NAMES)
_HEADER = Path(__file__).with_name("strips.h")
_OPTIONS = ("-O3", "-shared", "-fPIC", "-pthread")
_COMPILE_S = 60.0

MAX_SLICE_RUNS = 1024
"""Most runs in one slice; also what one system call takes on Linux."""

_SOURCE, _TARGET, _BYTES = 0, 1, 2
_MAX_SLOTS_PER_RUN = 256

_LONG_BYTES = 32 << 10
_CHUNK_BYTES = 256 << 10
_MAX_SIZES = 16
_TRIAL_BYTES = 4799
_FEW_RUNS = 4
_QUICK_BYTES, _ANY_BYTES = 256 << 10, 2**63 - 1
_FIRST_BYTE = ctypes.c_char * 1
_BYTES_OF_MOVED = (1 << 32) - 1
_FEW_TAKEN = 8 * MAX_SLICE_RUNS
"""Up to so many runs are unrolled with the interpreter's lock: it takes some ten microseconds."""

_AS_TUPLE = msgspec.structs.astuple
_STRIP_WORDS = 10
_ROW_BYTES = 24
_PIECE_BYTES = 16
_NO_SLOT_AT: int = NO_SLOT.ctypes.data
_TOO_LONG = 1
"""What the loop answers instead of summing more than it may."""


class _RunPlace(ctypes.Array[ctypes.c_uint64]):
    """Where a loop is in its runs: `struct cursor` of strips.h."""

    _length_ = 6
    _type_ = ctypes.c_uint64


class VectorPlace(ctypes.Array[ctypes.c_uint64]):
    """The beginning of `struct vectors` of vectors.c: where the next piece is, how many are left, bytes in all, bytes moved."""

    _length_ = 4
    _type_ = ctypes.c_uint64


class Pages(NamedTuple):
    """A few pages of a pair of ranks, from which a loop in C makes the runs; `PagePlanner` makes them."""

    table: ctypes.Array[ctypes.c_int64]
    """`struct piece` of plan_pages.c, with its slots behind it."""
    sources: Sequence[int]
    """The blocks at the source, of these tokens alone."""
    targets: Sequence[int]
    first: int
    """The first token that is moved, counted from the first of these blocks on."""
    end: int
    wire_bytes: int


class Loops:
    """The compiled loops."""

    def __init__(self, library: Path) -> None:
        code = ctypes.CDLL(str(library))
        pointer, number, size = ctypes.c_void_p, ctypes.c_long, ctypes.c_uint64
        self.open_crew, self.close_crew, self.copy_runs = code.open_crew, code.close_crew, code.copy_runs
        self.open_crew.argtypes, self.open_crew.restype = [number, ctypes.c_int], pointer
        self.close_crew.argtypes, self.close_crew.restype = [pointer], None
        self.copy_runs.argtypes = [pointer, pointer, pointer, pointer, size, pointer, size, size]
        self.copy_runs.restype = size
        # Calls that take microseconds keep the interpreter's lock: a thread that releases it may wait milliseconds for it.
        holding = ctypes.PyDLL(str(library))
        self._check_runs, self._check_few = code.check_runs, holding.check_runs
        for check in (self._check_runs, self._check_few):
            check.argtypes = [pointer, number, number, number, size, size, pointer]
        self._count_bytes = holding.count_bytes
        self._count_bytes.argtypes, self._count_bytes.restype = [pointer, number, number, number], size
        self._check_strips, self._take_runs, self._take_few = holding.check_strips, code.take_runs, holding.take_runs
        self._check_strips.argtypes = [pointer, size, size, size]
        for take in (self._take_runs, self._take_few):
            take.argtypes, take.restype = [pointer, size, pointer, size, size, pointer, pointer], size
        self.begin_strips, self.begin_listed, self.has_ended, self.wait_end = (
            holding.begin_strips,
            holding.begin_listed,
            holding.end_batch,
            code.end_batch,
        )
        self.begin_strips.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_int]
        places, listed = (pointer, size, pointer, size), (pointer, number, number, number)
        self.begin_listed.argtypes = [pointer, *places, *listed, size, ctypes.c_int]
        self.begin_listed.restype = size
        self.has_ended.argtypes = self.wait_end.argtypes = [pointer, ctypes.c_int]
        self._move_few = holding.move_few
        self._move_few.argtypes = [pointer, size, pointer, size, pointer, number, number, number, size]
        self._move_few.restype = size
        self._plan_pages = holding.plan_pages
        wide = ctypes.c_int64
        self._plan_pages.argtypes = [pointer, pointer, pointer, wide]
        self._plan_pages.restype = wide
        self._move_pages = holding.move_pages
        self._move_pages.argtypes = [pointer, pointer, pointer, size]
        self._move_pages.restype = size
        self.write_stamp, self.read_stamp = holding.write_stamp, holding.read_stamp
        self.write_stamp.argtypes, self.write_stamp.restype = [pointer, size], None
        self.read_stamp.argtypes, self.read_stamp.restype = [pointer, pointer], size
        self.vouch, self.withdraw, self.disown = holding.vouch, holding.withdraw, holding.disown
        self.vouch.argtypes = self.withdraw.argtypes = self.disown.argtypes = [pointer]
        self.withdraw.restype = self.disown.restype = None
        self.can_vouch = code.can_vouch
        self.busy_poll = code.busy_poll
        self.busy_poll.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._sum_pieces, self._sum_few = code.sum_pieces, holding.sum_pieces
        word, signed = ctypes.c_uint32, ctypes.c_int64
        for each in (self._sum_pieces, self._sum_few):
            each.argtypes = [pointer, signed, pointer, number, signed, pointer, number, word, pointer]
            each.restype = signed
        self._sum_blocks, self._sum_few_blocks = code.sum_blocks, holding.sum_blocks
        for each in (self._sum_blocks, self._sum_few_blocks):
            each.argtypes = [pointer, signed, pointer, pointer, number, pointer, number, signed, signed, signed, pointer]
            each.restype = signed
        self.open_waiter, self.close_waiter = code.open_waiter, code.close_waiter
        self.open_waiter.restype, self.close_waiter.argtypes, self.close_waiter.restype = pointer, [pointer], None
        self.wait_for_flag, self.seen_flag = holding.wait_for_flag, holding.seen_flag
        self.wait_for_flag.argtypes, self.wait_for_flag.restype = [pointer, pointer, ctypes.c_int32, ctypes.c_int, size], None
        self.is_near, self.linger = holding.is_near, code.linger  # `linger` waits, without the interpreter's lock
        self.is_near.argtypes, self.linger.argtypes = [pointer], [pointer, ctypes.c_int64]
        self.seen_flag.argtypes, self.seen_flag.restype = [pointer], ctypes.c_int32
        self.begin_on_gpu, self.check_and_begin = holding.begin_on_gpu, holding.check_and_begin
        ending = (pointer, pointer, size, ctypes.c_int32, ctypes.c_int)
        self.begin_on_gpu.argtypes, self.begin_on_gpu.restype = [pointer, pointer, size, *ending], ctypes.c_int64
        self.check_and_begin.argtypes = [pointer, ctypes.c_char_p, ctypes.c_char_p, size, *ending]
        self.check_and_begin.restype = ctypes.c_int64
        self._bind_vectors(code, holding)
        self.limit_sums = code.limit_sums
        self.limit_sums.argtypes = [ctypes.c_int]
        self.can_sum = self._sums_as_zlib()
        """Whether `sum` gives what zlib gives: the peer may have no compiler, and compares our sums with its own."""

    def _bind_vectors(self, code: ctypes.CDLL, holding: ctypes.PyDLL) -> None:
        pointer, number, size, wide = ctypes.c_void_p, ctypes.c_long, ctypes.c_uint64, ctypes.c_int64
        listed = (pointer, number, number, number)
        self._lay_out_request, self._lay_out_target = holding.lay_out_request, holding.lay_out_target
        self._lay_out_request.argtypes, self._lay_out_request.restype = [size, *listed, pointer], wide
        self._lay_out_target.argtypes = [size, *listed, size, pointer]
        self._lay_out_reply, self.leave_behind = holding.lay_out_reply, holding.leave_behind
        self._lay_out_reply.argtypes = [size, pointer, size, size, size, size, pointer]
        self.leave_behind.argtypes, self.leave_behind.restype = [pointer, size], None
        # System calls, without the interpreter's lock.
        self.move_vectors, self.answer_read, self.begin_reply = code.move_vectors, code.answer_read, code.begin_reply
        self.move_vectors.argtypes, self.move_vectors.restype = [ctypes.c_int, pointer, ctypes.c_int], wide
        self.answer_read.argtypes = [ctypes.c_int, pointer, size, size, size, size, pointer, size]
        self.answer_read.restype = wide
        self.begin_reply.argtypes, self.begin_reply.restype = [ctypes.c_int, pointer], wide

    def checked(self, runs: Runs, source_bytes: int, target_bytes: int) -> Runs | None:
        """A copy of `runs`, each column in one piece, when all lie inside both regions and no two targets overlap.

        None when that is not so, or not seen in one pass: an empty run, targets of several sizes in no order.
        """
        if not len(runs) or (listed := _listed(runs)) is None:
            return None
        own = np.empty((3, len(runs)), np.uint64)
        check = self._check_few if len(runs) <= MAX_SLICE_RUNS else self._check_runs
        return own.T if check(*listed, source_bytes, target_bytes, _FIRST_BYTE.from_buffer(own.data)) else None

    def count_bytes(self, runs: Runs) -> int:
        """The bytes of runs that were checked."""
        listed = _listed(runs)
        return count_bytes(runs) if listed is None else int(self._count_bytes(*listed))

    def passes(self, table: StripTable, source_bytes: int, target_bytes: int) -> bool:
        """Whether all runs of a plan are seen, from its slots and places, to be inside both regions and not to overlap."""
        # Without items the loops would take the tokens of a pattern for bytes: such strips are dropped first.
        return not table.lacks_items and bool(self._check_strips(table.words, table.strip_count, source_bytes, target_bytes))

    def take(self, cursor: RunCursor, place: _RunPlace, most_bytes: int, most_runs: int, out: Runs | None) -> int:
        """Unroll the runs behind a place among those of a cursor, at most so many, into `out`, or step over them.

        The place moves on. Returns how many runs that were.
        """
        take = self._take_few if most_runs <= _FEW_TAKEN else self._take_runs
        into, taken = None if out is None else out.ctypes.data, ctypes.c_uint64()
        return int(take(cursor.words, cursor.strip_count, place, most_bytes, most_runs, into, ctypes.byref(taken)))

    def move_few(self, starts: tuple[int, int], sizes: tuple[int, int], runs: Runs, most_bytes: int) -> int:
        """Check a few runs as `checked` does and copy them, with the interpreter's lock; returns how many bytes that were.

        0, and nothing was copied, where they are too many, or not seen to be right. `starts` and `sizes` are the addresses and
        bytes of the target region and of the source region.
        """
        if (listed := _listed(runs)) is None:
            return 0
        return int(self._move_few(starts[0], sizes[0], starts[1], sizes[1], *listed, most_bytes))

    def move_pages(self, regions: ctypes.Array[ctypes.c_uint64], pages: Pages, most_bytes: int) -> tuple[int, int]:
        """Plan a few pages as `plan_pages` does, and move their runs as `move_few` does; how many bytes and runs that were.

        0 and 0, and nothing was copied, where one of the two leaves it to others. `regions` is `struct regions` of move_few.c.
        """
        if (asked := _asked_of(pages)) is None:
            return 0, 0
        moved = self._move_pages(regions, pages.table, asked.buffer_info()[0], most_bytes)
        return moved & _BYTES_OF_MOVED, moved >> 32

    def plan_pages(self, pages: Pages, most: int) -> Runs | None:
        """The runs of a few pages, at most so many. None where they are more, or where anything is wrong with the blocks."""
        if (asked := _asked_of(pages)) is None:
            return None
        out = np.empty((most, 3), np.uint64)
        count = self._plan_pages(pages.table, asked.buffer_info()[0], _FIRST_BYTE.from_buffer(out.data), most)
        return out[:count] if count else None

    def lay_out_request(self, request_id: int, runs: Runs, room: VectorPlace) -> int:
        """Lay out the request for the source side of runs, as vectors.c has it; returns their bytes, below 0 if not done."""
        if (listed := _listed(runs)) is None:
            return -1
        return int(self._lay_out_request(request_id, *listed, room))

    def lay_out_target(self, request_id: int, runs: Runs, address: int, room: VectorPlace) -> bool:
        """Lay out the target side of runs in a region at `address`, to which the reply goes; returns whether that is done."""
        if (listed := _listed(runs)) is None:
            return False
        return bool(self._lay_out_target(request_id, *listed, address, room))

    def lay_out_reply(
        self, request_id: int, named: bytearray, region: tuple[int, int], most_bytes: int, room: VectorPlace
    ) -> bool:
        """Lay out the reply to a request for the pieces that its body names; `region` is its address and its bytes.

        False where a piece leaves the region, or all have more than `most_bytes`.
        """
        count = len(named) // _PIECE_BYTES
        return bool(self._lay_out_reply(request_id, _FIRST_BYTE.from_buffer(named), count, *region, most_bytes, room))

    def sums(self, start: int, region_bytes: int, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        """CRC-32 of parts of these pieces of a region, as `RegionSummer.sums`; long ones without the interpreter's lock.

        `start` is the region's address: to find that of an array takes as long as to sum 20 KiB.
        """
        pieces = np.ascontiguousarray(pieces, np.int64)
        # Arrays of ctypes, not of NumPy: a span has one sum, and half of its time would be spent on making and finding those.
        parts, sums = (ctypes.c_int64 * len(ends))(*ends), (ctypes.c_uint32 * len(ends))()
        count = len(pieces)
        # To point at the buffer of an array is quicker than to find its address.
        table = _FIRST_BYTE.from_buffer(pieces.data) if count and pieces.flags.writeable else pieces.ctypes.data
        refused = _TOO_LONG
        if count <= MAX_SLICE_RUNS:
            refused = self._sum_few(start, region_bytes, table, count, _QUICK_BYTES, parts, len(ends), value, sums)
        if refused == _TOO_LONG:
            refused = self._sum_pieces(start, region_bytes, table, count, _ANY_BYTES, parts, len(ends), value, sums)
        if refused:
            _refuse_piece(pieces[-1 - refused], region_bytes)
        return sums[:]

    def sum_blocks(
        self, start: int, region_bytes: int, grid: ctypes.Array[ctypes.c_int64], blocks: BlockSums, most_bytes: int
    ) -> tuple[list[int], int] | None:
        """As `RegionSummer.sum_blocks`; `grid` is that of the blocks, as `_grid_words` makes it."""
        ids, spans = blocks.ids, blocks.spans
        if len(set(ids)) < len(ids):
            return None
        try:
            # Arrays of ctypes take four times as long to fill, and those of NumPy twice as long to find.
            listed = array.array("q", ids)
            numbers = array.array("q", [number for span in spans for number in _AS_TUPLE(span)])
        except OverflowError:
            return None
        sums, seed = (ctypes.c_uint32 * len(spans))(), -1 if blocks.seed is None else blocks.seed
        places = (listed.buffer_info()[0], len(ids), numbers.buffer_info()[0], len(spans))
        given = (start, region_bytes, grid, *places, blocks.cached_tokens, seed)
        summed = self._sum_few_blocks(*given, min(most_bytes, _QUICK_BYTES), sums)
        if not summed and most_bytes > _QUICK_BYTES:
            summed = self._sum_blocks(*given, most_bytes, sums)
        return (sums[:], summed) if summed else None

    def _sums_as_zlib(self) -> bool:
        region = (np.arange(_TRIAL_BYTES) * 167 >> 3).astype(np.uint8)
        pieces, ends = np.array([[0, _TRIAL_BYTES], [64, 192], [7, 64], [1, 63], [300, 201]]), (1, 3, 5)
        return self.sums(region.ctypes.data, region.nbytes, pieces, ends, 1) == _sum_each(region, pieces, ends, 1)


class CopyCrew:
    """The thread that copies, and so many helpers of its own, in threads that wait while there is nothing to do.

    With `begins` there is one more helper, and a batch can be left to the helpers alone, one at a time.
    """

    def __init__(self, loops: Loops, helpers: int, *, begins: bool = False) -> None:
        self.loops = loops
        self._crew = loops.open_crew(helpers, begins)
        self._table: StripTable | None = None
        if not self._crew:
            raise ConfigError("no memory for the helpers that copy between processes")

    def copy(self, target: int, source: int, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        """Copy what follows a cursor to a target address, from a source address, without the interpreter's lock.

        Returns how many bytes that were; the caller advances. For one thread at a time.
        """
        strips = (cursor.words, cursor.strip_count, cursor.place)
        return int(self.loops.copy_runs(self._crew, target, source, *strips, most_bytes, most_runs))

    def begin_listed(self, starts: tuple[int, int], sizes: tuple[int, int], runs: Runs, most_bytes: int, wakeup_fd: int) -> int:
        """Check runs as `Loops.checked` does and begin to copy them; arguments and result are those of `Loops.move_few`."""
        if (listed := _listed(runs)) is None:
            return 0
        places = (starts[0], sizes[0], starts[1], sizes[1])
        return int(self.loops.begin_listed(self._crew, *places, *listed, most_bytes, wakeup_fd))

    def begin_plan(
        self, starts: tuple[int, int], sizes: tuple[int, int], plan: Plan, most: tuple[int, int], wakeup_fd: int
    ) -> int:
        """The same for a plan, of at most so many bytes and runs. Raises RangeError where its arrays are of another kind."""
        _arrays_of(plan)
        if not 0 < plan.wire_bytes <= most[0] or plan.run_count > most[1] or not self.has_ended():
            return 0
        table = StripTable(plan)
        if not self.loops.passes(table, sizes[1], sizes[0]):
            return 0
        wire_bytes = table.plan.wire_bytes
        self._table = table  # the helpers read it
        words = (table.words, table.strip_count)
        return wire_bytes if self.loops.begin_strips(self._crew, *starts, *words, wire_bytes, wakeup_fd) else 0

    def has_ended(self) -> bool:
        """Whether what was begun is copied."""
        return self._crew is None or bool(self.loops.has_ended(self._crew, 0))

    def wait_end(self) -> None:
        """Wait until what was begun is copied; this cannot take longer than the copy."""
        if self._crew is not None:
            self.loops.wait_end(self._crew, 1)

    def close(self) -> None:
        """End the helpers; no copy may be running, but what was begun is waited for. Idempotent."""
        crew, self._crew = self._crew, None
        if crew:
            self.loops.close_crew(crew)


def _asked_of(pages: Pages) -> array.array[int] | None:
    """What `plan_pages` of plan_pages.c is asked for; None where a number is too large, or the blocks are no pairs."""
    _, sources, targets, first, end, _ = pages
    count = len(sources)
    try:
        # An array of ctypes would take four times as long to fill.
        return array.array("q", (count, first, end, *sources, *targets)) if len(targets) == count else None
    except OverflowError:
        return None


def _listed(runs: Runs) -> tuple[ctypes.Array[ctypes.c_char] | int, int, int, int] | None:
    """Where loops in C find runs: address, steps from run to run and from number to number, count; None for other arrays."""
    if runs.dtype != np.uint64 or runs.ndim != 2 or runs.shape[1] != 3 or not runs.flags.aligned:
        return None
    # To point at the buffer of an array is quicker than to find its address.
    if len(runs) and runs.flags.carray:
        return _FIRST_BYTE.from_buffer(runs.data), 3, 1, len(runs)
    if len(runs) and runs.T.flags.carray:  # as in the copy that `checked` makes; `flags.farray` is also true where it is not so
        return _FIRST_BYTE.from_buffer(runs.T.data), 1, len(runs), len(runs)
    row, column = (stride // runs.itemsize for stride in runs.strides)
    return runs.ctypes.data, row, column, len(runs)


def load_loops(directory: Path | None = None, compiler: str = "cc") -> Loops | None:
    """The loops, from `directory` (by default a cache of this user) or compiled into it; None, with the reason in the log."""
    try:
        return Loops(_library(directory or _cache(), compiler))
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        _log.info("no loops in C over runs (%s); install a C compiler to make short runs faster", error)
        return None


def _library(directory: Path, compiler: str) -> Path:
    """The compiled file, which is named after what it was made from."""
    code = b"".join(file.read_bytes() for file in (*_CODE, _HEADER))
    digest = hashlib.blake2b(code + repr((_OPTIONS, platform.machine(), platform.libc_ver())).encode(), digest_size=8)
    library = directory / f"loops-{digest.hexdigest()}.so"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)
    if not library.exists():
        compile_c(_CODE, library, *_OPTIONS, compiler=compiler)
    return library


def compile_c(code: Sequence[Path], target: Path, *options: str, compiler: str = "cc") -> None:
    """Compile these files into `target`, which appears whole or not at all. Raises OSError or SubprocessError."""
    found = shutil.which(compiler)
    if found is None:
        raise FileNotFoundError(f"there is no {compiler}")
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        made = Path(place) / target.name
        command = [found, *options, "-o", str(made), *map(str, code)]
        subprocess.run(command, check=True, timeout=_COMPILE_S, stdin=subprocess.DEVNULL, capture_output=True)
        made.replace(target)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbaton" / "compiled"


def _check_private(directory: Path) -> None:
    """Raise PermissionError unless only this user can put a file there: what lies there is loaded into this process."""
    state = directory.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to, or can be written by, another user")


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


class RegionSummer:
    """CRC-32 of pieces of a region: by the loop in C where there is one, else by zlib; both give the same sums."""

    def __init__(self, region: memoryview, loops: Loops | None) -> None:
        self._region = np.frombuffer(region, np.uint8)
        self._start = int(self._region.ctypes.data)
        self._loops = loops if loops is not None and loops.can_sum else None
        self._grid: BlockGrid | None = None
        self._words = (ctypes.c_int64 * 0)()

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> tuple[list[int], int] | None:
        """The sums of spans of blocks, and how many bytes that were, with the loop in C.

        None, and nothing was summed, where there is no loop, where that is more than `most_bytes`, and where a span is not in
        blocks that exist, each once.
        """
        if self._loops is None:
            return None
        if blocks.grid is not self._grid:
            self._grid, self._words = blocks.grid, _grid_words(blocks.grid)
        return self._loops.sum_blocks(self._start, self._region.nbytes, self._words, blocks, most_bytes)

    def sums(self, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        """The sums of consecutive parts of these pieces, each up to the number in `ends`; the first one continues `value`.

        Raises RangeError when a piece leaves the region.
        """
        if self._loops is not None:
            return self._loops.sums(self._start, self._region.nbytes, pieces, ends, value)
        return _sum_each(self._region, pieces, ends, value)


def _grid_words(grid: BlockGrid) -> ctypes.Array[ctypes.c_int64]:
    """`struct grid` of sum_pieces.c, and behind it the offsets."""
    shape = (grid.blocks, grid.block_stride, grid.piece_bytes, PIECE_TOKENS, ONE_IN, grid.first, grid.planes, len(grid.offsets))
    return (ctypes.c_int64 * (len(shape) + len(grid.offsets)))(*shape, *grid.offsets)


def _sum_each(region: npt.NDArray[np.uint8], pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
    sums, first, listed = [], 0, pieces.tolist()
    for offset, size in listed:
        if not 0 <= offset <= offset + size <= region.nbytes:
            _refuse_piece((offset, size), region.nbytes)
    for end in ends:
        for offset, size in listed[first:end]:
            value = zlib.crc32(region[offset : offset + size].data, value)
        sums.append(value)
        first, value = end, 0
    return sums


def _refuse_piece(piece: Sequence[int] | Pieces, region_bytes: int) -> NoReturn:
    raise RangeError(f"a piece at offset {piece[0]} with {piece[1]} bytes lies outside the region of {region_bytes} bytes")


def _arrays_of(plan: Plan) -> list[Numbers]:
    """Raises RangeError for arrays of another kind."""
    arrays: list[Numbers] = []
    for strip in plan.strips:
        arrays += (strip.slots, strip.places) if strip.pattern is None else (strip.slots, strip.places, strip.pattern.items)
    for each in arrays:
        if each.dtype != np.int64 or each.ndim != 2 or each.shape[1] != 3:
            raise RangeError(f"strips must be int64 arrays of shape (n, 3), not {each.dtype} of shape {each.shape}")
    return arrays


class StripTable:
    """A private copy of a plan, as loops in C read it: `words` are `struct strip` of strips.h, one behind the other.

    Raises RangeError where the plan is not made of arrays of the right kind.
    """

    def __init__(self, plan: Plan) -> None:
        arrays = _arrays_of(plan)
        self.lacks_items = any(strip.pattern is not None and not len(strip.pattern.items) for strip in plan.strips)
        # One array for all: to find the address of an array takes as long as to copy a thousand places.
        self._numbers: Numbers = np.concatenate(arrays) if arrays else NO_SLOT[:0]
        self._strips: list[tuple[int, int, int, tuple[int, int] | None]] = []
        words: list[int] = []
        first, address = 0, self._numbers.__array_interface__["data"][0]  # a third of the time that `ctypes.data` takes
        for strip in plan.strips:
            slots, places, items, steps = len(strip.slots), len(strip.places), 0, None
            if strip.pattern is not None:
                items, steps = len(strip.pattern.items), (strip.pattern.source_step, strip.pattern.target_step)
                if not all(0 <= step < 1 << 63 for step in steps):
                    raise RangeError(f"a step from token to token is {steps}; it must be at least 0 and below 2^63")
            at = [address + _ROW_BYTES * (first + skipped) for skipped in (0, slots, slots + places)]
            words += (at[0], slots, at[1], places, 3, 1, at[2], items, *(steps or (0, 0)))
            self._strips.append((slots, places, items, steps))
            first += slots + places + items
        self.words = (ctypes.c_uint64 * len(words))(*words)
        self.strip_count = len(plan.strips)

    @functools.cached_property
    def plan(self) -> Plan:
        """The copy."""
        strips, first = [], 0
        for slots, places, items, steps in self._strips:
            numbers = self._numbers[first : first + slots + places + items]
            pattern = None if steps is None else TokenPattern(numbers[slots + places :], *steps)
            strips.append(Strip(numbers[:slots], numbers[slots : slots + places], pattern))
            first += slots + places + items
        return Plan(tuple(strips))


class RunCursor:
    """A place in runs, counted in bytes; hands out the next ones in slices. `words` and `place` are for loops in C.

    A plan is unrolled slice by slice, where there are `loops`.
    """

    def __init__(self, runs: Runs | StripTable, loops: Loops | None = None) -> None:
        self._loops = loops
        self._table = runs if isinstance(runs, StripTable) and loops is not None else None
        known = runs.plan if isinstance(runs, StripTable) else runs
        self._runs = unroll(known) if self._table is None else NO_RUNS
        self.total_bytes = count_bytes(known) if loops is None or isinstance(known, Plan) else loops.count_bytes(known)
        self.done_bytes = 0
        self.place = _RunPlace()
        self._peeked, self._peeked_bytes = _RunPlace(), 0

    @property
    def remaining_bytes(self) -> int:
        """Bytes behind the cursor's place."""
        return self.total_bytes - self.done_bytes

    @functools.cached_property
    def words(self) -> ctypes.Array[ctypes.c_uint64]:
        """The runs as strips: `struct strip` of strips.h."""
        if self._table is not None:
            return self._table.words
        row, column = (stride // self._runs.itemsize for stride in self._runs.strides)
        listed = (_NO_SLOT_AT, 1, self._runs.ctypes.data, len(self._runs), row, column, 0, 0, 0, 0)
        return (ctypes.c_uint64 * _STRIP_WORDS)(*listed)

    @property
    def strip_count(self) -> int:
        """How many strips `words` has."""
        return 1 if self._table is None else self._table.strip_count

    @functools.cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self._runs[:, _BYTES], dtype=np.int64)

    def peek(self, max_bytes: int, max_runs: int = MAX_SLICE_RUNS) -> Runs:
        """The next runs, cut so that they hold at most `max_bytes` in at most `max_runs` pieces; not to be changed."""
        if not self.remaining_bytes:
            return self._runs[:0]
        if self._table is not None:
            return self._unrolled(max_bytes, max_runs)
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

    def whole_plan(self, max_bytes: int) -> Plan | None:
        """The plan, where there is one of at most `max_bytes`, and nothing of it was taken yet."""
        return self._table.plan if self._table is not None and not self.done_bytes and self.total_bytes <= max_bytes else None

    def advance(self, count: int) -> None:
        """Move the place on by `count` bytes."""
        self.done_bytes += count

    def _unrolled(self, max_bytes: int, max_runs: int) -> Runs:
        assert self._loops is not None  # noqa: S101
        if behind := self.done_bytes - self._peeked_bytes:
            self._loops.take(self, self._peeked, behind, _ANY_BYTES, None)
            self._peeked_bytes = self.done_bytes
        # No run is empty, so that there are no more of them than bytes.
        out = np.empty((min(max_runs, max_bytes, self.remaining_bytes), 3), np.uint64)
        count = self._loops.take(self, _RunPlace(*self._peeked), max_bytes, len(out), out)
        return out[:count]


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


class RunCopier:
    """Copies from `source` to `target`, both flat arrays of bytes. Safe to use from several threads for disjoint runs."""

    def __init__(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], crew: CopyCrew | None = None) -> None:
        """`crew` has the loop in C, where there is one."""
        self._source = source
        self._target = target
        self._crew = crew
        self._starts = int(target.ctypes.data), int(source.ctypes.data)
        self._regions = (ctypes.c_uint64 * 4)(self._starts[0], target.nbytes, self._starts[1], source.nbytes)
        self._memmove = ctypes.CDLL(None).memmove
        self._memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memmove.restype = None

    @property
    def has_loop(self) -> bool:
        """Whether `copy_on` can be used; it is the faster one."""
        return self._crew is not None

    def copy_on(self, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        """Copy what follows a cursor, with the loop in C; returns how many bytes. The caller advances."""
        assert self._crew is not None  # noqa: S101
        return self._crew.copy(*self._starts, cursor, most_bytes, most_runs)

    def move_few(self, runs: Runs, most_bytes: int) -> int:
        """Check and copy a few runs at once, with the loop in C; 0, and nothing was copied, where that is not possible.

        Both arrays are the regions that the runs may not leave.
        """
        if self._crew is None:
            return 0
        return self._crew.loops.move_few(self._starts, (self._target.nbytes, self._source.nbytes), runs, most_bytes)

    def move_pages(self, pages: Pages, most_bytes: int) -> tuple[int, int]:
        """Plan, check and copy a few pages in one call, as `move_few` does with runs; the bytes and runs, or 0 and 0."""
        if self._crew is None:
            return 0, 0
        return self._crew.loops.move_pages(self._regions, pages, most_bytes)

    def begin(self, runs: Runs | Plan, most_bytes: int, most_runs: int, wakeup_fd: int) -> int:
        """Check runs and leave them to the crew's helpers; `wakeup_fd` gets a byte at the end.

        Returns how many bytes they have; 0, and nothing was begun, where that is not possible.
        """
        if self._crew is None:
            return 0
        sizes = self._target.nbytes, self._source.nbytes
        if isinstance(runs, Plan):
            return self._crew.begin_plan(self._starts, sizes, runs, (most_bytes, most_runs), wakeup_fd)
        if runs.ndim != 2 or len(runs) > most_runs:
            return 0
        return self._crew.begin_listed(self._starts, sizes, runs, most_bytes, wakeup_fd)

    def copy(self, runs: Runs) -> None:
        """Copy every run; their ranges have been checked and their targets do not overlap."""
        for _ in range(_MAX_SIZES):
            sizes = runs[:, 2]
            if len(sizes) <= _FEW_RUNS or (size := int(sizes[len(sizes) // 2])) >= _LONG_BYTES:
                break
            same = sizes == np.uint64(size)
            self._copy_equal(runs if same.all() else runs[same], size)
            runs = runs[~same]
        self._copy_each(runs)

    def _copy_equal(self, runs: Runs, size: int) -> None:
        """Move runs of `size` bytes: an array whose items overlap, one at each byte, is indexed by offset."""
        kind = np.dtype((np.void, size))
        source = np.ndarray((len(self._source) - size + 1,), kind, self._source, strides=(1,))
        target = np.ndarray((len(self._target) - size + 1,), kind, self._target, strides=(1,))
        offsets = runs[:, :2].astype(np.intp)
        step = max(1, _CHUNK_BYTES // size)
        for first in range(0, len(offsets), step):
            chunk = offsets[first : first + step]
            target[chunk[:, 1]] = source[chunk[:, 0]]

    def _copy_each(self, runs: Runs) -> None:
        starts = np.array([self._source.ctypes.data, self._target.ctypes.data, 0], np.uint64)
        for source, target, size in (runs + starts).tolist():
            self._memmove(target, source, size)
