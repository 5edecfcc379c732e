"""A transition table: (state, event) -> (state, effects). Pure data and one function to step, nothing else."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvbaton.errors import Bug, IllegalTransition

__all__ = ["Row", "Table"]

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

    def with_rows(
        self, rows: Mapping[tuple[StateT, EventT], Row[StateT, EffectT]], terminal: Iterable[StateT] | None = None
    ) -> Table[StateT, EventT, EffectT]:
        """The same table with some rows replaced; what the simulator's planted bugs are made with."""
        merged = {**self.rows, **rows}
        return replace(
            self,
            rows=merged,
            late=frozenset(self.late - set(rows)),
            terminal=self.terminal if terminal is None else frozenset(terminal),
        )
