"""Which ranks of two instances meet, and what each pair moves: every part that a target rank holds comes from one source rank.

Where several source ranks hold the same heads, the target ranks take turns among them, so that nothing crosses the wire twice
and no replica does all the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from kvbaton.core.layout import Group, HeadRange, Layout, Plane
from kvbaton.core.pair import PlaneShare, Share
from kvbaton.errors import Incompatible

__all__ = ["shares_of"]


def shares_of(sources: Sequence[Layout], target: Layout, turn: int) -> dict[int, Share]:
    """What the rank with layout `target` gets from each source rank; those that it gets nothing from are left out.

    `turn` says which replica is its turn: the number of the target rank. Raises Incompatible for what no source rank holds.
    """
    found: dict[int, list[PlaneShare]] = defaultdict(list)
    for number, group in enumerate(target.groups):
        theirs = [layout.groups[number] for layout in sources if number < len(layout.groups)]
        if len(theirs) < len(sources):
            raise Incompatible("layout groups", len(target.groups), min(len(layout.groups) for layout in sources))
        for index, plane in enumerate(group.planes):
            for source, share in _plane_shares(theirs, group, number, index, plane, turn):
                found[source].append(share)
    return {source: tuple(shares) for source, shares in sorted(found.items())}


def _plane_shares(
    sources: Sequence[Group], target: Group, number: int, index: int, plane: Plane, turn: int
) -> Iterable[tuple[int, PlaneShare]]:
    """The share of each source rank in one plane, with layers that are shared out alike taken together."""
    alike: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for layer in target.layers:
        alike[_senders(sources, layer, number, index, plane, turn)].append(layer)
    for senders, layers in alike.items():
        for source in sorted({source for _, source in senders}):
            heads = _ranges([head for head, sender in senders if sender == source])
            yield source, PlaneShare(number, index, frozenset(layers), heads)


def _senders(
    sources: Sequence[Group], layer: int, number: int, index: int, plane: Plane, turn: int
) -> tuple[tuple[int, int], ...]:
    """(head, source rank) for every head of this layer that the target holds."""
    holders: dict[int, list[int]] = defaultdict(list)
    for source, group in enumerate(sources):
        if layer in group.layers and index < len(group.planes):
            for head in _heads(group.planes[index]):
                holders[head].append(source)
    missing = [head for head in _heads(plane) if head not in holders]
    if missing:
        raise Incompatible(f"layout group {number} plane {plane.name}, head {missing[0]} of layer {layer}", "held", "missing")
    return tuple((head, holders[head][turn % len(holders[head])]) for head in _heads(plane))


def _heads(plane: Plane) -> list[int]:
    return [head for each in plane.heads for head in range(each.start, each.end)]


def _ranges(heads: Sequence[int]) -> tuple[HeadRange, ...]:
    """Heads as the fewest ranges."""
    ranges: list[HeadRange] = []
    for head in sorted(heads):
        if ranges and ranges[-1].end == head:
            ranges[-1] = HeadRange(ranges[-1].start, ranges[-1].count + 1)
        else:
            ranges.append(HeadRange(head, 1))
    return tuple(ranges)
