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
from kvbaton.core.stamps import Stamp

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
        self._stamps: set[tuple[_Generation, Stamp]] = set()
        self._summed: set[_Generation] = set()

    def take(self, sender: Incarnation, message: Message) -> None:
        """A message has arrived."""
        if isinstance(message, Announced):
            generation = sender, message.key, message.grant, message.generation
            self._spans.setdefault(generation, set()).update(message.spans)
        elif isinstance(message, Prefilled):
            generation = sender, message.key, message.grant, message.generation
            self._counts.add((generation, message.span_count))
            if message.stamp is not None:
                self._stamps.add((generation, message.stamp))
            if message.sums:
                self._summed.add(generation)
        elif isinstance(message, Confirmed):
            generation = sender, message.key, message.grant, message.generation
            self._confirmed.add(generation)
            self._summed.add(generation)
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
        if record.is_confirmed and generation not in self._confirmed:
            yield "it counts as confirmed"
        if record.source_sums and generation not in self._summed:
            yield f"{record.source_sums} are the sums of its source"
        if record.stamp is not None and (generation, record.stamp) not in self._stamps:
            yield f"{record.stamp} is that of its source"
        if record.aux is not None and generation[:3] not in self._aux:
            yield "its aux record is here"
