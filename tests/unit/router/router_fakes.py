"""Stand-ins for faulty instances, and a router on real sockets to put them behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import Dispatch, InstanceType, Registration, TransferMode
from kvbaton.router.app import serve_router
from kvbaton.router.settings import RouterSettings

DEADLINE_S = 20.0

Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def free_port() -> int:
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine, as one that is a function."""

    def wrapped() -> None:
        asyncio.run(test())

    wrapped.__name__ = test.__name__
    return wrapped


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


@dataclass
class Seen:
    """One request that reached an instance."""

    path: str
    headers: dict[str, str]
    raw: bytes
    body: dict[str, Any]


@dataclass
class FakeInstance:
    """An instance on a real port that does what `behave` does and remembers what it was sent."""

    kind: InstanceType
    behave: Behaviour
    port: int = field(default_factory=free_port)
    model: str = "m"
    fingerprint: str = "f"
    mode: TransferMode = TransferMode.READ
    tp_size: int = 1
    handoffs_address: str = ""
    dp_size: int = 1
    dispatch: Dispatch = Dispatch.HANDOFF
    bootstrap_port: int = 0
    seen: list[Seen] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    key: str | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0

    @property
    def is_idle(self) -> bool:
        return self.running == 0

    @property
    def http_address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def zmq_address(self) -> str:
        return f"host:127.0.0.1,handshake:{self.port},notify:{self.port}"

    def registration(self) -> Registration:
        return Registration(
            type=self.kind,
            http_address=self.http_address,
            zmq_address=self.zmq_address,
            transfer_mode=self.mode,
            tp_size=self.tp_size,
            dp_size=self.dp_size,
            dispatch=self.dispatch,
            bootstrap_port=self.bootstrap_port,
            incarnation=f"inc-{self.port}",
            model=self.model,
            fingerprint=self.fingerprint,
            handoffs_address=self.handoffs_address,
        )

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def stop_listening(self) -> None:
        """As a process that ends does first of all; connections that stand are kept."""
        for site in list(self._runner.sites):
            await site.stop()

    async def drop_idle(self) -> None:
        """Close every connection, as an instance does when they were idle for long."""
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            connection.force_close()
            if connection.transport is not None:
                connection.transport.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({}, status=401)
        if request.method == "DELETE":
            self.released.append(request.path)
            return web.json_response({})
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.seen.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, raw, body))
        self.running += 1
        try:
            return await self.behave(request, body)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1


async def prefill_well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": body["kv_transfer_params"]["transfer_id"]}
    return web.json_response({"id": "x", "choices": [], "kv_transfer_params": {**params, "remote_host": "127.0.0.1"}})


async def decode_well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.Response(body=b'{"id": "d",  "choices":[{"text":"\\u4f60"}]}', content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for word in ("one", "two"):
        await response.write(b'data: {"text":"%s"}\n\n' % word.encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def wait_for_ever(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


def answering(status: int, text: str, content_type: str = "application/json") -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type=content_type)

    return behave


async def reset_at_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def dying(instance: FakeInstance) -> Behaviour:
    """What an instance does whose process is ended by the request that it serves."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await instance.stop_listening()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return behave


async def reset_in_the_middle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    kind = "text/event-stream" if body.get("stream") else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    await response.write(b'data: {"text":"one"}\n\ndata: {"te')
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


def prefill(behave: Behaviour = prefill_well, **more: Any) -> FakeInstance:
    return FakeInstance(InstanceType.PREFILL, behave, **more)


def decode(behave: Behaviour = decode_well, **more: Any) -> FakeInstance:
    return FakeInstance(InstanceType.DECODE, behave, **more)


@dataclass
class Router:
    """A running router and a client of it."""

    settings: RouterSettings
    client: aiohttp.ClientSession
    task: asyncio.Task[None]
    announcers: dict[int, ThreadAnnouncer] = field(default_factory=dict)
    """Of each instance, by its port."""

    async def post(
        self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request to its end: status, headers (lower case), bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(path, data=data, headers=headers) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        async with self.client.get(path) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def metric(self, line: str) -> float:
        """The value of one line of /metrics; 0 when it is not there."""
        text = (await self.get("/metrics"))[2].decode()
        return next((float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(f"{line} ")), 0.0)


@asynccontextmanager
async def routing(*instances: FakeInstance, headers: dict[str, str] | None = None, **settings: Any) -> AsyncIterator[Router]:
    """A router to which `instances` have registered."""
    port = free_port()
    chosen = RouterSettings(port=port, discovery_port=_other(port), **settings)
    ready = asyncio.Event()
    task = asyncio.create_task(serve_router(chosen, ready.set))
    routers = [f"127.0.0.1:{chosen.discovery_port}"]
    announcers = [
        ThreadAnnouncer(i.registration(), routers, heartbeat_s=0.3, cluster_key=chosen.cluster_key) for i in instances
    ]
    try:
        await _ready(task, ready)
        for announcer in announcers:
            announcer.start()
        timeout = aiohttp.ClientTimeout(DEADLINE_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout, headers=headers) as client:
            router = Router(chosen, client, task, dict(zip((i.port for i in instances), announcers, strict=True)))
            await _registered(router, len(instances))
            yield router
    finally:
        for announcer in announcers:
            announcer.stop()
        task.cancel()
        await asyncio.wait([task])


def _other(port: int) -> int:
    other = free_port()
    return other if other != port else _other(port)


async def _ready(task: asyncio.Task[None], ready: asyncio.Event) -> None:
    waiter = asyncio.create_task(ready.wait())
    await asyncio.wait([task, waiter], timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        task.result()
    assert ready.is_set()


async def _registered(router: Router, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        kinds = [f'kvbaton_router_instances{{mode="{m}",type="{t}"}}' for t in ("prefill", "decode") for m in ("push", "pull")]
        while sum([await router.metric(kind) for kind in kinds]) != count:
            await asyncio.sleep(0.01)
