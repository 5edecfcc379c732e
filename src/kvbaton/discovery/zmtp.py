"""The bound side of a ZeroMQ connection (ZMTP 3, NULL mechanism), as bytes in and messages out; no sockets in here.

Why not the library: a ZeroMQ socket takes in all parts of a message before it hands over the first, and has no limit for
them, so one sender with an endless message fills the memory of whoever listens. Here every number has a limit, and what is
beyond it ends the connection with a cause that can be counted. Senders use the library, as a DEALER.
"""

from __future__ import annotations

import enum

from kvbaton.errors import ProtocolError

__all__ = ["MAX_FRAME_BYTES", "MAX_FRAMES", "Zmtp", "ZmtpError", "encode_frame"]

MAX_FRAME_BYTES = 16 * 1024
"""A longer frame, or a longer message, ends the connection."""

MAX_FRAMES = 8
"""A message of more frames ends the connection."""

_GREETING_BYTES = 64
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_SIGNATURE_BYTES = 10
_WELCOME_TYPES = (b"DEALER", b"REQ", b"ROUTER")
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_PING_CONTEXT = 16


class ZmtpError(ProtocolError):
    """The sender does not speak ZeroMQ as it must; `is_too_long` when it said too much."""

    def __init__(self, message: str, is_too_long: bool = False) -> None:
        super().__init__(message)
        self.is_too_long = is_too_long


class _Stage(enum.Enum):
    GREETING = "greeting"
    HANDSHAKE = "handshake"
    TRAFFIC = "traffic"


class Zmtp:
    """One connection: feed it what was received, send what `outgoing` gives."""

    def __init__(self) -> None:
        self._stage = _Stage.GREETING
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._outgoing = bytearray(_GREETING)

    @property
    def is_ready(self) -> bool:
        """Whether both sides have greeted each other."""
        return self._stage is _Stage.TRAFFIC

    def outgoing(self) -> bytes:
        """What is to be sent, given once."""
        out = bytes(self._outgoing)
        self._outgoing.clear()
        return out

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are complete now, as lists of frames. Raises ZmtpError when the connection must end."""
        self._buffer += data
        if self._stage is _Stage.GREETING and not self._greeted():
            return []
        messages: list[list[bytes]] = []
        at = 0
        while (found := self._frame_at(at)) is not None:
            flags, body, at = found
            if flags & _COMMAND:
                self._obey(body)
            elif self._stage is not _Stage.TRAFFIC:
                raise ZmtpError("a message came before the handshake was over")
            else:
                self._frames.append(body)
                if not flags & _MORE:
                    messages.append(self._frames)
                    self._frames = []
                elif len(self._frames) >= MAX_FRAMES or sum(map(len, self._frames)) > MAX_FRAME_BYTES:
                    raise ZmtpError(f"a message has more than {MAX_FRAMES} frames or {MAX_FRAME_BYTES} bytes", is_too_long=True)
        del self._buffer[:at]
        return messages

    def _greeted(self) -> bool:
        head = self._buffer[:_SIGNATURE_BYTES]
        if head and (head[0] != _GREETING[0] or (len(head) == _SIGNATURE_BYTES and not head[9] & 1)):
            raise ZmtpError("the sender does not speak ZeroMQ; register with a DEALER socket")
        if len(self._buffer) > _SIGNATURE_BYTES and self._buffer[_SIGNATURE_BYTES] < _GREETING[_SIGNATURE_BYTES]:
            raise ZmtpError(f"the sender speaks ZMTP {self._buffer[_SIGNATURE_BYTES]}; 3 is needed, which libzmq 4 speaks")
        if len(self._buffer) < _GREETING_BYTES:
            return False
        mechanism = bytes(self._buffer[12:32]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise ZmtpError(f"the sender wants the security mechanism {mechanism[:20]!r}; only NULL is known here")
        del self._buffer[:_GREETING_BYTES]
        self._stage = _Stage.HANDSHAKE
        self._outgoing += _command(b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b""))
        return True

    def _frame_at(self, at: int) -> tuple[int, bytes, int] | None:
        """The frame at this place of the buffer: its flags, its body and where the next one begins."""
        buffer = self._buffer
        if len(buffer) < at + 2:
            return None
        flags = buffer[at]
        if flags > _MORE | _LONG | _COMMAND or (flags & _MORE and flags & _COMMAND):
            raise ZmtpError(f"a frame has the flags {flags:#x}, which mean nothing")
        start = at + (9 if flags & _LONG else 2)
        if len(buffer) < start:
            return None
        size = int.from_bytes(buffer[at + 1 : start], "big")
        if size > MAX_FRAME_BYTES:
            raise ZmtpError(f"a frame has {size} bytes; the limit is {MAX_FRAME_BYTES}", is_too_long=True)
        end = start + size
        return None if len(buffer) < end else (flags, bytes(buffer[start:end]), end)

    def _obey(self, body: bytes) -> None:
        name, content = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if self._stage is _Stage.HANDSHAKE:
            kind = _properties(content).get(b"socket-type", b"") if name == b"READY" else b""
            if kind not in _WELCOME_TYPES:
                raise ZmtpError(f"the sender is {(kind or name)[:40]!r}; register with a DEALER socket")
            self._stage = _Stage.TRAFFIC
        elif name == b"PING" and len(content) <= 2 + _MAX_PING_CONTEXT:
            self._outgoing += _command(b"PONG", content[2:])
        elif name != b"PONG":
            raise ZmtpError(f"the sender sent the command {name[:40]!r}, which means nothing here")


def encode_frame(body: bytes) -> bytes:
    """A message of one frame, as it goes on the wire."""
    return bytes((0, len(body))) + body if len(body) < 256 else b"\x02" + len(body).to_bytes(8, "big") + body


def _command(name: bytes, content: bytes) -> bytes:
    body = bytes((len(name),)) + name + content
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(content: bytes) -> dict[bytes, bytes]:
    """Names, in lower case, and values; what does not fit together is an error."""
    found: dict[bytes, bytes] = {}
    while content:
        name_end = 1 + content[0]
        size = int.from_bytes(content[name_end : name_end + 4], "big")
        end = name_end + 4 + size
        if end > len(content) or not content[0]:
            raise ZmtpError("the sender's handshake is cut off")
        found[content[1:name_end].lower()] = content[name_end + 4 : end]
        content = content[end:]
    return found
