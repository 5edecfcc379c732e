"""Orders of a coordinator to the rank agents of its instance, and their reports: one struct each, in memory and as frames.

A new order is a struct here, a member of `RankOrder`, and a `case` in `RankAgent.handle`; `Ranks.send` carries it, whether the
rank lives in this process, in another one, or in the simulator. A new report is a struct here, a member of `RankReport`, and a
`case` in `Coordinator.on_rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvbaton.core.card import Card
from kvbaton.core.handoff import BlockLists, Executor, HandoffKey, Incarnation, Integrity, Span
from kvbaton.core.timeline import Side

__all__ = [
    "Arrived",
    "AuxRead",
    "CloseCopy",
    "Connect",
    "CopyFailed",
    "CopyId",
    "CopyReport",
    "CopyStopped",
    "Disconnect",
    "DropSums",
    "MoveSpans",
    "OpenCopy",
    "PeerFenced",
    "PoisonBlocks",
    "PutAux",
    "RankOrder",
    "RankReport",
    "RankSums",
    "ReadAux",
    "RegionFenced",
    "Reports",
    "ResetRegion",
    "RevokePeer",
    "SpansMoved",
    "SpansPlanned",
    "SpansSummed",
    "StopCopy",
    "SumSpans",
    "decode_copy",
    "decode_order",
    "decode_reports",
    "encode_copy",
    "encode_order",
    "encode_reports",
    "sums_by_leg",
]


class CopyId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One copy: one generation of a hand-off, moved under one grant. Each rank that executes it moves the legs of its own.

    All three parts are needed. The key alone may be used again by a later request; the grant alone does not change when the
    source is preempted and computes the cache anew; and what a rank reports may be about a copy that was stopped since.
    """

    key: HandoffKey
    grant: int
    generation: int


class Connect(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Make the ranks of this card reachable."""

    card: Card


class Disconnect(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Forget a peer that is gone for good; what is posted to it fails."""

    incarnation: Incarnation


class RevokePeer(msgspec.Struct, frozen=True, tag=True, gc=False):
    """End a peer's right to write to this rank's memory; PeerFenced follows, where the transport can do that."""

    incarnation: Incarnation
    epoch: int


class ResetRegion(msgspec.Struct, frozen=True, tag=True, gc=False):
    """End the right of every peer to write to this rank's memory; RegionFenced follows, where the transport can do that."""

    epoch: int


class OpenCopy(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """Prepare a copy; nothing moves yet. The blocks of the source come with each MoveSpans, because they may still grow."""

    copy: CopyId
    peer: Incarnation
    executor: Executor
    epoch: int
    target_blocks: BlockLists
    cached_tokens: int
    total_tokens: int | None = None
    """Of the whole sequence; without it, each span counts as the last."""
    counts_arrivals: bool = False
    """Whether the peer counts by itself what is written to it: then SpansPlanned follows MoveSpans, before SpansMoved."""


class PoisonBlocks(msgspec.Struct, frozen=True, tag=True, gc=False):
    """For `kvbaton verify`: spoil blocks that are about to be granted, so that a byte that does not arrive shows."""

    blocks: BlockLists
    cached_tokens: int


class MoveSpans(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Move spans of an open copy; SpansMoved follows for each part that is moved as one, or CopyFailed once."""

    copy: CopyId
    source_blocks: BlockLists
    spans: tuple[Span, ...]


class StopCopy(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Stop a copy; CopyStopped follows once nothing of it is in flight (at once for a copy that is not open)."""

    copy: CopyId


class CloseCopy(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Forget a copy of which nothing is in flight; nothing is reported."""

    copy: CopyId


class SumSpans(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """Sum spans in the rank's own memory; SpansSummed follows, once or in parts, unless DropSums comes before."""

    copy: CopyId
    side: Side
    blocks: BlockLists
    spans: tuple[Span, ...]
    cached_tokens: int
    integrity: Integrity
    peer: Incarnation
    """Whose ranks hold the other ends: each leg between two ranks is summed by itself."""
    total_tokens: int | None = None
    """Of the whole sequence; without it, each span counts as the last."""


class DropSums(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The sums of this side of a hand-off are not needed any more."""

    side: Side
    key: HandoffKey


class PutAux(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Write an aux record into a slot of the rank's own memory."""

    offset: int
    data: bytes


class ReadAux(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """Read the aux record of a hand-off out of the memory of rank 0 of a peer into a slot of ours; AuxRead follows, once."""

    copy: CopyId
    peer: Incarnation
    offset: int
    slot: int
    size_bytes: int


RankOrder = (
    Connect
    | Disconnect
    | RevokePeer
    | ResetRegion
    | OpenCopy
    | MoveSpans
    | StopCopy
    | CloseCopy
    | SumSpans
    | DropSums
    | PutAux
    | ReadAux
    | PoisonBlocks
)


class SpansMoved(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Every byte that this rank moves of these spans has arrived: spans of one copy, which were moved as one."""

    copy: CopyId
    rank: int
    spans: tuple[int, ...]
    bytes_planned: int
    bytes_moved: int


class SpansPlanned(msgspec.Struct, frozen=True, tag=True, gc=False):
    """So many bytes of these spans are on their way from this rank to the peer, which counts them."""

    copy: CopyId
    rank: int
    spans: tuple[int, ...]
    bytes_planned: int


class Arrived(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A peer has written a part of a copy into this rank's memory: so many bytes, every one of which is in.

    `number` counts these reports of a rank from 1: bytes are summed up, so that none may count twice.
    """

    copy: CopyId
    peer: Incarnation
    rank: int
    number: int
    stored_bytes: int


class CopyFailed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A copy ended early on this rank, which does not touch its memory any more.

    `may_land`: what was sent of it may still be stored by the peer, until that fences us.
    """

    copy: CopyId
    rank: int
    reason: str
    may_land: bool = False


class CopyStopped(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A copy that was to stop has stopped on this rank; nothing of it is in flight there, but for what `may_land`."""

    copy: CopyId
    rank: int
    may_land: bool = False


class SpansSummed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Spans of one copy were summed on one rank, or why one of them was not.

    `sums` has, by the number of the span, (number, checksum) of each of its legs with the ranks of the peer.
    """

    copy: CopyId
    side: Side
    rank: int
    sums: dict[int, tuple[tuple[int, int], ...]]
    error: str = ""


class AuxRead(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The aux record that was read, or why none was; the rank does not touch the slot any more."""

    copy: CopyId
    slot: int
    data: bytes
    error: str = ""


class PeerFenced(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A rank has torn down its session with a peer: under a grant of an epoch before `epoch` that peer cannot write here."""

    peer: Incarnation
    epoch: int
    rank: int


class RegionFenced(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A rank has registered its memory anew: under a grant of an epoch before `epoch` no peer can write here."""

    epoch: int
    rank: int


RankSums = dict[tuple[int, int], tuple[tuple[int, int], ...]]
"""(rank, span number) -> (leg number, checksum) of every leg of that rank, as reported by SpansSummed."""


def sums_by_leg(sums: RankSums) -> dict[tuple[int, int], int]:
    """(leg number, span number) -> checksum."""
    return {(leg, span): value for (_, span), values in sums.items() for leg, value in values}


CopyReport = SpansMoved | CopyFailed | CopyStopped
RankReport = CopyReport | SpansPlanned | Arrived | SpansSummed | AuxRead | PeerFenced | RegionFenced


class Reports(NamedTuple):
    """What a rank reports in one frame, and how many runs it has posted so far."""

    runs_total: int
    reports: list[RankReport]


encode_order: Callable[[RankOrder], bytes] = msgspec.msgpack.encode
decode_order: Callable[[bytes | bytearray], RankOrder] = msgspec.msgpack.Decoder(RankOrder).decode
encode_copy: Callable[[CopyId], bytes] = msgspec.msgpack.encode
decode_copy: Callable[[bytes], CopyId] = msgspec.msgpack.Decoder(CopyId).decode
encode_reports: Callable[[Reports], bytes] = msgspec.msgpack.encode
decode_reports: Callable[[bytes | bytearray], Reports] = msgspec.msgpack.Decoder(Reports).decode
