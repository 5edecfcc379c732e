"""Holds docs/protocol.md to the code: every message, field and limit of the wire is named there, and nothing that is gone."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

from kvbaton.core import handoff, messages
from kvbaton.core.aux_area import AuxArea, AuxPointer
from kvbaton.core.card import PROTOCOL, Card, Endpoint, ProcessId, RankCard
from kvbaton.core.checks import SpanSum
from kvbaton.core.handoff import Aux, HandoffKey, Span
from kvbaton.core.layout import Group, Layout, Plane
from kvbaton.core.messages import Envelope, Message
from kvbaton.core.stamps import Stamp, StampArea
from kvbaton.discovery.messages import Registration
from kvbaton.engines.handoff_params import KVTransferParams

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
SECTIONS = {
    title.strip("`"): text for title, text in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
}

MESSAGES: dict[str, type[msgspec.Struct]] = {str(kind.__struct_config__.tag): kind for kind in typing.get_args(Message)}
PARTS: dict[str, type[msgspec.Struct]] = {
    "Envelope": Envelope,
    "Hand-off key": HandoffKey,
    "Span": Span,
    "Span sum": SpanSum,
    "Aux record": Aux,
    "Card": Card,
    "Rank card": RankCard,
    "Aux area": AuxArea,
    "Aux pointer": AuxPointer,
    "Stamp": Stamp,
    "Stamp area": StampArea,
    "Endpoint": Endpoint,
    "Process id": ProcessId,
    "Layout": Layout,
    "Group": Group,
    "Plane": Plane,
    "Registration map": Registration,
    "kv_transfer_params": KVTransferParams,
}


def named_fields(section: str) -> list[str]:
    """The first column of the table in a section."""
    return re.findall(r"^\| `(\w+)` \|", SECTIONS[section], re.MULTILINE)


def tags_on_page() -> set[str]:
    """The sections that are about one message."""
    _, _, rest = PAGE.partition("\n## Messages\n")
    return set(re.findall(r"^### `(\w+)`$", rest.partition("\n## ")[0], re.MULTILINE))


def test_every_message_has_a_section_and_every_section_a_message() -> None:
    assert tags_on_page() == set(MESSAGES)


@pytest.mark.parametrize(("section", "kind"), [*MESSAGES.items(), *PARTS.items()])
def test_a_section_names_exactly_the_fields_in_their_order(section: str, kind: type[msgspec.Struct]) -> None:
    assert tuple(named_fields(section)) == kind.__struct_encode_fields__


@pytest.mark.parametrize("name", ["MAX_FRAME_BYTES", "MAX_INCARNATION", "MAX_MORE", "MAX_REASON", "MAX_TRANSFER_ID"])
def test_limits_are_those_of_the_code(name: str) -> None:
    value = getattr(messages, name, None) or getattr(handoff, name)
    assert f"| `{name}` | {value} |" in PAGE


def test_the_version_is_the_one_of_the_code() -> None:
    assert f"| `version` | the protocol version, now {PROTOCOL} |" in PAGE


@pytest.mark.parametrize("value", [*handoff.Mode, *handoff.Executor, *handoff.Outcome, *handoff.Integrity, *handoff.AuxChannel])
def test_every_word_that_a_field_may_hold_is_named(value: str) -> None:
    assert value in PAGE


def test_links_within_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\(#([^)]+)\)", PAGE)) <= anchors


def test_links_to_files_lead_to_files() -> None:
    docs = Path(__file__).parents[3] / "docs"
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (docs / target).exists(), target
