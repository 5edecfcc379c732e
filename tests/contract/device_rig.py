"""Devices on which the order of an engine and its hand-offs is tested: an NVIDIA GPU, and a stand-in that needs none.

Both have caches of two layers, a stream that can be held up, and regions that transports move. What is queued on the stream
runs in order, when the stream is let go on.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu_stand_in import HostCopier, HostTensor
from kvbaton.engines.vllm.device import BlockRows, CudaDevice, DeviceEvent, HostDevice, QueueingDevice
from kvbaton.transport.cuda.region import DeviceRegion
from kvbaton.transport.cuda.staging import HostBuffer, Staging

__all__ = ["BLOCKS", "CHANNELS", "DEVICE_KINDS", "DeviceRig", "HEADS", "LAYERS", "TOKENS", "why_no_gpu"]

LAYERS, BLOCKS, HEADS, TOKENS, CHANNELS = 2, 6, 2, 4, 8
_SHAPE = (BLOCKS, HEADS, TOKENS, CHANNELS)
_BUSY_CYCLES = 1_000_000_000

Bytes = npt.NDArray[np.uint8]


class DeviceRig(Protocol):
    """A device, its caches in the order (blocks, heads, tokens, channels), and its stream."""

    device: QueueingDevice
    caches: list[Any]

    def hold(self) -> None:
        """Keep the stream busy: what is queued from now on does not run yet."""

    def go_on(self) -> None:
        """Let the stream run to its end, and wait for it."""

    def write_later(self, layer: int, block: int, byte: int) -> None:
        """Queue, as a step of the engine would, that a block is written."""

    def content(self, layer: int) -> Bytes:
        """The cache of a layer, as bytes in the order of its axes."""

    def set_content(self, layer: int, content: Bytes) -> None:
        """Write all of it, now."""


class _StandInEvent:
    def __init__(self, failure: str = "") -> None:
        self._done = threading.Event()
        self._failure = failure

    def come(self) -> None:
        self._done.set()

    def query(self) -> bool:
        if self._done.is_set() and self._failure:
            raise RuntimeError(self._failure)
        return self._done.is_set()

    def synchronize(self) -> None:
        assert self._done.wait(30.0), "the stand-in's stream was never let go on"
        self.query()


class StandInRegion(DeviceRegion):
    """A region whose copies the processor makes."""

    def open_staging(self) -> Staging:
        return Staging(self, HostCopier(), _host_buffer)


def _host_buffer(count: int) -> HostBuffer:
    array = np.zeros(count, np.uint8)
    return HostBuffer(int(array.ctypes.data), array.data, array)


class StandInDevice(QueueingDevice):
    """Work in a list, which runs when it is let go on."""

    kinds: tuple[str, ...] = ("stand-in",)
    reorders_blocks = False

    def __init__(self, caches: Sequence[Bytes]) -> None:
        super().__init__()
        self._caches = caches
        self.queue: deque[Callable[[], None]] = deque()
        self.is_held = False
        self.failure = ""

    def submit(self, work: Callable[[], None]) -> None:
        if self.is_held:
            self.queue.append(work)
        else:
            work()

    def mark(self) -> DeviceEvent:
        event = _StandInEvent(self.failure)
        self.submit(event.come)
        return event

    def region(self, ranges: Sequence[tuple[int, int]]) -> StandInRegion:
        return StandInRegion.of_ranges(0, ranges)  # type: ignore[return-value]

    def fill_blocks(self, rows: BlockRows, chosen: Sequence[int], byte: int) -> None:
        self.submit(lambda: HostDevice().fill_blocks(rows, chosen, byte))
        self.allocating()

    def write(self, layer: int, block: int, byte: int) -> None:
        self._caches[layer][block] = byte


class StandInRig(DeviceRig):
    """Caches in main memory that look like tensors of a GPU."""

    def __init__(self, *, tokens_first: bool) -> None:
        self.caches = [_StandInTensor(_empty(tokens_first)) for _ in range(LAYERS)]
        self.device = StandInDevice([cache.array for cache in self.caches])

    def hold(self) -> None:
        self.device.is_held = True

    def go_on(self) -> None:
        while self.device.queue:
            self.device.queue.popleft()()
        self.device.is_held = False

    def write_later(self, layer: int, block: int, byte: int) -> None:
        self.device.submit(lambda: self.device.write(layer, block, byte))

    def content(self, layer: int) -> Bytes:
        copied: Bytes = self.caches[layer].array.copy()
        return copied

    def set_content(self, layer: int, content: Bytes) -> None:
        self.caches[layer].array[:] = content


class _StandInTensor(HostTensor):
    def __init__(self, array: Bytes) -> None:
        super().__init__(array)
        self.array, self.shape, self.dtype = array, array.shape, "torch.uint8"

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def _empty(tokens_first: bool) -> Bytes:
    """A cache; `tokens_first` is LBNHC, whose view in the order of the axes is not contiguous."""
    if not tokens_first:
        return np.zeros(_SHAPE, np.uint8)
    return np.zeros((BLOCKS, TOKENS, HEADS, CHANNELS), np.uint8).transpose(0, 2, 1, 3)


class CudaRig(DeviceRig):
    """Caches of torch on the first GPU."""

    def __init__(self, *, tokens_first: bool) -> None:
        import torch

        self.torch: Any = torch
        self.caches = [torch.from_numpy(np.ascontiguousarray(_base(tokens_first))).to("cuda:0") for _ in range(LAYERS)]
        if tokens_first:
            self.caches = [cache.permute(0, 2, 1, 3) for cache in self.caches]
        self.device = CudaDevice(torch, self.caches)
        torch.cuda.synchronize()

    def hold(self) -> None:
        self.torch.cuda._sleep(_BUSY_CYCLES)

    def go_on(self) -> None:
        self.torch.cuda.synchronize()

    def write_later(self, layer: int, block: int, byte: int) -> None:
        self.caches[layer][block].fill_(byte)

    def content(self, layer: int) -> Bytes:
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            copied = self.caches[layer].cpu()
        found: Bytes = copied.numpy().copy()
        return found

    def set_content(self, layer: int, content: Bytes) -> None:
        self.caches[layer].copy_(self.torch.from_numpy(np.ascontiguousarray(content)))
        self.torch.cuda.synchronize()


def _base(tokens_first: bool) -> Bytes:
    return np.zeros((BLOCKS, TOKENS, HEADS, CHANNELS) if tokens_first else _SHAPE, np.uint8)


def why_no_gpu() -> str:
    """Why there is no GPU to test; empty where there is one."""
    if not importlib.util.find_spec("torch") or not importlib.util.find_spec("triton"):
        return "needs torch and Triton"
    import torch

    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU"


DEVICE_KINDS: dict[str, Callable[..., DeviceRig]] = {"stand-in": StandInRig, "cuda": CudaRig}


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; fails the test when it does not come."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.0005)
