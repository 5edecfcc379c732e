"""Which transport a name means."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.tcp import TcpTransport

__all__ = ["TRANSPORTS", "open_transport"]

TRANSPORTS: dict[str, Callable[[Region, TransportSettings], Transport]] = {"local": LocalTransport, "tcp": TcpTransport}
"""What users can choose, by name."""


def open_transport(name: str, region: Region, settings: TransportSettings) -> Transport:
    """Open the transport that users call `name` over this rank's region. Raises ConfigError for an unknown name."""
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; known are {', '.join(sorted(TRANSPORTS))}")
    return TRANSPORTS[name](region, settings)
