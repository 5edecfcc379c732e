"""A transport that is no part of kvbaton: it reads other processes of this host through /proc/<pid>/mem.

All that kvbaton has to know of it is `ENTRY`, which the entry point `procmem` of the group `kvbaton.transports` names.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.neighbour import Neighbour, NeighbourWatch, ProcessMemory
from kvbaton.transport.queued import Ledger, QueuedTransport, SliceMover, detail
from kvbaton.transport.runs import RunCursor
from kvbaton.transport.table import LibrarySetting, TransportEntry, TransportVariant

_MARK_BYTES = 8


@dataclass(eq=False)
class _PeerProcess:
    """What is kept of a peer: its memory, and where its region and its mark are there."""

    memory_fd: int
    address: int
    mark_address: int
    mark: int
    watch: NeighbourWatch


class _ProcMemReach:
    """Copies out of the memory of peers, run by run."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def copy(self, link: _PeerProcess, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        moved = 0
        for source, target, count in cursor.peek(most_bytes, most_runs).tolist():
            if os.preadv(link.memory_fd, [self._region.view[target : target + count]], link.address + source) != count:
                raise PeerLost("the peer's memory ends before the run does")
            moved += count
        return moved

    def confirm(self, link: _PeerProcess) -> None:
        link.watch.check()
        if int.from_bytes(os.pread(link.memory_fd, _MARK_BYTES, link.mark_address), "little") != link.mark:
            raise PeerLost("the peer has withdrawn its memory")

    def release(self, link: _PeerProcess) -> None:
        os.close(link.memory_fd)
        link.watch.close()


class ProcMemTransport(QueuedTransport[_PeerProcess]):
    """Reads from processes of the same host and user."""

    name = "procmem"

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        ProcessMemory().allow_readers()
        self._mark = secrets.randbits(62) | 1
        self._shown = Region.of(bytearray(self._mark.to_bytes(_MARK_BYTES, "little")))
        self._reach = _ProcMemReach(region)
        ledger: Ledger[_PeerProcess] = Ledger(region, settings)
        slice_bytes = min(settings.slice_bytes, settings.of_library("procmem_load", int))
        super().__init__(region, settings, ledger, SliceMover("procmem", ledger, settings, self._reach, slice_bytes))

    def _details(self) -> dict[str, str | int]:
        places = {"address": self._region.address, "mark_address": self._shown.address, "mark": self._mark}
        return {**Neighbour.here().details(), **places}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> _PeerProcess:
        address, mark_address, mark = (detail(endpoint, field, int) for field in ("address", "mark_address", "mark"))
        neighbour = Neighbour.of(endpoint)
        try:
            watch = NeighbourWatch(neighbour)
            return _PeerProcess(os.open(f"/proc/{neighbour.pid}/mem", os.O_RDONLY), address, mark_address, mark, watch)
        except (OSError, PeerLost) as error:
            raise TransportError(f"peer {peer.incarnation!r} cannot be reached: {error}") from error

    def _release(self) -> None:
        self._shown.view[:] = bytes(_MARK_BYTES)
        for link in self._ledger.links():
            self._reach.release(link)


ENTRY = TransportEntry(
    name="procmem",
    opener=ProcMemTransport,
    settings=(LibrarySetting("procmem_load", 1 << 20, least=1),),
    variants=(TransportVariant(kind="procmem", subject="procmem", beside="memcpy"),),
)
