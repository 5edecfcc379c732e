"""Where vLLM's caches lie, and what follows from that: memory of this machine's processors, or of a GPU.

Theory of operation. On CPUs a hook is called when its work is done. On a GPU every hook runs on vLLM's thread while the work is
only queued on a stream, and step n+1 is built before step n has run. Two things follow; neither may make vLLM's thread wait.

1. A layer counts as computed when its kernels have *finished*. `QueueGate` therefore records an event where a hook reports a
   layer, and the report is made when the event has come. That is so on every rank: the first one counts the reports, and
   announces a layer when it has that of each rank. Nothing else has to wait. A retraction or an end first makes the counting
   forget its hand-off, so that a report that comes later announces nothing. An offer is made when vLLM has sampled a token, so
   all of its layers have been computed on every rank, and the counting announces those whose reports are on their way.
2. Blocks that vLLM gives to a target may still be written by a step that is queued: with async scheduling a request that has
   ended is computed once more, and that step writes a token into blocks that are free by then. So a copy into a target's blocks
   starts only after everything that was queued when they were allocated. `EngineOrderedTransport` posts every batch with such a
   condition. Poison is queued on the same stream, and waited for in the same way. Another rank may not even have queued that
   step yet: so the agents learn of the blocks when every rank has reached the step that allocates them (`reached_steps.py`).

The other direction needs nothing: a copy has landed when its stream has run to its end, vLLM learns that on the host, and
queues the first step that reads it later.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbaton.core.card import Endpoint
from kvbaton.errors import ConfigError, KVBatonError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    PeerRank,
    Region,
    Ticket,
    Transport,
)
from kvbaton.transport.cuda.region import DeviceRegion

__all__ = [
    "BlockRows",
    "CudaDevice",
    "DeviceEvent",
    "EngineDevice",
    "EngineOrderedTransport",
    "Gate",
    "HostDevice",
    "OpenGate",
    "QueueGate",
    "QueueingDevice",
    "device_of",
    "shareable_memory",
]

log = logging.getLogger(__name__)

_STOP_S = 10.0


class DeviceEvent(Protocol):
    """A point in the order of a device's work."""

    def query(self) -> bool:
        """Whether everything before it is done; does not wait. Raises when the device has failed."""

    def synchronize(self) -> None:
        """Wait until everything before it is done. Raises when the device has failed."""


class BlockRows(NamedTuple):
    """The blocks of one layer: where the first begins, how many there are, their size, and from each to the next."""

    address: int
    blocks: int
    block_bytes: int
    step_bytes: int

    @property
    def extent(self) -> int:
        """From the first to the last byte."""
        return (self.blocks - 1) * self.step_bytes + self.block_bytes


class Gate(Protocol):
    """The order between the device of a rank and its hand-offs. Belongs to vLLM's thread."""

    def when_computed(self, call: Callable[[], None], failed: Callable[[], None]) -> None:
        """Make `call` when everything is done that vLLM has asked of the device so far, or `failed` when that cannot be."""

    def allocating(self) -> None:
        """Blocks go to a target: what is copied from now on comes after everything that is queued now."""

    def close(self) -> None:
        """End what waits. Idempotent."""


class OpenGate:
    """For main memory: what a hook reports is done."""

    def when_computed(self, call: Callable[[], None], failed: Callable[[], None]) -> None:
        del failed
        call()

    def allocating(self) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        """Nothing waits."""


class EngineDevice(Protocol):
    """What the connector needs to know of the device that holds the caches."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What decides, beside the model, whether two instances mean the same by their caches."""

    @property
    def reorders_blocks(self) -> bool:
        """Whether its kernels keep a block in an order of their own, which no shape shows."""

    def region(self, ranges: Sequence[tuple[int, int]]) -> Region:
        """The memory of these (address, bytes), which hold all caches."""

    def fill_blocks(self, rows: BlockRows, chosen: Sequence[int], byte: int) -> None:
        """Fill these blocks; copies that are posted later come after that."""

    def gate(self) -> Gate:
        """What keeps the order of its work and of hand-offs; to be closed."""

    def ordered(self, transport: Transport) -> Transport:
        """What the agents post to in the place of `transport`."""


class HostDevice:
    """Main memory: what a hook reports is done."""

    reorders_blocks = True

    def __init__(self, kinds: tuple[str, ...] = ()) -> None:
        self.kinds = kinds

    def region(self, ranges: Sequence[tuple[int, int]]) -> Region:
        """Everything from the first to the last byte."""
        start = min(address for address, _ in ranges)
        count = max(address + size for address, size in ranges) - start
        memory = (ctypes.c_uint8 * count).from_address(start)
        return Region.of(np.frombuffer(memoryview(memory), np.uint8))

    def fill_blocks(self, rows: BlockRows, chosen: Sequence[int], byte: int) -> None:
        memory = (ctypes.c_uint8 * rows.extent).from_address(rows.address)
        array = np.frombuffer(memoryview(memory), np.uint8)
        blocks = np.lib.stride_tricks.as_strided(array, (rows.blocks, rows.block_bytes), (rows.step_bytes, 1))
        blocks[np.asarray(chosen, np.int64)] = byte

    def gate(self) -> Gate:
        return OpenGate()

    def ordered(self, transport: Transport) -> Transport:
        return transport


class QueueingDevice:
    """A device whose work is queued: what GPUs, and their stand-in, have in common. `mark` belongs to vLLM's thread."""

    def __init__(self) -> None:
        self.last_allocation: DeviceEvent | None = None
        """What was queued when blocks were last given to a target."""

    def mark(self) -> DeviceEvent:
        """An event behind everything that is queued now."""
        raise NotImplementedError

    def allocating(self) -> None:
        """Blocks go to a target: what is posted from now on comes after everything that is queued now."""
        self.last_allocation = self.mark()

    def gate(self) -> QueueGate:
        """One that opens for what has been computed, and not for what was queued."""
        return QueueGate(self)

    def ordered(self, transport: Transport) -> EngineOrderedTransport:
        """One whose copies come after the steps that may still write to their blocks."""
        return EngineOrderedTransport(transport, self)


class CudaDevice(QueueingDevice):
    """One NVIDIA GPU, as torch in vLLM's worker uses it. `caches` are the registered tensors, in the order of their layers."""

    kinds: tuple[str, ...] = ("cuda",)
    reorders_blocks = False

    def __init__(self, torch: Any, caches: Sequence[Any]) -> None:
        super().__init__()
        self._torch = torch
        self._caches = tuple(caches)
        self._index = int(self._caches[0].device.index or 0)
        self._storages = [cache.untyped_storage() for cache in self._caches]

    def region(self, ranges: Sequence[tuple[int, int]]) -> DeviceRegion:
        """Where the tensors lie, whatever their views look like; they are kept alive."""
        return DeviceRegion.of_ranges(self._index, ranges, self._caches)

    def fill_blocks(self, rows: BlockRows, chosen: Sequence[int], byte: int) -> None:
        """On the stream of the engine, so that it comes after the steps that still write there."""
        storage = next(each for each in self._storages if each.data_ptr() <= rows.address < each.data_ptr() + each.nbytes())
        flat = self._torch.empty(0, dtype=self._torch.uint8, device=storage.device)
        flat.set_(storage, rows.address - storage.data_ptr(), (rows.blocks, rows.block_bytes), (rows.step_bytes, 1))
        ids = self._torch.tensor(list(chosen), dtype=self._torch.int64).pin_memory().to(storage.device, non_blocking=True)
        flat.index_fill_(0, ids, byte)
        self.allocating()

    def mark(self) -> DeviceEvent:
        # Blocking: the thread that waits for it must not keep a core busy for the length of a prefill.
        event: DeviceEvent = self._torch.cuda.Event(blocking=True)
        event.record(self._torch.cuda.current_stream(self._index))  # type: ignore[attr-defined]
        return event


def device_of(caches: Iterable[Any], host_kinds: tuple[str, ...] = ()) -> EngineDevice:
    """The device that holds all of these tensors. Raises ConfigError for several, and for one that is not known."""
    tensors = [tensor for tensor in caches if hasattr(tensor, "device")]
    found = sorted({str(tensor.device) for tensor in tensors})
    if len(found) > 1:
        raise ConfigError(f"the caches of one worker lie on {', '.join(found)}; a worker has one device")
    kind = tensors[0].device.type if tensors else "cpu"
    if kind == "cpu":
        return HostDevice(host_kinds)
    if kind not in CudaDevice.kinds:
        raise ConfigError(f"the caches lie on {found[0]}; main memory and NVIDIA GPUs can be handed over so far")
    import torch

    return CudaDevice(torch, tensors)


@contextmanager
def shareable_memory(torch: Any) -> Iterator[None]:
    """What torch allocates in this context can be shared by CUDA IPC: plain cudaMalloc, in a pool of its own.

    Virtual memory (expandable segments, vLLM's cumem allocator) cannot.
    """
    settings = torch.cuda.memory._set_allocator_settings  # noqa: SLF001 - torch has no public name for it; vLLM calls it too
    was_expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings("expandable_segments:False")
    try:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            yield
    finally:
        if was_expandable:
            settings("expandable_segments:True")


class QueueGate:
    """Makes calls when the device has done what was queued before them, in their order; see the module's text.

    One thread waits for the device. A call that fails there, or a device that has, is logged, and `failed` is called.
    """

    def __init__(self, device: QueueingDevice) -> None:
        self._device = device
        self._waiting: deque[tuple[DeviceEvent, Callable[[], None], Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvbaton-device", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Calls that wait for the device, or behind one that does."""
        return len(self._waiting)

    def when_computed(self, call: Callable[[], None], failed: Callable[[], None]) -> None:
        event = self._device.mark()
        with self._changed:
            self._waiting.append((event, call, failed))
            self._changed.notify()

    def allocating(self) -> None:
        self._device.allocating()

    def close(self) -> None:
        """End the thread; what waits is dropped. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                event, call, failed = self._waiting[0]
            try:
                event.synchronize()
                call()
            except (KVBatonError, RuntimeError):  # torch raises RuntimeError when the device has failed
                log.exception("computed layers could not be announced")
                failed()
            with self._changed:
                self._waiting.popleft()


class EngineOrderedTransport:
    """`inner`, with each batch after what the engine had queued when it last gave blocks to a target."""

    def __init__(self, inner: Transport, device: QueueingDevice) -> None:
        self.name, self.late_writes, self.directions = inner.name, inner.late_writes, inner.directions
        self._inner = inner
        self._device = device

    @property
    def inner(self) -> Transport:
        return self._inner

    @property
    def wakeup_fd(self) -> int:
        return self._inner.wakeup_fd

    @property
    def batch_bytes(self) -> int:
        """That of the inner one."""
        return self._inner.batch_bytes

    def endpoint(self) -> Endpoint:
        return self._inner.endpoint()

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        self._inner.connect(peer, endpoint)

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        """A read fills blocks of this side; a write comes from blocks that were announced, so they are computed."""
        event = self._device.last_allocation if batch.direction is Direction.READ else None
        if event is None or event.query():
            return self._inner.post(batch, after)
        if after is None:
            return self._inner.post(batch, event.query)
        return self._inner.post(batch, lambda: event.query() and after())

    def poll(self) -> list[Completion]:
        return self._inner.poll()

    def cancel(self, ticket: Ticket) -> None:
        self._inner.cancel(ticket)

    def revoke(self, peer: PeerRank) -> None:
        self._inner.revoke(peer)

    def close(self) -> None:
        self._inner.close()
