"""The front door: connections to and from peers, with a budget for what each costs before it is trusted, and for all together.

Theory of operation. One thread owns a `Door`, and alternates `wait` and `receive`; nothing in here waits elsewhere. A
connection that was accepted is *unknown* until it has authenticated: with a cluster key by opening the session, without one as
soon as its owner calls `admit`. An unknown peer may be any program that reaches the port, so that

- it costs a place in a table of its own. When that is full, the oldest gives way to the next, but not before it had
  `guaranteed_s` for its handshake: in a flood, a key holder waits in the queue of the system, and is served when it gets in;
- it has one deadline from accept on, which nothing renews: a byte now and then buys no time;
- its frames have a limit of their own, one message is parsed at a time, and all unknown peers share one budget of bytes;
- all of them share a fifth of this thread: they wait in a selector of their own, which is left out while the share is used up.
  Known peers are served first in every turn. The work stops where the share ends, and goes on with those that have waited for
  longest: a handshake of TLS takes a millisecond, and those of one turn would hold known peers up for as many.

A *known* peer is trusted to mean well, not to work well: it has budgets too, larger ones, and a deadline for a frame that it
has begun or does not take. Where a budget is full, the connection that holds most of it is ended; peers connect anew.

With a key, both ends put a nonce into their READY command, and everything after it is sealed by a `Session`. The listener
proves itself first, with an empty sealed frame, under the first of its keys; the dialler takes that if it is one of its own,
answers under the same, and only then sends anything. So an address that a client made up learns a nonce, and nothing else. A
connection keeps its key until it ends. Without a key a connection is plain ZMTP.

With certificates (`tls.py`), all of that is inside TLS. Its handshake counts as the peer's: the same place, deadline, share
of the thread and budget of bytes. A peer that does not encrypt gets the reason in the clear, one whose certificate is refused
gets TLS's own alert.

Rejected: one selector with priorities (a flood would still make every turn go through all its sockets); a thread for unknown
peers (a second owner for each connection, and a hand-over between them); a port for each class (instances have one).
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvbaton.core.auth import NONCE_BYTES, TAG_BYTES, ClusterKey, Session, keys_of
from kvbaton.errors import ProtocolError
from kvbaton.wire.machine import THIS_MACHINE, Machine, StreamSocket
from kvbaton.wire.metering import ThreadShare
from kvbaton.wire.tls import ClusterTls, TlsError, TlsStream
from kvbaton.wire.zmtp import Zmtp, ZmtpError, ZmtpLimits, ZmtpPartsError, ZmtpRefused, encode_error, encode_frame

__all__ = ["Door", "DoorLimits", "EndCause", "PeerConnection"]

_NONCE = b"X-KVBaton-Nonce"
_ACCEPTS_PER_TURN = 32
_UNKNOWN_READ_BYTES = 16 * 1024
_UNKNOWN_UNSENT_BYTES = 16 * 1024
_EAGER_FLUSH_BYTES = 256 * 1024
_FAIR_UNSENT_BYTES = 64 * 1024
_ENDING_S = 1.0
_MAX_ENDING = 32
_MAX_DRAINED_BYTES = 256 * 1024
_CHECK_S = 1.0
_TCP_INFO = struct.Struct("=24xI28xI")
"""Of `struct tcp_info`: segments without an acknowledgement, and milliseconds since the last one came."""
_ACCEPT_PAUSE_S = 0.02
_KEEPALIVE_S = 30
_MOST_CONNECTIONS = 2048


class EndCause(enum.StrEnum):
    """Why a connection ended."""

    LOST = "lost"
    UNREACHABLE = "unreachable"
    NOT_ALLOWED = "not on the allow-list"
    NOT_ZMTP = "not ZeroMQ"
    TLS_FAILED = "not encrypted as it has to be"
    TOO_LONG = "too long"
    TOO_MANY_PARTS = "too many parts"
    NOT_AUTHENTICATED = "not authenticated"
    REFUSED = "refused by the peer"
    SILENT = "silent"
    STALLED = "stalled"
    NO_ROOM = "no room"
    CLOSED = "closed here"


def _descriptor_budget() -> int:
    """Half of what this process may open: an engine, a transport and its log need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(_MOST_CONNECTIONS, soft // 2)) if soft > 0 else _MOST_CONNECTIONS


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """What connections may cost. A quarter of `connections` is for unknown peers, at most `most_unknown`."""

    connections: int = field(default_factory=_descriptor_budget)
    most_unknown: int = 256
    frame_bytes: int = 16 * 1024
    unknown_frame_bytes: int = 16 * 1024
    parts: int = 8
    unknown_bytes: int = 8 << 20
    known_bytes: int = 32 << 20
    unsent_bytes: int = 8 << 20
    all_unsent_bytes: int = 32 << 20
    read_bytes: int = 64 * 1024
    messages_per_turn: int = 256
    handshake_s: float = 5.0
    guaranteed_s: float = 0.2
    unknown_share: float = 0.2
    stalled_s: float = 30.0
    unacknowledged_s: float = 0.0
    """How long what was sent may be without an acknowledgement of TCP; 0: as long as the system waits, many minutes."""

    @property
    def unknown(self) -> int:
        """Places for unknown peers."""
        return max(2, min(self.most_unknown, self.connections // 4))

    @property
    def known(self) -> int:
        """Places for known ones."""
        return max(2, self.connections - self.unknown)


class PeerConnection:
    """One connection. `identity` and `tag` belong to the owner of the door: who is at the other end, and whatever it needs."""

    __slots__ = (
        "buffered",
        "drained",
        "identity",
        "is_connecting",
        "is_dialled",
        "is_ending",
        "is_known",
        "is_open",
        "is_over",
        "moved_at",
        "name",
        "partial_since",
        "seen_at",
        "session",
        "since",
        "sock",
        "tag",
        "tls",
        "unacknowledged_since",
        "unsent",
        "wants_write",
        "zmtp",
    )

    def __init__(self, sock: StreamSocket, name: str, zmtp: Zmtp, now: float, *, is_dialled: bool) -> None:
        self.sock = sock
        self.name = name
        self.zmtp = zmtp
        self.is_dialled = self.is_connecting = is_dialled
        self.since = self.seen_at = self.moved_at = now
        self.partial_since: float | None = None
        self.unacknowledged_since: float | None = None
        self.session: Session | None = None
        self.tls: TlsStream | None = None
        self.is_known = self.is_open = self.is_ending = self.is_over = self.wants_write = False
        self.unsent = bytearray()
        self.buffered = self.drained = 0
        self.identity = ""
        self.tag: object = None

    def __repr__(self) -> str:
        return f"PeerConnection({self.name}{' over' if self.is_over else ''})"


class Door:
    """All connections of one thread. `on_open` is called when a dialled one may be used, `on_end` once for each that has ended.

    `refusal` states why an IP address is not let in at all, or returns an empty text. Deadlines are those of `clock`, by
    default of the machine.
    """

    def __init__(
        self,
        limits: DoorLimits,
        on_end: Callable[[PeerConnection, EndCause, str], None],
        *,
        key: ClusterKey | None = None,
        tls: ClusterTls | None = None,
        on_open: Callable[[PeerConnection], None] = lambda _: None,
        refusal: Callable[[str], str] = lambda _: "",
        machine: Machine = THIS_MACHINE,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._limits = limits
        self._machine = machine
        self._on_end, self._on_open, self._refusal = on_end, on_open, refusal
        self._key = key
        self._tls = tls
        self._clock = clock = machine.now if clock is None else clock
        sealed = TAG_BYTES if key is not None else 0
        # With a key, all that an unknown peer has to send is a proof: a tag without content.
        self._frames = ZmtpLimits(limits.frame_bytes + sealed, limits.parts, sealed or limits.unknown_frame_bytes)
        self._selector = machine.selector()
        self._unknown_selector = machine.selector()
        self._selector.register(self._unknown_selector.fileno(), selectors.EVENT_READ, self)
        self._listener: StreamSocket | None = None
        self._accept_at: float | None = None
        self._unknown: OrderedDict[PeerConnection, None] = OrderedDict()
        self._dialling: OrderedDict[PeerConnection, None] = OrderedDict()
        self._known: dict[PeerConnection, None] = {}
        self._ending: OrderedDict[PeerConnection, float] = OrderedDict()
        self._unflushed: dict[PeerConnection, None] = {}
        self._ready: list[tuple[selectors.SelectorKey, int]] | None = None
        self._watched: list[int] = []
        self._now = clock()
        self._check_at = self._now + _CHECK_S
        self._awaits_acknowledgement = False
        self._buffered = {False: 0, True: 0}
        self._unsent_bytes = 0
        self._share = ThreadShare(limits.unknown_share)
        self._accepted_at = self._now
        self._resume_at: float | None = None

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._unknown) + len(self._dialling) + len(self._known) + len(self._ending)

    @property
    def known(self) -> Iterable[PeerConnection]:
        """Those that have authenticated, or were admitted."""
        return self._known.keys()

    def listen(self, bound: StreamSocket) -> None:
        """Accept connections at a listening socket from now on; it belongs to the door."""
        self._listener = bound
        self._unknown_selector.register(bound, selectors.EVENT_READ)

    def dial(self, family: int, address: tuple[str | int, ...], name: str) -> PeerConnection:
        """Begin to connect. Raises OSError when that is impossible; what fails later goes to `on_end`."""
        sock = self._machine.socket(family)
        try:
            _tune(sock)
            code = sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            connection = PeerConnection(sock, name, self._zmtp(is_listener=False), self._clock(), is_dialled=True)
            if self._tls is not None:
                connection.tls = TlsStream(self._tls.client, is_listener=False)
            self._register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        except BaseException:
            sock.close()
            raise
        connection.wants_write = True
        self._dialling[connection] = None
        return connection

    def watch(self, fds: list[int]) -> None:
        """Let `wait` return when one of these descriptors is readable, too. Unreadable descriptors are skipped."""
        if fds == self._watched:
            return
        for fd in self._watched:
            with contextlib.suppress(KeyError, ValueError, OSError):
                # A descriptor that its owner has closed may be one of our sockets by now.
                if self._selector.get_key(fd).data is None:
                    self._selector.unregister(fd)
        for fd in fds:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.register(fd, selectors.EVENT_READ)
        self._watched = list(fds)

    def wait(self, timeout_s: float, due_s: Callable[[], float] = lambda: math.inf) -> bool:
        """Send what is queued, then wait until there is something to receive, or a watched descriptor is readable.

        Returns whether there is. Connections that are due to end are ended here; then `due_s` is called, for how long the owner
        has nothing to do: it may have to dial again.
        """
        self.flush()
        # As of the last time that everything readable was read: after a pause of this thread, what has arrived meanwhile was
        # in time, and must be read before its sender is ended for silence.
        self._end_late(self._now)
        timeout_s = min(timeout_s, due_s(), self._due_s(self._clock()))
        self._ready = self._selector.select(max(0.0, timeout_s))
        self._now = self._clock()
        return bool(self._ready)

    def receive(self) -> Iterator[tuple[PeerConnection, list[bytes]]]:
        """The messages that have arrived, a bounded number per connection; those of known peers first."""
        ready = self._selector.select(0) if self._ready is None else self._ready
        self._ready = None
        has_unknown = False
        for selected, events in ready:
            connection = selected.data
            if connection is self:
                has_unknown = True
            elif connection is not None:
                yield from self._serve(connection, events)
        if has_unknown and self._resume_at is None:
            yield from self._serve_unknown()
        self.flush()

    def admit(self, connection: PeerConnection) -> None:
        """Treat a peer as known from now on. Where there are too many, the one that was silent for longest is ended."""
        if connection.is_known or connection.is_over:
            return
        connection.is_known = True
        connection.zmtp.trust()
        self._buffered[False] -= connection.buffered
        self._buffered[True] += connection.buffered
        if connection.is_dialled:
            self._dialling.pop(connection, None)
        else:
            self._unknown.pop(connection, None)
            self._unknown_selector.unregister(connection.sock)
            self._register(connection, _events(connection))
        self._known[connection] = None
        if len(self._known) > self._limits.known:
            oldest = min((each for each in self._known if each is not connection), key=lambda each: each.seen_at)
            self.finish(oldest, EndCause.NO_ROOM, "the peer was silent for longest")

    def send(self, connection: PeerConnection, body: bytes) -> bool:
        """Queue one message of one part; False when it does not fit, or the connection is not open."""
        if not connection.is_open:
            return False
        queued, size = len(connection.unsent), len(body)
        limit = self._limits.unsent_bytes if connection.is_known or connection.is_dialled else _UNKNOWN_UNSENT_BYTES
        is_over_all = self._unsent_bytes + size > self._limits.all_unsent_bytes and queued > _FAIR_UNSENT_BYTES
        if is_over_all or (queued and queued + size > limit):
            return False
        if connection.session is not None:
            body = connection.session.seal(body)
        self._queue(connection, encode_frame(body))
        return True

    def refuse(self, connection: PeerConnection, cause: EndCause, reason: str) -> None:
        """End a connection and send the peer the reason; it has a moment to read it."""
        if connection.is_over:
            return
        self._leave_tables(connection)
        connection.is_over, connection.is_open, connection.is_ending = True, False, True
        if connection.is_dialled or connection.is_known:
            # What the peer still sends is thrown away in the share of unknown peers.
            self._selector.unregister(connection.sock)
            self._unknown_selector.register(connection.sock, _events(connection), connection)
        self._ending[connection] = self._clock() + _ENDING_S
        self._queue(connection, encode_error(reason))
        if len(self._ending) > _MAX_ENDING:
            self._close(self._ending.popitem(last=False)[0])
        self._on_end(connection, cause, reason)

    def finish(self, connection: PeerConnection, cause: EndCause, detail: str = "") -> None:
        """End a connection at once."""
        if connection.is_over:
            return
        self._leave_tables(connection)
        connection.is_over, connection.is_open = True, False
        self._close(connection)
        self._on_end(connection, cause, detail)

    def flush(self) -> None:
        """Send what is queued, as far as the sockets take it."""
        if self._unflushed:
            unflushed, self._unflushed = self._unflushed, {}
            for connection in unflushed:
                self._flush(connection)

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything; what is queued has `linger_s` to leave. Idempotent."""
        until = time.monotonic() + linger_s
        self.flush()
        while (waiting := [each for each in self._known if each.unsent]) and time.monotonic() < until:
            for connection in waiting:
                self._flush(connection)
            time.sleep(0.005)
        for connection in [*self._unknown, *self._dialling, *self._known]:
            self.finish(connection, EndCause.CLOSED)
        while self._ending:
            self._close(self._ending.popitem()[0])
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._selector.close()
        self._unknown_selector.close()

    # Deadlines.

    def _due_s(self, now: float) -> float:
        """For how long nothing becomes due."""
        # An idle process is not woken: only what is half sent, half received or not acknowledged can stall.
        is_halfway = self._unsent_bytes or self._buffered[True] or self._awaits_acknowledgement
        due = self._check_at - now if is_halfway else float("inf")
        if self._unknown:
            due = min(due, next(iter(self._unknown)).since + self._limits.handshake_s - now)
        if self._dialling:
            due = min(due, next(iter(self._dialling)).since + self._limits.handshake_s - now)
        if self._ending:
            due = min(due, next(iter(self._ending.values())) - now)
        if self._resume_at is not None:
            due = min(due, self._resume_at - time.monotonic())
        if self._accept_at is not None:
            due = min(due, self._accept_at - self._machine.now())
        return due

    def _end_late(self, now: float) -> None:
        late = now - self._limits.handshake_s
        for table in (self._unknown, self._dialling):
            while table and (oldest := next(iter(table))).since <= late:
                self.finish(oldest, EndCause.SILENT, f"no handshake within {self._limits.handshake_s:g} s")
        while self._ending and next(iter(self._ending.values())) <= now:
            self._close(self._ending.popitem(last=False)[0])
        if self._check_at <= now:
            self._check_at = now + _CHECK_S
            self._end_stalled(now - self._limits.stalled_s)
            if self._limits.unacknowledged_s:
                self._end_unacknowledged(now)
        if self._resume_at is not None and self._resume_at <= time.monotonic():
            self._resume_at = None
            self._selector.register(self._unknown_selector.fileno(), selectors.EVENT_READ, self)
        if self._accept_at is not None and self._accept_at <= self._machine.now() and self._listener is not None:
            self._accept_at = None
            self._unknown_selector.register(self._listener, selectors.EVENT_READ)

    def _end_stalled(self, late: float) -> None:
        for connection in list(self._known):
            began = connection.partial_since
            if (began is not None and began < late) or (connection.unsent and connection.moved_at < late):
                self.finish(connection, EndCause.STALLED, f"a frame was not finished within {self._limits.stalled_s:g} s")

    def _end_unacknowledged(self, now: float) -> None:
        """End what a cut link has left behind.

        TCP waits twice as long before each further try: a connection is silent for as long again as its link was cut. One that
        ends is dialled anew, and the first tries of that come quickly. TCP_USER_TIMEOUT would also end the connections of a
        peer that does not read for a while, although TCP itself still answers there.
        """
        self._awaits_acknowledgement = False
        for connection in list(self._known):
            since = _unacknowledged_since(connection, now)
            connection.unacknowledged_since = since
            if since is not None and now - since >= self._limits.unacknowledged_s:
                self.finish(connection, EndCause.LOST, f"nothing was acknowledged for {now - since:.1f} s")
            elif since is not None:
                self._awaits_acknowledgement = True

    # Unknown peers.

    def _serve_unknown(self) -> Iterator[tuple[PeerConnection, list[bytes]]]:
        self._share.begin()
        for selected, events in sorted(self._unknown_selector.select(0), key=self._served_at):
            if selected.data is None:
                self._accepted_at = self._now
                yield from self._accept()
            else:
                yield from self._serve(selected.data, events)
            if self._share.is_spent():
                break
        self._resume_at = self._share.end()
        if self._resume_at is not None:
            self._selector.unregister(self._unknown_selector.fileno())

    def _served_at(self, ready: tuple[selectors.SelectorKey, int]) -> float:
        """When it had its last turn. What stays ready has the same order in epoll each time: the last ones would starve."""
        connection = ready[0].data
        return self._accepted_at if connection is None else connection.seen_at

    def _accept(self) -> Iterator[tuple[PeerConnection, list[bytes]]]:
        for _ in range(_ACCEPTS_PER_TURN):
            is_full = len(self._unknown) >= self._limits.unknown
            if is_full and not self._may_give_way():
                self._pause_accepting()
                return
            try:
                sock, address = self._accepted()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # No descriptor is left.
                if self._may_give_way():
                    self._end_oldest_unknown()
                self._pause_accepting()
                return
            if is_full:
                self._end_oldest_unknown()
            connection = PeerConnection(sock, str(address[0]), self._zmtp(is_listener=True), self._now, is_dialled=False)
            if self._tls is not None:
                connection.tls = TlsStream(self._tls.server, is_listener=True)
            self._unknown[connection] = None
            self._unknown_selector.register(sock, selectors.EVENT_READ, connection)
            if reason := self._refusal(connection.name):
                self._queue(connection, connection.zmtp.outgoing())
                self.refuse(connection, EndCause.NOT_ALLOWED, reason)
            else:
                # A dialler of ours sends its whole handshake with the connection: it is mostly there already.
                yield from self._serve(connection, selectors.EVENT_READ)
            if self._share.is_spent():
                return

    def _accepted(self) -> tuple[StreamSocket, tuple[str, int]]:
        if self._listener is None:
            raise BlockingIOError
        sock, address = self._listener.accept()
        try:
            _tune(sock)
        except OSError as error:
            sock.close()
            raise ConnectionError from error
        return sock, address

    def _may_give_way(self) -> bool:
        """Whether the oldest unknown peer had its guaranteed time."""
        oldest = next(iter(self._unknown), None)
        return oldest is not None and self._now - oldest.since >= self._limits.guaranteed_s

    def _end_oldest_unknown(self) -> None:
        self.finish(next(iter(self._unknown)), EndCause.NO_ROOM, "the oldest of too many unknown peers")

    def _pause_accepting(self) -> None:
        """Take the listening socket out of the selector for a moment: it would keep the thread busy with nothing."""
        if self._listener is not None and self._accept_at is None:
            self._unknown_selector.unregister(self._listener)
            self._accept_at = self._machine.now() + _ACCEPT_PAUSE_S

    # Bytes in.

    def _serve(self, connection: PeerConnection, events: int) -> Iterator[tuple[PeerConnection, list[bytes]]]:
        if connection.is_over:
            self._drain(connection)
            return
        if events & selectors.EVENT_WRITE and not self._write(connection):
            return
        if not events & selectors.EVENT_READ or connection.is_connecting:
            return
        count, limit = 0, self._limits.messages_per_turn
        while True:
            size = self._limits.read_bytes if connection.is_known else _UNKNOWN_READ_BYTES
            try:
                data = connection.sock.recv(size)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.finish(connection, EndCause.LOST, error.strerror or str(error))
                return
            if not data:
                self.finish(connection, EndCause.LOST, "closed by the peer")
                return
            connection.seen_at = self._now
            received = len(data)
            if connection.tls is not None:
                data = self._decrypt(connection, connection.tls, data)
            for parts in self._take(connection, data) if data else ():
                count += 1
                yield connection, parts
            if connection.is_over or received < size or count >= limit or not connection.is_known:
                return

    def _decrypt(self, connection: PeerConnection, tls: TlsStream, data: bytes) -> bytes:
        """What was received, in the clear; nothing where the connection cannot be encrypted, which ends it."""
        try:
            plain = tls.feed(data)
        except TlsError as error:
            if error.is_plain:
                # Only what is not encrypted reaches such a peer, and without a greeting it would not take the reason for one.
                connection.tls = None
                if not connection.is_dialled:
                    self._queue(connection, connection.zmtp.outgoing())
            self.refuse(connection, EndCause.TLS_FAILED, str(error))
            return b""
        if out := tls.outgoing():
            self._queue_bytes(connection, out)
        if not plain:
            self._count_buffered(connection, has_progress=False)
        return plain

    def _take(self, connection: PeerConnection, data: bytes) -> Iterator[list[bytes]]:
        """The messages in what was received, opened. What must not be ends the connection."""
        zmtp = connection.zmtp
        while True:
            try:
                messages = zmtp.feed(data)
            except ZmtpError as error:
                # What went before the violation may show a better reason: for example, a READY without a nonce, and then the
                # ERROR of a peer that has ended the connection for the same reason, seen from its side.
                self._shake_hands(connection)
                self._on_violation(connection, error)
                return
            if not connection.is_open or zmtp.has_outgoing:
                self._shake_hands(connection)
            for parts in messages:
                if connection.is_over:
                    return
                if connection.session is None:
                    yield parts
                elif (opened := self._opened(connection, connection.session, parts)) is not None:
                    yield [opened]
            if connection.is_over:
                return
            if zmtp.violation is not None:
                self._on_violation(connection, zmtp.violation)
                return
            if not zmtp.has_more:
                break
            data = b""
        self._count_buffered(connection, has_progress=bool(messages))

    def _count_buffered(self, connection: PeerConnection, *, has_progress: bool) -> None:
        """Note what a connection holds of an unfinished message, and end the one that holds most where that is too much."""
        buffered = connection.zmtp.buffered_bytes + (connection.tls.handshake_bytes if connection.tls is not None else 0)
        if not buffered:
            connection.partial_since = None
        elif has_progress or connection.partial_since is None:
            connection.partial_since = self._now
        if buffered == connection.buffered:
            return
        is_known = connection.is_known
        self._buffered[is_known] += buffered - connection.buffered
        connection.buffered = buffered
        if self._buffered[is_known] > (self._limits.known_bytes if is_known else self._limits.unknown_bytes):
            candidates = self._known if is_known else [*self._unknown, *self._dialling]
            self.finish(
                max(candidates, key=lambda each: each.buffered), EndCause.NO_ROOM, "too many bytes of unfinished messages"
            )

    def _shake_hands(self, connection: PeerConnection) -> None:
        """Go on with the handshake as far as what was received allows."""
        if out := connection.zmtp.outgoing():
            self._queue(connection, out)
        if connection.is_open or connection.session is not None or not connection.zmtp.is_ready:
            return
        nonce = connection.zmtp.peer_properties.get(_NONCE.lower())
        if self._key is None and nonce is None:
            self._open(connection)
        elif self._key is None:
            self.refuse(
                connection,
                EndCause.NOT_AUTHENTICATED,
                "no key here: the peer has a cluster key, but none is set here; set the same on both sides",
            )
        elif nonce is None or len(nonce) != NONCE_BYTES:
            self.refuse(
                connection,
                EndCause.NOT_AUTHENTICATED,
                "not authenticated: a cluster key is set here, but the peer has none; set the same on both sides",
            )
        else:
            dialled, accepted = _commands(connection)
            is_listener = not connection.is_dialled
            connection.session = Session(keys_of(self._key)[0], dialled=dialled, accepted=accepted, is_listener=is_listener)
            if is_listener:
                self._queue(connection, encode_frame(connection.session.seal(b"")))

    def _opened(self, connection: PeerConnection, session: Session, parts: list[bytes]) -> bytes | None:
        """The content of a sealed message; None for the proof, and for what does not open, which ends the connection."""
        try:
            if len(parts) != 1:
                raise ProtocolError(f"a message of {len(parts)} parts; sealed ones have one")
            if connection.is_dialled and not connection.is_open and self._key is not None:
                dialled, accepted = _commands(connection)
                proved = Session.proved(self._key, dialled=dialled, accepted=accepted, proof=parts[0])
                session = connection.session = proved
                content = b""
            else:
                content = session.open(parts[0])
        except ProtocolError as error:
            self.refuse(connection, EndCause.NOT_AUTHENTICATED, str(error))
            return None
        if connection.is_open:
            return content
        # The first frame has no content: the sealed nonces alone show that the peer has the key.
        if connection.is_dialled:
            self._queue(connection, encode_frame(session.seal(b"")))
        self.admit(connection)
        self._open(connection)
        return None

    def _open(self, connection: PeerConnection) -> None:
        connection.is_open = True
        if connection.is_dialled:
            self._on_open(connection)

    def _on_violation(self, connection: PeerConnection, error: ZmtpError) -> None:
        is_proving = connection.session is not None and not connection.is_known
        if isinstance(error, ZmtpRefused):
            # Where the keys differ, the dialler is the first to see it.
            self.finish(connection, EndCause.NOT_AUTHENTICATED if is_proving else EndCause.REFUSED, str(error))
        elif is_proving:
            # Longer than a proof, or no frame at all: a release of another protocol, or a peer without the key.
            self.refuse(connection, EndCause.NOT_AUTHENTICATED, f"not authenticated: {error}")
        elif isinstance(error, ZmtpPartsError):
            self.refuse(connection, EndCause.TOO_MANY_PARTS, str(error))
        else:
            self.refuse(connection, EndCause.TOO_LONG if error.is_too_long else EndCause.NOT_ZMTP, str(error))

    def _drain(self, connection: PeerConnection) -> None:
        """Throw away what a refused peer still sends: closing with unread bytes would reset the connection, and our reason."""
        if connection not in self._ending:
            return
        try:
            if connection.unsent:
                self._flush(connection)
            data = connection.sock.recv(_UNKNOWN_READ_BYTES)
            connection.drained += len(data)
            if not data or connection.drained > _MAX_DRAINED_BYTES:
                self._ending.pop(connection, None)
                self._close(connection)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._ending.pop(connection, None)
            self._close(connection)

    # Bytes out.

    def _queue(self, connection: PeerConnection, data: bytes) -> None:
        self._queue_bytes(connection, data if connection.tls is None else connection.tls.encrypt(data))

    def _queue_bytes(self, connection: PeerConnection, data: bytes) -> None:
        if not connection.unsent:
            connection.moved_at = self._now
        connection.unsent += data
        self._unsent_bytes += len(data)
        if len(connection.unsent) > _EAGER_FLUSH_BYTES and not connection.wants_write:
            self._flush(connection)
        else:
            self._unflushed[connection] = None

    def _write(self, connection: PeerConnection) -> bool:
        """Finish connecting, or send on; False when the connection is over."""
        if connection.is_connecting:
            code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.finish(connection, EndCause.UNREACHABLE, os.strerror(code))
                return False
            connection.is_connecting = False
            self._queue(connection, connection.zmtp.outgoing())
        self._flush(connection)
        return not connection.is_over

    def _flush(self, connection: PeerConnection) -> None:
        if connection.is_connecting or (connection.is_over and connection not in self._ending):
            return
        unsent = connection.unsent
        try:
            sent = connection.sock.send(unsent) if unsent else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._ending.pop(connection, None)
            if connection.is_over:
                self._close(connection)
            else:
                self.finish(connection, EndCause.LOST, error.strerror or str(error))
            return
        if sent:
            self._awaits_acknowledgement = self._limits.unacknowledged_s > 0
            connection.moved_at = self._now
            self._unsent_bytes -= sent
            del unsent[:sent]
        if bool(unsent) is not connection.wants_write:
            connection.wants_write = bool(unsent)
            in_main = connection.is_known or connection.is_dialled
            selector = self._selector if in_main and not connection.is_ending else self._unknown_selector
            selector.modify(connection.sock, _events(connection), connection)
        if connection.is_ending and not unsent:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)

    # The end.

    def _leave_tables(self, connection: PeerConnection) -> None:
        for table in (self._unknown, self._dialling, self._known):
            table.pop(connection, None)
        self._buffered[connection.is_known] -= connection.buffered
        connection.buffered = 0

    def _close(self, connection: PeerConnection) -> None:
        self._unsent_bytes -= len(connection.unsent)
        connection.unsent.clear()
        for selector in (self._selector, self._unknown_selector):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(connection.sock)
        connection.sock.close()

    def _register(self, connection: PeerConnection, events: int) -> None:
        """A watched descriptor that its owner has closed may have the number of a new socket: its entry is void."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        self._selector.register(connection.sock, events, connection)

    def _zmtp(self, *, is_listener: bool) -> Zmtp:
        extra = None if self._key is None else {_NONCE: secrets.token_bytes(NONCE_BYTES)}
        return Zmtp(self._frames, is_listener=is_listener, extra=extra)


def _commands(connection: PeerConnection) -> tuple[bytes, bytes]:
    """The READY commands of the dialler and of the listener."""
    own, peer = connection.zmtp.own_ready, connection.zmtp.peer_ready
    return (own, peer) if connection.is_dialled else (peer, own)


def _events(connection: PeerConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)


def _tune(sock: StreamSocket) -> None:
    """Small messages leave at once, and a host that is gone is noticed although the connection is idle."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _unacknowledged_since(connection: PeerConnection, now: float) -> float | None:
    """Since when, at the latest, what TCP has sent is without an acknowledgement; None when all of it has one."""
    try:
        info = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        segments, last_ms = _TCP_INFO.unpack(info)
    except (OSError, AttributeError, struct.error):
        return None  # of a system without it
    if not segments:
        return None
    since = connection.unacknowledged_since
    # An answer that came since then was for an earlier segment, or one without room for more: TCP still answers there.
    return now if since is None or now - last_ms / 1000 > since else since
