"""Aux records that come over the data transport: fetched out of a slot of the source, checked, or asked for by message."""

from __future__ import annotations

from kvbaton.agent.ports import AuxAsk, AuxRead
from kvbaton.agent.records import TargetRecord
from kvbaton.agent.target_steps import CLOSING, TargetSteps
from kvbaton.core.aux_area import AuxPointer, pointer_problem, unpack_aux
from kvbaton.core.handoff import AuxWay
from kvbaton.errors import ProtocolError

__all__ = ["TargetAux"]


class TargetAux(TargetSteps):
    """Has rank 0 read what a pointer leads to. Whatever is wrong with it, the record then comes in a message, counted."""

    def fetch_aux(self, record: TargetRecord, pointer: AuxPointer) -> None:
        """A source says where its record lies; what does not lie in a slot of its area is never read."""
        if record.aux is not None or record.aux_pointer is not None or record.aux_way is AuxWay.CONTROL:
            self.late_total["aux"] += 1
        elif record.source is None or record.source_area is None or pointer_problem(pointer, record.source_area):
            self._fall_back(record, "bad pointer")
        elif refusal := self.aux_slots.refusal(pointer.size_bytes):
            self._fall_back(record, refusal)
        else:
            record.aux_pointer = pointer
            self._ranks.read_aux(AuxAsk(record.leg, record.source, pointer.offset, self.aux_slots.take(), pointer.size_bytes))

    def on_aux_read(self, report: AuxRead) -> None:
        """Rank 0 is through with a slot: take the record, if it is the right one and still wanted."""
        self.aux_slots.give(report.slot)
        record, pointer = self.live.get(report.leg.key), None
        if record is not None and record.grant == report.leg.grant and record.state not in CLOSING:
            pointer, record.aux_pointer = record.aux_pointer, None
        if record is None or pointer is None:
            self.late_total["aux"] += 1
        elif report.error:
            self._fall_back(record, "not read")
        else:
            self._take_aux(record, pointer, report.data)

    def _take_aux(self, record: TargetRecord, pointer: AuxPointer, data: bytes) -> None:
        try:
            record.aux = unpack_aux(data, pointer, record.key, record.grant)
        except ProtocolError:
            self._fall_back(record, "not the record")
        else:
            self._progress(record)
            self._settle(record)

    def _fall_back(self, record: TargetRecord, cause: str) -> None:
        self.aux_fallbacks_total[cause] += 1
        record.aux_way = AuxWay.CONTROL
        self.send_grant(record)
