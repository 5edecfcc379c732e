"""GPU memory through pinned memory of the host: for checksums, and for transports that move main memory.

The kernel that copies between two regions of GPU memory does this too: the GPU reaches pinned memory at its address. It runs on
a stream of its own, so nothing waits for what the engine has queued, and the engine waits for nothing.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbaton.core.checks import BlockSums, Pieces
from kvbaton.core.plan import Runs
from kvbaton.transport.cuda.copier import Copier, GpuCopier
from kvbaton.transport.cuda.launch import Launch, Placement, Segment, launches_for

if TYPE_CHECKING:
    from kvbaton.transport.cuda.region import DeviceRegion

__all__ = ["DeviceMemory", "HostBuffer", "Staging", "pinned_memory"]

log = logging.getLogger(__name__)

_FIRST_BYTES = 4 << 20
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class HostBuffer:
    """Memory of the host that the GPU reaches at its address."""

    address: int
    view: memoryview
    owner: Any = None


def pinned_memory(count: int) -> HostBuffer:
    """So many bytes of pinned memory."""
    import torch

    tensor: Any = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    return HostBuffer(tensor.data_ptr(), tensor.numpy().data, tensor)


class Staging:
    """Pinned memory of the host beside a region of GPU memory: pieces of the region are gathered in it, or scattered from it.

    For one thread at a time.
    """

    def __init__(
        self, region: DeviceRegion, copier: Copier | None = None, pin: Callable[[int], HostBuffer] | None = None
    ) -> None:
        """Raises ConfigError when torch, Triton or the GPU does not work."""
        self._device = Placement(region.spans)
        self._copier: Copier = copier or GpuCopier(region.device)
        self._pin = pin or pinned_memory
        self._buffer = self._pin(_FIRST_BYTES)

    def room(self, count: int) -> memoryview:
        """The first `count` bytes on the host, valid until more are asked for."""
        if count > len(self._buffer.view):
            self._buffer = self._pin(max(count, 2 * len(self._buffer.view)))
        return self._buffer.view[:count]

    def gather(self, pieces: Pieces) -> memoryview:
        """Pieces (offset, bytes) of the region, one behind the other, on the host; valid until the next call."""
        view = self.room(int(pieces[:, 1].sum()))
        packed = _packed(pieces)
        self._device.check(packed, 0, "source")
        host = self._host()
        self._run(launches_for(packed, self._device, host), self._device.floor, host.floor)
        return view

    def scatter(self, pieces: Pieces) -> None:
        """Copy what lies in `room` into pieces of the region; it is there when this returns."""
        packed = _packed(pieces)[:, (1, 0, 2)]
        self._device.check(packed, 1, "target")
        host = self._host()
        self._run(launches_for(np.ascontiguousarray(packed), host, self._device), host.floor, self._device.floor)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._copier.close()
        self._buffer = HostBuffer(0, memoryview(b""))

    def _host(self) -> Placement:
        return Placement([Segment(0, len(self._buffer.view), self._buffer.address)])

    def _run(self, launches: list[Launch], source: int, target: int) -> None:
        try:
            self._copier.start(launches, source, target)
        finally:
            while not self._copier.wait(_WAIT_S):
                log.warning("a copy between GPU and host has not ended within %g s", _WAIT_S)


class DeviceMemory:
    """A region of GPU memory as its rank's agent sees it. Nothing is opened before the first use. For one thread at a time."""

    def __init__(self, region: DeviceRegion, open_staging: Callable[[DeviceRegion], Staging] | None = None) -> None:
        self._region = region
        self._open = open_staging or Staging
        self._staging: Staging | None = None

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> None:
        """What is to be summed is gathered first, piece by piece."""

    def sums(self, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        """CRC-32 of consecutive parts of these pieces, each up to the number in `ends`; the first one continues `value`."""
        gathered, sums, first = self._opened().gather(pieces), [], 0
        places = [0, *np.cumsum(pieces[:, 1]).tolist()]
        for end in ends:
            sums.append(zlib.crc32(gathered[places[first] : places[end]], value))
            first, value = end, 0
        return sums

    def read(self, offset: int, size_bytes: int) -> bytes:
        """A copy of these bytes."""
        return bytes(self._opened().gather(np.array([[offset, size_bytes]], np.int64)))

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite the bytes from `offset` on with `data`."""
        staging = self._opened()
        staging.room(len(data))[:] = data
        staging.scatter(np.array([[offset, len(data)]], np.int64))

    def _opened(self) -> Staging:
        if self._staging is None:
            self._staging = self._open(self._region)
        return self._staging


def _packed(pieces: Pieces) -> Runs:
    """Runs from pieces of a region to one place behind the other; empty ones left out."""
    pieces = pieces[pieces[:, 1] > 0]
    runs = np.zeros((len(pieces), 3), np.uint64)
    runs[:, 0], runs[:, 2] = pieces[:, 0], pieces[:, 1]
    runs[1:, 1] = np.cumsum(pieces[:-1, 1])
    return runs
