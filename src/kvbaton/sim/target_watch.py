"""What a target is held to in what it sends, orders and notes: that its grants are numbered without gaps and carry what the
source needs and no more, that an aux record is fetched in one way at a time, that its ranks report arrivals for grants that
state so and for no other, that a source is fenced when that is due, and that its notes and times for operators are true.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.rank_orders import (
    Arrived,
    AuxRead,
    CopyId,
    MoveSpans,
    RankOrder,
    RankReport,
    ReadAux,
    RevokePeer,
    SpansMoved,
    SumSpans,
)
from kvbaton.agent.target import TargetRecord
from kvbaton.config import Limits
from kvbaton.core.checks import span_size
from kvbaton.core.grants import REACH
from kvbaton.core.handoff import AuxChannel, Executor, HandoffKey, Incarnation
from kvbaton.core.lifecycle import TargetState
from kvbaton.core.messages import MAX_NUMBER, Announced, Grant, Message, Over, Prefilled, Refused, Retracted, Stop, Stopped
from kvbaton.core.timeline import Note, Side, Stage

__all__ = ["TargetWatch"]

_FILLING = frozenset({TargetState.GRANTED, TargetState.FILLING, TargetState.CLEARING})
_SMALL_S = 1e-6
_MOST_STALE = 8
"""How many numbers in a row a source may refuse."""


class TargetWatch:
    """Sees what one instance sends and orders as a target, and what it notes.

    `is_forgetful`: it forgets how far it has counted to a source. `is_noted`: its notes are passed on here.
    """

    def __init__(self, coordinator: Coordinator, *, is_forgetful: bool, is_noted: bool) -> None:
        self._target = coordinator.target
        self._clock: Callable[[], float] = vars(coordinator.target)["_clock"]
        self._limits: Limits = vars(coordinator.target)["_limits"]
        self._is_forgetful = is_forgetful
        self._has_notes = is_noted
        self._granted: dict[tuple[HandoffKey, int], Grant] = {}
        """The last grant of each number that was sent."""
        self._anew: dict[HandoffKey, tuple[TargetRecord | None, int]] = {}
        """How many grants were made for each record, which no other one replaces in memory meanwhile."""
        self._last_sequence: dict[str, int] = {}
        self._used_up_to: defaultdict[str, set[int]] = defaultdict(set)
        """By source: the last number in sequence that it was sent, and those that it named as used when it refused one."""
        self._refused_up_to: dict[str, int] = {}
        """By source: the last number that it named as used when it refused the one in hand, in a refusal that is followed."""
        self._may_land: set[HandoffKey] = set()
        """What a source has stated of, under any grant, that bytes may still be on their way."""
        self._lost: set[Incarnation] = set()
        """Sources that just turned out to be gone."""
        vars(coordinator.target).update(on_peer_gone=partial(self._gone, coordinator.target.on_peer_gone))
        self._moved: list[Note] = []
        """What was noted as moved since this was last looked at."""
        self._retracted: list[Note] = []
        """What was noted as retracted since then."""
        self._arrived: Counter[CopyId] = Counter()
        """Bytes that have come, as far as that was reported, by copy."""
        self._numbers: Counter[int] = Counter()
        """By rank, the number of its last report of such bytes."""
        self._counted: set[tuple[CopyId, int, int]] = set()
        """Spans that were counted, by copy and rank: one that is reported again is noted once."""
        self._stopped_at: dict[tuple[HandoffKey, int], float] = {}
        """When a source was first asked to stop, by grant."""
        self._generations: defaultdict[tuple[HandoffKey, int], set[int]] = defaultdict(set)
        """Those of which anything has come, by grant."""
        self._moving_since: dict[CopyId, float] = {}
        """When something of a copy began to be moved, as it was noted when more was ordered."""

    def note(self, note: Note) -> None:
        """Something is noted for operators."""
        if note.side is Side.TARGET and note.stage is Stage.MOVED:
            self._moved.append(note)
        elif note.side is Side.TARGET and note.stage is Stage.RETRACTED:
            self._retracted.append(note)

    def received(self, source: Incarnation, message: Message) -> None:
        """A message has arrived."""
        if isinstance(message, Refused) and message.stale:
            self._used_up_to[source].add(message.used_up_to)
            record = None if message.key is None else self._target.current(source, message.key, message.grant)
            if record is not None and message.sequence in (0, record.sequence) and _is_followed(record, message):
                self._refused_up_to[source] = message.used_up_to
        elif isinstance(message, Announced | Prefilled | Retracted):
            self._generations[message.key, message.grant].add(message.generation)
        elif isinstance(message, Over | Stopped) and message.may_land:
            self._may_land.add(message.key)

    def _gone(self, call: Callable[[Incarnation, str], None], source: Incarnation, reason: str) -> None:
        self._lost.add(source)
        call(source, reason)
        self._lost.discard(source)

    def reported(self, copy: CopyId) -> None:
        """A rank has reported something: that may be the first that is known of a generation."""
        self._generations[copy.key, copy.grant].add(copy.generation)

    def retracted_problem(self) -> str:
        """What is wrong with what was noted as retracted: of something that was announced under the grant before."""
        if not self._retracted:
            return ""
        notes, self._retracted = self._retracted, []
        for note in notes:
            record = self._target.live.get(note.key)
            if record is not None and len(self._generations[record.key, record.grant]) < 2:
                return f"it was retracted, and only generation {record.generation} was ever named: {note}"
        return ""

    def sent_problem(self, source: str, message: Message) -> str:
        """What is wrong with a message that is being sent."""
        if isinstance(message, Stop):
            self._stopped_at.setdefault((message.key, message.grant), self._clock())
        if not isinstance(message, Grant):
            return ""
        if bool(message.blocks) is not (message.executor is Executor.SOURCE_WRITES):
            return f"blocks are for a source that writes, and for no other: {message}"
        counts = message.executor is Executor.SOURCE_WRITES and vars(self._target)["_ranks"].counts_arrivals
        if message.counts_arrivals is not counts:
            return f"its ranks count what this source writes ({counts}): {message}"
        before = self._granted.get((message.key, message.grant))
        self._granted[message.key, message.grant] = message
        record = self._target.live.get(message.key)
        if before is None:
            known, count = self._anew.get(message.key, (None, 0))
            self._anew[message.key] = record, count + 1 if known is record else 1
            if known is record and count > _MOST_STALE:
                return f"{count} grants were refused, and it goes on: {message}"
            return self._sequence_problem(source, message)
        if before == message and record is not None and record.state is TargetState.CLEARING:
            return f"only its own ranks are waited for: {message}"
        if before.aux_channel is AuxChannel.CONTROL and message.aux_channel is AuxChannel.DATA:
            return f"the aux record was asked for in a message before: {message}"
        return ""

    def _sequence_problem(self, source: str, grant: Grant) -> str:
        """Numbers follow each other. After a refusal they go on behind what the source has used, wherever that is.

        The last number there is comes again: there is no other.
        """
        if grant.sequence > MAX_NUMBER:
            return f"there is no such number: {grant}"
        last, self._last_sequence[source] = self._last_sequence.get(source, 0), grant.sequence
        if grant.sequence <= self._refused_up_to.get(source, 0) < MAX_NUMBER and not self._is_forgetful:
            return f"the source has refused all numbers up to {self._refused_up_to[source]}: {grant}"
        is_next = grant.sequence == last + 1 or grant.sequence - 1 in self._used_up_to[source]
        return "" if is_next or self._is_forgetful else f"the last number was {last}: {grant}"

    def order_problem(self, order: RankOrder) -> str:
        """What is wrong with an order to a rank."""
        if isinstance(order, ReadAux):
            record = self._target.live.get(order.copy.key)
            area = None if record is None else record.source_area
            slots = () if area is None else range(area.offset, area.offset + area.slots * area.slot_bytes, area.slot_bytes)
            if order.offset not in slots:
                return f"that is no slot of {area}: {order}"
            grant = self._granted.get((order.copy.key, order.copy.grant))
            if grant is not None and grant.aux_channel is AuxChannel.CONTROL:
                return f"the aux record comes in a message: {order}"
        if isinstance(order, RevokePeer):
            return self._revoke_problem(order)
        if isinstance(order, SumSpans) and order.side is Side.TARGET:
            return self._summing_problem(order)
        return self._moving_problem(order) if isinstance(order, MoveSpans) else ""

    def _revoke_problem(self, order: RevokePeer) -> str:
        """A source loses its right to write when it does not stop in time, or may have bytes on their way; not otherwise."""
        of_source = (each for each in self._target.live.values() if each.source == order.incarnation)
        revoking = [each for each in of_source if each.state is TargetState.REVOKING]
        late_at = self._clock() - self._limits.stop_timeout + _SMALL_S
        is_due = any(self._stopped_at[each.key, each.grant] <= late_at for each in revoking)
        is_lost = any(
            each.executor is Executor.SOURCE_WRITES
            and not each.peer_is_quiet
            and (each.key in self._may_land or order.incarnation in self._lost)
            for each in revoking
        )
        return "" if is_due or is_lost else f"the source is quiet, or was asked to stop just now: {order}"

    def _summing_problem(self, order: SumSpans) -> str:
        """What a source has written is summed as a whole; what is read, when it is worth an order or everything is in."""
        record = self._target.live.get(order.copy.key)
        if record is None or record.copy != order.copy:
            return ""
        if record.executor is Executor.SOURCE_WRITES:
            return "" if len(order.spans) == record.span_count else f"there are {record.span_count} spans: {order}"
        is_whole = any(len(numbers) == record.span_count for numbers in record.moved.values())
        is_worth_it = sum(map(span_size, order.spans)) >= self._target.sum_size
        return "" if is_whole or is_worth_it else f"more is to come, and this is not worth an order: {order}"

    def _moving_problem(self, order: MoveSpans) -> str:
        """The time on the wire is counted from when something began to be moved until nothing is."""
        record = self._target.live.get(order.copy.key)
        if record is None or record.copy != order.copy:
            return ""
        since, self._moving_since[order.copy] = self._moving_since.get(order.copy), record.wire_since
        is_more = record.on_wire > len(order.spans) * len(vars(self._target)["_card"].ranks)
        return f"it was being moved since {since}: {order}" if is_more and since not in (None, record.wire_since) else ""

    def arrived_problem(self, report: RankReport) -> str:
        """What is wrong with a report of bytes that have come: they are counted for grants that state so, and for no other."""
        if isinstance(report, Arrived):
            grant = self._granted.get((report.copy.key, report.copy.grant))
            if grant is not None and not grant.counts_arrivals:
                return f"the source does not count on it: {report}"
        return ""

    def counted_problem(self, report: Arrived) -> str:
        """What is wrong with the count after a report of bytes that have come was taken: it has those of one generation."""
        if report.number > self._numbers[report.rank]:
            self._numbers[report.rank] = report.number
            self._arrived[report.copy] += report.stored_bytes
        record = self._target.live.get(report.copy.key)
        is_counting = record is not None and record.copy == report.copy and record.source == report.peer
        if not is_counting or record is None or record.state not in _FILLING:
            return ""
        counted, arrived = record.arrived_bytes, self._arrived[report.copy]
        if record.arrivals.get(report.rank) != self._numbers[report.rank]:
            return f"it would count again: {report}"
        if record.give_up_at < self._clock() + self._limits.transfer_timeout - _SMALL_S:
            return f"bytes have come, and that is no progress: {report}"
        return "" if counted == arrived else f"{counted} bytes are counted, and {arrived} have come: {report}"

    def moved_problem(self, report: SpansMoved, is_counted: bool) -> str:
        """What is wrong with the notes about a report that was just taken: they share out its bytes, by tokens and layers."""
        notes, self._moved = self._moved, []
        if not self._has_notes:
            return ""
        new = {(report.copy, report.rank, span) for span in report.spans} - self._counted if is_counted else set()
        self._counted |= new
        if len(notes) != len(new) or any(note.rank != report.rank for note in notes):
            return f"{notes} are noted"
        cells = [(note.end_token - note.first_token) * (note.end_layer - note.first_layer) for note in notes]
        total = sum(cells)
        shares = [report.bytes_moved * part / total if total else 0 for part in cells]
        is_shared = all(abs(note.moved_bytes - share) <= 1 for note, share in zip(notes, shares, strict=True))
        if not is_shared or (total and sum(note.moved_bytes for note in notes) != report.bytes_moved):
            return f"{[note.moved_bytes for note in notes]} bytes are noted for {cells} cells"
        return ""

    def fallbacks(self) -> dict[str, int]:
        """How often aux records had to be sent in messages, by cause."""
        return dict(self._target.aux_fallbacks_total)

    def fallback_problem(self, report: AuxRead, before: dict[str, int]) -> str:
        """What is wrong with the cause that is counted for a record that was not read, or not the right one."""
        counted = {cause for cause, count in self.fallbacks().items() if count > before.get(cause, 0)}
        return f"counted as {counted}" if counted and (counted == {"not read"}) is not bool(report.error) else ""


def _is_followed(record: TargetRecord, refused: Refused) -> bool:
    """Whether the next number goes by this refusal: of a grant without an answer yet, or with no number to a live writer."""
    may_be_written = record.executor is Executor.SOURCE_WRITES and record.sequence <= refused.used_up_to + REACH
    return record.state is TargetState.GRANTED or (not refused.sequence and may_be_written)
