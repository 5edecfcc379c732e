"""The transport of one rank, over the region of its cache."""

from __future__ import annotations

from kvbaton.config import parse_trust
from kvbaton.engines.embedded.cache import RegionCache
from kvbaton.engines.embedded.shaped.drops import dropping
from kvbaton.engines.embedded.shaped.rank_messages import RankTransport
from kvbaton.transport.base import Transport, TransportSettings
from kvbaton.transport.choose import open_transport

__all__ = ["open_rank_transport"]


def open_rank_transport(settings: RankTransport, cache: RegionCache, cluster_key: bytes) -> Transport:
    """Open it; it moves nothing of what `settings.drop` names."""
    transport_settings = TransportSettings(
        incarnation=settings.incarnation,
        timeout_s=settings.timeout_s,
        host=settings.host,
        advertise_host=settings.advertise_host,
        cluster_key=cluster_key,
        unfenced_writes=settings.unfenced_writes,
        admits=parse_trust(allow=settings.allow).accepts_from,
    )
    return dropping(open_transport(settings.name, cache.region, transport_settings), cache, settings.drop)
