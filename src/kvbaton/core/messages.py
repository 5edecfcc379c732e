"""Every message of the control channel, typed and tagged, and the one decoder for all of them.

Coordinators talk to coordinators with the messages below. A frame is one msgpack map `Envelope`; nothing else is read.
Every message about a hand-off carries its key and the number of the grant it belongs to (0: before any grant). Only
durations cross the wire, never points in time.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.core.aux_area import AuxPointer
from kvbaton.core.card import PROTOCOL, Card
from kvbaton.core.checks import SpanSum
from kvbaton.core.handoff import Aux, AuxWay, Executor, HandoffKey, Incarnation, Integrity, Mode, Outcome, Span
from kvbaton.errors import ProtocolError

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_INCARNATION",
    "MAX_REASON",
    "Announced",
    "AuxSent",
    "ConfirmAsk",
    "Confirmed",
    "Envelope",
    "Grant",
    "HandoffMessage",
    "Heartbeat",
    "Hello",
    "Message",
    "Over",
    "Prefilled",
    "Refused",
    "Release",
    "Retracted",
    "Stop",
    "Stopped",
    "decode",
    "encode",
]

MAX_FRAME_BYTES = 4 << 20
"""No frame of ours is larger; larger ones are dropped unread."""

MAX_INCARNATION = 256
"""Characters of an incarnation on the wire."""

MAX_REASON = 2048
"""Characters of a reason that is sent; longer ones are cut, and much longer ones refused."""

Number = Annotated[int, Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Blocks = tuple[tuple[Number, ...], ...]
Reason = Annotated[str, Meta(max_length=2 * MAX_REASON)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Here is my card; with `wants_answer`, send me yours."""

    card: Card
    wants_answer: bool


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Either way: no. Without a key it is the peer itself that is refused. `stale` means: ask again with a new number."""

    reason: Reason
    key: HandoffKey | None = None
    grant: Number = 0
    stale: bool = False


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Target to source: these blocks are yours to fill, in this epoch; the first `cached_tokens` tokens I have already.

    `grant` grows with every grant to the same incarnation. `prompt` is a digest of the prompt. `blocks` is only told to a
    source that is to write. `integrity` is how much of it the source is to sum, `aux_way` how
    the aux record is to travel. `tokens` is the length of the whole sequence, 0 where that is not said.
    """

    key: HandoffKey
    grant: Annotated[int, Meta(ge=1, le=1 << 62)]
    prompt: Annotated[str, Meta(max_length=128)]
    mode: Mode
    executor: Executor
    epoch: Number
    blocks: Blocks
    cached_tokens: Number
    integrity: Integrity = Integrity.OFF
    aux_way: AuxWay = AuxWay.CONTROL
    tokens: Number = 0


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """Source to target: these spans are computed and lie in these blocks, as long as `generation` is confirmed afterwards."""

    key: HandoffKey
    grant: Number
    generation: Number
    blocks: Blocks
    spans: tuple[Span, ...]


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """Source to target: that was the last span; there are `span_count` of them over `tokens` tokens.

    `held_s` is how long the source has been waiting with it, for the timeline.
    """

    key: HandoffKey
    grant: Number
    generation: Number
    span_count: Number
    tokens: Number
    held_s: Seconds


class AuxSent(msgspec.Struct, frozen=True, tag="aux"):
    """Source to target: the small record that goes with the cache, or where it lies in the source's memory."""

    key: HandoffKey
    grant: Number
    aux: Aux | None = None
    pointer: AuxPointer | None = None


class Retracted(msgspec.Struct, frozen=True, tag="retracted"):
    """Source to target: everything announced before `generation` is void; it will be announced again."""

    key: HandoffKey
    grant: Number
    generation: Number


class ConfirmAsk(msgspec.Struct, frozen=True, tag="confirm_ask"):
    """Target to source, after the last byte: did the blocks hold `generation` all the time?"""

    key: HandoffKey
    grant: Number
    generation: Number


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """Source to target, after the last byte: they did, and `span_count` spans of `generation` were moved.

    `sums` are the checksums of every span of every rank, where the grant asked for them.
    """

    key: HandoffKey
    grant: Number
    generation: Number
    span_count: Number
    sums: tuple[SpanSum, ...] = ()


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Target to source: delivered; I need nothing more."""

    key: HandoffKey
    grant: Number


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Target to source: it has ended here without delivery. Stop, and say so.

    Without a grant (0) it is about the hand-off of this key and this `prompt`, whether the source knows it yet or not.
    """

    key: HandoffKey
    grant: Number
    outcome: Outcome
    reason: Reason = ""
    prompt: Annotated[str, Meta(max_length=128)] = ""


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Source to target: I have stopped, and will not touch your blocks for this grant again."""

    key: HandoffKey
    grant: Number


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Source to target: it has ended here, I have stopped, and nothing I announced may be used."""

    key: HandoffKey
    grant: Number
    outcome: Outcome
    reason: Reason = ""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Either way: I am alive, and these hand-offs (with their grants) are alive with me.

    `from_source` says which side of them I am.
    """

    from_source: bool
    live: tuple[tuple[HandoffKey, Number], ...]


HandoffMessage = (
    Grant | Announced | Prefilled | AuxSent | Retracted | ConfirmAsk | Confirmed | Release | Stop | Stopped | Over | Heartbeat
)
Message = Hello | Refused | HandoffMessage


class Envelope(msgspec.Struct, frozen=True):
    """One frame: who speaks, to which incarnation (empty: to whoever answers there), and what."""

    version: int
    sender: Annotated[Incarnation, Meta(min_length=1, max_length=MAX_INCARNATION)]
    recipient: Annotated[str, Meta(max_length=MAX_INCARNATION)]
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
