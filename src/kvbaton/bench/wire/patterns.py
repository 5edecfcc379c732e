"""Runs as hand-offs have them: pages of an 8B Llama, slices of pages between unequal shapes, and slots in no order at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.core.plan import Runs
from kvbaton.errors import ConfigError

__all__ = ["PLANES", "TOKEN_BYTES", "Pattern", "patterns"]

PLANES = 64
"""Keys and values of 32 layers."""

TOKEN_BYTES = 2048
"""One token in one plane: 8 heads of 128 channels in 16 bits."""

_BLOCK_TOKENS = 16
_SPARE = 1.25


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """One batch: runs of one length, whose offsets are multiples of it on both sides."""

    name: str
    run_bytes: int
    source_bytes: int
    target_bytes: int
    runs: Runs

    @property
    def wire_bytes(self) -> int:
        """What it moves."""
        return self.run_bytes * len(self.runs)


def patterns(tokens: int, seed: int = 1) -> list[Pattern]:
    """Batches that move the cache of `tokens` tokens each, in runs of 32 KiB, 1 KiB and 256 bytes. Raises ConfigError."""
    if tokens < _BLOCK_TOKENS or tokens % _BLOCK_TOKENS:
        raise ConfigError(f"--tokens is {tokens}; it must be a multiple of {_BLOCK_TOKENS}, the tokens of a block")
    random = np.random.default_rng(seed)
    wire_bytes = tokens * TOKEN_BYTES * PLANES
    found = [_pages("32 KiB blocks", tokens, TOKEN_BYTES, random)]
    for name, run_bytes in (("1 KiB", 1024), ("256 B", 256)):
        found.append(_pages(f"{name} slices of pages", tokens, run_bytes, random))
        found.append(_slots(f"{name} runs in no order", wire_bytes, run_bytes, random))
    return found


def _pages(name: str, tokens: int, slice_bytes: int, random: np.random.Generator) -> Pattern:
    """A slice of every token, from pages of all heads to pages of fewer; the same blocks in every plane."""
    blocks = tokens * (TOKEN_BYTES // slice_bytes) // _BLOCK_TOKENS
    pool = int(blocks * _SPARE)
    source_page, target_page = _BLOCK_TOKENS * TOKEN_BYTES, _BLOCK_TOKENS * slice_bytes
    is_whole = slice_bytes == TOKEN_BYTES
    within = np.zeros(1, np.int64) if is_whole else np.arange(_BLOCK_TOKENS)
    source = _offsets(random.permutation(pool)[:blocks], pool, source_page, within * TOKEN_BYTES)
    target = _offsets(random.permutation(pool)[:blocks], pool, target_page, within * slice_bytes)
    run_bytes = target_page if is_whole else slice_bytes
    sizes = PLANES * pool * source_page, PLANES * pool * target_page
    return Pattern(name, run_bytes, *sizes, _runs(source, target, run_bytes))


def _slots(name: str, wire_bytes: int, run_bytes: int, random: np.random.Generator) -> Pattern:
    """Slots of `run_bytes` anywhere, to anywhere."""
    count = wire_bytes // run_bytes
    pool = int(count * _SPARE)
    source, target = (random.permutation(pool)[:count] * run_bytes for _ in range(2))
    return Pattern(name, run_bytes, pool * run_bytes, pool * run_bytes, _runs(source, target, run_bytes))


def _offsets(ids: npt.NDArray[np.int64], pool: int, page_bytes: int, within: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    planes = np.arange(PLANES)[:, None, None] * (pool * page_bytes)
    return np.asarray((planes + ids[None, :, None] * page_bytes + within).reshape(-1))


def _runs(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], run_bytes: int) -> Runs:
    return np.stack([source, target, np.full(len(source), run_bytes)], axis=1).astype(np.uint64)
