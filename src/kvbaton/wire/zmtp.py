"""One end of a ZeroMQ connection (ZMTP 3, NULL mechanism), as bytes in and messages out; no sockets in here.

Why not the library: a ZeroMQ socket takes in all parts of a message before it returns the first, and has no limit for their
number, so one sender with an endless message fills the memory of the process that listens; nor has it a limit for connections
or for silence. Here every number has a limit, and what is beyond it ends the connection with a cause that can be counted. The
other end may use the library: a DEALER may dial us, and we dial a ROUTER.

Until the owner calls `trust`, one message is returned at a time, so that the owner decides about the first before the second is
parsed, and frames have the limit for unknown peers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from kvbaton.errors import ProtocolError

__all__ = ["Zmtp", "ZmtpError", "ZmtpLimits", "ZmtpPartsError", "ZmtpRefused", "encode_error", "encode_frame"]

_GREETING_BYTES = 64
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_SIGNATURE_BYTES = 10
_TLS_RECORDS = (0x15, 0x16)
_DIALLERS = (b"DEALER", b"REQ", b"ROUTER")
_LISTENERS = (b"ROUTER",)
_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT = 256
_MAX_COMMAND_BYTES = 1024
_MAX_PING_CONTEXT = 16
_MAX_REASON_BYTES = 255


class ZmtpError(ProtocolError):
    """The peer breaks the rules of the wire; `is_too_long` when it sent too much."""

    def __init__(self, message: str, is_too_long: bool = False) -> None:
        super().__init__(message)
        self.is_too_long = is_too_long


class ZmtpPartsError(ZmtpError):
    """The peer sends a message of too many parts."""


class ZmtpRefused(ZmtpError):
    """The peer has ended the connection with an ERROR command; the message is its reason."""


class ZmtpLimits:
    """Bytes of a frame, and of all parts of a message; parts of a message. `unknown_bytes` counts before `trust`."""

    __slots__ = ("frame_bytes", "parts", "unknown_bytes")

    def __init__(self, frame_bytes: int = 16 * 1024, parts: int = 8, unknown_bytes: int | None = None) -> None:
        self.frame_bytes = frame_bytes
        self.parts = parts
        self.unknown_bytes = frame_bytes if unknown_bytes is None else unknown_bytes


class _ZmtpStage(enum.Enum):
    GREETING = "greeting"
    HANDSHAKE = "handshake"
    TRAFFIC = "traffic"


class Zmtp:
    """One connection: feed it what was received, send what `outgoing` returns. `extra` are properties of our READY command."""

    def __init__(
        self, limits: ZmtpLimits | None = None, *, is_listener: bool = True, extra: Mapping[bytes, bytes] | None = None
    ) -> None:
        self._limits = limits or ZmtpLimits()
        self._stage = _ZmtpStage.GREETING
        self._expects = _DIALLERS if is_listener else _LISTENERS
        self._is_trusted = False
        self._max_bytes = self._limits.unknown_bytes
        self._buffer = bytearray()
        self._missing_until = 0
        self._has_more = False
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        own = {b"Socket-Type": b"ROUTER" if is_listener else b"DEALER", b"Identity": b"", **(extra or {})}
        self.own_ready = b"\x05READY" + b"".join(_property(name, value) for name, value in own.items())
        self.peer_ready = b""
        self.peer_properties: dict[bytes, bytes] = {}
        self.violation: ZmtpError | None = None
        """What ends the connection, once the messages before it were returned."""
        self._outgoing = bytearray(_GREETING)
        if not is_listener:
            # Together with the greeting, which a listener of ours answers in one round trip; libzmq takes it as well.
            self._outgoing += _command(self.own_ready)
        self._is_listener = is_listener

    @property
    def is_ready(self) -> bool:
        """Whether both ends have sent READY."""
        return self._stage is _ZmtpStage.TRAFFIC

    @property
    def buffered_bytes(self) -> int:
        """What was received and is not yet part of a returned message."""
        return len(self._buffer) + self._parts_bytes

    @property
    def has_more(self) -> bool:
        """Whether `feed(b"")` may return another message: before `trust` there is one at a time."""
        return self._has_more

    @property
    def has_outgoing(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outgoing)

    def trust(self) -> None:
        """Take frames of full size, and many messages at a time, from now on."""
        self._is_trusted = True
        self._max_bytes = self._limits.frame_bytes

    def outgoing(self) -> bytes:
        """What is to be sent, returned once."""
        out = bytes(self._outgoing)
        self._outgoing.clear()
        return out

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are complete now, as lists of parts. Raises ZmtpError when the connection must end.

        Messages before the violation are returned first; `violation` holds it then, and the next call raises it.
        """
        if self.violation is not None:
            raise self.violation
        self._has_more = False
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._missing_until:
                return []
            # One copy into bytes, so that slices of it are the parts; a long frame gets here once, not once per packet.
            data = bytes(self._buffer)
            self._buffer.clear()
        messages: list[list[bytes]] = []
        try:
            used = self._read_greeting(data) if self._stage is _ZmtpStage.GREETING else 0
            if self._stage is not _ZmtpStage.GREETING:
                used = self._read_frames(data, used, messages)
        except ZmtpError as error:
            self._parts, self._parts_bytes = [], 0
            self.violation = error
            if not messages:
                raise
            return messages
        if used < len(data):
            self._buffer += data[used:] if used else data
        return messages

    def _read_frames(self, data: bytes, at: int, messages: list[list[bytes]]) -> int:
        """Append what is complete to `messages`; returns where the first incomplete frame begins.

        The body of one function, without helpers per frame: this loop is what a control message costs.
        """
        size_of_data, limit, is_trusted = len(data), self._max_bytes, self._is_trusted
        is_open = self._stage is _ZmtpStage.TRAFFIC
        self._missing_until = 0
        while at + 2 <= size_of_data:
            flags = data[at]
            if flags & _LONG:
                start = at + 9
                if size_of_data < start:
                    break
                size = int.from_bytes(data[at + 1 : start], "big")
            else:
                start, size = at + 2, data[at + 1]
            if flags & ~_LONG or self._parts or not is_open:
                # Not a message of one part: a command, one part of several, what came too early, or nothing that we know.
                self._check_head(flags, size)
            elif size > limit:
                raise _too_long(size, limit)
            end = start + size
            if size_of_data < end:
                self._missing_until = end - at
                break
            body, at = data[start:end], end
            if flags & _COMMAND:
                self._obey(body)
                is_open = self._stage is _ZmtpStage.TRAFFIC
                continue
            if flags & _MORE or self._parts:
                self._take_part(body, has_more=bool(flags & _MORE))
                if flags & _MORE:
                    continue
                messages.append(self._parts)
                self._parts, self._parts_bytes = [], 0
            else:
                messages.append([body])
            if not is_trusted:
                self._has_more = at < size_of_data
                break
        return at

    def _check_head(self, flags: int, size: int) -> None:
        if flags > _MORE | _LONG | _COMMAND or (flags & _MORE and flags & _COMMAND):
            raise ZmtpError(f"a frame has the flags {flags:#x}, which mean nothing")
        if flags & _COMMAND:
            if size > _MAX_COMMAND_BYTES:
                raise _too_long(size, _MAX_COMMAND_BYTES)
        elif self._stage is not _ZmtpStage.TRAFFIC:
            raise ZmtpError("a message was sent before the handshake was over")
        elif self._parts_bytes + size > self._max_bytes:
            raise _too_long(self._parts_bytes + size, self._max_bytes)

    def _take_part(self, body: bytes, *, has_more: bool) -> None:
        self._parts.append(body)
        self._parts_bytes += len(body)
        if len(self._parts) + has_more > self._limits.parts:
            raise ZmtpPartsError(f"a message has more than {self._limits.parts} parts", is_too_long=True)

    def _read_greeting(self, data: bytes) -> int:
        """Check as much of a greeting as there is; returns its length once it is whole, else 0."""
        if data and data[0] in _TLS_RECORDS:
            raise ZmtpError("the peer encrypts, and no certificates (tls_dir) are set here; set them on both sides")
        if data and (data[0] != _GREETING[0] or (len(data) >= _SIGNATURE_BYTES and not data[9] & 1)):
            raise ZmtpError("the peer does not use ZeroMQ; connect a DEALER socket")
        if len(data) > _SIGNATURE_BYTES and data[_SIGNATURE_BYTES] < _GREETING[_SIGNATURE_BYTES]:
            raise ZmtpError(f"the peer uses ZMTP {data[_SIGNATURE_BYTES]}; 3 is needed, which libzmq 4 has")
        if len(data) < _GREETING_BYTES:
            return 0
        mechanism = data[12:32].rstrip(b"\0")
        if mechanism != b"NULL":
            raise ZmtpError(f"the peer asks for the security mechanism {mechanism!r}; only NULL is known here")
        self._stage = _ZmtpStage.HANDSHAKE
        if self._is_listener:
            self._outgoing += _command(self.own_ready)
        return _GREETING_BYTES

    def _obey(self, body: bytes) -> None:
        name, content = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"ERROR":
            raise ZmtpRefused(content[1:].decode("utf-8", "replace"))
        if self._stage is _ZmtpStage.HANDSHAKE:
            properties = _properties(content) if name == b"READY" else {}
            kind = properties.get(b"socket-type", b"")
            if kind not in self._expects:
                raise ZmtpError(f"the peer is {(kind or name)[:40]!r}; connect a DEALER socket to a ROUTER socket")
            self.peer_ready, self.peer_properties = body, properties
            self._stage = _ZmtpStage.TRAFFIC
        elif name == b"PING" and len(content) <= 2 + _MAX_PING_CONTEXT:
            # A peer that sends pings and does not read would make this grow without end.
            if len(self._outgoing) < _MAX_COMMAND_BYTES:
                self._outgoing += _command(b"\x04PONG" + content[2:])
        elif name != b"PONG":
            raise ZmtpError(f"the peer sent the command {name[:40]!r}, which means nothing here")


def encode_frame(body: bytes) -> bytes:
    """A message of one part, as it goes on the wire."""
    size = len(body)
    return (b"\0%c" % size if size < _SHORT else b"\x02" + size.to_bytes(8, "big")) + body


def encode_error(reason: str) -> bytes:
    """The ERROR command, which states why we end a connection."""
    text = reason.encode("utf-8", "replace")[:_MAX_REASON_BYTES]
    text = text.decode("utf-8", "ignore").encode()
    return _command(b"\x05ERROR" + bytes((len(text),)) + text)


def _too_long(size: int, limit: int) -> ZmtpError:
    return ZmtpError(f"a frame or message has {size} bytes; the limit is {limit}", is_too_long=True)


def _command(body: bytes) -> bytes:
    head = bytes((_COMMAND, len(body))) if len(body) < _SHORT else bytes((_COMMAND | _LONG,)) + len(body).to_bytes(8, "big")
    return head + body


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
            raise ZmtpError("the handshake of the peer is cut off")
        found[content[1:name_end].lower()] = content[name_end + 4 : end]
        content = content[end:]
    return found
