"""Planted bugs of the source side: one known mistake each about what it keeps, for how long, and what it sends."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.core.handoff import HandoffKey, Incarnation, Outcome
from kvbaton.core.lifecycle import SOURCE, Row, SourceEffect, SourceEvent, SourceState
from kvbaton.core.messages import Heartbeat, Over
from kvbaton.sim.plant_rows import with_rows

__all__ = ["source_plants"]


class _LeaseOfTheQueue(SourceSide):
    """Counts the silence of a target from before its grant."""

    table = with_rows(
        SOURCE,
        {
            (SourceState.HELD, SourceEvent.GRANTED): Row(
                SourceState.SERVING, (SourceEffect.ANNOUNCE, SourceEffect.SEND_PREFILLED)
            )
        },
    )


class _BeatsWhenStopped(SourceSide):
    """Shows targets that it lives about what it is about to end, too."""

    def beat(self) -> dict[Incarnation, Heartbeat]:
        beats = super().beat()
        for record in self.live.values():
            if record.state is SourceState.STOPPING and record.target in beats:
                beat = beats[record.target]
                beats[record.target] = structs.replace(beat, live=(*beat.live, (record.key, record.grant_number)))
        return beats


class _EndForgotten(SourceSide):
    """Answers questions about what is over without how it ended."""

    def _over(self, sender: Incarnation, key: HandoffKey, grant: int) -> Over:
        del sender
        return Over(key=key, grant=grant, outcome=Outcome.FAILED, reason="it is not held here (any more)")


class _SumsGoOn(SourceSide):
    """Has ranks go on summing what is over."""

    def _drop_sums(self, record: SourceRecord) -> None:
        record.summing, record.is_asked = 0, False
        record.sums.clear()


class _DeclineKept(SourceSide):
    """Lets a decline stand although its target waits for that very hand-off."""

    def on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        live = tuple(each for each in heartbeat.live if each[0] in self.live or (sender, *each) in self._ended)
        super().on_heartbeat(sender, structs.replace(heartbeat, live=live))


def source_plants() -> Iterator[tuple[str, str, str, type[SourceSide]]]:
    """Name, mistake, the rule that it breaks, and the class that makes it."""
    yield "lease-of-the-queue", "lease not renewed with the grant", "on time", _LeaseOfTheQueue
    yield "beats-when-stopped", "heartbeats about what is being stopped", "as set", _BeatsWhenStopped
    yield "end-forgotten", "question answered with another end", "as set", _EndForgotten
    yield "sums-go-on", "checksums of a hand-off that is over not dropped", "nothing kept", _SumsGoOn
    yield "decline-kept", "decline kept when its target waits after all", "taken", _DeclineKept
