"""What a coordinator says to rank agents that live in other processes of its instance, and what they report: as frames."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvbaton.agent.ports import (
    AuxRead,
    LegFailed,
    LegId,
    LegMoved,
    LegOpen,
    LegStopped,
    LegSummed,
    PeerFenced,
    RankReport,
    RegionFenced,
    SumAsk,
)
from kvbaton.agent.rank import RankAgent
from kvbaton.core.card import Card
from kvbaton.core.handoff import BlockLists, HandoffKey, Incarnation, Span
from kvbaton.core.timeline import Side

__all__ = [
    "CloseLeg",
    "Connect",
    "Disconnect",
    "DropSums",
    "Move",
    "OpenLeg",
    "Order",
    "Reports",
    "ResetRegion",
    "Revoke",
    "StopLeg",
    "SumSpans",
    "carry_out",
    "decode_order",
    "decode_reports",
    "encode_order",
    "encode_reports",
]


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Make the ranks of this card reachable."""

    card: Card


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """Forget a peer."""

    incarnation: Incarnation


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """End a peer's right to touch this rank's memory."""

    incarnation: Incarnation
    epoch: int


class ResetRegion(msgspec.Struct, frozen=True, tag=True):
    """End everybody's right to touch this rank's memory."""

    epoch: int


class OpenLeg(msgspec.Struct, frozen=True, tag=True):
    """Prepare a leg."""

    start: LegOpen


class Move(msgspec.Struct, frozen=True, tag=True):
    """Move spans of a leg."""

    leg: LegId
    source_blocks: BlockLists
    spans: tuple[Span, ...]


class CloseLeg(msgspec.Struct, frozen=True, tag=True):
    """Forget a leg of which nothing is in flight."""

    leg: LegId


class StopLeg(msgspec.Struct, frozen=True, tag=True):
    """Stop a leg."""

    leg: LegId


class SumSpans(msgspec.Struct, frozen=True, tag=True):
    """Sum spans in the rank's own memory."""

    ask: SumAsk


class DropSums(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for these sums any more."""

    side: Side
    key: HandoffKey


Order = Connect | Disconnect | Revoke | ResetRegion | OpenLeg | Move | CloseLeg | StopLeg | SumSpans | DropSums

_decoder = msgspec.msgpack.Decoder(Order)
_envelopes = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, msgspec.Raw]]])
_reports: dict[str, msgspec.msgpack.Decoder[RankReport]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind)
    for kind in (LegMoved, LegFailed, LegStopped, LegSummed, AuxRead, PeerFenced, RegionFenced)
}


def encode_order(order: Order) -> bytes:
    """An order as a frame."""
    return msgspec.msgpack.encode(order)


def decode_order(frame: bytes | bytearray) -> Order:
    """Read an order."""
    order: Order = _decoder.decode(frame)
    return order


class Reports(NamedTuple):
    """What a rank reports in one frame, and how many runs it has posted so far."""

    runs_total: int
    reports: list[RankReport]


def encode_reports(reports: Reports) -> bytes:
    """Reports as a frame."""
    return msgspec.msgpack.encode((reports.runs_total, [(type(report).__name__, report) for report in reports.reports]))


def decode_reports(frame: bytes | bytearray) -> Reports:
    """Read the reports of one frame."""
    runs_total, reports = _envelopes.decode(frame)
    return Reports(runs_total, [_reports[kind].decode(body) for kind, body in reports])


def carry_out(agent: RankAgent, order: Order) -> None:
    """Let a rank agent do what an order says."""
    match order:
        case Connect():
            agent.connect(order.card)
        case Disconnect():
            agent.disconnect(order.incarnation)
        case Revoke():
            agent.revoke(order.incarnation, order.epoch)
        case ResetRegion():
            agent.reset_region(order.epoch)
        case OpenLeg():
            agent.open_leg(order.start)
        case Move():
            agent.move(order.leg, order.source_blocks, order.spans)
        case CloseLeg():
            agent.close_leg(order.leg)
        case StopLeg():
            agent.stop_leg(order.leg)
        case SumSpans():
            agent.sum_spans(order.ask)
        case DropSums():
            agent.drop_sums(order.side, order.key)
