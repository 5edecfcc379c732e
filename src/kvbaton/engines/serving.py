"""Serves an engine that has no HTTP server of its own, registers it, and ends it in good order.

The server is the embedded engine's; `EngineClient` is all that it needs of an engine. An engine whose instance is a Python
module takes the rest from here as well: `ModuleServers` describes its process, `serve_local` is its `main`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvbaton.agent.driver import Driver
from kvbaton.config import HandoffSettings, Trust, parse_trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Mode
from kvbaton.core.topology import Shape
from kvbaton.engines.base import EngineOptions, PreparedEngine, Role
from kvbaton.engines.embedded.server import make_app, start_server
from kvbaton.engines.embedded.settings import DEFAULT_HTTP, HttpSettings
from kvbaton.engines.embedded.submission import EngineClient
from kvbaton.engines.handoff_params import HandoffInfo
from kvbaton.engines.instance import AgentSettings, ModelIdentity, announcer_of
from kvbaton.errors import ConfigError
from kvbaton.launch.fleet import FleetPart, core_share
from kvbaton.launch.ports import PortPicker
from kvbaton.observe.timelines import Timelines
from kvbaton.wire.tls import cluster_tls

__all__ = ["LocalEngine", "LocalSettings", "ModuleServers", "serve_engine", "serve_local"]

_HOST = "127.0.0.1"
_LOOK_S = 0.02


class LocalSettings(msgspec.Struct, frozen=True):
    """One instance on loopback, as its process gets it: the only argument, as JSON. The key is in the environment."""

    role: Role
    model: str
    port: int
    control_port: int
    routers: tuple[str, ...]
    transport: str
    handoff: HandoffSettings
    poison: bool
    drop_writes: bool

    def agents(self) -> AgentSettings:
        """What the agents of this instance are opened with."""
        return AgentSettings(
            self.control_port,
            transport=self.transport,
            handoff=self.handoff,
            trust=parse_trust(None, os.environ),
            drop_writes=self.drop_writes,
        )


@dataclass(frozen=True, slots=True)
class ModuleServers(PreparedEngine):
    """Instances that run as `python -m MODULE SETTINGS`, with the interpreter of this process."""

    options: EngineOptions
    module: str

    def part(self, name: str, role: str, ports: PortPicker, routers: Sequence[str] = ()) -> FleetPart:
        """One instance on free loopback ports."""
        options, port, control_port = self.options, ports.pick(), ports.pick()
        facts = {"role": role, "model": options.model, "port": port, "control_port": control_port, "routers": list(routers)}
        facts |= {"transport": options.transport, "handoff": msgspec.to_builtins(options.handoff)}
        facts |= {"poison": options.controls.poison, "drop_writes": options.controls.drop_writes}
        url = f"{options.scheme}://{_HOST}:{port}"
        return FleetPart(
            name,
            [sys.executable, "-m", self.module, msgspec.json.encode(facts).decode()],
            f"{url}/health",
            core_share(options.sharing) | options.trust_variables(),
            base_url=url,
            control_address=str(ControlAddress.of(_HOST, control_port)),
            tls_dir=options.tls_dir,
        )


class LocalEngine(EngineClient, Protocol):
    """An engine with agents of its own, which it has opened and not started."""

    @property
    def driver(self) -> Driver:
        """Its agents."""


def serve_local(make_engine: Callable[[LocalSettings], LocalEngine]) -> None:
    """The `main` of an instance that `ModuleServers` describes: read its settings, and serve until it is ended."""
    settings = msgspec.json.decode(sys.argv[1], type=LocalSettings)
    engine = make_engine(settings)
    engine.driver.start()
    asyncio.run(
        serve_engine(
            engine,
            engine.driver,
            role=settings.role,
            host=_HOST,
            port=settings.port,
            http_address=f"{_HOST}:{settings.port}",
            control_address=settings.agents().control_address,
            mode=settings.handoff.mode,
            routers=settings.routers,
            trust=settings.agents().trust,
        )
    )


async def serve_engine(
    engine: EngineClient,
    driver: Driver,
    *,
    role: Role,
    host: str,
    port: int,
    http_address: str,
    control_address: ControlAddress,
    mode: Mode,
    routers: Sequence[str],
    trust: Trust,
    http: HttpSettings = DEFAULT_HTTP,
    timelines: Timelines | None = None,
    ended: asyncio.Future[None] | None = None,
    drain_s: float = 5.0,
) -> None:
    """Serve until cancelled, or until `ended` has an error; then deregister first, so that no new request comes.

    After that, requests and hand-offs in flight have `drain_s` to finish.
    """
    card = driver.card
    shape = Shape.parse(card.shape)
    app = make_app(
        engine,
        served_model=card.model,
        role=role,
        handoff=HandoffInfo(control_address, card.incarnation, shape.tp),
        agent=driver.stats,
        timelines=timelines,
        trust=trust,
        settings=http,
    )
    try:
        runner = await start_server(app, host, port, cluster_tls(trust.tls_dir))
    except OSError as error:
        raise ConfigError(f"port {port} on {host}: {error.strerror}; choose another with --port") from error
    announcer = announcer_of(
        role=role,
        http_address=http_address,
        control_address=control_address,
        mode=mode,
        incarnation=card.incarnation,
        model=ModelIdentity(card.model, card.fingerprint),
        routers=routers,
        is_used=lambda: engine.stats().prompt_tokens_total > 0,
        trust=trust,
        shape=shape,
        is_hung=lambda: driver.is_engine_hung,
    )
    if announcer is not None:
        announcer.start()
    try:
        await (ended or asyncio.get_running_loop().create_future())
    finally:
        if announcer is not None:
            await asyncio.to_thread(announcer.stop)
        await _drain(engine, drain_s)
        await runner.cleanup()


async def _drain(engine: EngineClient, limit_s: float) -> None:
    """Wait until nothing is computed and no block is held, but not for ever."""
    give_up_at = time.monotonic() + limit_s
    while time.monotonic() < give_up_at:
        stats = engine.stats()
        if not stats.blocks_held and not any(stats.requests.values()):
            return
        await asyncio.sleep(_LOOK_S)
