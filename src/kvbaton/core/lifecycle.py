"""The life of a hand-off as three tables: the source side, the target side, and a copy. All that may happen is a row.

Theory of operation. A side of a hand-off is one state machine in its coordinator (agent/source.py, agent/target.py); a copy,
the moving of one generation under one grant, is one in each rank that executes it (agent/rank.py). The owner of a machine
turns calls of its engine, messages of its peer, reports of its ranks and alarms into events, steps the machine, and performs
the effects of the row in order. The tables know no time, no sockets and no block lists; they only define what may follow
what. In every state an event has a row, or is listed as late (it may still arrive, or arrive again, and then changes
nothing), or is a bug of ours: `step` raises, and nothing has changed. Terminal states have no rows, so the first outcome
stands.

Push and pull are the same machine. In push the source announces spans while it computes, in pull it announces everything
once, after its prefill. Which side executes the copy does not matter to the tables either: where the target reads, its ranks
move the spans and it asks for the confirmation; where the source writes, the source's ranks move them and it confirms by
itself.

What the rows guarantee:
- A target delivers only out of CONFIRMING, or out of FILLING when the source itself has moved and confirmed every span, or
  when its stamp stands behind the last byte (core/stamps.py). Where checksums are asked for, there is no stamp, and a wrong or
  missing sum leads from there to an end without delivery instead.
- A target's blocks go back only out of STOPPING, REVOKING or ISOLATED, when every copy that might write to them is quiet.
  Time alone leads from one of these states to the next (ask, tear the session down, register the memory anew), never out.
  A writer that is lost is not asked: its session is torn down at once, where the transport can do that.
- A source's blocks go back only when it also stops confirming, and its stamp is cleared. Time may do that: a read counts only
  when confirmed later.
- After a retraction nothing of the new generation is moved before everything of the old one is quiet (CLEARING, RETRACTING).

Rejected: one machine for both sides (twice the states, half of them unreachable); a state for every stage of a prefill
(counts belong beside the machine, not into it); a queue of pending events (an event that cannot be used now is late).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbaton.errors import Bug, IllegalTransition

__all__ = [
    "COPY",
    "CopyEffect",
    "CopyEvent",
    "CopyState",
    "CopyTable",
    "Row",
    "SOURCE",
    "SourceEffect",
    "SourceEvent",
    "SourceState",
    "SourceTable",
    "TARGET",
    "Table",
    "TargetEffect",
    "TargetEvent",
    "TargetState",
    "TargetTable",
]

StateT = TypeVar("StateT", bound=enum.StrEnum)
EventT = TypeVar("EventT", bound=enum.StrEnum)
EffectT = TypeVar("EffectT", bound=enum.StrEnum)


@dataclass(frozen=True, slots=True)
class Row(Generic[StateT, EffectT]):
    """The next state, and the effects to perform, in this order."""

    state: StateT
    effects: tuple[EffectT, ...] = ()


@dataclass(frozen=True, slots=True)
class Table(Generic[StateT, EventT, EffectT]):
    """All rows of one machine, the states that are final, and the events that may come late without changing anything."""

    name: str
    start: StateT
    rows: Mapping[tuple[StateT, EventT], Row[StateT, EffectT]]
    terminal: frozenset[StateT]
    late: frozenset[tuple[StateT, EventT]]

    def __post_init__(self) -> None:
        for state, event in self.rows:
            if state in self.terminal:
                raise Bug(f"{self.name}: terminal state {state} has a row for {event}")
            if (state, event) in self.late:
                raise Bug(f"{self.name}: {event} in {state} is both a row and late")

    def step(self, state: StateT, event: EventT) -> Row[StateT, EffectT] | None:
        """The row for `event` in `state`; None when it comes late and changes nothing. Raises IllegalTransition."""
        row = self.rows.get((state, event))
        if row is not None:
            return row
        if state in self.terminal or (state, event) in self.late:
            return None
        raise IllegalTransition(f"{self.name}: {event!s} in state {state!s}")


class SourceState(enum.StrEnum):
    """Where the source side of a hand-off stands."""

    PARKED = "parked"
    QUEUED = "queued"
    STREAMING = "streaming"
    RETRACTING = "retracting"
    HELD = "held"
    SERVING = "serving"
    STOPPING = "stopping"
    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class SourceEvent(enum.StrEnum):
    """What can happen to a source side."""

    EXPECTED = "expected"
    GRANTED = "granted"
    SPAN_READY = "span ready"
    PREFILLED = "prefilled"
    PREEMPTED = "preempted"
    PEER_ALIVE = "peer alive"
    CONFIRM_ASKED = "confirm asked"
    SUMMED = "summed"
    WRITTEN = "written"
    RELEASED = "released"
    STOP_ASKED = "stop asked"
    ABORTED = "aborted here"
    LEASE_OUT = "lease out"
    PEER_GONE = "peer gone"
    COPY_FAILED = "copy failed"
    QUIET = "quiet"
    QUIET_FAILED = "quiet: failed"
    QUIET_CANCELLED = "quiet: cancelled"
    QUIET_EXPIRED = "quiet: expired"


class SourceEffect(enum.StrEnum):
    """What the source's coordinator then does."""

    EXTEND_LEASE = "extend lease"
    NOTIFY_GRANTED = "notify granted"
    ANNOUNCE = "announce"
    SET_STAMP = "set stamp"
    SEND_PREFILLED = "send prefilled"
    SEND_STAMP = "send stamp"
    NEW_GENERATION = "new generation"
    SEND_RETRACTED = "send retracted"
    NOTIFY_DRAINED = "notify drained"
    SEND_CONFIRMATION = "send confirmation"
    REPEAT_CONFIRMATION = "repeat confirmation"
    CLEAR_STAMP = "clear stamp"
    STOP_COPY = "stop copy"
    SEND_END = "send end"
    RETURN_BLOCKS = "return blocks"


class TargetState(enum.StrEnum):
    """Where the target side of a hand-off stands."""

    QUEUED = "queued"
    HANDSHAKING = "handshaking"
    GRANTED = "granted"
    FILLING = "filling"
    CLEARING = "clearing"
    CONFIRMING = "confirming"
    STOPPING = "stopping"
    REVOKING = "revoking"
    ISOLATED = "isolated"
    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class TargetEvent(enum.StrEnum):
    """What can happen to a target side."""

    ALLOCATED = "allocated"
    PEER_KNOWN = "peer known"
    PEER_ALIVE = "peer alive"
    STALE = "stale grant"
    ANNOUNCED = "announced"
    RETRACTED = "retracted"
    FILLED = "filled"
    AHEAD = "ahead of the stamp"
    STAMPED = "stamped"
    CONFIRMED = "confirmed"
    WRITTEN = "written"
    MISMATCHED = "mismatched"
    REFUSED = "refused"
    COPY_FAILED = "copy failed"
    ABORTED = "aborted here"
    NO_PROGRESS = "no progress"
    PEER_GONE = "peer gone"
    WRITER_LOST = "writer lost"
    STOP_LATE = "stop late"
    QUIET = "quiet"
    QUIET_FAILED = "quiet: failed"
    QUIET_CANCELLED = "quiet: cancelled"
    QUIET_EXPIRED = "quiet: expired"


class TargetEffect(enum.StrEnum):
    """What the target's coordinator then does."""

    SEND_GRANT = "send grant"
    NEW_GRANT = "new grant"
    MOVE_SPANS = "move spans"
    DROP_SPANS = "drop spans"
    ASK_CONFIRMATION = "ask confirmation"
    QUARANTINE = "quarantine"
    SEND_STOP = "send stop"
    STOP_COPY = "stop copy"
    REVOKE_PEER = "revoke peer"
    RESET_REGION = "reset region"
    SEND_RELEASE = "send release"
    DELIVER = "deliver"
    RETURN_BLOCKS = "return blocks"


class CopyState(enum.StrEnum):
    """Where a rank's part of a copy stands."""

    OPEN = "open"
    BROKEN = "broken"
    STOPPING = "stopping"
    FAILED = "failed"
    STOPPED = "stopped"


class CopyEvent(enum.StrEnum):
    """What can happen to a rank's part of a copy."""

    POSTED = "posted"
    MOVED = "moved"
    ERROR = "error"
    STOP = "stop"
    DRAINED = "drained"


class CopyEffect(enum.StrEnum):
    """What the rank then does."""

    REPORT_MOVED = "report moved"
    CANCEL_POSTED = "cancel posted"
    REPORT_FAILED = "report failed"
    REPORT_STOPPED = "report stopped"


SourceTable = Table[SourceState, SourceEvent, SourceEffect]
TargetTable = Table[TargetState, TargetEvent, TargetEffect]
CopyTable = Table[CopyState, CopyEvent, CopyEffect]


def _source() -> SourceTable:
    state, event, effect = SourceState, SourceEvent, SourceEffect
    # From here on the blocks stay as they are until this side ends: the stamp shows that, and is set before its number is sent.
    complete = (effect.EXTEND_LEASE, effect.ANNOUNCE, effect.SET_STAMP, effect.SEND_PREFILLED)
    rows: dict[tuple[SourceState, SourceEvent], Row[SourceState, SourceEffect]] = {
        # The grant may come before the engine's call, during the prefill, or after it. Without one, nothing is announced.
        (state.PARKED, event.EXPECTED): Row(state.STREAMING, (effect.EXTEND_LEASE, effect.NOTIFY_GRANTED)),
        (state.QUEUED, event.GRANTED): Row(state.STREAMING, (effect.EXTEND_LEASE, effect.NOTIFY_GRANTED, effect.ANNOUNCE)),
        (state.QUEUED, event.SPAN_READY): Row(state.QUEUED),
        (state.QUEUED, event.PREFILLED): Row(state.HELD, (effect.EXTEND_LEASE,)),
        (state.HELD, event.GRANTED): Row(state.SERVING, complete),
        (state.STREAMING, event.SPAN_READY): Row(state.STREAMING, (effect.ANNOUNCE,)),
        (state.STREAMING, event.PREFILLED): Row(state.SERVING, complete),
        # A grant that is repeated means that the target misses something: whatever it may be, it is sent again. It extends no
        # lease: agents repeat it, also while their engine or one of their ranks stands still. Heartbeats report that.
        (state.STREAMING, event.GRANTED): Row(state.STREAMING, (effect.ANNOUNCE,)),
        (state.RETRACTING, event.GRANTED): Row(state.RETRACTING, (effect.SEND_RETRACTED,)),
        (state.SERVING, event.GRANTED): Row(
            state.SERVING, (effect.ANNOUNCE, effect.SEND_PREFILLED, effect.REPEAT_CONFIRMATION)
        ),
        # Preempted. Without a grant no copy can be in flight: the engine has its blocks back at once. With one, copies of ours
        # are stopped first. Only QUIET gives the blocks to the engine, and only after that is the new generation announced.
        (state.QUEUED, event.PREEMPTED): Row(state.QUEUED, (effect.NEW_GENERATION, effect.NOTIFY_DRAINED)),
        (state.STREAMING, event.PREEMPTED): Row(
            state.RETRACTING, (effect.STOP_COPY, effect.NEW_GENERATION, effect.SEND_RETRACTED)
        ),
        (state.RETRACTING, event.QUIET): Row(state.STREAMING, (effect.NOTIFY_DRAINED,)),
        # Only a complete prefill is confirmed, and only what was confirmed can be released. SERVING has no row for PREEMPTED:
        # the blocks of a complete prefill, which a target may read and will ask about, are held until this side has ended.
        (state.SERVING, event.CONFIRM_ASKED): Row(state.SERVING, (effect.EXTEND_LEASE, effect.SEND_CONFIRMATION)),
        # Where checksums go with the stamp, both wait for the last sum.
        (state.SERVING, event.SUMMED): Row(state.SERVING, (effect.SET_STAMP, effect.SEND_STAMP)),
        (state.SERVING, event.WRITTEN): Row(state.SERVING, (effect.SEND_CONFIRMATION,)),
        (state.SERVING, event.RELEASED): Row(state.DELIVERED, (effect.CLEAR_STAMP, effect.RETURN_BLOCKS)),
    }
    live = (state.PARKED, state.QUEUED, state.STREAMING, state.RETRACTING, state.HELD, state.SERVING)
    ending = (event.STOP_ASKED, event.ABORTED, event.LEASE_OUT, event.PEER_GONE, event.COPY_FAILED)
    for each in live:
        # No effect: a heartbeat extends the lease by what it reports of the target's engine, which no table knows.
        rows[each, event.PEER_ALIVE] = Row(each)
        for end in ending:
            # The stamp goes first: a target that finds it decodes what it has read, and after this the blocks may change.
            rows[each, end] = Row(state.STOPPING, (effect.CLEAR_STAMP, effect.STOP_COPY))
    # The end is sent when our copies are quiet, not before: the target takes it as the promise that nothing more is written.
    for end, final in _QUIET_SOURCE.items():
        rows[state.STOPPING, end] = Row(final, (effect.SEND_END, effect.RETURN_BLOCKS))
    # Late: a message that crossed ours, or was delivered twice.
    late = {(state.STOPPING, each) for each in event if each not in _QUIET_SOURCE}
    late |= {(each, event.CONFIRM_ASKED) for each in live if each is not state.SERVING}
    late |= {(state.PARKED, event.GRANTED), (state.RETRACTING, event.SPAN_READY)}
    terminal = frozenset(_QUIET_SOURCE.values()) | {state.DELIVERED}
    return Table("source", state.QUEUED, rows, terminal, frozenset(late))


def _target() -> TargetTable:
    state, event, effect = TargetState, TargetEvent, TargetEffect
    # The quarantine begins before anything else is done about the end, and has no row that leads out but QUIET_*.
    stop = Row(state.STOPPING, (effect.QUARANTINE, effect.SEND_STOP, effect.STOP_COPY))
    # The release goes out before the engine decodes: the source's blocks are free while the first token is computed.
    deliver = Row(state.DELIVERED, (effect.SEND_RELEASE, effect.DELIVER))
    rows: dict[tuple[TargetState, TargetEvent], Row[TargetState, TargetEffect]] = {
        # A grant needs blocks and the source's card; they come in either order.
        (state.QUEUED, event.PEER_KNOWN): Row(state.QUEUED),
        (state.QUEUED, event.ALLOCATED): Row(state.HANDSHAKING),
        (state.HANDSHAKING, event.PEER_KNOWN): Row(state.GRANTED, (effect.NEW_GRANT, effect.SEND_GRANT)),
        # The source has used this number, or cannot know whether it has. Nothing was moved under it, so another one will do.
        (state.GRANTED, event.STALE): Row(state.GRANTED, (effect.NEW_GRANT, effect.SEND_GRANT)),
        (state.GRANTED, event.ANNOUNCED): Row(state.FILLING, (effect.MOVE_SPANS,)),
        (state.FILLING, event.ANNOUNCED): Row(state.FILLING, (effect.MOVE_SPANS,)),
        # The source was preempted. Reads of the old generation end in the same blocks as those of the new one: nothing new is
        # moved in CLEARING, whatever is announced, until QUIET. In GRANTED nothing is moved yet; but `Prefilled` may have
        # overtaken the announcements, and how many spans it counted is void, too.
        (state.GRANTED, event.RETRACTED): Row(state.GRANTED, (effect.DROP_SPANS,)),
        (state.FILLING, event.RETRACTED): Row(state.CLEARING, (effect.DROP_SPANS, effect.STOP_COPY)),
        (state.CONFIRMING, event.RETRACTED): Row(state.CLEARING, (effect.DROP_SPANS, effect.STOP_COPY)),
        (state.CLEARING, event.RETRACTED): Row(state.CLEARING, (effect.DROP_SPANS,)),
        (state.CLEARING, event.ANNOUNCED): Row(state.CLEARING),
        (state.CLEARING, event.QUIET): Row(state.FILLING, (effect.MOVE_SPANS,)),
        # The question goes out after the last byte; an answer that comes before it was asked (FILLING) is late.
        (state.FILLING, event.FILLED): Row(state.CONFIRMING, (effect.ASK_CONFIRMATION,)),
        (state.CONFIRMING, event.CONFIRMED): deliver,
        # Nothing is asked where the stamp of a source of this host stands behind the last byte: that is the same answer. Where
        # it waits for checksums of the source, it is waited for as an answer would be, and asked for if it does not come.
        (state.FILLING, event.STAMPED): deliver,
        (state.FILLING, event.AHEAD): Row(state.CONFIRMING),
        (state.CONFIRMING, event.STAMPED): deliver,
        (state.CONFIRMING, event.FILLED): Row(state.CONFIRMING, (effect.ASK_CONFIRMATION,)),
        (state.FILLING, event.WRITTEN): deliver,
        (state.FILLING, event.MISMATCHED): stop,
        (state.CONFIRMING, event.MISMATCHED): stop,
        # A source that writes is lost, and has proved nothing: another process may answer at its address while it lives, and
        # what a dead one has sent may wait in our buffers. No answer is waited for; its blocks go back when it is fenced.
        (state.STOPPING, event.WRITER_LOST): Row(state.REVOKING, (effect.REVOKE_PEER,)),
        # The only rows that time makes happen here: from each fence to the next stronger one, and never to an end.
        (state.STOPPING, event.STOP_LATE): Row(state.REVOKING, (effect.SEND_STOP, effect.REVOKE_PEER)),
        (state.REVOKING, event.STOP_LATE): Row(state.ISOLATED, (effect.SEND_STOP, effect.RESET_REGION)),
        (state.ISOLATED, event.STOP_LATE): Row(state.ISOLATED, (effect.SEND_STOP,)),
    }
    live = (state.QUEUED, state.HANDSHAKING, state.GRANTED, state.FILLING, state.CLEARING, state.CONFIRMING)
    ending = (event.REFUSED, event.ABORTED, event.NO_PROGRESS, event.PEER_GONE, event.COPY_FAILED)
    for each in live:
        rows[each, event.PEER_ALIVE] = Row(each)
        for end in ending:
            rows[each, end] = stop
    closing = (state.STOPPING, state.REVOKING, state.ISOLATED)
    for each in closing:
        for end, final in _QUIET_TARGET.items():
            rows[each, end] = Row(final, (effect.RETURN_BLOCKS,))
    # Late: a message that crossed ours, was delivered twice, or is about something that has been decided since.
    late = {(each, other) for each in closing for other in event if (each, other) not in rows}
    late |= {(each, event.CONFIRMED) for each in (state.GRANTED, state.FILLING, state.CLEARING)}
    late.add((state.CONFIRMING, event.ANNOUNCED))
    terminal = frozenset(_QUIET_TARGET.values()) | {state.DELIVERED}
    return Table("target", state.QUEUED, rows, terminal, frozenset(late))


def _copy() -> CopyTable:
    state, event, effect = CopyState, CopyEvent, CopyEffect
    rows: dict[tuple[CopyState, CopyEvent], Row[CopyState, CopyEffect]] = {
        (state.OPEN, event.POSTED): Row(state.OPEN),
        (state.OPEN, event.MOVED): Row(state.OPEN, (effect.REPORT_MOVED,)),
        # What is posted cannot be taken back, only cancelled; its memory is in use until the transport has completed all of it.
        (state.OPEN, event.ERROR): Row(state.BROKEN, (effect.CANCEL_POSTED,)),
        (state.OPEN, event.STOP): Row(state.STOPPING, (effect.CANCEL_POSTED,)),
        # The coordinator waits for an answer to its StopCopy, so a broken copy that is stopped reports that it stopped.
        (state.BROKEN, event.STOP): Row(state.STOPPING),
        (state.BROKEN, event.DRAINED): Row(state.FAILED, (effect.REPORT_FAILED,)),
        (state.STOPPING, event.DRAINED): Row(state.STOPPED, (effect.REPORT_STOPPED,)),
    }
    busy = (state.BROKEN, state.STOPPING)
    late = {(each, other) for each in busy for other in (event.POSTED, event.MOVED, event.ERROR)}
    late.add((state.STOPPING, event.STOP))
    return Table("copy", state.OPEN, rows, frozenset({state.FAILED, state.STOPPED}), frozenset(late))


_QUIET_SOURCE = {
    SourceEvent.QUIET_FAILED: SourceState.FAILED,
    SourceEvent.QUIET_CANCELLED: SourceState.CANCELLED,
    SourceEvent.QUIET_EXPIRED: SourceState.EXPIRED,
}
_QUIET_TARGET = {
    TargetEvent.QUIET_FAILED: TargetState.FAILED,
    TargetEvent.QUIET_CANCELLED: TargetState.CANCELLED,
    TargetEvent.QUIET_EXPIRED: TargetState.EXPIRED,
}

SOURCE = _source()
TARGET = _target()
COPY = _copy()
