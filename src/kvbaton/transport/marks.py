"""Marks: how one side notices that its peer has withdrawn its memory, or is another by now, where the library reports neither.

Each side shows a random mark in memory of its own and clears it when it closes. A lane reads the mark after the last byte of a
batch, and before it writes, into a slot that this lane alone has, and compares it with the one in the peer's endpoint.
"""

from __future__ import annotations

import secrets
import threading

import numpy as np

from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Region, Runs

__all__ = ["MARK_BYTES", "Marks"]

MARK_BYTES = 8


class Marks:
    """This side's mark, and slots for the marks of peers, in one piece of memory. Safe to use from any thread.

    There are slots for twice as many peers as `max_peers`: a lane that is being ended keeps its slot until its engine is gone.
    """

    def __init__(self, max_peers: int, lanes: int = 1) -> None:
        self.mark = secrets.randbits(62) | 1
        size = MARK_BYTES * (1 + 2 * max_peers * lanes)
        self.region = Region.of(bytearray(self.mark.to_bytes(MARK_BYTES, "little").ljust(size, b"\0")))
        self._lock = threading.Lock()
        self._free = set(range(MARK_BYTES, size, MARK_BYTES))

    def take_slot(self) -> int:
        """The offset of a slot that is not in use. Raises TransportError when there is none."""
        with self._lock:
            if not self._free:
                raise TransportError("as many sessions are open, or ending, as may be (2 x max_peers); try again")
            return self._free.pop()

    def free_slot(self, slot: int) -> None:
        """Give a slot back."""
        with self._lock:
            self._free.add(slot)

    def run_to(self, slot: int) -> Runs:
        """The run that brings a peer's mark, which lies at the start of its memory, into `slot`."""
        return np.array([[0, slot, MARK_BYTES]], np.uint64)

    def check(self, slot: int, mark: int, peer: object) -> None:
        """Raise PeerLost unless `mark` came into `slot`."""
        found = int.from_bytes(self.region.view[slot : slot + MARK_BYTES], "little")
        if found != mark:
            raise PeerLost(f"{peer} has withdrawn its memory: its mark is {found:#x}, not {mark:#x}")

    def withdraw(self) -> None:
        """Clear this side's mark."""
        self.region.view[:MARK_BYTES] = bytes(MARK_BYTES)
