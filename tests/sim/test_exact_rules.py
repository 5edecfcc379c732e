"""Runs in which a rule once asked for more than the product promises, and what that rule still finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbaton.agent.target import TargetSide
from kvbaton.core.handoff import Incarnation, Integrity, Mode
from kvbaton.core.lifecycle import Table
from kvbaton.sim.records import tables_problems
from kvbaton.sim.run import LIMITS, Run, run_script
from kvbaton.sim.script import Fault, FaultKind, RequestScript, Script
from kvbaton.transport.base import LateWrites

BYTES_WITHOUT_MESSAGES = Script(
    seed=160192,
    late_writes=LateWrites.REVOCABLE,
    unfenced_writes=False,
    one_host=True,
    ranks=1,
    layers=2,
    prefills=1,
    decodes=1,
    prefill_blocks=8,
    decode_blocks=8,
    requests=(
        RequestScript(0.22775993234011188, 0, 0, 4, 1, Mode.PUSH, decode_delay_s=0.5),
        RequestScript(0.1845534037229245, 0, 0, 1, 1, Mode.PULL, decode_delay_s=0.05, retries=2, reuse_id=True),
    ),
    faults=(Fault(FaultKind.CUT, 1.3831382722414975, who="p0", other="d0", for_s=5.0, number=3),),
    drifts=(1.01, 1.01),
    move_s=0.2,
    decode_s=0.01,
    step_s=0.1,
    integrity=Integrity.SAMPLED,
    joins_messages=True,
)
"""The source writes for as long as `transfer_timeout` after its messages were cut."""

LATE_REFUSAL = Script(
    seed=197704,
    late_writes=LateWrites.UNFENCED,
    unfenced_writes=True,
    one_host=False,
    ranks=1,
    layers=2,
    prefills=1,
    decodes=1,
    prefill_blocks=40,
    decode_blocks=40,
    requests=(RequestScript(0.0, 0, 0, 6, 1, Mode.PUSH),) * 3,
    faults=(
        Fault(FaultKind.BAD_GRANT, 0.0, who="d0", number=5),
        Fault(FaultKind.STRAY, 0.0, who="p0", other="release"),
        Fault(FaultKind.SLOW, 0.001703423379448503, who="p0", other="d0", for_s=0.05, number=1),
        Fault(FaultKind.CANCEL_TARGET, 0.014000119772705235, number=0),
    ),
    move_s=0.02,
    step_s=0.005,
    router_cancels=0.0,
)
"""A number far ahead was accepted; the refusal of a later one, which names none, comes when the first cells have landed."""


def test_bytes_that_arrive_are_a_sign_of_life() -> None:
    assert not run_script(BYTES_WITHOUT_MESSAGES).violations


def test_control_a_target_that_waits_on_after_the_last_byte_is_found() -> None:
    run = Run(BYTES_WITHOUT_MESSAGES)
    target = run.cluster.instances["d0"].coordinator.target
    vars(target)["_limits"] = replace(LIMITS, transfer_timeout=0.9 * LIMITS.defer_timeout)
    assert "on time" in {violation.rule for violation in run.run().violations}


def test_a_refusal_without_a_number_counts_for_a_source_that_writes_already() -> None:
    assert not run_script(LATE_REFUSAL).violations


def test_control_a_target_that_goes_on_below_the_refused_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow_short(target: TargetSide, source: Incarnation, used_up_to: int) -> int:
        return follow(target, source, max(used_up_to - 2, 0))

    follow = TargetSide._follow_refusal
    monkeypatch.setattr(TargetSide, "_follow_refusal", follow_short)
    assert "as set" in {violation.rule for violation in run_script(LATE_REFUSAL).violations}


def _take_all(table: Table[Any, Any, Any], state: object, event: object) -> object:
    return table.rows.get((state, event))


def test_control_a_table_that_takes_what_is_none_of_its_events_is_found_however_often_it_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not tables_problems()
    with monkeypatch.context() as changed:
        changed.setattr(Table.step, "__code__", _take_all.__code__)
        assert tables_problems()
        assert {violation.rule for violation in run_script(LATE_REFUSAL).violations} == {"taken"}
    assert not tables_problems()
