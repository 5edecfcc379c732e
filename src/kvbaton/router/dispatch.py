"""One request through its two instances: admitted, given a pair, run on two legs (`legs.py`), and passed on to its client.

Both legs belong to the handler's task. When the client goes away the task is cancelled, and that closes whichever leg is
open; a prefill whose decode never starts is freed by the prefill instance's own lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from kvbaton.core.addresses import make_request_id
from kvbaton.discovery.messages import InstanceType
from kvbaton.discovery.registry import Registry
from kvbaton.errors import PeerError, PeerLost
from kvbaton.router.answers import error_event, error_response
from kvbaton.router.bodies import ClientBody, parse_body
from kvbaton.router.legs import Begun, Job, LegFailure, Legs
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.policy import Pair, Policy, RouteRequest, missing_sides, pools_of
from kvbaton.router.routed import RoutedTransfers
from kvbaton.router.settings import RouterSettings
from kvbaton.router.upstream import Answer, Upstream

__all__ = ["Dispatcher"]

_logger = logging.getLogger(__name__)

_FORWARDED = ("Authorization", "traceparent", "tracestate")
_RETRY_AFTER_S = "2"
_MAX_ECHO = 256
_EVENT_END = b"\n\n"


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
        self._legs = Legs(upstream)
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
        live = self._registry.live(self._clock())
        pools = pools_of(live)
        if not pools:
            return _unavailable(missing_sides(live), "no_instance")
        pair = self._policy.choose(RouteRequest(request.path, body.fields), pools)
        try:
            job = _job(request, body, pair, arrived)
            self._routed.add(job.transfer_id, pair, arrived)
            return await self._serve_with(request, job)
        finally:
            self._policy.finished(pair)

    async def _serve_with(self, request: web.Request, job: Job) -> web.StreamResponse:
        async with self._legs.open(job) as outcome:
            match outcome:
                case LegFailure():
                    return self._failed(job, outcome)
                case Begun():
                    return await self._pass_stream_on(request, job, outcome)
            self._metrics.ttft.observe(self._clock() - job.arrived)
            return _passed(outcome, job)

    async def _pass_stream_on(self, request: web.Request, job: Job, begun: Begun) -> web.StreamResponse:
        self._metrics.ttft.observe(self._clock() - job.arrived)
        headers = {**job.answer_headers, "Content-Type": begun.content_type, "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await self._relay(request, response, job, begun)
            await self._write(request, response, None)
        except ConnectionResetError as error:
            _logger.info("%s: the client left in mid-stream: %s", job, error)
        return response

    async def _relay(self, request: web.Request, response: web.StreamResponse, job: Job, begun: Begun) -> None:
        chunk, tail = begun.first, b""
        try:
            while chunk:
                await self._write(request, response, chunk)
                tail = (tail + chunk[-2:])[-2:]
                chunk = await anext(begun.rest, b"")
        except PeerLost as error:
            self._metrics.decode_failures.inc()
            _logger.warning("%s: decode leg broke off in mid-stream: %s", job, error)
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

    def _failed(self, job: Job, failure: LegFailure) -> web.Response:
        """The failure as the client sees it: what is its own fault keeps status and body, as does whatever decode answered."""
        side, said = failure.side, failure.said
        is_prefill = side is InstanceType.PREFILL
        (self._metrics.prefill_failures if is_prefill else self._metrics.decode_failures).inc()
        if isinstance(said, PeerError):
            _logger.warning("%s: %s leg failed: %s", job, side.word, said)
            return error_response(502, str(said), code=f"{side.word}_failed", headers=job.answer_headers)
        _logger.warning("%s: %s instance answered %d", job, side.word, said.status)
        if not is_prefill or 400 <= said.status < 500:
            return _passed(said, job)
        text = said.content[:500].decode(errors="replace")
        message = f"prefill instance {job.pair.prefill.http_address} answered {said.status}: {text}"
        return error_response(502, message, code="prefill_failed", headers=job.answer_headers)


def _job(request: web.Request, body: ClientBody, pair: Pair, arrived: float) -> Job:
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
        "X-KVBaton-Mode": pair.transfer_mode.mode,
    }
    return Job(request.path, body, pair, transfer_id, leg_headers, answer_headers, arrived)


def _passed(answer: Answer, job: Job) -> web.Response:
    headers = {**job.answer_headers, "Content-Type": answer.content_type}
    if answer.retry_after is not None:
        headers["Retry-After"] = answer.retry_after
    return web.Response(status=answer.status, body=answer.content, headers=headers)


def _unavailable(message: str, code: str) -> web.Response:
    return error_response(503, message, code=code, headers={"Retry-After": _RETRY_AFTER_S})
