"""Runs that the transport contract moves, in either direction, within regions of 1 MiB."""

from __future__ import annotations

import numpy as np
from transport_rig import MIB

from kvbaton.transport.base import Runs

__all__ = ["pages", "scattered"]


def scattered(count: int, seed: int = 7) -> Runs:
    """Runs of odd sizes in free order on both sides, some of them empty, with gaps around each in target memory."""
    random = np.random.default_rng(seed)
    cell = MIB // count
    lengths = random.integers(0, cell - 1, count)
    return np.stack([random.permutation(count) * cell, random.permutation(count) * cell + 1, lengths], axis=1).astype(np.uint64)


def pages(count: int, size: int, seed: int = 5) -> Runs:
    """Whole pages of one size, from anywhere to anywhere: what a planner posts for equal layouts."""
    random = np.random.default_rng(seed)
    places = [random.permutation(MIB // size)[:count] * size for _ in range(2)]
    return np.stack([*places, np.full(count, size)], axis=1).astype(np.uint64)
