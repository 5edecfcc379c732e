"""A peer's GPU memory as this process sees it: what its endpoint describes, opened through CUDA IPC, and closed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.errors import TransportError
from kvbaton.transport.cuda.driver import HANDLE_BYTES, GpuAllocation, MemoryDriver
from kvbaton.transport.cuda.placement import Placement, Segment
from kvbaton.transport.cuda.region import DeviceRegion

__all__ = ["Mapping", "SharedPart", "open_parts", "read_parts", "share_region", "write_parts"]

MAX_PARTS = 4096
"""Most parts that a peer's region may consist of."""


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
