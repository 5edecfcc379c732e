"""Calls from the router to instances over kept connections; every failure is one PeerError.

A call that is closed before its end closes its connection at once: to an instance that means "abort this request".
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from kvbaton.discovery.registry import Instance
from kvbaton.errors import PeerError, PeerLost, ProtocolError
from kvbaton.router.http.call import Call, Caller
from kvbaton.router.http.messages import InstanceAnswer, request_head
from kvbaton.wire.tls import tls_reason

__all__ = ["Upstream", "fetch"]

# Below the 5 s after which uvicorn, which serves vLLM, closes an idle connection: a request that is sent while the instance
# closes would look like an instance that died of it.
_KEPT_S = 4.0
_MAX_KEPT = 1024
_PROBE_AFTER_S = 0.02
_PROBE_S = 1.0
_MAX_HEAD_BYTES = 64 * 1024
_EVENT_STREAM = b"text/event-stream"


@dataclass(slots=True, eq=False, repr=False)
class InstanceConnection(asyncio.Protocol):
    """One kept connection to an instance; it serves one call at a time."""

    _upstream: Upstream
    address: str
    idle_since: float = 0.0
    is_paused: bool = False
    is_usable: bool = False
    call: Call | None = None
    _parser: httptools.HttpResponseParser = field(init=False)
    _transport: asyncio.Transport | None = None
    _pieces: list[bytes] = field(default_factory=list)
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _status: int = 0
    _in_head: bool = True
    _head_bytes: int = 0
    _is_complete: bool = False
    _can_be_kept: bool = False
    _till_close: bool = False

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    def begin(self, call: Call, *, was_kept: bool) -> None:
        """Send a call's bytes."""
        assert self._transport is not None  # noqa: S101
        self.call = call
        self._headers = {}
        self._status, self._in_head, self._head_bytes, self._is_complete, self._till_close = 0, True, 0, False, False
        call.was_kept = was_kept
        call.start_on(self)
        self._transport.write(call.payload)
        call.payload = b""

    def drop(self) -> None:
        """Close at once; the call that it served is not notified."""
        self.call = None
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no further."""
        if self._transport is not None and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and self.is_paused:
            self.is_paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_usable = True

    def eof_received(self) -> None:
        """The instance sends nothing more; the connection closes itself."""
        self.is_usable = False

    def connection_lost(self, error: Exception | None) -> None:
        """The instance closed, or died; that ends an answer of unknown length, and breaks any other."""
        self._transport = None
        self.is_usable = False
        self._upstream.forget(self)
        call, self.call = self.call, None
        if call is None or call.is_over:
            return
        if error is None and self._till_close and not self._in_head:
            call.take_end(self._status, self._retry_after())
            return
        call.was_cut = True
        if self._in_head:
            call.lose(PeerLost(f"{call.name} closed the connection ({self._why_closed(call, error)})"))
        else:
            call.lose(PeerLost(f"{call.name} broke off in the middle of its answer"))

    def _why_closed(self, call: Call, error: Exception | None) -> str:
        """In TLS 1.3 a server looks at the client's certificate last, and its alert may be lost with the connection."""
        if isinstance(error, ssl.SSLError):
            return tls_reason(error)
        may_be_refused = self._upstream.is_encrypted and not call.was_kept
        hint = "; it may refuse the certificate of this router: has that expired, is its authority in the instance's ca.crt?"
        return f"{error or 'without an answer'}{hint if may_be_refused else ''}"

    def data_received(self, data: bytes) -> None:
        """Read on, and pass on in one piece what came in one piece."""
        call = self.call
        if call is None:
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            call.lose(ProtocolError(f"{call.name} answered something that is no HTTP: {error}"))
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                call.lose(ProtocolError(f"{call.name} answered with a head of more than {_MAX_HEAD_BYTES} bytes"))
            return
        pieces = self._pieces
        if pieces and not call.is_over:
            self._pieces = []
            call.take_piece(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._is_complete and self.call is call:
            self._complete(call)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are dropped."""
        if self._in_head:
            self._headers[name.lower()] = value or b""

    def on_headers_complete(self) -> None:
        """The head is in."""
        status = self._status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._headers = {}
            return
        self._in_head = False
        call, headers = self.call, self._headers
        if call is None:
            return
        kind = headers.get(b"content-type")
        self._till_close = not (b"content-length" in headers or b"transfer-encoding" in headers)
        if kind is None:
            return
        call.content_type = kind.decode("latin-1")
        if call.may_stream and status == 200 and kind.lower().startswith(_EVENT_STREAM):
            call.is_stream = True

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The answer is complete, unless it was an interim one."""
        if not 100 <= self._status < 200:
            self._is_complete = True
            self._can_be_kept = self._parser.should_keep_alive()

    def _complete(self, call: Call) -> None:
        self.call = None
        status, retry_after = self._status, self._retry_after() if b"retry-after" in self._headers else None
        if self._can_be_kept and self.is_usable:
            self._upstream.keep(self)
        else:
            self.drop()
        call.take_end(status, retry_after)

    def _retry_after(self) -> str | None:
        value = self._headers.get(b"retry-after")
        return None if value is None else value.decode("latin-1")


class Upstream:
    """The router's connections to instances. Nothing waits for a free one: a call opens its own when none is kept."""

    def __init__(
        self, connect_timeout_s: float, tls: ssl.SSLContext | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.is_encrypted = tls is not None
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._kept: defaultdict[str, deque[InstanceConnection]] = defaultdict(deque)
        self._open: set[InstanceConnection] = set()
        self._unsent: set[Call] = set()
        """Calls that wait for their connection; each other one is that of an open connection."""
        self._dialling: set[asyncio.Task[None]] = set()
        self._probes: dict[str, list[Callable[[bool], None]]] = {}

    def start(self, call: Call) -> None:
        """Send a call; its caller is notified later, never from within this."""
        call.address = call.address or call.instance.registration.http_address
        kept = self._kept.get(call.address)
        while kept:
            # The newest first: those that a smaller load does not need grow old, and are closed.
            connection = kept.pop()
            if connection.is_usable:
                connection.begin(call, was_kept=True)
                return
        self._unsent.add(call)
        self._spawn(self._dial(call))

    def probe(self, address: str, done: Callable[[bool], None]) -> None:
        """Find out whether a process listens at `address`, and call `done` with that, never from within this."""
        waiting = self._probes.setdefault(address, [])
        waiting.append(done)
        if len(waiting) == 1:
            self._spawn(self._probe(address))

    def keep(self, connection: InstanceConnection) -> None:
        """Keep a connection for the next call; the oldest go first when there are too many."""
        if connection.is_paused:
            connection.resume()
        connection.idle_since = self.clock()
        kept = self._kept[connection.address]
        kept.append(connection)
        if len(kept) > _MAX_KEPT:
            kept.popleft().drop()

    def forget(self, connection: InstanceConnection) -> None:
        """A connection is closed."""
        self._open.discard(connection)

    def sweep(self, now: float) -> None:
        """End calls that are too late, and close connections before the instances would do it in mid-call."""
        for call in self._under_way():
            call.check(now)
        for address, kept in list(self._kept.items()):
            while kept and (now - kept[0].idle_since >= _KEPT_S or not kept[0].is_usable):
                kept.popleft().drop()
            if not kept:
                del self._kept[address]

    async def close(self) -> None:
        """Give every call up and close every connection."""
        for task in tuple(self._dialling):
            task.cancel()
        for call in self._under_way():
            call.close()
        for connection in tuple(self._open):
            connection.drop()
        self._kept.clear()
        await asyncio.sleep(0)

    def _under_way(self) -> list[Call]:
        sent = [connection.call for connection in self._open if connection.call is not None]
        return [*self._unsent, *sent]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _probe(self, address: str) -> None:
        # A process that dies closes its sockets one after the other: the one that listens may outlive that of a call.
        await asyncio.sleep(_PROBE_AFTER_S)
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(_PROBE_S):
                loop = asyncio.get_running_loop()
                transport, _ = await loop.create_connection(asyncio.Protocol, host.strip("[]"), int(port))
            transport.abort()
            listens = True
        except (OSError, TimeoutError):
            listens = False
        for done in self._probes.pop(address):
            done(listens)

    async def _dial(self, call: Call) -> None:
        host, _, port = call.address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: InstanceConnection(self, call.address), host.strip("[]"), int(port), ssl=self._tls
                )
            self._open.add(connection)
            # The client may have left while we dialled; the connection is still good for another call.
            if call.is_over:
                self.keep(connection)
            else:
                connection.begin(call, was_kept=False)
        except TimeoutError:
            call.lose(PeerLost(f"{call.name} cannot be reached (no connection within {self._connect_timeout_s:g} s)"))
        except ssl.SSLError as error:
            call.lose(PeerLost(f"{call.name} cannot be reached ({tls_reason(error)})"))
        except OSError as error:
            call.lose(PeerLost(f"{call.name} cannot be reached ({error.strerror or error})"))
        except Exception as error:
            call.lose(PeerLost(f"{call.name} cannot be called ({error})"))
            raise
        finally:
            self._unsent.discard(call)


class _FetchCaller(Caller):
    """A caller that waits for a whole answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[InstanceAnswer] = asyncio.get_running_loop().create_future()

    def call_answered(self, call: Call, answer: InstanceAnswer) -> None:  # noqa: ARG002
        if not self.answer.done():
            self.answer.set_result(answer)

    def call_lost(self, call: Call, error: PeerError) -> None:  # noqa: ARG002
        if not self.answer.done():
            self.answer.set_exception(error)


async def fetch(
    upstream: Upstream,
    instance: Instance,
    path: str,
    timeout_s: float,
    max_bytes: int,
    address: str = "",
    lines: bytes = b"",
) -> InstanceAnswer:
    """Ask an instance for a page, at `address` if that is not where its API is; `lines` are more headers. Raises PeerError."""
    waiter = _FetchCaller()
    payload = request_head("GET", path, address or instance.http_address, 0, lines)
    call = Call(waiter, instance, payload, address=address, deadline=upstream.clock() + timeout_s, max_bytes=max_bytes)
    upstream.start(call)
    try:
        return await waiter.answer
    finally:
        call.close()
