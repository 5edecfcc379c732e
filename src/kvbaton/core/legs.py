"""Which ranks of two instances exchange data, and what each leg between them moves.

Every element that a target rank holds comes from exactly one source rank that holds it. Where several source ranks hold the
same (replicated heads, MLA), they are divided among the targets that need it: each source serves as few targets as possible,
and a target with several sources to itself takes layers from them in turn. So replicated data crosses the wire once per need,
spread over the replicas.

Both sides compute this from the same two cards and must reach the same result, because checksums name legs by number:
nothing here may depend on the side, on hash order or on the order of arrival.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvbaton.core.layout import Group, HeadRange, Layout, TokenSplit, numbers_text
from kvbaton.core.pair import PlaneShare, Share, check_groups, common_heads
from kvbaton.errors import Incompatible

__all__ = ["Leg", "Legs", "assign_legs"]


@dataclass(frozen=True, slots=True)
class Leg:
    """What is moved from one source rank to one target rank; the number is the same on both sides."""

    number: int
    source: int
    target: int
    share: Share


@dataclass(frozen=True, slots=True)
class Legs:
    """All legs between two instances, ordered by target and then source. A rank without legs has nothing to do."""

    legs: tuple[Leg, ...]

    def of_source(self, rank: int) -> tuple[Leg, ...]:
        """The legs of a source rank; as many target ranks wait for it."""
        return tuple(leg for leg in self.legs if leg.source == rank)

    def of_target(self, rank: int) -> tuple[Leg, ...]:
        """The legs of a target rank; it is complete when each of them is."""
        return tuple(leg for leg in self.legs if leg.target == rank)


_Where = tuple[int, int]
_Shares = dict[tuple[int, int, int, int, HeadRange], set[int]]


def assign_legs(sources: Sequence[Layout], targets: Sequence[Layout]) -> Legs:
    """Decide which source rank serves which part of which target rank; raises Incompatible where no rank holds what is needed.

    Cached, as `pair_layouts` is.
    """
    return _assign_legs(tuple(sources), tuple(targets))


@lru_cache(maxsize=64)
def _assign_legs(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Legs:
    for source in sources:
        check_groups(source, targets[0])
    for target in targets:
        check_groups(sources[0], target)
    _check_layers(sources, targets)
    shares: _Shares = defaultdict(set)
    for number in range(len(targets[0].groups) if targets else 0):
        for plane in range(len(targets[0].groups[number].planes)):
            _share_out(
                shares, (number, plane), [each.groups[number] for each in sources], [each.groups[number] for each in targets]
            )
    return Legs(tuple(_legs(shares)))


def _check_layers(sources: Sequence[Layout], targets: Sequence[Layout]) -> None:
    """Both instances hold the same layers of every group."""
    for number, group in enumerate(targets[0].groups):
        ours, theirs = (sorted({layer for each in side for layer in each.groups[number].layers}) for side in (targets, sources))
        if ours != theirs:
            raise Incompatible(f"layout group {number} ({group.kind}) layers", numbers_text(ours), numbers_text(theirs))


def _share_out(shares: _Shares, where: _Where, sources: Sequence[Group], targets: Sequence[Group]) -> None:
    """Assign one plane of one group: for each token split, set of layers and range of heads."""
    plane = where[1]
    for ranks in _by_split(sources).values():
        takers = [rank for rank, group in enumerate(targets) if _may_share_tokens(sources[ranks[0]], group)]
        for layers, holders in _stages(sources, ranks).items():
            for atom in _atoms([sources[rank].planes[plane].heads for rank in holders]):
                able = [rank for rank in holders if _holds(sources[rank], plane, atom)]
                for part, some in _takers_of(targets, takers, plane, layers, atom).items():
                    _assign(shares, where, part, able, some, layers, targets)
    _check_covered(shares, where, sources, targets)
    _check_storages(shares, where, targets)


def _by_split(groups: Sequence[Group]) -> Mapping[TokenSplit, list[int]]:
    ranks: dict[TokenSplit, list[int]] = defaultdict(list)
    for rank, group in enumerate(groups):
        ranks[group.tokens].append(rank)
    return ranks


def _may_share_tokens(source: Group, target: Group) -> bool:
    """Whether there can be tokens that both hold; different ranks of the same split have none in common."""
    one, two = source.tokens, target.tokens
    is_same_split = (one.size, one.interleave) == (two.size, two.interleave)
    is_same_cut = bool(one.interleave) or source.block_tokens == target.block_tokens
    return one.rank == two.rank or not (is_same_split and is_same_cut)


def _stages(groups: Sequence[Group], ranks: Sequence[int]) -> Mapping[frozenset[int], list[int]]:
    """Sets of layers, and the ranks that hold exactly those."""
    stages: dict[frozenset[int], list[int]] = defaultdict(list)
    for rank in ranks:
        if groups[rank].layers:
            stages[frozenset(groups[rank].layers)].append(rank)
    return stages


def _atoms(held: Sequence[tuple[HeadRange, ...]]) -> list[HeadRange]:
    """The coarsest ranges of heads that each rank holds entirely or not at all; 3 to 2 ranks of 6 heads need this."""
    cuts = sorted({edge for ranges in held for each in ranges for edge in (each.start, each.end)})
    atoms = [HeadRange(low, high - low) for low, high in itertools.pairwise(cuts)]
    return [atom for atom in atoms if any(common_heads([atom], ranges) for ranges in held)]


def _holds(group: Group, plane: int, atom: HeadRange) -> bool:
    return any(each.start <= atom.start and atom.end <= each.end for each in group.planes[plane].heads)


def _takers_of(
    targets: Sequence[Group], ranks: Sequence[int], plane: int, layers: frozenset[int], atom: HeadRange
) -> Mapping[HeadRange, list[int]]:
    """The parts of an atom that these target ranks hold, and which of them hold each."""
    held = {rank: targets[rank].planes[plane].heads for rank in ranks if layers & frozenset(targets[rank].layers)}
    parts = _atoms([common_heads([atom], heads) for heads in held.values()])
    return {part: [rank for rank, heads in held.items() if common_heads([part], heads)] for part in parts}


def _assign(
    shares: _Shares,
    where: _Where,
    part: HeadRange,
    able: Sequence[int],
    takers: Sequence[int],
    layers: frozenset[int],
    targets: Sequence[Group],
) -> None:
    """Divide the sources that hold a part among the targets that need it, separately for each set of layers and tokens."""
    rivals: dict[tuple[frozenset[int], TokenSplit], list[int]] = defaultdict(list)
    for target in takers:
        rivals[frozenset(targets[target].layers) & layers, targets[target].tokens].append(target)
    for (common, _), ranks in rivals.items():
        for place, target in enumerate(ranks):
            first = place * len(able) // len(ranks)
            own = able[first : max(first + 1, (place + 1) * len(able) // len(ranks))]
            for turn, together in enumerate(_storages(targets[target], where[1], common)):
                shares[own[turn % len(own)], target, *where, part].update(together)


def _storages(group: Group, plane: int, layers: frozenset[int]) -> list[list[int]]:
    """These layers, grouped by memory: layers may share one (vLLM's cross-layer KV sharing), and one source fills it, once."""
    storages: dict[int, list[int]] = defaultdict(list)
    for layer, offset in sorted(zip(group.layers, group.planes[plane].layer_offsets, strict=True)):
        if layer in layers:
            storages[offset].append(layer)
    return list(storages.values())


def _check_covered(shares: _Shares, where: _Where, sources: Sequence[Group], targets: Sequence[Group]) -> None:
    """Raise Incompatible unless every target gets all its layers and heads, from each part of the tokens."""
    number, plane = where
    first_of_splits = [sources[ranks[0]] for ranks in _by_split(sources).values()]
    got: dict[int, int] = defaultdict(int)
    for (_, target, its_group, its_plane, part), layers in shares.items():
        if (its_group, its_plane) == where:
            got[target] += part.count * len(layers)
    for rank, group in enumerate(targets):
        splits = sum(_may_share_tokens(source, group) for source in first_of_splits)
        needed = len(group.layers) * group.planes[plane].head_count * splits
        if got[rank] != needed:
            own = group.planes[plane]
            raise Incompatible(
                f"layout group {number} ({group.kind}) plane {own.name} of target rank {rank}, in heads times layers,",
                f"{needed} needed",
                f"{got[rank]} held",
            )


def _check_storages(shares: _Shares, where: _Where, targets: Sequence[Group]) -> None:
    """Raise Incompatible where two sources would fill one memory: layers that share it have to be in one source stage."""
    for (_, target, *its, _), layers in shares.items():
        group = targets[target]
        if tuple(its) != where or len(layers) == len(group.layers):
            continue
        for together in _storages(group, where[1], frozenset(group.layers)):
            apart = [layer for layer in together if layer not in layers]
            if 0 < len(apart) < len(together):
                one, two = sorted((min(set(together) - set(apart)), apart[0]))
                raise Incompatible(f"layout group {where[0]} memory of layers {one} and {two}", "shared", "apart")


def _legs(shares: _Shares) -> list[Leg]:
    by_leg: dict[tuple[int, int], dict[tuple[int, int, frozenset[int]], list[HeadRange]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for (source, target, group, plane, part), layers in shares.items():
        by_leg[target, source][group, plane, frozenset(layers)].append(part)
    return [
        Leg(number, source, target, _share(by_leg[target, source])) for number, (target, source) in enumerate(sorted(by_leg))
    ]


def _share(parts: Mapping[tuple[int, int, frozenset[int]], list[HeadRange]]) -> Share:
    ordered = sorted(parts.items(), key=lambda item: (item[0][0], item[0][1], sorted(item[0][2])))
    return tuple(PlaneShare(group, plane, layers, _merged(heads)) for (group, plane, layers), heads in ordered)


def _merged(heads: Sequence[HeadRange]) -> tuple[HeadRange, ...]:
    merged: list[HeadRange] = []
    for each in sorted(heads, key=lambda each: each.start):
        if merged and merged[-1].end == each.start:
            merged[-1] = HeadRange(merged[-1].start, merged[-1].count + each.count)
        else:
            merged.append(each)
    return tuple(merged)
