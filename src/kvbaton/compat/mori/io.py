"""What `mori.io` is here."""

from __future__ import annotations

from typing import NoReturn

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
    "fabric_mem_pool",
    "fabric_torch_allocator",
    "make_fabric_mem_pool",
    "set_log_level",
    "use_fabric_torch_allocator",
]


def fabric_alloc(*_: object, **__: object) -> NoReturn:
    """Memory of a UALink fabric: there is none here. Raises RuntimeError."""
    raise RuntimeError("this mori is kvbaton's; it has no fabric memory")


fabric_free = fabric_torch_allocator = use_fabric_torch_allocator = make_fabric_mem_pool = fabric_mem_pool = fabric_alloc
