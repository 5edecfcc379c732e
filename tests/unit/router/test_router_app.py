"""The router as a server: its other routes, its error answers, its settings, and that it gives everything back."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Coroutine
from importlib import resources
from typing import Any

import pytest
from router_fakes import Router, answering, decode, free_port, prefill, routing

from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import TransferMode
from kvbaton.errors import ConfigError
from kvbaton.router.app import serve_router
from kvbaton.router.settings import RouterSettings


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        asyncio.run(test())

    wrapped.__name__ = test.__name__
    return wrapped


@run
async def test_health_models_and_instances_with_both_sides_live() -> None:
    async with prefill() as p, decode() as d, routing(p, d) as router:
        status, _, content = await router.get("/health")
        assert (status, json.loads(content)) == (200, {"status": "ok", "prefill": 1, "decode": 1})
        assert [m["id"] for m in json.loads((await router.get("/v1/models"))[2])["data"]] == ["m"]
        state = json.loads((await router.get("/instances"))[2])
        assert state["refused"] == []
        assert {(i["type"], i["http_address"]) for i in state["live"]} == {("P", p.http_address), ("D", d.http_address)}
        assert all(i["age_s"] >= 0 and i["transfer_mode"] == "READ" for i in state["live"])
        assert await router.metric('kvbaton_router_instances{mode="pull",type="prefill"}') == 1


@run
async def test_with_nothing_registered_each_route_reports_it() -> None:
    async with routing() as router:
        for path in ("/health", "/v1/models"):
            status, headers, content = await router.get(path)
            assert status == 503
            assert "retry-after" in headers
            message = json.loads(content)["error"]["message"]
            assert "prefill" in message
            assert "decode" in message
        assert json.loads((await router.get("/instances"))[2]) == {"transfer_mode": "auto", "live": [], "refused": []}


@run
async def test_models_that_instances_did_not_register_are_asked_for() -> None:
    listed = answering(200, '{"object":"list","data":[{"id":"theirs"}]}')
    async with prefill(listed, model="") as p, routing(p) as router:
        assert json.loads((await router.get("/v1/models"))[2])["data"][0]["id"] == "theirs"
        assert "authorization" not in p.seen[0].headers
    async with prefill(listed, model="") as p, routing(p, instance_api_key="theirs") as router:
        assert (await router.get("/v1/models"))[0] == 200
        assert p.seen[0].headers["authorization"] == "Bearer theirs"
    async with routing(prefill(model="")) as router:
        assert (await router.get("/v1/models"))[0] == 502


async def _refused(router: Router) -> list[dict[str, str]]:
    """The refused instances, once there is one."""
    async with asyncio.timeout(20):
        while not (refused := json.loads((await router.get("/instances"))[2])["refused"]):
            await asyncio.sleep(0.01)
    return list(refused)


@run
async def test_an_instance_with_another_model_is_shown_as_refused() -> None:
    odd = decode(fingerprint="other").registration()
    async with prefill() as p, decode() as d, routing(p, d) as router:
        with ThreadAnnouncer(odd, [f"127.0.0.1:{router.settings.discovery_port}"], heartbeat_s=0.3):
            refused = await _refused(router)
        assert len(refused) == 1
        assert "'other'" in refused[0]["reason"]
        assert "'f'" in refused[0]["reason"]


@pytest.mark.parametrize("ours", list(TransferMode))
def test_a_router_of_one_mode_refuses_the_other_by_name(ours: TransferMode) -> None:
    (theirs,) = set(TransferMode) - {ours}

    async def test() -> None:
        odd = decode(mode=theirs).registration()
        async with prefill(mode=ours) as p, decode(mode=ours) as d, routing(p, d, transfer_mode=ours) as router:
            with ThreadAnnouncer(odd, [f"127.0.0.1:{router.settings.discovery_port}"], heartbeat_s=0.3):
                (refused,) = await _refused(router)
            assert f"transfer_mode is {theirs} there and {ours} here" in refused["reason"]
            assert f"--mode {ours.mode}" in refused["reason"]
            assert json.loads((await router.get("/instances"))[2])["transfer_mode"] == ours
            assert (await router.post({"prompt": "x"}))[0] == 200

    asyncio.run(test())


@run
async def test_two_sides_of_different_modes_are_no_pair_and_it_is_reported() -> None:
    async with prefill(mode=TransferMode.WRITE) as p, decode() as d, routing(p, d) as router:
        for status, headers, content in (await router.get("/health"), await router.post({"prompt": "x"})):
            assert status == 503
            assert "retry-after" in headers
            message = json.loads(content)["error"]["message"]
            assert "prefill instances hand over by push (WRITE) and decode instances by pull (READ)" in message
            assert "--mode" in message
        assert await router.metric('kvbaton_router_instances{mode="push",type="prefill"}') == 1
        assert await router.metric('kvbaton_router_instances{mode="pull",type="decode"}') == 1
    assert p.seen == d.seen == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405), ("GET", "/page/app.py", 404)],
)
def test_errors_are_openai_objects(method: str, path: str, status: int) -> None:
    async def test() -> None:
        async with routing() as router, router.client.request(method, path) as answer:
            assert answer.status == status
            assert answer.content_type == "application/json"
            assert (await answer.json())["error"]["type"] in ("not_found_error", "invalid_request_error")

    asyncio.run(test())


@run
async def test_bad_bodies_are_refused_before_any_instance_is_asked() -> None:
    async with prefill() as p, decode() as d, routing(p, d, max_body_bytes=1000) as router:
        for body, expected in ((b"{", 400), (b"[1]", 400), (b'{"max_tokens":0}', 400), (b'{"x":"%s"}' % (b"y" * 2000), 413)):
            status, _, content = await router.post(body)
            assert status == expected
            assert json.loads(content)["error"]["type"] == "invalid_request_error"
        assert p.seen == []
        assert await router.metric('kvbaton_router_requests_total{path="/v1/completions",status="4xx"}') == 4


@run
async def test_the_page_and_all_it_refers_to_is_served_from_here() -> None:
    async with routing() as router:
        status, headers, content = await router.get("/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        references = _references(content.decode())
        assert references
        for path in references:
            assert path.startswith("/page/")
            assert (await router.get(path))[0] == 200
        for name in (f.name for f in (resources.files("kvbaton.router") / "page").iterdir()):
            status, headers, content = await router.get(f"/page/{name}")
            assert status == 200
            assert headers["content-type"].startswith({"js": "text/javascript", "css": "text/css"}.get(name.split(".")[1], ""))
            assert b"innerHTML" not in content


def _references(html: str) -> list[str]:
    return re.findall(r'(?:src|href)="([^"]+)"', html)


@run
async def test_a_port_in_use_is_named_and_nothing_is_left_open() -> None:
    async with routing() as router:
        taken = router.settings.port
        discovery = free_port()
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"{taken}.*--port"):
                await serve_router(RouterSettings(port=taken, discovery_port=discovery))
        with pytest.raises(ConfigError, match="--discovery-port"):
            await serve_router(RouterSettings(port=free_port(), discovery_port=router.settings.discovery_port))


@run
async def test_a_cancelled_router_frees_its_ports() -> None:
    async with routing() as router:
        settings = router.settings
    ready = asyncio.Event()
    task = asyncio.create_task(serve_router(settings, ready.set))
    async with asyncio.timeout(20):
        await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_router_process_ends_cleanly_on_sigterm() -> None:
    port, discovery = free_port(), free_port()
    code = (
        "from kvbaton.cli.running import run_server\n"
        "from kvbaton.router.app import serve_router\n"
        "from kvbaton.router.settings import RouterSettings\n"
        f"settings = RouterSettings(port={port}, discovery_port={discovery})\n"
        "raise SystemExit(run_server(serve_router(settings, lambda: print('ready', flush=True))))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/instances", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("port", 0),
        ("discovery_port", 70000),
        ("expire_after_s", 0.0),
        ("prefill_timeout_s", float("inf")),
        ("max_in_flight", 0),
    ],
)
def test_a_setting_that_cannot_work_is_named(setting: str, value: object) -> None:
    settings: dict[str, Any] = {setting: value}
    with pytest.raises(ConfigError, match=setting):
        RouterSettings(**settings)


def test_both_ports_must_differ() -> None:
    with pytest.raises(ConfigError, match="discovery_port"):
        RouterSettings(port=9000, discovery_port=9000)


@run
async def test_unknown_paths_share_one_label() -> None:
    async with routing() as router:
        for number in range(50):
            assert (await router.get(f"/nope/{number}"))[0] == 404
        assert await router.metric('kvbaton_router_requests_total{path="other",status="4xx"}') == 50
        assert b"/nope" not in (await router.get("/metrics"))[2]


@run
async def test_a_status_that_http_does_not_know_is_passed_on_and_counted() -> None:
    async with prefill() as p, decode(answering(799, "{}")) as d, routing(p, d) as router:
        assert (await router.post({"prompt": "x"}))[0] == 799
        assert await router.metric('kvbaton_router_requests_total{path="/v1/completions",status="other"}') == 1


@run
async def test_ready_is_true_in_discovery_mode_under_both_names() -> None:
    async with prefill() as p, decode() as d, routing(p, d) as router:
        for path in ("/ready", "/readiness"):
            assert (await router.get(path))[0] == 200
