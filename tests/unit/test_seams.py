"""Engines and transports are chosen through their tables: nothing else compares a name with one of theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.engines.table import OWN_ENGINES, engine_names, find_engine
from kvbaton.errors import ConfigError
from kvbaton.transport.table import TRANSPORTS

_SOURCE = Path(__file__).parents[2] / "src" / "kvbaton"
_ENGINES = set(OWN_ENGINES)
_TRANSPORTS = {*TRANSPORTS} - {"auto"}  # the router has a transfer mode of that name


def _compared(path: Path, names: set[str]) -> Iterator[str]:
    """Where a file compares something with one of the names: `==`, `!=`, `in` a tuple of them, or a `case`."""
    for node in ast.walk(ast.parse(path.read_text())):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        for side in sides:
            constants = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
            if any(isinstance(each, ast.Constant) and each.value in names for each in constants):
                yield f"{path.relative_to(_SOURCE)}:{side.lineno}"


def _outside(*own: str) -> Iterator[Path]:
    return (path for path in sorted(_SOURCE.rglob("*.py")) if not str(path.relative_to(_SOURCE)).startswith(own))


def test_no_engine_is_compared_by_name_outside_its_package() -> None:
    outside = _outside("engines/table.py")
    found = [place for path in outside for place in _compared(path, _ENGINES - {_package(path, "engines")})]
    assert not found, found


def _package(path: Path, group: str) -> str:
    """The engine, or the transport, whose own module or package a file is; a drop-in for a library may name that library."""
    parts = path.relative_to(_SOURCE).with_suffix("").parts
    return parts[1] if parts[0] in (group, "compat") else ""


def test_no_transport_is_compared_by_name_outside_its_package() -> None:
    outside = _outside("transport/table.py")
    found = [place for path in outside for place in _compared(path, _TRANSPORTS - {_package(path, "transport")})]
    assert not found, found


@pytest.mark.parametrize("name", sorted(OWN_ENGINES))
def test_every_engine_of_the_table_is_found_under_its_own_name(name: str) -> None:
    assert find_engine(name).name == name


def test_a_name_that_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--engine is 'vlm', which is no engine; did you mean 'vllm'\?"):
        find_engine("vlm")
    with pytest.raises(ConfigError, match=f"known are {', '.join(engine_names())}"):
        find_engine("nothing like it")
