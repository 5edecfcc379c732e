"""The mooncake transport, TCP here and RDMA where its devices are: this side's mover reads from the peer's registered memory,
and writes there where that was chosen. Needs a package `mooncake-transfer-engine`.

Mooncake lets every process that reaches its port read and write registered memory. Without `unfenced_writes` no kvbaton peer
writes, and only admitted peers are sent the port, but Mooncake authenticates no connection: use it on trusted networks only.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from kvbaton.errors import ConfigError, PeerLost
from kvbaton.transport.base import Direction, Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.lanes import LibraryPeer, Marks
from kvbaton.transport.library_transport import LibraryTransport, MemoryPlace
from kvbaton.transport.queued import detail

__all__ = ["MooncakeTransport", "load_mooncake"]

_TIMEOUT_VARIABLE = "MC_TRANSFER_TIMEOUT"
_LOG_VARIABLE = "MC_LOG_LEVEL"
_PROTOCOL_VARIABLE = "MC_TCP_PROTO"
_ACKNOWLEDGES = (0, 3, 12)
_TCP_PROTOCOL = "tcp"
_OURS = " "
_SHORTEST_TIMEOUT_S = 5
_MARGIN_S = 5.0

_SLICE_RUNS = 1024
"""Mooncake's TCP takes so many at a time for one peer, and rejects what is beyond."""


def load_mooncake() -> Any:
    """Import Mooncake. Raises ConfigError, with what to do, where there is none."""
    try:
        return importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"transport mooncake needs the package mooncake-transfer-engine, which cannot be imported ({error}): "
            "pip install mooncake-transfer-engine-non-cuda, and install libibverbs1 from the system's packages"
        ) from error


class MooncakeEngine:
    """One transfer engine with a port of its own. Raises ConfigError where there is no Mooncake, or it cannot start."""

    def __init__(self, settings: TransportSettings, regions: Sequence[Region]) -> None:
        api = load_mooncake()
        _limit_transfers(settings.timeout_s)
        host = settings.advertise_host or settings.host
        protocol, devices = settings.of_library("mooncake_protocol", str), settings.of_library("mooncake_devices", str)
        self.engine: Any = api.TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise ConfigError(f"transport mooncake cannot start on {host} with protocol {protocol!r} and devices {devices!r}")
        for region in regions:
            if self.engine.register_memory(region.address, region.region_bytes):
                raise ConfigError(f"mooncake does not register {region.region_bytes} bytes at {region.address:#x}")
        self.name = f"[{host}]:{self.engine.get_rpc_port()}" if ":" in host else f"{host}:{self.engine.get_rpc_port()}"

    def progress(self) -> None:
        """Nothing: the library's own threads serve peers."""

    def close(self) -> None:
        """End the engine and its threads; afterwards nothing moves."""
        self.engine = None


class MooncakePeer:
    """An engine that moves bytes between this side and one peer.

    It knows the peer by host and port, and connects as often as it likes: another process may have taken that port.
    """

    is_bound = False

    def __init__(self, engine: MooncakeEngine, peer: str, there: MemoryPlace, here: MemoryPlace) -> None:
        self._engine = engine
        self._peer = peer
        self._region = np.array([there.address, here.address, 0], np.uint64)
        self._mark = np.array([there.mark_address, here.mark_address, 0], np.uint64)

    def open(self) -> None:
        if self._engine.engine.batch_transfer_sync_read(self._peer, [], [], []):
            raise PeerLost(f"mooncake does not reach {self._peer}")

    def start(self, direction: Direction, runs: Runs) -> None:
        """Move `runs` between this side's region and the peer's, and wait: Mooncake's other call reports the first run only."""
        offsets = runs if direction is Direction.READ else runs[:, (1, 0, 2)]
        self._move(direction, offsets + self._region)

    def start_mark(self, runs: Runs) -> None:
        self._move(Direction.READ, runs + self._mark)

    def is_done(self) -> bool:
        """True: `start` has waited."""
        return True

    def close(self) -> None:
        self._engine.close()

    def _move(self, direction: Direction, places: Runs) -> None:
        """Move pieces of memory, given by address at the peer, address here, and bytes, and wait for the last."""
        there, here, lengths = places.T.tolist()
        engine, reads = self._engine.engine, direction is Direction.READ
        call = engine.batch_transfer_sync_read if reads else engine.batch_transfer_sync_write
        if call(self._peer, here, there, lengths):
            raise PeerLost(f"mooncake reports that a transfer {'from' if reads else 'to'} {self._peer} failed")


def is_over_tcp(settings: TransportSettings) -> bool:
    """Whether Mooncake uses its own TCP protocol, and not RDMA."""
    return settings.of_library("mooncake_protocol", str) == _TCP_PROTOCOL


def check_acknowledges(settings: TransportSettings) -> None:
    """Raise ConfigError where Mooncake calls a write done before it is: over TCP, in releases that do not acknowledge it."""
    if not is_over_tcp(settings):
        return
    if os.environ.get(_PROTOCOL_VARIABLE, "").strip() == "1":
        raise ConfigError(
            f"unfenced_writes over Mooncake's TCP needs acknowledged writes, and {_PROTOCOL_VARIABLE} is 1; unset it"
        )
    found = _installed_version()
    if found < _ACKNOWLEDGES:
        versions = [".".join(map(str, version)) or "unknown" for version in (_ACKNOWLEDGES, found)]
        raise ConfigError(
            f"unfenced_writes over Mooncake's TCP needs Mooncake {versions[0]} or later, which acknowledges writes; here it is "
            f"{versions[1]}: update it, or leave unfenced_writes out"
        )


def _installed_version() -> tuple[int, ...]:
    """That of its package; empty where no package has brought it."""
    names = metadata.packages_distributions().get("mooncake", [])
    numbers = (re.match(r"\d+(\.\d+)*", metadata.version(name)) for name in names)
    return max((tuple(map(int, number.group().split("."))) for number in numbers if number), default=())


def stop_s(settings: TransportSettings) -> float:
    """How long Mooncake may take, at most, to end a transfer by itself. Raises ConfigError."""
    _limit_transfers(settings.timeout_s)
    text = os.environ[_TIMEOUT_VARIABLE].strip()
    if not text.isdigit():
        raise ConfigError(f"{_TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds")
    return max(int(text), _SHORTEST_TIMEOUT_S) + _MARGIN_S


def _limit_transfers(timeout_s: float) -> None:
    """Mooncake reads its only limit from the environment when an engine is made. What the user has set there stays.

    Our own values end with a space, by which they are distinguished from the user's.
    """
    if os.environ.get(_TIMEOUT_VARIABLE, _OURS).endswith(_OURS):
        os.environ[_TIMEOUT_VARIABLE] = f"{max(_SHORTEST_TIMEOUT_S, math.ceil(timeout_s))}{_OURS}"
    os.environ.setdefault(_LOG_VARIABLE, "ERROR")


class MooncakeTransport(LibraryTransport):
    """Moves bytes between this rank's region and those of other Mooncake engines."""

    name = "mooncake"

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        marks, ends_in_s = Marks(settings.max_peers), stop_s(settings)
        if settings.unfenced_writes:
            check_acknowledges(settings)
        serving = MooncakeEngine(settings, (region, marks.region))
        self._serving_name = serving.name
        super().__init__(region, settings, marks, serving, slice_runs=_SLICE_RUNS, stop_s=ends_in_s)

    def _details(self) -> dict[str, str | int]:
        return {"engine": self._serving_name, **self._place_details()}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> LibraryPeer:
        there, here = self._places(endpoint)
        engine, mark = detail(endpoint, "engine", str), detail(endpoint, "mark", int)

        def make_engine() -> MooncakePeer:
            # Over TCP Mooncake needs no registration of local memory; RDMA needs one per engine.
            local = () if is_over_tcp(self._settings) else (self._region, self._marks.region)
            return MooncakePeer(MooncakeEngine(self._settings, local), engine, there, here)

        return LibraryPeer(peer, mark, make_engine)
