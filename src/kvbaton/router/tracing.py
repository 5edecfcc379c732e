"""Spans of requests and of their hand-offs inside the trace of the client, exported by OTLP. The only user of OpenTelemetry.

Off unless the environment names a collector, as every program with OpenTelemetry reads it (`OTEL_EXPORTER_OTLP_ENDPOINT`).
Instances need nothing of it: they note what happens to a hand-off anyway, and the router, which joins the notes of both sides
on one clock, makes spans of them after the answer. Only for traces that are recorded, and never in the way of a request: what
cannot be followed in time is dropped and counted.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvbaton import __version__
from kvbaton.core.handoff import Outcome
from kvbaton.observe.phases import Bar
from kvbaton.observe.trace_context import TraceContext
from kvbaton.observe.transfer_report import HandoffReport, TransferReport, row_label
from kvbaton.router.pair_request import PairRequest

__all__ = ["ENDPOINT_VARIABLES", "RequestSpan", "RequestTracing", "is_traced", "make_provider"]

_logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Where spans go; either of them turns tracing on."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_MOST_FOLLOWED = 64
# Both sides have ended when the answer is complete, but the source learns of it a message later.
_SETTLE_S = 0.25
_SHUTDOWN_S = 3.0
_NS = 1_000_000_000

ReportOf = Callable[[str], Awaitable[TransferReport | None]]
"""Fetches what both instances of a transfer have noted of it."""


def is_traced(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for spans and they can be made; logs by name what is in the way."""
    endpoint = next((name for name in ENDPOINT_VARIABLES if environment.get(name, "").strip()), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or is_off or environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return False
    protocol = next((environment[name].strip() for name in _PROTOCOLS if environment.get(name, "").strip()), _HTTP)
    if protocol != _HTTP:
        _logger.warning("%s is set with the protocol %r; no spans are exported, because only %s is", endpoint, protocol, _HTTP)
        return False
    if not (importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.sdk")):
        _logger.warning("%s is set, but OpenTelemetry is not installed; pip install 'kvbaton[otel]' exports spans", endpoint)
        return False
    return True


def make_provider() -> Any:
    """What exports spans in the background, as the environment has it: endpoint, headers, sampler, service name."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({"service.name": "kvbaton-router", "service.version": __version__}).merge(
        OTELResourceDetector().detect()
    )
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestTracing:
    """Makes the spans of one router process. `dropped` is called for each hand-off that was not followed."""

    def __init__(self, provider: Any, report_of: ReportOf, dropped: Callable[[], None]) -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("kvbaton", __version__)
        self._report_of = report_of
        self._dropped = dropped
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, context: TraceContext | None, path: str) -> RequestSpan:
        """A request has come, in the trace of its client, or else in a new one."""
        return RequestSpan(self, context, path)

    def follow(self, parent: Any, transfer_id: str, started_ns: int) -> None:
        """Make spans of a hand-off that has ended, under `parent`."""
        if len(self._tasks) >= _MOST_FOLLOWED:
            self._dropped()
            return
        task = asyncio.get_running_loop().create_task(self._follow(parent, transfer_id, started_ns))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish what is being followed, and export what is left; a collector that does not answer costs three seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_SHUTDOWN_S)
        thread = threading.Thread(target=self._provider.shutdown, name="kvbaton-traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _SHUTDOWN_S)

    async def _follow(self, parent: Any, transfer_id: str, started_ns: int) -> None:
        await asyncio.sleep(_SETTLE_S)
        report = await self._report_of(transfer_id)
        if report is None:
            self._dropped()
            return
        for handoff in report.handoffs:
            self._add_handoff(parent, report, handoff, started_ns)

    def _add_handoff(self, parent: Any, report: TransferReport, handoff: HandoffReport, started_ns: int) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        ends = {end.side: end for end in handoff.ends}
        start = min((bar.start_s for bar in handoff.bars), default=0.0)
        end = max([bar.end_s for bar in handoff.bars] + [each.at_s for each in handoff.ends], default=start)
        attributes = {
            "kvbaton.transfer_id": report.transfer_id,
            "kvbaton.prompt_index": handoff.prompt_index,
            "kvbaton.sample_index": handoff.sample_index,
            "kvbaton.bytes_moved": handoff.wire_bytes,
            "kvbaton.hidden_s": handoff.hidden_s,
            "kvbaton.sentence": handoff.sentence,
        }
        attributes |= {f"kvbaton.{side}.outcome": str(each.outcome or "open") for side, each in ends.items()}
        if handoff.exposed_s is not None:
            attributes["kvbaton.exposed_s"] = handoff.exposed_s
        span = self.tracer.start_span(
            "kvbaton.handoff", context=parent, start_time=_moment(started_ns, start), attributes=attributes
        )
        bad = next((each for each in handoff.ends if each.outcome not in (None, Outcome.DELIVERED)), None)
        if bad is not None:
            span.set_status(Status(StatusCode.ERROR, f"{bad.outcome} at the {bad.side}: {bad.reason}"))
        inside = set_span_in_context(span)
        for bar in handoff.bars:
            self._add_phase(inside, bar, started_ns)
        span.end(end_time=_moment(started_ns, end))

    def _add_phase(self, parent: Any, bar: Bar, started_ns: int) -> None:
        attributes = {"kvbaton.side": str(bar.side), "kvbaton.hidden_s": bar.hidden_s, "kvbaton.exposed_s": bar.exposed_s}
        if bar.moved_bytes:
            attributes["kvbaton.bytes_moved"] = bar.moved_bytes
        if bar.is_cut:
            attributes["kvbaton.is_cut"] = True
        start = _moment(started_ns, bar.start_s)
        span = self.tracer.start_span(f"kvbaton.{row_label(bar)}", context=parent, start_time=start, attributes=attributes)
        span.end(end_time=_moment(started_ns, bar.end_s))


class RequestSpan:
    """The span of one request of a client, and those of its attempts. Belongs to the event loop's thread."""

    def __init__(self, tracing: RequestTracing, context: TraceContext | None, path: str) -> None:
        from opentelemetry.trace import SpanKind

        self._tracing = tracing
        attributes = {"http.request.method": "POST", "url.path": path}
        parent = None if context is None else _remote(context)
        self._span = tracing.tracer.start_span("kvbaton.request", context=parent, kind=SpanKind.SERVER, attributes=attributes)
        self._attempt: Any = None
        self._transfer_id = ""
        self._started_ns = 0

    def begin_attempt(self) -> bytes:
        """An attempt begins; the header by which the spans of its instances are its children."""
        from opentelemetry.trace import set_span_in_context

        self._end_attempt()
        self._started_ns = time.time_ns()
        self._attempt = self._tracing.tracer.start_span("kvbaton.attempt", context=set_span_in_context(self._span))
        at = self._attempt.get_span_context()
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (at.trace_id, at.span_id, at.trace_flags)

    def describe_attempt(self, job: PairRequest) -> None:
        """Which instances it is tried on, under which transfer id."""
        pair = job.pair
        self._transfer_id = job.transfer_id if pair.prefill is not None else ""
        self._attempt.set_attribute("kvbaton.transfer_id", job.transfer_id)
        self._attempt.set_attribute("kvbaton.mode", "local" if pair.prefill is None else pair.transfer_mode.mode)
        self._attempt.set_attribute("kvbaton.decode", pair.decode.http_address)
        if pair.prefill is not None:
            self._attempt.set_attribute("kvbaton.prefill", pair.prefill.http_address)

    def fail_attempt(self, reason: str) -> None:
        """The attempt has failed; another may follow."""
        from opentelemetry.trace import Status, StatusCode

        if self._attempt is not None:
            self._attempt.set_status(Status(StatusCode.ERROR, reason))
        self._end_attempt()

    def answered(self, status: int) -> None:
        """The client gets this status."""
        self._span.set_attribute("http.response.status_code", status)

    def end(self) -> None:
        """The request is over."""
        self._end_attempt()
        self._span.end()

    def _end_attempt(self) -> None:
        from opentelemetry.trace import set_span_in_context

        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.end()
        if self._transfer_id and attempt.get_span_context().trace_flags.sampled:
            self._tracing.follow(set_span_in_context(attempt), self._transfer_id, self._started_ns)
        self._transfer_id = ""


def _remote(context: TraceContext) -> Any:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    flags = TraceFlags(context.flags & TraceFlags.SAMPLED)
    return set_span_in_context(NonRecordingSpan(SpanContext(context.trace_id, context.span_id, True, flags)))


def _moment(started_ns: int, seconds: float) -> int:
    return started_ns + int(seconds * _NS)
