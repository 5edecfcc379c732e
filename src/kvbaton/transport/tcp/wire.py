"""The format of the tcp transport: hello and handshake, then requests for pieces of the owner's region, and their bytes.

All numbers are little-endian. The owner sends a hello with a random challenge. The reader's handshake has a random nonce and a
digest of both and of the incarnation that it means, keyed with the endpoint's token and the cluster key: an eavesdropper learns
neither, a replayed handshake does not fit the next challenge, and a restarted process on the same port refuses readers of the
earlier one. The reply to the handshake carries the owner's digest of the same, made for another purpose: a process that has
taken over the port of one that is gone cannot make it, and the reader takes no byte from it.
Every request, and the handshake, is answered by one reply in order; a reply with another status than OK carries a text.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass, replace

import numpy as np

from kvbaton.core.auth import ClusterKey, keys_of
from kvbaton.errors import ProtocolError
from kvbaton.transport.base import Runs

__all__ = [
    "CHALLENGE_BYTES",
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
    "ReplyHead",
    "Secret",
    "Status",
    "may_be_handshake",
    "pack_hello",
    "pack_reply",
    "pack_request",
    "unpack_handshake",
    "unpack_hello",
    "unpack_pieces",
    "unpack_reply",
    "unpack_request",
]

TOKEN_BYTES = 16
MAX_TEXT_BYTES = 512
MAX_PIECES = 8192
"""Most pieces that one request may ask for."""

MAX_REPLY_BYTES = 64 << 20
"""Most bytes that one request may ask for."""

_MAGIC = b"KVBATON\x03"
_REQUEST = struct.Struct("<4sIQ")
_REQUEST_MARK = b"READ"
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


class Status(enum.IntEnum):
    """How a request was answered."""

    OK = 0
    REFUSED = 1
    RANGE = 2


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
    return _REQUEST.pack(_REQUEST_MARK, len(runs), request_id) + pieces.tobytes()


def unpack_request(data: bytes | bytearray) -> tuple[int, int]:
    """Request id and number of pieces; raises ProtocolError for anything else."""
    mark, count, request_id = _REQUEST.unpack(data)
    if mark != _REQUEST_MARK or not 0 < count <= MAX_PIECES:
        raise ProtocolError(f"no request: mark {mark!r}, {count} pieces (1 to {MAX_PIECES} are allowed)")
    return request_id, count


def unpack_pieces(data: bytes | bytearray) -> Runs:
    """The pieces of a request, shape (n, 2): offset, bytes. Raises ProtocolError when they ask for too much."""
    pieces = np.frombuffer(bytes(data), "<u8").reshape(-1, 2).astype(np.uint64, copy=False)
    largest = int(pieces[:, 1].max())
    total = largest if largest > MAX_REPLY_BYTES else int(pieces[:, 1].sum())
    if total > MAX_REPLY_BYTES:
        raise ProtocolError(f"one request asks for {total} bytes; at most {MAX_REPLY_BYTES} are allowed")
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
