"""Reads the memories of another process of this host: its board, which shows what is live, and their bytes.

Large transfers out of shared memory are copied where this process has mapped it; everything else by `process_vm_readv`.
"""

from __future__ import annotations

import array
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvbaton.core.plan import Runs
from kvbaton.errors import KVBatonError, RangeError, TransportError
from kvbaton.transport.base import Region
from kvbaton.transport.exchange.memories import BOARD_ROW_BYTES
from kvbaton.transport.neighbour import Neighbour, NeighbourWatch, ProcessMemory
from kvbaton.transport.runs import CopyCrew, RunCursor, load_loops
from kvbaton.transport.shared_memory import SharedMapping

__all__ = ["CopyHelpers", "ReadableProcess"]

_WORTH_SPLITTING_BYTES = 512 << 10
_MOST_ROWS = 4096
_STAMP_BYTES = 8


class CopyHelpers:
    """The threads that share large slices with the one that copies; started when there is something to share."""

    def __init__(self, threads: int) -> None:
        self._helpers = min(threads, len(os.sched_getaffinity(0))) - 1
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._crew: CopyCrew | None = None
        self._copying = threading.Lock()  # a crew works for one thread at a time

    @property
    def parts(self) -> int:
        """Into how many parts a large slice is worth cutting."""
        return 1 if self._closed else self._helpers + 1

    def submit(self, copy: RunsCopy, runs: Runs) -> Future[None]:
        """Copy some runs in another thread."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, "kvbaton-exchange-copier")
            return self._pool.submit(copy.copy, runs)

    def can_copy_mapped(self) -> bool:
        """Whether `copy_mapped` can be used: the loops in C are there."""
        with self._copying:
            if self._crew is None and not self._closed and (loops := load_loops()) is not None:
                self._crew = CopyCrew(loops, self._helpers)
            return self._crew is not None

    def copy_mapped(self, target_address: int, source_address: int, runs: Runs) -> None:
        """Copy runs of memory that this process has mapped. Raises TransportError once this is closed."""
        cursor = RunCursor(runs)
        with self._copying:
            if self._crew is None:
                raise TransportError("the exchange is closed")
            while cursor.remaining_bytes:
                sizes = cursor.remaining_bytes, len(runs) + 1
                cursor.advance(self._crew.copy(target_address, source_address, cursor, *sizes))

    def close(self) -> None:
        """End the threads once they are done. Idempotent."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False)
        with self._copying:
            crew, self._crew = self._crew, None
            if crew is not None:
                crew.close()


class RunsCopy:
    """Copies runs from one address of a process to one address here."""

    def __init__(self, memory: ProcessMemory, pid: int, source_address: int, target_address: int) -> None:
        self._memory = memory
        self._places = (pid, source_address, target_address)

    def copy(self, runs: Runs) -> None:
        """Copy all of them. Raises KVBatonError."""
        cursor = RunCursor(runs)
        while cursor.remaining_bytes:
            cursor.advance(self._memory.read(*self._places, cursor.peek(cursor.remaining_bytes)))


class ReadableProcess:
    """Another process of this host (or this one), whose memories are read. Safe to use from any thread until `close`."""

    def __init__(self, memory: ProcessMemory, neighbour: Neighbour, board_address: int, helpers: CopyHelpers) -> None:
        """Raises PeerLost when the process is gone, TransportError when it may not be read."""
        self._memory = memory
        self._helpers = helpers
        self._pid = neighbour.pid
        self._board_address = board_address
        self._watch = NeighbourWatch(neighbour)
        self._rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._mapped: dict[int, npt.NDArray[np.uint8] | None] = {}
        self._watching = threading.Lock()  # its poll object refuses a second thread
        try:
            self.read_bytes(board_address, 1)
        except BaseException:
            self.close()
            raise

    def find(self, slot: int, stamp: int) -> tuple[int, int]:
        """Address and size of a memory that the process has registered now. Raises RangeError for any other, PeerLost."""
        with self._watching:
            self._watch.check()
        row = np.frombuffer(self.read_bytes(self._board_address + slot * BOARD_ROW_BYTES, BOARD_ROW_BYTES), np.uint64)
        if int(row[0]) != stamp:
            self._mapped.pop(stamp, None)
            raise RangeError(f"process {self._pid} has withdrawn the memory in slot {slot}")
        if row[3] and stamp not in self._mapped:
            if len(self._mapped) >= _MOST_ROWS:
                self._mapped.clear()
            self._mapped[stamp] = self._map(*row[2:].tolist())
        return int(row[1]), int(row[2])

    def copy(self, name: tuple[int, int], source_address: int, target_address: int, runs: Runs) -> int:
        """Copy runs, in several threads where that pays; returns how many bytes. Raises KVBatonError."""
        total, parts = int(runs[:, 2].sum()), self._helpers.parts
        # Kept here until the copy is over: another thread may drop it meanwhile, and the pages with it.
        mapped = self._mapped.get(name[1])
        if mapped is not None:
            self._helpers.copy_mapped(target_address, int(mapped.ctypes.data), runs)
            return total
        copy = RunsCopy(self._memory, self._pid, source_address, target_address)
        if total < _WORTH_SPLITTING_BYTES or parts == 1:
            copy.copy(runs)
            return total
        cursor = RunCursor(runs)
        others: list[tuple[Future[None], Runs]] = []
        part_bytes = -(-total // parts)
        mine = cursor.peek(part_bytes, len(runs) + 1)
        cursor.advance(int(mine[:, 2].sum()))
        try:
            while cursor.remaining_bytes:
                part = cursor.peek(part_bytes, len(runs) + 1)
                cursor.advance(int(part[:, 2].sum()))
                others.append((self._helpers.submit(copy, part), part))
            copy.copy(mine)
            for other, part in reversed(others):
                # On a busy machine a helper may not run for milliseconds, in which this thread has copied its part as well.
                if other.cancel():
                    copy.copy(part)
        finally:
            # Whatever happened here: nothing may touch the target after this returns.
            ends = [other.exception() for other, _ in others if not other.cancelled()]
            problems = [problem for problem in ends if problem is not None]
        if problems:
            raise problems[0]
        return total

    def copy_few(self, name: tuple[int, int], target_address: int, target_bytes: int, runs: Sequence[Sequence[int]]) -> int:
        """Copy a few runs out of a memory, and look at its row after the last byte, in one system call; returns the bytes.

        For small transfers, where the calls around the copy would be the larger part. A memory keeps its address for as long as
        it has its stamp, so the row is read beforehand only once. Raises RangeError, and KVBatonError as `copy` does.
        """
        slot, stamp = name
        if name not in self._rows:
            if len(self._rows) >= _MOST_ROWS:
                self._rows.clear()
            self._rows[name] = self.find(slot, stamp)
        source_address, source_bytes = self._rows[name]
        row = array.array("Q", (0,))
        here: list[int] = []
        there: list[int] = []
        total = 0
        for source, target, count in runs:
            if source + count > source_bytes or target + count > target_bytes:
                sizes = f"{source_bytes} and {target_bytes}"
                raise RangeError(f"{count} bytes from offset {source} to {target} lie outside memories of {sizes} bytes")
            here += (target_address + target, count)
            there += (source_address + source, count)
            total += count
        here += (row.buffer_info()[0], _STAMP_BYTES)
        there += (self._board_address + slot * BOARD_ROW_BYTES, _STAMP_BYTES)
        moved = self._memory.read_pieces(self._pid, array.array("Q", here), array.array("Q", there))
        if moved != total + _STAMP_BYTES or row[0] != stamp:
            self._rows.pop(name, None)
            raise RangeError(f"process {self._pid} has withdrawn the memory in slot {slot}")
        return total

    def _map(self, memory_bytes: int, numbered_fd: int, inode: int, offset: int) -> npt.NDArray[np.uint8] | None:
        """Shared memory of the process, mapped; None where that cannot be done, and it is read like any other."""
        if self._pid == os.getpid() or not self._helpers.can_copy_mapped():
            return None
        try:
            return SharedMapping(self._pid, numbered_fd - 1, inode, offset + memory_bytes).array[offset:]
        except (KVBatonError, OSError, ValueError, OverflowError):
            return None

    def read_bytes(self, address: int, count: int) -> bytes:
        """Some bytes at an address of the process. Raises KVBatonError."""
        spare = Region.of(bytearray(count))
        done = 0
        while done < count:
            rest = np.array([[done, done, count - done]], np.uint64)
            done += self._memory.read(self._pid, address, spare.address, rest)
        return bytes(spare.view)

    def check_challenge(self, address: int, challenge: bytes) -> None:
        """Raise TransportError unless the process holds `challenge` at `address`: then it is the one at the other end."""
        shown = self.read_bytes(address, len(challenge))
        if shown != challenge:
            raise TransportError(f"process {self._pid} is not the one at the other end of the connection")

    def close(self) -> None:
        """Give the descriptor of the process and what was mapped back. Idempotent."""
        self._mapped.clear()
        self._watch.close()
