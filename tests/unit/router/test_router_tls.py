"""Calls of the router to instances over HTTPS: certificates on both ends, and the reason where they do not fit."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.engines.embedded.server import start_server
from kvbaton.errors import PeerError
from kvbaton.launch.fleet import answers_ok
from kvbaton.launch.ports import PortPicker
from kvbaton.router.http.upstream import Upstream, fetch
from kvbaton.wire.certificates import make_certificate
from kvbaton.wire.tls import ClusterTls
from tls_files import expired_files, other_tls, our_tls


@asynccontextmanager
async def serving(tls: ClusterTls | None) -> AsyncIterator[Instance]:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="here")

    app, port = web.Application(), PortPicker().pick()
    for path in ("/health", "/metrics"):
        app.router.add_get(path, answer)
    runner = await start_server(app, "127.0.0.1", port, tls)
    registration = Registration(
        type=InstanceType.PREFILL, http_address=f"127.0.0.1:{port}", zmq_address="", transfer_mode=TransferMode.READ
    )
    try:
        yield Instance(registration, 0, 0)
    finally:
        await runner.cleanup()


async def ask(instance: Instance, tls: ClusterTls | None) -> bytes:
    upstream = Upstream(5.0, None if tls is None else tls.client)
    try:
        answer = await asyncio.wait_for(fetch(upstream, instance, "/metrics", 10.0, 1000), 20)
        return answer.content
    finally:
        await upstream.close()


def test_an_answer_comes_over_https() -> None:
    async def test() -> None:
        async with serving(our_tls()) as instance:
            assert await ask(instance, our_tls()) == b"here"
            url = f"https://{instance.http_address}/health"
            assert await asyncio.to_thread(answers_ok, url, our_tls().folder)
            assert not await asyncio.to_thread(answers_ok, url, other_tls().folder)

    asyncio.run(test())


def _expired() -> ClusterTls:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbaton.wire.tls._try_out", lambda *_: "")
        return ClusterTls(expired_files())


@pytest.mark.parametrize(
    ("instance_tls", "router_tls", "reason"),
    [
        (other_tls, our_tls, "the certificate of the peer is refused"),
        (_expired, our_tls, "the certificate of the peer is refused: certificate has expired"),
        (
            our_tls,
            _expired,
            "certificate of this side: it has expired|may refuse the certificate of this router: has that expired",
        ),
        (None, our_tls, "does not encrypt"),
        (our_tls, None, "closed the connection|answered something that is no HTTP"),
    ],
    ids=["another authority", "expired instance", "expired router", "plain instance", "plain router"],
)
def test_what_does_not_fit_is_refused_by_name(
    instance_tls: Callable[[], ClusterTls] | None, router_tls: Callable[[], ClusterTls] | None, reason: str
) -> None:
    async def test() -> None:
        async with serving(None if instance_tls is None else instance_tls()) as instance:
            with pytest.raises(PeerError, match=reason):
                await ask(instance, None if router_tls is None else router_tls())

    asyncio.run(test())


def test_a_client_without_a_certificate_reads_nothing_not_even_metrics() -> None:
    async def test() -> None:
        async with serving(our_tls()) as instance, aiohttp.ClientSession() as session:
            believing = ssl.create_default_context(cafile=str(our_tls().folder / "ca.crt"))
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
                await session.get(f"https://{instance.http_address}/metrics", ssl=believing)

    asyncio.run(test())


def test_new_certificates_are_used_without_a_restart(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    now = [0.0]
    tls = ClusterTls(tmp_path, lambda: now[0])

    async def test() -> None:
        async with serving(tls) as instance:
            assert await ask(instance, tls) == b"here"
            make_certificate(tmp_path, new_authority=True)
            make_certificate(tmp_path)
            (tmp_path / "ca.crt").write_bytes((tmp_path / "authority" / "ca.crt").read_bytes())
            now[0] += 2
            assert await ask(instance, ClusterTls(tmp_path)) == b"here"

    asyncio.run(test())
