"""The tcp transport: this side's mover reads from the peer's server, so that no other process writes its memory."""

from __future__ import annotations

import socket

from kvbaton.errors import TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.ledger import Ledger
from kvbaton.transport.queued import QueuedTransport, detail
from kvbaton.transport.tcp.link import TcpLink, TcpPeer
from kvbaton.transport.tcp.mover import TcpMover
from kvbaton.transport.tcp.server import RegionServer
from kvbaton.transport.tcp.vectors import VectorCalls
from kvbaton.transport.tcp.wire import TOKEN_BYTES, Secret

__all__ = ["TcpTransport"]


class TcpTransport(QueuedTransport[TcpPeer]):
    """Listens on a port of its own for readers of this rank's region, and reads from other ranks' ports."""

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        self._server = RegionServer(region, settings)
        self._calls = VectorCalls()
        ledger: Ledger[TcpPeer] = Ledger(region, settings)
        super().__init__(region, settings, ledger, TcpMover(ledger, region, settings))

    @property
    def name(self) -> str:
        """`tcp`."""
        return "tcp"

    @property
    def garbage_total(self) -> int:
        """Connections that were closed because what came was no message of ours."""
        return self._server.garbage_total

    @property
    def refused_total(self) -> int:
        """Connections that were refused: a wrong token or incarnation, or too many at once."""
        return self._server.refused_total

    def _details(self) -> dict[str, str | int]:
        host = self._settings.advertise_host or self._server.host
        return {"host": host, "port": self._server.port, "token": self._server.secret.token.hex()}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> TcpPeer:
        host, port = detail(endpoint, "host", str), detail(endpoint, "port", int)
        try:
            token = bytes.fromhex(detail(endpoint, "token", str))
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        except (ValueError, OSError, OverflowError) as error:
            raise TransportError(f"tcp endpoint: host {host!r}, port {port} or token is not usable: {error}") from error
        if len(token) != TOKEN_BYTES or not 0 < port < 65536:
            raise TransportError(f"tcp endpoint: port is {port}, token has {len(token)} bytes; fetch its card again")
        if self._settings.admits is not None and not self._settings.admits(host):
            raise TransportError(f"tcp endpoint: host {host} is not on the allow-list; add it with --allow")
        incarnation = str(endpoint.details.get("incarnation", ""))
        secret = Secret(token, self._settings.cluster_key, incarnation)
        return TcpPeer(peer, [TcpLink(peer, found[0], found[4], secret, self._calls) for _ in range(self._settings.streams)])

    def _release(self) -> None:
        if not self._server.stop(self._settings.timeout_s):
            raise TransportError(f"the tcp server did not end within {self._settings.timeout_s:g} s; its memory is still read")
