"""What `mori.cpp` is here: the names of `mori.io`, statuses, the members of the enumerations, and calls in CamelCase."""

from __future__ import annotations

from kvbaton.compat.mori import engine as _engine
from kvbaton.compat.mori.descriptors import EngineDesc, MemoryDesc
from kvbaton.compat.mori.io import fabric_alloc, fabric_free
from kvbaton.compat.mori.names import BackendType, MemoryLocationType, PollCqMode, StatusCode
from kvbaton.compat.mori.settings import (
    BackendConfig,
    FabricBackendConfig,
    IOEngineConfig,
    RdmaBackendConfig,
    XgmiBackendConfig,
    set_log_level,
)
from kvbaton.compat.mori.status import TransferStatus

__all__ = [
    "BackendConfig",
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
    "TransferStatus",
    "XgmiBackendConfig",
    "fabric_alloc",
    "fabric_free",
    "set_log_level",
]

IOEngine = _engine.IOEngine
IOEngineSession = _engine.IOEngineSession


def _add_camel_case(kind: type) -> None:
    """Give every method its name in CamelCase too, as the lower layer of MoRI has it."""
    for name, method in list(vars(kind).items()):
        if not name.startswith("_") and name.islower():
            setattr(kind, "".join(part.title() for part in name.split("_")), method)


for _kind in (IOEngine, IOEngineSession):
    _add_camel_case(_kind)

globals().update({member.name: member for kind in (BackendType, MemoryLocationType, StatusCode) for member in kind})
