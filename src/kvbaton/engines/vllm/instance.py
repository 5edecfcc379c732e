"""One vLLM instance's agents put together in its worker process: transport, control sockets, driver, registration."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import Limits
from kvbaton.core.handoff import BlockLists, Incarnation
from kvbaton.core.timeline import no_observer
from kvbaton.engines.base import Role
from kvbaton.engines.instance import LateAnnouncer, ModelIdentity, announcer_of, new_incarnation, open_driver
from kvbaton.engines.vllm.device import GatedPort
from kvbaton.engines.vllm.requests import HandoffInfo
from kvbaton.engines.vllm.settings import ConnectorSettings
from kvbaton.engines.vllm.tensors import RegisteredCache
from kvbaton.engines.vllm.worker_half import WorkerHalf
from kvbaton.observe.handoffs_server import HandoffsServer
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines
from kvbaton.transport.base import Region, Transport

__all__ = ["WorkerInstance"]


class WorkerInstance:
    """Everything that the worker process of a vLLM instance owns of kvbaton. Made and closed by the connector.

    `agent_limits`, `open_sockets` and `open_transport` may be overridden: so tests hold a hand-off up at a stage.
    """

    def __init__(self, settings: ConnectorSettings, cache: RegisteredCache, model: ModelIdentity, role: Role) -> None:
        incarnation = new_incarnation()
        self._news = threading.Event()
        self._cache = cache
        region = cache.region
        timelines = _timelines(settings, incarnation, role)
        observe = no_observer if timelines is None else timelines.note
        with ExitStack() as opened:
            sockets = self.open_sockets(settings, incarnation)
            opened.callback(sockets.close)
            transport = cache.device.ordered(self.open_transport(settings, incarnation, region))
            opened.callback(transport.close)
            self._notes = (
                None if timelines is None else HandoffsServer(timelines, settings.control_host, settings.handoffs_port)
            )
            if self._notes is not None:
                opened.callback(self._notes.close)
            self.driver = open_driver(
                settings.agents(),
                incarnation,
                model,
                cache.layout,
                region,
                self._news.set,
                limits=self.agent_limits(settings),
                sockets=sockets,
                transport=transport,
                observe=observe,
            )
            opened.pop_all()
        self.info = HandoffInfo(settings.control_address, incarnation)
        poison = self._poison if settings.poison else None
        layers = len(cache.layout.groups[0].layers)
        self._port = cache.device.port(self.driver, self._news.set)
        self.half = WorkerHalf(self._port, layers, self._news, settings.stop_timeout, poison, observe)
        announcer = announcer_of(
            role=role,
            http_address=settings.http_address,
            control_address=settings.control_address,
            mode=settings.mode,
            incarnation=incarnation,
            model=model,
            routers=settings.routers,
            is_used=self.is_used,
            cluster_key=settings.trust().key,
            handoffs_address=settings.handoffs_address,
            heartbeat_s=settings.heartbeat_s,
        )
        self._announcer = None if announcer is None else LateAnnouncer(announcer, settings.http_address)

    def is_used(self) -> bool:
        """Whether any request has ever asked it for a hand-off."""
        stats = self.driver.stats()
        return bool(stats.handshakes_total or stats.failures_total or any(stats.handoffs_live.values()))

    def agent_limits(self, settings: ConnectorSettings) -> Limits:
        """The limits that the agents keep: those that the card promises."""
        return settings.limits

    def open_sockets(self, settings: ConnectorSettings, incarnation: Incarnation) -> ControlSockets:
        """The control channel."""
        return settings.agents().open_sockets(incarnation)

    def open_transport(self, settings: ConnectorSettings, incarnation: Incarnation, region: Region) -> Transport:
        """What moves the bytes."""
        return settings.agents().open_transport(incarnation, region)

    def start(self) -> None:
        """Start the agents, and register with the routers as soon as the API answers."""
        self.driver.start()
        if self._notes is not None:
            self._notes.start()
        if self._announcer is not None:
            self._announcer.start()

    def close(self) -> None:
        """Deregister, end every hand-off, and release everything. Idempotent."""
        if self._announcer is not None:
            self._announcer.stop()
        if self._notes is not None:
            self._notes.close()
        if isinstance(self._port, GatedPort):
            self._port.close()
        self.driver.close()

    def _poison(self, blocks: BlockLists, cached_tokens: int) -> None:
        block_tokens = self._cache.layout.groups[0].block_tokens
        self._cache.poison(blocks[0][cached_tokens // block_tokens :])


def _timelines(settings: ConnectorSettings, incarnation: Incarnation, role: Role) -> Timelines | None:
    if not settings.handoffs_port:
        return None
    return Timelines(InstanceInfo(role, settings.http_address or str(settings.control_address), incarnation))
