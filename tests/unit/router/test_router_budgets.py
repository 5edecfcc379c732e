"""What one client may cost before it is served: bytes, chunks, requests ahead, JSON keys, depth; which heads are refused."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import decode, prefill, routing, run, until, wait_for_ever
from test_router_http import answer, exchange, raw

from kvbaton.discovery.messages import TransferMode
from kvbaton.errors import BadRequest
from kvbaton.router import json_scan
from kvbaton.router.allowed_hosts import AllowedHosts
from kvbaton.router.http.client_connection import ClientConnection
from kvbaton.router.http.messages import HttpRequest, Response
from kvbaton.router.settings import RouterSettings

WRITE = TransferMode.WRITE
MIB = 1024 * 1024
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def message_of(content: bytes) -> str:
    return str(json.loads(content)["error"]["message"])


class QuietServer:
    """A server that never answers what it is given."""

    is_draining = False
    held_bytes = 0

    def __init__(self, **settings: Any) -> None:
        self.settings = RouterSettings(**settings)
        self.clock = time.monotonic
        self.requests: list[HttpRequest] = []

    def admit(self, connection: ClientConnection) -> bool:  # noqa: ARG002
        return True

    def discard(self, connection: ClientConnection) -> None: ...

    def check_head(self, path: str, headers: Mapping[bytes, bytes]) -> Response | None:  # noqa: ARG002
        return None

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:  # noqa: ARG002
        self.requests.append(request)

    def count(self, path: str, status: int) -> None: ...


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> None: ...

    def close(self) -> None: ...

    abort = close


def connected(server: QuietServer) -> tuple[ClientConnection, Wire]:
    connection, wire = ClientConnection(server), Wire()
    connection.connection_made(cast(asyncio.Transport, wire))
    return connection, wire


@pytest.mark.parametrize("size", [1, 2, 3, 15])
def test_chunks_that_are_smaller_than_their_framing_are_refused(size: int) -> None:
    server = QuietServer()
    connection, wire = connected(server)
    connection.data_received(CHUNKED)
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    tracemalloc.start()
    for _ in range(100):
        connection.data_received(chunk * 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert wire.written.startswith(b"HTTP/1.1 400 ")
    assert b"chunks of the body are too small" in wire.written
    assert peak < MIB
    assert server.held_bytes == 0


def test_a_body_in_many_chunks_is_held_once() -> None:
    server = QuietServer()
    connection, _ = connected(server)
    connection.data_received(CHUNKED)
    chunk = b"20\r\n%b\r\n" % (b" " * 32)
    tracemalloc.start()
    for _ in range(100):
        connection.data_received(chunk * 1311)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert server.held_bytes == 100 * 1311 * 32
    assert peak < 2.5 * server.held_bytes
    connection.data_received(b"0\r\n\r\n")
    assert len(server.requests[0].body) == 100 * 1311 * 32


def test_bodies_ahead_of_their_answers_are_bounded_together() -> None:
    server = QuietServer()
    connection, _ = connected(server)
    connection.data_received(post(b" " * 8 * MIB))
    assert len(server.requests) == 1
    for _ in range(16):
        connection.data_received(post(b" " * 300_000))
    assert server.held_bytes == 8 * MIB
    connection.connection_lost(None)
    assert server.held_bytes == 0


@run
async def test_a_request_does_not_overtake_one_that_was_sent_ahead() -> None:
    """The third arrives after the first was answered, and before the loop has come to the second."""
    server = QuietServer()
    connection, _ = connected(server)
    connection.data_received(post(b"first"))
    connection.data_received(post(b"second"))
    connection.send_raw(200, "text/plain", b"", b"")
    connection.data_received(post(b"third"))
    await asyncio.sleep(0)
    connection.send_raw(200, "text/plain", b"", b"")
    await asyncio.sleep(0)
    assert [request.body for request in server.requests] == [b"first", b"second", b"third"]


@run
async def test_bodies_of_all_clients_are_bounded_together_and_small_ones_go_on() -> None:
    body = b'{"prompt":"%b"}' % (b"x" * 200_000)
    p, d = prefill(mode=WRITE), decode(wait_for_ever, mode=WRITE)
    async with p, d, routing(p, d, max_held_bytes=300_000) as router, raw(router) as (_, one):
        one.write(post(body))
        await until(lambda: d.running == 1)
        status, headers, content = await exchange(router, post(body))
        assert (status, "max_held_bytes" in message_of(content)) == (429, True)
        assert "retry-after" in headers
        async with raw(router) as (_, small):
            small.write(post(b'{"prompt":"hello"}'))
            await until(lambda: d.running == 2)


@run
async def test_a_key_is_checked_before_the_body_is_read() -> None:
    async with routing(api_keys=("key",), headers={"Authorization": "Bearer key"}) as router:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\nExpect: 100-continue\r\n\r\n"
        async with raw(router) as (reader, writer):
            writer.write(head)
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"], headers["www-authenticate"]) == (401, "close", "Bearer")
            assert await reader.read() == b""
        assert await router.metric("kvbaton_router_unauthorized_total") == 1


@run
async def test_millions_of_keys_do_not_stop_the_loop() -> None:
    body = b"{" + b",".join(b'"%d":0' % number for number in range(2_400_000)) + b"}"
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
        async with asyncio.timeout(20), raw(router) as (reader, writer):
            writer.write(post(body))
            slowest, done = 0.0, asyncio.create_task(answer(reader))
            while not done.done():
                before = time.monotonic()
                await asyncio.sleep(0.005)
                slowest = max(slowest, time.monotonic() - before)
        status, _, content = await done
        assert (status, "max_json_keys" in message_of(content)) == (400, True)
        assert slowest < 1.0
        assert p.seen == []


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}", "max_json_depth"),
        (b'{"prompt":' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", "max_json_depth"),
        (b"[" * 30 * MIB, "max_json"),
        (b'{"prompt":[' + b",".join(b'"\\\\":[]' for _ in range(70_000)) + b"]}", "max_json_keys"),
        (b'{"a":{' + b",".join(b'"\\\\" : 1' for _ in range(70_000)) + b"}}", "max_json_keys"),
    ],
)
def test_too_much_structure_is_refused_with_the_limit(body: bytes, limit: str) -> None:
    async def test() -> None:
        async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
            status, _, content = await exchange(router, post(body))
            assert (status, limit in message_of(content)) == (400, True)
            assert p.seen == d.seen == []

    asyncio.run(test())


@pytest.mark.parametrize(
    "prompt",
    [
        "[{" * 100_000,
        json.dumps({str(number): [number] for number in range(50_000)}),
        "a: " * 100_000,
        '\\"' * 100_000,
        [[number] * 100 for number in range(1024)],
    ],
    ids=["brackets", "JSON in a string", "colons", "escapes", "token ids"],
)
def test_what_stands_in_strings_is_no_structure(prompt: Any) -> None:
    async def test() -> None:
        async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d) as router:
            status, _, _ = await router.post({"prompt": prompt})
            assert status == 200
            assert p.seen[0].body["prompt"] == prompt

    asyncio.run(test())


_JSON = st.recursive(
    st.text(alphabet='a"\\:[]{} ,', max_size=12) | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\:[]{}', max_size=4), inner, max_size=4),
    max_leaves=30,
)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _keys(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return (len(value) if isinstance(value, dict) else 0) + sum(map(_keys, inner))


def _containers(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + sum(map(_containers, inner))


def test_a_scan_ends_at_the_bracket_that_closes_nothing() -> None:
    """A parser stops there, so that megabytes of such brackets behind it are not looked at."""
    assert len(list(json_scan.scan(b"{" * 65 + b"]" * 4 * MIB, 128, 1000))) == 0
    assert len(list(json_scan.scan(b"{" * 65 + b" " * 4 * MIB, 128, 1000))) == 65


@given(_JSON, st.integers(1, 12), st.integers(1, 12), st.integers(1, 40), st.booleans())
def test_a_scan_finds_what_a_parser_would(value: Any, max_depth: int, max_keys: int, slice_bytes: int, is_spaced: bool) -> None:
    body = json.dumps(value, separators=(" , ", " : ") if is_spaced else None).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_scan, "_SLICE_BYTES", slice_bytes)
        try:
            for _ in json_scan.scan(body, max_depth, max_keys):
                pass
        except BadRequest as error:
            refused = str(error)
        else:
            refused = ""
    is_wide = max(_keys(value), _containers(value)) > max_keys
    assert ("max_json_keys" in refused) == is_wide or "max_json_depth" in refused
    if not is_wide:
        assert _depth(value) <= max_depth or refused
        assert not refused or _depth(value) > max_depth // 2
    if json_scan.is_simple(body, max_depth, max_keys) and len(body) >= 2 * max_depth:
        assert "max_json_depth" not in refused


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (b"GET /health\r\n\r\n", ""),
        (b"GET /health HTTP/0.9\r\nHost: localhost\r\n\r\n", ""),
        (b"GET /health HTTP/1.1\r\n\r\n", "no Host header"),
        (b"GET /health HTTP/1.0\r\n\r\n", "no Host header"),
        (b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", "no Host header"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", "two Host headers"),
        (b"GET /health HTTP/1.0\r\nHost: a\r\nhost: b\r\n\r\n", "two Host headers"),
    ],
)
def test_heads_that_name_no_single_host_are_refused(head: bytes, complaint: str) -> None:
    async def test() -> None:
        async with routing() as router:
            status, _, content = await exchange(router, head)
            assert status == 400
            assert complaint in message_of(content)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("listens", "path", "host", "origin", "is_allowed"),
    [
        ("127.0.0.1", "/", "127.0.0.1:8000", None, True),
        ("127.0.0.1", "/", "localhost:8000", "http://localhost:8000", True),
        ("127.0.0.1", "/", "[::1]:8000", "http://[::1]:8000", True),
        ("127.0.0.1", "/", "evil.example:8000", None, False),
        ("127.0.0.1", "/instances", "evil.example:8000", None, False),
        ("127.0.0.1", "/v1/completions", "127.0.0.1:8000", "https://evil.example", False),
        ("127.0.0.1", "/v1/completions", "127.0.0.1:8000", "null", False),
        ("127.0.0.1", "/v1/completions", "127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("127.0.0.1", "/", "chat.example", "https://chat.example", True),
        ("192.0.2.7", "/v1/completions", "router.cluster:8000", None, True),
        ("192.0.2.7", "/v1/completions", "router.cluster:8000", "http://router.cluster:8000", False),
        ("192.0.2.7", "/", "router.cluster:8000", None, False),
        ("192.0.2.7", "/page/chat.js", "192.0.2.7:8000", None, True),
    ],
)
def test_pages_of_other_sites_are_refused(listens: str, path: str, host: str, origin: str | None, is_allowed: bool) -> None:
    hosts = AllowedHosts(listens, ["chat.example"])
    headers = {b"host": host.encode()} | ({} if origin is None else {b"origin": origin.encode()})
    for _ in range(2):
        refusal = hosts.refusal(path, headers)
        assert (refusal is None) == is_allowed
        assert is_allowed or "--allow-host" in str(refusal)


@run
async def test_a_page_of_another_site_reaches_nothing() -> None:
    async with routing(allow_hosts=("chat.example",)) as router:
        for path, headers, status in (
            ("/", {"Host": "evil.example"}, 403),
            ("/", {"Host": "chat.example"}, 200),
            ("/instances", {"Host": "evil.example"}, 403),
            ("/instances", {"Origin": "http://evil.example"}, 403),
        ):
            async with router.client.get(path, headers=headers) as got:
                assert got.status == status
