"""The backend of an instance: its model, its cache and its ranks, in this process or in one process per rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvbaton.agent.rank_sets import LocalRanks, RankSet, RemoteRanks
from kvbaton.core.auth import ClusterKey
from kvbaton.core.card import RankCard
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.cache import AUX_SLOTS, PagedCache
from kvbaton.engines.embedded.models import find_model
from kvbaton.engines.embedded.seams import EngineCache, EngineModel
from kvbaton.engines.embedded.shaped.blueprint import check_cut
from kvbaton.engines.embedded.shaped.drops import check_drop, check_has
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES, ShapedCache, check_dtype
from kvbaton.engines.embedded.shaped.model import LoadedShaped
from kvbaton.engines.embedded.shaped.rank_group import RankGroup, RemoteCache, RemoteModel
from kvbaton.engines.embedded.shaped.rank_messages import GroupSettings, open_rank_transport
from kvbaton.engines.embedded.weights import LoadedModel
from kvbaton.errors import Bug, ConfigError

__all__ = ["Backend", "make_backend"]


@dataclass(frozen=True, slots=True)
class Backend:
    """A model ready to serve, its cache as the scheduler sees it, its ranks, and their part of the card."""

    loaded: EngineModel
    cache: EngineCache
    ranks: RankSet
    cards: tuple[RankCard, ...]


def make_backend(
    settings: GroupSettings,
    cluster_key: ClusterKey,
    parts: ExitStack,
    report: Callable[[str], None],
    lost: Callable[[str], None],
) -> Backend:
    """Make it; what has to be closed goes onto `parts`, and `lost` is called when a rank process dies. Raises LocalError."""
    check_drop(settings.transport.drop)
    check_dtype(settings.dtype)
    loaded = find_model(settings.model, progress=report)
    if isinstance(loaded, LoadedModel):
        backend = _local_backend(settings, cluster_key, loaded, _paged_cache(settings, loaded))
    elif isinstance(loaded, LoadedShaped):
        check_cut(loaded.blueprint, settings.shape)
        check_has(loaded.blueprint, settings.transport.drop)
        if settings.shape.ranks > 1:
            backend = _remote_backend(settings, cluster_key, loaded, parts, lost)
        else:
            cache = ShapedCache(loaded.blueprint, settings.blocks, settings.block_tokens, dtype=settings.dtype)
            backend = _local_backend(settings, cluster_key, loaded, cache)
    else:
        raise Bug(f"model {settings.model} is of no kind that can be served")
    parts.callback(backend.ranks.close)
    return backend


def _paged_cache(settings: GroupSettings, loaded: LoadedModel) -> PagedCache:
    if settings.shape != Shape():
        raise ConfigError(
            f"model {settings.model} cannot be cut into {settings.shape}; use tp1, or a small model such as tiny-gqa8"
        )
    if settings.dtype != CACHE_DTYPES[0]:
        raise ConfigError(f"model {settings.model} has a cache of {CACHE_DTYPES[0]} only, not of {settings.dtype}")
    return PagedCache(loaded.config, settings.blocks, settings.block_tokens, aux_slots=AUX_SLOTS)


def _local_backend(
    settings: GroupSettings, cluster_key: ClusterKey, loaded: EngineModel, cache: PagedCache | ShapedCache
) -> Backend:
    how = settings.transport
    transport = open_rank_transport(how, cache, cluster_key)
    if settings.model_id and not isinstance(cache, PagedCache):
        raise ConfigError(f"--model-id is {settings.model_id}; {settings.model} exists in this engine alone, leave it out")
    layout = cache.common_layout() if settings.model_id and isinstance(cache, PagedCache) else cache.layout()
    ranks = LocalRanks(layout, transport, how.timeout_s, cache.memory, unfenced_writes=how.unfenced_writes)
    return Backend(loaded, cache, ranks, (RankCard(0, layout, (transport.endpoint(),), cache.aux_area),))


def _remote_backend(
    settings: GroupSettings, cluster_key: ClusterKey, loaded: LoadedShaped, parts: ExitStack, lost: Callable[[str], None]
) -> Backend:
    group = RankGroup(settings, lost, cluster_key)
    parts.callback(group.close)
    for rank, ready in zip(group.ranks, group.ready, strict=True):
        if ready.fingerprint != loaded.fingerprint:
            raise Bug(f"{rank.name} has made model {ready.fingerprint}, and its leader {loaded.fingerprint}")
    first = group.ready[0]
    ranks = RemoteRanks(group.agents, settings.transport.name, first.executor, lost, fences_writers=first.fences_writers)
    cards = tuple(RankCard(number, ready.layout, (ready.endpoint,)) for number, ready in enumerate(group.ready))
    cut = dataclasses.replace(loaded, model=RemoteModel(group))
    return Backend(cut, RemoteCache(loaded.blueprint, group), ranks, cards)
