"""Runs between the memory of GPUs of one host: the target maps the source's memory and copies it with a kernel of its own.

Why no peer writes late: a peer's memory is mapped here to be read, and every copy into this side's memory is a kernel on this
side's stream, which the mover waits for before it completes the batch. A kernel that has started cannot be stopped, but it
takes well below a millisecond; a cancel or a revoke takes effect when it has ended.

Order after the producer: a condition on the host (`after`), not an event that a stream waits for. A stream that waits for an
event of a peer cannot be cancelled and has no deadline: one peer that stands still would hold up every other. And it would save
nothing: a target reads what its source has announced, and the source announces what its own event shows to be done.
`queued_so_far` makes such a condition from a stream.

A peer that dies: the driver keeps memory alive while a process maps it, so a kernel that reads it does no harm; the peer's
process is looked up before every launch and after the last byte, and a batch of a process that is gone is an error.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from kvbaton.errors import ConfigError, PeerError, TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.cuda.copier import Copier, GpuCopier, Placement, launches_for
from kvbaton.transport.cuda.driver import CudaDriver, MemoryDriver
from kvbaton.transport.cuda.region import DeviceRegion, Mapping, open_parts, read_parts, share_region, write_parts
from kvbaton.transport.neighbour import Neighbour, NeighbourWatch
from kvbaton.transport.queued import Ledger, QueuedTransport, SliceMover, detail
from kvbaton.transport.runs import RunCursor

__all__ = ["CudaTransport"]

log = logging.getLogger(__name__)

MAX_LAUNCH_RUNS = 4 << 20
"""Most runs in one launch: bounds the table."""


@dataclass(frozen=True, slots=True, eq=False)
class _PeerMemory:
    """What the mover keeps per peer."""

    pid: int
    watch: NeighbourWatch
    mapping: Mapping


class _GpuReach:
    """Copies with the kernel; owns the mappings of peers from `add` to `release`."""

    def __init__(self, region: DeviceRegion, driver: MemoryDriver, copier: Copier, timeout_s: float) -> None:
        self._target = Placement(region.spans)
        self._driver = driver
        self._copier = copier
        self._timeout_s = timeout_s
        self._open: set[_PeerMemory] = set()

    def add(self, link: _PeerMemory) -> _PeerMemory:
        """Own the mapping of `link` from now on."""
        self._open.add(link)
        return link

    def check(self, link: _PeerMemory, runs: Runs) -> None:
        """Raise RangeError when a run lies where one of the regions has no memory."""
        link.mapping.placement.check(runs, 0, "source")
        self._target.check(runs, 1, "target")

    def copy(self, link: _PeerMemory, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        self.confirm(link)
        runs = cursor.peek(most_bytes, most_runs)
        source = link.mapping.placement
        try:
            self._copier.start(launches_for(runs, source, self._target), source.floor, self._target.floor)
        finally:
            self._wait()
        return int(runs[:, 2].sum())

    def confirm(self, link: _PeerMemory) -> None:
        link.watch.check()

    def release(self, link: _PeerMemory) -> None:
        self._open.discard(link)
        link.watch.close()
        try:
            link.mapping.close(self._driver)
        except TransportError as error:
            log.warning("memory of process %d stays mapped: %s", link.pid, error)

    def close(self) -> None:
        """Release all, and the GPU."""
        for link in tuple(self._open):
            self.release(link)
        self._copier.close()
        self._driver.close()

    def _wait(self) -> None:
        """Until target memory is quiet: a batch must not complete before, however long the GPU takes."""
        while not self._copier.wait(self._timeout_s):
            log.warning("a copy on the GPU has not ended within %g s; its batch stays in flight until it has", self._timeout_s)


class CudaTransport(QueuedTransport[_PeerMemory]):
    """Reads from GPU memory of processes of this host; lets them read this rank's region. Needs `kvbaton[cuda]`."""

    name = "cuda"

    def __init__(
        self, region: Region, settings: TransportSettings, driver: MemoryDriver | None = None, copier: Copier | None = None
    ) -> None:
        """Raises ConfigError when the region is not GPU memory that can be shared, or torch, Triton or the GPU is missing."""
        if not isinstance(region, DeviceRegion):
            raise ConfigError(
                "transport cuda moves GPU memory, and the region is in main memory; choose transport local or tcp"
            )
        self._neighbour = Neighbour.here()
        with ExitStack() as parts:
            self._driver: MemoryDriver = driver or CudaDriver(region.device)
            parts.callback(self._driver.close)
            self._copier: Copier = copier or GpuCopier(region.device)
            parts.callback(self._copier.close)
            self._parts = share_region(region, self._driver)
            parts.pop_all()
        self._reach = _GpuReach(region, self._driver, self._copier, settings.timeout_s)
        ledger: Ledger[_PeerMemory] = Ledger(region, settings, self._reach.check)
        mover = SliceMover("cuda", ledger, settings, self._reach, settings.launch_bytes, MAX_LAUNCH_RUNS)
        super().__init__(region, settings, ledger, mover)
        # A launch takes longer to begin and to be seen than 100 MiB to copy, and beside kernels of another process each
        # launch waits for a time slice.
        self.batch_bytes = settings.launch_bytes

    def _details(self) -> dict[str, str | int]:
        return {**self._neighbour.details(), "gpu": self._driver.gpu_id(), "parts": write_parts(self._parts)}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> _PeerMemory:
        name = f"peer {peer.incarnation!r} rank {peer.rank}"
        process = Neighbour.of(endpoint)
        gpu = detail(endpoint, "gpu", str)
        parts = read_parts(detail(endpoint, "parts", str), endpoint.region_bytes)
        if process.host != self._neighbour.host:
            raise TransportError(f"{name} is on another host ({process.host!r}, here {self._neighbour.host!r}); choose tcp")
        try:
            with ExitStack() as undo:
                watch = NeighbourWatch(process)
                undo.callback(watch.close)
                mapping = open_parts(parts, self._driver)
                undo.pop_all()
            return self._reach.add(_PeerMemory(process.pid, watch, mapping))
        except (PeerError, TransportError) as error:
            raise TransportError(
                f"{name} cannot be reached: {error} (its GPU is {gpu}, this one {self._driver.gpu_id()})"
            ) from error

    def _unlink(self, link: _PeerMemory) -> None:
        self._reach.release(link)

    def _release(self) -> None:
        self._reach.close()
