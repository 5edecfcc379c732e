"""Was the cache handed over: what each place shows, and one verdict from all of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.core.handoff import Outcome
from kvbaton.core.timeline import Side, Stage
from kvbaton.observe.evidence import Evidence, HandoffVerdict, Scrape, from_answer, from_metrics, from_report, from_usage, judge
from kvbaton.observe.transfer_report import SideAnswer, build_report
from true_notes import TRANSFER, Way, account, notes_of_pull

YES, NO, UNKNOWN = HandoffVerdict.HANDED_OVER, HandoffVerdict.NOT_HANDED_OVER, HandoffVerdict.UNKNOWN


def usage(cached: object, prompt: int = 200) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}}


@pytest.mark.parametrize(
    ("document", "verdict"),
    [
        ({"kvbaton": {"handed_off": True, "bytes_moved": 5_898_240, "transport": "tcp"}}, YES),
        ({"kv_transfer_params": {"kvbaton": {"handed_off": True, "recomputed": False}}}, YES),
        ({"kv_transfer_params": {"kvbaton": {"handed_off": True, "recomputed": True}}}, NO),
        ({"kvbaton": {"handed_off": False}}, NO),
        ({"kv_transfer_params": {"kvbaton": {}}}, None),
        ({"kv_transfer_params": None}, None),
        ({"kv_transfer_params": ["?"], "kvbaton": 7}, None),
        ({}, None),
    ],
)
def test_the_record_in_an_answer(document: dict[str, Any], verdict: HandoffVerdict | None) -> None:
    found = from_answer(document)
    assert (found and found.verdict) == verdict
    if verdict is YES and "kvbaton" in document:
        assert found is not None
        assert "5.9 MB were moved over tcp" in found.text


@pytest.mark.parametrize(("cached", "verdict"), [(199, YES), (0, NO), (None, None), ("many", None)])
def test_cached_tokens_of_a_new_prompt_are_weak_evidence(cached: object, verdict: HandoffVerdict | None) -> None:
    found = from_usage(usage(cached))
    assert (found and found.verdict) == verdict
    assert found is None or found.is_weak
    assert from_usage({"usage": None}) is None


def test_a_timeline_shows_how_the_target_ended() -> None:
    way = notes_of_pull(Way())
    assert from_report(build_report(TRANSFER, account(Side.SOURCE, way), account(Side.TARGET, way))).verdict is YES
    failed = Way()
    failed.target(Stage.ARRIVED, 0.0)
    failed.target(Stage.ENDED, 1.0, outcome=Outcome.FAILED, text="no progress for 30 s")
    found = from_report(build_report(TRANSFER, SideAnswer("prefill", problem="it is gone"), account(Side.TARGET, failed)))
    assert found.verdict is NO
    assert "no progress for 30 s" in found.text
    open_ = Way()
    open_.target(Stage.ARRIVED, 0.0)
    report = build_report(TRANSFER, SideAnswer("prefill", problem="it is gone"), account(Side.TARGET, open_))
    assert from_report(report).verdict is UNKNOWN


def page(name: str, value: float, labels: str = "") -> Scrape:
    family = name.removesuffix("_total").removesuffix("_count")
    return Scrape(f"# HELP {family} x\n# TYPE {family} counter\n{name}{labels} {value}\nbroken {{\nvllm:other NaN 12\n")


DELIVERED = '{engine="0",model_name="a \\"b\\"",side="target",outcome="delivered"}'


@pytest.mark.parametrize(
    ("name", "labels", "verdict"),
    [
        ("kvbaton_handoffs_total", DELIVERED, YES),
        ("vllm:kvbaton_handoffs_total", DELIVERED, YES),
        ("vllm:nixl_bytes_transferred_count", '{engine="0"}', YES),
        ("vllm:external_prefix_cache_hits_total", "", YES),
        ("vllm:kvbaton_handoffs_total", '{side="source",outcome="delivered"}', NO),
        ("vllm:kvbaton_handoffs_total", '{side="target",outcome="failed"}', NO),
        ("vllm:kvbaton_handoff_failures_total", '{side="target",cause="no progress"}', NO),
        ("vllm:nixl_num_failed_transfers_total", "", NO),
        ("vllm:prompt_tokens_total", "", NO),
    ],
)
def test_counters_of_a_decode_instance(name: str, labels: str, verdict: HandoffVerdict) -> None:
    (found,) = from_metrics({"decode:1": (page(name, 3, labels), page(name, 4, labels))})
    assert found.verdict is verdict
    assert "decode:1" in found.place
    (unchanged,) = from_metrics({"decode:1": (page(name, 3, labels), page(name, 3, labels))})
    assert unchanged.verdict is NO


def test_one_of_several_instances_has_served_the_request() -> None:
    name = "vllm:kvbaton_handoffs_total"
    idle, served = (page(name, 1, DELIVERED), page(name, 1, DELIVERED)), (page(name, 1, DELIVERED), page(name, 2, DELIVERED))
    assert [each.verdict for each in from_metrics({"a": idle, "b": served})] == [UNKNOWN, YES]
    assert [each.verdict for each in from_metrics({"a": idle, "b": idle})] == [NO, NO]


def test_a_page_without_metrics_shows_nothing() -> None:
    (found,) = from_metrics({"a": (Scrape("<html>"), Scrape("<html>"))})
    assert found.verdict is UNKNOWN


def evidence(verdict: HandoffVerdict, is_weak: bool = False) -> Evidence:
    return Evidence("somewhere", verdict, "", is_weak)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([], UNKNOWN),
        ([evidence(UNKNOWN)], UNKNOWN),
        ([evidence(YES, is_weak=True)], YES),
        ([evidence(NO, is_weak=True)], NO),
        ([evidence(YES), evidence(NO, is_weak=True)], YES),
        ([evidence(YES), evidence(NO)], NO),
        ([evidence(YES), evidence(UNKNOWN)], YES),
        ([evidence(NO), evidence(YES, is_weak=True)], NO),
    ],
)
def test_one_verdict(found: list[Evidence], verdict: HandoffVerdict) -> None:
    assert judge(found) is verdict
