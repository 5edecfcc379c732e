"""The memories of one exchange: which are live, how many copies are in each, and the board on which peers of this host look.

The *board* is an array at a fixed address of this process: a row per slot with stamp, address, size, and for shared memory the
descriptor (plus 1), the inode and the offset in the file, so that peers can map it. A peer on this host reads the row before
and after it copies out of a memory, with the call that it copies with. A row is written address first and stamp last, and
cleared stamp first, so a row with the right stamp is complete. Stamps are random and never repeat: what was copied while a
memory was withdrawn, or its slot given to another one, is noticed by the second look.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, OrderedDict

import numpy as np

from kvbaton.errors import ConfigError, RangeError, TransportError
from kvbaton.transport.exchange.base import MemoryHandle
from kvbaton.transport.shared_memory import SharedPlace

__all__ = ["BOARD_ROW_BYTES", "MAX_MEMORIES", "MemoryTable", "NoticeTable", "check_place"]

MAX_MEMORIES = 1 << 16
BOARD_ROW_BYTES = 48
_MAX_ADDRESS = 1 << 63
_STAMP, _ADDRESS, _BYTES, _FILE = 0, 1, 2, slice(3, 6)


def check_place(address: int, memory_bytes: int) -> None:
    """Raise ConfigError for memory that no process can have."""
    if not 0 < address < _MAX_ADDRESS or not 0 < memory_bytes <= _MAX_ADDRESS - address:
        raise ConfigError(f"memory at {address:#x} with {memory_bytes} bytes cannot be registered: it is no memory")


class MemoryTable:
    """Live memories by slot. Safe to use from any thread."""

    def __init__(self, timeout_s: float, most: int = MAX_MEMORIES) -> None:
        self._timeout_s = timeout_s
        self._board = np.zeros((most, BOARD_ROW_BYTES // 8), np.uint64)
        self._live: dict[int, tuple[int, int, int]] = {}
        self._unlisted: set[int] = set()
        self._free: list[int] = []
        self._next_slot = 0
        self._pins: Counter[int] = Counter()
        # Taken for every slice: entering the condition itself would cost two calls in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def board_address(self) -> int:
        """Where the board begins in this process."""
        return int(self._board.ctypes.data)

    def __len__(self) -> int:
        return len(self._live)

    def register(
        self, address: int, memory_bytes: int, *, is_listed: bool = True, shared: SharedPlace | None = None
    ) -> MemoryHandle:
        """Make a memory live; one that is not `is_listed` has no row on the board, as no process could read it that way.

        Raises ConfigError for one that no process can have, or when the table is full.
        """
        check_place(address, memory_bytes)
        stamp = secrets.randbits(62) | 1
        with self._changed:
            if self._free:
                slot = self._free.pop()
            elif self._next_slot < len(self._board):
                slot, self._next_slot = self._next_slot, self._next_slot + 1
            else:
                raise ConfigError(f"{len(self._board)} memories are registered, the limit; withdraw some first")
            self._live[slot] = (stamp, address, memory_bytes)
            if is_listed:
                row = self._board[slot]
                row[_ADDRESS], row[_BYTES] = address, memory_bytes
                row[_FILE] = (0, 0, 0) if shared is None else (shared.fd + 1, shared.inode, shared.offset)
                row[_STAMP] = stamp
            else:
                self._unlisted.add(slot)
        return MemoryHandle(slot, stamp, memory_bytes)

    def withdraw(self, slot: int, stamp: int) -> None:
        """End a memory, and wait until no copy is in it; one that is not live is ignored. TransportError after a time."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            if slot not in self._live or self._live[slot][0] != stamp:
                return
            del self._live[slot]
            self._unlisted.discard(slot)
            self._board[slot] = 0
            # Only slices that began before are waited for: `pin` refuses from here on, so the count can only fall.
            if not self._changed.wait_for(lambda: not self._pins[slot], max(0.0, deadline - time.monotonic())):
                raise TransportError(
                    f"a copy into the memory in slot {slot} did not end within {self._timeout_s:g} s; do not reuse the memory"
                )
            del self._pins[slot]
            self._free.append(slot)

    def withdraw_all(self) -> None:
        """End every memory."""
        for slot, (stamp, _, _) in list(self._live.items()):
            self.withdraw(slot, stamp)

    def find(self, slot: int, stamp: int) -> tuple[int, int]:
        """Address and size of a live memory. Raises RangeError for any other."""
        found = self._live.get(slot)
        if found is None or found[0] != stamp:
            raise RangeError(f"the memory in slot {slot} is not registered (any more)")
        return found[1], found[2]

    def pin(self, slot: int, stamp: int) -> tuple[int, int]:
        """Begin a slice in a memory, which `withdraw` then waits for; returns its address and size. RangeError when it is not
        live.
        """
        with self._lock:
            found = self.find(slot, stamp)
            self._pins[slot] += 1
            return found

    def unpin(self, slot: int) -> None:
        """End a slice."""
        with self._lock:
            self._pins[slot] -= 1
            if not self._pins[slot] and slot not in self._live:
                self._changed.notify_all()

    def check(self) -> None:
        """Assert that board and table agree."""
        with self._changed:
            on_board = {int(slot) for slot in np.flatnonzero(self._board[:, _STAMP])}
            assert on_board == set(self._live) - self._unlisted, "board and table differ"  # noqa: S101
            assert self._unlisted <= set(self._live)  # noqa: S101
            for slot in on_board:
                assert tuple(int(number) for number in self._board[slot, : _BYTES + 1]) == self._live[slot]  # noqa: S101
            assert len(self._live) + len(self._free) <= self._next_slot  # noqa: S101


class NoticeTable:
    """The latest notices, by initiator and tag; the oldest are dropped, and counted. Safe to use from any thread."""

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._notices: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._lock = threading.Lock()
        self.dropped_total = 0

    def __len__(self) -> int:
        return len(self._notices)

    def add(self, initiator: str, tag: int) -> None:
        """Keep a notice."""
        with self._lock:
            self._notices[initiator, tag] = None
            self._notices.move_to_end((initiator, tag))
            while len(self._notices) > self._most:
                self._notices.popitem(last=False)
                self.dropped_total += 1

    def has(self, initiator: str, tag: int) -> bool:
        """Whether a notice is kept; asking does not remove it, as a caller may look in two places."""
        return (initiator, tag) in self._notices
