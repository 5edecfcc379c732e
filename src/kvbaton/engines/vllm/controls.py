"""Controls of `kvbaton verify`: what is left out of every hand-off, so that a target with poisoned blocks must answer wrongly.

`heads` leaves out the last KV head, `layers` the last layer of the model, `state` the states of recurrent layers, `draft` the
layers of a draft model. `writes`, which moves nothing at all, is the transport's.
"""

from __future__ import annotations

from dataclasses import replace

from kvbaton.agent.rank import ShareFilter, keep_all
from kvbaton.core.layout import HeadRange
from kvbaton.core.pair import PlaneShare, Share, common_heads
from kvbaton.engines.vllm.tensors import InstanceCaches
from kvbaton.errors import ConfigError

__all__ = ["DROPS", "share_filter"]

DROPS = ("writes", "heads", "layers", "state", "draft")
"""What can be left out."""


def share_filter(drop: str, caches: InstanceCaches) -> ShareFilter:
    """What is left of the share of a leg. Raises ConfigError for what the model does not have."""
    if drop in ("", "writes"):
        return keep_all
    groups = caches.layouts[0].groups
    states = frozenset(place for place, group in enumerate(groups) if group.is_state)
    others = frozenset(range(len(groups))) - states - caches.drafts
    has = {"heads": others, "layers": others | states, "state": states, "draft": caches.drafts}[drop]
    if not has:
        raise ConfigError(f"drop is {drop!r}, and this model has nothing of that kind; such a control would prove nothing")
    held = {layer for layout in caches.layouts for place in has for layer in layout.groups[place].layers}

    def left(share: PlaneShare) -> PlaneShare | None:
        if share.group not in has:
            return share
        if drop == "heads":
            total = groups[share.group].planes[0].total_heads  # the same in keys and values, which a peer may have apart
            return replace(share, heads=common_heads(share.heads, (HeadRange(0, total - 1),)))
        return replace(share, layers=share.layers - {max(held)}) if drop == "layers" else None

    def keep(share: Share) -> Share:
        return tuple(kept for kept in map(left, share) if kept is not None and kept.heads and kept.layers)

    return keep
