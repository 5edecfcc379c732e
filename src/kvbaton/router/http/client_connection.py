"""One client's connection: reads requests within limits, serves them one after another, and writes answers.

It goes on reading while a request is served, because a client that hangs up is noticed by nothing else; what a client
sends ahead is bounded. What is no HTTP, or too much of it, gets a 4xx and the connection is closed; what the head alone
shows, such as a missing API key, before the body is read.

Every byte of a body that is large, or sent ahead, is counted from its arrival until its request is answered: against the limit
of one body, against that of what a connection sends ahead, and against that of all connections together. A body is one buffer
however many chunks it comes in, and chunks that are much smaller than their own framing are refused.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools

from kvbaton.router.answers import error_response
from kvbaton.router.http.messages import HttpRequest, Response, head_lines, status_line
from kvbaton.router.settings import RouterSettings

__all__ = ["ClientConnection", "ConnectionServer", "RequestOwner"]

_logger = logging.getLogger(__name__)

_WRITE_BUFFER_BYTES = 128 * 1024
# A close with unread bytes sends RST, which can destroy the answer in the client's buffers; so the client may finish sending.
_LINGER_S = 1.0
# Such a body is admitted when the others hold all that is allowed: the large ones of one client must not stop all others.
_SMALL_BYTES = 64 * 1024
# Each has a dictionary of headers: thousands of connections that send ahead and leave must stay small together.
_MAX_AHEAD = 4
_MAX_AHEAD_BYTES = 1024 * 1024
_MIN_CHUNK_BYTES = 16
_FREE_CHUNKS = 1024
_VERSIONS = frozenset(("1.0", "1.1"))
_HEADER_MARKS = len(b": \r\n")
_CHUNKED = b"Transfer-Encoding: chunked\r\nCache-Control: no-cache\r\n"


class RequestOwner(Protocol):
    """Serves the request that a connection is busy with."""

    def client_gone(self) -> None:
        """The client hung up; nothing can be sent any more."""

    def client_pauses(self) -> None:
        """The client reads too slowly; send nothing until it goes on."""

    def client_resumes(self) -> None:
        """The client has caught up."""


class ConnectionServer(Protocol):
    """What a connection needs of the server that accepted it."""

    settings: RouterSettings
    is_draining: bool
    held_bytes: int
    """Bytes of bodies that all connections hold."""
    clock: Callable[[], float]

    def admit(self, connection: ClientConnection) -> bool:
        """Take a new connection in; False when there are too many."""

    def discard(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""

    def check_head(self, path: str, headers: Mapping[bytes, bytes]) -> Response | None:
        """Why a request is refused before its body is read; None when it is not."""

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer a request, now or later."""

    def count(self, path: str, status: int) -> None:
        """An answer was sent."""


@dataclass(slots=True, eq=False, repr=False)
class ClientConnection(asyncio.Protocol):
    """A connection of `server`, which hands its requests out; the owner of the current request is notified about its client."""

    _server: ConnectionServer
    _max_head_bytes: int = field(init=False)
    _free_bytes: int = field(init=False)
    _parser: httptools.HttpRequestParser = field(init=False)
    _transport: asyncio.Transport | None = None
    _ahead: deque[HttpRequest] = field(default_factory=deque)
    _request: HttpRequest | None = None
    _owner: RequestOwner | None = None
    _refusal: Response | None = None
    _closing: bool = False
    _in_head: bool = False
    _is_receiving: bool = False
    _awaited: str = ""
    """What of the request that is coming in has a deadline: `head`, `body`, or nothing yet."""
    _head_bytes: int = 0
    _quiet_bytes: int = 0
    _counted_bytes: int = 0
    _ahead_bytes: int = 0
    _held_bytes: int = 0
    _chunks: int = 0
    _url: bytes = b""
    _path: str = ""
    _is_http_1_0: bool = False
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _body: bytes | bytearray = b""
    peer: bytes = b""
    """The address that the client connects from."""
    deadline: float | None = None
    stalled_since: float | None = None

    def __post_init__(self) -> None:
        self._max_head_bytes = self._server.settings.max_head_bytes
        self._free_bytes = min(_SMALL_BYTES, self._server.settings.max_body_bytes)
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        name = self._transport.get_extra_info("peername")
        self.peer = str(name[0]).encode() if name else b""
        if not self._server.admit(self):
            self._transport.abort()
            return
        self.deadline = self._server.clock() + self._server.settings.head_timeout_s

    # No eof_received: an HTTP client that only half-closes counts as gone, as with every other HTTP server.

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Notify the owner of the current request."""
        self._transport = None
        self._closing = True
        self._server.discard(self)
        self._release(self._held_bytes)
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.client_gone()

    def pause_writing(self) -> None:
        """The client reads slower than it is written to."""
        self.stalled_since = self._server.clock()
        if self._owner is not None:
            self._owner.client_pauses()

    def resume_writing(self) -> None:
        """The client has read what was waiting."""
        self.stalled_since = None
        if self._owner is not None:
            self._owner.client_resumes()

    def data_received(self, data: bytes) -> None:
        """Read on; whatever is wrong with the bytes ends in one 4xx.

        The parser buffers an unfinished header or trailer, of which no callback reports: those bytes are limited, too.
        """
        if self._closing:
            return
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrading the connection is not possible here")
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is no HTTP request: {error}")
        if self._quiet_bytes > self._max_head_bytes:
            self._refuse_head()
        if self._refusal is not None:
            self._close_with(self._refusal)
        elif self._is_receiving and self._request is None:
            self._set_deadline()

    def _set_deadline(self) -> None:
        """The rest of a request has to come in time: a head has one deadline, a body one from the end of its head on."""
        wanted = "head" if self._in_head else "body"
        if self._awaited != wanted:
            self._awaited = wanted
            settings = self._server.settings
            self.deadline = self._server.clock() + (settings.head_timeout_s if self._in_head else settings.client_timeout_s)

    def on_message_begin(self) -> None:
        """A request starts."""
        self._in_head = self._is_receiving = True
        self._head_bytes = self._quiet_bytes = 0
        self._counted_bytes = self._chunks = 0
        self._awaited = ""
        self._url = b""
        self._headers = {}
        self._body = b""

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._url += url
        self._quiet_bytes = 0
        self._head_bytes += len(url)
        if self._head_bytes > self._max_head_bytes:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are dropped."""
        self._quiet_bytes = 0
        self._head_bytes += len(name) + len(value) + _HEADER_MARKS
        if self._head_bytes > self._max_head_bytes:
            self._refuse_head()
        if self._in_head:
            name = name.lower()
            if name == b"host" and name in self._headers:
                self._refuse(400, "the request has two Host headers")
            self._headers[name] = value or b""

    def on_headers_complete(self) -> None:
        """The head is in: refuse what cannot be served before its body comes."""
        self._in_head = False
        headers, settings = self._headers, self._server.settings
        version = self._parser.get_http_version()
        self._is_http_1_0 = version == "1.0"
        self._path = self._url.partition(b"?")[0].decode("latin-1")
        if version not in _VERSIONS:
            self._refuse(400, f"HTTP/{version} is not supported; use HTTP/1.1")
        elif b"host" not in headers:
            # HTTP/1.0 does not require it, but what names no host cannot be checked against those that are allowed.
            self._refuse(400, "the request has no Host header")
        refusal = self._server.check_head(self._path, headers)
        if refusal is not None:
            self._refuse_with(refusal)
        length = headers.get(b"content-length")
        if length is not None and int(length) > settings.max_body_bytes:
            self._refuse(413, f"the body is too large: {length.decode()} bytes, and the limit is {settings.max_body_bytes}")
        if self._parser.should_upgrade():
            self._refuse(400, "upgrading the connection is not possible here")
        if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
            self._refuse(415, "Content-Encoding is not supported; send the body as it is")
        if b"expect" in headers and self._request is None and self._refusal is None:
            waits = headers[b"expect"].lower() == b"100-continue" and not self._is_http_1_0
            if waits:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        self._quiet_bytes = 0
        if self._refusal is not None or self._closing:
            return
        if not self._body:
            self._body = piece
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece
        self._chunks += 1
        if len(self._body) > self._free_bytes or self._chunks > _FREE_CHUNKS or self._request is not None:
            self._check_budgets()

    def on_message_complete(self) -> None:
        """A request is complete: serve it, or keep it until its turn comes."""
        self._is_receiving = False
        if self._refusal is not None or self._closing:
            return
        parser = self._parser
        method = parser.get_method().decode("latin-1")
        body = bytes(self._body)
        request = HttpRequest(method, self._path, self._headers, body, self._is_http_1_0, parser.should_keep_alive())
        self._headers, self._body = {}, b""
        if self._request is None and not self._ahead:
            self._serve(request)
        elif len(self._ahead) < _MAX_AHEAD:
            self._ahead.append(request)
            self._ahead_bytes += len(body)
        else:
            self._refuse(429, f"more than {_MAX_AHEAD} requests were sent ahead of their answers")

    def host(self, owner: RequestOwner) -> None:
        """From now on, notify `owner` about the client, which may still have earlier answers to read."""
        self._owner = owner
        if self.stalled_since is not None:
            owner.client_pauses()

    def send(self, response: Response) -> None:
        """Answer the current request."""
        self.send_raw(response.status, response.content_type, response.body, head_lines(response.headers))

    def send_raw(self, status: int, content_type: str, body: bytes, lines: bytes) -> None:
        """Answer the current request; `lines` are more headers, complete with line ends."""
        transport, request = self._transport, self._request
        if transport is None or request is None:
            return
        head = b"%bContent-Length: %d\r\n" % (_type_line(content_type), len(body))
        pieces = (status_line(status), head, lines, self._persistence(), b"\r\n", body)
        if not transport.is_closing():  # see `_write`
            transport.write(b"".join(pieces if request.method != "HEAD" else pieces[:-1]))
        self._finish(status)

    def begin_stream(self, content_type: str, lines: bytes, first: bytes) -> None:
        """Begin an answer whose end is not known yet, with its first bytes."""
        if self._transport is None or self._request is None:
            return
        kind = _type_line(content_type)
        if self._request.is_http_1_0:
            self._write(b"".join((status_line(200), kind, lines, b"Connection: close\r\n\r\n", first)))
            return
        chunk = b"%x\r\n%b\r\n" % (len(first), first) if first else b""
        self._write(b"".join((status_line(200), kind, lines, _CHUNKED, self._persistence(), b"\r\n", chunk)))

    def stream(self, piece: bytes) -> None:
        """Send more of a begun answer."""
        if self._transport is not None and self._request is not None and piece:
            self._transport.write(piece if self._request.is_http_1_0 else b"%x\r\n%b\r\n" % (len(piece), piece))

    def end_stream(self, *, is_whole: bool = True) -> None:
        """End a begun answer; one that is not whole also ends the connection."""
        if self._transport is None or self._request is None:
            return
        if not self._request.is_http_1_0:
            self._write(b"0\r\n\r\n")
        self._finish(200, keep=is_whole and not self._request.is_http_1_0)

    def _write(self, data: bytes) -> None:
        # A write that fails closes the transport, and `connection_lost` comes in a later turn of the loop. Answers of requests
        # that were sent ahead may still be written in this one, and asyncio logs a line for each.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """Close the connection as soon as no request is being served, or on its way in."""
        if self._request is None and self._transport is not None and not self._is_receiving:
            self._closing = True
            self._transport.close()

    def check(self, now: float) -> None:
        """End what has taken too long: a slow head or body, an idle connection, a client that does not read."""
        if self.stalled_since is not None and now - self.stalled_since >= self._server.settings.client_timeout_s:
            _logger.info("router: a client read nothing for %g s and is given up", now - self.stalled_since)
            self.abort()
        elif self.deadline is not None and now >= self.deadline:
            if self._is_receiving and not self._closing:
                self._close_with(error_response(408, "the request did not arrive in time"))
            else:
                self.abort()

    def _check_budgets(self) -> None:
        """Count the body, which is large or sent ahead, and refuse it when it is too much."""
        settings, size = self._server.settings, len(self._body)
        self._release(self._counted_bytes - size)
        self._counted_bytes = size
        if size > settings.max_body_bytes:
            self._refuse(413, f"the body is too large: more than {settings.max_body_bytes} bytes (max_body_bytes)")
        elif self._chunks > _FREE_CHUNKS and size < _MIN_CHUNK_BYTES * self._chunks:
            self._refuse(400, f"the chunks of the body are too small: fewer than {_MIN_CHUNK_BYTES} bytes on average")
        elif self._request is not None and self._ahead_bytes + size > _MAX_AHEAD_BYTES:
            self._refuse(429, f"more than {_MAX_AHEAD_BYTES} bytes were sent ahead of their answers")
        elif self._server.held_bytes > settings.max_held_bytes and size > _SMALL_BYTES:
            message = f"the bodies of all requests hold {settings.max_held_bytes} bytes (max_held_bytes); try again"
            self._refuse_with(error_response(429, message, code="overloaded", headers={"Retry-After": "2"}))

    def _release(self, size: int) -> None:
        self._held_bytes -= size
        self._server.held_bytes -= size

    def _serve(self, request: HttpRequest) -> None:
        self._request = request
        self.deadline = None
        try:
            self._server.handle(self, request)
        except Exception:
            _logger.exception("router: %s %s failed; this is a bug", request.method, request.path)
            owner, self._owner = self._owner, None
            if owner is not None:
                owner.client_gone()
            self.send(error_response(500, "the router failed; see its log", code="bug"))

    def _persistence(self) -> bytes:
        if self._request is None or not self._request.keep_alive or self._server.is_draining or self._refusal is not None:
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self._request.is_http_1_0 else b""

    def _finish(self, status: int, *, keep: bool = True) -> None:
        request, self._request, self._owner = self._request, None, None
        if request is None:
            return
        if self._held_bytes:
            self._release(min(len(request.body), self._held_bytes))
        self._server.count(request.path, status)
        if self._transport is None:
            return
        if not (keep and request.keep_alive) or self._server.is_draining or self._refusal is not None:
            self._closing = True
            self._transport.close()
        elif self._ahead:
            asyncio.get_running_loop().call_soon(self._serve_next)
        else:
            self.deadline = self._server.clock() + self._server.settings.keep_alive_s

    def _serve_next(self) -> None:
        if self._ahead and self._request is None and self._transport is not None:
            request = self._ahead.popleft()
            self._ahead_bytes -= len(request.body)
            self._serve(request)

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of the request is longer than {self._max_head_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self._refuse_with(error_response(status, message))

    def _refuse_with(self, refusal: Response) -> None:
        if self._refusal is None:
            self._refusal = refusal

    def _close_with(self, refusal: Response) -> None:
        """Answer and close, but let the client finish sending for a moment: closing at once could take the answer away."""
        self._closing = True
        self._ahead.clear()
        self._body = b""
        self._release(self._held_bytes if self._request is None else max(0, self._held_bytes - len(self._request.body)))
        if self._request is not None or self._transport is None:
            return
        self._server.count(self._path, refusal.status)
        head = f"Content-Type: application/json\r\nContent-Length: {len(refusal.body)}\r\nConnection: close\r\n"
        lines = head_lines(refusal.headers)
        self._write(b"".join((status_line(refusal.status), head.encode(), lines, b"\r\n", refusal.body)))
        self.deadline = self._server.clock() + _LINGER_S


@functools.lru_cache(maxsize=64)
def _type_line(content_type: str) -> bytes:
    return f"Content-Type: {content_type}\r\n".encode("latin-1", "replace")
