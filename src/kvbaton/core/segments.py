"""Tokens cut into segments: ranges that lie in one page of the source and in one page of the target, for one leg.

Block sizes, page sizes and context-parallel splits of the two sides may differ in any way; the result is the same plain
arrays. Everything is vectorised: there is no Python loop over blocks or tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.core.layout import Group, TokenSplit
from kvbaton.core.strips import Numbers
from kvbaton.errors import RangeError

__all__ = ["HOLE", "Numbers", "Places", "block_places", "check_list", "segments_of", "state_block"]

HOLE = 1 << 62
"""Entry of a block list without a block (vLLM's null block): keeps a list aligned with the tokens where blocks before a window
or of a cached prefix are left out. Refused where its tokens have to be moved. Travels in messages, so it is not negative."""

_NO_END = 1 << 62

_SHORT_LIST = 128
"""Block lists up to this length are checked without NumPy, of which every call costs as much as some ten blocks do."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Ranges of tokens: the first token of each, counted among the tokens that each side holds, and the number of tokens."""

    source: Numbers
    target: Numbers
    counts: Numbers


@dataclass(frozen=True, slots=True)
class Places:
    """Where segments start on one side: the block's id, the page within it and the token within that."""

    blocks: Numbers
    pages: Numbers
    tokens: Numbers


def segments_of(source: Group, target: Group, first_token: int, end_token: int, total_tokens: int) -> Segments:
    """Cut tokens `first_token` up to `end_token` of a sequence of `total_tokens`, without those that only one side holds."""
    if first_token >= end_token:
        return Segments(*(np.empty(0, np.int64),) * 3)
    low, high = _held_range(source, total_tokens)
    low_target, high_target = _held_range(target, total_tokens)
    low, high = max(first_token, low, low_target), min(end_token, high, high_target)
    starts = _starts(_grain(source), _grain(target), low, high)
    counts = np.empty_like(starts)
    counts[:-1], counts[-1:] = starts[1:] - starts[:-1], high - starts[-1:]
    if source.tokens.size > 1 or target.tokens.size > 1:
        held = _holds(source.tokens, starts) & _holds(target.tokens, starts)
        starts, counts = starts[held], counts[held]
    return Segments(_local(source, starts, total_tokens), _local(target, starts, total_tokens), counts)


def _grain(group: Group) -> int:
    """Segments never cross a multiple of this many tokens of the sequence."""
    split = group.tokens
    return math.gcd(group.page_tokens, split.interleave) if split.size > 1 and split.interleave else group.page_tokens


def _starts(grain: int, other: int, low: int, high: int) -> Numbers:
    if low >= high:
        return np.empty(0, np.int64)
    cuts = _multiples(grain, low, high)
    if other != grain:
        cuts = np.union1d(cuts, _multiples(other, low, high))
    return cuts


def _multiples(grain: int, low: int, high: int) -> Numbers:
    """`low`, and every multiple of `grain` between it and `high`."""
    cuts = np.arange(low // grain * grain, high, grain, dtype=np.int64)
    cuts[0] = low
    return cuts


def _held_range(group: Group, total_tokens: int) -> tuple[int, int]:
    """The first token and the end of the contiguous range that this rank holds; everything, where ranks take turns."""
    split = group.tokens
    if split.size == 1 or split.interleave:
        return 0, _NO_END
    blocks = -(-total_tokens // group.block_tokens)
    base, more = divmod(blocks, split.size)
    first = split.rank * base + min(split.rank, more)
    return first * group.block_tokens, (first + base + (split.rank < more)) * group.block_tokens


def _holds(split: TokenSplit, tokens: Numbers) -> npt.NDArray[np.bool_]:
    if split.size == 1 or not split.interleave:
        return np.ones(len(tokens), np.bool_)
    held: npt.NDArray[np.bool_] = tokens // split.interleave % split.size == split.rank
    return held


def _local(group: Group, tokens: Numbers, total_tokens: int) -> Numbers:
    """The positions of tokens among those that this rank holds."""
    split = group.tokens
    if split.size == 1:
        return tokens
    if not split.interleave:
        return tokens - _held_range(group, total_tokens)[0]
    return tokens // (split.interleave * split.size) * split.interleave + tokens % split.interleave


def local_count(group: Group, end_token: int, total_tokens: int) -> int:
    """How many of the first `end_token` tokens of a sequence this rank holds."""
    low, high = _held_range(group, total_tokens)
    split = group.tokens
    if split.size == 1 or not split.interleave:
        return max(0, min(high, end_token) - low)
    rounds, rest = divmod(end_token, split.interleave * split.size)
    return rounds * split.interleave + min(max(rest - split.rank * split.interleave, 0), split.interleave)


def check_list(side: str, group: Group, ids: tuple[int, ...], end_token: int, total_tokens: int) -> None:
    """Raise RangeError for a block list that is too short for the tokens before `end_token` that this rank holds.

    A longer list is fine: engines allocate ahead.
    """
    needed = -(-local_count(group, end_token, total_tokens) // group.block_tokens)
    if len(ids) < needed:
        raise RangeError(f"{side} block list has {len(ids)} blocks where {needed} are needed")


def block_places(side: str, group: Group, ids: tuple[int, ...], tokens: Numbers) -> Places:
    """Where tokens (counted within what this rank holds) lie; raises RangeError for blocks that do not exist."""
    if group.block_tokens == group.page_tokens:
        blocks, within = np.divmod(tokens, group.block_tokens)
        pages = np.zeros(len(tokens), np.int64)
    else:
        blocks, within = np.divmod(tokens, group.block_tokens)
        pages, within = np.divmod(within, group.page_tokens)
    return Places(_block_ids(side, group, ids, blocks), pages, within)


def state_block(side: str, group: Group, ids: tuple[int, ...]) -> int:
    """The only block of a state; raises RangeError unless there is exactly one, and it exists."""
    if len(ids) != 1:
        raise RangeError(f"{side} block list of {group.kind} has {len(ids)} blocks; the state of a request is exactly one")
    if not 0 <= ids[0] < group.blocks:
        raise RangeError(f"{side} block {ids[0]} is outside 0..{group.blocks - 1}")
    return ids[0]


def _block_ids(side: str, group: Group, ids: tuple[int, ...], places: Numbers) -> Numbers:
    """The ids at `places` of a block list; `places` never decreases.

    Only the slice between the first and the last place is converted: lists of a long prompt have thousands of entries, a chunk
    needs a few. An id of a peer may be any integer, so the conversion itself can overflow.
    """
    if not len(places):
        return places
    first, last = int(places[0]), int(places[-1]) + 1
    chosen = ids[first:last]
    try:
        listed = np.array(chosen, np.int64)
    except OverflowError:
        raise RangeError(f"{side} block {max(ids, key=abs)} is outside 0..{group.blocks - 1}") from None
    at = places - first
    is_short = len(chosen) <= _SHORT_LIST
    if is_short and min(chosen) >= 0 and max(chosen) < group.blocks and len(set(chosen)) == len(chosen):
        return listed[at]
    has_gaps = bool((places[1:] - places[:-1] > 1).any())
    _check_ids(side, group, listed[np.unique(at)] if has_gaps else listed)
    return listed[at]


def _check_ids(side: str, group: Group, ids: Numbers) -> None:
    ordered = np.sort(ids)
    if ordered[0] < 0 or ordered[-1] >= group.blocks:
        bad = int(ids[(ids < 0) | (ids >= group.blocks)][0])
        if bad == HOLE:
            raise RangeError(f"{side} block list of {group.kind} has an entry without a block where tokens have to be moved")
        raise RangeError(f"{side} block {bad} is outside 0..{group.blocks - 1}")
    is_twice = ordered[1:] == ordered[:-1]
    if is_twice.any():
        raise RangeError(f"{side} block {int(ordered[1:][is_twice][0])} is listed twice; each entry needs a block of its own")
