"""How models are cut in tests: the layers of a stage, and the channels of a convolution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvbaton.core.layout import HeadRange
from kvbaton.core.topology import head_range

__all__ = ["part_ranges", "stage_layers"]


def part_ranges(parts: Sequence[int], tp_size: int, tp_rank: int) -> tuple[HeadRange, ...]:
    """The channels that a rank holds of several consecutive parts (`[q|k|v]` of a convolution), each divided by itself."""
    starts = [0, *itertools.accumulate(parts)]
    shares = [head_range(count, tp_size, tp_rank) for count in parts]
    return tuple(HeadRange(start + share.start, share.count) for start, share in zip(starts, shares, strict=False))


def stage_layers(layers: int, pp_size: int, pp_rank: int) -> range:
    """The layers of a stage by default: as even as possible, the first stages one more."""
    base, more = divmod(layers, pp_size)
    first = pp_rank * base + min(pp_rank, more)
    return range(first, first + base + (pp_rank < more))
