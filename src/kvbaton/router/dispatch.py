"""One request through its two instances, pull mode: prefill first, then decode with what prefill answered.

Both legs belong to the handler's task. When the client goes away the task is cancelled, and that closes whichever leg is
open; a prefill whose decode never starts is freed by the prefill instance's own lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from aiohttp import web

from kvbaton.core.addresses import make_request_id
from kvbaton.discovery.messages import InstanceType
from kvbaton.discovery.registry import Registry
from kvbaton.errors import PeerError, PeerLost
from kvbaton.router.answers import error_event, error_response
from kvbaton.router.bodies import ClientBody, decode_body, parse_body, prefill_body, transfer_params
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.policy import Pair, Policy, RouteRequest
from kvbaton.router.routed import RoutedTransfers
from kvbaton.router.settings import RouterSettings
from kvbaton.router.upstream import Answer, StreamedAnswer, Upstream

__all__ = ["Dispatcher", "missing_sides"]

_logger = logging.getLogger(__name__)

_FORWARDED = ("Authorization", "traceparent", "tracestate")
_RETRY_AFTER_S = "2"
_MAX_ECHO = 256
_EVENT_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class _Job:
    """One request on its way: what the client asked, who serves it, and under which names."""

    path: str
    body: ClientBody
    pair: Pair
    transfer_id: str
    leg_headers: dict[str, str]
    answer_headers: dict[str, str]
    arrived: float


class Dispatcher:
    """Serves completion requests with the live instances of `registry`, as `policy` chooses them; `routed` remembers them."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        policy: Policy,
        upstream: Upstream,
        metrics: RouterMetrics,
        routed: RoutedTransfers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routed = routed
        self._settings = settings
        self._registry = registry
        self._policy = policy
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._in_flight = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one completion request. Raises BadRequest for a body that cannot be used."""
        arrived = self._clock()
        if self._in_flight >= self._settings.max_in_flight:
            return _unavailable(f"{self._in_flight} requests are in flight, which is the limit; try again", "overloaded")
        self._in_flight += 1
        self._metrics.in_flight.inc()
        try:
            return await self._admitted(request, arrived)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()

    async def _admitted(self, request: web.Request, arrived: float) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._settings.client_timeout_s):
                content = await request.read()
        except TimeoutError:
            return error_response(408, f"the body did not arrive within {self._settings.client_timeout_s:g} s")
        body = parse_body(content)
        now = self._clock()
        prefills = self._registry.live(now, InstanceType.PREFILL)
        decodes = self._registry.live(now, InstanceType.DECODE)
        missing = missing_sides(len(prefills), len(decodes))
        if missing:
            return _unavailable(missing, "no_instance")
        pair = self._policy.choose(RouteRequest(request.path, body.fields), prefills, decodes)
        try:
            job = _job(request, body, pair, arrived)
            self._routed.add(job.transfer_id, pair, arrived)
            return await self._both_legs(request, job)
        finally:
            self._policy.finished(pair)

    async def _both_legs(self, request: web.Request, job: _Job) -> web.StreamResponse:
        try:
            answer = await self._upstream.prefill(
                job.pair.prefill, job.path, prefill_body(job.body, job.transfer_id), job.leg_headers
            )
            if not answer.is_ok:
                return self._prefill_refused(job, answer)
            second_body = decode_body(job.body, transfer_params(answer.content))
        except PeerError as error:
            return self._leg_failed(job, InstanceType.PREFILL, error)
        try:
            async with self._upstream.decode(job.pair.decode, job.path, second_body, job.leg_headers) as streamed:
                return await self._pass_on(request, job, streamed)
        except PeerError as error:
            return self._leg_failed(job, InstanceType.DECODE, error)

    async def _pass_on(self, request: web.Request, job: _Job, streamed: StreamedAnswer) -> web.StreamResponse:
        if streamed.is_event_stream:
            return await self._pass_stream_on(request, job, streamed)
        answer = await streamed.read()
        if answer.is_ok:
            self._metrics.ttft.observe(self._clock() - job.arrived)
        else:
            self._metrics.decode_failures.inc()
            _logger.warning("%s: decode instance answered %d", _names(job), answer.status)
        return _passed(answer, job)

    async def _pass_stream_on(self, request: web.Request, job: _Job, streamed: StreamedAnswer) -> web.StreamResponse:
        chunks = streamed.chunks()
        chunk = await anext(chunks, b"")
        self._metrics.ttft.observe(self._clock() - job.arrived)
        headers = {**job.answer_headers, "Content-Type": streamed.content_type, "Cache-Control": "no-cache"}
        response = web.StreamResponse(status=streamed.status, headers=headers)
        await response.prepare(request)
        await self._relay(request, response, job, chunk, chunks)
        await self._write(request, response, None)
        return response

    async def _relay(
        self, request: web.Request, response: web.StreamResponse, job: _Job, chunk: bytes, chunks: AsyncIterator[bytes]
    ) -> None:
        tail = b""
        try:
            while chunk:
                await self._write(request, response, chunk)
                tail = (tail + chunk[-2:])[-2:]
                chunk = await anext(chunks, b"")
        except PeerLost as error:
            self._metrics.decode_failures.inc()
            _logger.warning("%s: decode leg broke off in mid-stream: %s", _names(job), error)
            response.force_close()
            gap = b"" if tail == _EVENT_END else _EVENT_END
            await self._write(request, response, gap + error_event(f"{error}; send the request again", "decode_failed"))

    async def _write(self, request: web.Request, response: web.StreamResponse, chunk: bytes | None) -> None:
        try:
            async with asyncio.timeout(self._settings.client_timeout_s):
                await (response.write_eof() if chunk is None else response.write(chunk))
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(f"the client read nothing for {self._settings.client_timeout_s:g} s") from None

    def _prefill_refused(self, job: _Job, answer: Answer) -> web.Response:
        self._metrics.prefill_failures.inc()
        _logger.warning("%s: prefill instance answered %d", _names(job), answer.status)
        if 400 <= answer.status < 500:
            return _passed(answer, job)
        said = answer.content[:500].decode(errors="replace")
        message = f"prefill instance {job.pair.prefill.http_address} answered {answer.status}: {said}"
        return error_response(502, message, code="prefill_failed", headers=job.answer_headers)

    def _leg_failed(self, job: _Job, side: InstanceType, error: PeerError) -> web.Response:
        is_prefill = side is InstanceType.PREFILL
        (self._metrics.prefill_failures if is_prefill else self._metrics.decode_failures).inc()
        _logger.warning("%s: %s leg failed: %s", _names(job), side.word, error)
        return error_response(502, str(error), code=f"{side.word}_failed", headers=job.answer_headers)


def missing_sides(prefills: int, decodes: int) -> str:
    """Which side has no live instance, in words; empty when both have one."""
    missing = [word for word, count in (("prefill", prefills), ("decode", decodes)) if count == 0]
    if not missing:
        return ""
    return f"no live {' and no live '.join(missing)} instance; is one running and registered with this router? See /instances"


def _job(request: web.Request, body: ClientBody, pair: Pair, arrived: float) -> _Job:
    tail = uuid.uuid4().hex
    transfer_id = f"tx-{uuid.uuid4().hex}"
    leg_headers = {
        "Content-Type": "application/json",
        "X-Request-Id": make_request_id(pair.prefill.zmq_address, pair.decode.zmq_address, tail),
    }
    leg_headers.update((name, request.headers[name]) for name in _FORWARDED if name in request.headers)
    answer_headers = {
        "X-Request-Id": request.headers.get("X-Request-Id", tail)[:_MAX_ECHO],
        "X-KVBaton-Transfer": transfer_id,
        "X-KVBaton-Prefill": pair.prefill.http_address,
        "X-KVBaton-Decode": pair.decode.http_address,
    }
    return _Job(request.path, body, pair, transfer_id, leg_headers, answer_headers, arrived)


def _passed(answer: Answer, job: _Job) -> web.Response:
    headers = {**job.answer_headers, "Content-Type": answer.content_type}
    if answer.retry_after is not None:
        headers["Retry-After"] = answer.retry_after
    return web.Response(status=answer.status, body=answer.content, headers=headers)


def _unavailable(message: str, code: str) -> web.Response:
    return error_response(503, message, code=code, headers={"Retry-After": _RETRY_AFTER_S})


def _names(job: _Job) -> str:
    return f"{job.transfer_id} ({job.pair.prefill.http_address} to {job.pair.decode.http_address})"
