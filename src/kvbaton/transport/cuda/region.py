"""GPU memory as a region: one range of addresses, of which only the parts that tensors fill can be reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region
from kvbaton.transport.cuda.driver import CudaDriver

__all__ = ["DeviceRegion", "DeviceTensor", "RegionSpan"]


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


@dataclass(frozen=True, slots=True, order=True)
class RegionSpan:
    """A part of a region that holds memory."""

    offset: int
    span_bytes: int

    @property
    def end(self) -> int:
        """First offset behind it."""
        return self.offset + self.span_bytes


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRegion(Region):
    """Memory of one GPU that peers may reach; `view` is empty, since the processor cannot see it. Keeps its tensors alive."""

    device: int
    spans: tuple[RegionSpan, ...]
    owners: tuple[DeviceTensor, ...]

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
        start = min(tensor.data_ptr() for tensor in tensors)
        spans = _joined(sorted(RegionSpan(tensor.data_ptr() - start, tensor.nbytes) for tensor in tensors))
        return cls(start, spans[-1].end, memoryview(b""), devices.pop(), spans, tensors)

    def flip_byte(self, offset: int) -> None:
        """Invert the byte at `offset`."""
        driver = CudaDriver(self.device)
        try:
            driver.flip_byte(self.address + offset)
        finally:
            driver.close()


def _joined(spans: list[RegionSpan]) -> tuple[RegionSpan, ...]:
    """Spans that touch or overlap, as one."""
    joined = spans[:1]
    for span in spans[1:]:
        last = joined[-1]
        if span.offset <= last.end:
            joined[-1] = RegionSpan(last.offset, max(last.end, span.end) - last.offset)
        else:
            joined.append(span)
    return tuple(joined)
