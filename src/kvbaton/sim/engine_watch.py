"""Calls and events of a source's engine: it is notified of every grant that it may start a prefill for, and a prefill that it
takes back is taken back at the target, too, before anything else is sent about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import EngineEvent, Granted
from kvbaton.agent.source import SourceRecord
from kvbaton.core.handoff import HandoffKey
from kvbaton.core.lifecycle import SourceState
from kvbaton.core.messages import Message, Retracted

__all__ = ["EngineWatch"]


class EngineWatch:
    """Sees what the engine of one instance calls for as a source, and gets."""

    def __init__(self, coordinator: Coordinator, sent: list[tuple[str, Message]], find: Callable[[str], None]) -> None:
        self._live = coordinator.source.live
        self._sent = sent
        self._find = find
        self._granted: dict[HandoffKey, SourceRecord] = {}
        """What the engine was notified of as granted."""

    def on_event(self, event: EngineEvent) -> None:
        """The engine is to be notified."""
        if isinstance(event, Granted):
            self._granted[event.key] = self._live[event.key]

    def problems(self) -> Iterable[str]:
        """Grants that an engine waits for, and that are here."""
        return self._unnoticed() if self._live else ()

    def _unnoticed(self) -> Iterator[str]:
        for key, record in self._live.items():
            if record.state is SourceState.STREAMING and self._granted.get(key) is not record:
                yield f"{key} has a grant, and its engine is not notified"

    def retract(self, call: Callable[[HandoffKey], None], key: HandoffKey) -> None:
        """The engine takes back what it has computed."""
        record, count = self._live.get(key), len(self._sent)
        is_granted = record is not None and record.state is SourceState.STREAMING
        is_open = is_granted or (record is not None and record.state is SourceState.QUEUED)
        call(key)
        if is_open and record is not None and record.spans:
            self._find(f"{key} is retracted, and {len(record.spans)} spans of it still count")
        if is_granted and not any(isinstance(each, Retracted) and each.key == key for _, each in self._sent[count:]):
            self._find(f"{key} is retracted, and its target is not notified")
