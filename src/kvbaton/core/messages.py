"""Every message of the control channel, typed and tagged, and the one decoder for all of them.

Coordinators send each other the messages below. A frame is one msgpack map `Envelope`; nothing else is read. Every message
about a hand-off carries its key and the number of the grant it belongs to (0: before any grant). Messages may be lost, doubled
and reordered; the receiver decides by key, grant and generation what a message is about. Only durations cross the wire, never
points in time: the clocks of two hosts are not compared.

A new message is a struct here, a member of `HandoffMessage`, and a row of `Coordinator.handlers`; see docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.core.aux_area import AuxPointer
from kvbaton.core.card import PROTOCOL, Card
from kvbaton.core.checks import SpanSum
from kvbaton.core.handoff import Aux, AuxChannel, Executor, HandoffKey, Incarnation, Integrity, Mode, Outcome, Span
from kvbaton.core.stamps import Stamp
from kvbaton.errors import ProtocolError

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_INCARNATION",
    "MAX_MORE",
    "MAX_NUMBER",
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
    "encode_several",
    "split",
]

MAX_FRAME_BYTES = 4 << 20
"""No frame of ours is larger; larger ones are dropped unread."""

MAX_INCARNATION = 256
"""Characters of an incarnation on the wire."""

MAX_REASON = 2048
"""Characters of a reason that is sent; longer ones are cut, and much longer ones refused."""

MAX_MORE = 15
"""Messages of a frame beside the first one."""

MAX_NUMBER = 1 << 62
"""The largest number on the wire."""

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Blocks = tuple[tuple[Number, ...], ...]
Reason = Annotated[str, Meta(max_length=2 * MAX_REASON)]


class Hello(msgspec.Struct, frozen=True, tag="hello", gc=False):
    """Either side: the card of the sender; with `wants_answer`, a request for the card of the receiver.

    `question` numbers such a request, and `answers` is the number of the one that this answers; 0 where there is none. Only a
    process that lives can answer what it was asked just now: that orders the incarnations at an address, without a clock.
    Releases before that send no `answers` at all.

    `takes_several`: the sender reads frames of several messages; releases before that read the first one only.
    """

    card: Card
    wants_answer: bool
    question: Number = 0
    answers: Number | None = None
    takes_several: bool = False


class Refused(msgspec.Struct, frozen=True, tag="refused", gc=False):
    """Either side: a refusal, of the peer itself where there is no key.

    `stale`: the target may grant again, newly numbered, from the sequence number after `used_up_to` on. `sequence` is the one
    that was refused, or 0.
    """

    reason: Reason
    key: HandoffKey | None = None
    grant: Number = 0
    stale: bool = False
    used_up_to: Number = 0
    sequence: Number = 0


class Grant(msgspec.Struct, frozen=True, tag="grant", gc=False):
    """Target to source: blocks for this hand-off are ready in this epoch; the first `cached_tokens` tokens need no copy.

    `grant` names it: no other grant of this target has that number. `sequence` counts the grants of this target to this source,
    from 1, and is used up by the source (core/grants.py). `prompt` is a digest of the prompt. `blocks` is empty unless the
    source is to write. `integrity` is how much of the cache the source is to sum, `aux_channel` how the aux record travels.
    `tokens` is the length of the whole prompt, 0 where it is unknown. `counts_arrivals` states that the target counts by itself
    what the source writes: the source then confirms how much that is as soon as all of it is on its way. `reads_stamps` states
    that the target can look at the stamps of the source (core/stamps.py).
    """

    key: HandoffKey
    grant: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    prompt: Annotated[str, Meta(max_length=128)]
    mode: Mode
    executor: Executor
    epoch: Number
    blocks: Blocks
    cached_tokens: Number
    sequence: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    integrity: Integrity = Integrity.OFF
    aux_channel: AuxChannel = AuxChannel.CONTROL
    tokens: Number = 0
    counts_arrivals: bool = False
    reads_stamps: bool = False


class Announced(msgspec.Struct, frozen=True, tag="announced", gc=False):
    """Source to target: these spans are computed and lie in these blocks. It counts only if `generation` is confirmed later."""

    key: HandoffKey
    grant: Number
    generation: Number
    blocks: Blocks
    spans: tuple[Span, ...]


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled", gc=False):
    """Source to target: the prefill is complete; there are `span_count` spans over `tokens` tokens.

    `held_s` is how long the source has held the complete cache, for the timeline. As long as `stamp` stands, the blocks hold
    this generation. `sums` go with a stamp, where the grant asked for checksums: those of every span of every rank. With
    `sums_follow` both come with the same message once more.
    """

    key: HandoffKey
    grant: Number
    generation: Number
    span_count: Number
    tokens: Number
    held_s: Seconds
    stamp: Stamp | None = None
    sums: tuple[SpanSum, ...] = ()
    sums_follow: bool = False


class AuxSent(msgspec.Struct, frozen=True, tag="aux", gc=False):
    """Source to target: the small record that goes with the cache, or where it lies in the source's memory."""

    key: HandoffKey
    grant: Number
    aux: Aux | None = None
    pointer: AuxPointer | None = None


class Retracted(msgspec.Struct, frozen=True, tag="retracted", gc=False):
    """Source to target: everything announced before `generation` is void; it will be announced again."""

    key: HandoffKey
    grant: Number
    generation: Number


class ConfirmAsk(msgspec.Struct, frozen=True, tag="confirm_ask", gc=False):
    """Target to source, after the last byte: a request to confirm that the blocks held `generation` all the time."""

    key: HandoffKey
    grant: Number
    generation: Number


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed", gc=False):
    """Source to target, after the last byte: the blocks held `generation` all the time, and it has `span_count` spans.

    `sums` are the checksums of every span of every rank, where the grant asked for them. `written_bytes` is what the target has
    to have counted before that holds, where it counts by itself; None where every byte is known to be in.
    """

    key: HandoffKey
    grant: Number
    generation: Number
    span_count: Number
    sums: tuple[SpanSum, ...] = ()
    written_bytes: Number | None = None


class Release(msgspec.Struct, frozen=True, tag="release", gc=False):
    """Target to source: delivered; the source's blocks are not needed any more.

    `stamp` is the one that stood when everything was in; 0 where the source has confirmed it in a message.
    """

    key: HandoffKey
    grant: Number
    stamp: Number = 0


class Stop(msgspec.Struct, frozen=True, tag="stop", gc=False):
    """Target to source: the hand-off has ended at the target without delivery. The source stops, and answers `Stopped`.

    Without a grant (0) it is about the hand-off of this key and this `prompt`, whether the source knows it yet or not.
    With one, `sequence` is that of the grant, which is void from now on, even if it has yet to arrive.
    """

    key: HandoffKey
    grant: Number
    outcome: Outcome
    reason: Reason = ""
    prompt: Annotated[str, Meta(max_length=128)] = ""
    sequence: Number = 0


class Stopped(msgspec.Struct, frozen=True, tag="stopped", gc=False):
    """Source to target: the source has stopped, and will not touch the target's blocks for this grant again.

    `may_land`: what it had sent was not acknowledged, and may still arrive; the target fences it, if it can.
    """

    key: HandoffKey
    grant: Number
    may_land: bool = False


class Over(msgspec.Struct, frozen=True, tag="over", gc=False):
    """Source to target: the hand-off has ended at the source, which has stopped; nothing that it announced may be used.

    `may_land` as in `Stopped`.
    """

    key: HandoffKey
    grant: Number
    outcome: Outcome
    reason: Reason = ""
    may_land: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", gc=False):
    """Either side: the sender is alive, and these hand-offs (with their grants) are live there.

    `from_source` is whether the sender is their source. `step_age_s` is how long ago the sender's engine took its last step:
    agents go on sending while their engine hangs, so a receiver counts silence from that step.
    """

    from_source: bool
    live: tuple[tuple[HandoffKey, Number], ...]
    step_age_s: Seconds = 0.0


HandoffMessage = (
    Grant | Announced | Prefilled | AuxSent | Retracted | ConfirmAsk | Confirmed | Release | Stop | Stopped | Over | Heartbeat
)
Message = Hello | Refused | HandoffMessage


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One frame: the sender, the incarnation that it is for (empty: whichever process answers there), and the message.

    `more` are messages that follow it, as if each had come in a frame of its own. Only a peer that has announced that it reads
    them (`takes_several`) gets any.
    """

    version: int
    sender: Annotated[Incarnation, Meta(min_length=1, max_length=MAX_INCARNATION)]
    recipient: Annotated[str, Meta(max_length=MAX_INCARNATION)]
    message: Message
    more: Annotated[tuple[Message, ...], Meta(max_length=MAX_MORE)] = ()


class _Version(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_version_decoder = msgspec.msgpack.Decoder(_Version)


def encode(sender: Incarnation, recipient: str, message: Message) -> bytes:
    """The frame that carries `message`."""
    return _encoder.encode(Envelope(version=PROTOCOL, sender=sender, recipient=recipient, message=message))


def encode_several(sender: Incarnation, recipient: str, messages: Sequence[Message]) -> bytes:
    """The frame that carries `messages`, at least one and at most 1 + MAX_MORE, in this order."""
    return _encoder.encode(Envelope(PROTOCOL, sender, recipient, messages[0], tuple(messages[1:])))


def split(envelope: Envelope) -> Iterator[Envelope]:
    """Each message of a frame in an envelope of its own, in their order."""
    if not envelope.more:
        yield envelope
        return
    for message in (envelope.message, *envelope.more):
        yield Envelope(envelope.version, envelope.sender, envelope.recipient, message)


def decode(frame: bytes | memoryview) -> Envelope:
    """Read one frame; unknown fields are skipped, an unknown version is refused by name. Raises ProtocolError only."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        envelope = _decoder.decode(frame)
        version = envelope.version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # What another version sends may not be a message here: the version is the reason to name then.
        version = _version_of(frame)
        if version == PROTOCOL:
            raise ProtocolError(f"not a message of ours: {error}") from error
    if version != PROTOCOL:
        raise ProtocolError(f"protocol version is {PROTOCOL} here and {version} there")
    return envelope


def _version_of(frame: bytes | memoryview) -> int:
    try:
        return _version_decoder.decode(frame).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of ours: {error}") from error
