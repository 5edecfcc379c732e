"""Controls: a card that leaves something out which its instance has, so that every peer must refuse it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.core.card import RankCard
from kvbaton.errors import ConfigError

__all__ = ["check_lacks", "without"]


def check_lacks(lacks: str) -> None:
    """Raise ConfigError unless `lacks` names something that a card can leave out."""
    what, _, number = lacks.partition(":")
    if lacks and not (what in ("layer", "rank") and number.isascii() and number.isdigit()):
        raise ConfigError(f"--lacks {lacks!r} names nothing that a card can leave out; give layer:N or rank:N")


def without(cards: Sequence[RankCard], lacks: str) -> tuple[RankCard, ...]:
    """`cards` without the layer or rank that `lacks` names; unchanged when `lacks` is empty."""
    check_lacks(lacks)
    what, _, number = lacks.partition(":")
    if what == "rank":
        return tuple(card for card in cards if card.rank != int(number))
    return tuple(_without_layer(card, int(number)) for card in cards) if lacks else tuple(cards)


def _without_layer(card: RankCard, layer: int) -> RankCard:
    replace = msgspec.structs.replace
    groups = []
    for group in card.layout.groups:
        kept = [place for place, each in enumerate(group.layers) if each != layer]
        planes = [replace(plane, layer_offsets=tuple(plane.layer_offsets[place] for place in kept)) for plane in group.planes]
        layers = tuple(group.layers[place] for place in kept)
        groups.append(replace(group, layers=layers, planes=tuple(planes)))
    return replace(card, layout=replace(card.layout, groups=tuple(groups)))
