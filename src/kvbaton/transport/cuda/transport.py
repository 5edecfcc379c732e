"""Runs between the memory of GPUs of one host: the target maps the source's memory and copies it with a kernel of its own.

Why no peer writes late: a peer's memory is mapped here to be read, and every copy into this side's memory is a kernel on this
side's stream, which the mover waits for before it completes the batch. A kernel that has started cannot be stopped, but it
takes well below a millisecond; a cancel or a revoke takes effect when it has ended.

Order after the producer: a condition on the host (`after`), not an event that a stream waits for. A stream that waits for an
event of a peer cannot be cancelled and has no deadline: one peer that stands still would hold up every other. And it would save
nothing: a target reads what its source has announced, and the source announces what its own event shows to be done.
`queued_so_far` makes such a condition from a stream.

A batch of few numbers is *begun* by `post` while nothing else moves: checked, launched, and left to the GPU. It writes a number
at the end, for which a thread in C waits, and that wakes the caller. No thread waits for the GPU then, nor for the interpreter.
Where it is known how long copies take, the caller is woken a moment before the end, which `poll` then waits for (wait_flag.c).

A peer that dies: the driver keeps memory alive while a process maps it, so a kernel that reads it does no harm; the peer's
process is looked up after the last byte, and by the mover before every launch too, and a batch of a process that is gone is an
error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvbaton.core.strips import Plan, count_bytes, unroll
from kvbaton.errors import ConfigError, PeerError, RangeError, TransportError
from kvbaton.transport.base import AfterEvent, Batch, Direction, Endpoint, PeerRank, Region, Runs, Ticket, TransportSettings
from kvbaton.transport.checks import check_batch
from kvbaton.transport.cuda.copier import AnyLaunch, Copier, GpuCopier
from kvbaton.transport.cuda.driver import CudaDriver, MemoryDriver
from kvbaton.transport.cuda.launch import Placement, launches_for
from kvbaton.transport.cuda.quick_start import MOST_ROWS, Kernels
from kvbaton.transport.cuda.region import DeviceRegion, Mapping, open_parts, read_parts, share_region, write_parts
from kvbaton.transport.cuda.strip_launch import strip_launches
from kvbaton.transport.neighbour import Neighbour, NeighbourWatch
from kvbaton.transport.queued import Ledger, QueuedTransport, SliceMover, detail
from kvbaton.transport.runs import RunCursor, StripTable, load_loops

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
    region_bytes: int


class _GpuReach:
    """Copies with the kernel; owns the mappings of peers from `add` to `release`."""

    def __init__(self, region: DeviceRegion, driver: MemoryDriver, copier: Copier, timeout_s: float) -> None:
        self.target = Placement(region.spans)
        self._driver = driver
        self._copier = copier
        self._timeout_s = timeout_s
        self._open: set[_PeerMemory] = set()

    def add(self, link: _PeerMemory) -> _PeerMemory:
        """Own the mapping of `link` from now on."""
        self._open.add(link)
        return link

    def check(self, link: _PeerMemory, runs: Runs | StripTable) -> Runs | StripTable:
        """Runs as they are copied. Raises RangeError when one lies where one of the regions has no memory."""
        if isinstance(runs, StripTable) and strip_launches(runs.plan, link.mapping.placement, self.target) is not None:
            return runs
        return self.listed(link, runs)

    def copy(self, link: _PeerMemory, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        self.confirm(link)
        plan, source = cursor.whole_plan(most_bytes), link.mapping.placement
        launches: Sequence[AnyLaunch] | None = None
        if plan is not None:
            launches, moved = strip_launches(plan, source, self.target), plan.wire_bytes
        if launches is None:
            runs = cursor.peek(most_bytes, most_runs)
            launches, moved = launches_for(runs, source, self.target), count_bytes(runs)
        try:
            self._copier.start(launches, source.floor, self.target.floor)
        finally:
            _wait(self._copier, self._timeout_s)
        return moved

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

    def listed(self, link: _PeerMemory, runs: Runs | StripTable) -> Runs:
        """Runs one by one. Raises RangeError when one lies where one of the regions has no memory."""
        listed = np.asfortranarray(unroll(runs.plan)) if isinstance(runs, StripTable) else runs
        link.mapping.placement.check(listed, 0, "source")
        self.target.check(listed, 1, "target")
        return listed


class _GpuStarter:
    """Begins batches in `post`, on a stream of its own; see `Starter`."""

    def __init__(self, region: DeviceRegion, reach: _GpuReach, copier: Copier, settings: TransportSettings) -> None:
        self._region_bytes = region.region_bytes
        self._reach = reach
        self._copier = copier
        self._most_bytes = settings.launch_bytes
        self._timeout_s = settings.timeout_s
        self._loops = load_loops()
        self._failure = ""

    def begin(self, link: _PeerMemory, batch: Batch, wakeup_fd: int) -> int:
        """Leave a batch to the GPU. What would take longer than a moment, to unroll or to compile, is left to the mover."""
        copier, runs, self._failure = self._copier, batch.runs, ""
        if not copier.can_wake:
            return 0
        try:
            begun = 0
            if isinstance(runs, Plan):
                # Whether the peer lives is asked at the end alone: its memory stays, and this is on the way of every batch.
                sizes, places = (link.region_bytes, self._region_bytes), (link.mapping.placement, self._reach.target)
                begun = copier.check_and_start(runs, sizes, *places, wakeup_fd, self._most_bytes)
            return begun or self._begin_checked(link, batch, wakeup_fd)
        except RangeError:
            raise
        except BaseException:
            self.wait_end()
            raise

    def has_ended(self) -> bool:
        try:
            return self._copier.has_ended()
        except TransportError as error:
            self._failure = str(error)
            return True

    def is_near(self) -> bool:
        return self._copier.is_near()

    def linger(self) -> bool:
        return self._copier.linger()

    def wait_end(self) -> None:
        try:
            _wait(self._copier, self._timeout_s)
        except TransportError as error:  # the GPU has failed: it copies nothing any more
            self._failure = str(error)

    def confirm(self, link: _PeerMemory) -> None:
        if self._failure:
            raise TransportError(self._failure)
        link.watch.check()

    def close(self) -> None:
        """Give back what copies needed."""
        self._copier.close()

    def _begin_checked(self, link: _PeerMemory, batch: Batch, wakeup_fd: int) -> int:
        """Check a batch and begin it step by step."""
        if _rows(batch) > MOST_ROWS:
            return 0
        runs = check_batch(batch, self._region_bytes, link.region_bytes, self._loops)
        try:
            link.watch.check()
        except PeerError:
            return 0  # the mover reports it
        if not isinstance(runs, StripTable):
            return self._begin_runs(link, runs, wakeup_fd)
        return self._copier.start_plan(runs, link.mapping.placement, self._reach.target, wakeup_fd, self._most_bytes)

    def _begin_runs(self, link: _PeerMemory, runs: Runs, wakeup_fd: int) -> int:
        source, target, wire_bytes = link.mapping.placement, self._reach.target, count_bytes(runs)
        if not 0 < wire_bytes <= self._most_bytes:
            return 0
        launches = launches_for(self._reach.listed(link, runs), source, target)
        if not self._copier.is_ready(launches):
            return 0
        self._copier.start(launches, source.floor, target.floor, wakeup_fd)
        return wire_bytes


def _wait(copier: Copier, timeout_s: float) -> None:
    """Until target memory is quiet: a batch must not complete before, however long the GPU takes."""
    while not copier.wait(timeout_s):
        log.warning("a copy on the GPU has not ended within %g s; its batch stays in flight until it has", timeout_s)


def _rows(batch: Batch) -> int:
    """How many numbers there are to check."""
    if not isinstance(batch.runs, Plan):
        return batch.runs.size // 3
    tokens = sum(strip.pattern.items.size for strip in batch.runs.strips if strip.pattern is not None)
    return (tokens + sum(strip.slots.size + strip.places.size for strip in batch.runs.strips)) // 3


def _has_come(after: AfterEvent | None) -> bool:
    """Whether a batch need not wait; an event that raises is left to the mover, which reports it."""
    try:
        return after is None or bool(after())
    except Exception:  # noqa: BLE001 - the caller's event may raise anything
        return False


class CudaTransport(QueuedTransport[_PeerMemory]):
    """Reads from GPU memory of processes of this host; lets them read this rank's region. Needs `kvbaton[cuda]`."""

    name = "cuda"

    def __init__(
        self,
        region: Region,
        settings: TransportSettings,
        driver: MemoryDriver | None = None,
        copiers: tuple[Copier, Copier | None] | None = None,
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
            kernels = Kernels()
            copier = copiers[0] if copiers else GpuCopier(region.device, kernels)
            parts.callback(copier.close)
            starting = copiers[1] if copiers else GpuCopier(region.device, kernels, wakes=True)
            self._parts = share_region(region, self._driver)
            self._reach = _GpuReach(region, self._driver, copier, settings.timeout_s)
            self._starter = _GpuStarter(region, self._reach, starting, settings) if starting is not None else None
            if self._starter is not None:
                parts.callback(self._starter.close)
            ledger: Ledger[_PeerMemory] = Ledger(region, settings, self._reach.check, self._starter)
            mover = SliceMover("cuda", ledger, settings, self._reach, settings.launch_bytes, MAX_LAUNCH_RUNS)
            parts.pop_all()
        super().__init__(region, settings, ledger, mover)
        # A launch takes longer to begin and to be seen than 100 MiB to copy, and beside kernels of another process each
        # launch waits for a time slice.
        self.batch_bytes = settings.launch_bytes

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        if batch.direction is Direction.READ and _has_come(after):
            ticket = self._ledger.begin_now(batch)
            if ticket is not None:
                return ticket
        return super().post(batch, after)

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
            return self._reach.add(_PeerMemory(process.pid, watch, mapping, endpoint.region_bytes))
        except (PeerError, TransportError) as error:
            raise TransportError(
                f"{name} cannot be reached: {error} (its GPU is {gpu}, this one {self._driver.gpu_id()})"
            ) from error

    def _unlink(self, link: _PeerMemory) -> None:
        self._reach.release(link)

    def _release(self) -> None:
        if self._starter is not None:
            self._starter.close()
        self._reach.close()
