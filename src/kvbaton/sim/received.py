"""What a target knows of a hand-off, it has received: under this grant, of this generation, from this source.

A count of an earlier grant or generation that still counts does harm only if the new one differs in it, and then only once in a
long while. So it is looked at itself, after every message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvbaton.agent.target import TargetRecord
from kvbaton.core.handoff import HandoffKey, Incarnation, Span
from kvbaton.core.lifecycle import TargetState
from kvbaton.core.messages import Announced, AuxSent, Confirmed, Message, Prefilled

__all__ = ["Received"]

_Grant = tuple[Incarnation, HandoffKey, int]
_Generation = tuple[Incarnation, HandoffKey, int, int]
_NO_SPANS: frozenset[Span] = frozenset()
_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})


class Received:
    """What has arrived at one instance about hand-offs that it is the target of."""

    def __init__(self) -> None:
        self._aux: set[_Grant] = set()
        self._spans: dict[_Generation, set[Span]] = {}
        self._counts: set[tuple[_Generation, int]] = set()
        self._confirmed: set[_Generation] = set()

    def take(self, sender: Incarnation, message: Message) -> None:
        """A message has arrived."""
        if isinstance(message, Announced):
            generation = sender, message.key, message.grant, message.generation
            self._spans.setdefault(generation, set()).update(message.spans)
        elif isinstance(message, Prefilled):
            self._counts.add(((sender, message.key, message.grant, message.generation), message.span_count))
        elif isinstance(message, Confirmed):
            self._confirmed.add((sender, message.key, message.grant, message.generation))
        elif isinstance(message, AuxSent):
            self._aux.add((sender, message.key, message.grant))

    def problems(self, record: TargetRecord | None) -> Iterable[str]:
        """What counts for a hand-off, and has not arrived for it. In one that is ending nothing counts any more."""
        if record is None or record.source is None or record.state in _CLOSING:
            return ()
        return self._unreceived(record, record.source)

    def _unreceived(self, record: TargetRecord, source: Incarnation) -> Iterator[str]:
        generation = source, record.key, record.grant, record.generation
        if record.span_count is not None and (generation, record.span_count) not in self._counts:
            yield f"{record.span_count} spans are expected"
        if record.spans and not self._spans.get(generation, _NO_SPANS).issuperset(record.spans.values()):
            unknown = set(record.spans.values()) - self._spans.get(generation, _NO_SPANS)
            yield f"{unknown} count as announced"
        if (record.is_confirmed or record.source_sums) and generation not in self._confirmed:
            yield "it counts as confirmed"
        if record.aux is not None and generation[:3] not in self._aux:
            yield "its aux record is here"
