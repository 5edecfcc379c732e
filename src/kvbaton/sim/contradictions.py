"""A source that contradicts itself: about its spans, their number, the length of the prompt, or whether all of it still counts.

A release with a fault in it, or memory that has gone bad. Its target cannot know which of two statements is true: it takes none
of them, and the hand-off ends by name, with nothing delivered that is not whole. All other hand-offs go on.
"""

from __future__ import annotations

import enum

from msgspec import structs

from kvbaton.core.messages import Announced, Confirmed, Message, Prefilled, Retracted

__all__ = ["Contradiction", "contradict"]


class Contradiction(enum.IntEnum):
    """What a source is wrong about."""

    OTHER_SPAN = 0
    OTHER_LENGTH = 1
    FEWER_SPANS = 2
    LEFT_OUT = 3
    RETRACTED = 4


def contradict(message: Message, kind: Contradiction) -> tuple[Message, ...]:
    """What such a source sends in place of a message, in this order."""
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
        case _:
            return (message,)
