"""The tcp transport: this side's mover reads from the peer's server, or, where that was chosen, streams writes to it.

The mover is the thread that reads: it feeds ready batches to the links of each peer and takes what the sockets bring, straight
into target memory. Everything in it is non-blocking; a peer that connects slowly, stalls or dies has a deadline of its own and
delays no other. A further connection to a peer that fails before it is open (the peer has no room for it, this process no
descriptor) costs nothing but itself: it rests for `timeout_s`. One that fails once it was open costs the peer's jobs.

Theory of writes. A write is cut into frames, which leave without waiting for replies: up to 64 of them, 32 MiB, per link. The
peer's own process stores each, or refuses it (gate.py), and replies. So a batch is complete here when every frame was
acknowledged, and an ended one (cancelled, refused, revoked) is over when those frames were that had begun to leave: then
nothing of it lands any more. A link that breaks with frames on it is opened again, and asks how they ended; what is missing
is sent again, from the start of the frame. That is tried for `timeout_s`; where nothing listens any more, the peer is lost.
A batch with a notice stays on one link, so that its last frame is the last to be stored.
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
from kvbaton.transport.base import (
    AfterEvent,
    Arrival,
    Batch,
    Direction,
    Endpoint,
    LateWrites,
    PeerRank,
    Region,
    RegionStaging,
    Runs,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.busy_selector import BusySelector
from kvbaton.transport.queued import IDLE_S, REVOKED, BatchJob, Ledger, Mover, QueuedTransport, bytes_detail, detail
from kvbaton.transport.runs import load_loops
from kvbaton.transport.tcp import wire
from kvbaton.transport.tcp.server import RegionServer
from kvbaton.transport.tcp.sockets import LOW_WATER_BYTES, TLS_ROOM_BYTES, TlsCalls, VectorCalls, tune
from kvbaton.transport.tcp.vectors import Vectors, pieces_of, request_vectors, target_vectors, vectors_of
from kvbaton.wire.tls import ClusterTls, TlsSocket, tls_reason

__all__ = ["TcpLink", "TcpTransport"]

_log = logging.getLogger("kvbaton.transport")

_WINDOW = 2
_TURN_BYTES = 4 << 20
_UNSENT_FRAMES = 2
_UNSTORED_BYTES = 32 << 20
_RESUME_PAUSE_S = 0.05
_SCRATCH_BYTES = 256 << 10
_HANDSHAKE_ID = 0
_NO_BYTES = np.empty(0, np.uint8)
_FRAME_BYTES = 4 << 20

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
    make_target: Callable[[], Vectors]
    job: BatchJob[TcpPeer] | None
    land: Callable[[], None] | None = None
    """Brings what was received into memory that sockets cannot fill."""
    made_target: Vectors | None = None

    @property
    def target(self) -> Vectors:
        """Where the bytes go: laid out once the request was sent, while the peer lays out the reply."""
        if self.made_target is None:
            self.made_target = self.make_target()
        return self.made_target


@dataclass(slots=True, eq=False)
class _Frame:
    """A frame without its reply: its head and the pieces of this side's memory that follow it."""

    request_id: int
    job: BatchJob[TcpPeer]
    head: bytes
    pieces: Runs
    size_bytes: int
    keep: object
    unsent: Vectors

    @property
    def has_begun(self) -> bool:
        """Whether a byte of it has left."""
        return self.unsent.remaining_bytes < self.unsent.total_bytes

    def rewind(self) -> None:
        """Send it from its start, on another connection."""
        self.unsent = vectors_of(self.head, self.pieces, self.keep)


@dataclass(slots=True, eq=False)
class _Opening:
    """The request that opens this link as a stream of writes, without its reply."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Answer:
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
        stream: int = 0,
    ) -> None:
        self.peer = peer
        self.stream = stream
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
        self._outbox: deque[Vectors] = deque()
        self._requests: deque[_ReadRequest | _Frame | _Opening] = deque()
        self._unstored_bytes = 0
        self.is_stream = False
        self.resume_at: float | None = None
        self.resume_by: float | None = None
        """Until when a stream that broke may be resumed: set when it breaks, and void with the next frame that is answered."""
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
        return self.state is LinkState.OPEN and len(self._requests) - len(self.frames()) < _WINDOW

    @property
    def has_frame_room(self) -> bool:
        """Whether another frame may be queued now."""
        frames = self.frames()
        unsent = sum(1 for frame in frames[-_UNSENT_FRAMES:] if frame.unsent.remaining_bytes)
        is_full = len(frames) >= wire.RECENT_FRAMES or self._unstored_bytes >= _UNSTORED_BYTES
        return self.is_stream and self.state is LinkState.OPEN and unsent < _UNSENT_FRAMES and not is_full

    def frames(self) -> list[_Frame]:
        """Frames without a reply, in order."""
        return [request for request in self._requests if isinstance(request, _Frame)] if self._unstored_bytes else []

    def has_frames_of(self, job: BatchJob[TcpPeer]) -> bool:
        """Whether frames of `job` have no reply."""
        return any(frame.job is job for frame in self.frames())

    @property
    def can_resume(self) -> bool:
        """Whether the link is a stream with something to go on with, and nothing else, or is being opened as one again."""
        reads = [each for each in self._requests if isinstance(each, _ReadRequest) and each.request_id != _HANDSHAKE_ID]
        has_more = self.owner is not None and self.owner.has_bound(self)
        return not reads and (self.is_resuming or (self.is_stream and (has_more or bool(self.frames()))))

    @property
    def is_resuming(self) -> bool:
        """Whether it broke as a stream, and is not open as one again."""
        return self.resume_at is not None

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
        self.sock, self.state, self.deadline, self._reply = None, LinkState.CLOSED, None, None
        self.rests_until, self.resume_at, self.resume_by, self.is_stream = 0.0, None, None, False
        # What was half sent or half received belongs to the connection that is gone.
        found = [request.job for request in self._requests if not isinstance(request, _Opening)]
        jobs = {job.ticket: job for job in found if job is not None}
        self._requests.clear()
        self._unstored_bytes = 0
        self._outbox.clear()
        self._head.clear()
        return list(jobs.values())

    def suspend(self, now: float, timeout_s: float) -> None:
        """Close the socket and keep the frames: they are sent on another connection, as far as they have to be."""
        kept, unstored_bytes = self.frames(), self._unstored_bytes
        resume_by = now + timeout_s if self.resume_by is None else self.resume_by
        self.close()
        self._requests.extend(kept)
        self._unstored_bytes = unstored_bytes
        self.resume_at, self.resume_by = now + _RESUME_PAUSE_S, resume_by

    def open_stream(self, opening: wire.OpenBody) -> None:
        """Ask the peer to take this connection as a stream of writes."""
        self._last_id += 1
        # Before the frames of a connection that broke: they are sent, as far as they have to be, when it is answered.
        self._requests.insert(len(self._requests) - len(self.frames()), _Opening(self._last_id))
        self._outbox.append(vectors_of(wire.pack_open(self._last_id, opening)))

    @property
    def is_opening_stream(self) -> bool:
        """Whether the peer has yet to take it as a stream."""
        return not self.is_stream and any(isinstance(request, _Opening) for request in self._requests)

    def write(self, job: BatchJob[TcpPeer], runs: Runs, region: Region, staging: RegionStaging | None, notice: bytes) -> None:
        """Queue one frame with the source side of `runs`; `notice` where it ends its batch."""
        self._last_id += 1
        head = wire.pack_frame(self._last_id, job.epoch, job.ticket, notice, runs)
        if staging is None:
            pieces, keep = pieces_of(region, runs[:, 0:3:2]), object()
        else:
            data = np.frombuffer(staging.gather(runs[:, 0:3:2]), np.uint8).copy()
            pieces, keep = np.array([[data.ctypes.data, len(data)]], np.uint64), data
        # An empty frame counts as one byte: `frames` looks for them only where something is not stored.
        frame = _Frame(self._last_id, job, head, pieces, int(runs[:, 2].sum()), keep, vectors_of(head, pieces, keep))
        self._unstored_bytes += frame.size_bytes + 1
        self._requests.append(frame)
        self._outbox.append(frame.unsent)

    def drop_unsent(self, job: BatchJob[TcpPeer] | None = None) -> None:
        """Take back the frames (of `job`) of which no byte has left."""
        for frame in [each for each in self.frames() if job in (None, each.job) and not each.has_begun]:
            self._requests.remove(frame)
            self._unstored_bytes -= frame.size_bytes + 1
            if frame.unsent in self._outbox:
                self._outbox.remove(frame.unsent)

    def ask(self, job: BatchJob[TcpPeer], runs: Runs, region: Region, staging: RegionStaging | None) -> int:
        """Queue one request whose bytes go to the target side of `runs`, by way of `staging` where there is one.

        Returns how many bytes.
        """
        self._last_id += 1
        request, payload_bytes = request_vectors(self._last_id, runs, self._calls.loops)
        land = None
        if staging is None:
            target = partial(target_vectors, self._last_id, runs, region, self._calls.loops)
        else:
            received = np.empty(payload_bytes, np.uint8)
            target = partial(_in_buffer, received)
            land = partial(_land, staging, received, runs[:, 1:3].copy())
        self._requests.append(_ReadRequest(self._last_id, payload_bytes, target, job, land))
        self._outbox.append(request)
        return payload_bytes

    def forget(self, job: BatchJob[TcpPeer]) -> None:
        """From now on drop the bytes that still arrive for `job`; its target memory is not touched again."""
        for request in self._requests:
            if isinstance(request, _ReadRequest) and request.job is job:
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
        budget = _TURN_BYTES
        while self._outbox and budget > 0:
            budget -= self._calls.send(self.sock, self._outbox[0])
            if not self._outbox[0].remaining_bytes:
                self._outbox.popleft()
        self._prepare()

    def _prepare(self) -> None:
        """Lay out where the bytes of replies go: what was sent keeps the peer busy for longer."""
        for request in self._requests:
            if isinstance(request, _ReadRequest) and request.job is not None and request.made_target is None:
                request.made_target = request.make_target()

    def _encrypt(self) -> None:
        """Go on with the handshake of TLS. Raises BlockingIOError while it is not over, SSLError when it fails."""
        assert isinstance(self.sock, TlsSocket)  # noqa: S101
        self.sock.do_handshake()
        self.state = LinkState.HELLO

    def _has_more(self) -> bool:
        """Whether TLS holds bytes that no selector shows."""
        return isinstance(self.sock, TlsSocket) and self.sock.pending() > 0

    def receive(self) -> Iterator[Answer]:
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
                if self.sock is None:
                    return  # the answer was the last that its peer was kept for
        except BlockingIOError:
            pass
        self._set_low_water()

    def _set_low_water(self) -> None:
        """Be woken for a good piece of what is sure to come, not for every packet of it."""
        least = LOW_WATER_BYTES if self._reply is not None and self._left_bytes >= LOW_WATER_BYTES + TLS_ROOM_BYTES else 1
        if self.sock is not None and least != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._low_water = least

    def _receive_some(self) -> int:
        """One read from the socket: of a reply's head, its text, its bytes, or bytes of a cancelled job."""
        assert self.sock is not None  # noqa: S101
        if self._reply is None and (count := self._begin_expected(self.sock)):
            self.received_bytes += count
            return count
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

    def _begin_expected(self, sock: socket.socket) -> int:
        """Take the head of the reply that is due, and of its bytes what has come; 0 where it is another, or has not come."""
        request = self._requests[0] if self._requests and not self._head else None
        if not isinstance(request, _ReadRequest) or request.job is None:
            return 0
        count = self._calls.begin_reply(sock, request.target)
        if count:
            self._reply = wire.ReplyHead(wire.Status.OK, request.request_id, request.payload_bytes)
            self._left_bytes = request.target.remaining_bytes
        return count

    def _receive_payload(self, sock: socket.socket, reply: wire.ReplyHead) -> int:
        request = self._requests[0]
        is_read = isinstance(request, _ReadRequest)
        if isinstance(request, _ReadRequest) and reply.status is wire.Status.OK and request.job is not None:
            return self._calls.receive(sock, request.target)
        data = sock.recv(min(self._left_bytes, _SCRATCH_BYTES))
        if reply.status is not wire.Status.OK or self.state is LinkState.HANDSHAKE or not is_read:
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
        self._outbox.appendleft(vectors_of(secret.handshake(challenge, nonce)))
        self._requests.appendleft(_ReadRequest(_HANDSHAKE_ID, wire.PROOF_BYTES, partial(_in_buffer, _NO_BYTES), None))
        self.state = LinkState.HANDSHAKE

    def _begin_reply(self, reply: wire.ReplyHead) -> None:
        self._text.clear()
        if not self._requests or reply.request_id != self._requests[0].request_id:
            raise ProtocolError(f"a reply to request {reply.request_id}, which is not the one that is due")
        request = self._requests[0]
        requested = request.payload_bytes if isinstance(request, _ReadRequest) else 0
        if isinstance(request, _Opening) and reply.payload_bytes <= wire.MAX_ENDS_BYTES:
            requested = reply.payload_bytes
        if reply.status is wire.Status.OK and reply.payload_bytes != requested:
            raise ProtocolError(f"a reply of {reply.payload_bytes} bytes to a request for {requested}")
        self._reply = reply
        self._left_bytes = reply.payload_bytes

    def _end_reply(self, reply: wire.ReplyHead) -> list[Answer]:
        request = self._requests.popleft()
        self._reply = None
        text = self._text.decode(errors="replace")
        if reply.status is wire.Status.REFUSED:
            raise PeerRefused(text)
        if isinstance(request, _Opening):
            return self._on_stream(wire.unpack_ends(self._text))
        if isinstance(request, _Frame):
            return [self._end_of(request, reply.status, text)]
        if request.request_id == _HANDSHAKE_ID:
            self._on_proof()
        if request.job is None:
            return []
        if reply.status is wire.Status.RANGE:
            return [Answer(request.job, 0, f"RangeError: {self}: {text}")]
        if request.land is not None:
            # Not before the whole reply is there: a job that is cancelled meanwhile must not touch its memory again.
            try:
                request.land()
            except TransportError as error:
                return [Answer(request.job, 0, f"TransportError: {self}: {error}")]
        return [Answer(request.job, request.payload_bytes)]

    def _on_stream(self, ends: dict[int, wire.Status]) -> list[Answer]:
        """The peer has taken this connection as a stream: of what an earlier one had on its way, send what is missing."""
        self.is_stream, self.resume_at = True, None
        kept = self.frames()
        answers = []
        for frame in kept:
            self._requests.remove(frame)
            if frame.request_id in ends:
                text = "refused before the connection broke" if ends[frame.request_id] else ""
                answers.append(self._end_of(frame, ends[frame.request_id], text))
            else:
                frame.rewind()
                self._requests.append(frame)
                self._outbox.append(frame.unsent)
        if not self._unstored_bytes:
            self.resume_by = None  # nothing is left that could show whether it gets further
        return answers

    def _end_of(self, frame: _Frame, status: wire.Status, text: str) -> Answer:
        self._unstored_bytes -= frame.size_bytes + 1
        self.resume_by = None
        if status is wire.Status.OK:
            return Answer(frame.job, frame.size_bytes)
        name = "RangeError" if status is wire.Status.RANGE else "PeerRefused"
        return Answer(frame.job, 0, f"{name}: {self}: {text}")

    def _on_proof(self) -> None:
        if not hmac.compare_digest(self._text, self._proof):
            raise PeerLost(
                "the process that listens there now does not know the token of the peer's card and the cluster key: the peer "
                "is gone, and its port is another process's; nothing was taken from it. Fetch the peer's card again"
            )
        self.state, self.attempts = LinkState.OPEN, 0


def _in_buffer(received: npt.NDArray[np.uint8]) -> Vectors:
    return Vectors(np.array([[received.ctypes.data, len(received)]], np.uint64), received)


def _land(staging: RegionStaging, received: npt.NDArray[np.uint8], pieces: Runs) -> None:
    staging.room(len(received))[:] = received.data
    staging.scatter(pieces)


class TcpPeer:
    """The links to one peer; the second and later ones are opened only while those before them are full of requests.

    A link that could not be opened beside others rests for a while; the others go on.
    """

    def __init__(self, peer: PeerRank, links: Sequence[TcpLink]) -> None:
        self.peer = peer
        self.session = secrets.randbits(62)
        self._stream_of: dict[Ticket, TcpLink] = {}
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

    def link_for_frame(self, job: BatchJob[TcpPeer], now: float) -> TcpLink | None:
        """The link that shall carry the next frame of `job`, or one to open, as a connection or as a stream; None: wait."""
        stream = self._stream_of.get(job.ticket)
        if stream is not None:
            # Also while it is broken: on another one the last frame would be stored before those that are to be sent again.
            return stream if stream.has_frame_room else None
        roomy = [link for link in self.links if link.has_frame_room]
        if roomy:
            return min(roomy, key=lambda link: len(link.frames()))
        if any(link.state in _OPENING or link.is_opening_stream or link.is_resuming for link in self.links):
            return None
        plain = next((link for link in self.links if link.state is LinkState.OPEN and not link.is_stream), None)
        return plain or next((each for each in self.links if each.state is LinkState.CLOSED and each.rests_until <= now), None)

    def bind(self, job: BatchJob[TcpPeer], link: TcpLink) -> None:
        """Keep the frames of `job` on `link`, until it has none left to queue."""
        if job.cursor.remaining_bytes and job.notice:
            self._stream_of[job.ticket] = link
        else:
            self._stream_of.pop(job.ticket, None)

    def has_bound(self, link: TcpLink) -> bool:
        """Whether `link` is to take further frames of a job."""
        return any(stream is link for stream in self._stream_of.values())

    def is_bound(self, job: BatchJob[TcpPeer]) -> bool:
        """Whether a stream has frames of `job`, and takes the others too."""
        return job.ticket in self._stream_of

    def has_frames_of(self, job: BatchJob[TcpPeer]) -> bool:
        return job.direction is Direction.WRITE and any(link.has_frames_of(job) for link in self.links)

    @property
    def has_frames(self) -> bool:
        return any(link.frames() for link in self.links)

    def forget(self, job: BatchJob[TcpPeer]) -> None:
        self._stream_of.pop(job.ticket, None)
        for link in self.links:
            link.forget(job)
            link.drop_unsent(job)


class TcpMover(Mover[TcpPeer]):
    """Owns the links' sockets while its thread runs; ends once the ledger is shut, and then closes them."""

    def __init__(self, ledger: Ledger[TcpPeer], region: Region, settings: TransportSettings, writer: bytes) -> None:
        """`writer` is the name under which this side writes."""
        self._region = region
        self._writer = writer
        self._staging = region.open_staging()
        self._slice_bytes = settings.slice_bytes
        self._timeout_s = settings.timeout_s
        self._open: set[TcpLink] = set()
        self._resuming: set[TcpLink] = set()
        self._ending: dict[Ticket, tuple[str, bool]] = {}
        """Jobs that end before their last byte: how, once none of their frames is on its way."""
        self._leaving: set[TcpPeer] = set()
        """Peers that were revoked, and have frames on their way."""
        self._selector = BusySelector(settings.busy_poll_s)
        self._selector.register(ledger.work.fd, selectors.EVENT_READ)
        super().__init__("tcp", ledger, settings.timeout_s)

    def _stop(self) -> tuple[()]:
        self._let_frames_end()
        for link in list(self._open):
            self._shut_link(link)
        self._selector.close()
        if self._staging is not None:
            self._staging.close()
        return ()

    def _let_frames_end(self) -> None:
        """Wait for the replies to frames that have begun to leave, so that nothing lands once this side is closed."""
        self._selector.unregister(self._ledger.work.fd)
        for link in self._open:
            link.drop_unsent()
        give_up_at = time.monotonic() + self._timeout_s
        while any(link.frames() for link in self._open) and (left := give_up_at - time.monotonic()) > 0:
            self._resuming.clear()  # nothing is opened again, and a time that has come would keep `select` from waiting
            for key, events in self._selector.select(min(left, self._wait_s(time.monotonic()))):
                if key.data in self._open:
                    self._drive(key.data, events)
            self._expire(time.monotonic())

    def _move(self) -> None:
        # What was sent has made room for more, of which no socket will notify us: then nothing is waited for.
        has_more = [peer for peer in self._schedule.links() if self._feed(peer)]
        self._resume(time.monotonic())
        for key, events in self._selector.select(0 if has_more else self._wait_s(time.monotonic())):
            if key.data in self._open:  # not when one before it has failed their peer
                self._drive(key.data, events)
        self._expire(time.monotonic())

    def _cancel(self, job: BatchJob[TcpPeer]) -> None:
        if self._ledger.is_in_flight(job):
            self._end(job, "cancelled", cancelled=True)

    def _revoke(self, link: TcpPeer) -> None:
        """Fail its jobs; those with frames on their way when the peer has replied to these, so that nothing lands later."""
        if not link.has_frames or any(each.is_resuming for each in link.links):
            self._fail_peer(link, REVOKED, waiting=True)
            return
        self._leaving.add(link)
        started = [frame.job for each in link.links for frame in each.frames()]
        jobs = {job.ticket: job for job in [*self._schedule.discard_link(link, waiting=True), *started]}
        for job in jobs.values():
            self._end(job, REVOKED)
        self._leave_if_quiet(link)

    def _leave_if_quiet(self, peer: TcpPeer) -> None:
        if peer in self._leaving and not peer.has_frames:
            self._fail_peer(peer, REVOKED)

    def _resume(self, now: float) -> None:
        """Open links again that broke with frames on them."""
        for link in [link for link in self._resuming if link.resume_at is not None and link.resume_at <= now]:
            self._resuming.discard(link)
            if link.state is LinkState.CLOSED:
                self._attempt(link, self._open_link)
                self._watch(link)

    def _feed(self, peer: TcpPeer) -> bool:
        """Ask for, or send, as much of the peer's ready jobs as its windows take; connect first where needed.

        Returns whether more could be queued at once: few frames are queued at a time, so that a cancel takes the others back.
        """
        while (found := self._next_of(peer)) is not None:
            job, link = found
            if link is None:
                self._schedule.discard(job)
                self._ledger.finish(job)
            elif link.state is LinkState.CLOSED:
                self._attempt(link, self._open_link)
            elif job.direction is Direction.READ:
                self._ask(link, job)
                self._attempt(link, TcpLink.send)  # before anything else is looked at: the peer has the longer way to go
            elif link.is_stream:
                self._write(link, job)
            else:
                link.open_stream(self._opening(link))
        for link in peer.links:
            if link.has_to_write and link.state is not LinkState.CONNECTING:
                self._attempt(link, TcpLink.send)
            self._watch(link)
        return self._next_of(peer) is not None

    def _next_of(self, peer: TcpPeer) -> tuple[BatchJob[TcpPeer], TcpLink | None] | None:
        """The first ready job that can go on, with its link, which may have to be opened; without one where it is empty.

        Jobs go on in order, but for one that waits for its own stream: it does not hold up those that another one takes. At
        most as many jobs are passed over as there are streams.
        """
        now = time.monotonic()
        for job in self._schedule.ready(peer):
            if not job.cursor.remaining_bytes and not job.notice:
                return job, None
            writes = job.direction is Direction.WRITE
            link = peer.link_for_frame(job, now) if writes else peer.link_for_more(now)
            if link is not None:
                return job, link
            if not peer.is_bound(job):
                break
        return None

    def _ask(self, link: TcpLink, job: BatchJob[TcpPeer]) -> None:
        runs = job.cursor.peek(self._slice_bytes, wire.MAX_PIECES)
        job.cursor.advance(link.ask(job, runs, self._region, self._staging))
        if not job.cursor.remaining_bytes:
            self._schedule.discard(job)

    def _write(self, link: TcpLink, job: BatchJob[TcpPeer]) -> None:
        runs = job.cursor.peek(min(self._slice_bytes, _FRAME_BYTES), wire.MAX_PIECES)
        size_bytes = int(runs[:, 2].sum())
        is_last = size_bytes == job.cursor.remaining_bytes
        link.write(job, runs, self._region, self._staging, job.notice if is_last else b"")
        job.cursor.advance(size_bytes)
        job.link.bind(job, link)
        if is_last:
            self._schedule.discard(job)

    def _opening(self, link: TcpLink) -> wire.OpenBody:
        assert link.owner is not None  # noqa: S101
        return wire.OpenBody(self._writer, link.owner.session, link.stream, link.is_resuming)

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
        before = link.state
        for answer in link.receive():
            self._on_answer(answer)
        if before is LinkState.HANDSHAKE and link.state is LinkState.OPEN and link.is_resuming:
            link.open_stream(self._opening(link))  # the one that broke goes on here
            link.send()

    def _on_answer(self, answer: Answer) -> None:
        job = answer.job
        if not self._ledger.is_in_flight(job):
            return
        job.moved_bytes += answer.moved_bytes
        if answer.error:
            self._end(job, answer.error)
        elif job.moved_bytes == job.cursor.total_bytes and not job.link.has_frames_of(job):
            self._ending.pop(job.ticket, None)  # it was complete before it could be ended
            self._ledger.finish(job)
        elif job.ticket in self._ending:
            self._end(job, "")
        self._leave_if_quiet(job.link)

    def _end(self, job: BatchJob[TcpPeer], error: str, *, cancelled: bool = False) -> None:
        """Finish a job before its last byte; what still arrives for it will be dropped.

        A write is over when the frames that have begun to leave are: until then they may land.
        """
        self._schedule.discard(job)
        job.link.forget(job)
        self._ending.setdefault(job.ticket, (error, cancelled))
        if not job.link.has_frames_of(job):
            self._finish(job, error)

    def _finish(self, job: BatchJob[TcpPeer], error: str, *, may_land: bool = False) -> None:
        """End a job; how, was decided first by what ended it. `may_land`: frames of it are on their way, and given up."""
        error, cancelled = self._ending.pop(job.ticket, (error, False))
        self._ledger.finish(job, error, cancelled=cancelled, may_land=may_land)

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
            if not self._opens_again(link) and not self._suspends(link, error):
                self._fail_link(link, f"PeerLost: {link}: {tls_reason(error)}")
        except ssl.SSLError as error:
            self._fail_link(link, f"PeerRefused: {link}: {tls_reason(error)}")
        except OSError as error:
            if not self._opens_again(link) and not self._suspends(link, error):
                self._fail_link(link, f"PeerLost: {link}: {error}")

    def _opens_again(self, link: TcpLink) -> bool:
        """Whether a link that the peer closed during the handshake may connect once more: its place may have gone to another.

        The jobs stay in the schedule, and the next turn opens the link.
        """
        # One that is resumed has its own limit, see `_suspends`.
        if link.state not in _HANDSHAKES or link.attempts >= _ATTEMPTS or link.is_resuming:
            return False
        self._shut_link(link)
        return True

    def _suspends(self, link: TcpLink, error: OSError) -> bool:
        """Whether a link that broke as a stream with something left, and nothing else, is opened again to go on with it."""
        now = time.monotonic()
        is_gone = isinstance(error, ConnectionRefusedError) or link.owner in self._leaving
        # Also of one that was opened as a stream in between: a connection that is cut before a frame is in gets nowhere.
        is_late = link.resume_by is not None and now >= link.resume_by
        if is_gone or is_late or not link.can_resume:
            return False
        _log.info("a stream of writes to %s is resumed: %s", link, error)
        self._unregister(link)
        link.suspend(now, self._timeout_s)
        self._resuming.add(link)
        return True

    def _fail_link(self, link: TcpLink, error: str) -> None:
        """Close a link that is lost: alone where it was not open yet and the peer has another that is, else all of its peer."""
        assert link.owner is not None  # noqa: S101
        # Nor alone where it is resumed: its frames, and what was to follow them, would be forgotten.
        if link.state is LinkState.OPEN or link.is_resuming or not link.owner.has_other_open(link):
            self._fail_peer(link.owner, error)
            return
        _log.warning("one connection fewer for %g s: %s", self._timeout_s, error)
        self._shut_link(link)
        link.rests_until = time.monotonic() + self._timeout_s

    def _fail_peer(self, peer: TcpPeer, error: str, *, waiting: bool = False) -> None:
        """Close the connections and fail the jobs that used them; the next ready job connects anew."""
        jobs = {job.ticket: job for job in self._schedule.discard_link(peer, waiting=waiting)}
        # What a closed connection had sent lies in buffers of the peer, which goes on to store it.
        on_their_way = {frame.job.ticket for link in peer.links for frame in link.frames()}
        for link in peer.links:
            jobs.update((job.ticket, job) for job in self._shut_link(link))
        self._leaving.discard(peer)
        peer.session = secrets.randbits(62)  # what was not acknowledged has failed, and must not count there later
        for job in jobs.values():
            peer.forget(job)
            self._finish(job, error, may_land=job.ticket in on_their_way)

    def _shut_link(self, link: TcpLink) -> list[BatchJob[TcpPeer]]:
        self._unregister(link)
        self._resuming.discard(link)
        return link.close()

    def _unregister(self, link: TcpLink) -> None:
        if link in self._open and link.sock is not None:
            self._selector.unregister(link.sock)
        self._open.discard(link)

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
        deadlines += [link.resume_at for link in self._resuming if link.resume_at is not None]
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
    _alternative = (
        "the side that holds the target has to read, or set fenced_writes (--fenced-writes) on both sides, which lets peers "
        "write until they are revoked"
    )
    _write_setting = "fenced_writes"

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        if settings.fenced_writes:
            self.late_writes, self.directions = LateWrites.REVOCABLE, frozenset(Direction)
        loops = load_loops()
        self._server = RegionServer(region, settings, loops, self._arrived)
        self._calls = VectorCalls(loops) if settings.tls is None else TlsCalls(loops)
        ledger: Ledger[TcpPeer] = Ledger(region, settings)
        writer = wire.writer_name(self._server.secret.token)
        super().__init__(region, settings, ledger, TcpMover(ledger, region, settings, writer))

    def _details(self) -> dict[str, str | int]:
        host = self._settings.advertise_host or self._server.host
        details: dict[str, str | int] = {"host": host, "port": self._server.port, "token": self._server.secret.token.hex()}
        return details | ({} if self._settings.tls is None else {"tls": 1})

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        if len(batch.notice) > wire.MAX_NOTICE_BYTES or (batch.notice and batch.direction is Direction.READ):
            raise TransportError(
                f"a notice of {len(batch.notice)} bytes with a {batch.direction}; a write may have {wire.MAX_NOTICE_BYTES}"
            )
        return super().post(batch, after)

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        super().connect(peer, endpoint)
        if self._settings.fenced_writes:
            self._server.gate.admit(peer, wire.writer_name(bytes_detail(endpoint, "token")))

    def revoke(self, peer: PeerRank) -> None:
        """End all use of `peer`, both ways: when this returns, nothing that it sends is stored."""
        self._server.gate.revoke(peer)
        super().revoke(peer)

    def fence_peer(self, peer: PeerRank, epoch: int) -> None:
        self._server.gate.fence_peer(peer, epoch)

    def reset_region(self, epoch: int) -> None:
        self._server.gate.reset_region(epoch)

    def take_arrivals(self) -> list[Arrival]:
        return self._server.gate.take_arrivals()

    def _arrived(self) -> None:
        self._ledger.ring()

    @property
    def _closing_s(self) -> float:
        return self._settings.timeout_s * (2 if self._settings.fenced_writes else 1)

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
            [
                TcpLink(peer, found[0], found[4], secret, self._calls, self._settings.tls, stream)
                for stream in range(self._settings.streams)
            ],
        )

    def _release(self) -> None:
        if not self._server.stop(self._settings.timeout_s):
            raise TransportError(f"the tcp server did not end within {self._settings.timeout_s:g} s; its memory is still read")
