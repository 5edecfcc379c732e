"""Tables of the product with rows replaced, which planted bugs are made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvbaton.core.lifecycle import EffectT, EventT, Row, StateT, Table

__all__ = ["with_rows"]


def with_rows(
    table: Table[StateT, EventT, EffectT], rows: Mapping[tuple[StateT, EventT], Row[StateT, EffectT]]
) -> Table[StateT, EventT, EffectT]:
    """The same table with some rows replaced, or in place of events that came late."""
    return replace(table, rows={**table.rows, **rows}, late=frozenset(table.late - set(rows)))
