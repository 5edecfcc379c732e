"""The half that our own transports share: the contract's methods on top of the books, with a mover that does the copies."""

from __future__ import annotations

import abc
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvbaton.errors import TransportError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    LateWrites,
    PeerRank,
    Region,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.ledger import Ledger
from kvbaton.transport.mover import Mover

__all__ = ["QueuedTransport", "bytes_detail", "detail"]

L = TypeVar("L", bound=Hashable)
T = TypeVar("T", int, str)


class QueuedTransport(abc.ABC, Generic[L]):
    """A transport whose mover fills this side's memory by reading; no peer ever writes there, unless a subclass allows it."""

    def __init__(self, region: Region, settings: TransportSettings, ledger: Ledger[L], mover: Mover[L]) -> None:
        self._region = region
        self._settings = settings
        self._ledger = ledger
        self._mover = mover
        self._connecting = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name users choose it by."""

    @property
    def late_writes(self) -> LateWrites:
        """Impossible: this side's own mover executes every copy into its memory."""
        return LateWrites.IMPOSSIBLE

    @property
    def directions(self) -> frozenset[Direction]:
        """Reads only."""
        return frozenset({Direction.READ})

    @property
    def wakeup_fd(self) -> int:
        return self._ledger.done.fd

    def endpoint(self) -> Endpoint:
        details = {"incarnation": self._settings.incarnation or "", **self._details()}
        return Endpoint(self.name, self._region.region_bytes, details)

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        """Make `peer` known; the same endpoint again changes nothing. Raises TransportError when it is out of reach."""
        with self._connecting:
            if self._ledger.endpoint_of(peer) != endpoint:
                self._check(peer, endpoint)
                self._ledger.check_room(peer)
                link = self._link(peer, endpoint)
                try:  # `close` may come in between: then the link belongs to no mover
                    self._ledger.add_peer(peer, endpoint, link)
                except TransportError:
                    self._unlink(link)
                    raise

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        if batch.direction not in self.directions:
            raise TransportError(f"{self.name} does not {batch.direction}; {self._alternative}")
        return self._ledger.admit(batch, after)

    def poll(self) -> list[Completion]:
        return self._ledger.take_completions()

    def cancel(self, ticket: Ticket) -> None:
        self._ledger.ask_cancel(ticket)

    def revoke(self, peer: PeerRank) -> None:
        self._ledger.remove_peer(peer)

    def close(self) -> None:
        """Stop the mover, complete what is in flight with an error, and give everything back. Idempotent.

        Raises TransportError when the mover does not end in time; its memory must then not be reused.
        """
        with self._closing:
            if self._closed:
                return
            # The order counts: the mover must be quiet before memory is given back, and before a completion calls it quiet.
            self._ledger.shut("TransportError: the transport is closed")
            if not self._mover.join(self._closing_s):
                raise TransportError(f"the {self.name} mover did not end within {self._closing_s:g} s; close again")
            self._release()
            self._ledger.finish_all()
            self._ledger.close()
            self._closed = True

    @property
    def _alternative(self) -> str:
        """What to do instead of a batch whose direction is not accepted."""
        return "the side that holds the target has to read"

    @property
    def _closing_s(self) -> float:
        """How long the mover may take to end."""
        return self._settings.timeout_s

    def _check(self, peer: PeerRank, endpoint: Endpoint) -> None:
        if endpoint.transport != self.name:
            raise TransportError(f"endpoint transport is {endpoint.transport!r}; this transport is {self.name!r}")
        if not 0 < endpoint.region_bytes < 1 << 63:
            raise TransportError(f"endpoint region_bytes is {endpoint.region_bytes}; it must be above 0 and below 2^63")
        incarnation = endpoint.details.get("incarnation", "")
        if incarnation and incarnation != peer.incarnation:
            raise TransportError(
                f"endpoint belongs to incarnation {incarnation!r}, not to {peer.incarnation!r}; fetch its card again"
            )

    @abc.abstractmethod
    def _details(self) -> dict[str, str | int]:
        """What a peer needs beside the size of the region."""

    @abc.abstractmethod
    def _link(self, peer: PeerRank, endpoint: Endpoint) -> L:
        """What the mover keeps for `peer`; raises TransportError when it cannot be reached from here."""

    def _unlink(self, link: L) -> None:
        """Release a link that no mover ever saw."""

    def _release(self) -> None:
        """Give back what the subclass owns, once the mover has ended."""


def detail(endpoint: Endpoint, field: str, kind: type[T]) -> T:
    """One field of an endpoint's details; raises TransportError, naming it, when it is missing or of another type."""
    value = endpoint.details.get(field)
    if type(value) is not kind:
        raise TransportError(f"{endpoint.transport} endpoint: {field} is {value!r}; it must be of type {kind.__name__}")
    return value


def bytes_detail(endpoint: Endpoint, field: str) -> bytes:
    """One field of an endpoint's details that has bytes as hexadecimal digits; raises TransportError, naming it."""
    try:
        return bytes.fromhex(detail(endpoint, field, str))
    except ValueError as error:
        raise TransportError(f"{endpoint.transport} endpoint: {field} is not usable ({error}); fetch its card again") from error
