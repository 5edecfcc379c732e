"""Which transport a name means, and which ones `auto` offers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvbaton.errors import ConfigError, KVBatonError
from kvbaton.transport.automatic import AutoTransport
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.cuda import CudaTransport
from kvbaton.transport.library_settings import LIBRARY_SETTINGS_VARIABLE, with_library_settings
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.mooncake import MooncakeTransport
from kvbaton.transport.mori import MoriTransport
from kvbaton.transport.nixl import NixlTransport
from kvbaton.transport.open_files import files_left
from kvbaton.transport.tcp import TcpTransport

__all__ = ["AUTO", "TRANSPORTS", "check_writes", "open_transport"]

TRANSPORTS: dict[str, Callable[[Region, TransportSettings], Transport]] = {
    "cuda": CudaTransport,
    "local": LocalTransport,
    "mooncake": MooncakeTransport,
    "mori": MoriTransport,
    "nixl": NixlTransport,
    "tcp": TcpTransport,
}
"""What users can choose, by name; `auto` besides."""

AUTO = "auto"

_log = logging.getLogger("kvbaton.transport")

_FILES_TO_OPEN = 48
_CAN_WRITE = ("mooncake", "mori", "nixl")
_MOVE_GPU_MEMORY = frozenset({"cuda", "mori"})
_GPU_FASTEST_FIRST = ("cuda",)
_FASTEST_FIRST = ("local", "nixl", "tcp")
_RDMA_DEVICES = Path("/sys/class/infiniband")


def check_writes(name: str, unfenced_writes: bool) -> None:
    """Raise ConfigError when writes are wanted of a transport that only reads."""
    if unfenced_writes and name in (AUTO, *TRANSPORTS) and name not in _CAN_WRITE:
        why = "may pick one that only reads" if name == AUTO else "only reads: the owner of the target memory copies"
        raise ConfigError(f"unfenced_writes is on, and transport {name} {why}; leave it out, or choose {', '.join(_CAN_WRITE)}")


def open_transport(name: str, region: Region, settings: TransportSettings) -> Transport:
    """Open the transport that users call `name` over this rank's region. Raises ConfigError for an unknown name.

    It is refused, too, where this process may hardly open a file any more: nothing is then left half open.
    What the variable KVBATON_TRANSPORT_SETTINGS says about libraries is added to `settings`.
    """
    settings = with_library_settings(settings, os.environ.get(LIBRARY_SETTINGS_VARIABLE, ""))
    check_writes(name, settings.unfenced_writes)
    _check_files_left(name)
    if name == AUTO:
        return _open_auto(region, settings)
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; known are {', '.join([AUTO, *sorted(TRANSPORTS)])}")
    if not region.view and name not in _MOVE_GPU_MEMORY:
        raise ConfigError(f"transport {name} moves main memory, and the region is GPU memory; choose transport cuda")
    return TRANSPORTS[name](region, settings)


def _check_files_left(name: str) -> None:
    left, limit = files_left()
    if left < _FILES_TO_OPEN:
        raise ConfigError(
            f"transport {name} needs up to {_FILES_TO_OPEN} file descriptors to open, and {left} of {limit} are left; "
            "raise `ulimit -n`"
        )


def _open_auto(region: Region, settings: TransportSettings) -> Transport:
    inner: dict[str, Transport] = {}
    left_out: dict[str, str] = {}
    order = [name for name in (_FASTEST_FIRST if region.view else _GPU_FASTEST_FIRST) if name != "nixl" or _has_rdma()]
    for name in order:
        try:
            inner[name] = TRANSPORTS[name](region, settings)
        except KVBatonError as error:
            left_out[name] = str(error)
    if not inner:
        raise ConfigError(f"transport auto finds nothing that works here: {left_out}; kvbaton doctor tells more")
    for name, why in left_out.items():
        _log.warning("transport auto does without %s: %s", name, why)
    if region.view and "nixl" not in order:
        left_out["nixl"] = "no RDMA device is here, and without one tcp is the faster; choose transport nixl to use it anyway"
    return AutoTransport(region, settings, inner, left_out, order)


def _has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
