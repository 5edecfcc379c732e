"""Copies of plans that are started from C, and the number that shows their end.

Python's code is cold between two batches, and then takes as long as the copy. What it does for a plan, gpu_strips.c does too,
once the kernels are compiled; `strip_launch.py` and `copier.py` are what it has to agree with, and do everything else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from kvbaton.errors import TransportError
from kvbaton.transport.cuda.launch import TILES, Launch, Placement
from kvbaton.transport.cuda.strip_launch import StripLaunch
from kvbaton.transport.runs import Loops, StripTable, load_loops

__all__ = ["CALLS", "EndFlag", "Kernels", "QuickStart"]

CALLS = ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuStreamWriteValue32_v2")
"""What gpu_strips.c calls of the driver."""

_MOST_NUMBER = 2**31 - 2
_WORD_BITS = 31


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
        self.loops.wait_for_flag(self.waiter, self.address, number, wakeup_fd)

    def was_seen(self) -> bool:
        """Whether the last number was written, and the byte too."""
        return bool(self.loops.seen_flag(self.waiter) == self._wanted)

    def stop(self) -> None:
        """Wait for nothing more; the byte of what was waited for is written."""
        self.loops.wait_for_flag(self.waiter, None, 0, -1)
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

    def use(self, pinned: int) -> None:
        """Lay tables out in this memory, which has as much room as there is on the GPU."""
        self._gpu.pinned = pinned

    def start(self, plan: StripTable, source: Placement, target: Placement, wakeup_fd: int, most_bytes: int) -> int:
        """Queue the copies of a plan, which was checked; how many bytes it has. 0, and nothing was queued, where Python has to.

        Raises TransportError; then some of it may have been queued.
        """
        places = (ctypes.c_uint64 * 6)(*source.words, *target.words)
        words, begun = (plan.words, plan.strip_count, places, most_bytes), 0
        try:
            number = self._flag.next_number()
            begun = int(self._flag.loops.begin_on_gpu(ctypes.byref(self._gpu), *words, number, wakeup_fd))
        finally:
            if begun <= 0:
                self._flag.stop()
        if begun < 0:
            raise TransportError(f"the CUDA driver did not take a copy (error {-begun})")
        return begun
