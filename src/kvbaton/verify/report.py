"""The result of a verification: one row per request, and what the whole amounts to."""

from __future__ import annotations

import msgspec
import numpy as np

from kvbaton import __version__
from kvbaton.verify.compare import Verdict

__all__ = ["MAX_LOST_DRAFTS", "MAX_NEAR_TIES", "Report", "RequestRow", "Spread", "make_report"]

MAX_NEAR_TIES = 0.02
MAX_LOST_DRAFTS = 0.1


class RequestRow(msgspec.Struct, frozen=True):
    """One request: how its two answers compare, and what its hand-off cost."""

    request: int
    prompt_tokens: int
    verdict: str
    detail: str
    output_tokens: int = 0
    handed_off: bool = False
    recomputed: bool = False
    cached_tokens: int = 0
    bytes_planned: int = 0
    bytes_moved: int = 0
    handoff_s: float = 0.0
    handover_s: float = 0.0
    largest_difference: float = 0.0
    source_writes: bool = False
    """Whether the source wrote; it alone knows how many bytes, so they are not counted."""


class Spread(msgspec.Struct, frozen=True):
    """Median and 99th percentile."""

    p50: float
    p99: float


class Report(msgspec.Struct, frozen=True):
    """What `kvbaton verify --json` prints."""

    command: str
    version: str
    ok: bool
    settings: dict[str, str | int | bool]
    requests: int
    equal: int
    near_ties: int
    different: int
    failed: int
    handed_off: int
    recomputed: int
    bytes_planned: int
    bytes_moved: int
    source_writes: int
    handover_seconds: Spread
    problems: list[str]
    rows: list[RequestRow]
    accepted_alone: int = 0
    """Drafted tokens that the single instance accepted, where one drafts."""
    accepted: int = 0
    """Those that the decode instances accepted."""


def make_report(
    settings: dict[str, str | int | bool], rows: list[RequestRow], accepted_alone: int = 0, accepted: int = 0
) -> Report:
    """Add the rows up and decide. A draft changes no answer: whether its cache arrived shows in how much is accepted."""
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (*Verdict, "failed")}
    handed_off = sum(row.handed_off for row in rows)
    recomputed = sum(row.recomputed for row in rows)
    problems = _problems(count, rows, handed_off, recomputed)
    if accepted < (1 - MAX_LOST_DRAFTS) * accepted_alone:
        problems.append(f"{accepted} drafted tokens were accepted, and {accepted_alone} by the single instance")
    handovers = [row.handover_s for row in rows if row.handed_off] or [0.0]
    return Report(
        command="verify",
        version=__version__,
        ok=not problems,
        settings=settings,
        requests=len(rows),
        equal=count[Verdict.EQUAL],
        near_ties=count[Verdict.NEAR_TIE],
        different=count[Verdict.DIFFERENT],
        failed=count["failed"],
        handed_off=handed_off,
        recomputed=recomputed,
        bytes_planned=sum(row.bytes_planned for row in rows),
        bytes_moved=sum(row.bytes_moved for row in rows),
        source_writes=sum(row.source_writes for row in rows),
        handover_seconds=Spread(*(float(np.percentile(handovers, q)) for q in (50, 99))),
        problems=problems,
        rows=rows,
        accepted_alone=accepted_alone,
        accepted=accepted,
    )


def _problems(count: dict[str, int], rows: list[RequestRow], handed_off: int, recomputed: int) -> list[str]:
    answered = len(rows) - count["failed"]
    unmoved = sum(row.bytes_planned != row.bytes_moved for row in rows)
    found = [
        (count[Verdict.DIFFERENT], "{} answers differ from the single instance's"),
        (count["failed"], "{} requests failed"),
        (answered - handed_off, "{} answers were not handed off"),
        (recomputed, "{} answers were recomputed locally"),
        (unmoved, "{} hand-offs moved other bytes than planned"),
    ]
    problems = [text.format(number) for number, text in found if number]
    if count[Verdict.NEAR_TIE] > MAX_NEAR_TIES * len(rows):
        problems.append(f"{count[Verdict.NEAR_TIE]} near ties in {len(rows)} requests; at most 2 % are plausible")
    return problems
