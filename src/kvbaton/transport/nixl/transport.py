"""The nixl transport: this side's mover reads from the peer's registered memory; nobody is ever asked to write.

NIXL registers memory so that whoever has its metadata could write there too. No kvbaton peer does: only reads are posted, by
the owner of the target memory, and a batch is not finished before NIXL has let go of its last read. The metadata travels in the
card, which admitted peers alone are given.
"""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import numpy as np

from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.flights import FlightMover
from kvbaton.transport.ledger import Ledger
from kvbaton.transport.nixl.library import NixlLibrary
from kvbaton.transport.queued import QueuedTransport, detail

__all__ = ["NixlTransport"]

_MARK_BYTES = 8
_IDLE_S = 0.002


class _Agent:
    """A peer's agent; `name` is empty while there is no session."""

    def __init__(self, peer: PeerRank, metadata: bytes, address: int, mark_address: int, mark: int, slot: int) -> None:
        self.peer = peer
        self.metadata = metadata
        self.address = address
        self.mark_address = mark_address
        self.mark = mark
        self.mark_slot = slot * _MARK_BYTES
        self.name = ""

    def __str__(self) -> str:
        return f"{self.peer.incarnation!r} rank {self.peer.rank}"


class _NixlFlights:
    """What the mover asks of NIXL."""

    idle_s = _IDLE_S

    def __init__(self, library: NixlLibrary, region: Region, scratch: Region) -> None:
        self._library = library
        self._region = region
        self._scratch = scratch

    def start(self, link: _Agent, runs: Runs) -> Any:
        return self._library.start_read(self._session(link), link.address, self._region.address, runs)

    def start_confirming(self, link: _Agent) -> Any:
        runs = np.array([[0, link.mark_slot, _MARK_BYTES]], np.uint64)
        return self._library.start_read(self._session(link), link.mark_address, self._scratch.address, runs)

    def check_confirmed(self, link: _Agent) -> None:
        mark = int.from_bytes(self._scratch.view[link.mark_slot : link.mark_slot + _MARK_BYTES], "little")
        if mark != link.mark:
            raise PeerLost(f"{link} has withdrawn its memory: its mark is {mark:#x}, not {link.mark:#x}")

    def is_done(self, flight: Any) -> bool:
        return self._library.is_done(flight)

    def release(self, flight: Any) -> bool:
        return self._library.release(flight)

    def drop(self, link: _Agent) -> None:
        if link.name:
            self._library.remove_peer(link.name)
            link.name = ""

    def forget(self, link: _Agent) -> None:
        self.drop(link)

    def progress(self) -> None:
        self._library.progress()

    def shut_down(self) -> None:
        self._library.close()

    def _session(self, link: _Agent) -> str:
        link.name = link.name or self._library.add_peer(link.metadata)
        return link.name


class NixlTransport(QueuedTransport[_Agent]):
    """Reads from other NIXL agents; lets them read this rank's region."""

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        self._mark = secrets.randbits(62) | 1
        marks = self._mark.to_bytes(_MARK_BYTES, "little").ljust(_MARK_BYTES * (1 + settings.max_peers), b"\0")
        self._scratch = Region.of(bytearray(marks))
        self._slots = itertools.cycle(range(1, 1 + settings.max_peers))
        name = f"kvbaton-{settings.incarnation or ''}-{secrets.token_hex(8)}"
        library = NixlLibrary(name, (region, self._scratch), settings.nixl_backends)
        self._metadata = library.metadata
        ledger: Ledger[_Agent] = Ledger(region, settings)
        mover = FlightMover("nixl", ledger, settings, _NixlFlights(library, region, self._scratch))
        super().__init__(region, settings, ledger, mover)

    @property
    def name(self) -> str:
        """`nixl`."""
        return "nixl"

    def _details(self) -> dict[str, str | int]:
        return {
            "metadata": self._metadata.hex(),
            "address": self._region.address,
            "mark_address": self._scratch.address,
            "mark": self._mark,
        }

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> _Agent:
        address, mark_address = detail(endpoint, "address", int), detail(endpoint, "mark_address", int)
        if min(address, mark_address) <= 0 or max(address, mark_address) + endpoint.region_bytes >= 1 << 64:
            raise TransportError(
                f"nixl endpoint: address {address:#x} or mark_address {mark_address:#x} is not usable; fetch its card again"
            )
        try:
            metadata = bytes.fromhex(detail(endpoint, "metadata", str))
        except ValueError as error:
            raise TransportError(f"nixl endpoint: metadata is not usable ({error}); fetch its card again") from error
        return _Agent(peer, metadata, address, mark_address, detail(endpoint, "mark", int), next(self._slots))

    def _release(self) -> None:
        self._scratch.view[:_MARK_BYTES] = bytes(_MARK_BYTES)
