"""docs/glossary.md is sorted, its links resolve, and it names what the code and the other documents name."""

from __future__ import annotations

import enum
import re
import typing
from pathlib import Path

import pytest

from kvbaton.config import Limits, OnFailure
from kvbaton.core import layout
from kvbaton.core.handoff import Executor, Integrity, Mode, Outcome
from kvbaton.core.messages import Message

_DOCS = Path(__file__).parents[2] / "docs"
_PAGE = (_DOCS / "glossary.md").read_text(encoding="utf-8")
_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in _PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| term |")
]
_TERMS = [row[0].strip("`") for row in _ROWS]
_METRICS = sorted({name for path in _DOCS.glob("*.md") for name in re.findall(r"\bkvbaton_[a-z_]+[a-z]\b", path.read_text())})


def _stem(term: str) -> str:
    """A term as it stands in a metric's name, without an ending that inflects it."""
    return re.sub(r"e$", "", term.lower().replace("-", "").replace(" ", "_"))


def test_each_line_has_a_term_a_meaning_and_a_place_for_the_term_of_other_systems() -> None:
    assert len(_ROWS) > 60
    assert [row for row in _ROWS if len(row) != 3 or not row[0] or not row[1]] == []


def test_terms_are_unique_and_sorted() -> None:
    keys = [term.lower() for term in _TERMS]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("limit", Limits.__dataclass_fields__)
def test_each_limit_is_a_term(limit: str) -> None:
    assert limit in _TERMS


@pytest.mark.parametrize("tag", [str(kind.__struct_config__.tag) for kind in typing.get_args(Message)])
def test_each_message_is_named(tag: str) -> None:
    assert f"`{tag}`" in _PAGE


@pytest.mark.parametrize(
    "kind",
    [layout.FULL, layout.SLIDING, layout.SLIDING_PAGES, layout.CHUNKED, layout.MLA, layout.INDEX, layout.CONV, layout.SSM],
)
def test_each_kind_of_group_is_named(kind: str) -> None:
    assert kind in [term.lower() for term in _TERMS] or f"`{kind}`" in _PAGE


@pytest.mark.parametrize("value", [*Mode, *Outcome, *Integrity, *Executor, *OnFailure])
def test_each_value_of_a_setting_or_message_is_named(value: enum.StrEnum) -> None:
    assert f"`{value}`" in _PAGE


@pytest.mark.parametrize("metric", _METRICS)
def test_each_metric_in_the_documents_is_named_after_a_term(metric: str) -> None:
    assert any(_stem(term) in metric for term in _TERMS), f"no term of the glossary is in {metric}"


def test_links_lead_to_files_and_headings() -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", _PAGE):
        text = (_DOCS / target).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{target}#{anchor}"
