"""The OpenAI-compatible HTTP face of the embedded engine: completions, chat, models, health and metrics.

A client that goes away takes its requests with it: `start_server` has handlers cancelled on disconnect, and a
`Submission` cancels what it still runs when its handler ends, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol, TypeVar

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.declined import declined_requests
from kvbaton.engines.embedded.handoff_routes import add_handoff_routes
from kvbaton.engines.embedded.http_errors import BUG_MESSAGE, HttpError, error_body, errors_as_json, to_http_error
from kvbaton.engines.embedded.metrics import ReadAgent, make_registry, metrics_text
from kvbaton.engines.embedded.openai import (
    ApiRequest,
    ChatBody,
    CompletionBody,
    ModelLimits,
    Tokenizer,
    chat_request,
    completion_request,
    decode_body,
)
from kvbaton.engines.embedded.openai_answers import DONE_EVENT, Answer, sse_event
from kvbaton.engines.embedded.stats import EngineStats
from kvbaton.engines.embedded.submission import Runner, Submission
from kvbaton.engines.handoff_params import HandoffInfo, SourceWish, answer_params, size_doubt
from kvbaton.errors import BadRequest, KVBatonError
from kvbaton.observe.timelines import Timelines
from kvbaton.wire.log_limit import LogLimit

__all__ = ["HandoffInfo", "LoadedModel", "Role", "ServedEngine", "make_app", "start_server"]

Role = Literal["prefill", "decode", "both"]
Body = TypeVar("Body", CompletionBody, ChatBody)
Check = Callable[[Body, Tokenizer, ModelLimits, str | None], ApiRequest]

MAX_BODY_BYTES = 32 * 1024 * 1024
_INLINE_BODY_BYTES = 16 * 1024
_KNOWN_SOURCES = 8192
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_logger = logging.getLogger(__name__)


class LoadedModel(Protocol):
    """What the HTTP face needs of a loaded model."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def name(self) -> str:
        """What its files call it."""

    @property
    def fingerprint(self) -> str:
        """Digest of its weights."""


class ServedEngine(Runner, Protocol):
    """What the HTTP face needs of an engine."""

    @property
    def loaded(self) -> LoadedModel:
        """The model it runs."""

    def stats(self) -> EngineStats:
        """A snapshot of its numbers."""


def make_app(
    engine: ServedEngine,
    *,
    served_model: str,
    role: Role,
    handoff: HandoffInfo | None,
    progress_timeout_s: float = 600.0,
    agent: ReadAgent | None = None,
    timelines: Timelines | None = None,
) -> web.Application:
    """The application that serves `engine`; run it with `start_server`. It starts nothing and owns nothing.

    `progress_timeout_s` bounds every wait: for a request's body, for the engine's next output, for a client that reads.
    `agent`, where there are hand-offs, is asked at each scrape of the metrics.
    `timelines`, where hand-offs are noted, are told at /handoffs.
    """
    face = _Face(engine, served_model, role, handoff, progress_timeout_s, make_registry(engine.stats, agent))
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json])
    app.router.add_post("/v1/completions", face.completions)
    app.router.add_post("/v1/chat/completions", face.chat_completions)
    app.router.add_get("/v1/models", face.models)
    app.router.add_get("/health", face.health)
    app.router.add_get("/metrics", face.metrics)
    app.router.add_delete("/handoffs/{transfer_id}", face.release)
    if timelines is not None:
        add_handoff_routes(app, timelines)
    return app


async def start_server(app: web.Application, host: str, port: int, *, shutdown_timeout_s: float = 2.0) -> web.AppRunner:
    """Listen; handlers are cancelled when their client disconnects. `await runner.cleanup()` stops. Raises OSError."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


class _Face:
    def __init__(
        self,
        engine: ServedEngine,
        served_model: str,
        role: Role,
        handoff: HandoffInfo | None,
        progress_timeout_s: float,
        registry: CollectorRegistry,
    ) -> None:
        config = engine.loaded.config
        self._engine = engine
        self._served_model = served_model
        self._role = role
        self._handoff = handoff
        self._progress_timeout_s = progress_timeout_s
        self._tokenizer = engine.loaded.tokenizer
        self._limits = ModelLimits(served_model, config.context_tokens, config.vocab_size)
        self._registry = registry
        self._sources: OrderedDict[str, tuple[RequestId, ...]] = OrderedDict()
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

    async def metrics(self, http: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(body=metrics_text(self._registry), headers={"Content-Type": _METRICS_TYPE})

    async def release(self, http: web.Request) -> web.Response:
        """Nobody will come for what this instance has prefilled under that transfer id: give it up."""
        requests = self._sources.pop(http.match_info["transfer_id"], ())
        for request_id in requests:
            self._engine.cancel(request_id)
        return _json(orjson.dumps({"released": len(requests)}))

    def _remember(self, transfer_id: str, api: ApiRequest) -> None:
        self._sources[transfer_id] = tuple(request.request_id for request in api.requests)
        while len(self._sources) > _KNOWN_SOURCES:
            self._sources.popitem(last=False)

    async def _read(self, http: web.Request, kind: type[Body], check: Check[Body]) -> ApiRequest:
        request_id = _request_id(http)
        try:
            async with asyncio.timeout(self._progress_timeout_s):
                raw = await http.read()
        except TimeoutError as error:
            raise HttpError(408, "timeout", f"the body did not arrive within {self._progress_timeout_s:g} s") from error
        except (web.RequestPayloadError, ValueError) as error:
            raise BadRequest("body", f"the body cannot be read: {error}") from error
        try:
            if len(raw) <= _INLINE_BODY_BYTES:
                return self._check(raw, kind, check, request_id)
            return await asyncio.to_thread(self._check, raw, kind, check, request_id)
        except KVBatonError as error:
            for request in declined_requests(raw, request_id):
                self._engine.decline(request, str(error))
            raise

    def _check(self, raw: bytes, kind: type[Body], check: Check[Body], request_id: str | None) -> ApiRequest:
        body = decode_body(raw, kind)
        if body.model is not None and body.model != self._served_model:
            message = f"model: {body.model!r} is not served here; this instance serves {self._served_model!r}"
            raise HttpError(404, "invalid_request_error", message, param="model", code="model_not_found")
        self._tell_doubt(size_doubt(body.kv_transfer_params))
        api = check(body, self._tokenizer, self._limits, request_id)
        if api.wish is not None and self._handoff is None:
            raise BadRequest("kv_transfer_params", "kv_transfer_params: this instance hands nothing off; leave the field out")
        return api

    def _tell_doubt(self, doubt: str | None) -> None:
        if doubt is not None and self._doubts.allow(doubt, time.monotonic()) is not None:
            _logger.warning("%s", doubt)

    async def _answer(self, http: web.Request, api: ApiRequest) -> web.StreamResponse:
        params = answer_params(api.wish, self._handoff) if isinstance(api.wish, SourceWish) and self._handoff else None
        if isinstance(api.wish, SourceWish):
            self._remember(api.wish.transfer_id, api)
        answer = Answer(api, self._served_model, self._tokenizer.token_text, params)
        with Submission(self._engine, api.requests, progress_timeout_s=self._progress_timeout_s) as submission:
            if api.stream:
                return await self._stream(http, answer, submission)
            while not answer.is_finished:
                answer.add(*await submission.next())
        connection = _Connection(http, _json(answer.body()), self._progress_timeout_s)
        await connection.finish()
        return connection.response

    async def _stream(self, http: web.Request, answer: Answer, submission: Submission) -> web.StreamResponse:
        index, output = await submission.next()
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        connection = _Connection(http, web.StreamResponse(headers=headers), self._progress_timeout_s)
        try:
            await connection.write(answer.event(index, output))
            while not (answer.is_finished or connection.is_lost):
                await connection.write(answer.event(*await submission.next()))
            await connection.write(answer.usage_event())
            await connection.write(DONE_EVENT)
        except KVBatonError as error:
            await connection.fail(to_http_error(error))
        except Exception:
            _logger.exception("bug in the middle of a stream of %s", http.path)
            await connection.fail(HttpError(500, "server_error", BUG_MESSAGE))
        await connection.finish()
        return connection.response


class _Connection:
    """The way back to one client, each write with a deadline; `is_lost` once the client is gone or does not read."""

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
        """Tell an error in the middle of a stream; the connection is closed after it."""
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
