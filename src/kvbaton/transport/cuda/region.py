"""GPU memory as a region: one range of addresses, of which only the parts that tensors fill can be reached.

A peer's memory is what its endpoint describes, opened through CUDA IPC, and closed again. `GpuMemory` looks like an array;
with it transport cuda is tried and tested. torch is imported when that is made, not before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport.base import AfterEvent, Region
from kvbaton.transport.cuda.driver import HANDLE_BYTES, CudaDriver, GpuAllocation, MemoryDriver
from kvbaton.transport.cuda.launch import Placement, Segment
from kvbaton.transport.cuda.staging import DeviceMemory, Staging

__all__ = [
    "DeviceRegion",
    "GpuMemory",
    "Mapping",
    "check_gpu",
    "gpu_memory",
    "open_parts",
    "queued_so_far",
    "read_parts",
    "share_region",
    "write_parts",
]

MAX_PARTS = 4096
"""Most parts that a peer's region may consist of."""


class DeviceTensor(Protocol):
    """What is needed of a torch tensor."""

    @property
    def device(self) -> Any:
        """Where it lies."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def data_ptr(self) -> int:
        """Address of its first byte."""

    def is_contiguous(self) -> bool:
        """Whether its bytes have no gaps."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRegion(Region):
    """Memory of one GPU that peers may reach; `view` is empty, since the processor cannot see it. Keeps its tensors alive."""

    gpu: int
    spans: tuple[Segment, ...]
    owners: tuple[DeviceTensor, ...]

    @property
    def device(self) -> int:
        """The number of the GPU, as this process counts."""
        return self.gpu

    @classmethod
    def of_tensors(cls, *tensors: DeviceTensor) -> DeviceRegion:
        """The region from the first to the last byte of contiguous tensors of one GPU. Raises ConfigError otherwise."""
        for number, tensor in enumerate(tensors):
            if tensor.device.type != "cuda" or not tensor.is_contiguous() or not tensor.nbytes:
                raise ConfigError(
                    f"tensor {number} is on {tensor.device}, contiguous={tensor.is_contiguous()}, {tensor.nbytes} bytes; "
                    "a region of transport cuda needs contiguous, non-empty tensors on a GPU"
                )
        devices = {int(tensor.device.index or 0) for tensor in tensors}
        if len(devices) != 1:
            raise ConfigError(f"the tensors of a region lie on GPUs {sorted(devices)}; it needs one or more of one GPU")
        return cls.of_ranges(devices.pop(), [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], tensors)

    @classmethod
    def of_ranges(cls, device: int, ranges: Sequence[tuple[int, int]], owners: tuple[DeviceTensor, ...] = ()) -> DeviceRegion:
        """The region from the first to the last of these (address, bytes), whatever the tensors over them look like.

        A cache that is a permuted view is not contiguous for torch, and yet fills its memory without a gap.
        """
        start = min(address for address, _ in ranges)
        spans = _joined(sorted(Segment(address - start, count, address) for address, count in ranges))
        return cls(start, spans[-1].end, memoryview(b""), device, spans, owners)

    def accessor(self) -> DeviceMemory:
        """Reads and sums it through memory of the host, on a stream of its own."""
        return DeviceMemory(self)

    def open_staging(self) -> Staging:
        """Pinned memory of the host beside it. Raises ConfigError when torch, Triton or the GPU does not work."""
        return Staging(self)

    def flip_byte(self, offset: int) -> None:
        driver = CudaDriver(self.device)
        try:
            driver.flip_byte(self.address + offset)
        finally:
            driver.close()


def _joined(spans: list[Segment]) -> tuple[Segment, ...]:
    """Spans that touch or overlap, as one."""
    joined = spans[:1]
    for span in spans[1:]:
        last = joined[-1]
        if span.offset <= last.end:
            joined[-1] = Segment(last.offset, max(last.end, span.end) - last.offset, last.address)
        else:
            joined.append(span)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a region that lies in one allocation: where in the region, and where in the allocation."""

    offset: int
    part_bytes: int
    handle: bytes
    skip: int


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """A peer's memory, opened."""

    placement: Placement
    opened: tuple[int, ...]

    def close(self, driver: MemoryDriver) -> None:
        """Close all of it, also when one part cannot be; raises the last TransportError."""
        problem: TransportError | None = None
        for address in self.opened:
            try:
                driver.forget(address)
            except TransportError as error:
                problem = error
        if problem is not None:
            raise problem


def share_region(region: DeviceRegion, driver: MemoryDriver) -> list[SharedPart]:
    """The parts of this side's region, one per allocation and span. Raises ConfigError when memory cannot be shared."""
    parts = []
    for span in region.spans:
        offset = span.offset
        while offset < span.end:
            address = region.address + offset
            allocation = driver.allocation(address)
            count = min(span.end - offset, allocation.address + allocation.allocated_bytes - address)
            parts.append(SharedPart(offset, count, driver.share(address), address - allocation.address))
            offset += count
    return parts


def write_parts(parts: Sequence[SharedPart]) -> str:
    """Parts as text, for an endpoint."""
    return ";".join(f"{part.offset},{part.part_bytes},{part.skip},{part.handle.hex()}" for part in parts)


def read_parts(text: str, region_bytes: int) -> list[SharedPart]:
    """The inverse of `write_parts`; raises TransportError for what no honest peer sends."""
    try:
        parts = [_part(*line.split(",")) for line in text.split(";", MAX_PARTS)]
    except (TypeError, ValueError) as error:
        raise TransportError(f"cuda endpoint: parts cannot be read ({error}); fetch its card again") from None
    end = 0
    for part in sorted(parts, key=lambda part: part.offset):
        fits = end <= part.offset and 0 < part.part_bytes <= region_bytes - part.offset
        if not fits or part.skip < 0 or len(part.handle) != HANDLE_BYTES:
            raise TransportError(
                f"cuda endpoint: parts has one at offset {part.offset} with {part.part_bytes} bytes, skip {part.skip} and a "
                f"handle of {len(part.handle)} bytes, which does not fit a region of {region_bytes} bytes; fetch its card again"
            )
        end = part.offset + part.part_bytes
    if end != region_bytes:
        raise TransportError(
            f"cuda endpoint: parts end at {end}, and the region has {region_bytes} bytes; fetch its card again"
        )
    return parts


def open_parts(parts: Sequence[SharedPart], driver: MemoryDriver) -> Mapping:
    """Open every allocation once. Raises TransportError, and then nothing stays open."""
    allocations: dict[bytes, GpuAllocation] = {}
    try:
        for part in parts:
            if part.handle not in allocations:
                allocations[part.handle] = driver.open(part.handle)
            _check_inside(part, allocations[part.handle])
    except TransportError:
        for allocation in allocations.values():
            driver.forget(allocation.address)
        raise
    segments = [Segment(part.offset, part.part_bytes, allocations[part.handle].address + part.skip) for part in parts]
    return Mapping(Placement(segments), tuple(allocation.address for allocation in allocations.values()))


def _part(offset: str, part_bytes: str, skip: str, handle: str) -> SharedPart:
    return SharedPart(int(offset), int(part_bytes), bytes.fromhex(handle), int(skip))


def _check_inside(part: SharedPart, allocation: GpuAllocation) -> None:
    if part.skip + part.part_bytes > allocation.allocated_bytes:
        raise TransportError(
            f"cuda endpoint: parts has {part.part_bytes} bytes at {part.skip} of an allocation that has "
            f"{allocation.allocated_bytes} bytes; fetch its card again"
        )


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


def queued_so_far(stream: Any) -> AfterEvent:
    """Record an event on a torch `stream` now; true once everything that was queued there before has been done."""
    query: AfterEvent = stream.record_event().query
    return query
