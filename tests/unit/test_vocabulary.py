"""The words of this field, and one name per thing: held for every package of `src`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parents[2] / "src" / "kvbaton"
_PACKAGES = sorted(path.name for path in _SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__")
_FORBIDDEN = re.compile(
    r"\b(nobody|somebody|everybody|whoever|whomever|mend(s|ed|ing)?|hears?|heard|unheard|tells?|told|telling|farewells?"
    r"|lets? go|let_go|comes? for|last words|patience|wish(es)?|says|said|speaks?|talks?)\b",
    re.IGNORECASE,
)


def _words(text: str) -> str:
    """Identifiers taken apart, so that `tell_release` and `TellRelease` show their words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ")


@pytest.mark.parametrize("package", [*_PACKAGES, "."])
def test_source_uses_the_terms_of_the_field(package: str) -> None:
    paths = _SOURCE.glob("*.py") if package == "." else (_SOURCE / package).rglob("*.py")
    found = [
        f"{path.relative_to(_SOURCE)}:{number}: {match.group(0)}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in _FORBIDDEN.finditer(_words(line))
    ]
    assert not found, "\n".join([f"{len(found)} places", *found])


def test_documents_use_the_terms_of_the_field() -> None:
    root = _SOURCE.parents[1]
    found = [
        f"{path.relative_to(root)}:{number}: {match.group(0)}"
        for path in sorted([*(root / "docs").glob("*.md"), *root.glob("*.md")])
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in _FORBIDDEN.finditer(line)
    ]
    assert not found, "\n".join([f"{len(found)} places", *found])


def test_each_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(_SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path.relative_to(_SOURCE)))
    doubled = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not doubled, "\n".join(f"{name}: {', '.join(paths)}" for name, paths in sorted(doubled.items()))
