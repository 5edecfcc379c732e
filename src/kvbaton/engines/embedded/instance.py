"""One embedded instance put together: model, cache, transport, agents, engine, HTTP server and registration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from kvbaton.agent.driver import Driver
from kvbaton.agent.sockets import ControlSockets
from kvbaton.agent.stamps import open_stamps
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits, Trust
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.discovery.advertise import numeric_host
from kvbaton.engines.base import Role
from kvbaton.engines.embedded.backend import make_backend
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.settings import DEFAULT_HTTP, HttpSettings, InstanceOptions
from kvbaton.engines.embedded.shaped.drops import without
from kvbaton.engines.embedded.shaped.rank_messages import GroupSettings, RankTransport
from kvbaton.engines.instance import ONE_RANK, ModelIdentity, instance_card, new_incarnation
from kvbaton.engines.serving import serve_engine
from kvbaton.errors import LocalError
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines

__all__ = ["ONE_RANK", "InstanceSettings", "Role", "serve_instance"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings(InstanceOptions):
    """The settings of `kvbaton serve`.

    `advertise_host` is where peers reach this instance; `control_host`, an IP address, when it is empty.
    """

    control_host: str
    transport: str
    routers: tuple[str, ...]
    limits: Limits
    engine: EngineSettings
    trust: Trust
    handoff: HandoffSettings = DEFAULT_HANDOFF
    drop_writes: bool = False
    advertise_host: str = ""
    shape: Shape = ONE_RANK
    drop: str = ""
    """What a control leaves out of every hand-off."""
    lacks: str = ""
    """What a control leaves out of the card."""
    http: HttpSettings = DEFAULT_HTTP

    @property
    def control_address(self) -> ControlAddress:
        """Where other instances reach this one."""
        return ControlAddress.of(self.advertise_host or self.control_host, self.control_port)

    @property
    def http_address(self) -> str:
        """Where routers and clients reach this instance."""
        return f"{in_url(self.advertise_host or self.host)}:{self.port}"


class _EmbeddedInstance:
    """The parts of an instance; what has to be closed goes onto `parts`, in the order in which it was opened.

    `lost` is called, from another thread, when a rank process has died.
    """

    def __init__(
        self, settings: InstanceSettings, parts: ExitStack, report: Callable[[str], None], lost: Callable[[str], None]
    ) -> None:
        incarnation = new_incarnation()
        group = _group_settings(settings, incarnation)
        backend = make_backend(group, settings.trust.key or b"", parts, report, lost)
        where, beat_s = (settings.control_host, settings.control_port), settings.limits.beat_s
        sockets = ControlSockets(incarnation, *where, settings.trust, beat_s=beat_s)
        model = ModelIdentity(backend.loaded.name, settings.model_id or backend.loaded.fingerprint)
        card = instance_card(incarnation, model, settings.limits, backend.cards, settings.shape)
        card = msgspec.structs.replace(card, ranks=without(card.ranks, settings.lacks))
        self.timelines = Timelines(InstanceInfo(settings.role, settings.http_address, incarnation))
        observe = self.timelines.note
        self.driver = Driver(
            card, backend.ranks, settings.limits, sockets, self._wake, settings.handoff, observe, stamps=open_stamps()
        )
        self.engine = Engine(backend.loaded, backend.cache, self.driver, settings.engine, observe=observe)
        parts.callback(self.driver.close)
        parts.callback(self.engine.close)

    def _wake(self) -> None:
        self.engine.wake()

    def start(self) -> None:
        """Start the threads."""
        self.driver.start()
        self.engine.start()


async def serve_instance(settings: InstanceSettings, report: Callable[[str], None]) -> None:
    """Run one instance until cancelled; then deregister, finish what is in flight, and release everything."""
    ended, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()

    def lost(problem: str) -> None:
        loop.call_soon_threadsafe(_fail, ended, LocalError(f"{problem}; start it again"))

    with ExitStack() as parts:
        instance = _EmbeddedInstance(settings, parts, report, lost)
        instance.start()
        where = f"http{'s' if settings.trust.tls_dir else ''}://{settings.http_address}, control {settings.control_address}"
        report(f"{settings.role} instance of {instance.driver.card.model} on {where}, {settings.handoff.mode} mode")
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
            trust=settings.trust,
            http=settings.http,
            timelines=instance.timelines,
            ended=ended,
            drain_s=settings.drain_timeout_s,
        )


def _fail(ended: asyncio.Future[None], error: Exception) -> None:
    if not ended.done():
        ended.set_exception(error)


def _group_settings(settings: InstanceSettings, incarnation: Incarnation) -> GroupSettings:
    transport = RankTransport(
        name=settings.transport,
        incarnation=incarnation,
        timeout_s=settings.limits.transfer_timeout,
        host=settings.control_host,
        advertise_host=numeric_host(settings.control_address.host, "--advertise-host"),
        drop=settings.drop or ("all" if settings.drop_writes else ""),
        unfenced_writes=settings.handoff.unfenced_writes,
        fenced_writes=settings.handoff.fenced_writes,
        busy_poll_s=settings.handoff.busy_poll_s,
        allow=tuple(map(str, settings.trust.allowed.networks)) if settings.trust.allowed is not None else (),
        tls_dir="" if settings.trust.tls_dir is None else str(settings.trust.tls_dir),
    )
    return GroupSettings(
        settings.model,
        settings.shape,
        settings.blocks,
        settings.block_tokens,
        transport,
        dtype=settings.cache_dtype,
        model_id=settings.model_id,
    )
