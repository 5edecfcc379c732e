"""What `mori.io` is here."""

from __future__ import annotations

from kvbaton.compat.mori.descriptors import EngineDesc, MemoryDesc
from kvbaton.compat.mori.engine import IOEngine, IOEngineSession
from kvbaton.compat.mori.names import BackendType, MemoryLocationType, PollCqMode, StatusCode
from kvbaton.compat.mori.settings import (
    FabricBackendConfig,
    IOEngineConfig,
    RdmaBackendConfig,
    XgmiBackendConfig,
    set_log_level,
)

__all__ = [
    "BackendType",
    "EngineDesc",
    "FabricBackendConfig",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "XgmiBackendConfig",
    "fabric_alloc",
    "fabric_free",
    "set_log_level",
]


def fabric_alloc(*_: object, **__: object) -> int:
    """Memory of a UALink fabric: there is none here. Raises RuntimeError."""
    raise RuntimeError("this mori is kvbaton's; it has no fabric memory")


def fabric_free(*_: object, **__: object) -> None:
    """The counterpart of `fabric_alloc`. Raises RuntimeError."""
    raise RuntimeError("this mori is kvbaton's; it has no fabric memory")
