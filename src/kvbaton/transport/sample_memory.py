"""Main memory of known content, with which transports are tried, tested and measured."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbaton.transport.base import Region
from kvbaton.transport.shared_memory import SharedMemory

__all__ = ["private_memory", "shared_memory"]

Bytes = npt.NDArray[np.uint8]


def private_memory(content: Bytes) -> tuple[Region, Bytes]:
    """Memory of this process alone: `content` itself."""
    return Region.of(content), content


def shared_memory(content: Bytes) -> tuple[Region, Bytes]:
    """Memory that other processes can map."""
    memory = SharedMemory(len(content))
    memory.array[:] = content
    return memory.region, memory.array
