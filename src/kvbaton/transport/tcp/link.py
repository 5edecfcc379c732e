"""One connection to one peer, driven by the mover: requests go out, replies come straight into target memory."""

from __future__ import annotations

import enum
import errno
import hmac
import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbaton.errors import PeerLost, PeerRefused, ProtocolError
from kvbaton.transport.base import PeerRank, Region, Runs
from kvbaton.transport.ledger import BatchJob
from kvbaton.transport.tcp.sockets import tune
from kvbaton.transport.tcp.vectors import VectorCalls, Vectors
from kvbaton.transport.tcp.wire import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    ReplyHead,
    Secret,
    Status,
    pack_request,
    unpack_hello,
    unpack_reply,
)

__all__ = ["LinkState", "ReadAnswer", "TcpLink", "TcpPeer"]

_WINDOW = 2
_TURN_BYTES = 4 << 20
_LOW_WATER_BYTES = 1 << 20
_SCRATCH_BYTES = 256 << 10
_HANDSHAKE_ID = 0


class LinkState(enum.Enum):
    """How far a link is."""

    CLOSED = enum.auto()
    CONNECTING = enum.auto()
    HELLO = enum.auto()
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()


@dataclass(slots=True, eq=False)
class _ReadRequest:
    """A request without its reply; `job` is None once it was cancelled: the bytes are then read and dropped."""

    request_id: int
    payload_bytes: int
    target: Vectors
    job: BatchJob[TcpPeer] | None


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A reply that was received to its end for a job: its bytes are in, or `error` has why not."""

    job: BatchJob[TcpPeer]
    moved_bytes: int
    error: str = ""


class TcpLink:
    """The kept connection to one peer; for the mover's thread only. Methods raise PeerError or OSError when it is lost."""

    def __init__(self, peer: PeerRank, family: int, address: tuple[Any, ...], secret: Secret, calls: VectorCalls) -> None:
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
        self._low_water = 1
        self._outbox = bytearray()
        self._requests: deque[_ReadRequest] = deque()
        self._last_id = _HANDSHAKE_ID
        self._head = bytearray()
        self._reply: ReplyHead | None = None
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
        return self.state in (LinkState.CONNECTING, LinkState.HELLO, LinkState.HANDSHAKE) or bool(self._requests)

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

    def ask(self, job: BatchJob[TcpPeer], runs: Runs, region: Region) -> None:
        """Queue one request whose bytes go to the target side of `runs`."""
        self._last_id += 1
        target = Vectors(runs[:, 1:3] + np.array([region.address, 0], np.uint64), region)
        self._requests.append(_ReadRequest(self._last_id, target.total_bytes, target, job))
        self._outbox += pack_request(self._last_id, runs)

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
            self.state = LinkState.HELLO
        if self._outbox:
            del self._outbox[: self.sock.send(self._outbox)]

    def receive(self) -> Iterator[ReadAnswer]:
        """Take what has come, at most a turn's worth, straight into target memory; yields each answer when it is complete.

        An answer may be followed by the end of the connection, and counts all the same.
        """
        budget = _TURN_BYTES
        try:
            while budget > 0:
                budget -= self._receive_some()
                if self._reply is not None and not self._left_bytes:
                    yield from self._end_reply(self._reply)
        except BlockingIOError:
            pass
        self._set_low_water()

    def _set_low_water(self) -> None:
        """Be woken for a good piece of what is sure to come, not for every packet of it."""
        least = _LOW_WATER_BYTES if self._reply is not None and self._left_bytes >= _LOW_WATER_BYTES else 1
        if self.sock is not None and least != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._low_water = least

    def _receive_some(self) -> int:
        """One read from the socket: of a reply's head, its text, its bytes, or bytes of a cancelled job."""
        assert self.sock is not None  # noqa: S101
        if self._reply is None:
            expected = HELLO_BYTES if self.state is LinkState.HELLO else REPLY_BYTES
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

    def _receive_payload(self, sock: socket.socket, reply: ReplyHead) -> int:
        request = self._requests[0]
        if reply.status is Status.OK and request.job is not None:
            return self._calls.receive(sock, request.target)
        data = sock.recv(min(self._left_bytes, _SCRATCH_BYTES))
        if reply.status is not Status.OK or self.state is LinkState.HANDSHAKE:
            self._text += data
        return len(data)

    def _on_head(self) -> None:
        head, self._head = self._head, bytearray()
        if self.state is LinkState.HELLO:
            self._answer_hello(unpack_hello(head))
        else:
            self._begin_reply(unpack_reply(head))

    def _answer_hello(self, challenge: bytes) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._proof = self._secret.owner_proof(challenge, nonce)
        self._outbox += self._secret.handshake(challenge, nonce)
        self._requests.append(_ReadRequest(_HANDSHAKE_ID, PROOF_BYTES, Vectors(np.empty((0, 2), np.uint64)), None))
        self.state = LinkState.HANDSHAKE

    def _begin_reply(self, reply: ReplyHead) -> None:
        self._text.clear()
        if not self._requests or reply.request_id != self._requests[0].request_id:
            raise ProtocolError(f"a reply to request {reply.request_id}, which is not the one that is due")
        requested = self._requests[0].payload_bytes
        if reply.status is Status.OK and reply.payload_bytes != requested:
            raise ProtocolError(f"a reply of {reply.payload_bytes} bytes to a request for {requested}")
        self._reply = reply
        self._left_bytes = reply.payload_bytes

    def _end_reply(self, reply: ReplyHead) -> list[ReadAnswer]:
        request = self._requests.popleft()
        self._reply = None
        text = self._text.decode(errors="replace")
        if reply.status is Status.REFUSED:
            raise PeerRefused(text)
        if request.request_id == _HANDSHAKE_ID:
            self._on_proof()
        if request.job is None:
            return []
        if reply.status is Status.RANGE:
            return [ReadAnswer(request.job, 0, f"RangeError: {self}: {text}")]
        return [ReadAnswer(request.job, request.payload_bytes)]

    def _on_proof(self) -> None:
        if not hmac.compare_digest(self._text, self._proof):
            raise PeerLost(
                "the process that listens there now does not know the token of the peer's card and the cluster key: the peer "
                "is gone, and its port is another process's; nothing was taken from it. Fetch the peer's card again"
            )
        self.state, self.attempts = LinkState.OPEN, 0


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
        if any(link.state in (LinkState.CONNECTING, LinkState.HELLO, LinkState.HANDSHAKE) for link in self.links):
            return None
        return next((link for link in self.links if link.state is LinkState.CLOSED and link.rests_until <= now), None)

    def forget(self, job: BatchJob[TcpPeer]) -> None:
        """From now on drop the bytes that still arrive for `job`; its target memory is not touched again."""
        for link in self.links:
            link.forget(job)
