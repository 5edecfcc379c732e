"""Senders and receivers as SGLang's queues see them: states go forward only, pages are quiet when an end is reported."""

from __future__ import annotations

import itertools
import random

import pytest
from sglang_rig import ADDRESS, AUX, PAGE, PROMPT, ROOM, Rig, key_of

from kvbaton.agent.engine_port import Allocation, EngineEvent, Granted, HandoffStats, Landed, Offer, SourceEnded, TargetEnded
from kvbaton.core.handoff import Mode, Outcome, Span
from kvbaton.core.timeline import Side, Stage
from kvbaton.engines.sglang.halves import Poll, SourceHalf, TargetHalf, prompt_digest, rank_key

DELIVERED = SourceEnded(key_of(), Outcome.DELIVERED)
LANDED = Landed(key_of(), AUX, HandoffStats())
PAGES = 3


def test_a_prefill_starts_when_its_target_has_pages_and_succeeds_when_they_are_filled() -> None:
    rig = Rig()
    source = rig.source()
    assert source.poll() is Poll.BOOTSTRAPPING
    rig.agents.push(Granted(key_of(), 4))
    assert source.poll() is Poll.WAITING
    source.begin(PAGES, 2)
    source.send([7, 8])
    assert source.poll() is Poll.WAITING
    source.send([9])
    assert source.poll() is Poll.TRANSFERRING
    rig.agents.push(DELIVERED)
    assert source.poll() is Poll.SUCCESS
    assert rig.agents.named("spans_ready") == [
        (((7, 8),), (Span(0, 0, 8, 0, 2),)),
        (((7, 8, 9),), (Span(1, 8, 10, 0, 2),)),
    ]
    assert rig.agents.named("offer") == [Offer(key_of(), ((7, 8, 9),), len(PROMPT), AUX)]
    assert not rig.halves.live


def test_in_pull_nothing_is_announced_before_all_is_computed() -> None:
    rig = Rig(Mode.PULL)
    source = rig.source()
    rig.agents.push(Granted(key_of()))
    source.poll()
    source.begin(PAGES, 2)
    source.send([7, 8])
    source.send([9])
    assert not rig.agents.named("spans_ready")
    assert len(rig.agents.named("offer")) == 1


def test_the_last_chunk_may_have_no_pages() -> None:
    rig = Rig()
    source = rig.source()
    rig.agents.push(Granted(key_of()))
    source.poll()
    source.begin(PAGES, 0)
    source.send([7, 8, 9])
    offers = len(rig.agents.named("offer"))
    source.send([])
    assert (offers, len(rig.agents.named("offer")), source.poll()) == (1, 1, Poll.TRANSFERRING)


@pytest.mark.parametrize(("pages", "row"), [(2, 0), (4, 0), (PAGES, None), (PAGES, -1)])
def test_another_number_of_pages_than_the_prompt_has_is_refused(pages: int, row: int | None) -> None:
    rig = Rig()
    source = rig.source()
    rig.agents.push(Granted(key_of()))
    source.poll()
    source.begin(pages, row)
    assert source.poll() is Poll.FAILED
    assert f"{pages} pages" in source.reason
    assert rig.agents.named("cancel") == [(key_of(), Side.SOURCE)]


def test_more_pages_than_announced_fail_the_request_and_are_not_offered() -> None:
    rig = Rig()
    source = rig.source()
    rig.agents.push(Granted(key_of()))
    source.poll()
    source.begin(PAGES, 0)
    source.send([1, 2])
    source.send([3, 4])
    assert source.poll() is Poll.FAILED
    assert "2 pages after 2, of 3" in source.reason
    assert not rig.agents.named("offer")


def test_pages_after_the_last_ones_fail_the_request_by_name() -> None:
    rig = Rig()
    source = rig.source()
    rig.agents.push(Granted(key_of()))
    source.poll()
    source.begin(PAGES, 0)
    source.send([1, 2, 3])
    source.send([])
    assert source.poll() is Poll.TRANSFERRING
    source.send([4])
    assert source.poll() is Poll.FAILED
    assert "1 pages after the last of 3" in source.reason
    assert rig.agents.named("cancel") == [(key_of(), Side.SOURCE)]


def test_a_source_that_ends_before_its_offer_has_failed_whatever_the_outcome() -> None:
    rig = Rig()
    source = rig.source()
    rig.agents.push(DELIVERED)
    assert source.poll() is Poll.FAILED


def test_an_aborted_prefill_with_announced_pages_waits_for_the_agents() -> None:
    rig = Rig()
    source = rig.source()
    rig.agents.push(Granted(key_of()))
    source.poll()
    source.begin(PAGES, 0)
    source.send([1, 2, 3])
    source.abort()
    assert source.poll() is Poll.TRANSFERRING
    rig.agents.push(SourceEnded(key_of(), Outcome.CANCELLED, "aborted"))
    assert source.poll() is Poll.FAILED


def test_an_aborted_prefill_without_pages_fails_at_once() -> None:
    rig = Rig()
    source = rig.source()
    source.abort()
    assert source.poll() is Poll.FAILED
    assert rig.agents.named("cancel") == [(key_of(), Side.SOURCE)]


def test_a_target_leaves_out_what_it_has_cached_and_writes_its_row_when_the_cache_has_landed() -> None:
    rig = Rig()
    target = rig.target()
    assert target.poll() is Poll.BOOTSTRAPPING
    target.ready()
    assert target.poll() is Poll.WAITING
    target.allocated([5, 6], 3, PAGE)
    assert target.poll() is Poll.TRANSFERRING
    (allocation,) = rig.agents.named("allocated")
    assert isinstance(allocation, Allocation)
    assert (allocation.blocks, allocation.tokens, allocation.cached_tokens) == (((0, 5, 6),), len(PROMPT), PAGE)
    assert allocation.request.prompt == prompt_digest(PROMPT)
    assert rig.poisoned == [5, 6]
    assert not rig.rows
    rig.agents.push(LANDED)
    assert target.poll() is Poll.SUCCESS
    assert rig.rows == {3: (AUX, ROOM)}
    assert Stage.FIRST_STEP in [note.stage for note in rig.notes]


def test_a_second_set_of_pages_changes_nothing() -> None:
    rig = Rig()
    target = rig.target()
    target.ready()
    target.allocated([5, 6, 7], 3, 0)
    target.allocated([1, 2, 3], 4, 0)
    assert len(rig.agents.named("allocated")) == 1
    assert rig.poisoned == [5, 6, 7]
    rig.agents.push(LANDED)
    assert target.poll() is Poll.SUCCESS
    assert rig.rows == {3: (AUX, ROOM)}


def test_events_that_are_ahead_of_a_following_rank_wait_for_its_request() -> None:
    rig = Rig(follows=True)
    known = rank_key(key_of(), "")
    rig.agents.push(Granted(known), SourceEnded(known, Outcome.FAILED, "the target is gone"))
    rig.halves.take_events()
    source = rig.source()
    assert source.poll() is Poll.FAILED
    assert "the target is gone" in source.reason
    assert not rig.halves.live
    again = rig.source()
    assert again.poll() is Poll.BOOTSTRAPPING


def test_a_following_rank_keeps_two_requests_under_one_room_apart() -> None:
    """It has the next one before it has taken the end of the first one."""
    rig = Rig(follows=True)
    first, second = (SourceHalf(rig.halves, ROOM, PROMPT, request=name) for name in ("first", "second"))
    rig.agents.push(
        SourceEnded(rank_key(key_of(), "first"), Outcome.FAILED, "the target is gone"), Granted(rank_key(key_of(), "second"))
    )
    assert (first.poll(), second.poll()) == (Poll.FAILED, Poll.WAITING)
    assert list(rig.halves.live.values()) == [second]


def test_events_about_what_a_leader_does_not_know_are_forgotten() -> None:
    rig = Rig()
    rig.agents.push(SourceEnded(key_of(), Outcome.FAILED, "an earlier request"))
    rig.halves.take_events()
    assert rig.source().poll() is Poll.BOOTSTRAPPING


def test_a_failed_target_reports_it_only_when_its_pages_are_quiet() -> None:
    rig = Rig()
    target = rig.target()
    target.ready()
    target.allocated([5, 6, 7], 3, 0)
    target.abort()
    assert target.poll() is Poll.TRANSFERRING
    assert target.may_be_written
    rig.agents.push(TargetEnded(key_of(), Outcome.CANCELLED, "aborted"))
    assert target.poll() is Poll.FAILED
    assert not target.may_be_written


def test_a_target_that_lands_after_it_was_aborted_has_failed() -> None:
    rig = Rig()
    target = rig.target()
    target.ready()
    target.allocated([5, 6, 7], 3, 0)
    target.abort()
    rig.agents.push(LANDED)
    assert target.poll() is Poll.FAILED
    assert not rig.rows


def test_a_row_that_does_not_fit_fails_the_request() -> None:
    rig = Rig()
    rig.row_problem = "the source's metadata row has 3 bytes, ours has 1600"
    target = rig.target()
    target.ready()
    target.allocated([5, 6, 7], 3, 0)
    rig.agents.push(LANDED)
    assert target.poll() is Poll.FAILED
    assert target.reason == rig.row_problem


@pytest.mark.parametrize(
    ("pages", "cached"), [([5, 6], 0), ([5, 6, 7, 8], 0), ([5, 6, 7], PAGE), ([5, 6], 3)], ids=["few", "many", "cached", "odd"]
)
def test_pages_that_are_not_those_of_the_prompt_are_refused_before_any_grant(pages: list[int], cached: int) -> None:
    rig = Rig()
    target = rig.target()
    target.ready()
    target.allocated(pages, 3, cached)
    assert target.poll() is Poll.FAILED
    assert not rig.agents.named("allocated")


@pytest.mark.parametrize("room", [0, -1, 1 << 63, None, "5", True, 1.0])
def test_a_room_that_sglang_cannot_use_fails_by_name(room: object) -> None:
    rig = Rig()
    for half in (rig.source(room), rig.target(room)):
        assert half.poll() is Poll.FAILED
        assert "bootstrap_room" in half.reason
    assert not rig.agents.calls


@pytest.mark.parametrize("room", [1, (1 << 63) - 1])
def test_the_first_and_the_last_room_are_used(room: int) -> None:
    rig = Rig()
    assert rig.source(room).poll() is Poll.BOOTSTRAPPING


@pytest.mark.parametrize("address", ["None:8998", "host:", "host:0", "host:65536", "host", ":8998", "host:x"])
def test_an_address_with_a_part_missing_fails_by_name(address: str) -> None:
    rig = Rig()
    target = rig.target(address=address)
    assert target.poll() is Poll.FAILED
    assert "bootstrap_host and bootstrap_port" in target.reason
    assert not rig.agents.calls


def test_ipv6_addresses_lose_their_brackets() -> None:
    rig = Rig()
    rig.target(address="[::1]:8998")
    (request,) = rig.agents.named("expect_source")
    assert request.source.host == "::1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_problem_that_is_known_from_the_start_is_the_reason_and_no_agent_is_asked(side: str) -> None:
    rig = Rig()
    half = SourceHalf(rig.halves, ROOM, PROMPT, "why") if side == "source" else _failed_target(rig)
    half.abort()
    assert (half.poll(), half.reason) == (Poll.FAILED, "why")
    assert rig.agents.calls == []
    assert rig.halves.live == {}


def _failed_target(rig: Rig) -> TargetHalf:
    return TargetHalf(rig.halves, ROOM, ADDRESS, PROMPT, "why")


def test_a_room_used_twice_fails_the_second_request_and_not_the_first() -> None:
    rig = Rig()
    first, second = rig.source(), rig.source()
    assert (first.poll(), second.poll()) == (Poll.BOOTSTRAPPING, Poll.FAILED)
    assert "in use" in second.reason
    second.abort()
    rig.agents.push(Granted(key_of()))
    assert (first.poll(), second.poll()) == (Poll.WAITING, Poll.FAILED)
    assert not rig.agents.named("cancel")


def test_a_room_is_free_again_when_its_request_is_over() -> None:
    rig = Rig()
    first = rig.source()
    rig.agents.push(SourceEnded(key_of(), Outcome.EXPIRED, "no target"))
    assert first.poll() is Poll.FAILED
    assert rig.source().poll() is Poll.BOOTSTRAPPING


def test_agents_that_refuse_fail_the_request() -> None:
    rig = Rig()
    rig.agents.refuses = True
    source = rig.source()
    assert source.poll() is Poll.FAILED
    assert "have stopped" in source.reason
    assert not rig.halves.live


def _steps(rig: Rig, side: str) -> list[object]:
    half = rig.source() if side == "source" else rig.target()
    ends: list[EngineEvent] = [Granted(key_of()), DELIVERED, LANDED, TargetEnded(key_of(), Outcome.FAILED, "x")]
    ends.append(SourceEnded(key_of(), Outcome.FAILED, "x"))
    calls: list[object] = [lambda event=event: rig.agents.push(event) for event in ends]
    calls += [half.abort, half.poll, half]
    if side == "source":
        calls += [lambda: half.begin(PAGES, 0), lambda: half.send([1]), lambda: half.send([1, 2, 3])]  # type: ignore[union-attr]
    else:
        calls += [half.ready, lambda: half.allocated([1, 2, 3], 0, 0)]  # type: ignore[union-attr]
    return calls


@pytest.mark.parametrize("side", ["source", "target"])
def test_whatever_happens_in_whatever_order_states_go_forward_and_ends_are_final(side: str) -> None:
    for seed in range(300):
        rig, chance = Rig(), random.Random(seed)
        calls = _steps(rig, side)
        half = next(each for each in calls if hasattr(each, "state"))
        seen = []
        for _ in range(12):
            call = chance.choice(calls)
            if callable(call):
                call()
            seen.append(half.poll())  # type: ignore[attr-defined]
        for before, after in itertools.pairwise(seen):
            assert (
                after == before if before in (Poll.FAILED, Poll.SUCCESS) else after in (Poll.FAILED, before) or after > before
            )
