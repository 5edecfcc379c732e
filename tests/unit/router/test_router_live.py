"""GET /live: the numbers of every instance, of those that answer in time, and at most every half second."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from router_fakes import decode, prefill, routing, run

from kvbaton.router.live import read_counts

METRICS = """# HELP kvbaton_handoffs_live Hand-offs under way, by side.
kvbaton_handoffs_live{side="source"} 3.0
kvbaton_handoffs_live{side="target"} 1.0
kvbaton_moved_bytes_total 1.5e+06
kvbaton_moved_bytes_created 1.7e+09
kvbaton_handoff_failures_total{side="target",cause="peer \\"x\\" lost"} 2.0
kvbaton_handoff_failures_total{side="source",cause="peer \\"x\\" lost"} 1.0
kvbaton_handoff_failures_total{side="source",cause="never"} 0.0
"""


def test_metrics_of_the_embedded_engine_and_of_vllm_are_read() -> None:
    expected = {"handoffs": {"source": 3.0, "target": 1.0}, "moved_bytes": 1.5e6, "failures": {'peer \\"x\\" lost': 3.0}}
    assert read_counts(METRICS.encode()) == expected
    vllm = METRICS.replace("\nkvbaton_", "\nvllm:kvbaton_").replace('{side="', '{engine="0",model_name="m",side="')
    assert read_counts(vllm.encode()) == expected


def test_what_is_no_metric_is_left_out() -> None:
    for content in (b"", b"\xff" * 1000, b"kvbaton_moved_bytes_total e\n", b'kvbaton_handoffs_live{side="source} 1', b"<html>"):
        assert read_counts(content) in ({}, {"handoffs": {"": 1.0}, "moved_bytes": 0.0, "failures": {}})
    many = b"".join(b'kvbaton_handoff_failures_total{cause="%d"} 1\n' % number for number in range(1000))
    assert len(read_counts(many)["failures"]) == 64
    long = b'kvbaton_handoff_failures_total{cause="' + b"x" * 10000 + b'"} 1\n'
    assert len(next(iter(read_counts(long)["failures"]))) == 200


async def metrics(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text=METRICS)


@run
async def test_instances_are_shown_with_their_numbers_or_with_the_reason() -> None:
    silent = asyncio.Event()

    async def nothing(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        await silent.wait()
        return web.Response(text="")

    async def broken(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=500)

    async with prefill(metrics) as good, decode(nothing) as late, decode(broken) as bad, routing(good, late, bad) as router:
        status, _, content = await router.get("/live")
        assert status == 200
        shown = {each["http_address"]: each for each in json.loads(content)["instances"]}
        assert shown[good.http_address]["handoffs"] == {"source": 3.0, "target": 1.0}
        assert shown[good.http_address]["moved_bytes"] == 1.5e6
        assert "within" in shown[late.http_address]["problem"] or "time" in shown[late.http_address]["problem"]
        assert shown[bad.http_address]["problem"] == "/metrics answered 500"
        assert json.loads(content)["router"]["in_flight_requests"] == 0
        silent.set()


@run
async def test_many_pages_ask_the_instances_once() -> None:
    asked = 0

    async def counting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal asked
        asked += request.path == "/metrics"
        await asyncio.sleep(0.05)
        return await metrics(request, body)

    async with prefill(counting) as source, decode(metrics) as target, routing(source, target) as router:
        answers = await asyncio.gather(*(router.get("/live") for _ in range(20)))
        assert {status for status, _, _ in answers} == {200}
        assert asked == 1


@run
async def test_with_api_keys_it_is_not_shown() -> None:
    keyed = {"Authorization": "Bearer key"}
    async with prefill(metrics) as source, decode(metrics) as target:
        async with routing(source, target, headers=keyed, api_keys=("key",)) as router:
            assert (await router.get("/live"))[0] == 403
        async with routing(source, target, headers=keyed, api_keys=("key",), show_details=True) as router:
            assert (await router.get("/live"))[0] == 200
