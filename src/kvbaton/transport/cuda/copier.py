"""Makes copies on a GPU: one stream, one table, one kernel launch at a time. Imports torch when it is made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport.cuda.tables import Launch

__all__ = ["Copier", "GpuCopier"]

_FIRST_TABLE_BYTES = 1 << 20
_PAUSE_S = 0.00001


class Copier(Protocol):
    """What makes the copies of launches, in order."""

    def start(self, launches: Sequence[Launch], source: int, target: int) -> None:
        """Queue the copies; `source` and `target` are the floors that the tables start from. Raises TransportError."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was started is done, at most `timeout_s`; tells whether it is. Raises TransportError."""

    def close(self) -> None:
        """Give back what the copies needed. Idempotent."""


class GpuCopier:
    """Copies with the Triton kernel on a stream of its own. For one thread at a time, and one batch at a time."""

    def __init__(self, device: int) -> None:
        """Raises ConfigError when torch, Triton or the GPU is missing."""
        self._torch, self._kernel = _import()
        if not self._torch.cuda.is_available():
            raise ConfigError("transport cuda: torch sees no GPU; install a torch that was built for CUDA, and a driver")
        self._device = device
        self.stream: Any = self._torch.cuda.Stream(device)
        self._done: Any = self._torch.cuda.Event()
        self._grow(_FIRST_TABLE_BYTES)

    def start(self, launches: Sequence[Launch], source: int, target: int) -> None:
        """Queue the table and one kernel per launch; returns before they run. Raises TransportError."""
        try:
            with self._torch.cuda.stream(self.stream):
                try:
                    for launch, table in zip(launches, self._upload(launches), strict=True):
                        self._launch(launch, source, target, table)
                finally:
                    self._done.record(self.stream)
        except RuntimeError as error:
            raise TransportError(f"GPU {self._device} did not take a copy: {error}") from error

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was started is done, at most `timeout_s`; tells whether it is. Raises TransportError."""
        deadline = time.monotonic() + timeout_s
        try:
            while not self._done.query():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PAUSE_S)
        except RuntimeError as error:
            raise TransportError(f"GPU {self._device} failed during a copy: {error}") from error
        return True

    def close(self) -> None:
        """Give the tables back. Idempotent."""
        self._grow(0)

    def _grow(self, table_bytes: int) -> None:
        byte = self._torch.uint8
        self._pinned = self._torch.empty(table_bytes, dtype=byte, pin_memory=table_bytes > 0)
        self._staging = self._pinned.numpy()
        self._table = self._torch.empty(table_bytes, dtype=byte, device=f"cuda:{self._device}")

    def _upload(self, launches: Sequence[Launch]) -> list[int]:
        """Bring the tables of all launches to the GPU in one copy; their addresses there."""
        sizes = [-(-launch.table.nbytes // 16) * 16 for launch in launches]
        total = sum(sizes)
        if total > len(self._staging):
            self._grow(max(total, 2 * len(self._staging)))
        places = [sum(sizes[:index]) for index in range(len(sizes))]
        for launch, at in zip(launches, places, strict=True):
            self._staging[at : at + launch.table.nbytes] = launch.table.reshape(-1).view(np.uint8)
        self._table[:total].copy_(self._pinned[:total], non_blocking=True)
        return [self._table.data_ptr() + at for at in places]

    def _launch(self, launch: Launch, source: int, target: int, table: int) -> None:
        self._kernel[(-(-launch.pieces // launch.rows),)](
            source,
            target,
            table,
            launch.table.shape[1],
            launch.pieces,
            launch.pieces_per_run,
            launch.run_bytes // launch.unit_bytes,
            UNIT=launch.unit_bytes,
            PIECE=launch.piece_bytes // launch.unit_bytes,
            ROWS=launch.rows,
            WIDE=launch.table.dtype == np.int64,
            EVEN=launch.is_even,
            RAGGED=launch.run_bytes == 0,
        )


def _import() -> tuple[Any, Any]:
    try:
        import torch

        from kvbaton.transport.cuda.kernel import copy_pieces
    except ImportError as error:
        raise ConfigError(f"transport cuda needs torch and Triton ({error}); pip install 'kvbaton[cuda]'") from error
    return torch, copy_pieces
