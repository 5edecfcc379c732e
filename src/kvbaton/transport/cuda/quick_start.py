"""Copies of plans that are started from C, and the number that shows their end.

Python's code is cold between two batches, and then takes as long as the copy. What it does for a plan, gpu_strips.c does too,
once the kernels are compiled; `strip_launch.py` and `copier.py` are what it has to agree with, and do everything else. What is
left to Python here, to give C a plan's arrays, is on the way of every batch: it avoids what takes microseconds (to find the
address of an array, to make an array of ctypes).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from kvbaton.core.strips import Numbers, Plan
from kvbaton.errors import TransportError
from kvbaton.transport.cuda.launch import TILES, Launch, Placement
from kvbaton.transport.cuda.strip_launch import StripLaunch
from kvbaton.transport.runs import Loops, StripTable, load_loops

__all__ = ["CALLS", "MOST_ROWS", "EndFlag", "Kernels", "QuickStart"]

CALLS = ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuStreamWriteValue32_v2")
"""What gpu_strips.c calls of the driver."""

MOST_ROWS = 4096
"""Plans of at most so many slots, places and items are started from C, with the interpreter's lock."""

_MOST_NUMBER = 2**31 - 2
_WORD_BITS = 31
_MOST_STRIPS = 8
_LINGER_NS = 100_000
_INT64 = np.dtype(np.int64)
_SHAPES = tuple(struct.Struct(f"={2 + 5 * strips}Q") for strips in range(_MOST_STRIPS + 1))
"""The bytes of both regions, and of so many strips: slots, places, items, steps."""


class EndFlag:
    """A number in memory that the GPU writes when a stream has come so far, and a thread in C that waits for it."""

    def __init__(self, address: int, loops: Loops, waiter: int) -> None:
        self.address = address
        self.loops = loops
        self.waiter = waiter
        self._last = self._wanted = 0

    @classmethod
    def open(cls, address: int) -> EndFlag | None:
        """A flag in pinned memory, which is 0; None where there is no compiler."""
        loops = load_loops()
        waiter = loops.open_waiter() if loops is not None else None
        return cls(address, loops, waiter) if loops is not None and waiter else None

    def next_number(self) -> int:
        """The number that shows the end of what is queued next; `stop` takes it back, but it does not come again."""
        self._last = self._wanted = self._last % _MOST_NUMBER + 1
        return self._wanted

    def wait_for(self, number: int, wakeup_fd: int) -> None:
        """Have a byte written when the number is there."""
        self.loops.wait_for_flag(self.waiter, self.address, number, wakeup_fd, 0)

    def was_seen(self) -> bool:
        """Whether the last number was written, and the byte too."""
        return bool(self.loops.seen_flag(self.waiter) == self._wanted)

    def is_near(self) -> bool:
        """Whether a byte was written because the end is near."""
        return bool(self.loops.is_near(self.waiter))

    def linger(self) -> bool:
        """Then wait for the end, at most 0.1 ms; whether it came meanwhile. If so, it has no byte of its own."""
        return bool(self.loops.linger(self.waiter, _LINGER_NS))

    def stop(self) -> None:
        """Wait for nothing more; the byte of what was waited for is written."""
        self.loops.wait_for_flag(self.waiter, None, 0, -1, 0)
        self._wanted = self.loops.seen_flag(self.waiter)

    def close(self) -> None:
        """End the thread."""
        self.loops.close_waiter(self.waiter)


class _KernelWords(ctypes.Structure):
    """`struct kernel` of gpu_strips.c."""

    _fields_: ClassVar = [("function", ctypes.c_void_p), ("shared_bytes", ctypes.c_uint64)]


class _TileWords(ctypes.Structure):
    """`struct tile` of gpu_strips.c."""

    _fields_: ClassVar = [*((name, ctypes.c_uint64) for name in ("piece", "rows", "warps")), ("kernels", _KernelWords * 4)]


class _GpuWords(ctypes.Structure):
    """`struct gpu` of gpu_strips.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("enter", "leave", "bring", "launch", "write")),
        *((name, ctypes.c_void_p) for name in ("context", "stream", "waiter", "pinned")),
        *((name, ctypes.c_uint64) for name in ("on_gpu", "room", "flag")),
        ("tiles", ctypes.POINTER(_TileWords)),
        ("tile_count", ctypes.c_uint64),
    ]


class Kernels:
    """Compiled kernels, which the copiers of a transport share: what one of them compiled, C starts for the other."""

    def __init__(self) -> None:
        self.compiled: dict[Hashable, Any] = {}
        self.tiles = (_TileWords * len(TILES))()
        for row, (piece, tile) in zip(self.tiles, TILES.items(), strict=True):
            row.piece, row.rows, row.warps = piece, tile.rows, tile.warps

    def keep(self, launch: Launch | StripLaunch, compiled: Any) -> None:
        """A kernel was compiled for launches like this one."""
        self.compiled[self.key(launch)] = compiled
        function, metadata = getattr(compiled, "function", None), getattr(compiled, "metadata", None)
        if not isinstance(launch, StripLaunch) or len(launch.items) or any(number >> _WORD_BITS for number in launch.numbers):
            return
        if isinstance(function, int) and metadata is not None:
            row = self.tiles[list(TILES).index(launch.piece_bytes)]
            row.kernels[launch.has_tokens + 2 * launch.is_even] = _KernelWords(function, int(metadata.shared))

    def key(self, launch: Launch | StripLaunch) -> Hashable:
        """What a kernel is compiled for: numbers have 32 or 64 bits, addresses always 64."""
        return (type(launch), launch.constants, *(number >> _WORD_BITS != 0 for number in launch.numbers))


class QuickStart:
    """Starts the copies of a plan from C, where the kernels that they need are compiled."""

    def __init__(
        self, calls: Sequence[int], context: int, stream: int, table: tuple[int, int], flag: EndFlag, kernels: Kernels
    ) -> None:
        """`calls` are the addresses of CALLS; `table` is where tables go on the GPU, and how many bytes there are."""
        tiles = ctypes.cast(kernels.tiles, ctypes.POINTER(_TileWords))
        self._gpu = _GpuWords(*calls, context, stream, flag.waiter, None, *table, flag.address, tiles, len(kernels.tiles))
        self._kernels = kernels
        self._flag = flag
        self._at = ctypes.addressof(self._gpu)

    def use(self, pinned: int) -> None:
        """Lay tables out in this memory, which has as much room as there is on the GPU."""
        self._gpu.pinned = pinned

    def start(self, plan: StripTable, source: Placement, target: Placement, wakeup_fd: int, most_bytes: int) -> int:
        """Queue the copies of a plan, which was checked; how many bytes it has. 0, and nothing was queued, where Python has to.

        Raises TransportError; then some of it may have been queued.
        """
        strips = (plan.words, plan.strip_count)
        return self._begun(self._flag.loops.begin_on_gpu, strips, source, target, wakeup_fd, most_bytes)

    def check_and_start(
        self, plan: Plan, sizes: tuple[int, int], source: Placement, target: Placement, wakeup_fd: int, most_bytes: int
    ) -> int:
        """As `start`, a plan that was not checked; `sizes` are the bytes of the source region and of the target region.

        0 where C does not see that it is right, too.
        """
        arrays: list[Numbers] = []
        strips, shape = plan.strips, [*sizes]
        for strip in strips:
            slots, places, pattern = strip.slots, strip.places, strip.pattern
            if pattern is None:
                arrays += (slots, places)
                shape += (len(slots), len(places), 0, 0, 0)
                continue
            items = pattern.items
            if not len(items):  # C would take tokens for bytes
                return 0
            arrays += (slots, places, items)
            shape += (len(slots), len(places), len(items), pattern.source_step, pattern.target_step)
        if not strips or len(strips) > _MOST_STRIPS or any(map(_is_other, arrays)):
            return 0
        if sum(map(len, arrays)) > MOST_ROWS:
            return 0
        try:
            # A copy, so that what is checked is what is copied; the quickest one, and the address of bytes is found at once.
            rows, numbers = b"".join(arrays), _SHAPES[len(strips)].pack(*shape)  # type: ignore[arg-type]
        except (TypeError, struct.error):  # rows that are not one behind the other, steps below 0
            return 0
        words = (rows, numbers, len(strips))
        return self._begun(self._flag.loops.check_and_begin, words, source, target, wakeup_fd, most_bytes)

    def _begun(
        self, begin: Any, words: tuple[Any, ...], source: Placement, target: Placement, wakeup_fd: int, most_bytes: int
    ) -> int:
        flag, begun = self._flag, 0
        try:
            number = flag.next_number()
            begun = begin(self._at, *words, source.address, target.address, most_bytes, number, wakeup_fd)
        finally:
            if begun <= 0:
                flag.stop()
        if begun < 0:
            raise TransportError(f"the CUDA driver did not take a copy (error {-begun})")
        return int(begun)


def _is_other(rows: Numbers) -> bool:
    """Whether an array is not of the kind that plans are made of."""
    return rows.dtype is not _INT64 or rows.ndim != 2 or rows.shape[1] != 3
