"""The body of an instance: its model, its cache and its ranks, in this process or in one process per rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvbaton.agent.rank_sets import LocalRanks, RankSet, RemoteRanks
from kvbaton.core.card import RankCard
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.cache import AUX_SLOTS, PagedCache
from kvbaton.engines.embedded.models import find_model
from kvbaton.engines.embedded.seams import EngineCache, EngineModel
from kvbaton.engines.embedded.shaped.cut import check_cut
from kvbaton.engines.embedded.shaped.drops import check_drop, check_has, dropping
from kvbaton.engines.embedded.shaped.layouts import layout_of
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES, ShapedCache, check_dtype
from kvbaton.engines.embedded.shaped.model import LoadedShaped
from kvbaton.engines.embedded.shaped.rank_agents import open_rank_transport
from kvbaton.engines.embedded.shaped.rank_group import GroupSettings, RankGroup, RemoteCache, RemoteModel
from kvbaton.engines.embedded.shaped.setup import RankTransport
from kvbaton.engines.embedded.weights import LoadedModel
from kvbaton.errors import Bug, ConfigError
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = ["Body", "BodySettings", "make_body"]


@dataclass(frozen=True, slots=True)
class BodySettings:
    """What a body is made of: ranks in this shape, each with so many blocks."""

    model: str
    shape: Shape
    blocks: int
    block_tokens: int
    transport: RankTransport
    dtype: str = CACHE_DTYPES[0]
    cluster_key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Body:
    """A model ready to serve, the books of its cache, its ranks, and what the card says of them."""

    loaded: EngineModel
    cache: EngineCache
    ranks: RankSet
    cards: tuple[RankCard, ...]


def make_body(settings: BodySettings, parts: ExitStack, say: Callable[[str], None], lost: Callable[[str], None]) -> Body:
    """Make it; what has to be closed afterwards goes onto `parts`, and `lost` is told if a rank dies. Raises LocalError."""
    check_drop(settings.transport.drop)
    check_dtype(settings.dtype)
    loaded = find_model(settings.model, progress=say)
    if isinstance(loaded, LoadedModel):
        if settings.shape != Shape():
            raise ConfigError(
                f"model {settings.model} cannot be cut into {settings.shape}; use tp1, or a small model such as tiny-gqa8"
            )
        if settings.dtype != CACHE_DTYPES[0]:
            raise ConfigError(f"model {settings.model} has a cache of {CACHE_DTYPES[0]} only, not of {settings.dtype}")
        body = _paged_body(settings, loaded)
        parts.callback(body.ranks.close)
        return body
    if not isinstance(loaded, LoadedShaped):
        raise Bug(f"model {settings.model} is of no kind that can be served")
    check_cut(loaded.blueprint, settings.shape)
    check_has(loaded.blueprint, settings.transport.drop)
    is_cut = settings.shape.ranks > 1
    body = _remote_body(settings, loaded, parts, lost) if is_cut else _shaped_body(settings, loaded)
    parts.callback(body.ranks.close)
    return body


def _paged_body(settings: BodySettings, loaded: LoadedModel) -> Body:
    cache = PagedCache(loaded.config, settings.blocks, settings.block_tokens, aux_slots=AUX_SLOTS)
    transport = open_rank_transport(settings.transport, cache.region, settings.cluster_key)
    if settings.transport.drop:
        transport = FaultyTransport(transport, cache.region, Faults(drop_writes=True))
    layout = cache.layout()
    how = settings.transport
    ranks = LocalRanks(layout, transport, how.timeout_s, cache.memory, unfenced_writes=how.unfenced_writes)
    return Body(loaded, cache, ranks, (RankCard(0, layout, (transport.endpoint(),), cache.aux_area),))


def _shaped_body(settings: BodySettings, loaded: LoadedShaped) -> Body:
    cache = ShapedCache(loaded.blueprint, settings.blocks, settings.block_tokens, dtype=settings.dtype)
    opened = open_rank_transport(settings.transport, cache.region, settings.cluster_key)
    transport = dropping(opened, cache, settings.transport.drop)
    layout = layout_of(cache)
    how = settings.transport
    ranks = LocalRanks(layout, transport, how.timeout_s, cache.memory, unfenced_writes=how.unfenced_writes)
    return Body(loaded, cache, ranks, (RankCard(0, layout, (transport.endpoint(),)),))


def _remote_body(settings: BodySettings, loaded: LoadedShaped, parts: ExitStack, lost: Callable[[str], None]) -> Body:
    group = RankGroup(
        GroupSettings(
            model=settings.model,
            pp_size=settings.shape.pp,
            tp_size=settings.shape.tp,
            blocks=settings.blocks,
            block_tokens=settings.block_tokens,
            dtype=settings.dtype,
            transport=settings.transport,
        ),
        lost,
        settings.cluster_key,
    )
    parts.callback(group.close)
    for rank, ready in zip(group.ranks, group.ready, strict=True):
        if ready.fingerprint != loaded.fingerprint:
            raise Bug(f"{rank.name} has made model {ready.fingerprint}, and its leader {loaded.fingerprint}")
    ranks = RemoteRanks(group.agents, settings.transport.name, group.ready[0].executor, lost)
    cards = tuple(RankCard(number, ready.layout, (ready.endpoint,)) for number, ready in enumerate(group.ready))
    cut = dataclasses.replace(loaded, model=RemoteModel(group))
    return Body(cut, RemoteCache(loaded.blueprint, group), ranks, cards)
