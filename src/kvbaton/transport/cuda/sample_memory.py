"""GPU memory of known content that looks like an array: with it transport cuda is tried and tested. Imports torch when used."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.errors import ConfigError
from kvbaton.transport.cuda.driver import CudaDriver
from kvbaton.transport.cuda.region import DeviceRegion

__all__ = ["GpuMemory", "check_gpu", "gpu_memory"]


def check_gpu() -> None:
    """Raise ConfigError where transport cuda cannot run: without torch, Triton, a driver or a GPU."""
    for name in ("torch", "triton"):
        if not importlib.util.find_spec(name):
            raise ConfigError(f"transport cuda needs torch and Triton (no module {name}); pip install 'kvbaton[cuda]'")
    CudaDriver(0).close()


def gpu_memory(content: npt.NDArray[np.uint8]) -> tuple[DeviceRegion, GpuMemory]:
    """Memory of the first GPU. Raises ConfigError without torch or a GPU."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"transport cuda needs torch and Triton ({error}); pip install 'kvbaton[cuda]'") from error
    if not torch.cuda.is_available():
        raise ConfigError("transport cuda needs an NVIDIA GPU, and torch sees none here; see nvidia-smi")
    memory = GpuMemory(torch, content)
    return memory.region, memory


class GpuMemory:
    """Bytes on the GPU; what is read is a copy, what is written is there when the call returns."""

    def __init__(self, torch: Any, content: npt.NDArray[np.uint8]) -> None:
        self.torch = torch
        self.tensor: Any = torch.from_numpy(content).to("cuda:0")
        torch.cuda.synchronize()

    @property
    def region(self) -> DeviceRegion:
        """The region of all of it."""
        return DeviceRegion.of_tensors(self.tensor)

    def __getitem__(self, key: int | slice) -> Any:
        return self.tensor[key].cpu().numpy()

    def __setitem__(self, key: int | slice, value: int) -> None:
        self.tensor[key] = value
        self.torch.cuda.synchronize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.uint8]:
        now: npt.NDArray[np.uint8] = self.tensor.cpu().numpy()
        return now

    def __eq__(self, other: object) -> Any:
        return self.__array__() == other

    __hash__ = None  # type: ignore[assignment]
