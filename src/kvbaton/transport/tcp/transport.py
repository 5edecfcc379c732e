"""The tcp transport: this side's mover reads from the peer's server, so that no other process writes its memory.

The mover is the thread that reads: it feeds ready batches to the links of each peer and takes what the sockets bring, straight
into target memory. Everything in it is non-blocking; a peer that connects slowly, stalls or dies has a deadline of its own and
delays no other. A further connection to a peer that fails before it is open (the peer has no room for it, this process no
descriptor) costs nothing but itself: it rests for `timeout_s`. One that fails once it was open costs the peer's jobs.
"""

from __future__ import annotations

import enum
import errno
import hmac
import logging
import os
import secrets
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.errors import PeerError, PeerLost, PeerRefused, ProtocolError, TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, RegionStaging, Runs, TransportSettings
from kvbaton.transport.queued import IDLE_S, REVOKED, BatchJob, Ledger, Mover, QueuedTransport, detail
from kvbaton.transport.tcp import wire
from kvbaton.transport.tcp.server import RegionServer
from kvbaton.transport.tcp.sockets import TlsCalls, VectorCalls, Vectors, tune
from kvbaton.wire.tls import ClusterTls, TlsSocket, tls_reason

__all__ = ["TcpLink", "TcpTransport"]

_log = logging.getLogger("kvbaton.transport")

_WINDOW = 2
_TURN_BYTES = 4 << 20
_LOW_WATER_BYTES = 1 << 20
_RECORD_BYTES = 32 << 10
_SCRATCH_BYTES = 256 << 10
_HANDSHAKE_ID = 0

_ATTEMPTS = 3
"""How often a link connects before a peer that closes it during the handshake counts as lost."""


class LinkState(enum.Enum):
    """How far a link is."""

    CLOSED = enum.auto()
    CONNECTING = enum.auto()
    TLS = enum.auto()
    HELLO = enum.auto()
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()


_HANDSHAKES = (LinkState.TLS, LinkState.HELLO, LinkState.HANDSHAKE)
_OPENING = (LinkState.CONNECTING, *_HANDSHAKES)


@dataclass(slots=True, eq=False)
class _ReadRequest:
    """A request without its reply; `job` is None once it was cancelled: the bytes are then read and dropped."""

    request_id: int
    payload_bytes: int
    target: Vectors
    job: BatchJob[TcpPeer] | None
    land: Callable[[], None] | None = None
    """Brings what was received into memory that sockets cannot fill."""


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A reply that was received to its end for a job: its bytes are in, or `error` has why not."""

    job: BatchJob[TcpPeer]
    moved_bytes: int
    error: str = ""


class TcpLink:
    """The kept connection to one peer; for the mover's thread only. Methods raise PeerError or OSError when it is lost."""

    def __init__(
        self,
        peer: PeerRank,
        family: int,
        address: tuple[Any, ...],
        secret: wire.Secret,
        calls: VectorCalls,
        tls: ClusterTls | None = None,
    ) -> None:
        self.peer = peer
        self.owner: TcpPeer | None = None
        self.state = LinkState.CLOSED
        self.sock: socket.socket | None = None
        self.deadline: float | None = None
        self.rests_until = 0.0
        self.attempts = 0
        self.received_bytes = 0
        self._family = family
        self._address = address
        self._secret = secret
        self._calls = calls
        self._tls = tls
        self._low_water = 1
        self._outbox = bytearray()
        self._requests: deque[_ReadRequest] = deque()
        self._last_id = _HANDSHAKE_ID
        self._head = bytearray()
        self._reply: wire.ReplyHead | None = None
        self._proof = b""
        self._text = bytearray()
        self._left_bytes = 0

    def __str__(self) -> str:
        return f"{self.peer.incarnation!r} rank {self.peer.rank} at {self._address[0]} port {self._address[1]}"

    @property
    def has_room(self) -> bool:
        """Whether another request may be sent now."""
        return self.state is LinkState.OPEN and len(self._requests) < _WINDOW

    @property
    def request_count(self) -> int:
        """Requests without a reply."""
        return len(self._requests)

    @property
    def is_busy(self) -> bool:
        """Whether the peer owes something, so that lack of progress counts."""
        return self.state not in (LinkState.CLOSED, LinkState.OPEN) or bool(self._requests)

    @property
    def has_to_write(self) -> bool:
        """Whether the mover has to wait until the socket takes bytes."""
        return self.state is LinkState.CONNECTING or bool(self._outbox)

    def open(self) -> socket.socket:
        """Begin to connect; does not wait."""
        self.sock = socket.socket(self._family, socket.SOCK_STREAM)
        tune(self.sock)
        self.state, self._low_water = LinkState.CONNECTING, 1
        self.attempts += 1
        code = self.sock.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            raise PeerLost(f"cannot connect: {os.strerror(code)}")
        return self.sock

    def close(self) -> list[BatchJob[TcpPeer]]:
        """Close the socket; returns the jobs that had requests without a reply, each once."""
        if self.sock is not None:
            self.sock.close()
        jobs = {request.job.ticket: request.job for request in self._requests if request.job is not None}
        self.sock, self.state, self.deadline, self._reply = None, LinkState.CLOSED, None, None
        self.rests_until = 0.0
        # What was half sent or half received belongs to the connection that is gone.
        self._requests.clear()
        self._outbox.clear()
        self._head.clear()
        return list(jobs.values())

    def ask(self, job: BatchJob[TcpPeer], runs: Runs, region: Region, staging: RegionStaging | None) -> None:
        """Queue one request whose bytes go to the target side of `runs`, by way of `staging` where there is one."""
        self._last_id += 1
        land = None
        if staging is None:
            target = Vectors(runs[:, 1:3] + np.array([region.address, 0], np.uint64), region)
        else:
            received = np.empty(int(runs[:, 2].sum()), np.uint8)
            target = Vectors(np.array([[received.ctypes.data, len(received)]], np.uint64), received)
            land = partial(_land, staging, received, runs[:, 1:3].copy())
        self._requests.append(_ReadRequest(self._last_id, target.total_bytes, target, job, land))
        self._outbox += wire.pack_request(self._last_id, runs)

    def forget(self, job: BatchJob[TcpPeer]) -> None:
        """From now on drop the bytes that still arrive for `job`; its target memory is not touched again."""
        for request in self._requests:
            if request.job is job:
                request.job = None

    def send(self) -> None:
        """Finish connecting, or send what is queued, as far as the socket takes it."""
        assert self.sock is not None  # noqa: S101
        if self.state is LinkState.CONNECTING:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise PeerLost(f"cannot connect: {os.strerror(code)}")
            if self._tls is None:
                self.state = LinkState.HELLO
            else:
                self.sock = self._tls.client.wrap_socket(self.sock, do_handshake_on_connect=False)
                self.state = LinkState.TLS
                self._encrypt()
        if self._outbox:
            del self._outbox[: self.sock.send(self._outbox)]

    def _encrypt(self) -> None:
        """Go on with the handshake of TLS. Raises BlockingIOError while it is not over, SSLError when it fails."""
        assert isinstance(self.sock, TlsSocket)  # noqa: S101
        self.sock.do_handshake()
        self.state = LinkState.HELLO

    def _has_more(self) -> bool:
        """Whether TLS holds bytes that no selector shows."""
        return isinstance(self.sock, TlsSocket) and self.sock.pending() > 0

    def receive(self) -> Iterator[ReadAnswer]:
        """Take what has come, at most a turn's worth, straight into target memory; yields each answer when it is complete.

        An answer may be followed by the end of the connection, and counts all the same.
        """
        budget = _TURN_BYTES
        try:
            if self.state is LinkState.TLS:
                self._encrypt()
            while budget > 0 or self._has_more():
                budget -= self._receive_some()
                if self._reply is not None and not self._left_bytes:
                    yield from self._end_reply(self._reply)
        except BlockingIOError:
            pass
        self._set_low_water()

    def _set_low_water(self) -> None:
        """Be woken for a good piece of what is sure to come, not for every packet of it."""
        # A record that TLS has read in part does not come again: what is left on the wire may be so much less.
        least = _LOW_WATER_BYTES if self._reply is not None and self._left_bytes >= _LOW_WATER_BYTES + _RECORD_BYTES else 1
        if self.sock is not None and least != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._low_water = least

    def _receive_some(self) -> int:
        """One read from the socket: of a reply's head, its text, its bytes, or bytes of a cancelled job."""
        assert self.sock is not None  # noqa: S101
        if self._reply is None:
            expected = wire.HELLO_BYTES if self.state is LinkState.HELLO else wire.REPLY_BYTES
            data = self.sock.recv(expected - len(self._head))
            self._head += data
            count = len(data)
            if len(self._head) == expected:
                self._on_head()
        else:
            count = self._receive_payload(self.sock, self._reply)
            self._left_bytes -= count
        if not count:
            raise ConnectionAbortedError("the peer closed the connection")
        self.received_bytes += count
        return count

    def _receive_payload(self, sock: socket.socket, reply: wire.ReplyHead) -> int:
        request = self._requests[0]
        if reply.status is wire.Status.OK and request.job is not None:
            return self._calls.receive(sock, request.target)
        data = sock.recv(min(self._left_bytes, _SCRATCH_BYTES))
        if reply.status is not wire.Status.OK or self.state is LinkState.HANDSHAKE:
            self._text += data
        return len(data)

    def _on_head(self) -> None:
        head, self._head = self._head, bytearray()
        if self.state is LinkState.HELLO:
            self._answer_hello(wire.unpack_hello(head))
        else:
            self._begin_reply(wire.unpack_reply(head))

    def _answer_hello(self, challenge: bytes) -> None:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        secret = self._secret.now()
        self._proof = secret.owner_proof(challenge, nonce)
        self._outbox += secret.handshake(challenge, nonce)
        self._requests.append(_ReadRequest(_HANDSHAKE_ID, wire.PROOF_BYTES, Vectors(np.empty((0, 2), np.uint64)), None))
        self.state = LinkState.HANDSHAKE

    def _begin_reply(self, reply: wire.ReplyHead) -> None:
        self._text.clear()
        if not self._requests or reply.request_id != self._requests[0].request_id:
            raise ProtocolError(f"a reply to request {reply.request_id}, which is not the one that is due")
        requested = self._requests[0].payload_bytes
        if reply.status is wire.Status.OK and reply.payload_bytes != requested:
            raise ProtocolError(f"a reply of {reply.payload_bytes} bytes to a request for {requested}")
        self._reply = reply
        self._left_bytes = reply.payload_bytes

    def _end_reply(self, reply: wire.ReplyHead) -> list[ReadAnswer]:
        request = self._requests.popleft()
        self._reply = None
        text = self._text.decode(errors="replace")
        if reply.status is wire.Status.REFUSED:
            raise PeerRefused(text)
        if request.request_id == _HANDSHAKE_ID:
            self._on_proof()
        if request.job is None:
            return []
        if reply.status is wire.Status.RANGE:
            return [ReadAnswer(request.job, 0, f"RangeError: {self}: {text}")]
        if request.land is not None:
            # Not before the whole reply is there: a job that is cancelled meanwhile must not touch its memory again.
            try:
                request.land()
            except TransportError as error:
                return [ReadAnswer(request.job, 0, f"TransportError: {self}: {error}")]
        return [ReadAnswer(request.job, request.payload_bytes)]

    def _on_proof(self) -> None:
        if not hmac.compare_digest(self._text, self._proof):
            raise PeerLost(
                "the process that listens there now does not know the token of the peer's card and the cluster key: the peer "
                "is gone, and its port is another process's; nothing was taken from it. Fetch the peer's card again"
            )
        self.state, self.attempts = LinkState.OPEN, 0


def _land(staging: RegionStaging, received: npt.NDArray[np.uint8], pieces: Runs) -> None:
    staging.room(len(received))[:] = received.data
    staging.scatter(pieces)


class TcpPeer:
    """The links to one peer; the second and later ones are opened only while those before them are full of requests.

    A link that could not be opened beside others rests for a while; the others go on.
    """

    def __init__(self, peer: PeerRank, links: Sequence[TcpLink]) -> None:
        self.peer = peer
        self.links = tuple(links)
        for link in self.links:
            link.owner = self

    def has_other_open(self, link: TcpLink) -> bool:
        """Whether the peer can be read without `link`."""
        return any(other.state is LinkState.OPEN for other in self.links if other is not link)

    def link_for_more(self, now: float) -> TcpLink | None:
        """The link that shall ask next: the least busy one with room, or else one to open; None while all are full or rest."""
        roomy = [link for link in self.links if link.has_room]
        if roomy:
            return min(roomy, key=lambda link: link.request_count)
        if any(link.state in _OPENING for link in self.links):
            return None
        return next((link for link in self.links if link.state is LinkState.CLOSED and link.rests_until <= now), None)

    def forget(self, job: BatchJob[TcpPeer]) -> None:
        for link in self.links:
            link.forget(job)


class TcpMover(Mover[TcpPeer]):
    """Owns the links' sockets while its thread runs; ends once the ledger is shut, and then closes them."""

    def __init__(self, ledger: Ledger[TcpPeer], region: Region, settings: TransportSettings) -> None:
        self._region = region
        self._staging = region.open_staging()
        self._slice_bytes = settings.slice_bytes
        self._timeout_s = settings.timeout_s
        self._open: set[TcpLink] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(ledger.work.fd, selectors.EVENT_READ)
        super().__init__("tcp", ledger, settings.timeout_s)

    def _stop(self) -> tuple[()]:
        for link in list(self._open):
            self._shut_link(link)
        self._selector.close()
        if self._staging is not None:
            self._staging.close()
        return ()

    def _move(self) -> None:
        for peer in self._schedule.links():
            self._feed(peer)
        for key, events in self._selector.select(self._wait_s(time.monotonic())):
            if key.data in self._open:  # not when one before it has failed their peer
                self._drive(key.data, events)
        self._expire(time.monotonic())

    def _cancel(self, job: BatchJob[TcpPeer]) -> None:
        if self._ledger.is_in_flight(job):
            self._end(job, "cancelled", cancelled=True)

    def _revoke(self, link: TcpPeer) -> None:
        self._fail_peer(link, REVOKED, waiting=True)

    def _feed(self, peer: TcpPeer) -> None:
        """Ask for as much of the peer's ready jobs as its windows take; connect first where needed."""
        while (job := self._schedule.head(peer)) is not None:
            if not job.cursor.remaining_bytes:
                self._schedule.discard(job)
                self._ledger.finish(job)
                continue
            link = peer.link_for_more(time.monotonic())
            if link is None:
                break
            if link.state is LinkState.CLOSED:
                self._attempt(link, self._open_link)
            else:
                self._ask(link, job)
        for link in peer.links:
            if link.has_to_write and link.state is not LinkState.CONNECTING:
                self._attempt(link, TcpLink.send)
            self._watch(link)

    def _ask(self, link: TcpLink, job: BatchJob[TcpPeer]) -> None:
        runs = job.cursor.peek(self._slice_bytes, wire.MAX_PIECES)
        link.ask(job, runs, self._region, self._staging)
        job.cursor.advance(int(runs[:, 2].sum()))
        if not job.cursor.remaining_bytes:
            self._schedule.discard(job)

    def _open_link(self, link: TcpLink) -> None:
        self._selector.register(link.open(), selectors.EVENT_WRITE, link)
        self._open.add(link)

    def _drive(self, link: TcpLink, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._attempt(link, TcpLink.send)
        if events & selectors.EVENT_READ and link in self._open:
            self._attempt(link, self._receive)
        if link.state not in _HANDSHAKES:  # one that sends a byte now and then would renew it for ever
            link.deadline = None
        self._watch(link)

    def _receive(self, link: TcpLink) -> None:
        for answer in link.receive():
            self._on_answer(answer)

    def _on_answer(self, answer: ReadAnswer) -> None:
        job = answer.job
        if not self._ledger.is_in_flight(job):
            return
        job.moved_bytes += answer.moved_bytes
        if answer.error:
            self._end(job, answer.error)
        elif job.moved_bytes == job.cursor.total_bytes:
            self._ledger.finish(job)

    def _end(self, job: BatchJob[TcpPeer], error: str, *, cancelled: bool = False) -> None:
        """Finish a job before its last byte; what still arrives for it will be dropped."""
        self._schedule.discard(job)
        job.link.forget(job)
        self._ledger.finish(job, error, cancelled=cancelled)

    def _attempt(self, link: TcpLink, step: Callable[[TcpLink], None]) -> None:
        """Do `step`; a peer that is lost, or sends garbage, costs its own jobs only."""
        try:
            step(link)
        except BlockingIOError:
            return
        except PeerError as error:
            self._fail_link(link, f"{type(error).__name__}: {link}: {error}")
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            # Closed without an alert, as a server does that gives the place to another.
            if not self._opens_again(link):
                self._fail_link(link, f"PeerLost: {link}: {tls_reason(error)}")
        except ssl.SSLError as error:
            self._fail_link(link, f"PeerRefused: {link}: {tls_reason(error)}")
        except OSError as error:
            if not self._opens_again(link):
                self._fail_link(link, f"PeerLost: {link}: {error}")

    def _opens_again(self, link: TcpLink) -> bool:
        """Whether a link that the peer closed during the handshake may connect once more: its place may have gone to another.

        The jobs stay in the schedule, and the next turn opens the link.
        """
        if link.state not in _HANDSHAKES or link.attempts >= _ATTEMPTS:
            return False
        self._shut_link(link)
        return True

    def _fail_link(self, link: TcpLink, error: str) -> None:
        """Close a link that is lost: alone where it was not open yet and the peer has another that is, else all of its peer."""
        assert link.owner is not None  # noqa: S101
        if link.state is LinkState.OPEN or not link.owner.has_other_open(link):
            self._fail_peer(link.owner, error)
            return
        _log.warning("one connection fewer for %g s: %s", self._timeout_s, error)
        self._shut_link(link)
        link.rests_until = time.monotonic() + self._timeout_s

    def _fail_peer(self, peer: TcpPeer, error: str, *, waiting: bool = False) -> None:
        """Close the connections and fail the jobs that used them; the next ready job connects anew."""
        jobs = {job.ticket: job for job in self._schedule.discard_link(peer, waiting=waiting)}
        for link in peer.links:
            jobs.update((job.ticket, job) for job in self._shut_link(link))
        for job in jobs.values():
            self._ledger.finish(job, error)

    def _shut_link(self, link: TcpLink) -> list[BatchJob[TcpPeer]]:
        if link in self._open and link.sock is not None:
            self._selector.unregister(link.sock)
        self._open.discard(link)
        return link.close()

    def _watch(self, link: TcpLink) -> None:
        """Set what the selector waits for, and start the deadline of a link that the peer has to move."""
        if link not in self._open or link.sock is None:
            return
        reading = 0 if link.state is LinkState.CONNECTING else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if link.has_to_write else 0)
        if self._selector.get_key(link.sock).events != events:
            self._selector.modify(link.sock, events, link)
        if not link.is_busy:
            link.deadline = None
        elif link.deadline is None:
            link.deadline = time.monotonic() + self._timeout_s

    def _wait_s(self, now: float) -> float:
        deadlines = [link.deadline for link in self._open if link.deadline is not None]
        return max(0.0, min(self._schedule.wait_s(now), min(deadlines, default=now + IDLE_S) - now))

    def _expire(self, now: float) -> None:
        """Fail links without progress; one that is in a reply is not woken for a few bytes, so take what has come first."""
        # SO_RCVLOWAT keeps the selector quiet below a mebibyte, so a slow link looks like a dead one until it is read.
        for link in [link for link in self._open if link.deadline is not None and link.deadline <= now]:
            if link in self._open and self._takes_some(link):
                link.deadline = None
                self._watch(link)
            elif link in self._open:
                self._fail_link(link, f"PeerLost: {link}: {_lack_within(self._timeout_s, link.state)}")

    def _takes_some(self, link: TcpLink) -> bool:
        """Take what has come; returns whether anything has."""
        before = link.received_bytes
        if link.state is not LinkState.CONNECTING:
            self._attempt(link, self._receive)
        return link.received_bytes > before


def _lack_within(timeout_s: float, state: LinkState) -> str:
    if state is LinkState.CONNECTING:
        return f"no connection within {timeout_s:g} s"
    hint = " (no hello: the process is stopped, or has no descriptor left)" if state is LinkState.HELLO else ""
    return f"no progress within {timeout_s:g} s{hint}"


class TcpTransport(QueuedTransport[TcpPeer]):
    """Listens on a port of its own for readers of this rank's region, and reads from other ranks' ports."""

    name = "tcp"

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        self._server = RegionServer(region, settings)
        self._calls = VectorCalls() if settings.tls is None else TlsCalls()
        ledger: Ledger[TcpPeer] = Ledger(region, settings)
        super().__init__(region, settings, ledger, TcpMover(ledger, region, settings))

    def _details(self) -> dict[str, str | int]:
        host = self._settings.advertise_host or self._server.host
        details: dict[str, str | int] = {"host": host, "port": self._server.port, "token": self._server.secret.token.hex()}
        return details if self._settings.tls is None else details | {"tls": 1}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> TcpPeer:
        host, port = detail(endpoint, "host", str), detail(endpoint, "port", int)
        try:
            token = bytes.fromhex(detail(endpoint, "token", str))
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        except (ValueError, OSError, OverflowError) as error:
            raise TransportError(f"tcp endpoint: host {host!r}, port {port} or token is not usable: {error}") from error
        if len(token) != wire.TOKEN_BYTES or not 0 < port < 65536:
            raise TransportError(f"tcp endpoint: port is {port}, token has {len(token)} bytes; fetch its card again")
        if self._settings.admits is not None and not self._settings.admits(host):
            raise TransportError(f"tcp endpoint: host {host} is not on the allow-list; add it with --allow")
        is_encrypted = "tls" in endpoint.details and detail(endpoint, "tls", int) > 0
        if is_encrypted is not (self._settings.tls is not None):
            how = "encrypts, and this side does not" if self._settings.tls is None else "does not encrypt, and this side does"
            raise TransportError(f"tcp endpoint: the peer at {host} {how}; set the same certificates (tls_dir) on both sides")
        incarnation = str(endpoint.details.get("incarnation", ""))
        secret = wire.Secret(token, self._settings.cluster_key, incarnation)
        return TcpPeer(
            peer,
            [TcpLink(peer, found[0], found[4], secret, self._calls, self._settings.tls) for _ in range(self._settings.streams)],
        )

    def _release(self) -> None:
        if not self._server.stop(self._settings.timeout_s):
            raise TransportError(f"the tcp server did not end within {self._settings.timeout_s:g} s; its memory is still read")
