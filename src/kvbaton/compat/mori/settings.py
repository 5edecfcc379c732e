"""Settings of engines and backends: the arguments of MoRI's configuration objects, its environment, and what we use."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.compat.mori.names import MemoryLocationType, PollCqMode
from kvbaton.transport.exchange.owner import COUNTS as EXCHANGE_COUNTS
from kvbaton.transport.exchange.service import ExchangePaths
from kvbaton.transport.table import exchange_names

__all__ = [
    "BackendConfig",
    "FabricBackendConfig",
    "IOEngineConfig",
    "RdmaBackendConfig",
    "XgmiBackendConfig",
    "COUNTS",
    "DROP_STORES",
    "LOG",
    "SWITCH",
    "auto_xgmi",
    "chosen_paths",
    "drops_stores",
    "kept_counts",
    "node_id",
    "set_log_level",
    "set_log_level_of_environment",
    "sq_backoff_s",
]

LOG = logging.getLogger("kvbaton.mori")

SWITCH = "KVBATON_MORI"
"""Switches the drop-in on: `1` or `auto`, `local`, or `tcp`."""

DROP_STORES = "KVBATON_MORI_DROP_WRITES"
"""For negative controls: transfers succeed, and nothing is stored: `1` in any memory, `gpu` in those labelled GPU.

SGLang waits for metadata that it registers as main memory, beside caches that it registers as GPU memory on CPUs too.
"""

COUNTS = "KVBATON_MORI_COUNTS"
"""A directory in which every engine keeps a file of integers, as `COUNTS` of the exchange names them."""

_SQ_BACKOFF_S = 5.0
_MAX_PORT = 65535
_MIN_CHUNK_BYTES = 4096
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


@dataclass(slots=True)
class IOEngineConfig:
    """Where an engine listens; port 0: one that is free."""

    host: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or isinstance(self.port, bool) or not isinstance(self.port, int):
            raise TypeError(f"IOEngineConfig(host: str, port: int), not ({self.host!r}, {self.port!r})")
        if not 0 <= self.port <= _MAX_PORT:
            raise TypeError(f"port is {self.port}; it must be 0 to {_MAX_PORT}")


class BackendConfig:
    """Base of the settings of a backend."""


@dataclass(slots=True)
class RdmaBackendConfig(BackendConfig):
    """Settings of the RDMA backend. Those of queues, chunks and NICs are checked, and have no effect here."""

    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True
    notif_per_qp: int = 1024
    enable_transfer_chunking: bool = False
    chunk_bytes: int = 65536
    max_chunks_per_transfer: int = 64
    num_nics_per_transfer: int = 1
    max_send_wr: int = 0
    max_cqe_num: int = 0
    max_msg_sge: int = 0

    def check(self) -> None:
        """Raise RuntimeError for what no backend can be made with."""
        if self.enable_notification and self.notif_per_qp < 1:
            raise RuntimeError(f"notif_per_qp is {self.notif_per_qp}; it must be at least 1 with notifications")
        if self.max_chunks_per_transfer < 1 or self.num_nics_per_transfer < 1:
            raise RuntimeError("max_chunks_per_transfer and num_nics_per_transfer must be at least 1")
        if self.enable_transfer_chunking and self.chunk_bytes < _MIN_CHUNK_BYTES:
            raise RuntimeError(f"chunk_bytes is {self.chunk_bytes}; it must be at least {_MIN_CHUNK_BYTES}")

    def overridden(self) -> RdmaBackendConfig:
        """These settings, with what the environment overrides; invalid values are ignored with a warning, as with MoRI."""
        found = {
            field: value for name, (field, parse) in _OVERRIDES.items() if (value := _from_environment(name, parse)) is not None
        }
        return replace(self, **found)


def _flag(text: str) -> bool | None:
    return {"0": False, "false": False, "off": False, "no": False, "1": True, "true": True, "on": True, "yes": True}.get(text)


def _positive(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _poll_mode(text: str) -> PollCqMode | None:
    modes = {"0": PollCqMode.POLLING, "polling": PollCqMode.POLLING, "1": PollCqMode.EVENT, "event": PollCqMode.EVENT}
    return modes.get(text)


_OVERRIDES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "MORI_IO_ENABLE_NOTIFICATION": ("enable_notification", _flag),
    "MORI_IO_ENABLE_CHUNKING": ("enable_transfer_chunking", _flag),
    "MORI_IO_CHUNK_BYTES": ("chunk_bytes", _positive),
    "MORI_IO_MAX_CHUNKS": ("max_chunks_per_transfer", _positive),
    "MORI_IO_NUM_NICS_PER_TRANSFER": ("num_nics_per_transfer", _positive),
    "MORI_IO_QP_PER_TRANSFER": ("qp_per_transfer", _positive),
    "MORI_IO_POST_BATCH_SIZE": ("post_batch_size", _positive),
    "MORI_IO_NUM_WORKER_THREADS": ("num_worker_threads", _positive),
    "MORI_IO_POLL_CQ_MODE": ("poll_cq_mode", _poll_mode),
    "MORI_IO_QP_MAX_SEND_WR": ("max_send_wr", _positive),
    "MORI_IO_QP_MAX_CQE": ("max_cqe_num", _positive),
    "MORI_IO_QP_MAX_MSG_SGE": ("max_msg_sge", _positive),
    "MORI_IO_QP_MAX_SGE": ("max_msg_sge", _positive),
}
"""Variables that override a setting of the RDMA backend, and how each is read."""


def _from_environment(name: str, parse: Callable[[str], Any]) -> Any:
    text = os.environ.get(name, "").strip().lower()
    value = parse(text) if text else None
    if text and value is None:
        LOG.warning("%s is %r, which cannot be used; it is ignored", name, text)
    return value


@dataclass(slots=True)
class XgmiBackendConfig(BackendConfig):
    """Settings of the XGMI backend; without effect here."""

    num_streams: int = 64
    num_events: int = 64


@dataclass(slots=True)
class FabricBackendConfig(BackendConfig):
    """Settings of the FABRIC backend, which does not exist here."""

    num_streams: int = 64
    num_events: int = 64


def set_log_level(level: str) -> None:
    """Set the level of the log; any other name means error."""
    LOG.setLevel(_LEVELS.get(str(level).lower(), logging.ERROR))


def set_log_level_of_environment() -> None:
    """Set the level that `MORI_IO_LOG_LEVEL` names, or else `MORI_GLOBAL_LOG_LEVEL`, if either does."""
    if level := os.environ.get("MORI_IO_LOG_LEVEL") or os.environ.get("MORI_GLOBAL_LOG_LEVEL"):
        set_log_level(level)


def sq_backoff_s() -> float:
    """How long a call waits for room in a queue that is full: `MORI_IO_SQ_BACKOFF_TIMEOUT_US`, else 5 s."""
    microseconds = _from_environment("MORI_IO_SQ_BACKOFF_TIMEOUT_US", _positive)
    return _SQ_BACKOFF_S if microseconds is None else float(microseconds) / 1e6


def node_id() -> str:
    """The name of this host: `MORI_NODE_ID`, else that of its boot, else the host's."""
    if named := os.environ.get("MORI_NODE_ID"):
        return named
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def auto_xgmi() -> bool:
    """Whether an RDMA backend brings an XGMI backend along."""
    return os.environ.get("MORI_DISABLE_AUTO_XGMI") == "0"


def chosen_paths() -> ExchangePaths:
    """How bytes may go, as the switch states."""
    text = os.environ.get(SWITCH, "").strip().lower()
    return ExchangePaths.named(text if text in exchange_names() else "auto")


def kept_counts() -> npt.NDArray[np.int64] | None:
    """Where an engine counts what it does: a file of its own, if a directory is named for them."""
    directory = os.environ.get(COUNTS, "")
    if not directory:
        return None
    path = Path(directory) / f"{os.getpid()}-{secrets.token_hex(4)}.counts"
    return np.memmap(path, np.int64, "w+", shape=(len(EXCHANGE_COUNTS),))


def drops_stores(location: MemoryLocationType) -> bool:
    """Whether this process is a negative control for memory with this label."""
    dropped = os.environ.get(DROP_STORES, "").strip().lower()
    return dropped == "1" or (dropped == "gpu" and location is MemoryLocationType.GPU)
