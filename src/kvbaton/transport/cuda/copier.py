"""Copies on a GPU: launches of the kernels on one stream, with one table. Imports torch when it is made.

A long table, of runs, is read from pinned memory of the host while the kernel copies: to bring it to the GPU first would cost
more than the copies when runs are short (256-byte runs need 3 % of what they move). A short one, of a plan, is brought there
first: each number of it is read many times.

What is started with a descriptor ends with a number that the GPU writes into pinned memory, and a thread in C waits for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvbaton.core.strips import NO_SLOT, Plan, Runs, Strip
from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport.cuda.driver import CudaDriver
from kvbaton.transport.cuda.launch import Launch, Placement, Segment, launches_for
from kvbaton.transport.cuda.quick_start import CALLS, EndFlag, Kernels, QuickStart
from kvbaton.transport.cuda.strip_launch import StripLaunch, strip_launches
from kvbaton.transport.runs import StripTable

__all__ = ["AnyLaunch", "Copier", "GpuCopier"]

AnyLaunch = Launch | StripLaunch

log = logging.getLogger(__name__)

_FIRST_TABLE_BYTES = 1 << 20
_PAUSE_S = 0.00002
_EAGER_S = 0.0002
_ALIGN = 16
_PROBE_BYTES = 32 << 10
_PROBE_S = 30.0
_SHORT_TABLE_BYTES = 256 << 10


class Copier(Protocol):
    """What makes the copies of launches, in order."""

    @property
    def can_wake(self) -> bool:
        """Whether `start` takes a descriptor."""

    def is_ready(self, launches: Sequence[AnyLaunch]) -> bool:
        """Whether `start` has nothing to compile first, which takes a second."""

    def start(self, launches: Sequence[AnyLaunch], source: int, target: int, wakeup_fd: int = -1) -> None:
        """Queue the copies; `source` and `target` are the floors that the tables start from. Raises TransportError.

        The descriptor, if there is one, gets a byte when they are done; it may get another one shortly before.
        """

    def start_plan(self, plan: StripTable, source: Placement, target: Placement, wakeup_fd: int, most_bytes: int) -> int:
        """Queue the copies of a plan, which was checked, as `start` does; how many bytes they have. Raises TransportError.

        0, and nothing was queued, where it has more than `most_bytes`, or `start` has to do it.
        """

    def check_and_start(
        self, plan: Plan, sizes: tuple[int, int], source: Placement, target: Placement, wakeup_fd: int, most_bytes: int
    ) -> int:
        """As `start_plan`, a plan that was not checked; `sizes` are the bytes of the source region and of the target region.

        0, too, where it is not seen to be right: it may be, and if not, the caller finds out why. Raises TransportError.
        """

    def has_ended(self) -> bool:
        """Whether what was started with a descriptor is done, and its byte written. Raises TransportError."""

    def is_near(self) -> bool:
        """Whether the descriptor got a byte because the end of what was started is near."""

    def linger(self) -> bool:
        """Then wait for the end, at most 0.1 ms; whether it came meanwhile. If so, it has no byte of its own."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was started is done, at most `timeout_s`; returns whether it is. Raises TransportError."""

    def close(self) -> None:
        """Give back what the copies needed. Idempotent."""


class GpuCopier:
    """Copies with the Triton kernels on a stream of its own. For one thread at a time, and one batch at a time."""

    def __init__(self, device: int, kernels: Kernels | None = None, *, wakes: bool = False) -> None:
        """Make two copies, so that kernels are compiled; with `wakes`, `start` shall take descriptors.

        Raises ConfigError when torch, Triton or the GPU does not work.
        """
        self._torch, self._kernel, self._strip_kernel = _import()
        if not self._torch.cuda.is_available():
            raise ConfigError("transport cuda: torch sees no GPU; install a torch that was built for CUDA, and a driver")
        self._device = device
        self._kernels = kernels or Kernels()
        self._flag: EndFlag | None = None
        self._flag_memory: Any = None
        self._quick: QuickStart | None = None
        self.stream: Any = self._torch.cuda.Stream(device)
        self._handle: int = self.stream.cuda_stream
        self._driver = CudaDriver(device)
        try:
            self._on_gpu: Any = self._torch.empty(_SHORT_TABLE_BYTES, dtype=self._torch.uint8, device=f"cuda:{device}")
            self._grow(_FIRST_TABLE_BYTES)
            self._probe()
            if wakes:
                self._open_flag()
        except BaseException:
            self.close()
            raise

    @property
    def can_wake(self) -> bool:
        """Whether `start` takes a descriptor."""
        return self._flag is not None

    def is_ready(self, launches: Sequence[AnyLaunch]) -> bool:
        return all(self._kernels.key(launch) in self._kernels.compiled for launch in launches)

    def start(self, launches: Sequence[AnyLaunch], source: int, target: int, wakeup_fd: int = -1) -> None:
        """Queue one kernel per launch; returns before they run. Raises TransportError."""
        try:
            self.queue(launches, self.stage(launches), source, target, wakeup_fd)
        except RuntimeError as error:
            raise TransportError(f"GPU {self._device} did not take a copy: {error}") from error

    def stage(self, launches: Sequence[AnyLaunch]) -> list[list[int]]:
        """Put all tables into pinned memory; where the kernels find them, one list per launch.

        What was queued before must be done: its tables are written over.
        """
        needed = sum(-(-table.nbytes // _ALIGN) * _ALIGN for launch in launches for table in launch.tables)
        if needed > len(self._staging):
            self._grow(max(needed, 2 * len(self._staging)))
        self._short_bytes = needed if needed <= _SHORT_TABLE_BYTES and _are_strips(launches) else 0
        first = self._on_gpu.data_ptr() if self._short_bytes else self._pinned.data_ptr()
        start, found = 0, []
        for launch in launches:
            addresses = []
            for table in launch.tables:
                if table.nbytes:
                    self._staging[start : start + table.nbytes] = table.reshape(-1).view(np.uint8)
                addresses.append(first + start)
                start += -(-table.nbytes // _ALIGN) * _ALIGN
            found.append(addresses)
        return found

    def queue(
        self, launches: Sequence[AnyLaunch], tables: Sequence[Sequence[int]], source: int, target: int, wakeup_fd: int = -1
    ) -> None:
        """Queue the kernels over tables that were staged; returns before they run."""
        with self._driver.entered():
            if self._short_bytes:
                self._driver.bring(self._on_gpu.data_ptr(), self._pinned.data_ptr(), self._short_bytes, self._handle)
            for launch, addresses in zip(launches, tables, strict=True):
                self._launch(launch, (source, target, *addresses))
            if wakeup_fd >= 0 and self._flag is not None:
                self._write_end(self._flag, wakeup_fd)

    def start_plan(self, plan: StripTable, source: Placement, target: Placement, wakeup_fd: int, most_bytes: int) -> int:
        return self._quick.start(plan, source, target, wakeup_fd, most_bytes) if self._quick is not None else 0

    def check_and_start(
        self, plan: Plan, sizes: tuple[int, int], source: Placement, target: Placement, wakeup_fd: int, most_bytes: int
    ) -> int:
        quick = self._quick
        return quick.check_and_start(plan, sizes, source, target, wakeup_fd, most_bytes) if quick is not None else 0

    def has_ended(self) -> bool:
        if self._flag is None or self._flag.was_seen():
            return True
        self._is_idle()  # raises when the GPU has failed, and then nothing writes the number
        return False

    def is_near(self) -> bool:
        return self._flag is not None and self._flag.is_near()

    def linger(self) -> bool:
        return self._flag is not None and self._flag.linger()

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        eager_until = time.monotonic() + _EAGER_S
        while not (self._is_idle() and (self._flag is None or self._flag.was_seen())):
            now = time.monotonic()
            if now >= deadline:
                return False
            time.sleep(0 if now < eager_until else _PAUSE_S)
        return True

    def _write_end(self, flag: EndFlag, wakeup_fd: int) -> None:
        """Have the next number written behind what is queued. Raises TransportError."""
        number = flag.next_number()
        try:
            self._driver.write_number(flag.address, number, self._handle)
            flag.wait_for(number, wakeup_fd)
        except BaseException:
            flag.stop()
            raise

    def _is_idle(self) -> bool:
        """Whether all that was queued is done. Raises TransportError when the GPU has failed."""
        try:
            return bool(self.stream.query())
        except RuntimeError as error:
            if self._flag is not None:
                self._flag.stop()
            raise TransportError(f"GPU {self._device} failed during a copy: {error}") from error

    def close(self) -> None:
        flag, self._flag, self._quick = self._flag, None, None
        if flag is not None:
            flag.close()
        self._grow(0)
        self._on_gpu = self._flag_memory = None
        self._driver.close()

    def _probe(self) -> None:
        """Copy one page with each kernel, as most batches will."""
        try:
            source, target = (
                self._torch.full((_PROBE_BYTES,), fill, dtype=self._torch.uint8, device=f"cuda:{self._device}")
                for fill in (1, 2)
            )
            places = [Placement([Segment(0, _PROBE_BYTES, tensor.data_ptr())]) for tensor in (source, target)]
            page = np.array([[0, 0, _PROBE_BYTES]], np.uint64)
            works = True
            for launches in (launches_for(page, *places), strip_launches(_as_plan(page), *places)):
                target.fill_(2)
                self._torch.cuda.synchronize(self._device)
                self.start(launches or (), places[0].floor, places[1].floor)
                works = works and self.wait(_PROBE_S) and bool(self._torch.equal(source, target))
        except (RuntimeError, TransportError) as error:
            raise ConfigError(f"transport cuda: a first copy on GPU {self._device} failed: {error}") from error
        if not works:
            raise ConfigError(f"transport cuda: a first copy on GPU {self._device} did not arrive within {_PROBE_S:g} s")

    def _open_flag(self) -> None:
        """Try to have a number written at the end of copies: that needs a compiler, and a driver that does it."""
        self._flag_memory = self._torch.zeros(1, dtype=self._torch.int32, pin_memory=True)
        self._flag = EndFlag.open(self._flag_memory.data_ptr())
        if self._flag is None:
            return
        read_fd, write_fd = os.pipe()
        try:
            calls = [self._driver.address_of(name) for name in CALLS]
            self.start((), 0, 0, write_fd)
            if not self.wait(_PROBE_S) or os.read(read_fd, 1) != b"\0":
                raise TransportError(f"no number was written within {_PROBE_S:g} s")
        except TransportError as error:
            log.info("copies on GPU %d are not begun by post (%s)", self._device, error)
            self._flag.close()
            self._flag = None
        else:
            table = (self._on_gpu.data_ptr(), _SHORT_TABLE_BYTES)
            self._quick = QuickStart(calls, self._driver.context, self._handle, table, self._flag, self._kernels)
            self._quick.use(self._pinned.data_ptr())
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def _grow(self, table_bytes: int) -> None:
        self._pinned = self._torch.empty(table_bytes, dtype=self._torch.uint8, pin_memory=table_bytes > 0)
        self._staging = self._pinned.numpy()
        if self._quick is not None:
            self._quick.use(self._pinned.data_ptr())

    def _launch(self, launch: AnyLaunch, addresses: tuple[int, ...]) -> None:
        """Queue one kernel. A compiled one is called again without what the compiler's front looks at each time."""
        grid, arguments = (launch.programs, 1, 1), (*addresses, *launch.numbers)
        compiled = self._kernels.compiled.get(self._kernels.key(launch))
        if compiled is not None:
            compiled[grid](*arguments, *launch.constants, stream=self._handle)
            return
        kernel = self._strip_kernel if isinstance(launch, StripLaunch) else self._kernel
        with self._torch.cuda.stream(self.stream):
            compiled = kernel[grid](*arguments, *launch.constants, num_warps=launch.tile.warps)
        self._kernels.keep(launch, compiled)


def _are_strips(launches: Sequence[AnyLaunch]) -> bool:
    return all(isinstance(launch, StripLaunch) for launch in launches)


def _as_plan(runs: Runs) -> Plan:
    return Plan((Strip(NO_SLOT, runs.view(np.int64)),))


def _import() -> tuple[Any, Any, Any]:
    try:
        import torch

        from kvbaton.transport.cuda.kernel import copy_pieces, copy_strip
    except ImportError as error:
        raise ConfigError(f"transport cuda needs torch and Triton ({error}); pip install 'kvbaton[cuda]'") from error
    return torch, copy_pieces, copy_strip
