"""One vLLM instance's agents put together in its worker process: transport, control sockets, driver, registration."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvbaton.agent.driver import Driver
from kvbaton.agent.process import this_process
from kvbaton.agent.sockets import ControlSockets
from kvbaton.core.card import Card, RankCard
from kvbaton.core.handoff import BlockLists, Incarnation
from kvbaton.core.timeline import no_observer
from kvbaton.discovery.advertise import numeric_host
from kvbaton.discovery.announcer import Announcer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.engines.vllm.registration import LateAnnouncer
from kvbaton.engines.vllm.requests import HandoffInfo
from kvbaton.engines.vllm.settings import ConnectorSettings
from kvbaton.engines.vllm.tensors import RegisteredCache
from kvbaton.engines.vllm.worker_half import WorkerHalf
from kvbaton.observe.handoffs_server import HandoffsServer
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = ["ModelName", "WorkerInstance"]


@dataclass(frozen=True, slots=True)
class ModelName:
    """What is served: the name that clients use, and a digest of everything that decides what a cache means."""

    name: str
    fingerprint: str


class WorkerInstance:
    """Everything that the worker process of a vLLM instance owns of kvbaton. Made and closed by the connector.

    `open_sockets` and `open_transport` may be overridden: that is how tests hold a hand-off up at a stage of their choice.
    """

    def __init__(
        self, settings: ConnectorSettings, cache: RegisteredCache, model: ModelName, registers_as: InstanceType | None
    ) -> None:
        incarnation = Incarnation(secrets.token_hex(8))
        self._news = threading.Event()
        self._cache = cache
        region = cache.region
        with ExitStack() as parts:
            sockets = self.open_sockets(settings, incarnation)
            parts.callback(sockets.close)
            transport = self.open_transport(settings, incarnation, region)
            parts.callback(transport.close)
            card = _card(settings, model, incarnation, cache, transport)
            limits, handoff = settings.limits, settings.handoff
            timelines = _timelines(settings, incarnation, registers_as)
            observe = no_observer if timelines is None else timelines.note
            self._notes = (
                None if timelines is None else HandoffsServer(timelines, settings.control_host, settings.handoffs_port)
            )
            if self._notes is not None:
                parts.callback(self._notes.close)
            self.driver = Driver(
                card, cache.layout, transport, limits, sockets, self._news.set, handoff, observe, memory=region.view
            )
            parts.pop_all()
        self.info = HandoffInfo(settings.control_address, incarnation)
        poison = self._poison if settings.poison else None
        layers = len(cache.layout.groups[0].layers)
        self.half = WorkerHalf(self.driver, layers, self._news, limits.stop_timeout, poison, observe)
        self._announcer = _announcer(settings, self.info, model, registers_as, self.is_used)

    def is_used(self) -> bool:
        """Whether anybody has ever wanted a hand-off of it."""
        stats = self.driver.stats()
        return bool(stats.handshakes_total or stats.failures_total or any(stats.handoffs_live.values()))

    def open_sockets(self, settings: ConnectorSettings, incarnation: Incarnation) -> ControlSockets:
        """The control channel."""
        return ControlSockets(incarnation, settings.control_host, settings.control_port, settings.trust())

    def open_transport(self, settings: ConnectorSettings, incarnation: Incarnation, region: Region) -> Transport:
        """What moves the bytes."""
        transport_settings = TransportSettings(
            incarnation=incarnation,
            timeout_s=settings.transfer_timeout,
            host=settings.control_host,
            advertise_host=numeric_host(settings.control_address.host, "advertise_host"),
            cluster_key=settings.trust().key or b"",
            unfenced_writes=settings.unfenced_writes,
        )
        transport = open_transport(settings.transport, region, transport_settings)
        return FaultyTransport(transport, region, Faults(drop_writes=True)) if settings.drop_writes else transport

    def start(self) -> None:
        """Start the agents, and register with the routers as soon as the API answers."""
        self.driver.start()
        if self._notes is not None:
            self._notes.start()
        if self._announcer is not None:
            self._announcer.start()

    def close(self) -> None:
        """Say goodbye, end every hand-off, and give everything back. Idempotent."""
        if self._announcer is not None:
            self._announcer.stop()
        if self._notes is not None:
            self._notes.close()
        self.driver.close()

    def _poison(self, blocks: BlockLists, cached_tokens: int) -> None:
        block_tokens = self._cache.layout.groups[0].block_tokens
        self._cache.poison(blocks[0][cached_tokens // block_tokens :])


def _timelines(settings: ConnectorSettings, incarnation: Incarnation, registers_as: InstanceType | None) -> Timelines | None:
    if not settings.handoffs_port:
        return None
    role = "both" if registers_as is None else registers_as.word
    return Timelines(InstanceInfo(role, settings.http_address or str(settings.control_address), incarnation))


def _card(
    settings: ConnectorSettings, model: ModelName, incarnation: Incarnation, cache: RegisteredCache, transport: Transport
) -> Card:
    return Card(
        incarnation=incarnation,
        model=model.name,
        fingerprint=model.fingerprint,
        shape="tp1",
        ranks=(RankCard(0, cache.layout, (transport.endpoint(),)),),
        process=this_process(),
        defer_timeout=settings.defer_timeout,
        transfer_timeout=settings.transfer_timeout,
    )


def _announcer(
    settings: ConnectorSettings,
    info: HandoffInfo,
    model: ModelName,
    registers_as: InstanceType | None,
    is_used: Callable[[], bool],
) -> LateAnnouncer | None:
    if registers_as is None or not settings.routers:
        return None
    registration = Registration(
        type=registers_as,
        http_address=settings.http_address,
        zmq_address=str(info.control_address),
        transfer_mode=TransferMode.of(settings.mode),
        incarnation=info.incarnation,
        model=model.name,
        fingerprint=model.fingerprint,
        handoffs_address=settings.handoffs_address,
    )
    announcer = Announcer(
        registration, settings.routers, settings.heartbeat_s, is_used=is_used, cluster_key=settings.trust().key
    )
    return LateAnnouncer(announcer, settings.http_address)
