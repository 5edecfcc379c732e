"""The control channel: one bound port for peers that dial us, one connection per address that we dial, behind a `Door`.

Answers travel back over the connection on which the question arrived, so a source never has to trust an address. Every socket
belongs to the driver's thread. Sends never wait: what does not fit into a queue is dropped and counted; the logic asks again.

With a cluster key, a connection is used only after both ends have proved that they have it (`wire/door.py`). The first message
binds an incarnation to the connection: another one on the same connection is refused, so a peer sends in its own name only.
A peer is answered over the connection on which its last message arrived. With a key no recorded message opens, so that nothing
but the peer itself moves that; without one, nothing shows who a sender is.

A peer that sends what we do not take is sent the reason. What arrives unreadable over a connection that we dialled, and an
address that we must not dial, are returned by `refusals`, so that a request that waits for that peer need not wait for a
deadline. A connection whose bytes are not acknowledged for one interval of heartbeats is ended, so that it is dialled anew: TCP
would let it be silent after a cut for as long again. An address that a request names is a hint: where no peer of ours has
answered yet, connecting is rate limited and shows the address nothing but a nonce. Dialling ends soon after the last message
that was to go there.

What the logic sends to one peer in one turn leaves in as few frames as possible: a frame costs both ends a seal and many calls,
whatever it holds. Only peers that have announced that they read such frames get them; others get one message per frame.
"""

from __future__ import annotations

import enum
import logging
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from kvbaton.config import Limits, Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import (
    MAX_FRAME_BYTES,
    MAX_MORE,
    Envelope,
    Hello,
    Message,
    Refused,
    decode,
    encode,
    encode_several,
    split,
)
from kvbaton.errors import ConfigError, ProtocolError
from kvbaton.transport.neighbour import is_gone
from kvbaton.wire.door import Door, DoorLimits, EndCause, PeerConnection
from kvbaton.wire.log_limit import LogLimit, shown
from kvbaton.wire.machine import THIS_MACHINE, Machine, StreamSocket
from kvbaton.wire.tls import cluster_tls

__all__ = ["ControlSockets", "Dropped", "control_limits"]

log = logging.getLogger(__name__)

_MAX_DIALLED = 256
_MAX_UNPROVEN_PER_HOST = 32
_MAX_QUEUED_FRAMES = 1000
_MAX_QUEUED_UNPROVEN = 8
_MAX_QUEUED_BYTES = 16 << 20
_DIALS_PER_S = 50.0
_DIAL_BURST = 100.0
_DIAL_LIFE_S = 10.0
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
_LINGER_S = 0.2
_BEAT_S = Limits().beat_s
_LEAST_UNACKNOWLEDGED_S = 1.0
"""No shorter, whatever the heartbeats: TCP itself tries again after up to a second on a slow link."""
_MAX_REASON = 1000
_MAX_TAKES_SEVERAL = 1024
_MAX_TOGETHER_BYTES = 256 * 1024
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?\.?")


class Dropped(enum.StrEnum):
    """Why a frame was not sent or not taken, or a connection was ended with what it sent."""

    NO_ROUTE = "no route"
    NOT_SENT = "not sent"
    NOT_DIALLED = "not dialled"
    WRONG_FRAMES = "wrong number of frames"
    NOT_ALLOWED = "not on the allow-list"
    NOT_AUTHENTICATED = "not authenticated"
    TLS_FAILED = "not encrypted as it has to be"
    NOT_A_MESSAGE = "not a message"
    OTHER_SENDER = "another incarnation on the same connection"
    SILENT = "no handshake in time"
    STALLED = "a frame that was not finished in time"
    NO_ROOM = "no room for the connection"


_DROPPED_BY_END = {
    EndCause.NOT_ALLOWED: Dropped.NOT_ALLOWED,
    EndCause.NOT_ZMTP: Dropped.NOT_A_MESSAGE,
    EndCause.TOO_LONG: Dropped.NOT_A_MESSAGE,
    EndCause.TOO_MANY_PARTS: Dropped.WRONG_FRAMES,
    EndCause.NOT_AUTHENTICATED: Dropped.NOT_AUTHENTICATED,
    EndCause.TLS_FAILED: Dropped.TLS_FAILED,
    EndCause.SILENT: Dropped.SILENT,
    EndCause.STALLED: Dropped.STALLED,
    EndCause.NO_ROOM: Dropped.NO_ROOM,
}
_NO_PEER = (
    EndCause.NOT_ZMTP,
    EndCause.TLS_FAILED,
    EndCause.TOO_LONG,
    EndCause.TOO_MANY_PARTS,
    EndCause.NOT_AUTHENTICATED,
)


class _Dialled:
    """An address that we dial: its connection, if there is one now, and the frames that wait for it to open."""

    __slots__ = ("address", "asked_at", "connection", "frames", "incarnation", "retry_at", "retry_s")

    def __init__(self, address: ControlAddress, now: float) -> None:
        self.address = address
        self.connection: PeerConnection | None = None
        self.frames: deque[bytes] = deque()
        self.incarnation: Incarnation | None = None
        self.asked_at = self.retry_at = now
        self.retry_s = _FIRST_RETRY_S

    @property
    def is_proven(self) -> bool:
        """Whether a peer of ours has answered there."""
        return self.incarnation is not None


def control_limits(beat_s: float) -> DoorLimits:
    """What the connections of a coordinator may cost, whose heartbeats have this interval."""
    unacknowledged_s = max(beat_s, _LEAST_UNACKNOWLEDGED_S)
    return DoorLimits(frame_bytes=MAX_FRAME_BYTES, unknown_frame_bytes=MAX_FRAME_BYTES, unacknowledged_s=unacknowledged_s)


class ControlSockets:
    """All sockets of one coordinator. Raises ConfigError when `trust` or the system forbids to listen there.

    `beat_s` is the interval of its heartbeats; `machine` is where the sockets are made.
    """

    is_gone = staticmethod(is_gone)
    frames_per_turn = 256
    """Frames that are read from one connection before everything else has its turn; a few more where they arrived together."""

    def __init__(
        self,
        me: Incarnation,
        host: str,
        port: int,
        trust: Trust | None = None,
        limits: DoorLimits | None = None,
        *,
        beat_s: float = _BEAT_S,
        machine: Machine = THIS_MACHINE,
    ) -> None:
        self._me = me
        self._clock = machine.now
        self.trust = trust or Trust()
        self.trust.check_bind(host)
        self.address = ControlAddress.of(host, port)
        bound = _bind(machine, host, port)
        self._tls = cluster_tls(self.trust.tls_dir)
        self._limits = limits or control_limits(beat_s)
        self._door = Door(
            self._limits,
            self._on_end,
            key=self.trust.key,
            tls=self._tls,
            on_open=self._on_open,
            refusal=self._refusal,
            machine=machine,
        )
        self._door.listen(bound)
        self._lookups = machine.lookups()
        self._dialled: OrderedDict[ControlAddress, _Dialled] = OrderedDict()
        self._routes: dict[Incarnation, PeerConnection | _Dialled] = {}
        self._takes_several: BoundedMap[Incarnation, None] = BoundedMap(_MAX_TAKES_SEVERAL)
        """Peers that read frames of several messages."""
        self._waiting: dict[Incarnation, list[Message]] = {}
        """What was sent to such peers since the last flush; at most a frame's worth for each."""
        self._refusals: dict[ControlAddress, str] = {}
        self._queued_bytes = 0
        self._tokens, self._tokens_at = _DIAL_BURST, self._clock()
        self._log_limit = LogLimit(every_s=1.0)
        self.dropped_total: Counter[str] = Counter(dict.fromkeys(Dropped, 0))

    def certificate_loads_total(self) -> int:
        """Changes of the certificate files that were taken; safe to call from any thread."""
        return 0 if self._tls is None else self._tls.loads_total()

    def failed_certificate_loads_total(self) -> int:
        """Changes of the certificate files that were not taken; safe to call from any thread."""
        return 0 if self._tls is None else self._tls.failed_loads_total()

    def dial(self, address: ControlAddress, message: Message) -> None:
        """Send to the peer that answers at `address`; connects first if need be. Where that is forbidden, see `refusals`."""
        refusal = self.trust.dial_refusal(address.host)
        if refusal is None and ":" not in address.host and not _HOST_NAME.fullmatch(address.host):
            refusal = f"{address} cannot be dialled: Invalid argument"
        if refusal is not None:
            self._drop(Dropped.NOT_DIALLED, refusal)
            self._refuse(address, refusal)
            return
        dialled = self._dialled.get(address) or self._add(address)
        self._send_to(dialled, encode(self._me, "", message))

    def hang_up(self, address: ControlAddress) -> None:
        """Dial `address` no longer, unless a peer of ours has answered there: the requests that needed it are over."""
        # Apart from what is hung up after a refusal: the simulator looks at the calls of the logic.
        self._hang_up_unproven(address)

    def _hang_up_unproven(self, address: ControlAddress) -> None:
        dialled = self._dialled.get(address)
        if dialled is not None and not dialled.is_proven:
            self._hang_up(dialled)

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send to a peer that has sent something before, with the next flush at the latest: see `wait` and `receive`."""
        if peer not in self._routes:
            self.dropped_total[Dropped.NO_ROUTE] += 1
        elif peer not in self._takes_several:
            self._send_frame(peer, encode(self._me, peer, message))
        elif (waiting := self._waiting.get(peer)) is None:
            self._waiting[peer] = [message]
        else:
            waiting.append(message)
            if len(waiting) > MAX_MORE:
                self._send_together(peer, self._waiting.pop(peer))

    def _send_waiting(self) -> None:
        while self._waiting:
            self._send_together(*self._waiting.popitem())

    def _send_together(self, peer: Incarnation, messages: list[Message]) -> None:
        """Send messages to one peer in one frame, unless that would be a long one: then each has its own."""
        if len(messages) > 1 and len(frame := encode_several(self._me, peer, messages)) <= _MAX_TOGETHER_BYTES:
            self._send_frame(peer, frame)
        else:
            for message in messages:
                self._send_frame(peer, encode(self._me, peer, message))

    def _send_frame(self, peer: Incarnation, frame: bytes) -> None:
        route = self._routes.get(peer)
        if route is None:
            self.dropped_total[Dropped.NO_ROUTE] += 1
        elif isinstance(route, PeerConnection):
            self._send(route, frame)
        else:
            self._send_to(route, frame)

    def wait(self, timeout_s: float, wakeups: list[int]) -> bool:
        """Wait until a frame or one of the file descriptors `wakeups` is ready, at most `timeout_s`; whether anything is.

        What was sent leaves first.
        """
        if self._waiting:
            self._send_waiting()
        if self._refusals:
            self._door.flush()
            return True
        self._door.watch([self._lookups.fd, *wakeups])
        return self._door.wait(timeout_s, self._reconnect)

    def receive(self) -> Iterator[tuple[Envelope, ControlAddress | None]]:
        """Read what has arrived, so many frames per connection; what is no message of a peer is dropped and counted.

        Each message has an envelope of its own, also where several came in one frame. What was sent meanwhile leaves last.
        """
        for connection, parts in self._door.receive():
            envelope = self._read(connection, parts)
            if envelope is not None:
                tag = connection.tag
                via = tag.address if isinstance(tag, _Dialled) else None
                if not envelope.more:
                    yield envelope, via
                else:
                    for each in split(envelope):
                        yield each, via
        if self._waiting:
            self._send_waiting()
            self._door.flush()

    def refusals(self) -> list[tuple[ControlAddress, str]]:
        """Take the addresses that turned out to be no peers of ours since the last call, each with the reason.

        Where no peer of ours ever answered we hang up, so that nothing connects there again by itself.
        """
        if not self._refusals:
            return []
        refusals = list(self._refusals.items())
        self._refusals.clear()
        for address, _ in refusals:
            self._hang_up_unproven(address)
        return refusals

    def close(self) -> None:
        """Close every socket; unsent frames get a moment to leave. Idempotent."""
        self._send_waiting()
        self._door.close(_LINGER_S)
        self._lookups.close()

    # Connections that we dial.

    def _add(self, address: ControlAddress) -> _Dialled:
        unproven = [each for each in self._dialled.values() if not each.is_proven]
        same_host = [each for each in unproven if each.address.host == address.host]
        if len(same_host) >= _MAX_UNPROVEN_PER_HOST:
            self._hang_up(same_host[0])
        elif len(self._dialled) >= min(_MAX_DIALLED, self._limits.known // 2):
            # Addresses at which no peer of ours ever answered give way first.
            self._hang_up(unproven[0] if unproven else next(iter(self._dialled.values())))
        dialled = self._dialled[address] = _Dialled(address, self._clock())
        return dialled

    def _send_to(self, dialled: _Dialled, frame: bytes) -> None:
        connection = dialled.connection
        if connection is not None and connection.is_open:
            self._send(connection, frame)
            return
        if not dialled.is_proven and len(dialled.frames) >= _MAX_QUEUED_UNPROVEN:
            # A question that is repeated replaces the oldest copy of itself.
            self._queued_bytes -= len(dialled.frames.popleft())
        if len(dialled.frames) >= _MAX_QUEUED_FRAMES or self._queued_bytes + len(frame) > _MAX_QUEUED_BYTES:
            self._drop(Dropped.NOT_SENT, f"too much waits for {dialled.address}")
            return
        dialled.frames.append(frame)
        self._queued_bytes += len(frame)
        dialled.asked_at = self._clock()
        if connection is None and dialled.retry_at <= dialled.asked_at:
            self._connect(dialled)

    def _reconnect(self) -> float:
        """Connect where frames wait for it; for how long nothing of that is due."""
        self._lookups.clear()
        due = float("inf")
        if not self._queued_bytes:
            return due
        now = self._clock()
        for dialled in list(self._dialled.values()):
            if dialled.connection is not None or not dialled.frames:
                continue
            if now - dialled.asked_at > _DIAL_LIFE_S:
                # Its peer is gone: what is sent to a known one is not repeated for ever.
                self._hang_up(dialled)
                continue
            if dialled.retry_at <= now:
                self._connect(dialled)
            if dialled.connection is None:
                due = min(due, dialled.retry_at - now)
        return due

    def _connect(self, dialled: _Dialled) -> None:
        """Begin to connect, unless too many dials were begun just now; a name is looked up first."""
        now = self._clock()
        self._tokens = min(_DIAL_BURST, self._tokens + (now - self._tokens_at) * _DIALS_PER_S)
        self._tokens_at = now
        dialled.retry_at = now + dialled.retry_s
        if not dialled.is_proven and self._tokens < 1.0:
            return
        found = self._lookups.find(dialled.address.host, dialled.address.handshake)
        if found is None:
            dialled.retry_at = now + _FIRST_RETRY_S
            return
        self._tokens -= not dialled.is_proven
        dialled.retry_s = min(2 * dialled.retry_s, _LONGEST_RETRY_S)
        if found.error:
            self._drop(Dropped.NOT_DIALLED, f"{dialled.address}: {found.error}")
            return
        try:
            dialled.connection = self._door.dial(found.family, found.address, str(dialled.address))
        except (OSError, ValueError, OverflowError) as error:
            # A port beyond all limits is no OSError.
            self._drop(Dropped.NOT_DIALLED, f"{dialled.address}: {error}")
            return
        dialled.connection.tag = dialled

    def _on_open(self, connection: PeerConnection) -> None:
        """A dialled connection may be used: what has waited for it is sent."""
        dialled = connection.tag
        if not isinstance(dialled, _Dialled):
            return
        dialled.retry_s = _FIRST_RETRY_S
        while dialled.frames:
            frame = dialled.frames.popleft()
            self._queued_bytes -= len(frame)
            self._send(connection, frame)

    def _hang_up(self, dialled: _Dialled) -> None:
        self._dialled.pop(dialled.address, None)
        self._queued_bytes -= sum(map(len, dialled.frames))
        dialled.frames.clear()
        if dialled.connection is not None:
            self._door.finish(dialled.connection, EndCause.CLOSED)
        if dialled.incarnation is not None and self._routes.get(dialled.incarnation) is dialled:
            self._reroute(dialled.incarnation)

    # Every connection.

    def _send(self, connection: PeerConnection, frame: bytes) -> None:
        if not self._door.send(connection, frame):
            self._drop(Dropped.NOT_SENT, f"{connection.name} takes nothing")

    def _on_end(self, connection: PeerConnection, cause: EndCause, detail: str) -> None:
        dropped = _DROPPED_BY_END.get(cause)
        if dropped is not None:
            self._drop(dropped, f"{connection.name}: {detail}")
        dialled = connection.tag
        if isinstance(dialled, _Dialled):
            dialled.connection = None
            dialled.retry_at = self._clock() + dialled.retry_s
            if cause in _NO_PEER:
                self._refuse(dialled.address, f"what answers at {dialled.address} is no peer of ours: {detail}")
            elif cause is EndCause.REFUSED:
                self._refuse(dialled.address, f"refused by {dialled.address}: {shown(detail)}")
        elif connection.identity and self._routes.get(Incarnation(connection.identity)) is connection:
            self._reroute(Incarnation(connection.identity))

    def _reroute(self, incarnation: Incarnation) -> None:
        """The route of a peer has ended: it may have another connection."""
        self._routes.pop(incarnation, None)
        others = [each for each in self._door.known if each.identity == incarnation]
        if others:
            tag = others[-1].tag
            self._routes[incarnation] = tag if isinstance(tag, _Dialled) else others[-1]

    def _read(self, connection: PeerConnection, parts: list[bytes]) -> Envelope | None:
        """The envelope in a message, if the peer may send it; else the peer is sent the reason."""
        if len(parts) != 1:
            self._not_understood(connection, Dropped.WRONG_FRAMES, f"a message of {len(parts)} frames; ours have one")
            return None
        try:
            envelope = decode(parts[0])
        except ProtocolError as error:
            self._not_understood(connection, Dropped.NOT_A_MESSAGE, str(error))
            return None
        sender = envelope.sender
        if connection.identity != sender:
            if connection.identity or sender == self._me:
                reason = f"{shown(sender)} is not the incarnation that this connection belongs to"
                self._not_understood(connection, Dropped.OTHER_SENDER, reason)
                return None
            self._bind_to(connection, sender)
        tag = connection.tag
        self._routes[sender] = tag if isinstance(tag, _Dialled) else connection
        if isinstance(envelope.message, Hello) and envelope.message.takes_several:
            self._takes_several[sender] = None
        return envelope

    def _bind_to(self, connection: PeerConnection, sender: Incarnation) -> None:
        """The first message of a connection names the only incarnation that may use it."""
        connection.identity = sender
        self._door.admit(connection)
        dialled = connection.tag
        if isinstance(dialled, _Dialled):
            before, dialled.incarnation = dialled.incarnation, sender
            if before is not None and before != sender and self._routes.get(before) is dialled:
                self._reroute(before)

    def _not_understood(self, connection: PeerConnection, cause: Dropped, reason: str) -> None:
        self._drop(cause, f"{connection.name}: {reason}")
        if isinstance(connection.tag, _Dialled):
            address = connection.tag.address
            self._refuse(address, f"what answers at {address} is no peer of ours: {reason}")
        else:
            self._door.send(connection, encode(self._me, "", Refused(reason[:_MAX_REASON])))

    def _refusal(self, host: str) -> str:
        """Why a peer at this IP address is not let in."""
        return "" if self.trust.accepts_from(host) else f"{host} is not on the allow-list here"

    def _refuse(self, address: ControlAddress, reason: str) -> None:
        if len(self._refusals) < _MAX_DIALLED:
            self._refusals[address] = reason

    def _drop(self, cause: Dropped, detail: str) -> None:
        self.dropped_total[cause] += 1
        held_back = self._log_limit.allow(cause, self._clock())
        if held_back is not None:
            log.warning("control channel: dropped (%s, %d so far): %s", cause, self.dropped_total[cause], shown(detail))


def _bind(machine: Machine, host: str, port: int) -> StreamSocket:
    try:
        return machine.listen(host, port)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"control port {port} on {host}: {reason}; choose another with --control-port") from error
