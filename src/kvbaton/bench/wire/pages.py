"""What is moved in the wire benchmark: pages of known content, and lists of runs over them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbaton.transport.base import Runs

__all__ = ["POISON", "SPREAD", "Bytes", "content", "contiguous_runs", "is_copied", "scattered_runs", "stream_places", "wipe"]

Bytes = npt.NDArray[np.uint8]

POISON = 0xA5
"""What target memory holds before each turn."""

SPREAD = 2
"""Regions are so many times as large as what a turn moves, so that scattered pages have gaps between them."""


def content(seed: int, region_bytes: int) -> Bytes:
    """The bytes of a source region; every aligned word encodes its place."""
    words = np.arange(-(-region_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)[:region_bytes]


def scattered_runs(batch_bytes: int, block_bytes: int, seed: int) -> Runs:
    """Runs of equal size from random places to random places, none next to its neighbour."""
    count = batch_bytes // block_bytes
    random = np.random.default_rng(seed)
    runs = np.empty((count, 3), np.uint64)
    runs[:, 0] = random.permutation(count) * SPREAD * block_bytes
    runs[:, 1] = random.permutation(count) * SPREAD * block_bytes
    runs[:, 2] = block_bytes
    return runs


def contiguous_runs(batch_bytes: int, block_bytes: int, _seed: int) -> Runs:
    """Runs of equal size, one after another on both sides: what a planner that does not merge would post."""
    count = batch_bytes // block_bytes
    places = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
    return np.stack([places, places, np.full(count, block_bytes, np.uint64)], axis=1)


def stream_places(runs: Runs) -> tuple[int, int]:
    """Where a stream of as many bytes begins, at the source and at the target: its bytes are not scattered."""
    return int(runs[:, 0].min()), int(runs[:, 1].min())


def is_copied(runs: Runs, source: Bytes, target: Bytes) -> bool:
    """Whether every run has arrived, byte for byte. All are of one size, and lie at multiples of it."""
    pages, places = _pages(runs, target), _places(runs)
    return np.array_equal(pages[places[:, 1]], _pages(runs, source)[places[:, 0]])


def wipe(runs: Runs, target: Bytes) -> None:
    """Put poison where the runs went: what is still something else then was never to be touched."""
    _pages(runs, target)[_places(runs)[:, 1]] = POISON


def _pages(runs: Runs, memory: Bytes) -> Bytes:
    size = int(runs[0, 2])
    return memory[: len(memory) // size * size].reshape(-1, size)


def _places(runs: Runs) -> npt.NDArray[np.intp]:
    places: npt.NDArray[np.intp] = (runs[:, :2] // runs[0, 2]).astype(np.intp)
    return places
