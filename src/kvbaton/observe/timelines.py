"""Keeps the notes of an instance's newest transfers, so that an operator can ask later where their time went.

`note` is called by the threads that do the work, so it only appends to a list under a lock. Sorting and naming happen when a
record is asked for. Three bounds: transfers, notes of one transfer, notes in total. A quarter of a transfer's notes is
reserved for those that come once per hand-off, so that a prompt of very many spans still has its end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import HandoffKey, Outcome
from kvbaton.core.timeline import Note, Side, Stage
from kvbaton.errors import ConfigError
from kvbaton.observe.records import MAX_TEXT, InstanceInfo, InstanceRecord, NoteRecord, SideRecord, Summary

__all__ = ["Timelines"]

_SideKey = tuple[HandoffKey, Side]
_FORGOTTEN_PER_TRANSFER = 4
_PER_SPAN = frozenset((Stage.COMPUTED, Stage.ANNOUNCED, Stage.MOVED))
_SEVERITY = (Outcome.FAILED, Outcome.EXPIRED, Outcome.CANCELLED, Outcome.DELIVERED)


class _Transfer:
    """The notes of one transfer by side, in order of arrival."""

    __slots__ = ("count", "dropped", "sides", "spans")

    def __init__(self) -> None:
        self.sides: dict[_SideKey, list[Note]] = {}
        self.count = 0
        self.spans = 0
        self.dropped = 0

    def restart(self, side: _SideKey) -> int:
        """Forget an ended side whose key is used again; returns how many notes were dropped."""
        notes = self.sides.get(side, [])
        if not any(note.stage is Stage.ENDED for note in notes):
            return 0
        del self.sides[side]
        self.count -= len(notes)
        self.spans -= sum(note.stage in _PER_SPAN for note in notes)
        return len(notes)

    def add(self, side: _SideKey, note: Note) -> None:
        """Keep a note of a side."""
        notes = self.sides.get(side)
        if notes is None:
            notes = self.sides[side] = []
        notes.append(note)
        self.count += 1
        self.spans += note.stage in _PER_SPAN


class Timelines:
    """The newest `max_transfers` transfers, at most `max_notes` notes of each and `max_notes_total` in all."""

    def __init__(
        self, instance: InstanceInfo, *, max_transfers: int = 1024, max_notes: int = 2048, max_notes_total: int = 131_072
    ) -> None:
        for name, value in (("max_transfers", max_transfers), ("max_notes", max_notes), ("max_notes_total", max_notes_total)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self.instance = instance
        self._max_transfers = max_transfers
        self._max_notes = min(max_notes, max_notes_total)
        self._max_spans = self._max_notes - self._max_notes // 4
        self._max_total = max_notes_total
        self._lock = threading.Lock()
        self._transfers: OrderedDict[str, _Transfer] = OrderedDict()
        self._forgotten: BoundedMap[str, None] = BoundedMap(_FORGOTTEN_PER_TRANSFER * max_transfers)
        self._total = 0

    def note(self, note: Note) -> None:
        """Keep a note; callable from any thread. Late notes of a transfer that was evicted are ignored."""
        with self._lock:
            transfer = self._transfers.get(note.key.transfer_id) or self._open(note)
            if transfer is None:
                return
            side = (note.key, note.side)
            if note.stage is Stage.ARRIVED:
                self._total -= transfer.restart(side)
            if transfer.count >= self._max_notes or (note.stage in _PER_SPAN and transfer.spans >= self._max_spans):
                transfer.dropped += 1
                return
            transfer.add(side, note)
            self._total += 1
            if self._total > self._max_total:
                self._make_room()

    def record(self, transfer_id: str) -> InstanceRecord | None:
        """All that is kept of one transfer; None when it is unknown or was evicted."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None:
                return None
            sides = {side: tuple(notes) for side, notes in transfer.sides.items()}
            dropped = transfer.dropped
        first = min(note.at for notes in sides.values() for note in notes)
        records = tuple(_side_record(side, sides[side], first) for side in sorted(sides))
        return InstanceRecord(transfer_id, self.instance, records, dropped)

    def newest(self, limit: int) -> tuple[Summary, ...]:
        """The newest transfers, newest first, at most `limit`."""
        with self._lock:
            ids = [transfer_id for transfer_id, _ in zip(reversed(self._transfers), range(limit), strict=False)]
            kept = [(i, {side: tuple(notes) for side, notes in self._transfers[i].sides.items()}) for i in ids]
        return tuple(_summary(transfer_id, sides) for transfer_id, sides in kept)

    def __len__(self) -> int:
        return len(self._transfers)

    def _open(self, note: Note) -> _Transfer | None:
        """A new entry for a transfer; None for one that was evicted while under way.

        Without that memory, the late notes of an evicted transfer would come back as a transfer without a beginning.
        """
        transfer_id = note.key.transfer_id
        if transfer_id in self._forgotten:
            if note.stage is not Stage.ARRIVED:
                return None
            del self._forgotten[transfer_id]
        transfer = self._transfers[transfer_id] = _Transfer()
        if len(self._transfers) > self._max_transfers:
            self._forget_oldest()
        return transfer

    def _make_room(self) -> None:
        while self._total > self._max_total and len(self._transfers) > 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        transfer_id, transfer = self._transfers.popitem(last=False)
        self._total -= transfer.count
        self._forgotten[transfer_id] = None


def _side_record(side: _SideKey, notes: tuple[Note, ...], first: float) -> SideRecord:
    ordered = sorted(notes, key=lambda note: note.at)
    start = ordered[0].at
    key, which = side
    records = tuple(_note_record(note, start) for note in ordered)
    return SideRecord(key.prompt_index, key.sample_index, which, start - first, records)


def _note_record(note: Note, start: float) -> NoteRecord:
    facts = {name: getattr(note, name) for name in NoteRecord.__struct_fields__ if name not in ("at_s", "text")}
    return NoteRecord(**facts, at_s=note.at - start, text=note.text[:MAX_TEXT])


def _summary(transfer_id: str, sides: dict[_SideKey, tuple[Note, ...]]) -> Summary:
    moments = [note.at for notes in sides.values() for note in notes]
    return Summary(
        transfer_id=transfer_id,
        sides=tuple(sorted({side for _, side in sides})),
        handoffs=len({key for key, _ in sides}),
        outcome=_worst(sides.values()),
        total_s=max(moments) - min(moments),
    )


def _worst(sides: Iterable[tuple[Note, ...]]) -> Outcome | None:
    """The worst outcome of several sides; None while one of them is live."""
    ends = [next((note.outcome for note in notes if note.stage is Stage.ENDED), None) for notes in sides]
    return None if None in ends else next(outcome for outcome in _SEVERITY if outcome in ends)
