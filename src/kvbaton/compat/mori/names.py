"""The enumerations of MoRI-IO, with the values of its interface."""

from __future__ import annotations

import enum

__all__ = ["BackendType", "MemoryLocationType", "PollCqMode", "StatusCode"]


class BackendType(enum.Enum):
    """Which mover a backend is; here all of them are kvbaton's exchange."""

    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(enum.Enum):
    """Where memory lies, as its caller states it."""

    Unknown = 0
    CPU = 1
    GPU = 2


class StatusCode(enum.Enum):
    """The state of a transfer; errors are above 10."""

    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class PollCqMode(enum.Enum):
    """How MoRI waits for its NIC; accepted, and without effect here."""

    POLLING = 0
    EVENT = 1
