"""The few calls of Mooncake's transfer engine that the transport uses; its numbers become our errors."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbaton.errors import ConfigError, PeerLost
from kvbaton.transport.base import Region, Runs, TransportSettings

__all__ = ["MooncakeEngine", "MooncakeReader", "let_go_s"]

_TIMEOUT_VARIABLE = "MC_TRANSFER_TIMEOUT"
_LOG_VARIABLE = "MC_LOG_LEVEL"
_OURS = " "
_SHORTEST_TIMEOUT_S = 5
_MARGIN_S = 5.0


class MooncakeEngine:
    """One transfer engine with a port of its own. Raises ConfigError where there is no Mooncake, or it cannot start."""

    def __init__(self, settings: TransportSettings, regions: Sequence[Region]) -> None:
        try:
            api = importlib.import_module("mooncake.engine")
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"transport mooncake needs the package mooncake-transfer-engine, which cannot be imported ({error}): "
                "pip install mooncake-transfer-engine-non-cuda, and install libibverbs1 from the system's packages"
            ) from error
        _limit_transfers(settings.timeout_s)
        host = settings.advertise_host or settings.host
        protocol, devices = settings.mooncake_protocol, settings.mooncake_devices
        self._engine: Any = api.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise ConfigError(f"transport mooncake cannot start on {host} with protocol {protocol!r} and devices {devices!r}")
        for region in regions:
            if self._engine.register_memory(region.address, region.region_bytes):
                raise ConfigError(f"mooncake does not register {region.region_bytes} bytes at {region.address:#x}")
        self.name = f"[{host}]:{self._engine.get_rpc_port()}" if ":" in host else f"{host}:{self._engine.get_rpc_port()}"

    def open(self, peer: str) -> None:
        """Get to know the engine `peer`; may wait for up to a minute. Raises PeerLost. Nothing is moved."""
        if self._engine.batch_transfer_sync_read(peer, [], [], []):
            raise PeerLost(f"mooncake does not reach {peer}")

    def read(self, peer: str, places: Runs) -> None:
        """Read pieces of memory of `peer`, given by address, and wait for the last. Raises PeerLost when one fails."""
        sources, targets, lengths = places.T.tolist()
        if self._engine.batch_transfer_sync_read(peer, targets, sources, lengths):
            raise PeerLost(f"mooncake reports that a transfer from {peer} failed")

    def progress(self) -> None:
        """Nothing: the library's own threads serve peers."""

    def close(self) -> None:
        """End the engine and its threads; afterwards nothing moves."""
        self._engine = None


class MooncakeReader:
    """An engine that reads from one peer, between `starts`: addresses of the peer's region and mark, and of ours."""

    def __init__(self, engine: MooncakeEngine, peer: str, region: tuple[int, int], mark: tuple[int, int]) -> None:
        self._engine = engine
        self._peer = peer
        self._region = np.array([*region, 0], np.uint64)
        self._mark = np.array([*mark, 0], np.uint64)

    def open(self) -> None:
        """Get to know the peer."""
        self._engine.open(self._peer)

    def read(self, runs: Runs) -> None:
        """Read `runs` into this side's region."""
        self._engine.read(self._peer, runs + self._region)

    def read_mark(self, runs: Runs) -> None:
        """Read the peer's mark."""
        self._engine.read(self._peer, runs + self._mark)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def let_go_s(settings: TransportSettings) -> float:
    """How long Mooncake may take, at most, to give up a transfer by itself. Raises ConfigError."""
    _limit_transfers(settings.timeout_s)
    text = os.environ[_TIMEOUT_VARIABLE].strip()
    if not text.isdigit():
        raise ConfigError(f"{_TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds")
    return max(int(text), _SHORTEST_TIMEOUT_S) + _MARGIN_S


def _limit_transfers(timeout_s: float) -> None:
    """Mooncake reads its only limit from the environment when an engine is made. What the user has set there stays.

    Our own values end with a space, by which they are told from the user's.
    """
    if os.environ.get(_TIMEOUT_VARIABLE, _OURS).endswith(_OURS):
        os.environ[_TIMEOUT_VARIABLE] = f"{max(_SHORTEST_TIMEOUT_S, math.ceil(timeout_s))}{_OURS}"
    os.environ.setdefault(_LOG_VARIABLE, "ERROR")
