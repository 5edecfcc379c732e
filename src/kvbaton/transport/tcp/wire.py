"""The format of the tcp transport: hello and handshake, then requests for pieces of the owner's region, and their bytes.

All numbers are little-endian. The owner sends a hello with a random challenge. The reader's handshake has a random nonce and a
digest of both and of the incarnation that it means, keyed with the endpoint's token and the cluster key: an eavesdropper learns
neither, a replayed handshake does not fit the next challenge, and a restarted process on the same port refuses readers of the
earlier one. The reply to the handshake carries the owner's digest of the same, made for another purpose: a process that has
taken over the port of one that is gone cannot make it, and the reader takes no byte from it.
Every request, and the handshake, is answered by one reply in order; a reply with another status than OK carries a text.

Requests to read, and replies that bring bytes, are known to vectors.c too.

Where the owner takes writes there are two more requests. OPEN names the writer, its session and the stream of that session
which this connection is; the reply has how the latest frames of that stream ended, so that one which broke is resumed. WRITE is
one frame: the epoch under which it was granted, the batch that it is part of, the pieces of the owner's region that it fills,
and behind them the bytes. A frame that ends a batch may carry a notice, which the owner hands out once all of it is stored.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvbaton.core.auth import ClusterKey, keys_of
from kvbaton.errors import ProtocolError
from kvbaton.transport.base import Runs

__all__ = [
    "CHALLENGE_BYTES",
    "FrameHead",
    "MAX_ENDS_BYTES",
    "MAX_NOTICE_BYTES",
    "MAX_PAYLOAD_BYTES",
    "OpenBody",
    "RECENT_FRAMES",
    "RequestHead",
    "RequestKind",
    "HANDSHAKE_BYTES",
    "HELLO_BYTES",
    "MAX_PIECES",
    "MAX_TEXT_BYTES",
    "NONCE_BYTES",
    "PIECE_BYTES",
    "PROOF_BYTES",
    "REPLY_BYTES",
    "REQUEST_BYTES",
    "TOKEN_BYTES",
    "WRITER_BYTES",
    "ReplyHead",
    "Secret",
    "Status",
    "may_be_handshake",
    "pack_ends",
    "pack_frame",
    "pack_hello",
    "pack_open",
    "pack_reply",
    "pack_request",
    "unpack_ends",
    "unpack_frame",
    "unpack_handshake",
    "unpack_hello",
    "unpack_open",
    "unpack_pieces",
    "unpack_reply",
    "unpack_request",
    "writer_name",
]

TOKEN_BYTES = 16
MAX_TEXT_BYTES = 512
MAX_PIECES = 8192
"""Most pieces that one request may ask for."""

MAX_PAYLOAD_BYTES = 64 << 20
"""Most bytes that one request may ask for, or one frame may bring."""

MAX_NOTICE_BYTES = 1024
"""Most bytes of a notice."""

RECENT_FRAMES = 64
"""Most frames of a stream without a reply; of so many the owner remembers how they ended."""

WRITER_BYTES = 16
"""Size of the name of a writer: a digest of the token in its own endpoint, so it is the one that its peer has connected."""

_MAGIC = b"KVBATON\x03"
_REQUEST = struct.Struct("<4sIQ")
_OPEN = struct.Struct(f"<QII{WRITER_BYTES}s")
_FRAME = struct.Struct("<QQ")
_END = struct.Struct("<QI")
_NOTICE_SHIFT = 16
_REPLY = struct.Struct("<4sIQQ")
_REPLY_MARK = b"DATA"

CHALLENGE_BYTES = 16
NONCE_BYTES = 16
PROOF_BYTES = 32
"""Size of the digest with which each end shows the other that it knows the secret."""

HELLO_BYTES = len(_MAGIC) + CHALLENGE_BYTES
HANDSHAKE_BYTES = len(_MAGIC) + NONCE_BYTES + PROOF_BYTES
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size
PIECE_BYTES = 16
MAX_ENDS_BYTES = RECENT_FRAMES * _END.size


class Status(enum.IntEnum):
    """How a request was answered. REFUSED ends the connection; the others that are not OK cost that request only."""

    OK = 0
    REFUSED = 1
    RANGE = 2
    STALE = 3
    UNSTORED = 4


class RequestKind(enum.Enum):
    """What a request is; the value is its mark."""

    READ = b"READ"
    OPEN = b"OPEN"
    WRITE = b"WRIT"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request; `body_bytes` follow it, and behind those of a WRITE the bytes of its pieces."""

    kind: RequestKind
    request_id: int
    count: int
    notice_bytes: int = 0

    @property
    def body_bytes(self) -> int:
        """What follows the head before the request can be judged."""
        if self.kind is RequestKind.READ:
            return self.count * PIECE_BYTES
        if self.kind is RequestKind.OPEN:
            return _OPEN.size
        return _FRAME.size + self.notice_bytes + self.count * PIECE_BYTES


@dataclass(frozen=True, slots=True)
class OpenBody:
    """Who writes, and which stream of which of its sessions a connection is; `resumes` one that was open before."""

    writer: bytes
    session: int
    stream: int
    resumes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FrameHead:
    """What a frame names before its bytes; `pieces` has the shape (n, 2): offset, bytes."""

    epoch: int
    batch: int
    notice: bytes
    pieces: Runs


_KINDS = {kind.value: kind for kind in RequestKind}


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The head of a reply; `payload_bytes` follow it."""

    status: Status
    request_id: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Secret:
    """What both ends of a connection must know: the endpoint's token, the cluster key, and which incarnation is meant.

    Where there are several keys, a reader proves itself with the first, and the owner looks for it among its own.
    """

    token: bytes
    cluster_key: ClusterKey
    incarnation: str

    def now(self) -> Secret:
        """The same with the first key that there is now, for one connection of a reader."""
        return replace(self, cluster_key=keys_of(self.cluster_key)[0])

    def fitting(self, handshake: bytes | bytearray, challenge: bytes) -> Secret | None:
        """The same with the key that a reader has proved, for the answer; None where none fits. Raises ProtocolError."""
        nonce = unpack_handshake(handshake)
        for key in keys_of(self.cluster_key):
            secret = replace(self, cluster_key=key)
            if hmac.compare_digest(handshake, secret.handshake(challenge, nonce)):
                return secret
        return None

    def handshake(self, challenge: bytes, nonce: bytes) -> bytes:
        """What a reader answers to `challenge`."""
        return _MAGIC + nonce + self._digest(b"kvbaton reader", challenge, nonce)

    def owner_proof(self, challenge: bytes, nonce: bytes) -> bytes:
        """What the owner of the memory answers to a handshake with `nonce`; no handshake is equal to it."""
        return self._digest(b"kvbaton owner", challenge, nonce)

    def _digest(self, purpose: bytes, challenge: bytes, nonce: bytes) -> bytes:
        first = keys_of(self.cluster_key)[0]
        key = hashlib.blake2b(self.token + first, digest_size=PROOF_BYTES, person=b"kvbaton tcp key").digest()
        text = challenge + nonce + self.incarnation.encode()
        return hashlib.blake2b(text, digest_size=PROOF_BYTES, key=key, person=purpose).digest()


def writer_name(token: bytes) -> bytes:
    """The name under which the process whose endpoint has `token` writes."""
    return hashlib.blake2b(token, digest_size=WRITER_BYTES, person=b"kvbaton writer").digest()


def pack_hello(challenge: bytes) -> bytes:
    """The first bytes of a connection, from the owner of the memory."""
    return _MAGIC + challenge


def unpack_hello(data: bytes | bytearray) -> bytes:
    """The challenge of a hello; raises ProtocolError for anything else."""
    if not data.startswith(_MAGIC):
        raise ProtocolError(f"no hello: {bytes(data[:16])!r}; the peer has another protocol or version")
    return bytes(data[len(_MAGIC) :])


def unpack_handshake(data: bytes | bytearray) -> bytes:
    """The nonce of a handshake; raises ProtocolError for anything else."""
    if not data.startswith(_MAGIC):
        raise ProtocolError(f"no handshake: {bytes(data[:16])!r}")
    return bytes(data[len(_MAGIC) : len(_MAGIC) + NONCE_BYTES])


def may_be_handshake(data: bytes | bytearray) -> bool:
    """Whether a handshake of this protocol and version can begin with `data`."""
    return _MAGIC.startswith(data[: len(_MAGIC)])


def pack_request(request_id: int, runs: Runs) -> bytes:
    """Ask for the source side of `runs`, in their order."""
    pieces = np.ascontiguousarray(runs[:, 0:3:2]).astype("<u8", copy=False)
    return _REQUEST.pack(RequestKind.READ.value, len(runs), request_id) + pieces.tobytes()


def pack_open(request_id: int, body: OpenBody) -> bytes:
    """Open a stream of a session, or resume it."""
    fixed = _OPEN.pack(body.session, body.stream, body.resumes, body.writer)
    return _REQUEST.pack(RequestKind.OPEN.value, 0, request_id) + fixed


def pack_frame(request_id: int, epoch: int, batch: int, notice: bytes, runs: Runs) -> bytes:
    """What precedes the bytes of a frame that fills the target side of `runs`, in their order."""
    pieces = np.ascontiguousarray(runs[:, 1:3]).astype("<u8", copy=False)
    head = _REQUEST.pack(RequestKind.WRITE.value, len(runs) | len(notice) << _NOTICE_SHIFT, request_id)
    return head + _FRAME.pack(epoch, batch) + notice + pieces.tobytes()


def pack_ends(ends: Iterable[tuple[int, Status]]) -> bytes:
    """How the latest frames of a stream ended."""
    return b"".join(_END.pack(frame, status) for frame, status in ends)


def unpack_ends(data: bytes | bytearray) -> dict[int, Status]:
    """Status by number of the frame; raises ProtocolError for anything else."""
    known = {status.value: status for status in Status}
    if len(data) % _END.size or any(status not in known for _, status in _END.iter_unpack(data)):
        raise ProtocolError(f"no ends of frames: {bytes(data[:16])!r}")
    return {frame: known[status] for frame, status in _END.iter_unpack(data)}


def unpack_request(data: bytes | bytearray) -> RequestHead:
    """The head of a request; raises ProtocolError for anything else."""
    mark, count, request_id = _REQUEST.unpack(data)
    kind = _KINDS.get(mark)
    if kind is None:
        raise ProtocolError(f"no request: mark {mark!r}, {count} pieces (1 to {MAX_PIECES} are allowed)")
    if kind is RequestKind.OPEN:
        if count:
            raise ProtocolError(f"a request to open a stream has {count} pieces; it has none")
        return RequestHead(kind, request_id, count)
    notice_bytes = 0
    if kind is RequestKind.WRITE:
        count, notice_bytes = count & (1 << _NOTICE_SHIFT) - 1, count >> _NOTICE_SHIFT
        if notice_bytes > MAX_NOTICE_BYTES:
            raise ProtocolError(f"a notice of {notice_bytes} bytes; at most {MAX_NOTICE_BYTES} are allowed")
    # A batch without bytes is still a frame where it has a notice.
    if not 0 < count <= MAX_PIECES and (count or not notice_bytes):
        raise ProtocolError(f"no request: mark {mark!r}, {count} pieces (1 to {MAX_PIECES} are allowed)")
    return RequestHead(kind, request_id, count, notice_bytes)


def unpack_open(data: bytes | bytearray) -> OpenBody:
    """The body of an OPEN."""
    session, stream, resumes, writer = _OPEN.unpack(data)
    return OpenBody(writer, session, stream, bool(resumes))


def unpack_frame(data: bytes | bytearray, notice_bytes: int) -> FrameHead:
    """The body of a WRITE; raises ProtocolError when it brings too much."""
    epoch, batch = _FRAME.unpack_from(data)
    behind = _FRAME.size + notice_bytes
    return FrameHead(epoch, batch, bytes(data[_FRAME.size : behind]), unpack_pieces(data[behind:]))


def unpack_pieces(data: bytes | bytearray) -> Runs:
    """The pieces of a request, shape (n, 2): offset, bytes. Raises ProtocolError when they are too much."""
    pieces = np.frombuffer(bytes(data), "<u8").reshape(-1, 2).astype(np.uint64, copy=False)
    largest = int(pieces[:, 1].max(initial=0))
    total = largest if largest > MAX_PAYLOAD_BYTES else int(pieces[:, 1].sum())
    if total > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"one request is about {total} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
    return pieces


def pack_reply(status: Status, request_id: int, payload_bytes: int) -> bytes:
    """The head of a reply."""
    return _REPLY.pack(_REPLY_MARK, status, request_id, payload_bytes)


def unpack_reply(data: bytes | bytearray) -> ReplyHead:
    """Read the head of a reply; raises ProtocolError for anything else."""
    mark, status, request_id, payload_bytes = _REPLY.unpack(data)
    if mark != _REPLY_MARK or status not in iter(Status):
        raise ProtocolError(f"no reply: mark {mark!r}, status {status}")
    if status != Status.OK and payload_bytes > MAX_TEXT_BYTES:
        raise ProtocolError(
            f"a reply with status {status} has {payload_bytes} bytes of text; at most {MAX_TEXT_BYTES} are allowed"
        )
    return ReplyHead(Status(status), request_id, payload_bytes)
