"""The router as a server: its routes, and the life of everything it owns.

`serve_router` runs inside an event loop until it is cancelled; then it drains.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from kvbaton.config import Trust
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.registry import Registry
from kvbaton.discovery.static import StaticInstances
from kvbaton.router.board import Board, Loads
from kvbaton.router.choosing import Chooser
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.handoffs import HandoffPages
from kvbaton.router.http.server import HttpServer
from kvbaton.router.http.upstream import Upstream
from kvbaton.router.live import LiveView
from kvbaton.router.metrics import COLUMNS, RouterMetrics
from kvbaton.router.routed import Rings, RoutedTransfers
from kvbaton.router.routes import HttpRoutes
from kvbaton.router.settings import RouterSettings
from kvbaton.router.slots import SlotBook
from kvbaton.router.tracing import RequestTracing, is_traced, make_provider
from kvbaton.wire.tls import cluster_tls

__all__ = ["MAX_SLOTS", "RouterCore", "new_board", "serve_router"]

_logger = logging.getLogger(__name__)

MAX_SLOTS = 2048
"""How many instances have a load of their own; more share one."""

_SWEEP_S = 0.1


class RouterCore:
    """One process's router over a registry that another component feeds; `row` of `board` and of `rings` is its own."""

    def __init__(self, settings: RouterSettings, registry: Registry, board: Board, rings: Rings, row: int = 0) -> None:
        self.settings = settings
        self.registry = registry
        self.slots = SlotBook(MAX_SLOTS)
        self.metrics = RouterMetrics(board, row, registry)
        self._tls = cluster_tls(settings.tls_dir)
        self._trust = Trust(settings.cluster_key)
        self.upstream = Upstream(settings.connect_timeout_s, None if self._tls is None else self._tls.client)
        routed = RoutedTransfers(rings, row, self.slots, registry)
        chooser = Chooser(settings, registry, Loads(board, row, COLUMNS), self.slots)
        self.dispatcher = Dispatcher(settings, registry, chooser, self.upstream, self.metrics, routed)
        handoffs = HandoffPages(registry, self.upstream, routed, settings)
        if is_traced(os.environ):
            dropped = lambda: self.metrics.add("untraced_handoffs")  # noqa: E731
            self.dispatcher.tracing = RequestTracing(make_provider(), handoffs.report, dropped)
        live = LiveView(registry, self.upstream, settings, self.metrics, chooser)
        self.routes = HttpRoutes(settings, registry, self.dispatcher, self.upstream, self.metrics, handoffs, live)
        self.server = HttpServer(settings, self.routes.check_head, self.routes.handle, self.routes.count)

    def sweep(self, now: float) -> None:
        """What depends on time: deadlines, instances that fell silent, requests that waited too long."""
        self.registry.expire(now)
        self.dispatcher.sweep(now)
        self.upstream.sweep(now)
        self.server.sweep(now)
        self.metrics.see_loads(
            certificate_loads=0 if self._tls is None else self._tls.loads_total(),
            failed_certificate_loads=0 if self._tls is None else self._tls.failed_loads_total(),
            cluster_key_loads=self._trust.cluster_key_loads_total(),
            failed_cluster_key_loads=self._trust.failed_cluster_key_loads_total(),
        )

    async def stop(self) -> None:
        """Finish the requests in flight within the drain's limit, then close everything.

        Requests in the queue still need instances, and heartbeats no longer arrive: the instances file is not read now, and
        the first of several processes has ended. So instances stop expiring.
        """
        self.routes.is_draining = True
        self.registry.stop_expiring()
        deadline = asyncio.get_running_loop().create_task(self.server.drain(self.settings.drain_timeout_s))
        while not deadline.done():
            self.sweep(time.monotonic())
            await asyncio.wait([deadline], timeout=_SWEEP_S)
        if not deadline.result():
            _logger.warning("router: %d connections were still busy and are closed now", len(self.server))
        self.server.close()
        self.routes.close()
        if self.dispatcher.tracing is not None:
            await self.dispatcher.tracing.close()
        await self.upstream.close()


def new_board(processes: int) -> Board:
    """The numbers that so many processes of a router share."""
    return Board(processes, COLUMNS + MAX_SLOTS)


def new_registry(settings: RouterSettings) -> Registry:
    """The registry of a router with these settings."""
    return Registry(
        settings.transfer_mode,
        settings.expire_after_s,
        is_keyed=settings.cluster_key is not None,
        notices_pauses=True,
        first_fixes_mode=settings.first_fixes_mode,
    )


def listener_of(settings: RouterSettings, registry: Registry) -> Listener:
    """What feeds the registry of a router with these settings."""
    place = settings.discovery_host, settings.discovery_port
    tls = cluster_tls(settings.tls_dir)
    return Listener(registry, *place, cluster_key=settings.cluster_key, p2p_mode=settings.p2p_mode, tls=tls)


async def serve_router(settings: RouterSettings, ready: Callable[[], None] | None = None) -> None:
    """Run a router until cancelled; `ready` is called once both ports are open. Raises ConfigError when one cannot be bound."""
    registry = new_registry(settings)
    core = RouterCore(settings, registry, new_board(1), Rings(1))
    static = None if settings.instances_file is None else StaticInstances(settings.instances_file, registry)
    with listener_of(settings, registry) as listener:
        await core.server.open()
        if ready is not None:
            ready()
        try:
            while True:
                now = time.monotonic()
                listener.check()
                core.metrics.see_messages(listener.messages_total(), listener.malformed_total())
                if static is not None:
                    static.refresh(now)
                core.sweep(now)
                await asyncio.sleep(_SWEEP_S)
        finally:
            await asyncio.shield(core.stop())
