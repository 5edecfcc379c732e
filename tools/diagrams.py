"""Rewrites the generated parts of docs/lifecycle.md from the transition tables: `python tools/diagrams.py [--check]`.

Exit code 1 with `--check` when the file differs from the tables, 0 otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

from table_diagrams import put_diagram, render_classes, render_diagram

from kvbaton.core.lifecycle import COPY, SOURCE, TARGET

__all__ = ["PAGE", "regenerated"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lifecycle.md"


def regenerated(text: str) -> str:
    """The page with its generated parts made anew."""
    for table in (SOURCE, TARGET, COPY):
        text = put_diagram(text, f"{table.name} diagram", f"```mermaid\n{render_diagram(table)}\n```")
        text = put_diagram(text, f"{table.name} events", render_classes(table))
    return text


def main(arguments: list[str]) -> int:
    """Rewrite the page, or only compare it."""
    before = PAGE.read_text(encoding="utf-8")
    after = regenerated(before)
    if arguments == ["--check"]:
        if before != after:
            sys.stderr.write(f"{PAGE.name} differs from the tables; run: make diagrams\n")
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
