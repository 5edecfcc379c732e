"""Stamps in shared memory: those of this process, which peers of this host map read-only, and theirs.

Both directions need code in C (transport/stamps.c): what makes a stamp a proof is the order in which processors show the stores
of one process to another one, and a mark that the kernel leaves when a thread dies. Without a compiler there are no stamps, and
confirmations are messages.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import NamedTuple

from kvbaton.agent.ports import NO_STAMPS, Stamps
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card, ProcessId
from kvbaton.core.handoff import Incarnation
from kvbaton.core.stamps import StampArea
from kvbaton.errors import ConfigError, KVBatonError
from kvbaton.transport.base import Region
from kvbaton.transport.neighbour import this_process
from kvbaton.transport.runs import Loops, load_loops
from kvbaton.transport.shared_memory import SharedMapping, SharedMemory, inode_of

__all__ = ["SharedStamps", "open_stamps"]

log = logging.getLogger(__name__)

_SLOTS = 8192
_WORD_BYTES = 8
_LIFE_BYTES = 64
"""Before the slots: what shows whether the thread lives that vouches for them."""
_MAX_PEERS = 1024


class _Peer(NamedTuple):
    """Where the memory of a peer begins here, and how many slots it has; the mapping keeps it there."""

    mapping: SharedMapping | None = None
    address: int = 0
    slots: int = 0


_UNREADABLE = _Peer()
"""Kept too, so that it is tried once: a process that comes back is another peer."""


def open_stamps() -> Stamps:
    """The stamps of this process; none where the system has no memory for them, or no compiler was there."""
    loops, process = load_loops(), this_process()
    if loops is None or not process.host:
        return NO_STAMPS
    if not loops.can_vouch():
        log.info("confirmations are messages, also to peers on this host: this system leaves no mark when a thread dies")
        return NO_STAMPS
    try:
        return SharedStamps(loops, process)
    except ConfigError as error:
        log.info("confirmations are messages, also to peers on this host: %s", error)
        return NO_STAMPS


class SharedStamps:
    """The stamps of `process`, which is this one, and of its peers. Raises ConfigError where there is no memory for them."""

    def __init__(self, loops: Loops, process: ProcessId, slots: int = _SLOTS) -> None:
        self._loops = loops
        self._read = loops.read_stamp
        self._process = process
        self._memory: SharedMemory | None = SharedMemory(_size(slots))
        region = self._memory.region
        self._address = region.address
        self._slots = slots
        self._is_vouching = False
        # Also where nothing closes this before the process ends: what libraries do then comes before the kernel's mark.
        self._disown = weakref.finalize(self, _disown, loops, region, os.getpid())
        self.area: StampArea | None = StampArea(region.memory_fd, inode_of(region), slots)
        self._peers: BoundedMap[Incarnation, _Peer] = BoundedMap(_MAX_PEERS)

    def vouch(self) -> None:
        if self._disown.alive:
            self._is_vouching = bool(self._loops.vouch(self._address))

    def withdraw(self) -> None:
        if self._is_vouching:
            self._loops.withdraw(self._address)
            self._is_vouching = False

    def write(self, slot: int, value: int) -> None:
        if self._memory is not None and 0 <= slot < self._slots:
            self._loops.write_stamp(_place(self._address, slot), value)

    def follow(self, card: Card) -> bool:
        peer = self._peers.get(card.incarnation)
        if peer is None:
            peer = self._peers[card.incarnation] = self._map(card)
        return peer.slots > 0

    def read(self, peer: Incarnation, slot: int) -> int:
        _, address, slots = self._peers.get(peer, _UNREADABLE)
        if not 0 <= slot < slots:
            return 0
        # Without a function for the place: this is on the way of every hand-off, right before its decode.
        value: int = self._read(address, address + _LIFE_BYTES + slot * _WORD_BYTES)
        return value

    def forget(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        self._disown()
        self._peers.clear()
        if not self._is_vouching:
            # A thread that did not end in time keeps it: the kernel looks there when it does.
            self._memory = None

    def _map(self, card: Card) -> _Peer:
        """The stamps of a process of this host, as far as they can be mapped; else each hand-off costs a question."""
        area = card.stamps
        if area is None or not card.process.host or card.process.host != self._process.host or area.slots < 1:
            return _UNREADABLE
        try:
            mapping = SharedMapping(card.process.pid, area.fd, area.inode, _size(area.slots))
        except (KVBatonError, OSError, OverflowError, ValueError) as error:
            log.info("the stamps of %s are not read, it is asked for confirmations: %s", card.incarnation, error)
            return _UNREADABLE
        return _Peer(mapping, int(mapping.array.ctypes.data), area.slots)


def _disown(loops: Loops, region: Region, owner: int) -> None:
    """Void what is shown, unless this is a child of the process that shows it."""
    if os.getpid() == owner:
        loops.disown(region.address)


def _size(slots: int) -> int:
    return _LIFE_BYTES + slots * _WORD_BYTES


def _place(address: int, slot: int) -> int:
    return address + _LIFE_BYTES + slot * _WORD_BYTES
