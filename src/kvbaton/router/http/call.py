"""One request to an instance, and what its caller is notified of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbaton.discovery.registry import Instance
from kvbaton.errors import PeerError, PeerLost, ProtocolError
from kvbaton.router.http.messages import InstanceAnswer

__all__ = ["Call", "CallConnection", "Caller"]


class CallConnection(Protocol):
    """What a call needs of the connection that it goes over."""

    def drop(self) -> None:
        """Close at once; the call that it served is not notified."""

    def pause(self) -> None:
        """Read no further."""

    def resume(self) -> None:
        """Read on."""


class Caller:
    """Made a call, and is notified of its progress; `call_answered`, `call_ended` or `call_lost` comes last. Ignores it all."""

    __slots__ = ()

    def call_answered(self, call: Call, answer: InstanceAnswer) -> None:
        """The answer is complete."""

    def call_data(self, call: Call, piece: bytes) -> None:
        """Bytes of a stream, as they came; see `call.content_type`."""

    def call_ended(self, call: Call) -> None:
        """The stream is complete."""

    def call_lost(self, call: Call, error: PeerError) -> None:
        """The call failed."""


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One request to an instance. Its deadline is for the whole call, or for each piece of a stream."""

    caller: Caller
    instance: Instance
    payload: bytes
    deadline: float
    idle_s: float | None = None
    may_stream: bool = False
    max_bytes: int = 1 << 20
    address: str = ""
    """Where it goes to; without one, to the address of the instance, once it has started."""
    content_type: str = "application/octet-stream"
    is_stream: bool = False
    is_over: bool = False
    is_paused: bool = False
    has_received: bool = False
    was_sent: bool = False
    """Whether there was a connection to send it over."""
    was_cut: bool = False
    """Whether its connection was closed by the instance, or by its death, before the answer was complete."""
    was_kept: bool = False
    """Whether it went over a connection that was used before, which the instance may have closed in that moment."""
    _connection: CallConnection | None = None
    _pieces: list[bytes] | None = None
    _collected_bytes: int = 0

    @property
    def name(self) -> str:
        """The instance as it is named in logs and errors."""
        return self.instance.name

    def close(self) -> None:
        """Abandon the call; its caller is not notified."""
        if not self.is_over:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.drop()
            self.is_over = True

    def pause(self) -> None:
        """Read no further until `resume`."""
        self.is_paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        self.is_paused = False
        if self._connection is not None:
            self._connection.resume()

    def check(self, now: float) -> None:
        """Lose the call when its deadline has passed; bytes since the last check, or a pause by us, move the deadline."""
        if self.idle_s is not None and (self.has_received or self.is_paused):
            self.has_received = False
            self.deadline = now + self.idle_s
        elif now >= self.deadline:
            self.lose(PeerLost(f"{self.name} did not answer in time"))

    def lose(self, error: PeerError) -> None:
        """End the call with an error."""
        if not self.is_over:
            self.close()
            self.caller.call_lost(self, error)

    def start_on(self, connection: CallConnection) -> None:
        """Send it over a connection that stands."""
        self._connection = connection
        self.was_sent = True
        if self.is_paused:
            connection.pause()

    def take_piece(self, piece: bytes) -> None:
        """Bytes of the body came."""
        self.has_received = True
        if self.is_stream:
            self.caller.call_data(self, piece)
            return
        self._collected_bytes += len(piece)
        if self._collected_bytes > self.max_bytes:
            self.lose(ProtocolError(f"{self.name} sent an answer of more than {self.max_bytes} bytes"))
        elif self._pieces is None:
            self._pieces = [piece]
        else:
            self._pieces.append(piece)

    def take_end(self, status: int, retry_after: str | None) -> None:
        """The body is complete."""
        if self.is_over:
            return
        self._connection = None
        self.is_over = True
        if self.is_stream:
            self.caller.call_ended(self)
        else:
            pieces = self._pieces or (b"",)
            content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self.caller.call_answered(self, InstanceAnswer(status, self.content_type, content, retry_after))
