"""The page on structure names files that exist, and every room."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "structure.md").read_text()
_ROOMS = _ROOT / "src" / "kvbaton"


def test_every_file_that_it_names_exists() -> None:
    named = set(re.findall(r"`([a-z_]+/[A-Za-z_/.]+)`", _PAGE))
    missing = [path for path in sorted(named) if not (_ROOT / path).exists() and not (_ROOMS / path).exists()]
    assert named
    assert not missing


def test_every_room_has_a_row() -> None:
    rooms = {path.name for path in _ROOMS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {room for room in rooms if f"(../src/kvbaton/{room})" not in _PAGE} == set()
