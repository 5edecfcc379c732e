"""Stamps: numbers in memory of a source, which a target of the same host looks at instead of asking for a confirmation.

A stamp stands in a slot from the moment at which the prefill is complete until the blocks are about to be given back. A target
that still finds it there after its last byte knows that the blocks held what was announced all the time: the source would
answer a question no differently, only later, because an engine keeps the interpreter busy there. No two stamps of a process
are the same, so a slot that is used again shows another hand-off's.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["Stamp", "StampArea", "StampSlots"]

_LARGEST = 1 << 62
"""The largest number on the wire."""


class StampArea(msgspec.Struct, frozen=True, gc=False):
    """Where the stamps of a process lie: a file that it has open under `fd`, recognised by `inode`, with so many slots."""

    fd: int
    inode: int
    slots: int


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """A number, never 0, and the slot in which it stands."""

    slot: Annotated[int, Meta(ge=0, le=_LARGEST)]
    value: Annotated[int, Meta(ge=1, le=_LARGEST)]


class StampSlots:
    """The free slots of an area, and the next stamp. Without an area there are none.

    Stamps begin with a number that depends on `name`, which no other process has: a release that names the stamp of a hand-off
    comes from a target that has seen it.
    """

    def __init__(self, area: StampArea | None, name: str) -> None:
        self._free = [] if area is None else list(range(area.slots - 1, -1, -1))
        self._last = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % _LARGEST

    def __len__(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self) -> Stamp | None:
        """A stamp that was never given out, and a slot for it; None while all are taken."""
        if not self._free:
            return None
        self._last = self._last % _LARGEST + 1
        return Stamp(self._free.pop(), self._last)

    def give(self, stamp: Stamp) -> None:
        """Return the slot of a stamp that was taken."""
        self._free.append(stamp.slot)
