"""The OpenAI-compatible HTTP server of the embedded engine: completions, chat, models, health and metrics.

A disconnect cancels the requests of that client: aiohttp cancels the handler (as `start_server` configures it), and a
`Submission` cancels what it still runs when its handler ends, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from kvbaton.config import NO_KEY_FOR_METRICS, Trust
from kvbaton.engines.embedded.declined import declined_requests
from kvbaton.engines.embedded.handoff_routes import HandoffAccess, HandoffRoutes
from kvbaton.engines.embedded.http_errors import BUG_MESSAGE, HttpError, error_body, errors_as_json, to_http_error
from kvbaton.engines.embedded.metrics import ReadAgent, make_registry
from kvbaton.engines.embedded.openai import (
    ApiRequest,
    ChatBody,
    CompletionBody,
    RequestLimits,
    chat_request,
    completion_request,
    decode_body,
    request_limits,
)
from kvbaton.engines.embedded.openai_answers import DONE_EVENT, ResponseBuilder, sse_event
from kvbaton.engines.embedded.request import ApiCall
from kvbaton.engines.embedded.seams import PromptTokenizer
from kvbaton.engines.embedded.settings import DEFAULT_HTTP, HttpSettings
from kvbaton.engines.embedded.submission import EngineClient, Submission
from kvbaton.engines.handoff_params import (
    HandoffInfo,
    SourceCheck,
    SourceParams,
    TargetParams,
    answer_params,
    read_params,
    size_doubt,
)
from kvbaton.errors import BadRequest, ConfigError, KVBatonError
from kvbaton.observe.timelines import Timelines
from kvbaton.wire.log_limit import LogLimit
from kvbaton.wire.tls import ClusterTls

__all__ = ["Role", "make_app", "start_server"]

Role = Literal["prefill", "decode", "both"]
Body = TypeVar("Body", CompletionBody, ChatBody)
Check = Callable[[Body, PromptTokenizer, RequestLimits, str | None], ApiRequest]

_SMALLEST_BODY_LIMIT = 1 << 20
_MAX_BODIES_BYTES = 64 << 20
"""Bodies that are being received or checked, over all connections."""

_BODY_S = 60.0
_INLINE_BODY_BYTES = 16 * 1024
_LARGE_BODIES_AT_ONCE = 2
"""A decoded body takes up to 30 times its bytes, a tokenized one more; so few are checked at a time."""

_NO_TRUST = Trust()
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_logger = logging.getLogger(__name__)


def make_app(
    engine: EngineClient,
    *,
    served_model: str,
    role: Role,
    handoff: HandoffInfo | None,
    progress_timeout_s: float = 600.0,
    agent: ReadAgent | None = None,
    timelines: Timelines | None = None,
    trust: Trust = _NO_TRUST,
    settings: HttpSettings = DEFAULT_HTTP,
) -> web.Application:
    """The application that serves `engine`; run it with `start_server`. It starts nothing and owns nothing.

    `progress_timeout_s` bounds every wait: for a request's body (a minute at most), for the engine's next output, for a client
    that reads.
    `agent`, where there are hand-offs, is read at each scrape of the metrics.
    `timelines`, where hand-offs are noted, are served at /handoffs. With the key of `trust`, only its holders act on hand-offs.
    """
    if settings.keyed_metrics and trust.key is None:
        raise ConfigError(NO_KEY_FOR_METRICS)
    access = HandoffAccess(trust, None if handoff is None else SourceCheck(trust, handoff.control_address))
    handoffs = HandoffRoutes(engine, timelines, access)
    registry = make_registry(engine.stats, agent)
    handlers = _Handlers(engine, served_model, role, handoff, progress_timeout_s, registry, handoffs, access, settings)
    app = web.Application(client_max_size=handlers.max_body_bytes, middlewares=[errors_as_json])
    app.router.add_post("/v1/completions", handlers.completions)
    app.router.add_post("/v1/chat/completions", handlers.chat_completions)
    app.router.add_get("/v1/models", handlers.models)
    app.router.add_get("/health", handlers.health)
    app.router.add_get("/metrics", handlers.metrics)
    handoffs.add_to(app)
    return app


async def start_server(
    app: web.Application, host: str, port: int, tls: ClusterTls | None = None, *, shutdown_timeout_s: float = 2.0
) -> web.AppRunner:
    """Listen, for HTTPS with `tls`; `await runner.cleanup()` stops. Handlers are cancelled when their client disconnects.

    Raises OSError.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=None if tls is None else tls.server).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


@dataclass(eq=False, repr=False)
class _Handlers:
    _engine: EngineClient
    _served_model: str
    _role: Role
    _handoff: HandoffInfo | None
    _progress_timeout_s: float
    _registry: CollectorRegistry
    _handoffs: HandoffRoutes
    _access: HandoffAccess
    _settings: HttpSettings

    def __post_init__(self) -> None:
        self._body_timeout_s = min(self._progress_timeout_s, _BODY_S)
        self._tokenizer = self._engine.loaded.tokenizer
        self._limits = request_limits(self._engine.loaded, self._served_model, self._settings)
        self._show_details = self._settings.show_details is not False
        self.max_body_bytes = self._settings.max_body_bytes or 2 * self._limits.request_bytes + _SMALLEST_BODY_LIMIT
        self._body_bytes = 0
        self._large_bodies = asyncio.Semaphore(_LARGE_BODIES_AT_ONCE)
        self._created = int(time.time())
        self._doubts = LogLimit(every_s=600.0)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, await self._read(http, CompletionBody, completion_request))

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, await self._read(http, ChatBody, chat_request))

    async def models(self, http: web.Request) -> web.Response:  # noqa: ARG002
        loaded = self._engine.loaded
        card = {
            "id": self._served_model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvbaton",
            "root": loaded.name,
            "max_model_len": self._limits.context_tokens,
            "fingerprint": loaded.fingerprint,
        }
        return _json(orjson.dumps({"object": "list", "data": [card]}))

    async def health(self, http: web.Request) -> web.Response:  # noqa: ARG002
        return _json(orjson.dumps({"status": "ok", "role": self._role, "model": self._served_model}))

    async def metrics(self, http: web.Request) -> web.Response:
        if self._settings.keyed_metrics:
            self._access.check_metrics(http)
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": _METRICS_TYPE})

    async def _read(self, http: web.Request, kind: type[Body], check: Check[Body]) -> ApiRequest:
        request_id = _request_id(http)
        raw = bytearray()
        try:
            try:
                async with asyncio.timeout(self._body_timeout_s):
                    await self._receive(http, raw)
            except TimeoutError as error:
                message = f"the body did not arrive within {self._body_timeout_s:g} s"
                raise HttpError(408, "timeout", message) from error
            except (web.RequestPayloadError, ValueError) as error:
                raise BadRequest("body", f"the body cannot be read: {error}") from error
            return await self._checked(http, bytes(raw), kind, check, request_id)
        finally:
            self._body_bytes -= len(raw)

    async def _receive(self, http: web.Request, raw: bytearray) -> None:
        """Append the body to `raw`; raises HttpError as soon as it is known to be too large."""
        if (http.content_length or 0) > self.max_body_bytes:
            raise self._too_large(http.content_length or 0)
        async for piece in http.content.iter_any():
            raw += piece
            self._body_bytes += len(piece)
            if len(raw) > self.max_body_bytes:
                raise self._too_large(len(raw))
            # Small bodies always pass: a client that sends large ones slowly must not keep the others out.
            if len(raw) > _INLINE_BODY_BYTES and self._body_bytes > _MAX_BODIES_BYTES:
                message = f"{self._body_bytes} bytes of bodies are being received, and at most {_MAX_BODIES_BYTES} are taken"
                raise HttpError(429, "overloaded", f"{message}; try again later", code="too_many_bytes", retry=True)

    def _too_large(self, size: int) -> HttpError:
        message = f"the body is too large: {size} bytes or more, and at most {self.max_body_bytes} are taken (max_body_bytes)"
        return HttpError(413, "invalid_request_error", f"{message}; send a shorter prompt", code="body_too_large")

    async def _checked(
        self, http: web.Request, raw: bytes, kind: type[Body], check: Check[Body], request_id: str | None
    ) -> ApiRequest:
        try:
            if len(raw) <= _INLINE_BODY_BYTES:
                return self._check(http, raw, kind, check, request_id)
            async with self._large_bodies:
                return await asyncio.to_thread(self._check, http, raw, kind, check, request_id)
        except KVBatonError as error:
            may_dial = lambda params: self._access.dial_refusal(http, params) is None  # noqa: E731
            for request in declined_requests(raw, request_id, self._limits.sequences, may_dial):
                self._engine.decline(request, str(error))
            raise

    def _check(self, http: web.Request, raw: bytes, kind: type[Body], check: Check[Body], request_id: str | None) -> ApiRequest:
        body = decode_body(raw, kind)
        params = read_params(body.kv_transfer_params, request_id)
        if isinstance(params, TargetParams):
            self._access.check_dial(http, params)
        if body.model is not None and body.model != self._served_model:
            message = f"model: {body.model!r} is not served here; this instance serves {self._served_model!r}"
            raise HttpError(404, "invalid_request_error", message, param="model", code="model_not_found")
        self._log_doubt(size_doubt(body.kv_transfer_params))
        api = check(body, self._tokenizer, self._limits, request_id)
        if api.handoff is not None and self._handoff is None:
            raise BadRequest("kv_transfer_params", "kv_transfer_params: this instance hands nothing off; leave the field out")
        call = ApiCall(self._access.client(http), len(api.requests))
        return replace(api, requests=tuple(replace(request, call=call) for request in api.requests))

    def _log_doubt(self, doubt: str | None) -> None:
        if doubt is not None and self._doubts.allow(doubt, time.monotonic()) is not None:
            _logger.warning("%s", doubt)

    async def _answer(self, http: web.Request, api: ApiRequest) -> web.StreamResponse:
        source = api.handoff if isinstance(api.handoff, SourceParams) and self._handoff is not None else None
        params = None
        if source is not None and self._handoff is not None:
            params = answer_params(source, self._handoff)
            self._handoffs.remember(source.transfer_id, api)
        builder = ResponseBuilder(api, self._served_model, self._tokenizer.token_text, params, show_details=self._show_details)
        submission = Submission(
            self._engine, api.requests, progress_timeout_s=self._progress_timeout_s, show_details=self._show_details
        )
        is_delivered = False
        try:
            writer = await self._run(http, api, builder, submission)
            is_delivered = not writer.is_lost
        finally:
            # A finished prefill outlives its request: its blocks are held for a target. If the caller left before it had the
            # response, or another choice failed, no target will come, and the blocks would be held until defer_timeout. That
            # includes a prefill that has finished in the engine's thread while the handler was being cancelled.
            if source is not None and not is_delivered:
                self._handoffs.withdraw(source.transfer_id, api, submission.finished())
        return writer.response

    async def _run(
        self, http: web.Request, api: ApiRequest, builder: ResponseBuilder, submission: Submission
    ) -> _ResponseWriter:
        """Run the requests and send the response; the writer knows whether the client has read it."""
        with submission:
            if api.stream:
                return await self._stream(http, builder, submission)
            while not builder.is_finished:
                builder.add(*await submission.next())
        writer = _ResponseWriter(http, _json(builder.body()), self._progress_timeout_s)
        await writer.finish()
        return writer

    async def _stream(self, http: web.Request, builder: ResponseBuilder, submission: Submission) -> _ResponseWriter:
        index, output = await submission.next()
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        writer = _ResponseWriter(http, web.StreamResponse(headers=headers), self._progress_timeout_s)
        try:
            await writer.write(builder.event(index, output))
            while not (builder.is_finished or writer.is_lost):
                await writer.write(builder.event(*await submission.next()))
            await writer.write(builder.usage_event())
            await writer.write(DONE_EVENT)
        except KVBatonError as error:
            await writer.fail(to_http_error(error))
        except Exception:
            _logger.exception("bug in the middle of a stream of %s", http.path)
            await writer.fail(HttpError(500, "server_error", BUG_MESSAGE))
        await writer.finish()
        return writer


class _ResponseWriter:
    """Writes a response to one client, each write with a deadline; `is_lost` once the client is gone or does not read."""

    def __init__(self, http: web.Request, response: web.StreamResponse, timeout_s: float) -> None:
        self.response = response
        self.is_lost = False
        self._http = http
        self._timeout_s = timeout_s

    async def write(self, data: bytes | None) -> None:
        """Send the headers, if they are still due, and `data`."""
        async with self._client():
            await self.response.prepare(self._http)
            if data is not None:
                await self.response.write(data)

    async def fail(self, error: HttpError) -> None:
        """Send an error in the middle of a stream; the connection is closed after it."""
        self.response.force_close()
        await self.write(sse_event(error_body(error)))

    async def finish(self) -> None:
        """Send the rest."""
        async with self._client():
            await self.response.prepare(self._http)
            await self.response.write_eof()

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (TimeoutError, ConnectionError) as error:
            _logger.debug("the client of %s is gone, or does not read: %s", self._http.path, error)
            self.is_lost = True
            if self._http.transport is not None:
                self._http.transport.abort()


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _request_id(http: web.Request) -> str | None:
    request_id = http.headers.get("X-Request-Id")
    if request_id and not (request_id.isascii() and request_id.isprintable()):
        raise BadRequest("X-Request-Id", f"X-Request-Id: {request_id!a} is not printable ASCII")
    return request_id or None
