"""Pictures of tables: what they show, and that docs/lifecycle.md shows the tables of today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from table_diagrams import put_diagram, render_classes, render_diagram

from kvbaton.core.lifecycle import (
    COPY,
    SOURCE,
    TARGET,
    CopyEffect,
    CopyEvent,
    CopyState,
    Row,
    SourceEffect,
    Table,
    TargetEffect,
)
from kvbaton.errors import ConfigError
from kvbaton.sim.plant_rows import with_rows

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "lifecycle.md"
TABLES: tuple[Table[Any, Any, Any], ...] = (SOURCE, TARGET, COPY)
EDGE = re.compile(r" {4}(\[\*\]|\w+) --> (\[\*\]|\w+)(?: : ([^:;]+))?")
BOX = re.compile(r' {4}state "([a-z, ]+)" as (\w+)')


def test_the_page_shows_the_tables_of_today() -> None:
    command = [sys.executable, str(ROOT / "tools" / "diagrams.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stderr}docs/lifecycle.md is out of date; run: make diagrams"


def test_the_pictures_of_layouts_show_the_code_of_today() -> None:
    command = [sys.executable, str(ROOT / "tools" / "layout_pictures.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_page_explains_every_state_and_every_event(table: Table[Any, Any, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    prose = re.sub(r"<!-- begin .*?<!-- end [^>]*-->", "", text, flags=re.DOTALL)
    for state in type(table.start):
        assert state.value in prose, state
    for event in {event for _, event in table.rows}:
        assert event.value.split(": ")[-1] in prose, event


def test_the_page_explains_every_effect() -> None:
    prose = re.sub(r"<!-- begin .*?<!-- end [^>]*-->", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    for effect in (*SourceEffect, *TargetEffect):
        assert f"| {effect.value} |" in prose, effect


def _drawn(table: Table[Any, Any, Any]) -> set[tuple[str, str, str]]:
    """(state, event, target) as the picture shows them, boxes opened."""
    lines = render_diagram(table).splitlines()[1:]
    boxes = {found[2]: found[1].split(", ") for line in lines if (found := BOX.fullmatch(line))}
    rows = set()
    for line in lines:
        found = EDGE.fullmatch(line)
        assert found or BOX.fullmatch(line), line
        if found and found[3]:
            for state in boxes.get(found[1], [found[1]]):
                for event in found[3].partition(" / ")[0].split(", "):
                    rows.add((state, event, state if found[2] == found[1] else found[2]))
    return rows


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_picture_shows_every_row_once_and_nothing_else(table: Table[Any, Any, Any]) -> None:
    rows = {(state.value, event.value.replace(":", ""), row.state.value) for (state, event), row in table.rows.items()}
    assert _drawn(table) == rows


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_starts_and_ends_are_marked(table: Table[Any, Any, Any]) -> None:
    text = render_diagram(table)
    assert f"[*] --> {table.start.value}\n" in text
    assert set(re.findall(r"(\w+) --> \[\*\]", text)) == {state.value for state in table.terminal}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_equal_tables_give_equal_pictures(table: Table[Any, Any, Any]) -> None:
    shuffled = Table(table.name, table.start, dict(reversed(list(table.rows.items()))), table.terminal, table.late)
    assert render_diagram(shuffled) == render_diagram(table)
    assert render_classes(shuffled) == render_classes(table)


def test_another_table_gives_another_picture() -> None:
    planted = with_rows(COPY, {(CopyState.STOPPING, CopyEvent.MOVED): Row(CopyState.OPEN, (CopyEffect.REPORT_MOVED,))})
    assert "stopping --> open : moved / report moved" in render_diagram(planted)
    assert render_classes(planted) != render_classes(COPY)


def test_a_picture_takes_the_place_between_its_markers() -> None:
    text = "before\n<!-- begin x -->\nold\n<!-- end x -->\nafter <!-- begin y --><!-- end y -->\n"
    once = put_diagram(text, "x", "new")
    assert once == "before\n<!-- begin x -->\nnew\n<!-- end x -->\nafter <!-- begin y --><!-- end y -->\n"
    assert put_diagram(once, "x", "new") == once


@pytest.mark.parametrize("text", ["", "<!-- begin x -->", "<!-- end x -->", "<!-- end x --><!-- begin x -->"])
def test_a_text_without_the_markers_is_refused_by_their_name(text: str) -> None:
    with pytest.raises(ConfigError, match="begin x"):
        put_diagram(text, "x", "new")
