"""Makes copies on a GPU: one stream, one table, one kernel per launch. Imports torch when it is made.

The kernel reads its table from pinned memory of the host, while it copies: a table that is brought to the GPU first costs more
than the copies when runs are short (256-byte runs need 3 % of what they move).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport.cuda.tables import Launch, Placement, Segment, launches_for

__all__ = ["Copier", "GpuCopier"]

_FIRST_TABLE_BYTES = 1 << 20
_PAUSE_S = 0.00002
_EAGER_S = 0.0002
_ALIGN = 16
_PROBE_BYTES = 32 << 10
_PROBE_S = 30.0


class Copier(Protocol):
    """What makes the copies of launches, in order."""

    def start(self, launches: Sequence[Launch], source: int, target: int) -> None:
        """Queue the copies; `source` and `target` are the floors that the tables start from. Raises TransportError."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was started is done, at most `timeout_s`; returns whether it is. Raises TransportError."""

    def close(self) -> None:
        """Give back what the copies needed. Idempotent."""


class GpuCopier:
    """Copies with the Triton kernel on a stream of its own. For one thread at a time, and one batch at a time."""

    def __init__(self, device: int) -> None:
        """Make one copy, so that the kernel is compiled. Raises ConfigError when torch, Triton or the GPU does not work."""
        self._torch, self._kernel = _import()
        if not self._torch.cuda.is_available():
            raise ConfigError("transport cuda: torch sees no GPU; install a torch that was built for CUDA, and a driver")
        self._device = device
        self.stream: Any = self._torch.cuda.Stream(device)
        self._done: Any = self._torch.cuda.Event()
        self._grow(_FIRST_TABLE_BYTES)
        self._probe()

    def start(self, launches: Sequence[Launch], source: int, target: int) -> None:
        """Queue one kernel per launch; returns before they run. Raises TransportError."""
        try:
            self.queue(launches, self.stage(launches), source, target)
        except RuntimeError as error:
            raise TransportError(f"GPU {self._device} did not take a copy: {error}") from error

    def stage(self, launches: Sequence[Launch]) -> list[int]:
        """Put all tables where the GPU reads them, in pinned memory; their addresses, offsets before lengths per launch.

        What was queued before must be done: its tables are written over.
        """
        parts = [part for launch in launches for part in (launch.offsets, launch.lengths)]
        ends = np.cumsum([-(-part.nbytes // _ALIGN) * _ALIGN for part in parts]).tolist()
        if ends and ends[-1] > len(self._staging):
            self._grow(max(ends[-1], 2 * len(self._staging)))
        starts = [0, *ends[:-1]]
        for start, part in zip(starts, parts, strict=True):
            self._staging[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
        return [self._pinned.data_ptr() + start for start in starts]

    def queue(self, launches: Sequence[Launch], tables: Sequence[int], source: int, target: int) -> None:
        """Queue the kernels over tables that were staged; returns before they run."""
        with self._torch.cuda.stream(self.stream):
            try:
                for launch, offsets, lengths in zip(launches, tables[::2], tables[1::2], strict=True):
                    self._launch(launch, source, target, offsets, lengths)
            finally:
                self._done.record(self.stream)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        eager_until = time.monotonic() + _EAGER_S
        try:
            while not self._done.query():
                now = time.monotonic()
                if now >= deadline:
                    return False
                time.sleep(0 if now < eager_until else _PAUSE_S)
        except RuntimeError as error:
            raise TransportError(f"GPU {self._device} failed during a copy: {error}") from error
        return True

    def close(self) -> None:
        self._grow(0)

    def _probe(self) -> None:
        """Copy one page, as most batches will."""
        try:
            source, target = (
                self._torch.full((_PROBE_BYTES,), fill, dtype=self._torch.uint8, device=f"cuda:{self._device}")
                for fill in (1, 2)
            )
            self._torch.cuda.synchronize(self._device)
            places = [Placement([Segment(0, _PROBE_BYTES, tensor.data_ptr())]) for tensor in (source, target)]
            launches = launches_for(np.array([[0, 0, _PROBE_BYTES]], np.uint64), *places)
            self.start(launches, places[0].floor, places[1].floor)
            works = self.wait(_PROBE_S) and bool(self._torch.equal(source, target))
        except (RuntimeError, TransportError) as error:
            raise ConfigError(f"transport cuda: a first copy on GPU {self._device} failed: {error}") from error
        if not works:
            raise ConfigError(f"transport cuda: a first copy on GPU {self._device} did not arrive within {_PROBE_S:g} s")

    def _grow(self, table_bytes: int) -> None:
        self._pinned = self._torch.empty(table_bytes, dtype=self._torch.uint8, pin_memory=table_bytes > 0)
        self._staging = self._pinned.numpy()

    def _launch(self, launch: Launch, source: int, target: int, offsets: int, lengths: int) -> None:
        self._kernel[(launch.programs,)](
            source,
            target,
            offsets,
            lengths,
            launch.pieces,
            launch.pieces_per_run,
            launch.run_bytes // launch.unit_bytes,
            UNIT=launch.unit_bytes,
            PIECE=launch.piece_bytes // launch.unit_bytes,
            STEP=launch.tile.step_bytes // launch.unit_bytes,
            ROWS=launch.tile.rows,
            WIDE=launch.offsets.dtype == np.int64,
            EVEN=launch.is_even,
            RAGGED=launch.run_bytes == 0,
            num_warps=launch.tile.warps,
        )


def _import() -> tuple[Any, Any]:
    try:
        import torch

        from kvbaton.transport.cuda.kernel import copy_pieces
    except ImportError as error:
        raise ConfigError(f"transport cuda needs torch and Triton ({error}); pip install 'kvbaton[cuda]'") from error
    return torch, copy_pieces
