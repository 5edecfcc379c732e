"""The router as a server: its routes, its error answers, and the life of everything it owns.

`serve_router` runs inside an event loop until it is cancelled; `run_router` is a whole process's main function.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import uvloop
from aiohttp import web

from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import InstanceType, Registration
from kvbaton.discovery.registry import Registry
from kvbaton.errors import BadRequest, ConfigError, PeerError
from kvbaton.router.answers import error_response, json_response
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.handoffs import HandoffFace
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.policy import RoundRobin, missing_sides
from kvbaton.router.routed import RoutedTransfers
from kvbaton.router.settings import RouterSettings
from kvbaton.router.upstream import Upstream

__all__ = ["RouterApp", "RouterSettings", "run_router", "serve_router"]

_logger = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'"
_BACKLOG = 4096
_SHUTDOWN_S = 2.0
_HOUSEKEEPING_S = 0.5


class RouterApp:
    """The router's HTTP surface over a registry and a dispatcher."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        dispatcher: Dispatcher,
        upstream: Upstream,
        metrics: RouterMetrics,
        handoffs: HandoffFace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._metrics = metrics
        self._handoffs = handoffs
        self._clock = clock
        self._started = int(time.time())
        self._page = _load_page()
        self._max_body_bytes = settings.max_body_bytes

    def build(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._watch])
        app.router.add_post("/v1/completions", self._dispatcher.serve)
        app.router.add_post("/v1/chat/completions", self._dispatcher.serve)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/instances", self._instances)
        app.router.add_get("/metrics", self._show_metrics)
        self._handoffs.add_to(app)
        app.router.add_get("/", self._show_page)
        app.router.add_get("/page/{name}", self._show_page)
        return app

    @web.middleware
    async def _watch(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        status = "client_closed"
        try:
            response = await _answer(request, handler)
            status = f"{response.status // 100}xx"
        finally:
            self._metrics.requests.labels(_path_label(request), status).inc()
        return response

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        live = self._registry.live(self._clock())
        if not live:
            return error_response(503, missing_sides(live), code="no_instance", headers={"Retry-After": "2"})
        names = sorted({instance.registration.model for instance in live} - {""})
        if names:
            entries = [{"id": n, "object": "model", "created": self._started, "owned_by": "kvbaton"} for n in names]
            return json_response({"object": "list", "data": entries})
        answer = await self._upstream.models(live[0])
        return web.Response(status=answer.status, body=answer.content, headers={"Content-Type": answer.content_type})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        live = self._registry.live(self._clock())
        missing = missing_sides(live)
        if missing:
            return error_response(503, missing, code="no_instance", headers={"Retry-After": "2"})
        counts = {kind: sum(instance.type is kind for instance in live) for kind in InstanceType}
        return json_response({"status": "ok", **{kind.word: count for kind, count in counts.items()}})

    async def _instances(self, _request: web.Request) -> web.StreamResponse:
        now = self._clock()
        live = [
            {**_described(i.registration), "since_s": now - i.since, "age_s": now - i.last_seen}
            for i in self._registry.live(now)
        ]
        refused = [
            {**_described(r.registration), "reason": r.reason, "since_s": now - r.since, "age_s": now - r.last_seen}
            for r in self._registry.refused(now)
        ]
        return json_response({"transfer_mode": self._registry.transfer_mode or "auto", "live": live, "refused": refused})

    async def _show_metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _show_page(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", "index.html")
        if name not in self._page:
            raise web.HTTPNotFound
        kind = _PAGE_TYPES[name.rpartition(".")[2]]
        headers = {"Cache-Control": "no-cache", "Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return web.Response(body=self._page[name], content_type=kind, charset="utf-8", headers=headers)


async def serve_router(settings: RouterSettings, ready: Callable[[], None] | None = None) -> None:
    """Run a router until cancelled; `ready` is called once both ports are open. Raises ConfigError when one cannot be bound."""
    registry = Registry(settings.transfer_mode, settings.expire_after_s)
    with Listener(registry, settings.discovery_host, settings.discovery_port) as listener:
        async with Upstream(settings) as upstream:
            metrics = RouterMetrics(registry, listener)
            routed = RoutedTransfers()
            dispatcher = Dispatcher(settings, registry, RoundRobin(), upstream, metrics, routed)
            handoffs = HandoffFace(registry, upstream, routed)
            app = RouterApp(settings, registry, dispatcher, upstream, metrics, handoffs).build()
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
            try:
                await _open(runner, settings)
                if ready is not None:
                    ready()
                await _keep_house(registry, listener)
            finally:
                await runner.cleanup()


def run_router(settings: RouterSettings, ready: Callable[[], None] | None = None) -> None:
    """Run a router as this process's work, on uvloop, until SIGINT or SIGTERM."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(settings, ready))


async def _until_signal(settings: RouterSettings, ready: Callable[[], None] | None) -> None:
    serving = asyncio.ensure_future(serve_router(settings, ready))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()


async def _open(runner: web.AppRunner, settings: RouterSettings) -> None:
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=_BACKLOG).start()
    except OSError as error:
        raise ConfigError(
            f"router address {settings.host}:{settings.port} cannot be bound ({error.strerror or error}); stop what uses the"
            " port, or choose another with --port"
        ) from error


async def _keep_house(registry: Registry, listener: Listener) -> None:
    while True:
        await asyncio.sleep(_HOUSEKEEPING_S)
        listener.check()
        for instance in registry.expire(time.monotonic()):
            _logger.warning(
                "discovery: %s instance %s has been silent for %g s and is no longer used",
                instance.type.word,
                instance.http_address,
                registry.expire_after_s,
            )


async def _answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return error_response(400, str(error), code="bad_request", param=error.field)
    except PeerError as error:
        return error_response(502, str(error), code="instance_failed")
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:
        raise
    except Exception:
        _logger.exception("router: %s %s failed; this is a bug", request.method, request.path)
        return error_response(500, "the router failed; its log says why", code="bug")


def _http_error(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    messages = {
        404: f"there is nothing at {request.path[:200]}",
        405: f"{request.method} is not allowed at {request.path[:200]}; use {error.headers.get('Allow', 'another method')}",
        413: f"the body is too large: {error.text}",
    }
    return error_response(error.status, messages.get(error.status, error.reason), headers=allow)


def _path_label(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _described(registration: Registration) -> dict[str, Any]:
    return {
        "type": registration.type,
        "http_address": registration.http_address,
        "zmq_address": registration.zmq_address,
        "dp_size": registration.dp_size,
        "tp_size": registration.tp_size,
        "transfer_mode": registration.transfer_mode,
        "model": registration.model,
        "fingerprint": registration.fingerprint,
        "incarnation": registration.incarnation,
    }


def _load_page() -> dict[str, bytes]:
    folder = resources.files("kvbaton.router") / "page"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name.rpartition(".")[2] in _PAGE_TYPES}
