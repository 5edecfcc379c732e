"""Whether two small models in two shapes fit together: the same check as at a handshake, before anything is started."""

from __future__ import annotations

from kvbaton.config import Limits
from kvbaton.core.card import Card, ProcessId, check_compatible, make_card
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.shaped.cut import Cut, check_cut
from kvbaton.engines.embedded.shaped.layouts import layout_of
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.engines.embedded.shaped.model import LoadedShaped

__all__ = ["check_fit"]

_BLOCKS, _BLOCK_TOKENS = 1, 16
_LIMITS = Limits()


def check_fit(source: LoadedShaped, source_shape: Shape, target: LoadedShaped, target_shape: Shape) -> None:
    """Raise ConfigError for a model that cannot be cut so, Incompatible with both values for two that do not fit."""
    for loaded, shape in ((source, source_shape), (target, target_shape)):
        check_cut(loaded.blueprint, shape)
    theirs, ours = _card(source, source_shape), _card(target, target_shape)
    check_compatible(theirs, ours, ours=ours)


def _card(loaded: LoadedShaped, shape: Shape) -> Card:
    cuts = [Cut(at.pp, shape.pp, at.tp, shape.tp) for at in shape.all()]
    return make_card(
        incarnation=Incarnation(""),
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        process=ProcessId("", 0, 0),
        limits=_LIMITS,
        layouts=[layout_of(ShapedCache(loaded.blueprint, _BLOCKS, _BLOCK_TOKENS, cut)) for cut in cuts],
        shape=shape,
    )
