"""Memories of one GPU in an exchange: shared with processes of this host through CUDA IPC, and copied by a kernel of this side.

The promises of the exchange hold as they do for main memory, by other means:

- **The owner of the target executes every copy.** It maps the source's allocation to read it, and its own kernel stores. A
  kernel that has started cannot be stopped, so the target is pinned until it has ended: `withdraw` waits for that.
- **The source is looked at after the last byte.** There is no board for it: a process that has mapped memory of a GPU reads it
  whether it is registered or not. The initiator of a write looks at its own table when the answer has come; a read ends with a
  question to the owner.
- **A mapping keeps the memory of its owner allocated**, also when that has ended. Mappings belong to a connection and are
  closed with it, so what a peer that was restarted had allocated does not stay.

CUDA cannot open a handle in the process that made it. Memory of another exchange of this process, or of the same one, is found
by its stamp instead, and pinned as the target is: its owner may free it after `withdraw`, and a kernel that reads memory that
is not mapped would end the GPU's context for the whole process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Protocol

from kvbaton.core.plan import Runs
from kvbaton.errors import ConfigError, RangeError, TransportError
from kvbaton.transport.cuda.copier import Copier, GpuCopier
from kvbaton.transport.cuda.driver import CudaDriver, MemoryDriver
from kvbaton.transport.cuda.launch import Placement, Segment, launches_for
from kvbaton.transport.cuda.region import DeviceRegion, Mapping, open_parts, read_parts, share_region, write_parts
from kvbaton.transport.exchange.base import MemoryHandle
from kvbaton.transport.exchange.memories import MemoryTable

__all__ = ["ExchangeGpu", "GpuReader", "GpuSources", "open_gpu"]

_log = logging.getLogger("kvbaton.transport")

_MAX_PARTS_CHARACTERS = 1 << 14
"""Of the text that states how a memory is shared; one allocation takes some 150, and a request has room for 2^16 bytes."""

_MAX_SOURCES = 4096

_SHARED_HERE: dict[int, tuple[int, MemoryTable, int]] = {}
"""Live GPU memories of all exchanges of this process, by stamp: the GPU, and the table and the slot that they are in."""


class _GpuSource(Protocol):
    """Memory of a GPU that copies read."""

    def reading(self) -> contextlib.AbstractContextManager[Placement]:
        """Where it lies, for as long as a copy takes. Raises RangeError when it is gone."""


class _MappedSource:
    """Memory of another process."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping

    @contextlib.contextmanager
    def reading(self) -> Iterator[Placement]:
        yield self.mapping.placement


class _OwnSource:
    """Memory of this process."""

    def __init__(self, table: MemoryTable, slot: int, stamp: int) -> None:
        self._table, self._slot, self._stamp = table, slot, stamp

    @contextlib.contextmanager
    def reading(self) -> Iterator[Placement]:
        address, memory_bytes = self._table.pin(self._slot, self._stamp)
        try:
            yield Placement([Segment(0, memory_bytes, address)])
        finally:
            self._table.unpin(self._slot)


class ExchangeGpu:
    """The GPU of an exchange, and which memories of the exchange lie on it. Safe to use from any thread, until `close`."""

    def __init__(self, device: int, owner: str, timeout_s: float, driver: MemoryDriver, copier: Copier) -> None:
        """`owner` names this process, as handles do."""
        self.device = device
        self.owner = owner
        self.driver = driver
        # One batch at a time, as a copier demands; mappings are opened and closed under it too, so none is closed in use.
        self.lock = threading.RLock()
        self._copier = copier
        self._timeout_s = timeout_s
        self._stamps: set[int] = set()

    def share(self, address: int, memory_bytes: int) -> str:
        """How other processes open this memory. Raises ConfigError or TransportError for what is no memory of this GPU."""
        region = DeviceRegion.of_ranges(self.device, [(address, memory_bytes)])
        parts = share_region(region, self.driver)
        text = write_parts(parts)
        if len(text) > _MAX_PARTS_CHARACTERS:
            raise ConfigError(f"memory at {address:#x} lies in {len(parts)} allocations of the GPU; register it in parts")
        return text

    def adopt(self, table: MemoryTable, handle: MemoryHandle) -> None:
        """A memory of the GPU is live from now on."""
        self._stamps.add(handle.stamp)
        _SHARED_HERE[handle.stamp] = (self.device, table, handle.slot)

    def forget(self, stamp: int) -> None:
        """A memory is withdrawn."""
        self._stamps.discard(stamp)
        _SHARED_HERE.pop(stamp, None)

    def holds(self, stamp: int) -> bool:
        """Whether the memory with this stamp is live, and lies on the GPU."""
        return stamp in self._stamps

    def copy(self, source: _GpuSource, target_address: int, runs: Runs) -> int:
        """Copy runs, which lie inside both; every byte is there when this returns. Raises RangeError or TransportError."""
        runs = runs[runs[:, 2] > 0]
        if not len(runs):
            return 0
        target = Placement([Segment(0, int((runs[:, 1] + runs[:, 2]).max()), target_address)])
        with self.lock, source.reading() as place:
            place.check(runs, 0, "source")
            try:
                self._copier.start(launches_for(runs, place, target), place.floor, target.floor)
            finally:
                # However long the GPU takes: until it is done, the target changes.
                while not self._copier.wait(self._timeout_s):
                    _log.warning("a copy on the GPU has not ended within %g s; its memory cannot be withdrawn", self._timeout_s)
        return int(runs[:, 2].sum())

    def close(self) -> None:
        """Release the GPU, when no copy is under way and no mapping is left. Idempotent."""
        for stamp in list(self._stamps):
            self.forget(stamp)
        with self.lock:
            self._copier.close()
            self.driver.close()


class GpuSources:
    """What one connection has mapped of its peer's GPU memories. Safe to use from any thread."""

    def __init__(self) -> None:
        self._gpu: ExchangeGpu | None = None
        self._open: dict[int, _MappedSource] = {}
        self._is_closed = False

    def find(self, gpu: ExchangeGpu, handle: MemoryHandle) -> _GpuSource:
        """The memory that `handle` names, mapped if it is not yet; hold the lock of `gpu` for as long as that is used.

        Raises TransportError or RangeError.
        """
        here = _SHARED_HERE.get(handle.stamp)
        if here is not None:
            device, table, slot = here
            if device != gpu.device:
                raise TransportError(f"memories on GPUs {device} and {gpu.device} of one process: use one process for each")
            return _OwnSource(table, slot, handle.stamp)
        with gpu.lock:
            if handle.stamp not in self._open:
                self._map(gpu, handle)
            return self._open[handle.stamp]

    def _map(self, gpu: ExchangeGpu, handle: MemoryHandle) -> None:
        if handle.gpu_owner == gpu.owner:  # and it is not among those that are live here
            raise RangeError(f"the GPU memory in slot {handle.slot} is not registered (any more)")
        host, here = (owner.partition(" ")[0] for owner in (handle.gpu_owner, gpu.owner))
        if host != here:
            raise TransportError(
                f"GPU memory in slot {handle.slot} is on another host (host_id {host!r}, here {here!r}); memory of GPUs is"
                " moved inside one host"
            )
        # A read may go on for a slice when its connection has failed: what it mapped then would never be closed.
        if self._is_closed:
            raise TransportError("the connection to the peer is closed")
        while len(self._open) >= _MAX_SOURCES:
            self.forget(next(iter(self._open)))
        self._gpu = gpu
        self._open[handle.stamp] = _MappedSource(_mapped(handle, gpu.driver))

    def forget(self, stamp: int) -> None:
        """Close one mapping, if it is open."""
        if self._gpu is not None:
            with self._gpu.lock:
                if (source := self._open.pop(stamp, None)) is not None:
                    try:
                        source.mapping.close(self._gpu.driver)
                    except TransportError as error:
                        _log.warning("GPU memory of a peer stays mapped: %s", error)

    def close(self) -> None:
        """Close every mapping, and open none from now on. Idempotent."""
        self._is_closed = True
        for stamp in list(self._open):
            self.forget(stamp)


class GpuReader:
    """Reads one GPU memory of a peer for `copy_slices`, as a `ReadableProcess` reads main memory."""

    def __init__(self, gpu: ExchangeGpu, sources: GpuSources, handle: MemoryHandle) -> None:
        self._gpu, self._sources, self._handle = gpu, sources, handle

    def find(self, slot: int, stamp: int) -> tuple[int, int]:
        """Offset 0 and the size of the memory, once it is mapped. Raises RangeError for any other than the handle's."""
        if (slot, stamp) != (self._handle.slot, self._handle.stamp):
            raise RangeError(f"the memory in slot {slot} is not the GPU memory that came with the request")
        self._sources.find(self._gpu, self._handle)
        return 0, self._handle.memory_bytes

    def copy(self, name: tuple[int, int], source_address: int, target_address: int, runs: Runs) -> int:  # noqa: ARG002 - found
        """Copy runs; returns how many bytes. Raises KVBatonError."""
        with self._gpu.lock:
            return self._gpu.copy(self._sources.find(self._gpu, self._handle), target_address, runs)


def open_gpu(address: int, device: int, owner: str, timeout_s: float) -> ExchangeGpu:
    """The GPU with the number `device`, if memory at `address` is on it; `owner` names this process.

    Raises ConfigError without a driver, torch and Triton, TransportError when no allocation of the GPU holds the address.
    """
    driver = CudaDriver(device)
    try:
        driver.allocation(address)
        return ExchangeGpu(device, owner, timeout_s, driver, GpuCopier(device))
    except BaseException:
        driver.close()
        raise


def _mapped(handle: MemoryHandle, driver: MemoryDriver) -> Mapping:
    parts = read_parts(handle.gpu_parts, handle.memory_bytes)
    # Parts do not overlap, so their sum shows that there is no gap: a kernel that reads one would end the GPU's context.
    if sum(part.part_bytes for part in parts) != handle.memory_bytes:
        raise RangeError(f"GPU memory in slot {handle.slot} of {handle.memory_bytes} bytes is shared in parts with gaps")
    return open_parts(parts, driver)
