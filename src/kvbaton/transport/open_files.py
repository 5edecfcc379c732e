"""How many files this process may still open: what runs out of descriptors half-way leaves half of its work behind."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

__all__ = ["files_left"]


def files_left() -> tuple[int, int]:
    """How many files this process may still open, and how many in all."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = sys.maxsize if limit == resource.RLIM_INFINITY else limit
    return most - sum(1 for _ in Path("/proc/self/fd").iterdir()), most
