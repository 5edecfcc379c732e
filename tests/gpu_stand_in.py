"""A GPU for tests that have none: memory of this process, handles that name it, and the kernel's arithmetic in NumPy."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.core.strips import Plan
from kvbaton.errors import RangeError, TransportError
from kvbaton.transport.checks import check_plan
from kvbaton.transport.cuda import DeviceRegion
from kvbaton.transport.cuda.driver import HANDLE_BYTES, GpuAllocation
from kvbaton.transport.cuda.launch import LINE_BYTES, Launch, Placement
from kvbaton.transport.cuda.strip_launch import StripLaunch, strip_launches
from kvbaton.transport.runs import StripTable

__all__ = ["HostCopier", "HostDriver", "HostTensor", "run_launch", "run_strip"]


@dataclass(frozen=True)
class _Device:
    type: str = "cuda"
    index: int = 0


class HostTensor:
    """Looks like a tensor on a GPU; lies in main memory, as an allocation of its own or as a part of one."""

    def __init__(self, data: npt.NDArray[np.uint8], device: str = "cuda", index: int = 0) -> None:
        self.data = data
        self._device = _Device(device, index)

    @property
    def device(self) -> Any:
        return self._device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.data.flags.c_contiguous)

    @property
    def region(self) -> DeviceRegion:
        return DeviceRegion.of_tensors(self)


class HostDriver:
    """Allocations are given to it; a handle is the address of one, written out. Counts what is open."""

    def __init__(self, *allocations: npt.NDArray[np.uint8]) -> None:
        self._allocations = [GpuAllocation(int(one.ctypes.data), one.nbytes) for one in allocations]
        self.opened: Counter[int] = Counter()
        self.closed = False

    def gpu_id(self) -> str:
        return "ab" * 16

    def allocation(self, address: int) -> GpuAllocation:
        for one in self._allocations:
            if one.address <= address < one.address + one.allocated_bytes:
                return one
        raise TransportError(f"no allocation holds {address:#x}")

    def share(self, address: int) -> bytes:
        return str(self.allocation(address).address).encode().ljust(HANDLE_BYTES)

    def open(self, handle: bytes) -> GpuAllocation:
        found = self.allocation(int(handle))
        self.opened[found.address] += 1
        return found

    def forget(self, address: int) -> None:
        if not self.opened[address]:
            raise TransportError(f"{address:#x} is not open")
        self.opened[address] -= 1

    def close(self) -> None:
        self.closed = True


class HostCopier:
    """Does at once what the kernels would do. `late` makes so many looks find that the copies are not done.

    With `fails` the GPU has failed: then the byte is written by the look that finds it.
    """

    def __init__(self, late: int = 0) -> None:
        self.late = late
        self.can_wake = True
        self.compiles = False
        self.fails = ""
        self.launched: list[Launch | StripLaunch] = []
        self._wakeup_fd = -1

    def is_ready(self, launches: Sequence[Launch | StripLaunch]) -> bool:  # noqa: ARG002
        return not self.compiles

    def start(self, launches: Sequence[Launch | StripLaunch], source: int, target: int, wakeup_fd: int = -1) -> None:
        for launch in launches:
            if isinstance(launch, StripLaunch):
                run_strip(launch, source, target)
            else:
                run_launch(launch, source, target)
        self.launched += launches
        self._wakeup_fd = wakeup_fd
        if not self.late and not self.fails:
            self._wake()

    def start_plan(self, plan: StripTable, source: Placement, target: Placement, wakeup_fd: int, most_bytes: int) -> int:
        launches = strip_launches(plan.plan, source, target)
        if self.compiles or launches is None or plan.plan.wire_bytes > most_bytes:
            return 0
        self.start(launches, source.floor, target.floor, wakeup_fd)
        return plan.plan.wire_bytes

    def check_and_start(
        self, plan: Plan, sizes: tuple[int, int], source: Placement, target: Placement, wakeup_fd: int, most_bytes: int
    ) -> int:
        try:
            return self.start_plan(check_plan(plan, *sizes), source, target, wakeup_fd, most_bytes)
        except RangeError:
            return 0

    def has_ended(self) -> bool:
        return self.wait(0)

    def is_near(self) -> bool:
        return False

    def linger(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002
        if self.fails:
            self._wake()
            raise TransportError(self.fails)
        self.late -= 1
        if self.late < 0:
            self._wake()
        return self.late < 0

    def close(self) -> None:
        """Nothing to give back."""

    def _wake(self) -> None:
        if self._wakeup_fd >= 0:
            os.write(self._wakeup_fd, b"\0")
            self._wakeup_fd = -1


def run_strip(launch: StripLaunch, source: int, target: int) -> None:
    """Every piece of every program, as the kernel works it out."""
    items = max(1, len(launch.items))
    for piece in range(launch.pieces):
        token_at, within = divmod(piece, items * launch.pieces_per_item)
        place_at, token = divmod(token_at, launch.tokens)
        slot, place = divmod(place_at, len(launch.places))
        item, part = divmod(within, launch.pieces_per_item)
        at = launch.slots[slot] + launch.places[place, :2]
        size = launch.run_bytes if launch.has_tokens or launch.is_even else int(launch.places[place, 2])
        if launch.has_tokens:
            if token >= launch.places[place, 2]:
                continue
            at = at + np.array(launch.steps) * token
        if len(launch.items):
            at, size = at + launch.items[item, :2], int(launch.items[item, 2])
        skip = part * launch.piece_bytes
        assert not launch.is_even or size - skip >= launch.piece_bytes
        count = max(0, min(size - skip, launch.piece_bytes))
        read_at, write_at = (int(one) + skip for one in at)
        assert (read_at | write_at | count) % LINE_BYTES == 0
        ctypes.memmove(target + write_at, source + read_at, count)


def run_launch(launch: Launch, source: int, target: int) -> None:
    """Every piece of every program, as the kernel reads its table."""
    for piece in range(launch.pieces):
        run, within = divmod(piece, launch.pieces_per_run)
        skip = within * (launch.piece_bytes // launch.unit_bytes)
        if launch.offsets.ndim == 1:
            word = int(launch.offsets[run])
            read_at, write_at = word & 0xFFFFFFFF, word >> 32
        else:
            read_at, write_at = launch.offsets[run].tolist()
        whole = launch.run_bytes // launch.unit_bytes - skip if launch.run_bytes else int(launch.lengths[run])
        count = min(whole, launch.piece_bytes // launch.unit_bytes) * launch.unit_bytes
        assert launch.run_bytes == 0 or not launch.is_even or count == launch.piece_bytes
        ctypes.memmove(target + (write_at + skip) * launch.unit_bytes, source + (read_at + skip) * launch.unit_bytes, count)
