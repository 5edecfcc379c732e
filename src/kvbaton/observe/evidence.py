"""Whether the cache of one request was handed over: a verdict from what a running deployment shows of it.

An answer alone proves nothing: a decode instance that gets no cache computes the prompt again and answers the same. Pure: from
an answer, a timeline and two scrapes of metrics to pieces of evidence, and from those to one verdict.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side
from kvbaton.observe.transfer_report import TransferReport, size

__all__ = ["Evidence", "Scrape", "HandoffVerdict", "from_answer", "from_metrics", "from_report", "from_usage", "judge"]


class HandoffVerdict(enum.StrEnum):
    """What a piece of evidence, or all of them together, show."""

    HANDED_OVER = "handed over"
    NOT_HANDED_OVER = "not handed over"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one place shows. One that `is_weak` counts only where no other place shows anything."""

    place: str
    verdict: HandoffVerdict
    text: str
    is_weak: bool = False


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s#]+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TO_HERE = {"side": "target"}
_DELIVERED: dict[str, Mapping[str, str]] = {
    "kvbaton_handoffs_total": {**_TO_HERE, "outcome": "delivered"},
    "vllm:kvbaton_handoffs_total": {**_TO_HERE, "outcome": "delivered"},
    "vllm:nixl_bytes_transferred_count": {},
    "vllm:external_prefix_cache_hits_total": {},
}
_FAILED: dict[str, Mapping[str, str]] = {
    "kvbaton_handoff_failures_total": _TO_HERE,
    "vllm:kvbaton_handoff_failures_total": _TO_HERE,
    "vllm:nixl_num_failed_transfers_total": {},
}
_NO_CHANGE = "no series of delivered hand-offs grew"
_FAMILIES = ("kvbaton_handoffs", "vllm:kvbaton_", "vllm:nixl_")


class Scrape:
    """One page of metrics, in the text format of Prometheus. A line that cannot be read is skipped."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        self._described = {line.split()[2] for line in lines if line.startswith("# TYPE ") and len(line.split()) > 2}
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in lines:
            found = _SAMPLE.match(line)
            if found:
                try:
                    self._samples.append((found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])))
                except ValueError:
                    continue

    @property
    def is_empty(self) -> bool:
        """Whether the page has no metrics at all."""
        return not (self._samples or self._described)

    @property
    def counts_handoffs(self) -> bool:
        """Whether it has a series of a connector; an engine without one has none."""
        names = self._described | {name for name, _, _ in self._samples}
        return any(name.startswith(_FAMILIES) for name in names)

    def total(self, name: str, labels: Mapping[str, str]) -> float:
        """The sum over the samples of a series that have these labels."""
        return sum(value for each, own, value in self._samples if each == name and labels.items() <= own.items())


def from_answer(document: Mapping[str, Any]) -> Evidence | None:
    """What the decode instance reports of the hand-off in its answer; None where it reports nothing."""
    params = document.get("kv_transfer_params")
    record = document.get("kvbaton") or (params.get("kvbaton") if isinstance(params, Mapping) else None)
    if not isinstance(record, Mapping) or "handed_off" not in record:
        return None
    place = "the record in the answer"
    if record.get("recomputed"):
        return Evidence(place, HandoffVerdict.NOT_HANDED_OVER, "the decode instance states that it computed the prompt again")
    if not record["handed_off"]:
        return Evidence(place, HandoffVerdict.NOT_HANDED_OVER, "the decode instance states that it got no cache")
    moved, transport = record.get("bytes_moved"), record.get("transport")
    how = f" over {transport}" if transport else ""
    bytes_text = f"; {size(moved)} were moved{how}" if isinstance(moved, int) else ""
    return Evidence(place, HandoffVerdict.HANDED_OVER, f"the decode instance states that the cache landed{bytes_text}")


def from_usage(document: Mapping[str, Any]) -> Evidence | None:
    """What `cached_tokens` shows of a prompt that no cache can have held before; None where the answer has no such number.

    Weak: proxies of llm-d replace the number by that of the prefill instance, and routers may hide it.
    """
    usage = document.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    if not isinstance(usage, Mapping) or not isinstance(cached, int):
        return None
    text = f"cached_tokens is {cached} of {usage.get('prompt_tokens')}, for a prompt that was sent for the first time"
    verdict = HandoffVerdict.HANDED_OVER if cached > 0 else HandoffVerdict.NOT_HANDED_OVER
    return Evidence("the usage in the answer", verdict, text, is_weak=True)


def from_report(report: TransferReport) -> Evidence:
    """What the timelines of both instances show."""
    ends = [end for handoff in report.handoffs for end in handoff.ends if end.side is Side.TARGET]
    place = f"the timeline of {report.transfer_id}"
    if ends and all(end.outcome is Outcome.DELIVERED for end in ends):
        return Evidence(place, HandoffVerdict.HANDED_OVER, report.sentence)
    if any(end.outcome not in (None, Outcome.DELIVERED) for end in ends):
        return Evidence(place, HandoffVerdict.NOT_HANDED_OVER, report.sentence)
    return Evidence(place, HandoffVerdict.UNKNOWN, report.sentence)


def from_metrics(scrapes: Mapping[str, tuple[Scrape, Scrape]]) -> list[Evidence]:
    """What changed at decode instances, by their addresses, while the request was served; requests of others count too.

    One of several instances has served the request: where one shows a delivery, no change at the others shows nothing.
    """
    found = [_change(f"the metrics at {where}", *both) for where, both in scrapes.items()]
    if not any(each.verdict is HandoffVerdict.HANDED_OVER for each in found):
        return found
    return [replace(each, verdict=HandoffVerdict.UNKNOWN) if each.text == _NO_CHANGE else each for each in found]


def _change(place: str, before: Scrape, after: Scrape) -> Evidence:
    if before.is_empty:
        return Evidence(place, HandoffVerdict.UNKNOWN, "it has no metrics")
    grown, failed = (
        [name for name, labels in names.items() if after.total(name, labels) > before.total(name, labels)]
        for names in (_DELIVERED, _FAILED)
    )
    if failed:
        return Evidence(place, HandoffVerdict.NOT_HANDED_OVER, f"{', '.join(failed)} grew")
    if grown:
        return Evidence(place, HandoffVerdict.HANDED_OVER, f"{', '.join(grown)} grew")
    if not before.counts_handoffs:
        return Evidence(place, HandoffVerdict.NOT_HANDED_OVER, "no series of a connector: this engine runs without one")
    return Evidence(place, HandoffVerdict.NOT_HANDED_OVER, _NO_CHANGE)


def judge(found: Iterable[Evidence]) -> HandoffVerdict:
    """One verdict: any place that shows a prompt computed again outweighs the others."""
    known = [each for each in found if each.verdict is not HandoffVerdict.UNKNOWN]
    counted = [each for each in known if not each.is_weak] or known
    if not counted:
        return HandoffVerdict.UNKNOWN
    is_handed_over = all(each.verdict is HandoffVerdict.HANDED_OVER for each in counted)
    return HandoffVerdict.HANDED_OVER if is_handed_over else HandoffVerdict.NOT_HANDED_OVER
