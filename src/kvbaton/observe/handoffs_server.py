"""Serves an instance's timelines over HTTP from a process without an HTTP server of its own, such as a vLLM worker.

The same two routes that an embedded instance has: `/handoffs` and `/handoffs/{transfer_id}`, with a cluster key for holders of
its token only, with certificates over HTTPS to members of the cluster. A few requests at a time, each with a deadline;
connections beyond that are closed at once. The engine never waits for this server.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import unquote

import msgspec

from kvbaton.config import HTTP_KEY_HEADER, HttpTokens, Trust
from kvbaton.core.handoff import MAX_TRANSFER_ID
from kvbaton.errors import ConfigError
from kvbaton.observe.timelines import Timelines
from kvbaton.wire.tls import cluster_tls

__all__ = ["HandoffsServer"]

log = logging.getLogger(__name__)

_MOST_LISTED = 100
_MOST_AT_ONCE = 8
_REQUEST_S = 5.0
_POLL_S = 0.5
_STOP_S = 5.0


class HandoffsServer:
    """Serves `timelines` at `host` and `port` from `start` until `close`. Raises ConfigError when the port cannot be bound."""

    def __init__(self, timelines: Timelines, host: str, port: int, trust: Trust) -> None:
        try:
            self._server = _Server(timelines, host, port, trust)
        except OSError as error:
            raise ConfigError(
                f"handoffs_port {port} on {host}: {error.strerror or error}; choose another, or 0 to serve no timelines"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="kvbaton-handoffs", daemon=True
        )

    def start(self) -> None:
        """Start answering; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close the port. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(_STOP_S)
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, timelines: Timelines, host: str, port: int, trust: Trust) -> None:
        self.timelines = timelines
        self.tokens = HttpTokens(trust.key)
        self._tls = cluster_tls(trust.tls_dir)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._late_at: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the reverse DNS look-up of `HTTPServer.server_bind`, which can delay an engine's start by seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[Any, Any]:
        """The handshake of TLS comes with the first read, on the thread of the request and within its time."""
        request, address = super().get_request()
        if self._tls is not None:
            request = self._tls.server.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._late_at[request] = time.monotonic() + _REQUEST_S
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self._finish(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._finish(request)

    def service_actions(self) -> None:
        """Called by `serve_forever` at every turn: end late requests.

        The socket timeout alone does not: a client that sends a byte now and then renews it for ever.
        """
        now = time.monotonic()
        with self._lock:
            for request in [each for each, late_at in self._late_at.items() if late_at < now]:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def _finish(self, request: socket.socket) -> None:
        with self._lock:
            del self._late_at[request]
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        log.info("hand-offs: the client at %s disconnected during the response", client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        """Answer one request."""
        timelines, tokens = self.server.timelines, self.server.tokens
        if tokens and not tokens.are_carried(self.headers.get(HTTP_KEY_HEADER, ""), self.headers.get("Authorization", "")):
            message = (
                f"this instance has a cluster key; send its token in the header {HTTP_KEY_HEADER}, as kvbaton's router does"
            )
            self._answer(401, {"error": {"message": message, "code": "invalid_api_key"}})
            return
        path = self.path.partition("?")[0]
        if path == "/handoffs":
            self._answer(200, {"instance": timelines.instance, "handoffs": timelines.newest(_MOST_LISTED)})
            return
        transfer_id = unquote(path.removeprefix("/handoffs/")) if path.startswith("/handoffs/") else ""
        record = timelines.record(transfer_id)
        if record is None:
            message = f"this instance knows no transfer {transfer_id[:MAX_TRANSFER_ID]!a}; GET /handoffs lists those it knows"
            self._answer(404, {"error": {"message": message, "code": "handoff_not_found"}})
        else:
            self._answer(200, record)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: a request for a timeline is not worth a line in the engine's log."""

    def _answer(self, status: int, document: object) -> None:
        content = msgspec.json.encode(document)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
