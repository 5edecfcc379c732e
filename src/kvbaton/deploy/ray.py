"""Prefill and decode as deployments of Ray Serve, behind a kvbaton router. Needs the extra `ray`.

A replica of Serve runs one instance as a process of its own and watches it; Serve decides how many replicas there are, and on
which nodes. Requests do not pass through Serve's handles: the router chooses the pair, and calls both instances. So a replica
that starts registers with the router, and one that is stopped sends its goodbye and drains, as instances do anywhere else.
Clients use Serve's HTTP port, where an ingress passes everything on to the router, or the router itself.

Serve counts requests at its handles and would see none here. Each replica therefore reports how many requests the router has at
its instance, whichever engine that is, and `replicas_for_load` makes a number of replicas of the sum.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvbaton.config import CLUSTER_KEY_VARIABLE, TLS_DIR_VARIABLE
from kvbaton.core.addresses import in_url
from kvbaton.discovery.advertise import is_wildcard
from kvbaton.engines.base import LOOPBACK, EngineOptions
from kvbaton.engines.table import DEFAULT_ENGINE, find_engine
from kvbaton.errors import ConfigError, LocalError
from kvbaton.launch.fleet import Fleet, FleetPart, answers_ok
from kvbaton.launch.local import kvbaton_command, new_cluster_key
from kvbaton.launch.ports import PortPicker

__all__ = [
    "RaySettings",
    "ReplicaSettings",
    "application",
    "register_connector",
    "replicas_for_load",
    "serve_until_interrupted",
]

_CONNECTOR = "KVBatonConnector"
_CALL_S = 10.0
_LOOK_S = 0.1
_APP = "kvbaton"
_OWN_NODE = "127.0.0.2"
"""The node of a cluster that is reached from this machine only. Ray would replace 127.0.0.1 by the address of the machine."""
_HEALTH = {"health_check_period_s": 2.0, "health_check_timeout_s": 30.0}
_INGRESS_REQUESTS = 4096
"""What Serve lets into the ingress at once; the router has limits of its own, and answers 429 itself."""
_OWN_HEADERS = {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
"""Headers of one connection: each server writes its own."""

log = logging.getLogger("ray.serve")
"""Serve keeps what its replicas log here, by replica."""


class ReplicaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The replicas of one deployment. With `most` above `least`, Serve changes their number with the load.

    least, most:    how many replicas
    in_flight:      requests at one replica that are aimed at
    autoscaling:    more of Serve's `autoscaling_config`: `upscale_delay_s`, `downscale_delay_s`, `look_back_period_s`, ...
    serve:          more options of Serve: `ray_actor_options`, `placement_group_bundles`, `max_replicas_per_node`, ...
    engine:         fields of `EngineOptions` for this side alone
    """

    least: int = 1
    most: int = 0
    in_flight: float = 8.0
    autoscaling: dict[str, Any] = {}
    serve: dict[str, Any] = {}
    engine: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ConfigError(f"least is {self.least}; it must be at least 1, or no request can be served")
        if self.most and self.most < self.least:
            raise ConfigError(f"most is {self.most}, below least, which is {self.least}; leave it out for a fixed number")
        if not self.in_flight > 0:
            raise ConfigError(f"in_flight is {self.in_flight}; it must be above 0")

    def options(self) -> dict[str, Any]:
        """The options of Serve's deployment."""
        if self.most <= self.least:
            return {"num_replicas": self.least, **self.serve}
        policy = {"policy_function": replicas_for_load}
        bounds = {"min_replicas": self.least, "max_replicas": self.most, "target_ongoing_requests": self.in_flight}
        return {"autoscaling_config": {**bounds, "policy": policy, **self.autoscaling}, **self.serve}


class RaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is served, and by which replicas.

    engine:             how the engine of both sides is called: `embedded`, `vllm`
    options:            fields of `EngineOptions` for both sides
    drain_timeout_s:    how long a replica that is stopped may go on with its requests
    router:             more arguments of `kvbaton router`
    """

    model: str = "smollm2"
    engine: str = DEFAULT_ENGINE
    prefill: ReplicaSettings = ReplicaSettings()
    decode: ReplicaSettings = ReplicaSettings()
    options: dict[str, Any] = {}
    drain_timeout_s: float = 60.0
    router: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.drain_timeout_s > 0:
            raise ConfigError(f"drain_timeout_s is {self.drain_timeout_s}; it must be above 0")

    def engine_options(self, side: ReplicaSettings, host: str, cluster_key: str) -> EngineOptions:
        """What the engine of one side is prepared with. Raises ConfigError for an unknown field, or a wrong type."""
        own = {"transport": "tcp", **self.options, **side.engine}
        own |= {"model": self.model, "host": host, "cluster_key": cluster_key}
        known = set(EngineOptions.__dataclass_fields__)
        if unknown := sorted(set(own) - known):
            raise ConfigError(f"options has {unknown[0]!r}, which engines do not have; they have {', '.join(sorted(known))}")
        try:
            return msgspec.convert(own, EngineOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"options of the engine: {error}") from error


def application(settings: RaySettings | Mapping[str, Any]) -> Any:
    """The application, for `serve.run`; or by its import path: `serve run kvbaton.deploy.ray:application model=tiny`.

    Its parts share the cluster key of KVBATON_CLUSTER_KEY if that is set, else a new one. The key travels with the arguments of
    replicas: a process that can read Ray's control store can read it. Raises ConfigError for settings that no replica could
    start with, and without Ray.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"Ray Serve is not installed ({error}); pip install 'kvbaton[ray]'") from error
    if not isinstance(settings, RaySettings):
        settings = _read(settings)
    if os.environ.get(TLS_DIR_VARIABLE):
        raise ConfigError(f"{TLS_DIR_VARIABLE} is set: replicas on Ray are not encrypted so far; unset it to run them without")
    plugin = find_engine(settings.engine)
    key = os.environ.get(CLUSTER_KEY_VARIABLE) or new_cluster_key()
    sides = {"prefill": settings.prefill, "decode": settings.decode}
    for side in sides.values():
        plugin.check_support(settings.engine_options(side, "0.0.0.0", key))  # noqa: S104

    # Serve kills what has not ended by then; the fleet gives up a little earlier, so that the children of an instance end too.
    common = {**_HEALTH, "graceful_shutdown_timeout_s": settings.drain_timeout_s + 2 * _CALL_S}

    def deployment(kind: type, name: str, options: Mapping[str, Any]) -> Any:
        return serve.deployment(kind, name=name, **{**common, **options})

    router = deployment(RouterReplica, "router", {"num_replicas": 1}).bind(settings, key)
    instances = [
        deployment(InstanceReplica, role, side.options()).bind(role, settings, key, router) for role, side in sides.items()
    ]
    return deployment(IngressReplica, "ingress", {"max_ongoing_requests": _INGRESS_REQUESTS}).bind(router, *instances)


def serve_until_interrupted(settings: RaySettings, host: str, port: int, ready: Callable[[], None]) -> None:
    """Serve at `port` until Ctrl-C, on the cluster that RAY_ADDRESS names, else on a new one of this machine."""
    served = application(settings)
    import ray
    from ray import serve

    new: dict[str, Any] = {"address": "local", "_node_ip_address": _OWN_NODE, "include_dashboard": False}
    # A replica takes one of Ray's CPUs, so that on a machine of few cores some would wait for a place for ever.
    replicas = sum(max(side.least, side.most or 0) for side in (settings.prefill, settings.decode)) + 2
    new["num_cpus"] = max(replicas, os.cpu_count() or 1)
    given = {} if os.environ.get("RAY_ADDRESS") else new
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **given)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(served, name=_APP)
        health = f"http://{in_url(LOOPBACK if is_wildcard(host) else host)}:{port}/health"
        for _ in range(int(_CALL_S / _LOOK_S)):
            if answers_ok(health):  # all replicas run; the router may not have received their registrations yet
                break
            time.sleep(_LOOK_S)
        ready()
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.delete(_APP)
    finally:
        ray.shutdown()


def replicas_for_load(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's autoscaling policy: as many replicas as the requests that routers have at them need."""
    reported = context.aggregated_metrics.get("in_flight", {})
    return sum(reported.values()) / context.config.target_ongoing_requests, {}


def register_connector() -> None:
    """Make `KVBatonConnector` known to Ray's own LLM stack; call it where its application is built. Raises ConfigError."""
    try:
        from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    except ImportError as error:
        raise ConfigError(f"Ray's LLM stack is not installed ({error}); pip install 'ray[llm]'") from error
    if not KVConnectorBackendFactory.is_registered(_CONNECTOR):
        KVConnectorBackendFactory.register_backend(_CONNECTOR, "kvbaton.deploy.ray_llm:KVBatonBackend")


def _read(given: Mapping[str, Any]) -> RaySettings:
    # Not strict: the arguments of `serve run` are text.
    try:
        return msgspec.convert(dict(given), RaySettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of the Ray application: {error}") from error


class _Replica:
    """One process of kvbaton inside a replica of Serve."""

    def __init__(self, drain_timeout_s: float) -> None:
        import ray.util

        self._host = str(ray.util.get_node_ip_address())
        self._drain_timeout_s = drain_timeout_s
        self._fleet = Fleet(lambda name, line: log.info("%s | %s", name, line))

    async def _run(self, part: FleetPart, healthy_within_s: float) -> None:
        # Started by the thread of the event loop, which lives as long as the replica: a child gets SIGTERM when the thread that
        # started it ends.
        self._name = part.name
        self._fleet.start(part)
        await asyncio.to_thread(self._fleet.wait_healthy, healthy_within_s)

    def process(self) -> tuple[str, int]:
        """The host and the id of the process that it runs."""
        return self._host, self._fleet.pid(self._name)

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica where this raises."""
        death = self._fleet.death()
        if death is not None:
            raise LocalError(str(death))

    def __del__(self) -> None:
        """Called by Serve when the replica is stopped: the process drains, and Serve waits for it."""
        fleet = getattr(self, "_fleet", None)
        if fleet is not None:
            fleet.stop(self._drain_timeout_s + _CALL_S)


class RouterReplica(_Replica):
    """Runs the router."""

    async def __init__(self, settings: RaySettings, cluster_key: str) -> None:  # type: ignore[misc]
        super().__init__(settings.drain_timeout_s)
        ports = PortPicker()
        port, discovery_port = ports.pick(), ports.pick()
        self._addresses = (f"http://{in_url(self._host)}:{port}", f"{in_url(self._host)}:{discovery_port}")
        command = kvbaton_command("router", "--host", self._host, "--port", str(port), "--discovery-port", str(discovery_port))
        command += ["--show-details", "--drain-timeout-s", str(settings.drain_timeout_s), *settings.router]
        # Not /health: that is 503 until a pair has registered, and instances start when this replica is ready.
        part = FleetPart("router", command, f"{self._addresses[0]}/metrics", {CLUSTER_KEY_VARIABLE: cluster_key})
        await self._run(part, _HEALTH["health_check_timeout_s"])

    def addresses(self) -> tuple[str, str]:
        """Where clients reach it, and where instances register."""
        return self._addresses


class InstanceReplica(_Replica):
    """Runs an instance of one role, which registers with the router."""

    async def __init__(self, role: str, settings: RaySettings, cluster_key: str, router: Any) -> None:  # type: ignore[misc]
        super().__init__(settings.drain_timeout_s)
        self._router = router
        self._addresses = await asyncio.wait_for(router.addresses.remote(), _HEALTH["health_check_timeout_s"])
        plugin = find_engine(settings.engine)
        side = settings.prefill if role == "prefill" else settings.decode
        options = settings.engine_options(side, self._host, cluster_key)
        options = replace(options, arguments=(*plugin.drain_arguments(settings.drain_timeout_s), *options.arguments))
        prepared = await asyncio.to_thread(plugin.prepare, options, log.info)
        part = prepared.part(role, role, PortPicker(), self._addresses[1:])
        self._http_address = part.base_url.partition("://")[2]
        await self._run(part, plugin.healthy_within_s)

    async def check_health(self) -> None:
        """Raises when the process died, or when the router that it is registered with was replaced by one elsewhere."""
        await super().check_health()
        try:
            now = await asyncio.wait_for(self._router.addresses.remote(), _CALL_S)
        except TimeoutError:
            return  # no router at all is not this replica's fault
        if tuple(now) != tuple(self._addresses):
            raise LocalError(f"the router is at {now[1]} now, and was at {self._addresses[1]}; a new replica registers there")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: what `replicas_for_load` reads."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self._addresses[0]}/instances") as answer:
            live = (await answer.json())["live"]
        return {"in_flight": float(sum(each["in_flight"] for each in live if each["http_address"] == self._http_address))}


class IngressReplica:
    """Passes requests at Serve's HTTP port on to the router, and its answers back as they come."""

    async def __init__(self, router: Any, *instances: Any) -> None:  # type: ignore[misc]
        import aiohttp

        del instances  # Serve starts what a deployment is bound to.
        self._router = router
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CALL_S)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)

    async def __call__(self, request: Any) -> Any:
        """Answer one request of a client."""
        from starlette.responses import StreamingResponse

        # Only the answer has no deadline here: the router ends one that stands still, and streams may take long.
        url, _ = await asyncio.wait_for(self._router.addresses.remote(), _CALL_S)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        # Host goes along: the router refuses names that a web site may have pointed at it.
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS]
        answer = await self._session.request(
            request.method, f"{url}{target}", data=await request.body() or None, headers=headers, allow_redirects=False
        )

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.content.iter_any():
                    yield piece
            finally:
                answer.close()  # A client that leaves aborts its request at the router too.

        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}
        return StreamingResponse(pieces(), status_code=answer.status, headers=kept)
