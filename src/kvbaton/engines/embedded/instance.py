"""One embedded instance put together: model, cache, transport, agents, engine, HTTP server and registration."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from kvbaton.agent.driver import RanksDriver
from kvbaton.agent.process import this_process
from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits, Trust
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.card import Card
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.discovery.advertise import numeric_host
from kvbaton.discovery.announcer import Announcer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.engines.embedded.bodies import Body, BodySettings, make_body
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.lacks import without
from kvbaton.engines.embedded.server import make_app, start_server
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES
from kvbaton.engines.embedded.shaped.setup import RankTransport
from kvbaton.engines.handoff_params import HandoffInfo
from kvbaton.errors import ConfigError, LocalError
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines

__all__ = ["ONE_RANK", "InstanceSettings", "Role", "serve_instance"]

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "both"]
_LOOK_S = 0.02
ONE_RANK = Shape()
"""An instance that is not cut."""

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
    drain_s: float = 5.0
    """When asked to end, requests and hand-offs in flight have so long to finish; routers have been told goodbye by then."""
    shape: Shape = ONE_RANK
    drop: str = ""
    """What a control leaves out of every hand-off."""
    cache_dtype: str = CACHE_DTYPES[0]
    lacks: str = ""
    """What a control leaves out of the card."""

    @property
    def control_address(self) -> ControlAddress:
        """Where other instances reach this one."""
        return ControlAddress.of(self.advertise_host or self.control_host, self.control_port)

    @property
    def http_address(self) -> str:
        """Where routers and clients reach this instance."""
        return f"{in_url(self.advertise_host or self.host)}:{self.port}"


class _Instance:
    """The parts of an instance that have to be closed again, in the order in which they were opened.

    `lost` is told, from another thread, when a rank of it has died.
    """

    def __init__(
        self, settings: InstanceSettings, parts: ExitStack, say: Callable[[str], None], lost: Callable[[str], None]
    ) -> None:
        incarnation = Incarnation(secrets.token_hex(8))
        body = make_body(_body_settings(settings, incarnation), parts, say, lost)
        sockets = ControlSockets(incarnation, settings.control_host, settings.control_port, settings.trust)
        card = _card(settings, body, incarnation)
        self.timelines = Timelines(InstanceInfo(settings.role, settings.http_address, incarnation))
        observe = self.timelines.note
        self.driver = RanksDriver(card, body.ranks, settings.limits, sockets, self._wake, settings.handoff, observe)
        self.engine = Engine(body.loaded, body.cache, self.driver, settings.engine, observe=observe)
        parts.callback(self.driver.close)
        parts.callback(self.engine.close)
        self.handoff = HandoffInfo(settings.control_address, incarnation)
        self.loaded = body.loaded

    def _wake(self) -> None:
        self.engine.wake()

    def start(self) -> None:
        """Start the threads."""
        self.driver.start()
        self.engine.start()


async def serve_instance(settings: InstanceSettings, say: Callable[[str], None]) -> None:
    """Run one instance until cancelled; then say goodbye, finish what hurts nobody, and give everything back."""
    ended, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()

    def lost(problem: str) -> None:
        loop.call_soon_threadsafe(_fail, ended, LocalError(f"{problem}; start it again"))

    with ExitStack() as parts:
        instance = _Instance(settings, parts, say, lost)
        loaded = instance.loaded
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
            await ended
        finally:
            await asyncio.to_thread(announcer.stop)
            await _drain(instance.engine, settings.drain_s)
            await runner.cleanup()


async def _drain(engine: Engine, limit_s: float) -> None:
    """Wait until nothing is computed and nothing is held for anybody, but not for ever."""
    give_up_at = time.monotonic() + limit_s
    while time.monotonic() < give_up_at:
        stats = engine.stats()
        if not stats.blocks_held and not any(stats.requests.values()):
            return
        await asyncio.sleep(_LOOK_S)


def _fail(ended: asyncio.Future[None], error: Exception) -> None:
    if not ended.done():
        ended.set_exception(error)


def _body_settings(settings: InstanceSettings, incarnation: Incarnation) -> BodySettings:
    transport = RankTransport(
        name=settings.transport,
        incarnation=incarnation,
        timeout_s=settings.limits.transfer_timeout,
        host=settings.control_host,
        advertise_host=numeric_host(settings.control_address.host, "--advertise-host"),
        drop=settings.drop or ("all" if settings.drop_writes else ""),
        unfenced_writes=settings.handoff.unfenced_writes,
    )
    return BodySettings(
        settings.model,
        settings.shape,
        settings.blocks,
        settings.block_tokens,
        transport,
        settings.cache_dtype,
        settings.trust.key or b"",
    )


def _card(settings: InstanceSettings, body: Body, incarnation: Incarnation) -> Card:
    return Card(
        incarnation=incarnation,
        model=body.loaded.name,
        fingerprint=body.loaded.fingerprint,
        shape=str(settings.shape),
        ranks=without(body.cards, settings.lacks),
        process=this_process(),
        defer_timeout=settings.limits.defer_timeout,
        transfer_timeout=settings.limits.transfer_timeout,
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
    return Announcer(
        registration,
        settings.routers if settings.role in _TYPES else (),
        is_used=lambda: instance.engine.stats().prompt_tokens_total > 0,
        cluster_key=settings.trust.key,
    )
