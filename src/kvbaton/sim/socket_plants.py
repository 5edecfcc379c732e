"""Planted bugs of the control sockets, which only runs with those of production can show."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Envelope
from kvbaton.sim.watched_sockets import WatchedSockets
from kvbaton.wire.door import EndCause, PeerConnection

__all__ = ["socket_plants"]


class _NotDialledAgain(WatchedSockets):
    """Waits for ever for a connection that has ended."""

    def _reconnect(self) -> float:
        self._lookups.clear()
        return math.inf

    def _on_end(self, connection: PeerConnection, cause: EndCause, detail: str) -> None:
        super()._on_end(connection, cause, detail)
        for dialled in self._dialled.values():
            if dialled.connection is None:
                dialled.retry_at = math.inf


class _DialledAgainByChance(WatchedSockets):
    """Dials again only when something else wakes the thread."""

    def _reconnect(self) -> float:
        super()._reconnect()
        return math.inf


class _FirstFramesForgotten(WatchedSockets):
    """Forgets what has waited for a connection to open."""

    def _on_open(self, connection: PeerConnection) -> None:
        for dialled in self._dialled.values():
            if dialled.connection is connection:
                self._queued_bytes -= sum(map(len, dialled.frames))
                dialled.frames.clear()
        super()._on_open(connection)


class _FirstRouteKept(WatchedSockets):
    """Answers a peer over its first connection, although that has ended and the peer has come over another one."""

    def _read(self, connection: PeerConnection, parts: list[bytes]) -> Envelope | None:
        before = dict(self._routes)
        envelope = super()._read(connection, parts)
        if envelope is not None and envelope.sender in before:
            self._routes[envelope.sender] = before[envelope.sender]
        return envelope

    def _reroute(self, incarnation: Incarnation) -> None:
        """The route stays."""


def socket_plants() -> Iterator[tuple[str, str, str, type[WatchedSockets]]]:
    """Name, mistake, the rule that it breaks, and the class that makes it."""
    yield "not-dialled-again", "an address dialled once, and never again", "heals", _NotDialledAgain
    yield "dialled-again-by-chance", "no alarm for the next dial", "alarm", _DialledAgainByChance
    yield "first-frames-forgotten", "what waited for a connection not sent when it opens", "prompt", _FirstFramesForgotten
    yield "first-route-kept", "a peer answered over a connection that has ended", "spurious failure", _FirstRouteKept
