"""Copies runs between two memories that this process can see, at nearly the speed of one `memcpy` per run.

A loop in Python costs as much per run as copying 4 KiB does. Where a C compiler was there, a loop in C is used. Elsewhere runs
of equal size are moved by the thousand: one indexed read into a buffer that stays in the processor's cache, and one indexed
write out of it; long runs are copied one by one. None of them holds the interpreter's lock while bytes move.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvbaton.transport.base import Runs
from kvbaton.transport.loops import CopyCrew
from kvbaton.transport.runs import RunCursor

__all__ = ["RunCopier"]

_LONG_BYTES = 32 << 10
_CHUNK_BYTES = 256 << 10
_MAX_SIZES = 16
_FEW_RUNS = 4


class RunCopier:
    """Copies from `source` to `target`, both flat arrays of bytes. Safe to use from several threads for disjoint runs."""

    def __init__(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], crew: CopyCrew | None = None) -> None:
        """`crew` has the loop in C, where there is one."""
        self._source = source
        self._target = target
        self._crew = crew
        self._starts = int(target.ctypes.data), int(source.ctypes.data)
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
        return self._crew.copy(*self._starts, cursor.runs, cursor.place, most_bytes, most_runs)

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
