"""The router's HTTP server: binds, keeps its connections within limits, hands requests out, and drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from kvbaton.errors import ConfigError
from kvbaton.router.http.client_connection import ClientConnection
from kvbaton.router.http.messages import HttpRequest, Response
from kvbaton.router.settings import RouterSettings

__all__ = ["HttpServer"]

_BACKLOG = 4096
_DRAIN_LOOK_S = 0.02

Handler = Callable[[ClientConnection, HttpRequest], None]
Count = Callable[[str, int], None]
HeadCheck = Callable[[str, Mapping[bytes, bytes]], Response | None]


class HttpServer:
    """Serves `handler`, which answers each request now or later; `count` gets path and status of each answer.

    `check_head` may refuse a request before its body is read.
    """

    def __init__(
        self,
        settings: RouterSettings,
        check_head: HeadCheck,
        handler: Handler,
        count: Count,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.check_head = check_head
        self.handle = handler
        self.count = count
        self.clock = clock
        self.is_draining = False
        self.held_bytes = 0
        self._connections: set[ClientConnection] = set()
        self._listening: asyncio.Server | None = None

    def __len__(self) -> int:
        return len(self._connections)

    async def open(self) -> None:
        """Listen. Raises ConfigError when the address cannot be bound."""
        host, port = self.settings.host, self.settings.port
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                lambda: ClientConnection(self), host, port, backlog=_BACKLOG, reuse_port=self.settings.processes > 1 or None
            )
        except OSError as error:
            raise ConfigError(
                f"router address {host}:{port} cannot be bound ({error.strerror or error}); stop what uses the port, or choose"
                " another with --port"
            ) from error

    def admit(self, connection: ClientConnection) -> bool:
        """Take a new connection in; False when there are too many."""
        if len(self._connections) >= self.settings.max_connections:
            return False
        self._connections.add(connection)
        return True

    def discard(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""
        self._connections.discard(connection)

    def sweep(self, now: float) -> None:
        """End whatever has taken too long."""
        for connection in tuple(self._connections):
            connection.check(now)

    async def drain(self, limit_s: float) -> bool:
        """Take no new connections, finish the requests that are being served; whether all were finished in time."""
        self.is_draining = True
        if self._listening is not None:
            self._listening.close()
        give_up_at = self.clock() + limit_s
        while self._connections and self.clock() < give_up_at:
            for connection in tuple(self._connections):
                connection.drain()
            await asyncio.sleep(_DRAIN_LOOK_S)
        return not self._connections

    def close(self) -> None:
        """Stop listening and close every connection at once."""
        if self._listening is not None:
            self._listening.close()
        for connection in tuple(self._connections):
            connection.abort()
