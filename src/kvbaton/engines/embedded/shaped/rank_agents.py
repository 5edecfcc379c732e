"""What a rank process needs for hand-offs: its transport and its rank agent."""

from __future__ import annotations

from kvbaton.agent.channel import Channel
from kvbaton.agent.rank_loop import RankLoop
from kvbaton.core.layout import Layout
from kvbaton.engines.embedded.shaped.blueprint import find_blueprint
from kvbaton.engines.embedded.shaped.cut import Cut
from kvbaton.engines.embedded.shaped.drops import dropping
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.engines.embedded.shaped.rank_messages import RankReady, RankSetup, RankTransport
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.choose import open_transport

__all__ = ["RankAgents", "open_rank_transport"]


class RankAgents:
    """The transport and agent of one rank."""

    def __init__(self, setup: RankSetup, cache: ShapedCache, channel: Channel, cluster_key: bytes) -> None:
        self._layout = cache.layout()
        instance = [self._layout if cut == setup.cut else _outline(setup, cut) for cut in setup.cut.all()]
        opened = open_rank_transport(setup.transport, cache.region, cluster_key)
        self._transport = dropping(opened, cache, setup.transport.drop)
        self._loop = RankLoop(
            setup.cut.rank,
            instance,
            self._transport,
            channel,
            setup.transport.timeout_s,
            cache.memory,
            unfenced_writes=setup.transport.unfenced_writes,
        )

    def start(self) -> None:
        """Start the agent's thread."""
        self._loop.start()

    def close(self) -> None:
        """Stop it, and close the transport. Idempotent."""
        self._loop.close()

    def ready(self, fingerprint: str) -> RankReady:
        """The message that reports this rank to the leader."""
        return RankReady(self._layout, self._transport.endpoint(), self._loop.agent.executor, fingerprint)


def _outline(setup: RankSetup, cut: Cut) -> Layout:
    """The layout of another rank of this instance, of one block: peers need its heads and layers, not its size."""
    return ShapedCache(find_blueprint(setup.model), 1, setup.block_tokens, cut, setup.dtype).layout()


def open_rank_transport(settings: RankTransport, region: Region, cluster_key: bytes) -> Transport:
    """The transport over the region of a rank's cache."""
    transport_settings = TransportSettings(
        incarnation=settings.incarnation,
        timeout_s=settings.timeout_s,
        host=settings.host,
        advertise_host=settings.advertise_host,
        cluster_key=cluster_key,
        unfenced_writes=settings.unfenced_writes,
    )
    return open_transport(settings.name, region, transport_settings)
