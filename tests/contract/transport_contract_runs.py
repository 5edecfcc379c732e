"""Runs that the transport contract moves, in either direction, within regions of 1 MiB."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from transport_rig import MIB

from kvbaton.core.strips import Plan, Strip, TokenPattern
from kvbaton.transport.base import Runs

__all__ = ["blocks_of_layers", "pages", "scattered", "split_heads"]


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


def _slots(count: int, size: int) -> npt.NDArray[np.int64]:
    """So many layers, each in its part of both regions, in another order in the target."""
    random = np.random.default_rng(3)
    return np.stack([np.arange(count) * size, random.permutation(count) * size, np.zeros(count, np.int64)], axis=1)


def blocks_of_layers() -> Plan:
    """Blocks of 1 KiB, some of them joined, in eight layers: what a planner posts for equal layouts."""
    random = np.random.default_rng(4)
    places = [random.permutation(32)[:24] * 4096 for _ in range(2)]
    sizes = random.integers(1, 5, 24) * 1024
    return Plan((Strip(_slots(8, MIB // 8), np.stack([*places, sizes], axis=1)),))


def split_heads() -> Plan:
    """Two of four heads of every token, in blocks of 16 of which the last is cut, in four layers; and a state behind them."""
    random = np.random.default_rng(5)
    items = np.array([[0, 128, 64], [64, 64, 64]])[::-1].copy()
    places = [random.permutation(30)[:20] * size for size in (16 * 128, 16 * 256)]
    counts = np.full(20, 16)
    counts[-1] = 5
    tokens = Strip(_slots(4, MIB // 8), np.stack([*places, counts], axis=1), TokenPattern(items, 128, 256))
    state = Strip(np.zeros((1, 3), np.int64), np.array([[MIB - 7777, MIB - 5555, 5555], [3, MIB - 9000, 3001]]))
    return Plan((tokens, state))
