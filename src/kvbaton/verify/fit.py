"""Whether two small models in two shapes fit together: the same check as at a handshake, before anything is started."""

from __future__ import annotations

from kvbaton.core.card import Card, ProcessId, RankCard, check_compatible
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.shaped.cut import Cut, check_cut
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.engines.embedded.shaped.model import LoadedShaped

__all__ = ["check_fit"]

_BLOCKS, _BLOCK_TOKENS = 1, 16


def check_fit(source: LoadedShaped, source_shape: Shape, target: LoadedShaped, target_shape: Shape) -> None:
    """Raise ConfigError for a model that cannot be cut so, Incompatible with both values for two that do not fit."""
    for loaded, shape in ((source, source_shape), (target, target_shape)):
        check_cut(loaded.blueprint, shape)
    theirs, ours = _card(source, source_shape), _card(target, target_shape)
    check_compatible(theirs, ours, ours=ours)


def _card(loaded: LoadedShaped, shape: Shape) -> Card:
    cuts = [Cut(at.pp, shape.pp, at.tp, shape.tp) for at in shape.all()]
    layouts = [ShapedCache(loaded.blueprint, _BLOCKS, _BLOCK_TOKENS, cut).layout() for cut in cuts]
    return Card(
        incarnation=Incarnation(""),
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        shape=str(shape),
        ranks=tuple(RankCard(number, layout, ()) for number, layout in enumerate(layouts)),
        process=ProcessId("", 0, 0),
        defer_timeout=2.0,
        transfer_timeout=1.0,
    )
