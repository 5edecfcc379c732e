"""GPU memory that looks like an array to the contract suite, and whether there is a GPU at all."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.errors import KVBatonError
from kvbaton.transport.cuda import DeviceRegion
from kvbaton.transport.cuda.driver import CudaDriver

__all__ = ["GpuMemory", "has_gpu"]

_BUSY_CYCLES = 400_000_000


@functools.cache
def has_gpu() -> bool:
    """Whether transport cuda can run here: torch, Triton, a driver and a GPU."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
        return False
    try:
        CudaDriver(0).close()
    except KVBatonError:
        return False
    return True


class GpuMemory:
    """Bytes on the GPU; what is read is a copy, what is written is there when the call returns."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        import torch

        self._torch: Any = torch
        self._tensor: Any = torch.from_numpy(content).to("cuda:0")
        self._torch.cuda.synchronize()

    @property
    def region(self) -> DeviceRegion:
        """The region of all of it."""
        return DeviceRegion.of_tensors(self._tensor)

    def fill_later(self, value: int) -> Any:
        """Queue a fill of all of it on a stream that is busy for a while; gives the stream."""
        stream = self._torch.cuda.Stream()
        with self._torch.cuda.stream(stream):
            self._torch.cuda._sleep(_BUSY_CYCLES)
            self._tensor.fill_(value)
        return stream

    def __getitem__(self, key: int | slice) -> Any:
        return self._tensor[key].cpu().numpy()

    def __setitem__(self, key: int | slice, value: int) -> None:
        self._tensor[key] = value
        self._torch.cuda.synchronize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.uint8]:
        now: npt.NDArray[np.uint8] = self._tensor.cpu().numpy()
        return now

    def __eq__(self, other: object) -> Any:
        return self.__array__() == other

    __hash__ = None  # type: ignore[assignment]
