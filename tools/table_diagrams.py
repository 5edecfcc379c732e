"""Transition tables as Mermaid state diagrams and Markdown tables, inserted into a text between two markers.

Pure text in, text out; `tools/diagrams.py` reads and writes the files.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from kvbaton.core.lifecycle import Table
from kvbaton.errors import ConfigError

__all__ = ["put_diagram", "render_classes", "render_diagram"]

_SHARED_BY = 3
"""A row shared by at least this many states is drawn once, from a box that names them all: else the diagram is unreadable."""

_AnyTable = Table[Any, Any, Any]
_Edge = tuple[tuple[str, ...], str | None, tuple[str, ...]]
"""From these states, to that one (None: no change of state), with these effects."""


def render_diagram(table: _AnyTable) -> str:
    """The rows of `table` as a Mermaid diagram; equal tables give equal text."""
    return "\n".join(["stateDiagram-v2", *(f"    {line}" for line in _lines(table))])


def render_classes(table: _AnyTable) -> str:
    """What each event is in each state (a row, late, or illegal), as a Markdown table."""
    lines = ["| state | rows | late | illegal |", "|---|---|---|---|"]
    for state in _states(table):
        names: dict[str, list[str]] = {"row": [], "late": [], "illegal": []}
        for event in _events(table):
            names["late" if state in table.terminal else _class_of(table, state, event)].append(event.value)
        cells = ["everything" if len(cell) == len(_events(table)) else ", ".join(cell) or "-" for cell in names.values()]
        lines.append(f"| {state.value} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put_diagram(text: str, name: str, body: str) -> str:
    """`text` with the part between the markers of `name` replaced by `body`; raises ConfigError without the markers."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ConfigError(f"the lines {begin!r} and {end!r} are missing; add them where the generated text belongs")
    return f"{before}{begin}\n{body}\n{end}{after}"


def _lines(table: _AnyTable) -> Iterator[str]:
    shared = {edge[0]: f"any{number}" for number, edge in enumerate(_first_of_each(table), 1)}
    for sources, name in shared.items():
        yield f'state "{", ".join(sources)}" as {name}'
    for state in _entries(table):
        yield f"[*] --> {state.value}"
    for (sources, target, effects), events in _edges(table).items():
        start = sources[0] if len(sources) == 1 else shared[sources]
        label = ", ".join(events) + (f" / {', '.join(effects)}" if effects else "")
        yield f"{start} --> {target or start} : {label.replace(':', '')}"
    for state in _states(table):
        if state in table.terminal:
            yield f"{state.value} --> [*]"


def _first_of_each(table: _AnyTable) -> list[_Edge]:
    groups = {edge[0]: edge for edge in _edges(table) if len(edge[0]) > 1}
    return list(groups.values())


def _edges(table: _AnyTable) -> dict[_Edge, list[str]]:
    """Events by edge; rows that lead to the same state with the same effects are one edge."""
    edges: dict[_Edge, list[str]] = {}
    for event in _events(table):
        for (target, effects), sources in _sources_of(table, event).items():
            together = [tuple(sources)] if len(sources) >= _SHARED_BY else [(source,) for source in sources]
            for group in together:
                edges.setdefault((group, target, effects), []).append(event.value)
    return edges


def _sources_of(table: _AnyTable, event: enum.StrEnum) -> dict[tuple[str | None, tuple[str, ...]], list[str]]:
    sources: dict[tuple[str | None, tuple[str, ...]], list[str]] = {}
    for state in _states(table):
        if (row := table.rows.get((state, event))) is not None:
            target = None if row.state is state else row.state.value
            effects = tuple(effect.value for effect in row.effects)
            sources.setdefault((target, effects), []).append(state.value)
    return sources


def _entries(table: _AnyTable) -> list[enum.StrEnum]:
    """The start state, and every other state that no row leads to."""
    reached = {row.state for (state, _), row in table.rows.items() if row.state is not state}
    return [state for state in _states(table) if state is table.start or state not in reached]


def _class_of(table: _AnyTable, state: enum.StrEnum, event: enum.StrEnum) -> str:
    if (state, event) in table.rows:
        return "row"
    return "late" if (state, event) in table.late else "illegal"


def _states(table: _AnyTable) -> list[enum.StrEnum]:
    kind: type[enum.StrEnum] = type(table.start)
    return list(kind)


def _events(table: _AnyTable) -> list[enum.StrEnum]:
    """All events, in the order of their definition; a table without rows has none."""
    kinds: set[type[enum.StrEnum]] = {type(event) for _, event in table.rows}
    return [event for kind in kinds for event in kind]
