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
from kvbaton.engines.embedded.backend import Backend, BackendSettings, make_backend
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.lacks import without
from kvbaton.engines.embedded.server import make_app, start_server
from kvbaton.engines.embedded.settings import DEFAULT_HTTP, HttpSettings
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES
from kvbaton.engines.embedded.shaped.rank_messages import RankTransport
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
    """The settings of `kvbaton serve`.

    `advertise_host` is where peers reach this instance; `control_host`, an IP address, when it is empty.
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
    """On shutdown, requests and hand-offs in flight have so long to finish; routers have been sent the goodbye by then."""
    shape: Shape = ONE_RANK
    drop: str = ""
    """What a control leaves out of every hand-off."""
    cache_dtype: str = CACHE_DTYPES[0]
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
        incarnation = Incarnation(secrets.token_hex(8))
        backend = make_backend(_backend_settings(settings, incarnation), parts, report, lost)
        sockets = ControlSockets(incarnation, settings.control_host, settings.control_port, settings.trust)
        card = _card(settings, backend, incarnation)
        self.timelines = Timelines(InstanceInfo(settings.role, settings.http_address, incarnation))
        observe = self.timelines.note
        self.driver = RanksDriver(card, backend.ranks, settings.limits, sockets, self._wake, settings.handoff, observe)
        self.engine = Engine(backend.loaded, backend.cache, self.driver, settings.engine, observe=observe)
        parts.callback(self.driver.close)
        parts.callback(self.engine.close)
        self.handoff = HandoffInfo(settings.control_address, incarnation)
        self.loaded = backend.loaded

    def _wake(self) -> None:
        self.engine.wake()

    def start(self) -> None:
        """Start the threads."""
        self.driver.start()
        self.engine.start()


async def serve_instance(settings: InstanceSettings, report: Callable[[str], None]) -> None:
    """Run one instance until cancelled; then send the goodbye, finish requests within `drain_s`, and close everything."""
    ended, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()

    def lost(problem: str) -> None:
        loop.call_soon_threadsafe(_fail, ended, LocalError(f"{problem}; start it again"))

    with ExitStack() as parts:
        instance = _EmbeddedInstance(settings, parts, report, lost)
        loaded = instance.loaded
        instance.start()
        app = make_app(
            instance.engine,
            served_model=loaded.name,
            role=settings.role,
            handoff=instance.handoff,
            agent=instance.driver.stats,
            timelines=instance.timelines,
            trust=settings.trust,
            settings=settings.http,
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
        report(f"{settings.role} instance of {loaded.name} on {where}, {settings.handoff.mode} mode")
        try:
            await ended
        finally:
            await asyncio.to_thread(announcer.stop)
            await _drain(instance.engine, settings.drain_s)
            await runner.cleanup()


async def _drain(engine: Engine, limit_s: float) -> None:
    """Wait until no request runs and no block is held, for at most `limit_s`."""
    give_up_at = time.monotonic() + limit_s
    while time.monotonic() < give_up_at:
        stats = engine.stats()
        if not stats.blocks_held and not any(stats.requests.values()):
            return
        await asyncio.sleep(_LOOK_S)


def _fail(ended: asyncio.Future[None], error: Exception) -> None:
    if not ended.done():
        ended.set_exception(error)


def _backend_settings(settings: InstanceSettings, incarnation: Incarnation) -> BackendSettings:
    transport = RankTransport(
        name=settings.transport,
        incarnation=incarnation,
        timeout_s=settings.limits.transfer_timeout,
        host=settings.control_host,
        advertise_host=numeric_host(settings.control_address.host, "--advertise-host"),
        drop=settings.drop or ("all" if settings.drop_writes else ""),
        unfenced_writes=settings.handoff.unfenced_writes,
    )
    return BackendSettings(
        settings.model,
        settings.shape,
        settings.blocks,
        settings.block_tokens,
        transport,
        settings.cache_dtype,
        settings.trust.key or b"",
    )


def _card(settings: InstanceSettings, backend: Backend, incarnation: Incarnation) -> Card:
    return Card(
        incarnation=incarnation,
        model=backend.loaded.name,
        fingerprint=backend.loaded.fingerprint,
        shape=str(settings.shape),
        ranks=without(backend.cards, settings.lacks),
        process=this_process(),
        defer_timeout=settings.limits.defer_timeout,
        transfer_timeout=settings.limits.transfer_timeout,
    )


def _announcer(settings: InstanceSettings, instance: _EmbeddedInstance) -> Announcer:
    """Role `both` serves clients by itself and registers with no router."""
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
