"""The tables: what every event is in every state, and what no row may ever do."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import pytest

from kvbaton.core.handoff import LEGAL_PAIRS, Outcome
from kvbaton.core.lifecycle import (
    COPY,
    SOURCE,
    TARGET,
    CopyEffect,
    CopyEvent,
    CopyState,
    Row,
    SourceEffect,
    SourceEvent,
    SourceState,
    Table,
    TargetEffect,
    TargetEvent,
    TargetState,
)
from kvbaton.errors import Bug, IllegalTransition
from kvbaton.sim.plant_rows import with_rows

AnyTable = Table[Any, Any, Any]

EVENTS: dict[str, type[enum.StrEnum]] = {"source": SourceEvent, "target": TargetEvent, "copy": CopyEvent}
EFFECTS: dict[str, type[enum.StrEnum]] = {"source": SourceEffect, "target": TargetEffect, "copy": CopyEffect}
TABLES: tuple[AnyTable, ...] = (SOURCE, TARGET, COPY)

CLASSES = {
    # expected granted span-ready prefilled preempted peer-alive confirm-asked summed written released stop-asked aborted
    # lease-out peer-gone copy-failed quiet quiet-failed quiet-cancelled quiet-expired
    "source": {
        "parked": "r l x x x r l x x x r r r r r x x x x",
        "queued": "x r r r r r l x x x r r r r r x x x x",
        "streaming": "x r r r r r l x x x r r r r r x x x x",
        "retracting": "x r l x x r l x x x r r r r r r x x x",
        "held": "x r x x x r l x x x r r r r r x x x x",
        "serving": "x r x x x r r r r r r r r r r x x x x",
        "stopping": "l l l l l l l l l l l l l l l l r r r",
        "delivered": "l l l l l l l l l l l l l l l l l l l",
        "failed": "l l l l l l l l l l l l l l l l l l l",
        "cancelled": "l l l l l l l l l l l l l l l l l l l",
        "expired": "l l l l l l l l l l l l l l l l l l l",
    },
    # allocated peer-known peer-alive stale-grant announced retracted filled ahead stamped confirmed written mismatched refused
    # copy-failed aborted no-progress peer-gone writer-lost stop-late quiet quiet-failed quiet-cancelled quiet-expired
    "target": {
        "queued": "r r r x x x x x x x x x r r r r r x x x x x x",
        "handshaking": "x r r x x x x x x x x x r r r r r x x x x x x",
        "granted": "x x r r r r x x x l x x r r r r r x x x x x x",
        "filling": "x x r x r r r r r l r r r r r r r x x x x x x",
        "clearing": "x x r x r r x x x l x x r r r r r x x r x x x",
        "confirming": "x x r x l r r x r r x r r r r r r x x x x x x",
        "stopping": "l l l l l l l l l l l l l l l l l r r l r r r",
        "revoking": "l l l l l l l l l l l l l l l l l l r l r r r",
        "isolated": "l l l l l l l l l l l l l l l l l l r l r r r",
        "delivered": "l l l l l l l l l l l l l l l l l l l l l l l",
        "failed": "l l l l l l l l l l l l l l l l l l l l l l l",
        "cancelled": "l l l l l l l l l l l l l l l l l l l l l l l",
        "expired": "l l l l l l l l l l l l l l l l l l l l l l l",
    },
    # posted moved error stop drained
    "copy": {
        "open": "r r r r x",
        "broken": "l l l r r",
        "stopping": "l l l l r",
        "failed": "l l l l l",
        "stopped": "l l l l l",
    },
}
"""What each event is in each state: a row, late, or illegal (x). A change here is a change of the protocol."""


def _steps(table: AnyTable) -> Iterator[tuple[enum.StrEnum, enum.StrEnum, str]]:
    for state in type(table.start):
        for event in EVENTS[table.name]:
            try:
                row = table.step(state, event)
            except IllegalTransition:
                yield state, event, "x"
            else:
                yield state, event, "l" if row is None else "r"


def _reachable(table: AnyTable, start: enum.StrEnum) -> set[enum.StrEnum]:
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (before, _), row in table.rows.items():
            if before is state and row.state not in found:
                found.add(row.state)
                todo.append(row.state)
    return found


def _live(table: AnyTable) -> list[enum.StrEnum]:
    return [state for state in type(table.start) if state not in table.terminal]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_event_in_every_state_is_what_it_is_known_as(table: AnyTable) -> None:
    found: dict[str, list[str]] = {}
    for state, _, kind in _steps(table):
        found.setdefault(state.value, []).append(kind)
    assert {state: " ".join(kinds) for state, kinds in found.items()} == CLASSES[table.name]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_an_illegal_event_raises_by_name_and_changes_nothing(table: AnyTable) -> None:
    before = dict(table.rows)
    illegal = [(state, event) for state, event, kind in _steps(table) if kind == "x"]
    for state, event in illegal:
        with pytest.raises(IllegalTransition, match=f"^{table.name}: {event.value} in state {state.value}$"):
            table.step(state, event)
    assert table.rows == before


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_live_state_can_end_and_every_state_can_be_reached(table: AnyTable) -> None:
    for state in _live(table):
        assert _reachable(table, state) & table.terminal, state
    starts = {table.start, *([SourceState.PARKED] if table is SOURCE else [])}
    assert set().union(*(_reachable(table, start) for start in starts)) == {*_live(table), *table.terminal}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_no_row_leaves_a_terminal_state(table: AnyTable) -> None:
    assert table.terminal
    assert not [(state, event) for state, event in table.rows if state in table.terminal]
    for state in table.terminal:
        assert all(table.step(state, event) is None for event in EVENTS[table.name])


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_event_and_every_effect_is_used(table: AnyTable) -> None:
    assert {event for _, event in table.rows} == set(EVENTS[table.name])
    assert {effect for row in table.rows.values() for effect in row.effects} == set(EFFECTS[table.name])


def test_whatever_can_go_wrong_can_end_every_source_state_that_is_not_ending() -> None:
    for state in set(_live(SOURCE)) - {SourceState.STOPPING}:
        for event in (
            SourceEvent.ABORTED,
            SourceEvent.PEER_GONE,
            SourceEvent.LEASE_OUT,
            SourceEvent.STOP_ASKED,
            SourceEvent.COPY_FAILED,
        ):
            row = Row(SourceState.STOPPING, (SourceEffect.CLEAR_STAMP, SourceEffect.STOP_COPY))
            assert SOURCE.rows[SourceState(state), event] == row


def test_a_stamp_is_set_when_blocks_stop_changing_and_cleared_before_they_may_change() -> None:
    """SERVING is where they stay: what leads there sets it before its number is sent, and what leads out clears it first.

    So does the last checksum, where it has to wait for that.
    """
    for (state, event), row in SOURCE.rows.items():
        enters = row.state is SourceState.SERVING and state is not SourceState.SERVING
        is_summed = (state, event) == (SourceState.SERVING, SourceEvent.SUMMED)
        assert (SourceEffect.SET_STAMP in row.effects) is (enters or is_summed)
        if enters:
            assert row.effects.index(SourceEffect.SET_STAMP) < row.effects.index(SourceEffect.SEND_PREFILLED)
        if is_summed:
            assert row.effects == (SourceEffect.SET_STAMP, SourceEffect.SEND_STAMP)
        if state is SourceState.SERVING and row.state is not SourceState.SERVING:
            assert row.effects[0] is SourceEffect.CLEAR_STAMP


CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})


def test_whatever_can_go_wrong_can_end_every_target_state_that_is_not_ending() -> None:
    for state in set(_live(TARGET)) - CLOSING:
        for event in (
            TargetEvent.ABORTED,
            TargetEvent.PEER_GONE,
            TargetEvent.NO_PROGRESS,
            TargetEvent.REFUSED,
            TargetEvent.COPY_FAILED,
        ):
            row = TARGET.rows[TargetState(state), event]
            assert row == Row(TargetState.STOPPING, (TargetEffect.QUARANTINE, TargetEffect.SEND_STOP, TargetEffect.STOP_COPY))


def test_the_outcomes_are_the_terminal_states() -> None:
    assert {state.value for state in SOURCE.terminal} == {outcome.value for outcome in Outcome}
    assert {state.value for state in TARGET.terminal} == {outcome.value for outcome in Outcome}


def test_a_target_delivers_only_what_was_confirmed() -> None:
    delivering = {(state, event) for (state, event), row in TARGET.rows.items() if row.state is TargetState.DELIVERED}
    assert delivering == {
        (TargetState.CONFIRMING, TargetEvent.CONFIRMED),
        (TargetState.FILLING, TargetEvent.STAMPED),
        (TargetState.CONFIRMING, TargetEvent.STAMPED),
        (TargetState.FILLING, TargetEvent.WRITTEN),
    }
    for (state, event), row in TARGET.rows.items():
        assert (TargetEffect.DELIVER in row.effects) == ((state, event) in delivering)
        assert (TargetEffect.SEND_RELEASE in row.effects) == ((state, event) in delivering)


def test_a_source_delivers_only_what_was_released() -> None:
    delivering = {key for key, row in SOURCE.rows.items() if row.state is SourceState.DELIVERED}
    assert delivering == {(SourceState.SERVING, SourceEvent.RELEASED)}


def test_a_source_confirms_only_what_is_complete_and_held() -> None:
    confirming = {state for (state, _), row in SOURCE.rows.items() if SourceEffect.SEND_CONFIRMATION in row.effects}
    assert confirming == {SourceState.SERVING}


def test_blocks_go_back_exactly_with_the_end() -> None:
    for source_row in SOURCE.rows.values():
        assert (SourceEffect.RETURN_BLOCKS in source_row.effects) == (source_row.state in SOURCE.terminal)
    for target_row in TARGET.rows.values():
        is_given_away = TargetEffect.RETURN_BLOCKS in target_row.effects or TargetEffect.DELIVER in target_row.effects
        assert is_given_away == (target_row.state in TARGET.terminal)


def test_a_target_returns_blocks_only_when_every_copy_is_quiet() -> None:
    quiet = {TargetEvent.QUIET_FAILED, TargetEvent.QUIET_CANCELLED, TargetEvent.QUIET_EXPIRED}
    returning = {key for key, row in TARGET.rows.items() if TargetEffect.RETURN_BLOCKS in row.effects}
    assert returning == {(state, event) for state in CLOSING for event in quiet}


def test_time_alone_leads_a_target_only_from_one_fence_to_the_next() -> None:
    escalation = {state: row.state for (state, event), row in TARGET.rows.items() if event is TargetEvent.STOP_LATE}
    assert escalation == {
        TargetState.STOPPING: TargetState.REVOKING,
        TargetState.REVOKING: TargetState.ISOLATED,
        TargetState.ISOLATED: TargetState.ISOLATED,
    }


def test_after_a_retraction_nothing_moves_before_everything_is_quiet() -> None:
    for (state, event), row in TARGET.rows.items():
        if state is TargetState.CLEARING and TargetEffect.MOVE_SPANS in row.effects:
            assert event is TargetEvent.QUIET
    for (source_state, source_event), source_row in SOURCE.rows.items():
        if source_state is SourceState.RETRACTING:
            assert SourceEffect.ANNOUNCE not in source_row.effects
            assert (SourceEffect.NOTIFY_DRAINED in source_row.effects) == (source_event is SourceEvent.QUIET)


def test_a_retraction_stops_what_is_being_moved_and_forgets_what_was() -> None:
    """Without the stop no rank would report that it is quiet, and the hand-off would stay in CLEARING."""
    into = {key: row for key, row in TARGET.rows.items() if row.state is TargetState.CLEARING is not key[0]}
    assert into.keys() == {(state, TargetEvent.RETRACTED) for state in (TargetState.FILLING, TargetState.CONFIRMING)}
    for row in into.values():
        assert row.effects == (TargetEffect.DROP_SPANS, TargetEffect.STOP_COPY)


def test_a_copy_reports_its_end_once_and_only_when_drained() -> None:
    reports = {CopyEffect.REPORT_FAILED, CopyEffect.REPORT_STOPPED}
    for (_, event), row in COPY.rows.items():
        assert bool(reports & set(row.effects)) == (row.state in COPY.terminal) == (event is CopyEvent.DRAINED)
    assert COPY.rows[CopyState.BROKEN, CopyEvent.STOP].state is CopyState.STOPPING


def test_a_source_that_calls_itself_delivered_has_a_target_that_is() -> None:
    assert {target for source, target in LEGAL_PAIRS if source is Outcome.DELIVERED} == {Outcome.DELIVERED}
    assert {source for source, target in LEGAL_PAIRS if target is Outcome.DELIVERED} == set(Outcome)


def test_a_table_with_a_row_out_of_a_terminal_state_cannot_be_made() -> None:
    with pytest.raises(Bug, match="terminal state stopped has a row for moved"):
        with_rows(COPY, {(CopyState.STOPPED, CopyEvent.MOVED): Row(CopyState.OPEN)})


def test_a_row_that_replaces_a_late_event_takes_its_place() -> None:
    planted = with_rows(COPY, {(CopyState.STOPPING, CopyEvent.MOVED): Row(CopyState.OPEN)})
    assert planted.step(CopyState.STOPPING, CopyEvent.MOVED) == Row(CopyState.OPEN)
    assert COPY.step(CopyState.STOPPING, CopyEvent.MOVED) is None
