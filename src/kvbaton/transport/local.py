"""Memory of another process on this host, read by this side's mover with `process_vm_readv`.

The endpoint names the process by host, pid and start time; the start time is checked when a peer is connected and after the
last byte of every batch, so that bytes of a recycled pid never count as the peer's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbaton.errors import PeerError, TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.ledger import Ledger
from kvbaton.transport.neighbour import Neighbour
from kvbaton.transport.process_memory import ProcessMemory
from kvbaton.transport.queued import QueuedTransport, detail
from kvbaton.transport.sliced import SliceMover

__all__ = ["LocalTransport"]


@dataclass(frozen=True, slots=True, eq=False)
class _Process:
    neighbour: Neighbour
    address: int


class _ProcessReach:
    def __init__(self, region: Region, memory: ProcessMemory) -> None:
        self._region = region
        self._memory = memory

    def copy(self, link: _Process, runs: Runs) -> int:
        return self._memory.read(link.neighbour.pid, link.address, self._region.address, runs)

    def confirm(self, link: _Process) -> None:
        link.neighbour.confirm()

    def release(self, link: _Process) -> None:
        """Nothing to let go of: each read names the process anew."""


class LocalTransport(QueuedTransport[_Process]):
    """Reads from processes of the same host and user; lets them read this rank's region."""

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        self._memory = ProcessMemory()
        self._memory.allow_readers()
        self._neighbour = Neighbour.here()
        self._reach = _ProcessReach(region, self._memory)
        ledger: Ledger[_Process] = Ledger(region, settings)
        super().__init__(region, settings, ledger, SliceMover("local", ledger, settings, self._reach))

    @property
    def name(self) -> str:
        """`local`."""
        return "local"

    def _details(self) -> dict[str, str | int]:
        return {**self._neighbour.details(), "address": self._region.address}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> _Process:
        name = f"peer {peer.incarnation!r} rank {peer.rank}"
        neighbour, address = Neighbour.of(endpoint), detail(endpoint, "address", int)
        if neighbour.host != self._neighbour.host:
            raise TransportError(
                f"{name} is on another host (host_id {neighbour.host!r}, here {self._neighbour.host!r}); choose transport tcp"
            )
        if not 0 < address < 1 << 64 or address + endpoint.region_bytes > 1 << 64:
            raise TransportError(f"{name}: address {address:#x} is not usable; fetch its card again")
        process = _Process(neighbour, address)
        try:
            self._reach.confirm(process)
            self._probe(process)
        except PeerError as error:
            raise TransportError(f"{name} cannot be reached: {error}") from error
        return process

    def _probe(self, process: _Process) -> None:
        """Find out now, not in a hand-off, whether the memory may be read."""
        spare = Region.of(bytearray(1))
        self._memory.read(process.neighbour.pid, process.address, spare.address, np.array([[0, 0, 1]], np.uint64))
