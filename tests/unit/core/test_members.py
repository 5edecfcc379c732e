"""What stands for an enum has its very members, and the states that end a hand-off have the outcomes of their names."""

from __future__ import annotations

import enum

import pytest

from kvbaton.agent import source, target
from kvbaton.core.handoff import Outcome
from kvbaton.core.lifecycle import SOURCE, TARGET, CopyEffect, SourceState, SourceTable, TargetEvent, TargetState, TargetTable
from kvbaton.core.members import members_of


@pytest.mark.parametrize("kind", [TargetState, TargetEvent, SourceState, CopyEffect, Outcome])
def test_members_are_those_of_the_enum(kind: type[enum.StrEnum]) -> None:
    stand_in = members_of(kind)
    for member in kind:
        assert getattr(stand_in, member.name) is member
    with pytest.raises(AttributeError):
        _ = getattr(stand_in, "MISSING")  # noqa: B009
    assert not hasattr(stand_in, "__members__")


@pytest.mark.parametrize(("outcomes", "table"), [(source._OUTCOMES, SOURCE), (target._OUTCOMES, TARGET)])
def test_every_end_has_the_outcome_of_its_name(outcomes: dict[enum.StrEnum, Outcome], table: SourceTable | TargetTable) -> None:
    assert outcomes == {state: Outcome(state.value) for state in table.terminal}
