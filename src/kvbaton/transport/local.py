"""Memory of another process on this host, copied by this side's mover: out of shared memory where the peer's region is some,
with `process_vm_readv` elsewhere.

The endpoint names the process by host, pid and start time, and shows a random *mark* that disappears when the transport closes.
Both are checked when a peer is connected and after the last byte of every batch, so that bytes of a recycled pid, or of memory
that was withdrawn, never count as the peer's. Shared memory is mapped read-only: no process can write into a peer's region.
"""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvbaton.errors import PeerError, PeerLost, TransportError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Direction,
    Endpoint,
    PagesMoved,
    PeerRank,
    Plan,
    Region,
    Runs,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.neighbour import Neighbour, NeighbourWatch, ProcessMemory, explain_limits, is_there
from kvbaton.transport.queued import Ledger, QueuedTransport, SliceMover, detail
from kvbaton.transport.runs import MAX_SLICE_RUNS, CopyCrew, Pages, RunCopier, RunCursor, load_loops
from kvbaton.transport.shared_memory import MARK_BYTES, SharedMapping, inode_of, write_mark

__all__ = ["LocalTransport"]

_SLICE_RUNS = 16 * MAX_SLICE_RUNS
_WORTH_SPLITTING_BYTES = 512 << 10
_AT_ONCE_BYTES = 256 << 10
"""Batches up to this size are copied by the caller: waking the mover, and being woken by it, takes longer."""

_BEGUN_RUNS = 4 * MAX_SLICE_RUNS
"""Batches of one slice and at most so many runs are begun by `post`, which checks them with the interpreter's lock."""


@dataclass(slots=True, eq=False)
class _Process:
    """A peer: its process, where its region and its mark lie there, and its memory here where it could be mapped."""

    neighbour: Neighbour
    address: int
    mark_address: int
    mark: int
    watch: NeighbourWatch
    mapping: SharedMapping | None = None
    copier: RunCopier | None = None


class _ProcessReach:
    """Copies slices, in several threads at once where a slice is worth it."""

    def __init__(self, region: Region, memory: ProcessMemory, threads: int, slice_bytes: int) -> None:
        self._region = region
        self._slice_bytes = slice_bytes
        self._memory = memory
        loops = load_loops()
        self._crew = CopyCrew(loops, threads - 1, begins=True) if loops is not None else None
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "kvbaton-local-copier") if threads > 1 else None

    def copy(self, link: _Process, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        if link.copier is not None and link.copier.has_loop:
            _check_there(link)
            return link.copier.copy_on(cursor, most_bytes, most_runs)
        runs = cursor.peek(most_bytes, most_runs)
        total = int(runs[:, 2].sum())
        if self._helpers is None or total < _WORTH_SPLITTING_BYTES:
            self._copy_part(link, runs)
            return total
        slices, parts = RunCursor(runs), []
        while slices.remaining_bytes:
            parts.append(slices.peek(-(-total // self._threads), len(runs) + 1))
            slices.advance(int(parts[-1][:, 2].sum()))
        others = [self._helpers.submit(self._copy_part, link, part) for part in parts[1:]]
        problems = [error for error in [self._try_part(link, parts[0]), *(other.exception() for other in others)] if error]
        if problems:
            raise problems[0]
        return total

    def move_now(self, link: _Process, batch: Batch) -> int:
        """Copy a small batch out of mapped memory, in the calling thread; see `Ledger.move_now`."""
        if link.copier is None or isinstance(batch.runs, Plan):  # a plan has too many runs for this
            return 0
        return link.copier.move_few(batch.runs, _AT_ONCE_BYTES)

    def move_pages(self, link: _Process, pages: Pages) -> tuple[int, int]:
        """The same for pages that are not planned yet; see `Ledger.move_pages`."""
        if link.copier is None or pages.wire_bytes > _AT_ONCE_BYTES:  # what is too long is not planned for nothing
            return 0, 0
        return link.copier.move_pages(pages, _AT_ONCE_BYTES)

    def begin(self, link: _Process, batch: Batch, wakeup_fd: int) -> int:
        """Leave a batch of mapped memory to the helpers; see `Starter`."""
        if link.copier is None or not is_there(link.neighbour.pid):
            return 0
        return link.copier.begin(batch.runs, self._slice_bytes, _BEGUN_RUNS, wakeup_fd)

    def has_ended(self) -> bool:
        return self._crew is None or self._crew.has_ended()

    def is_near(self) -> bool:
        return False

    def linger(self) -> bool:
        return False

    def wait_end(self) -> None:
        if self._crew is not None:
            self._crew.wait_end()

    def confirm(self, link: _Process) -> None:
        # The process first: the mark of one that has died is still readable where it was mapped.
        link.watch.check()
        mark = link.mapping.mark if link.mapping else self._read_mark(link)
        if mark != link.mark:
            raise PeerLost(f"process {link.neighbour.pid} has withdrawn its memory: its mark is {mark:#x}, not {link.mark:#x}")

    def release(self, link: _Process) -> None:
        link.mapping = link.copier = None
        link.watch.close()

    def close(self) -> None:
        """End the helpers; the mover has ended."""
        if self._helpers is not None:
            self._helpers.shutdown()
        if self._crew is not None:
            self._crew.close()

    def open(self, link: _Process, fd: int, inode: int, region_bytes: int) -> None:
        """Map the peer's shared memory, or find out whether its memory may be read. Raises TransportError or PeerLost."""
        try:
            if fd >= 0:
                self._map(link, fd, inode, region_bytes)
            else:
                self._read_at(link, link.address, 1)
            self.confirm(link)
        except BaseException:
            self.release(link)
            raise

    def _map(self, link: _Process, fd: int, inode: int, region_bytes: int) -> None:
        link.mapping = SharedMapping(link.neighbour.pid, fd, inode, region_bytes)
        link.copier = RunCopier(link.mapping.array, np.frombuffer(self._region.view, np.uint8), self._crew)

    def _try_part(self, link: _Process, runs: Runs) -> BaseException | None:
        try:
            self._copy_part(link, runs)
        except (TransportError, PeerError, OSError, ValueError) as error:
            return error
        return None

    def _copy_part(self, link: _Process, runs: Runs) -> None:
        if link.copier is not None:
            _check_there(link)
            link.copier.copy(runs)
            return
        cursor = RunCursor(runs)
        while cursor.remaining_bytes:
            piece = cursor.peek(cursor.remaining_bytes)
            cursor.advance(self._memory.read(link.neighbour.pid, link.address, self._region.address, piece))

    def _read_mark(self, link: _Process) -> int:
        return int.from_bytes(self._read_at(link, link.mark_address, MARK_BYTES), "little")

    def _read_at(self, link: _Process, address: int, count: int) -> bytes:
        spare = Region.of(bytearray(count))
        self._memory.read(link.neighbour.pid, address, spare.address, np.array([[0, 0, count]], np.uint64))
        return bytes(spare.view)


def _check_there(link: _Process) -> None:
    if not is_there(link.neighbour.pid):
        raise PeerLost(f"process {link.neighbour.pid} is gone")


class LocalTransport(QueuedTransport[_Process]):
    """Reads from processes of the same host and user; lets them read this rank's region."""

    name = "local"

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        self._memory = ProcessMemory()
        if region.memory_fd < 0:
            self._let_readers_in()
        self._neighbour = Neighbour.here()
        self._mark = secrets.randbits(62) | 1
        self._shown = Region.of(bytearray(self._mark.to_bytes(MARK_BYTES, "little")))
        if region.memory_fd >= 0:
            write_mark(region, self._mark)
        threads = min(settings.copy_threads, len(os.sched_getaffinity(0)))
        slice_bytes = threads * settings.slice_bytes
        self._reach = _ProcessReach(region, self._memory, threads, slice_bytes)
        ledger: Ledger[_Process] = Ledger(region, settings, starter=self._reach)
        mover = SliceMover("local", ledger, settings, self._reach, slice_bytes, _SLICE_RUNS)
        super().__init__(region, settings, ledger, mover)

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        if after is None and batch.direction is Direction.READ:
            ticket = self._ledger.move_now(batch, self._reach.move_now)
            if ticket is None:
                ticket = self._ledger.begin_now(batch)
            if ticket is not None:
                return ticket
        return super().post(batch, after)

    def move_pages(self, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        """As `PagingTransport`; only small batches out of mapped memory, while nothing else moves."""
        return self._ledger.move_pages(peer, pages, self._reach.move_pages)

    def _let_readers_in(self) -> None:
        """What `process_vm_readv` needs; readers of shared memory open a descriptor in /proc, which Yama does not forbid."""
        self._memory.allow_readers()
        if trouble := explain_limits(self._memory):
            raise TransportError(f"no peer could read this process's memory: {trouble}")

    def _details(self) -> dict[str, str | int]:
        return {
            **self._neighbour.details(),
            "address": self._region.address,
            "mark_address": self._shown.address,
            "mark": self._mark,
            "memory_fd": self._region.memory_fd,
            "inode": inode_of(self._region),
        }

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> _Process:
        name = f"peer {peer.incarnation!r} rank {peer.rank}"
        neighbour, address = Neighbour.of(endpoint), detail(endpoint, "address", int)
        if neighbour.host != self._neighbour.host:
            raise TransportError(
                f"{name} is on another host (host_id {neighbour.host!r}, here {self._neighbour.host!r}); choose transport tcp"
            )
        mark_address, mark = detail(endpoint, "mark_address", int), detail(endpoint, "mark", int)
        for place in (address, mark_address):
            if not 0 < place < 1 << 64 or place + endpoint.region_bytes > 1 << 64:
                raise TransportError(f"{name}: address {place:#x} is not usable; fetch its card again")
        fd, inode = detail(endpoint, "memory_fd", int), detail(endpoint, "inode", int)
        try:
            process = _Process(neighbour, address, mark_address, mark, NeighbourWatch(neighbour))
            self._reach.open(process, fd, inode, endpoint.region_bytes)
        except PeerError as error:
            raise TransportError(f"{name} cannot be reached: {error}") from error
        return process

    def _unlink(self, link: _Process) -> None:
        self._reach.release(link)

    def _release(self) -> None:
        if self._region.memory_fd >= 0:
            write_mark(self._region, 0)
        self._shown.view[:] = bytes(MARK_BYTES)
        self._reach.close()
        for link in self._ledger.links():
            self._reach.release(link)
