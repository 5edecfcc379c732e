"""One embedded instance put together: model, cache, transport, agents, engine, HTTP server and registration."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from kvbaton.agent.driver import Driver
from kvbaton.agent.process import this_process
from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits, Trust
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.card import Card, RankCard
from kvbaton.core.handoff import Incarnation
from kvbaton.discovery.advertise import numeric_host
from kvbaton.discovery.announcer import Announcer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.engines.embedded.cache import AUX_SLOTS, PagedCache
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.server import make_app, start_server
from kvbaton.engines.embedded.weights import LoadedModel, load_model
from kvbaton.engines.handoff_params import HandoffInfo
from kvbaton.errors import ConfigError
from kvbaton.observe.records import About
from kvbaton.observe.timelines import Timelines
from kvbaton.transport.base import Transport, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = ["InstanceSettings", "Role", "serve_instance"]

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "both"]
_TYPES = {"prefill": InstanceType.PREFILL, "decode": InstanceType.DECODE}


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """Everything that `kvbaton serve` can be told.

    `advertise_host` is where others reach this instance; `control_host`, an IP address, when it is empty.
    """

    role: Role
    model: str
    host: str
    port: int
    control_host: str
    control_port: int
    transport: str
    routers: tuple[str, ...]
    blocks: int
    block_tokens: int
    limits: Limits
    engine: EngineSettings
    trust: Trust
    handoff: HandoffSettings = DEFAULT_HANDOFF
    drop_writes: bool = False
    advertise_host: str = ""

    @property
    def control_address(self) -> ControlAddress:
        """Where other instances reach this one."""
        return ControlAddress.of(self.advertise_host or self.control_host, self.control_port)

    @property
    def http_address(self) -> str:
        """Where routers and clients reach this instance."""
        return f"{in_url(self.advertise_host or self.host)}:{self.port}"


class _Instance:
    """The parts of an instance that have to be closed again, in the order in which they were opened."""

    def __init__(self, settings: InstanceSettings, loaded: LoadedModel, parts: ExitStack) -> None:
        incarnation = Incarnation(secrets.token_hex(8))
        cache = PagedCache(loaded.config, settings.blocks, settings.block_tokens, aux_slots=AUX_SLOTS)
        sockets = ControlSockets(incarnation, settings.control_host, settings.control_port, settings.trust)
        transport = _open_transport(settings, incarnation, cache)
        card = _card(settings, loaded, incarnation, cache, transport)
        self.timelines = Timelines(About(settings.role, settings.http_address, incarnation))
        observe = self.timelines.note
        self.driver = Driver(
            card, cache.layout(), transport, settings.limits, sockets, self._wake, settings.handoff, observe, cache.memory
        )
        self.engine = Engine(loaded, cache, self.driver, settings.engine, observe=observe)
        parts.callback(self.driver.close)
        parts.callback(self.engine.close)
        self.handoff = HandoffInfo(settings.control_address, incarnation)
        self.loaded = loaded

    def _wake(self) -> None:
        self.engine.wake()

    def start(self) -> None:
        """Start the threads."""
        self.driver.start()
        self.engine.start()


async def serve_instance(settings: InstanceSettings, say: Callable[[str], None]) -> None:
    """Run one instance until cancelled; then say goodbye, finish what hurts nobody, and give everything back."""
    loaded = load_model(settings.model, progress=say)
    with ExitStack() as parts:
        instance = _Instance(settings, loaded, parts)
        instance.start()
        app = make_app(
            instance.engine,
            served_model=loaded.name,
            role=settings.role,
            handoff=instance.handoff,
            agent=instance.driver.stats,
            timelines=instance.timelines,
        )
        try:
            runner = await start_server(app, settings.host, settings.port)
        except OSError as error:
            raise ConfigError(
                f"port {settings.port} on {settings.host}: {error.strerror}; choose another with --port"
            ) from error
        announcer = _announcer(settings, instance)
        announcer.start()
        where = f"http://{settings.http_address}, control {settings.control_address}"
        say(f"{settings.role} instance of {loaded.name} on {where}, {settings.handoff.mode} mode")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.to_thread(announcer.stop)
            await runner.cleanup()


def _open_transport(settings: InstanceSettings, incarnation: Incarnation, cache: PagedCache) -> Transport:
    transport_settings = TransportSettings(
        incarnation=incarnation,
        timeout_s=settings.limits.transfer_timeout,
        host=settings.control_host,
        advertise_host=numeric_host(settings.control_address.host, "--advertise-host"),
        cluster_key=settings.trust.key or b"",
    )
    region = cache.region
    transport = open_transport(settings.transport, region, transport_settings)
    return FaultyTransport(transport, region, Faults(drop_writes=True)) if settings.drop_writes else transport


def _card(
    settings: InstanceSettings, loaded: LoadedModel, incarnation: Incarnation, cache: PagedCache, transport: Transport
) -> Card:
    return Card(
        incarnation=incarnation,
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        shape="tp1",
        ranks=(RankCard(0, cache.layout(), (transport.endpoint(),), cache.aux_area),),
        process=this_process(),
        hold_s=settings.limits.defer_timeout,
        give_up_s=settings.limits.transfer_timeout,
    )


def _announcer(settings: InstanceSettings, instance: _Instance) -> Announcer:
    """Role `both` serves clients by itself and registers with nobody."""
    kind = _TYPES.get(settings.role, InstanceType.DECODE)
    registration = Registration(
        type=kind,
        http_address=settings.http_address,
        zmq_address=str(settings.control_address),
        transfer_mode=TransferMode.of(settings.handoff.mode),
        incarnation=instance.handoff.incarnation,
        model=instance.loaded.name,
        fingerprint=instance.loaded.fingerprint,
    )
    return Announcer(registration, settings.routers if settings.role in _TYPES else ())
