"""The other end of a control connection, on a blocking socket: of a holder of the cluster key, or of an attacker."""

from __future__ import annotations

import secrets
import socket
import time
from typing import Self

from kvbaton.core.auth import NONCE_BYTES, Session
from kvbaton.errors import ProtocolError
from kvbaton.wire.zmtp import Zmtp, ZmtpLimits, ZmtpRefused, encode_frame

__all__ = ["GREETING", "READY", "WirePeer", "keyed_ready"]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_LIMITS = ZmtpLimits(64 << 20)
_NONCE = b"X-KVBaton-Nonce"


def keyed_ready(nonce: bytes = b"n" * NONCE_BYTES) -> bytes:
    """The handshake of a dialler that claims to have a key."""
    zmtp = Zmtp(is_listener=False, extra={_NONCE: nonce})
    return zmtp.outgoing()


class WirePeer:
    """Dials an address, or takes one connection at a listening socket; `key` is what it seals with."""

    def __init__(self, sock: socket.socket, key: bytes | None = None, *, is_listener: bool = False) -> None:
        self.sock = sock
        self.received = b""
        self.sent = b""
        self.reason = ""
        self._key = key
        self._is_listener = is_listener
        self._is_proven = False
        self._messages: list[bytes] = []
        extra = None if key is None else {_NONCE: secrets.token_bytes(NONCE_BYTES)}
        self._zmtp = Zmtp(_LIMITS, is_listener=is_listener, extra=extra)
        self._zmtp.trust()
        self.session: Session | None = None
        self.send_bytes(self._zmtp.outgoing())

    @classmethod
    def dial(cls, port: int, key: bytes | None = None, timeout_s: float = 10.0) -> Self:
        """Connect, and do the handshake."""
        peer = cls(socket.create_connection(("127.0.0.1", port), timeout=timeout_s), key)
        peer.shake_hands()
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def shake_hands(self) -> None:
        """Wait for the handshake of the other end. Another key there is ignored, as an attacker would do."""
        while not self._zmtp.is_ready and not self.reason:
            self._receive_some()
        if self._key is None or self.reason:
            return
        ours, theirs = self._zmtp.own_ready, self._zmtp.peer_ready
        dialled, accepted = (theirs, ours) if self._is_listener else (ours, theirs)
        self.session = Session(self._key, dialled=dialled, accepted=accepted, is_listener=self._is_listener)
        self.send_frame(self.session.seal(b""))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.sent += data
        self.sock.sendall(data)

    def send_frame(self, *parts: bytes) -> None:
        """Send a message as it is, without a seal."""
        *first, last = parts
        self.send_bytes(b"".join(_with_more(part) for part in first) + encode_frame(last))

    def send(self, content: bytes) -> None:
        """Send a message as a holder of the key does."""
        self.send_frame(content if self.session is None else self.session.seal(content))

    def receive(self, timeout_s: float = 10.0) -> bytes:
        """The content of the next message. Raises AssertionError when there is none, EOFError at the end of the connection."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            while not self._messages:
                assert time.monotonic() < give_up_at, "nothing was sent"
                self._receive_some()
            message = self._messages.pop(0)
            if self.session is None:
                return message
            try:
                content = self.session.open(message)
            except ProtocolError:
                content = message
            if self._is_proven:
                return content
            self._is_proven = True

    def is_ended(self, timeout_s: float = 10.0) -> bool:
        """Whether the other end closes the connection in that time; `reason` is what it stated."""
        self.sock.settimeout(timeout_s)
        try:
            while True:
                self._receive_some()
        except (EOFError, ConnectionError):
            return True
        except TimeoutError:
            return False

    def _receive_some(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise EOFError(self.reason or "the connection was closed")
        self.received += data
        if self.reason:
            return
        try:
            self._messages += [part for message in self._zmtp.feed(data) for part in message]
        except ZmtpRefused as error:
            self.reason = str(error)
        if isinstance(self._zmtp.violation, ZmtpRefused):
            self.reason = str(self._zmtp.violation)
        if out := self._zmtp.outgoing():
            self.send_bytes(out)


def _with_more(part: bytes) -> bytes:
    frame = encode_frame(part)
    return bytes((frame[0] | 1,)) + frame[1:]
