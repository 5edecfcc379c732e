"""A source that contradicts itself: about its spans, their number, the length of the prompt, whether all of it still counts,
whether it has accepted the grant at all, or how the aux record travels.

A release with a fault in it, or memory that has gone bad. Its target cannot know which of two statements is true: it takes none
of them, and the hand-off ends by name, with nothing delivered that is not whole. All other hand-offs go on. Only a pointer that
leads elsewhere is made up for: the aux record is asked for in a message. And what answers nothing that was asked is ignored.
"""

from __future__ import annotations

import enum

from msgspec import structs

from kvbaton.core.aux_area import AuxPointer
from kvbaton.core.checks import SpanSum
from kvbaton.core.grants import REACH
from kvbaton.core.handoff import Outcome, Span
from kvbaton.core.messages import (
    MAX_NUMBER,
    Announced,
    AuxSent,
    Confirmed,
    Message,
    Over,
    Prefilled,
    Refused,
    Retracted,
    Stopped,
)

__all__ = ["TAKEN_BACK", "UNASKED", "Contradiction", "contradict"]


class Contradiction(enum.IntEnum):
    """What a source is wrong about."""

    OTHER_SPAN = 0
    OTHER_LENGTH = 1
    FEWER_SPANS = 2
    LEFT_OUT = 3
    RETRACTED = 4
    NOT_CONFIRMED = 5
    REFUSED = 6
    REFUSED_AT_THE_END = 7
    REFUSED_FOR_EVER = 8
    EMPTY_SPAN = 9
    POINTER = 10
    ELSEWHERE = 11
    REFUSED_UP_TO_THE_LAST = 12
    CONFIRMED_EARLY = 13
    STOPPED_EARLY = 14
    NO_AUX = 15
    OVER_BEFORE_THE_GRANT = 16
    REFUSED_WITHIN_REACH = 17
    CONFIRMED_AND_RETRACTED = 18


TAKEN_BACK = tuple(kind for kind in Contradiction if Contradiction.NOT_CONFIRMED <= kind < Contradiction.CONFIRMED_EARLY)
"""What a source states, and then does not stand by; or never should have stated."""

UNASKED = (Contradiction.CONFIRMED_EARLY, Contradiction.STOPPED_EARLY)
"""Answers that come when their target has not asked yet, and have to change nothing."""


def _refuse(message: Announced | Prefilled, used_up_to: int = 0) -> Refused:
    return Refused("that number was used before", message.key, message.grant, stale=True, used_up_to=used_up_to)


def contradict(message: Message, kind: Contradiction, aux_offset: int) -> tuple[Message, ...]:
    """What such a source sends in place of a message, in this order; it keeps aux records from `aux_offset` on."""
    match kind, message:
        case Contradiction.OTHER_SPAN, Announced() if message.spans:
            span = structs.replace(message.spans[-1], end_token=message.spans[-1].end_token + 1)
            return message, structs.replace(message, spans=(span,))
        case Contradiction.OTHER_LENGTH, Prefilled():
            return (structs.replace(message, tokens=message.tokens + 1),)
        case Contradiction.FEWER_SPANS, Prefilled():
            return (structs.replace(message, span_count=max(0, message.span_count - 1)),)
        case Contradiction.LEFT_OUT, Announced():
            return (structs.replace(message, spans=tuple(span for span in message.spans if span.number)),)
        case Contradiction.LEFT_OUT, Prefilled():
            return (structs.replace(message, span_count=message.span_count - 1),)
        case Contradiction.LEFT_OUT, Confirmed():
            sums = tuple(each for each in message.sums if each.span)
            return (structs.replace(message, span_count=message.span_count - 1, sums=sums),)
        case Contradiction.RETRACTED, Prefilled():
            return message, Retracted(message.key, message.grant, message.generation + 1)
        case Contradiction.NOT_CONFIRMED, Confirmed():
            return (Retracted(message.key, message.grant, message.generation + 1),)
        case Contradiction.CONFIRMED_AND_RETRACTED, Confirmed():
            return message, Retracted(message.key, message.grant, message.generation + 1)
        case Contradiction.REFUSED, Announced():
            return message, _refuse(message)
        case Contradiction.REFUSED_AT_THE_END, Announced():
            return ()
        case Contradiction.REFUSED_AT_THE_END, Prefilled():
            return message, _refuse(message)
        case Contradiction.REFUSED_FOR_EVER, Announced():
            return (_refuse(message, MAX_NUMBER),)
        case Contradiction.REFUSED_UP_TO_THE_LAST, Announced():
            return (_refuse(message, MAX_NUMBER - 1),)
        case Contradiction.REFUSED_WITHIN_REACH, Refused() if message.stale:
            return (structs.replace(message, used_up_to=MAX_NUMBER - REACH),)
        case Contradiction.EMPTY_SPAN, Announced():
            return message, structs.replace(message, spans=(Span(MAX_NUMBER, 0, 0, 0, 1),))
        case Contradiction.POINTER, AuxSent() if message.aux is not None:
            return (structs.replace(message, aux=None, pointer=AuxPointer(aux_offset, 1, 0)),)
        case Contradiction.ELSEWHERE, AuxSent() if message.pointer is not None:
            return (structs.replace(message, pointer=structs.replace(message.pointer, offset=message.pointer.offset + 1)),)
        case Contradiction.CONFIRMED_EARLY, Prefilled():
            early = Confirmed(message.key, message.grant, message.generation, message.span_count, (SpanSum(0, 0, 0),))
            return early, message, early
        case Contradiction.STOPPED_EARLY, Announced():
            return message, Stopped(message.key, message.grant)
        case Contradiction.NO_AUX, AuxSent():
            return (structs.replace(message, aux=None, pointer=None),)
        case Contradiction.OVER_BEFORE_THE_GRANT, Announced():
            return (Over(message.key, 0, Outcome.FAILED, "it has ended before it was granted"),)
        case _:
            return (message,)
