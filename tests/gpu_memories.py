"""Memories that exchanges are tested with: main memory, memory of an NVIDIA GPU, and a stand-in that two processes can share.

The stand-in is a file in shared memory. Its handle is the name of the file, so the other process maps it as CUDA IPC would, and
the kernel's arithmetic runs in NumPy. Exchanges take it for memory of a GPU once `use_stand_in` has been called.
"""

from __future__ import annotations

import atexit
import importlib.util
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from gpu_stand_in import HostCopier
from kvbaton.errors import TransportError
from kvbaton.transport.cuda.driver import HANDLE_BYTES, GpuAllocation
from kvbaton.transport.exchange import service
from kvbaton.transport.exchange.gpu import ExchangeGpu
from kvbaton.transport.neighbour import is_readable

__all__ = ["GPU", "MAIN", "STAND_IN", "SharedDriver", "PlacedMemory", "place", "use_stand_in", "why_not_here"]

MAIN, STAND_IN, GPU = "main", "stand-in", "cuda"
_SHARED = Path("/dev/shm")  # noqa: S108 - files in it are memory

_PREFIX = "kvbaton-gpu-"

Bytes = npt.NDArray[np.uint8]


class PlacedMemory(Protocol):
    """Memory that is registered."""

    address: int
    nbytes: int

    @property
    def array(self) -> Bytes:
        """What it holds now."""

    def fill(self, value: int) -> None:
        """Set every byte, now."""


class _MainMemory:
    def __init__(self, content: Bytes) -> None:
        self.array = content
        self.address, self.nbytes = int(content.ctypes.data), content.nbytes

    def fill(self, value: int) -> None:
        self.array[:] = value


class _GpuTensor:
    def __init__(self, content: Bytes, skip: int) -> None:
        import torch

        self._torch: Any = torch
        whole = torch.zeros(skip + content.nbytes, dtype=torch.uint8, device="cuda:0")
        self._tensor: Any = whole[skip:]
        self._tensor.copy_(torch.from_numpy(np.ascontiguousarray(content)))
        torch.cuda.synchronize()
        self.address, self.nbytes = int(self._tensor.data_ptr()), content.nbytes

    @property
    def array(self) -> Bytes:
        self._torch.cuda.synchronize()
        found: Bytes = self._tensor.cpu().numpy()
        return found

    def fill(self, value: int) -> None:
        self._tensor.fill_(value)
        self._torch.cuda.synchronize()


_ALLOCATIONS: dict[int, tuple[GpuAllocation, str]] = {}
"""Allocations of the stand-in in this process, by address: those that it made, and those that it has mapped."""


class _StandInMemory(_MainMemory):
    def __init__(self, content: Bytes, skip: int) -> None:
        fd, self._name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_SHARED)
        os.close(fd)
        os.truncate(self._name, skip + content.nbytes)
        whole = _mapped(self._name)
        whole[skip:] = content
        super().__init__(whole[skip:])
        self._base = int(whole.ctypes.data)
        _ALLOCATIONS[self._base] = (GpuAllocation(self._base, whole.nbytes), self._name)

    def __del__(self) -> None:
        _ALLOCATIONS.pop(self._base, None)
        Path(self._name).unlink(missing_ok=True)


@atexit.register
def _remove_orphans() -> None:
    """Tests kill processes; these leave their files."""
    for path in _SHARED.glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            path.unlink(missing_ok=True)


def _mapped(name: str) -> Bytes:
    with Path(name).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class SharedDriver:
    """The driver of the stand-in; counts what is mapped in all of the process."""

    mapped: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self._open: dict[int, tuple[Bytes, str]] = {}

    def gpu_id(self) -> str:
        return "cd" * 16

    def allocation(self, address: int) -> GpuAllocation:
        return _find(address)[0]

    def share(self, address: int) -> bytes:
        return _find(address)[1].encode().ljust(HANDLE_BYTES)

    def open(self, handle: bytes) -> GpuAllocation:
        name = handle.decode().strip()
        try:
            content = _mapped(name)
        except OSError as error:
            raise TransportError(f"the stand-in has no {name}: {error}") from error
        address = int(content.ctypes.data)
        self._open[address] = (content, name)
        self.mapped[name] += 1
        return GpuAllocation(address, content.nbytes)

    def forget(self, address: int) -> None:
        if address not in self._open:
            raise TransportError(f"{address:#x} is not mapped")
        self.mapped[self._open.pop(address)[1]] -= 1

    def close(self) -> None:
        """Nothing to give back."""


def _find(address: int) -> tuple[GpuAllocation, str]:
    for allocation, name in list(_ALLOCATIONS.values()):
        if allocation.address <= address < allocation.address + allocation.allocated_bytes:
            return allocation, name
    raise TransportError(f"no allocation of the stand-in holds {address:#x}")


def _is_stand_in(address: int) -> bool:
    try:
        _find(address)
    except TransportError:
        return False
    return True


def use_stand_in(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Have exchanges of this process take memory of the stand-in for that of a GPU; `replace` as `MonkeyPatch.setattr`."""

    def open_stand_in(address: int, device: int, owner: str, timeout_s: float) -> ExchangeGpu:
        _find(address)
        return ExchangeGpu(device, owner, timeout_s, SharedDriver(), HostCopier())

    replace(service, "open_gpu", open_stand_in)
    replace(service, "is_readable", lambda address, size: not _is_stand_in(address) and is_readable(address, size))


def why_not_here(kind: str) -> str:
    """Why memory of a kind cannot be had here; empty where it can."""
    if kind != GPU:
        return ""
    if not importlib.util.find_spec("torch") or not importlib.util.find_spec("triton"):
        return "needs torch and Triton"
    import torch

    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU"


def place(kind: str, content: Bytes, skip: int = 0) -> PlacedMemory:
    """Memory of a kind that holds `content`, `skip` bytes behind the begin of its allocation."""
    if kind == MAIN:
        whole = np.zeros(skip + content.nbytes, np.uint8)
        whole[skip:] = content
        return _MainMemory(whole[skip:] if skip else content)
    return (_StandInMemory if kind == STAND_IN else _GpuTensor)(content, skip)
