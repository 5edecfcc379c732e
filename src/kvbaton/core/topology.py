"""Instances cut into ranks: how ranks are numbered, what each holds, and when the ranks of an instance are complete.

One function numbers ranks, on both sides of every hand-off. What workers report one by one is collected here into one list for
the card; a rank that is missing, duplicated, or holds the wrong part is refused by name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from kvbaton.core.layout import Group, HeadRange, Layout, numbers_text
from kvbaton.errors import ConfigError

__all__ = [
    "RankAt",
    "Shape",
    "collect_ranks",
    "head_range",
    "instance_problem",
    "rank_port",
]

T = TypeVar("T")

_AXES = ("dp", "pp", "tp", "cp")
_MOST_RANKS = 1 << 16
_LAST_PORT = 65_535


class RankAt(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The coordinates of a rank in its instance's shape."""

    dp: int = 0
    pp: int = 0
    tp: int = 0
    cp: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} rank {getattr(self, name)}" for name in _AXES)


class Shape(msgspec.Struct, frozen=True):
    """How an instance is cut: dp x pp x tp x cp, written `tp2`, `pp2,tp2`, ..."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `pp2,tp4`; axes in any order, each at most once, 1 when missing. Raises ConfigError."""
        sizes: dict[str, int] = {}
        for part in text.replace(" ", "").split(","):
            found = re.fullmatch(r"(dp|pp|tp|cp)([1-9]\d{0,4})", part)
            if found is None or found[1] in sizes:
                raise ConfigError(
                    f"shape {text!r}: {part!r} is not one of dp, pp, tp, cp with a size, each once; write it as pp2,tp4"
                )
            sizes[found[1]] = int(found[2])
        shape = cls(**sizes)
        if shape.ranks * shape.dp > _MOST_RANKS:
            raise ConfigError(f"shape {text!r} has {shape.ranks * shape.dp} ranks; at most {_MOST_RANKS} are possible")
        return shape

    def __str__(self) -> str:
        parts = [f"{name}{getattr(self, name)}" for name in _AXES if getattr(self, name) > 1]
        return ",".join(parts) or "tp1"

    @property
    def ranks(self) -> int:
        """Ranks of one dp rank: those that take part in a hand-off together."""
        return self.pp * self.tp * self.cp

    def number(self, at: RankAt) -> int:
        """The number of a rank over all dp ranks; tp varies fastest, then cp, pp, dp. Raises ConfigError outside the shape."""
        for name in _AXES:
            if not 0 <= getattr(at, name) < getattr(self, name):
                raise ConfigError(f"{name} rank {getattr(at, name)} is outside 0..{getattr(self, name) - 1} of shape {self}")
        return ((at.dp * self.pp + at.pp) * self.cp + at.cp) * self.tp + at.tp

    def at(self, number: int) -> RankAt:
        """The coordinates of the rank with this number."""
        rest, tp = divmod(number, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        if not 0 <= dp < self.dp:
            raise ConfigError(f"rank {number} is outside 0..{self.ranks * self.dp - 1} of shape {self}")
        return RankAt(dp, pp, tp, cp)

    def all(self) -> Iterator[RankAt]:
        """Every rank, in the order of rank numbers."""
        return (self.at(number) for number in range(self.ranks * self.dp))


def rank_port(base: int, shape: Shape, at: RankAt) -> int:
    """The port of a rank, counted from `base`; no two ranks share one. Raises ConfigError past the last port."""
    last = base + shape.ranks * shape.dp - 1
    if not 0 < base <= last <= _LAST_PORT:
        raise ConfigError(
            f"ports {base} to {last} for shape {shape} are not all between 1 and {_LAST_PORT}; choose another base"
        )
    return base + shape.number(at)


def head_range(total_heads: int, tp_size: int, tp_rank: int) -> HeadRange:
    """The heads that a rank holds: an equal share, or one head that other ranks hold too. Raises ConfigError otherwise."""
    if total_heads >= tp_size and total_heads % tp_size == 0:
        each = total_heads // tp_size
        return HeadRange(tp_rank * each, each)
    if total_heads and tp_size % total_heads == 0:
        return HeadRange(tp_rank * total_heads // tp_size, 1)
    raise ConfigError(
        f"{total_heads} heads cannot be divided for tp{tp_size}: neither number divides the other; choose a tp that does"
    )


def collect_ranks(shape: Shape, reports: Iterable[Mapping[tuple[int, int], T] | None]) -> tuple[T, ...]:
    """The reports of all workers by (pp rank, tp rank), merged in the order of rank numbers; None is an empty report.

    Raises ConfigError for a rank that is missing, outside the shape, or reported twice. For shapes without cp.
    """
    found: dict[int, T] = {}
    for report in reports:
        for (pp_rank, tp_rank), each in (report or {}).items():
            number = shape.number(RankAt(pp=pp_rank, tp=tp_rank))
            if number in found:
                raise ConfigError(f"pp rank {pp_rank}, tp rank {tp_rank} is reported twice; each worker reports itself once")
            found[number] = each
    for number in range(shape.ranks):
        if number not in found:
            at = shape.at(number)
            stage = all(shape.number(RankAt(pp=at.pp, tp=tp)) not in found for tp in range(shape.tp))
            what = f"stage {at.pp}" if stage and shape.pp > 1 else f"pp rank {at.pp}, tp rank {at.tp}"
            raise ConfigError(f"{what} of shape {shape} is missing in the handshake; every worker has to report")
    return tuple(found[number] for number in range(shape.ranks))


def instance_problem(shape: Shape, layouts: Sequence[Layout]) -> str:
    """What the ranks of an instance lack or hold twice, by name; empty when together they hold the model exactly once."""
    if len(layouts) != shape.ranks:
        return f"{len(layouts)} ranks where shape {shape} has {shape.ranks}"
    for number, layout in enumerate(layouts):
        if problem := layout.problem():
            return f"rank {number}: {problem}"
        if len(layout.groups) != len(layouts[0].groups):
            return f"rank {number} has {len(layout.groups)} groups where rank 0 has {len(layouts[0].groups)}"
    return (
        _stage_problem(shape, layouts)
        or _layer_problem(layouts)
        or _heads_problem(shape, layouts)
        or _kinds_of_split(layouts)
        or _split_problem(shape, layouts)
    )


def _stage_problem(shape: Shape, layouts: Sequence[Layout]) -> str:
    """Ranks of one stage hold the same layers, and no layer of a group is in two stages."""
    first_of: dict[tuple[int, ...], int] = {}
    for pp in range(shape.pp):
        number = shape.number(RankAt(pp=pp))
        layers = layouts[number].layers
        for other in range(number, number + shape.tp * shape.cp):
            if problem := _other_layers(layouts[number], layouts[other]):
                return f"ranks {number} and {other} of stage {pp} hold {problem}"
        if layers and layers in first_of:
            return f"stages {first_of[layers]} and {pp} are the same: both hold layers {numbers_text(layers)}"
        first_of[layers] = pp
    for (one, first), (two, second) in itertools.combinations(first_of.items(), 2):
        if both := sorted(set(one) & set(two)):
            return f"stages {first} and {second} overlap in layers {numbers_text(both)}"
    return ""


def _other_layers(one: Layout, other: Layout) -> str:
    """Both sets of layers, in total or of the first group in which two ranks differ; empty when they hold the same."""
    if one.layers != other.layers:
        return f"layers {numbers_text(one.layers)} and {numbers_text(other.layers)}"
    for index, groups in enumerate(zip(one.groups, other.groups, strict=True)):
        ours, theirs = (sorted(group.layers) for group in groups)
        if ours != theirs:
            return f"layers {numbers_text(ours)} and {numbers_text(theirs)} of group {index}"
    return ""


def _layer_problem(layouts: Sequence[Layout]) -> str:
    """The first gap. Layer numbers come from a peer and can be huge, so this never iterates over layers that no rank holds."""
    held = sorted({layer for layout in layouts for layer in layout.layers})
    for before, after in itertools.pairwise([-1, *held]):
        if after - before > 1:
            missing = f"{before + 1}" if after - before == 2 else f"{before + 1}-{after - 1}"
            return f"no rank holds layers {missing}: there is a gap in the layers"
    return ""


def _heads_problem(shape: Shape, layouts: Sequence[Layout]) -> str:
    """Within each stage, the ranks hold every head of every plane, for every share of the tokens."""
    for pp in range(shape.pp):
        first = shape.number(RankAt(pp=pp))
        stage = layouts[first : first + shape.tp * shape.cp]
        for number, group in enumerate(stage[0].groups):
            others = [layout.groups[number] for layout in stage]
            if any(len(other.planes) != len(group.planes) for other in others):
                return f"stage {pp}: ranks differ in the planes of group {number}"
            if problem := _lacking_head(number, others):
                return f"stage {pp}: {problem}"
    return ""


def _lacking_head(number: int, groups: Sequence[Group]) -> str:
    for split in sorted({group.tokens for group in groups}, key=msgspec.structs.astuple):
        holders = [group for group in groups if group.tokens == split]
        share = f" for the tokens of context-parallel rank {split.rank} of {split.size}" if split.size > 1 else ""
        for index, plane in enumerate(holders[0].planes):
            if (lack := _missing_head(holders, index)) is not None:
                return f"no rank holds head {lack} of {plane.total_heads} of group {number} plane {plane.name}{share}"
    return ""


def _missing_head(groups: Sequence[Group], plane: int) -> int | None:
    reached = 0
    for each in sorted((each.start, each.end) for group in groups for each in group.planes[plane].heads):
        if each[0] > reached:
            return reached
        reached = max(reached, each[1])
    return reached if reached < groups[0].planes[plane].total_heads else None


def _kinds_of_split(layouts: Sequence[Layout]) -> str:
    """All ranks split the tokens of a group alike, or none does: else a token could be held by two ranks, or by none."""
    for number, groups in enumerate(zip(*(layout.groups for layout in layouts), strict=True)):
        kinds = {
            (split.size, split.interleave, 0 if split.interleave else group.block_tokens)
            for group in groups
            for split in [group.tokens]
        }
        if len(kinds) > 1 and kinds != {(1, 0, group.block_tokens) for group in groups}:
            return f"group {number}: ranks split tokens differently (ranks, turns, block_tokens): {sorted(kinds)}"
    return ""


def _split_problem(shape: Shape, layouts: Sequence[Layout]) -> str:
    """Within each stage, the ranks hold every share of the tokens."""
    for pp in range(shape.pp):
        first = shape.number(RankAt(pp=pp))
        stage = layouts[first : first + shape.tp * shape.cp]
        for number, groups in enumerate(zip(*(layout.groups for layout in stage), strict=True)):
            size, held = max(group.tokens.size for group in groups), {group.tokens.rank for group in groups}
            lacking = next(rank for rank in itertools.count() if rank not in held)
            if lacking < size:
                return f"stage {pp}: no rank holds the tokens of context-parallel rank {lacking} of {size} of group {number}"
    return ""
