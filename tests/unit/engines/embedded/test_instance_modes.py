"""Whole instances of the tiny model behind a router, in one process: push and pull, over tcp, on every kind of address."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web

from kvbaton.config import HTTP_KEY_HEADER, HandoffSettings, Limits, Trust, http_token
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.handoff import Mode
from kvbaton.discovery.advertise import advertised_host, numeric_host
from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.engines.embedded.engine import EngineSettings
from kvbaton.engines.embedded.instance import InstanceSettings, Role, serve_instance
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker
from kvbaton.router.app import serve_router
from kvbaton.router.settings import RouterSettings

T = TypeVar("T")

DEADLINE_S = 60.0
TRIES = 3
KEY = Trust(key=b"k" * 32)
TOKEN = http_token(b"k" * 32)
PROMPT = list(range(3, 60))
EVERYWHERE = "0.0.0.0"  # noqa: S104


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class Host:
    """Where an instance listens, and what it says about that."""

    host: str
    advertise: str | None = None


HOSTS = [
    Host("127.0.0.1"),
    Host("localhost"),
    Host(EVERYWHERE, "127.0.0.1"),
    pytest.param(Host("::1"), marks=pytest.mark.skipif(not _has_ipv6(), reason="THIS MACHINE HAS NO ::1: not tried")),
    pytest.param(Host("::", "::1"), marks=pytest.mark.skipif(not _has_ipv6(), reason="THIS MACHINE HAS NO ::1: not tried")),
]


def run(test: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Like `asyncio.run`, and once more where another process took a port between its choice and its use."""
    for left in reversed(range(TRIES)):
        try:
            return asyncio.run(test())
        except ConfigError as error:
            if not left or "in use" not in str(error):
                raise
    raise AssertionError


class Setup:
    """A router and the instances started behind it; ended, each by its own cancellation, by `end`."""

    def __init__(self, host: Host, mode: Mode, transport: str = "tcp", *, drop_writes: bool = False) -> None:
        self.ports = PortPicker()
        self.router = RouterSettings(port=self.ports.pick(), discovery_port=self.ports.pick(), instance_api_key=TOKEN)
        self.tasks: list[asyncio.Task[None]] = []
        self.said: list[str] = []
        self._host = host
        self._handoff = HandoffSettings(mode)
        self._transport = transport
        self._drop_writes = drop_writes

    async def start_router(self) -> None:
        ready = asyncio.Event()
        serving, listening = asyncio.create_task(serve_router(self.router, ready.set)), asyncio.create_task(ready.wait())
        self.tasks.append(serving)
        await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        self.check()

    def start(self, role: Role, limits: Limits | None = None) -> InstanceSettings:
        routers = () if role == "both" else (f"127.0.0.1:{self.router.discovery_port}",)
        settings = InstanceSettings(
            role=role,
            model="tiny",
            host=self._host.host,
            port=self.ports.pick(),
            control_host=numeric_host(self._host.host),
            control_port=self.ports.pick(),
            transport=self._transport,
            routers=routers,
            blocks=64,
            block_tokens=16,
            limits=limits or Limits(),
            engine=EngineSettings(poison=True, handoff=self._handoff),
            trust=KEY,
            handoff=self._handoff,
            drop_writes=self._drop_writes,
            advertise_host=advertised_host(self._host.host, self._host.advertise, routers),
        )
        self.tasks.append(asyncio.create_task(serve_instance(settings, self.said.append)))
        return settings

    def check(self) -> None:
        """Raise what ended a part of the system."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


@asynccontextmanager
async def setup(host: Host, mode: Mode, transport: str = "tcp", **more: Any) -> AsyncIterator[Setup]:
    made = Setup(host, mode, transport, **more)
    async with asyncio.timeout(DEADLINE_S):
        await made.start_router()
        try:
            yield made
        finally:
            await made.end()


async def complete(session: aiohttp.ClientSession, address: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    async with session.post(f"http://{address}/v1/completions", json=body, headers={HTTP_KEY_HEADER: TOKEN}) as answer:
        return answer.status, await answer.json()


async def until_healthy(system: Setup, session: aiohttp.ClientSession, address: str) -> None:
    """Wait for it, and say what was seen last when it takes too long or when a part of the system has ended."""
    seen = "nothing"
    give_up_at = time.monotonic() + DEADLINE_S / 2
    while True:
        try:
            async with session.get(f"http://{address}/health") as answer:
                if answer.status == 200:
                    return
                seen = await answer.text()
        except aiohttp.ClientError as error:
            seen = repr(error)
        system.check()
        assert time.monotonic() < give_up_at, f"{address} is not healthy: {seen}; instances said {system.said}"
        await asyncio.sleep(0.02)


async def _is_idle(session: aiohttp.ClientSession, address: str) -> bool:
    async with session.get(f"http://{address}/metrics") as metrics:
        text = await metrics.text()
    return all(f'kvbaton_blocks{{state="{state}"}} 0.0' in text for state in ("in_use", "held"))


async def until_idle(session: aiohttp.ClientSession, address: str) -> None:
    """Wait until all blocks are back."""
    while not await _is_idle(session, address):
        await asyncio.sleep(0.02)


async def until_busy(session: aiohttp.ClientSession, address: str) -> None:
    """Wait until some blocks are taken."""
    while await _is_idle(session, address):
        await asyncio.sleep(0.02)


async def _is_the_same(host: Host, mode: Mode, transport: str, *, drop_writes: bool = False) -> bool:
    """Whether a pair and a single instance answer the same; checks that the pair really handed over, in that mode."""
    async with setup(host, mode, transport, drop_writes=drop_writes) as system, aiohttp.ClientSession() as session:
        alone = system.start("both")
        system.start("prefill")
        decode = system.start("decode")
        router = f"127.0.0.1:{system.router.port}"
        for address in (router, f"127.0.0.1:{alone.port}" if host.host == EVERYWHERE else alone.http_address):
            await until_healthy(system, session, address)
        async with session.get(f"http://{router}/instances") as answer:
            known = {instance["type"]: instance for instance in (await answer.json())["live"]}
        assert {i["transfer_mode"] for i in known.values()} == {"WRITE" if mode is Mode.PUSH else "READ"}
        assert known["D"]["http_address"] == f"{in_url(host.advertise or host.host)}:{decode.port}"
        assert known["D"]["zmq_address"] == str(decode.control_address)
        status, paired = await complete(session, router)
        assert status == 200, paired
        record = paired["kvbaton"]
        assert (record["handed_off"], record["recomputed"], record["transport"]) == (True, False, transport)
        assert record["bytes_moved"] == record["bytes_planned"] > 0
        _, single = await complete(session, alone.http_address)
        return bool(paired["choices"][0]["text"] == single["choices"][0]["text"])


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.host)
def test_a_cache_is_handed_over_whatever_the_address_looks_like(host: Host, mode: Mode) -> None:
    assert run(partial(_is_the_same, host, mode, "tcp"))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_the_control_that_moves_nothing_is_found_out(transport: str, mode: Mode) -> None:
    assert run(partial(_is_the_same, Host("127.0.0.1"), mode, "local"))
    assert not run(partial(_is_the_same, Host("127.0.0.1"), mode, transport, drop_writes=True))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("source", ["no listener there", "a source that knows nothing of it"])
def test_a_target_without_a_source_fails_in_bounded_time_and_says_whom_it_waited_for(source: str, mode: Mode) -> None:
    impatient = Limits(transfer_timeout=1.0, defer_timeout=1.5, stop_timeout=0.3, retry=0.1)

    async def test() -> None:
        async with setup(Host("127.0.0.1"), mode) as system, aiohttp.ClientSession() as session:
            decode, prefill = system.start("decode", impatient), system.start("prefill", impatient)
            for address in (decode.http_address, prefill.http_address):
                await until_healthy(system, session, address)
            port = prefill.control_port if source.startswith("a source") else system.ports.pick()
            params = {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_host": "127.0.0.1", "remote_port": port}
            status, answer = await complete(session, decode.http_address, kv_transfer_params=params)
            assert (status, answer["error"]["type"]) == (502, "handoff_failed")
            assert f"hand-off tx-1/0.0 from host:127.0.0.1,handshake:{port}" in answer["error"]["message"]
            await until_idle(session, decode.http_address)
            assert (await complete(session, decode.http_address))[0] == 200

    run(test)


@asynccontextmanager
async def refusing_prefill(system: Setup, refuse_when: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """A prefill instance that says 400 once `refuse_when` is over, and whose control port has no listener."""

    async def refuse(request: web.Request) -> web.Response:
        await refuse_when()
        return web.json_response({"error": {"message": "not today"}}, status=400)

    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port, control = system.ports.pick(), ControlAddress.of("127.0.0.1", system.ports.pick())
    await web.TCPSite(runner, "127.0.0.1", port).start()
    registration = Registration(
        type=InstanceType.PREFILL,
        http_address=f"127.0.0.1:{port}",
        zmq_address=str(control),
        transfer_mode=TransferMode.WRITE,
    )
    try:
        with ThreadAnnouncer(registration, [f"127.0.0.1:{system.router.discovery_port}"]):
            yield
    finally:
        await runner.cleanup()


def test_a_prefill_that_fails_frees_the_target_long_before_its_timeout() -> None:
    patient = Limits(transfer_timeout=10 * DEADLINE_S, defer_timeout=20 * DEADLINE_S)

    async def test() -> None:
        async with setup(Host("127.0.0.1"), Mode.PUSH) as system, aiohttp.ClientSession() as session:
            decode = system.start("decode", patient)
            router = f"127.0.0.1:{system.router.port}"
            async with refusing_prefill(system, lambda: until_busy(session, decode.http_address)):
                await until_healthy(system, session, router)
                status, answer = await complete(session, router)
            assert (status, answer) == (400, {"error": {"message": "not today"}})
            await until_idle(session, decode.http_address)

    run(test)
