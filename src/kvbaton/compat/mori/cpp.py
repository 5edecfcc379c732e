"""What `mori.cpp` is here: the names of `mori.io`, statuses, the members of the enumerations, and calls in CamelCase."""

from __future__ import annotations

from typing import Any

from kvbaton.compat.mori import io as _io
from kvbaton.compat.mori.settings import BackendConfig
from kvbaton.compat.mori.status import TransferStatus

__all__ = ["BackendConfig", "TransferStatus"]
__all__ += _io.__all__


def _add_camel_case(kind: type) -> None:
    """Give every method its name in CamelCase too, as the lower layer of MoRI has it."""
    for name, method in list(vars(kind).items()):
        if not name.startswith("_") and name.islower():
            setattr(kind, "".join(part.title() for part in name.split("_")), method)


for _kind in (_io.IOEngine, _io.IOEngineSession):
    _add_camel_case(_kind)

globals().update({member.name: member for kind in (_io.BackendType, _io.MemoryLocationType, _io.StatusCode) for member in kind})


def __getattr__(name: str) -> Any:
    """Everything that `mori.io` has is here too."""
    if name in _io.__all__:
        return getattr(_io, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
