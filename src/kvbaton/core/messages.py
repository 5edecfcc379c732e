"""Every message of the control channel, typed and tagged, and the one decoder for all of them.

Coordinators talk to coordinators with the messages below. A frame is one msgpack map `Envelope`; nothing else is read.
Only durations cross the wire, never points in time.
"""

from __future__ import annotations

import msgspec

from kvbaton.core.card import PROTOCOL, Card
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Incarnation, Outcome
from kvbaton.errors import ProtocolError

__all__ = [
    "MAX_FRAME_BYTES",
    "Ask",
    "ConfirmAsk",
    "Confirmed",
    "Envelope",
    "Hello",
    "Message",
    "Offered",
    "Refused",
    "Release",
    "Renew",
    "Retracted",
    "decode",
    "encode",
]

MAX_FRAME_BYTES = 4 << 20
"""No frame of ours is larger; larger ones are dropped unread."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Here is my card; with `wants_answer`, send me yours."""

    card: Card
    wants_answer: bool


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Target to source: I have blocks for this hand-off, tell me where its cache lies. `grant` grows per target."""

    key: HandoffKey
    grant: int


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """Source to target: it lies in these blocks, which still hold it as long as `generation` is confirmed afterwards.

    `held_s` is how long the source has been waiting with it, for the timeline.
    """

    key: HandoffKey
    generation: int
    blocks: BlockLists
    tokens: int
    aux: Aux
    held_s: float


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Target to source: I am alive and still want these."""

    keys: tuple[HandoffKey, ...]


class ConfirmAsk(msgspec.Struct, frozen=True, tag="confirm_ask"):
    """Target to source, after the last byte: did the blocks hold `generation` all the time?"""

    key: HandoffKey
    generation: int


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """Source to target: they did."""

    key: HandoffKey
    generation: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Target to source: I am through with it, and this is how it ended here."""

    key: HandoffKey
    outcome: Outcome
    reason: str = ""


class Retracted(msgspec.Struct, frozen=True, tag="retracted"):
    """Source to target: this hand-off is off; what you have read of it is void."""

    key: HandoffKey
    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Either way: no. Without a key it is the peer itself that is refused."""

    reason: str
    key: HandoffKey | None = None


Message = Hello | Ask | Offered | Renew | ConfirmAsk | Confirmed | Release | Retracted | Refused


class Envelope(msgspec.Struct, frozen=True):
    """One frame: who speaks, to which incarnation (empty: to whoever answers there), and what."""

    version: int
    sender: Incarnation
    recipient: str
    message: Message


class _Version(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_version_decoder = msgspec.msgpack.Decoder(_Version)


def encode(sender: Incarnation, recipient: str, message: Message) -> bytes:
    """The frame that says `message`."""
    return _encoder.encode(Envelope(PROTOCOL, sender, recipient, message))


def decode(frame: bytes | memoryview) -> Envelope:
    """Read one frame; unknown fields are skipped, an unknown version is refused by name. Raises ProtocolError only."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        version = _version_decoder.decode(frame).version
        if version != PROTOCOL:
            raise ProtocolError(f"protocol version is {PROTOCOL} here and {version} there")
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of ours: {error}") from error
