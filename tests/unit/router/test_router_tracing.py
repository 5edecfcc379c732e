"""Spans of a request and its hand-off inside the client's trace, as a collector of OTLP receives them."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from aiohttp import web
from router_fakes import (
    DEADLINE_S,
    Behaviour,
    FakeInstance,
    answering,
    decode,
    decode_well,
    prefill,
    prefill_well,
    routing,
    until,
)

from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side, Stage
from kvbaton.launch.ports import PortPicker
from kvbaton.router import tracing
from true_notes import TRANSFER, Way, notes_of_push, record

pytest.importorskip("opentelemetry.sdk")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RECORDED, UNRECORDED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class Collector:
    """Takes spans over HTTP, as OTLP sends them."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                content = self.rfile.read(int(self.headers["Content-Length"]))
                for each in ExportTraceServiceRequest.FromString(content).resource_spans:
                    names = [a.value.string_value for a in each.resource.attributes if a.key == "service.name"]
                    collector.services.update(names)
                    for scope in each.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", PortPicker().pick()), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(10)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    yield collector
    collector.close()


def noting(side: Side, otherwise: Behaviour, way: Way) -> Behaviour:
    """An instance that answers completions, and has these notes of every transfer."""
    notes = msgspec.json.encode(record(side, way)).decode()

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not request.path.startswith("/handoffs/"):
            return await otherwise(request, body)
        transfer_id = request.path.removeprefix("/handoffs/")
        return web.Response(text=notes.replace(TRANSFER, transfer_id), content_type="application/json")

    return behave


def pair(way: Way) -> tuple[FakeInstance, FakeInstance]:
    return prefill(noting(Side.SOURCE, prefill_well, way)), decode(noting(Side.TARGET, decode_well, way))


def headers_of(instance: FakeInstance) -> str:
    (seen,) = [each for each in instance.seen if each.path == "/v1/completions"]
    return seen.headers.get("traceparent", "")


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_hand_off_is_drawn_inside_the_clients_trace(collector: Collector) -> None:
    async def scene() -> None:
        source, target = pair(notes_of_push(Way()))
        async with source, target, routing(source, target) as router:
            status, headers, _ = await router.post({"prompt": "hi"}, headers={"traceparent": RECORDED})
            assert status == 200
            await until(lambda: bool(collector.named("kvbaton.handoff")) and bool(collector.named("kvbaton.request")))
            (request,), (attempt,) = collector.named("kvbaton.request"), collector.named("kvbaton.attempt")
            (handoff,) = collector.named("kvbaton.handoff")
            assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
            assert request.parent_span_id.hex() == SPAN
            assert attempt.parent_span_id == request.span_id
            assert handoff.parent_span_id == attempt.span_id
            phases = {span.name: span for span in collector.spans if span.parent_span_id == handoff.span_id}
            assert {"kvbaton.prefill", "kvbaton.wire", "kvbaton.grant", "kvbaton.confirmation"} <= phases.keys()
            for span in phases.values():
                assert handoff.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
                assert span.end_time_unix_nano <= handoff.end_time_unix_nano
            assert attributes(attempt)["kvbaton.transfer_id"] == headers["x-kvbaton-transfer"]
            assert attributes(attempt)["kvbaton.mode"] == "pull"
            assert attributes(request)["http.response.status_code"] == 200
            assert attributes(handoff)["kvbaton.target.outcome"] == "delivered"
            assert attributes(phases["kvbaton.wire"])["kvbaton.bytes_moved"] > 0
            # Both instances see the attempt as the parent of their own spans.
            expected = f"00-{TRACE}-{attempt.span_id.hex()}-01"
            assert [headers_of(source), headers_of(target)] == [expected, expected]
            assert collector.services == {"kvbaton-router"}

    asyncio.run(scene())


def test_a_hand_off_that_failed_is_an_error(collector: Collector) -> None:
    async def scene() -> None:
        way = Way()
        for side in (way.source, way.target):
            side(Stage.ARRIVED, 0.0)
            side(Stage.ENDED, 1.0, outcome=Outcome.FAILED, text="no progress for 30 s")
        source, target = pair(way)
        async with source, target, routing(source, target) as router:
            await router.post({"prompt": "hi"}, headers={"traceparent": RECORDED})
            await until(lambda: bool(collector.named("kvbaton.handoff")))
            (handoff,) = collector.named("kvbaton.handoff")
            assert handoff.status.code == 2
            assert "no progress for 30 s" in handoff.status.message

    asyncio.run(scene())


def test_each_attempt_is_a_span_and_the_failed_one_states_why(collector: Collector) -> None:
    async def scene() -> None:
        bad, source, target = prefill(answering(500, "{}")), *pair(notes_of_push(Way()))
        async with bad, source, target, routing(bad, source, target, prefill_policy="round_robin") as router:
            for _ in range(2):
                await router.post({"prompt": "hi"}, headers={"traceparent": RECORDED})
            await until(lambda: len(collector.named("kvbaton.attempt")) >= 3)
            failed = [span for span in collector.named("kvbaton.attempt") if span.status.code == 2]
            assert failed
            assert all("prefill" in span.status.message for span in failed)

    asyncio.run(scene())


def test_a_trace_that_is_not_recorded_costs_no_request_and_no_span(collector: Collector) -> None:
    async def scene() -> None:
        source, target = pair(notes_of_push(Way()))
        async with source, target, routing(source, target) as router:
            await router.post({"prompt": "hi"}, headers={"traceparent": UNRECORDED})
            await router.post({"prompt": "hi"}, headers={"traceparent": RECORDED})
            await until(lambda: bool(collector.named("kvbaton.handoff")))
            assert len(collector.named("kvbaton.request")) == 1
            assert sum(each.path.startswith("/handoffs/") for each in source.seen) == 1

    asyncio.run(scene())


@pytest.mark.parametrize("is_on", [True, False], ids=["with spans", "without"])
def test_a_malformed_header_is_counted_and_reaches_no_instance(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    if is_on:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{PortPicker().pick()}")

    async def scene() -> None:
        source, target = pair(notes_of_push(Way()))
        async with source, target, routing(source, target) as router:
            sent = {"traceparent": f"00-{'0' * 32}-{SPAN}-01", "tracestate": "a=b"}
            status, _, _ = await router.post({"prompt": "hi"}, headers=sent)
            assert status == 200
            assert await router.metric("kvbaton_router_malformed_traces_total") == 1
            for instance in (source, target):
                (seen,) = [each for each in instance.seen if each.path == "/v1/completions"]
                assert "tracestate" not in seen.headers
                assert "0" * 32 not in seen.headers.get("traceparent", "")
                assert ("traceparent" in seen.headers) == is_on

    asyncio.run(scene())


def test_a_collector_that_is_gone_holds_up_neither_requests_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{PortPicker().pick()}")

    async def scene() -> None:
        source, target = pair(notes_of_push(Way()))
        async with asyncio.timeout(DEADLINE_S), source, target, routing(source, target) as router:
            status, _, _ = await router.post({"prompt": "hi"}, headers={"traceparent": RECORDED})
            assert status == 200

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("environment", "is_traced", "logged"),
    [
        ({}, False, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True, ""),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False, ""),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            False,
            "only http/protobuf is",
        ),
    ],
)
def test_the_environment_turns_spans_on(
    environment: dict[str, str],
    is_traced: bool,
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tracing.is_traced(environment) is is_traced
    assert logged in caplog.text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not tracing.is_traced({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"})
    assert "kvbaton[otel]" in caplog.text
