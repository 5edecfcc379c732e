"""The router's HTTP routes: authorization, the routes that it answers by itself, and the page."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvbaton.config import HTTP_KEY_HEADER, KEYED_METRICS, HttpTokens
from kvbaton.discovery.messages import InstanceType, Registration
from kvbaton.discovery.registry import Registry
from kvbaton.errors import PeerError
from kvbaton.router.allowed_hosts import AllowedHosts
from kvbaton.router.answers import error_response, json_response
from kvbaton.router.dispatch import COMPLETION_PATHS, Dispatcher
from kvbaton.router.handoffs import HandoffPages
from kvbaton.router.http.client_connection import ClientConnection
from kvbaton.router.http.messages import HttpRequest, Response
from kvbaton.router.http.upstream import Upstream, fetch
from kvbaton.router.live import LiveView
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.policy import missing_sides
from kvbaton.router.settings import RouterSettings

__all__ = ["HttpRoutes"]

_logger = logging.getLogger(__name__)

_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'"
_PAGE_HEADERS = {"Cache-Control": "no-cache", "Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MODELS_TIMEOUT_S = 10.0
_MODELS_BYTES = 4 * 1024 * 1024
_KEY_HEADER = HTTP_KEY_HEADER.encode()
_RETRY_AFTER = {"Retry-After": "2"}
_OPEN_TO_ALL = frozenset(("/health", "/ready", "/readiness", "/metrics", "/"))
_DESCRIBED = (
    "type", "http_address", "zmq_address", "dp_size", "dp_rank", "tp_size", "pp_size", "transfer_mode", "model", "fingerprint",
    "incarnation",
)  # fmt: skip

Page = Callable[[HttpRequest], Response | Awaitable[Response]]


@dataclass(eq=False, repr=False)
class HttpRoutes:
    """The router's HTTP surface over a registry and a dispatcher."""

    _settings: RouterSettings
    _registry: Registry
    _dispatcher: Dispatcher
    _upstream: Upstream
    _metrics: RouterMetrics
    _handoffs: HandoffPages
    _live: LiveView
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.is_draining = False
        self._started = int(time.time())
        self._page = _load_page()
        self._hosts = AllowedHosts(self._settings.host, self._settings.allow_hosts)
        self._shows_details = self._settings.shows_details
        self._keys = [key.encode() for key in self._settings.api_keys]
        self._tokens = HttpTokens(self._settings.cluster_key)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pages: dict[str, Page] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/readiness": self._ready,
            "/instances": self._instances,
            "/metrics": self._show_metrics,
            "/handoffs": self._handoffs.newest,
            "/live": self._live.show,
        }

    def check_head(self, path: str, headers: Mapping[bytes, bytes]) -> Response | None:
        """Refuse a request of another site's page, or without a valid key, before its body is read."""
        if b"origin" in headers or headers.get(b"host") not in self._hosts.known:
            refusal = self._hosts.refusal(path, headers)
            if refusal is not None:
                return error_response(403, refusal, code="host_not_allowed")
        if path == "/metrics" and self._settings.keyed_metrics and not self._has_token(headers):
            self._metrics.add("unauthorized")
            return error_response(401, KEYED_METRICS, code="missing_cluster_key", headers={"WWW-Authenticate": "Bearer"})
        if not self._keys or path in _OPEN_TO_ALL or path.startswith("/page/") or self._has_key(headers):
            return None
        self._metrics.add("unauthorized")
        message = "the Authorization header must hold a valid API key: Bearer ..."
        return error_response(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer a request, now or later."""
        if request.path in COMPLETION_PATHS:
            if request.method == "POST":
                self._dispatcher.serve(connection, request)
            else:
                connection.send(_wrong_method(request, "POST"))
        else:
            self._answer(connection, request)

    def count(self, path: str, status: int) -> None:
        """An answer was sent."""
        self._metrics.count_answer(path if path in COMPLETION_PATHS else _label(path), status)

    def close(self) -> None:
        """Cancel what is still being answered."""
        for task in tuple(self._tasks):
            task.cancel()

    def _answer(self, connection: ClientConnection, request: HttpRequest) -> None:
        page = self._find(request.path)
        if not self._shows_details and request.path.startswith(("/instances", "/handoffs", "/live")):
            message = f"{request.path[:200]} is not shown to clients with API keys; start the router with --show-details"
            connection.send(error_response(403, message, code="details_hidden"))
            return
        if page is None:
            connection.send(error_response(404, f"there is nothing at {request.path[:200]}"))
        elif request.method not in ("GET", "HEAD"):
            connection.send(_wrong_method(request, "GET"))
        else:
            answer = page(request)
            if isinstance(answer, Response):
                connection.send(answer)
            else:
                _Visit(connection, answer, self._tasks)

    def _find(self, path: str) -> Page | None:
        if path in self._pages:
            return self._pages[path]
        if path.startswith("/handoffs/"):
            return self._handoffs.one
        name = "index.html" if path == "/" else path.removeprefix("/page/") if path.startswith("/page/") else ""
        return self._show_page if name in self._page else None

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and any(hmac.compare_digest(given.strip(), key) for key in self._keys)

    def _has_token(self, headers: Mapping[bytes, bytes]) -> bool:
        key, authorization = (headers.get(name, b"").decode("latin-1") for name in (_KEY_HEADER, b"authorization"))
        return self._tokens.are_carried(key, authorization)

    async def _models(self, request: HttpRequest) -> Response:
        live = self._registry.live(self._clock())
        if not live:
            return error_response(503, missing_sides(live), code="no_instance", headers=_RETRY_AFTER)
        names = sorted({instance.registration.model for instance in live} - {""})
        if names:
            entries = [{"id": n, "object": "model", "created": self._started, "owned_by": "kvbaton"} for n in names]
            return json_response({"object": "list", "data": entries})
        asked = live[0]
        lines = self._dispatcher.forwarded_lines(request)
        answer = await fetch(self._upstream, asked, "/v1/models", _MODELS_TIMEOUT_S, _MODELS_BYTES, lines=lines)
        return Response(answer.status, answer.content, answer.content_type)

    def _health(self, _request: HttpRequest) -> Response:
        live = self._registry.live(self._clock())
        missing = missing_sides(live)
        if missing:
            return error_response(503, missing, code="no_instance", headers=_RETRY_AFTER)
        counts = {kind: sum(instance.type is kind for instance in live) for kind in InstanceType}
        return json_response({"status": "ok", **{kind.word: count for kind, count in counts.items()}})

    def _ready(self, request: HttpRequest) -> Response:
        if self.is_draining:
            return error_response(503, "this router finishes what it has and takes nothing new", code="draining")
        return self._health(request)

    def _instances(self, _request: HttpRequest) -> Response:
        now = self._clock()
        live = [
            {
                **_described(i.registration),
                "since_s": now - i.since,
                "age_s": now - i.last_seen,
                "in_flight": self._dispatcher.chooser.load_of(i),
                "strikes": i.strikes,
                "put_aside_s": max(0.0, i.aside_until - now),
            }
            for i in self._registry.live(now)
        ]
        refused = [
            {**_described(r.registration), "reason": r.reason, "since_s": now - r.since, "age_s": now - r.last_seen}
            for r in self._registry.refused(now)
        ]
        return json_response({"transfer_mode": self._registry.transfer_mode or "auto", "live": live, "refused": refused})

    def _show_metrics(self, _request: HttpRequest) -> Response:
        return Response(200, self._metrics.render(), _METRICS_TYPE)

    def _show_page(self, request: HttpRequest) -> Response:
        name = "index.html" if request.path == "/" else request.path.removeprefix("/page/")
        kind = _PAGE_TYPES[name.rpartition(".")[2]]
        return Response(200, self._page[name], f"{kind}; charset=utf-8", _PAGE_HEADERS)


class _Visit:
    """A request whose answer takes a while; it is cancelled when its client goes away."""

    def __init__(self, connection: ClientConnection, answer: Awaitable[Response], tasks: set[asyncio.Task[None]]) -> None:
        self._connection = connection
        self._task = asyncio.ensure_future(self._run(answer))
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)
        connection.host(self)

    def client_gone(self) -> None:
        """No client waits for the answer."""
        self._task.cancel()

    def client_pauses(self) -> None:
        """The answer is small."""

    def client_resumes(self) -> None:
        """The answer is small."""

    async def _run(self, answer: Awaitable[Response]) -> None:
        try:
            response = await answer
        except PeerError as error:
            response = error_response(502, str(error), code="instance_failed")
        except Exception:
            _logger.exception("router: a page failed; this is a bug")
            response = error_response(500, "the router failed; see its log", code="bug")
        self._connection.send(response)


def _label(path: str) -> str:
    if path.startswith("/handoffs/"):
        return "/handoffs/{transfer_id}"
    return "/page/{name}" if path.startswith("/page/") else path


def _wrong_method(request: HttpRequest, allowed: str) -> Response:
    message = f"{request.method} is not allowed at {request.path[:200]}; use {allowed}"
    return error_response(405, message, headers={"Allow": allowed})


def _described(registration: Registration) -> dict[str, Any]:
    return {name: getattr(registration, name) for name in _DESCRIBED}


def _load_page() -> dict[str, bytes]:
    folder = resources.files("kvbaton.router") / "page"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name.rpartition(".")[2] in _PAGE_TYPES}
