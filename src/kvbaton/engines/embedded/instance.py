"""One embedded instance put together: model, cache, transport, agents, engine, HTTP server and registration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from kvbaton.agent.driver import RanksDriver
from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits, Trust
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.discovery.advertise import numeric_host
from kvbaton.engines.base import Role
from kvbaton.engines.embedded.bodies import BodySettings, make_body
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.lacks import without
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES
from kvbaton.engines.embedded.shaped.setup import RankTransport
from kvbaton.engines.instance import ONE_RANK, ModelIdentity, instance_card, new_incarnation
from kvbaton.engines.serving import serve_engine
from kvbaton.errors import LocalError
from kvbaton.observe.records import About
from kvbaton.observe.timelines import Timelines

__all__ = ["ONE_RANK", "InstanceSettings", "Role", "serve_instance"]

log = logging.getLogger(__name__)


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
        incarnation = new_incarnation()
        body = make_body(_body_settings(settings, incarnation), parts, say, lost)
        sockets = ControlSockets(incarnation, settings.control_host, settings.control_port, settings.trust)
        model = ModelIdentity(body.loaded.name, body.loaded.fingerprint)
        card = instance_card(
            incarnation,
            model,
            settings.limits,
            [rank.layout for rank in body.cards],
            shape=settings.shape,
            endpoints=[endpoint for rank in body.cards for endpoint in rank.endpoints],
            aux_areas=[rank.aux for rank in body.cards],
        )
        card = msgspec.structs.replace(card, ranks=without(card.ranks, settings.lacks))
        self.timelines = Timelines(About(settings.role, settings.http_address, incarnation))
        observe = self.timelines.note
        self.driver = RanksDriver(card, body.ranks, settings.limits, sockets, self._wake, settings.handoff, observe)
        self.engine = Engine(body.loaded, body.cache, self.driver, settings.engine, observe=observe)
        parts.callback(self.driver.close)
        parts.callback(self.engine.close)

    def _wake(self) -> None:
        self.engine.wake()

    def start(self) -> None:
        """Start the threads."""
        self.driver.start()
        self.engine.start()


async def serve_instance(settings: InstanceSettings, say: Callable[[str], None]) -> None:
    """Run one instance until cancelled; then deregister, finish what is in flight, and release everything."""
    ended, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()

    def lost(problem: str) -> None:
        loop.call_soon_threadsafe(_fail, ended, LocalError(f"{problem}; start it again"))

    with ExitStack() as parts:
        instance = _Instance(settings, parts, say, lost)
        instance.start()
        where = f"http://{settings.http_address}, control {settings.control_address}"
        say(f"{settings.role} instance of {instance.driver.card.model} on {where}, {settings.handoff.mode} mode")
        await serve_engine(
            instance.engine,
            instance.driver,
            role=settings.role,
            host=settings.host,
            port=settings.port,
            http_address=settings.http_address,
            control_address=settings.control_address,
            mode=settings.handoff.mode,
            routers=settings.routers,
            cluster_key=settings.trust.key,
            timelines=instance.timelines,
            ended=ended,
            drain_s=settings.drain_s,
        )


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
