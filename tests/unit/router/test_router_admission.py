"""Who is let in and who waits: caps, the queue, keys, forwarded headers, short prompts, ranks, drains, and SGLang pairs."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from router_fakes import (
    Router,
    decode,
    decode_well,
    prefill,
    routing,
    run,
    until,
    wait_for_ever,
)

from kvbaton.config import HTTP_KEY_HEADER, http_token
from kvbaton.discovery.messages import Dispatch, TransferMode
from kvbaton.errors import ConfigError
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.settings import RouterSettings

READ, WRITE = TransferMode.READ, TransferMode.WRITE
BODY = {"model": "m", "prompt": "hello", "max_tokens": 16}

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Gate:
    """Decode that holds its requests until it is opened, and notes the order in which they came."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.order: list[str] = []

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.order.append(body["prompt"])
        await self.open.wait()
        return await decode_well(request, body)


async def queued(router: Router, count: int) -> None:
    async with asyncio.timeout(20):
        while await router.metric("kvbaton_router_queued_requests") != count:
            await asyncio.sleep(0.01)


@run
async def test_requests_beyond_a_cap_wait_for_their_turn_by_priority() -> None:
    gate = Gate()
    async with prefill(mode=WRITE) as p, decode(gate, mode=WRITE) as d, routing(p, d, max_per_decode=1) as router:
        requests = []
        for waiting, (name, priority) in enumerate([("first", 0), ("later", 5), ("normal", 0), ("urgent", -1)]):
            requests.append(asyncio.create_task(router.post({"prompt": name, "priority": priority})))
            await (until(lambda: len(d.seen) == 1) if waiting == 0 else queued(router, waiting))
        assert d.running == 1
        gate.open.set()
        assert [(await request)[0] for request in requests] == [200] * 4
        assert gate.order == ["first", "urgent", "normal", "later"]
        await queued(router, 0)


@pytest.mark.parametrize("mode", [READ, WRITE])
def test_a_seat_that_prefill_has_left_is_taken_at_once(mode: TransferMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when decode is done, or when the router looks round the next time, which here it does not."""

    async def test() -> None:
        gate = Gate()
        p, d = prefill(mode=mode), decode(gate, mode=mode)
        async with p, d, routing(p, d, max_per_prefill=1) as router:
            monkeypatch.setattr(Dispatcher, "sweep", lambda *_: None)
            requests = [asyncio.create_task(router.post(BODY)) for _ in range(8)]
            await until(lambda: len(p.seen) == 8)
            gate.open.set()
            assert {(await request)[0] for request in requests} == {200}

    asyncio.run(test())


@run
async def test_a_full_queue_is_a_429_and_a_long_wait_a_503_and_both_have_a_retry_after() -> None:
    settings: dict[str, Any] = {"max_per_decode": 1, "queue_limit": 1, "queue_timeout_s": 0.5}
    async with prefill(mode=WRITE) as p, decode(wait_for_ever, mode=WRITE) as d, routing(p, d, **settings) as router:
        first = asyncio.create_task(router.post(BODY))
        await until(lambda: len(d.seen) == 1)
        second = asyncio.create_task(router.post(BODY))
        await queued(router, 1)
        status, headers, content = await router.post(BODY)
        assert (status, json.loads(content)["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) > 0
        status, headers, content = await second
        assert (status, json.loads(content)["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) > 0
        assert await router.metric("kvbaton_router_queue_timeouts_total") == 1
        assert await router.metric("kvbaton_router_queue_refusals_total") == 1
        first.cancel()


@run
async def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    gate = Gate()
    async with prefill(mode=WRITE) as p, decode(gate, mode=WRITE) as d, routing(p, d, max_per_decode=1) as router:
        first = asyncio.create_task(router.post(BODY))
        await until(lambda: len(d.seen) == 1)
        second = asyncio.create_task(router.post({"prompt": "gone"}))
        await queued(router, 1)
        second.cancel()
        await queued(router, 0)
        gate.open.set()
        assert (await first)[0] == 200
        assert (await router.post(BODY))[0] == 200
        assert "gone" not in gate.order


def nested(name: str, depth: int) -> bytes:
    return b'{"prompt":"x","%b":%b%b}' % (name.encode(), b"[" * depth, b"]" * depth)


LOOKED_AT_LATE = [
    b'{"prompt":"x","min_tokens":1E400}',
    b'{"prompt":"x","min_tokens":"\xff"}',
    b'{"prompt":"x","priority":1E400}',
]
ALMOST_TOO_DEEP = [nested(name, depth) for name in ("min_tokens", "priority", "prompt") for depth in range(930, 1000, 4)]


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_fields_that_are_found_malformed_late_leave_nothing_behind(dispatch: Dispatch) -> None:
    """Such a request has its seats already, or waits: both must be free again, and the queue must go on."""

    async def test() -> None:
        gate = Gate()
        p, d = prefill(decode_well, mode=WRITE, dispatch=dispatch), decode(gate, mode=WRITE, dispatch=dispatch)
        async with p, d, routing(p, d, max_per_decode=1, local_prefill_chars=1) as router:
            gate.open.set()
            for content in LOOKED_AT_LATE + ALMOST_TOO_DEEP:
                assert b'"bug"' not in (await router.post(content))[2], content[:40]
            gate.open.clear()
            first = asyncio.create_task(router.post(BODY))
            await until(lambda: d.running == 1)
            others = [asyncio.create_task(router.post(content)) for content in LOOKED_AT_LATE[:2] + ALMOST_TOO_DEEP]
            last = asyncio.create_task(router.post(BODY))
            async with asyncio.timeout(20):
                while await router.metric("kvbaton_router_in_flight_requests") < 3:
                    await asyncio.sleep(0.01)
            gate.open.set()
            assert [(await first)[0], (await last)[0]] == [200, 200]
            assert not [content for _, _, content in await asyncio.gather(*others) if b'"bug"' in content]
            await queued(router, 0)
            assert await router.metric("kvbaton_router_in_flight_requests") == 0
            assert {one["in_flight"] for one in json.loads((await router.get("/instances"))[2])["live"]} == {0}

    asyncio.run(test())


@run
async def test_a_priority_that_is_no_number_waits_like_any_other() -> None:
    gate = Gate()
    async with prefill(mode=WRITE) as p, decode(gate, mode=WRITE) as d, routing(p, d, max_per_decode=1) as router:
        first = asyncio.create_task(router.post({"prompt": "first"}))
        await until(lambda: len(d.seen) == 1)
        second = asyncio.create_task(router.post(b'{"prompt":"second","priority":1e400}'))
        await queued(router, 1)
        gate.open.set()
        assert [(await request)[0] for request in (first, second)] == [200, 200]
        await queued(router, 0)
        assert await router.metric("kvbaton_router_in_flight_requests") == 0


@run
async def test_what_vllm_takes_apart_is_computed_by_decode_alone() -> None:
    """A beam search is many requests inside vLLM, and its answer names no hand-off."""
    for mode in (READ, WRITE):
        async with prefill(mode=mode) as p, decode(mode=mode) as d, routing(p, d) as router:
            beams = {**BODY, "use_beam_search": True, "n": 2}
            status, headers, _ = await router.post(beams)
            assert (status, headers["x-kvbaton-mode"]) == (200, "local")
            assert (p.seen, d.seen[0].body) == ([], beams)
            assert (await router.post({**beams, "use_beam_search": False}))[1]["x-kvbaton-mode"] != "local"


@run
async def test_short_prompts_are_prefilled_by_decode() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d, local_prefill_chars=100) as router:
        status, headers, _ = await router.post({**BODY, "kv_transfer_params": {"remote_host": "6.6.6.6"}})
        assert (status, headers["x-kvbaton-mode"], "x-kvbaton-prefill" in headers) == (200, "local", False)
        assert p.seen == []
        assert d.seen[0].body == BODY
        assert (await router.post({**BODY, "prompt": "x" * 200}))[1]["x-kvbaton-mode"] == "push"
        assert await router.metric("kvbaton_router_local_prefills_total") == 1
        status, _, content = await router.get(f"/handoffs/{headers['x-kvbaton-transfer']}")
        assert status == 404
        assert b"prefilled it by itself" in content


@run
async def test_every_rank_is_used_and_named_to_both_instances() -> None:
    async with prefill(mode=WRITE, dp_size=2, tp_size=2) as p, decode(mode=WRITE, dp_size=4) as d, routing(p, d) as router:
        for _ in range(16):
            assert (await router.post(BODY, headers={"X-Data-Parallel-Rank": "9"}))[0] == 200
    assert {seen.headers["x-data-parallel-rank"] for seen in p.seen} == {"0", "1"}
    assert {seen.headers["x-data-parallel-rank"] for seen in d.seen} == {"0", "1", "2", "3"}
    ranks = {seen.body["kv_transfer_params"]["transfer_id"]: seen.headers["x-data-parallel-rank"] for seen in p.seen}
    for seen in d.seen:
        params = seen.body["kv_transfer_params"]
        assert (params["remote_dp_size"], params["remote_tp_size"]) == (2, 2)
        assert str(params["remote_dp_rank"]) == ranks[params["transfer_id"]]


@run
async def test_keys_are_asked_for_and_not_passed_on() -> None:
    settings: dict[str, Any] = {"api_keys": ("secret", "other"), "instance_api_key": "theirs"}
    async with (
        prefill(mode=WRITE) as p,
        decode(mode=WRITE) as d,
        routing(p, d, headers={"Authorization": "Bearer other"}, **settings) as router,
    ):
        for header in ({"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": ""}):
            for path in ("/v1/completions", "/instances", "/handoffs"):
                status, headers, content = await router.post(BODY, path, headers=header)
                assert (status, json.loads(content)["error"]["code"]) == (401, "invalid_api_key")
                assert headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer", "BEARER "):
            assert (await router.post(BODY, headers={"Authorization": f"{scheme} secret"}))[0] == 200
        assert (await router.get("/health"))[0] == 200
        assert await router.metric("kvbaton_router_unauthorized_total") == 9
    for seen in (*p.seen, *d.seen):
        assert seen.headers["authorization"] == "Bearer theirs"


@run
async def test_metrics_are_for_holders_of_the_cluster_key_where_that_is_set() -> None:
    key = b"a key of the cluster"
    token = http_token(key)

    async def status(router: Router, headers: dict[str, str]) -> int:
        async with router.client.get("/metrics", headers=headers) as answer:
            return answer.status

    async with routing(cluster_key=key, keyed_metrics=True, api_keys=("secret",)) as router:
        wrong: tuple[dict[str, str], ...] = ({}, {HTTP_KEY_HEADER: "x"}, {HTTP_KEY_HEADER: http_token(b"another key here")})
        for headers in (*wrong, {"Authorization": "Bearer secret"}):
            assert await status(router, headers) == 401
        for headers in ({HTTP_KEY_HEADER: token}, {"Authorization": f"Bearer {token}"}):
            assert await status(router, headers) == 200
    async with routing(cluster_key=key) as router:
        assert await status(router, {}) == 200
    with pytest.raises(ConfigError, match="keyed_metrics is set, and there is no cluster key"):
        RouterSettings(keyed_metrics=True)


@run
async def test_headers_go_along_as_configured() -> None:
    sent = {
        "Authorization": "Bearer mine",
        "traceparent": TRACEPARENT,
        "tracestate": "x=1",
        "X-Custom": "no",
        "X-Session-Id": "s",
    }
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
        assert (await router.post(BODY, headers=sent))[0] == 200
    for seen in (*p.seen, *d.seen):
        assert seen.headers["authorization"] == "Bearer mine"
        assert (seen.headers["traceparent"], seen.headers["tracestate"], seen.headers["x-session-id"]) == (
            TRACEPARENT,
            "x=1",
            "s",
        )
        assert "x-custom" not in seen.headers
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d, forward_headers=("X-Custom",)) as router:
        assert (await router.post(BODY, headers=sent))[0] == 200
    assert p.seen[0].headers["x-custom"] == "no"
    assert "authorization" not in p.seen[0].headers


@run
async def test_a_session_stays_where_it_was() -> None:
    async with (
        prefill(mode=WRITE) as p1,
        prefill(mode=WRITE) as p2,
        decode(mode=WRITE) as d,
        routing(p1, p2, d, prefill_policy="prefix_affinity") as router,
    ):
        for session in ("a", "b", "c", "d", "e", "f"):
            served = {
                (await router.post({"prompt": str(n) * 700}, headers={"X-Session-Id": session}))[1]["x-kvbaton-prefill"]
                for n in range(5)
            }
            assert len(served) == 1
        assert p1.seen
        assert p2.seen


@run
async def test_sglang_instances_meet_in_a_room_that_only_the_router_chooses() -> None:
    async def prefill_in_room(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await decode_well(request, body)

    way: dict[str, Any] = {"mode": WRITE, "dispatch": Dispatch.BOOTSTRAP}
    async with prefill(prefill_in_room, bootstrap_port=8998, **way) as p, decode(**way) as d, routing(p, d) as router:
        evil = {"bootstrap_host": "6.6.6.6", "bootstrap_room": 1, "bootstrap_port": 1}
        for path, body in (
            ("/v1/completions", {**BODY, **evil}),
            ("/v1/chat/completions", {"messages": [], "stream": True, **evil}),
            ("/generate", {"text": "hello", "stream": True}),
            ("/v1/completions", {**BODY, "prompt": ["a", "b", "c"]}),
        ):
            status, _, content = await router.post(body, path)
            assert status == 200, content
        assert [seen.path for seen in p.seen] == [seen.path for seen in d.seen]
        for first, second in zip(p.seen, d.seen, strict=True):
            assert first.raw == second.raw
            assert "kv_transfer_params" not in first.body
        rooms = [seen.body["bootstrap_room"] for seen in d.seen]
        assert len({rooms[0], rooms[1], rooms[2], *rooms[3]}) == 6
        assert all(0 <= room < 2**63 for room in (*rooms[:3], *rooms[3]))
        assert d.seen[0].body["bootstrap_host"] == "127.0.0.1"
        assert d.seen[0].body["bootstrap_port"] == 8998
        assert d.seen[3].body["bootstrap_port"] == [8998] * 3
        assert d.seen[0].body["max_tokens"] == p.seen[0].body["max_tokens"] == 16


@run
async def test_instances_of_two_engines_are_paired_where_they_state_the_same_model() -> None:
    sglang: dict[str, Any] = {"dispatch": Dispatch.BOOTSTRAP}
    common: dict[str, Any] = {"mode": WRITE, "fingerprint": "one"}
    async with prefill(**common) as p, decode(**common, **sglang) as d, routing(p, d) as router:
        status, _, content = await router.post({**BODY, "bootstrap_room": 5})
        assert status == 200, content
        source, target = p.seen[0].body, d.seen[0].body
        transfer_id = source["kv_transfer_params"]["transfer_id"]
        assert source["kv_transfer_params"]["do_remote_decode"]
        assert "bootstrap_room" not in source
        assert transfer_id == f"tx-{target['bootstrap_room']:032x}"
        assert "kv_transfer_params" not in target
    sglang["bootstrap_port"] = 8998
    async with prefill(decode_well, **common, **sglang) as p, decode(**common) as d, routing(p, d) as router:
        status, _, content = await router.post(BODY)
        assert status == 200, content
        source, target = p.seen[0].body, d.seen[0].body
        assert target["kv_transfer_params"]["transfer_id"] == f"tx-{source['bootstrap_room']:032x}"
        assert target["kv_transfer_params"]["do_remote_prefill"]
        assert source["bootstrap_port"] == 8998


@run
async def test_generate_is_for_sglang_instances_only() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
        status, _, content = await router.post({"text": "x"}, "/generate")
        assert (status, json.loads(content)["error"]["code"]) == (503, "no_instance")
        assert p.seen == d.seen == []


@run
async def test_the_router_finishes_what_it_has_when_it_is_asked_to_stop() -> None:
    gate = Gate()
    async with prefill(mode=WRITE) as p, decode(gate, mode=WRITE) as d, routing(p, d) as router:
        request = asyncio.create_task(router.post({**BODY, "stream": True}))
        await until(lambda: len(d.seen) == 1)
        router.task.cancel()
        await asyncio.sleep(0.2)
        with pytest.raises(OSError, match=r"refused|Connect"):
            await asyncio.open_connection("127.0.0.1", router.settings.port)
        assert not request.done()
        gate.open.set()
        status, headers, content = await request
        assert (status, headers["connection"]) == (200, "close")
        assert content.endswith(b"[DONE]\n\n")
        await asyncio.wait([router.task], timeout=20)
        assert router.task.done()


@run
async def test_a_request_that_is_half_in_is_finished_too() -> None:
    content = json.dumps(BODY).encode()
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.settings.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content[:9])
        )
        await asyncio.sleep(0.1)
        router.task.cancel()
        await asyncio.sleep(0.2)
        writer.write(content[9:])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


def test_requests_that_wait_for_a_seat_are_finished_without_discovery(tmp_path: Path) -> None:
    path = tmp_path / "instances.json"

    async def test() -> None:
        gate = Gate()
        settings: dict[str, Any] = {"max_per_decode": 1, "expire_after_s": 0.3, "instances_file": path}
        async with prefill(mode=WRITE) as p, decode(gate, mode=WRITE) as d:
            path.write_text("[]")
            async with routing(**settings) as router:
                path.write_bytes(msgspec.json.encode([one.registration() for one in (p, d)]))
                while (await router.get("/health"))[0] != 200:
                    await asyncio.sleep(0.01)
                requests = [asyncio.create_task(router.post(BODY)) for _ in range(2)]
                await queued(router, 1)
                router.task.cancel()
                await asyncio.sleep(0.8)
                gate.open.set()
                assert [(await request)[0] for request in requests] == [200, 200]

    asyncio.run(test())


@run
async def test_a_drain_has_an_end() -> None:
    async with prefill(mode=WRITE) as p, decode(wait_for_ever, mode=WRITE) as d, routing(p, d, drain_timeout_s=0.3) as router:
        request = asyncio.create_task(router.post(BODY))
        await until(lambda: len(d.seen) == 1)
        router.task.cancel()
        await asyncio.wait([router.task], timeout=20)
        assert router.task.done()
        await until(lambda: d.is_idle)
        request.cancel()


@pytest.mark.parametrize("mode", [READ, WRITE])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(mode: TransferMode) -> None:
    """A thousand clients that go away at random moments: in the queue, in prefill, between, in decode, in mid-stream."""
    generator = random.Random(3)

    async def slow_prefill(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(generator.random() * 0.01)
        params = {"do_remote_prefill": True, "transfer_id": body["kv_transfer_params"]["transfer_id"]}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    async def slow_decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream" if body.get("stream") else "application/json"}
        )
        await response.prepare(request)
        for _ in range(5):
            await asyncio.sleep(generator.random() * 0.01)
            await response.write(b"data: x\n\n")
        return response

    async def test() -> None:
        async with (
            prefill(slow_prefill, mode=mode) as p,
            decode(slow_decode, mode=mode) as d,
            routing(p, d, max_per_prefill=8) as router,
        ):

            async def one() -> None:
                request = asyncio.create_task(router.post({**BODY, "stream": generator.random() < 0.5}))
                await asyncio.wait([request], timeout=generator.random() * 0.06)
                request.cancel()
                await asyncio.wait([request])

            for _ in range(20):
                await asyncio.gather(*(one() for _ in range(50)))
            await until(lambda: p.is_idle and d.is_idle)
            for gauge in ("in_flight_requests", "queued_requests"):
                async with asyncio.timeout(20):
                    while await router.metric(f"kvbaton_router_{gauge}") != 0:
                        await asyncio.sleep(0.01)
            assert (await router.post(BODY))[0] == 200
            shown = json.loads((await router.get("/instances"))[2])["live"]
            assert [instance["in_flight"] for instance in shown] == [0, 0]

    asyncio.run(test())
