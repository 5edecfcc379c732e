"""Which transport a name means."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.cuda import CudaTransport
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.nixl import NixlTransport
from kvbaton.transport.tcp import TcpTransport

__all__ = ["TRANSPORTS", "open_transport"]

TRANSPORTS: dict[str, Callable[[Region, TransportSettings], Transport]] = {
    "cuda": CudaTransport,
    "local": LocalTransport,
    "nixl": NixlTransport,
    "tcp": TcpTransport,
}
"""What users can choose, by name."""

_MOVE_GPU_MEMORY = frozenset({"cuda"})


def open_transport(name: str, region: Region, settings: TransportSettings) -> Transport:
    """Open the transport that users call `name` over this rank's region. Raises ConfigError for an unknown name."""
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; known are {', '.join(sorted(TRANSPORTS))}")
    if not region.view and name not in _MOVE_GPU_MEMORY:
        raise ConfigError(f"transport {name} moves main memory, and the region is GPU memory; choose transport cuda")
    return TRANSPORTS[name](region, settings)
