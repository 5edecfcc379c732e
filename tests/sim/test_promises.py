"""The promises of docs/promises.md: for each fault, how it ends, and how soon the memory of both sides is back.

Every fault strikes at each stage in turn. Times are virtual and follow from the settings; `NORMAL_S` is what the hand-off of
these runs takes when nothing is wrong, prefill and decode included.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scenario import (
    BOTH_DELIVERED,
    HOP_S,
    Flow,
    Story,
    at_every_event,
    disturbed,
    every_flow,
    every_push,
    every_read,
    every_write,
    first_broken,
    make,
    play,
    request,
)

from kvbaton.agent import target as target_module
from kvbaton.agent.decline_notices import DeclineNotices
from kvbaton.agent.engine_port import SourceRequest
from kvbaton.agent.rank import RankAgent
from kvbaton.core.handoff import Incarnation, Mode, Outcome
from kvbaton.sim.engine import Prefill, SourceEngine
from kvbaton.sim.instance import Bugs
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.run import LIMITS
from kvbaton.sim.script import Fault, FaultKind, Script

NORMAL_S = 6 * HOP_S
GONE_CHECK_S = 1.0
LONG_S = 9.0

GIVE_UP_S = LIMITS.transfer_timeout
HOLD_S = LIMITS.defer_timeout
BEAT_S = LIMITS.beat_s
STOPPED_S = 36.0
"""How long an engine stands still: longer than anything may wait for it."""


@dataclass(slots=True)
class Worst:
    """The longest that memory was away after the fault, by address, and how the first request ended, over many runs.

    `met` counts only runs in which the two sides had met, and the source had a grant in hand, when the fault struck.
    """

    back: dict[str, float] = field(default_factory=lambda: {"p0": 0.0, "d0": 0.0})
    met: dict[str, float] = field(default_factory=lambda: {"p0": 0.0, "d0": 0.0})
    ends: set[tuple[Outcome | None, Outcome | None]] = field(default_factory=set)

    counted: Counter[str] = field(default_factory=Counter)

    def add(self, story: Story) -> None:
        """Take one more run into account."""
        self.ends.add(story.ends[0])
        self.counted += story.counted
        granted = [when for when in story.times("p0#1 -> d0: Announced(") if when < story.fault_at]
        for address in ("p0", "d0"):
            self.back[address] = max(self.back[address], story.back(address))
            if granted:
                self.met[address] = max(self.met[address], story.back(address))


def _worst(flow: Flow, *faults: Fault, step: int = 3, **changes: Any) -> Worst:
    worst = Worst()
    for script in at_every_event(make(flow, **changes), *faults, step=step):
        story = play(script)
        assert not story.rules, (script.faults, story.result.violations)
        worst.add(story)
    return worst


def _fence_s(flow: Flow) -> float:
    return flow.fences * LIMITS.stop_timeout


@every_flow
def test_source_killed_on_another_host(flow: Flow) -> None:
    """The target gives up after transfer_timeout without a word, and fences what the source might still write."""
    worst = _worst(flow, Fault(FaultKind.CRASH, who="p0", for_s=20.0))
    assert worst.back["d0"] < GIVE_UP_S + _fence_s(flow) + HOP_S
    assert {target for _, target in worst.ends} <= {None, Outcome.FAILED, Outcome.EXPIRED, Outcome.DELIVERED}


@every_flow
def test_source_killed_on_this_host(flow: Flow) -> None:
    """A dead process of the same host is found within a second, and cannot write."""
    worst = _worst(flow, Fault(FaultKind.CRASH, who="p0", for_s=20.0), one_host=True)
    assert worst.met["d0"] < GONE_CHECK_S + HOP_S
    assert worst.back["d0"] < GIVE_UP_S + HOP_S


@every_flow
def test_target_killed_on_another_host(flow: Flow) -> None:
    """The source holds what it has for defer_timeout after the last word."""
    worst = _worst(flow, Fault(FaultKind.CRASH, who="d0", for_s=20.0))
    assert worst.back["p0"] < HOLD_S + NORMAL_S
    assert {source for source, _ in worst.ends} <= {Outcome.EXPIRED, Outcome.FAILED, Outcome.DELIVERED}


@every_flow
def test_target_killed_on_this_host(flow: Flow) -> None:
    """A dead process of the same host is found within a second, if the source had heard of it."""
    worst = _worst(flow, Fault(FaultKind.CRASH, who="d0", for_s=20.0), one_host=True)
    assert worst.met["p0"] < GONE_CHECK_S + HOP_S
    assert worst.back["p0"] < HOLD_S + NORMAL_S


@every_flow
def test_source_paused(flow: Flow) -> None:
    """A source that stands still is given up as if it were dead; when it goes on, it is told at once."""
    worst = _worst(flow, Fault(FaultKind.PAUSE, who="p0", for_s=LONG_S))
    met = worst.met if flow.mode is Mode.PUSH else {"d0": 0.0, "p0": 0.0}
    assert met["d0"] < GIVE_UP_S + _fence_s(flow) + HOP_S
    assert met["p0"] < LONG_S + HOP_S
    assert worst.back["p0"] < LONG_S + HOLD_S + NORMAL_S


@every_flow
def test_target_paused(flow: Flow) -> None:
    """A target that stands still loses its source after defer_timeout, and hears of it when it goes on."""
    worst = _worst(flow, Fault(FaultKind.PAUSE, who="d0", for_s=LONG_S))
    assert worst.back["p0"] < HOLD_S + NORMAL_S
    assert worst.met["d0"] < LONG_S + HOP_S
    assert worst.back["d0"] < LONG_S + GIVE_UP_S + NORMAL_S


_CUT_TO_TARGET = Fault(FaultKind.CUT, who="p0", other="d0", for_s=LONG_S)
_CUT_TO_SOURCE = Fault(FaultKind.CUT, who="d0", other="p0", for_s=LONG_S)


@every_flow
@pytest.mark.parametrize("with_data", [False, True], ids=["control", "all"])
def test_link_cut_both_ways(flow: Flow, with_data: bool) -> None:
    """Each side ends by its own clock, whether the transport has a network of its own or not."""
    severed = Fault(FaultKind.SEVER, who="p0", other="d0", for_s=LONG_S)
    worst = _worst(flow, *((severed,) if with_data else (_CUT_TO_TARGET, _CUT_TO_SOURCE)))
    assert worst.back["p0"] < HOLD_S + NORMAL_S
    assert worst.back["d0"] < GIVE_UP_S + _fence_s(flow) + 2 * HOP_S


@every_flow
def test_link_cut_towards_the_target(flow: Flow) -> None:
    """The target gives up and tells the source, whose answer it does not hear."""
    worst = _worst(flow, _CUT_TO_TARGET)
    assert worst.back["d0"] < GIVE_UP_S + _fence_s(flow) + 2 * HOP_S
    assert worst.met["p0"] < GIVE_UP_S + 2 * HOP_S
    assert worst.back["p0"] < HOLD_S + NORMAL_S


@every_flow
def test_link_cut_towards_the_source(flow: Flow) -> None:
    """The source hears nothing for defer_timeout, and tells the target, whose questions it does not hear."""
    worst = _worst(flow, _CUT_TO_SOURCE)
    assert worst.back["p0"] < HOLD_S + NORMAL_S
    assert worst.back["d0"] < max(HOLD_S, GIVE_UP_S + _fence_s(flow)) + HOP_S


@every_flow
@pytest.mark.parametrize(("who", "other"), [("p0", "d0"), ("d0", "p0")])
def test_message_lost(flow: Flow, who: str, other: str) -> None:
    """What has no answer is asked again after `retry`; a lost last word is said at a beat after that."""
    worst = _worst(flow, Fault(FaultKind.LOSE, who=who, other=other, number=1))
    assert worst.ends == {BOTH_DELIVERED}
    assert worst.back["d0"] < LIMITS.retry + NORMAL_S
    assert worst.back["p0"] < LIMITS.retry + LIMITS.beat_s + NORMAL_S


@every_flow
@pytest.mark.parametrize(("who", "other"), [("p0", "d0"), ("d0", "p0")])
def test_several_messages_lost(flow: Flow, who: str, other: str) -> None:
    """Each time it takes twice as long, up to the time between heartbeats."""
    worst = _worst(flow, Fault(FaultKind.LOSE, who=who, other=other, number=3), step=5)
    waits = [min(LIMITS.retry * 2**index, LIMITS.beat_s) for index in range(3)]
    assert worst.ends == {BOTH_DELIVERED}
    assert worst.back["d0"] < sum(waits) + NORMAL_S
    assert worst.back["p0"] < LIMITS.retry + 3 * LIMITS.beat_s + NORMAL_S


@every_flow
@pytest.mark.parametrize("kind", [FaultKind.DOUBLE, FaultKind.DELAY], ids=str)
def test_message_doubled_or_late(flow: Flow, kind: FaultKind) -> None:
    """Nothing comes of it; one that is later than `retry` is asked for again."""
    for who, other in (("p0", "d0"), ("d0", "p0")):
        worst = _worst(flow, Fault(kind, who=who, other=other, number=3, for_s=1.0), step=5)
        assert worst.ends == {BOTH_DELIVERED}
        # Where the target counts what is written, the last byte comes after everything that the source has sent twice.
        is_in_time = flow.counts_arrivals and kind is FaultKind.DOUBLE and who == "p0"
        assert bool(worst.counted.keys() & {"announced", "confirmed", "release"}) is not is_in_time
        assert worst.back["p0"] < LIMITS.retry + LIMITS.beat_s + NORMAL_S


@every_flow
def test_cancelled_at_the_target(flow: Flow) -> None:
    """Blocks are back when the copies have stopped and the source has said so; the source's at the same time."""
    worst = _worst(flow, Fault(FaultKind.CANCEL_TARGET))
    assert {target for _, target in worst.ends} == {Outcome.CANCELLED, Outcome.DELIVERED}
    assert worst.back["d0"] < NORMAL_S
    assert worst.back["p0"] < NORMAL_S


class _NoNotices(DeclineNotices):
    def send(self, request: SourceRequest, outcome: Outcome, reason: str, source: Incarnation | None) -> None:
        del request, outcome, reason, source


@every_flow
@pytest.mark.parametrize("is_lossy", [False, True])
def test_refused_at_the_target(flow: Flow, is_lossy: bool) -> None:
    """Its source is told as soon as it is known, and told again when the word was lost; it need not have heard of it yet."""
    faults = [Fault(FaultKind.REFUSE, who="d0", at_event=1)]
    faults += [Fault(FaultKind.LOSE, who="d0", other="p0", at_event=1, number=2)] if is_lossy else []
    late = request(flow, at_s=0.0 if flow.mode is Mode.PULL else 0.01)
    for script in (make(flow, faults=faults), make(flow, late, faults=faults)):
        story = play(script)
        assert not story.rules
        (source, target), *_ = story.ends
        assert (source, target) in {(Outcome.FAILED, Outcome.FAILED), (Outcome.CANCELLED, Outcome.FAILED)}
        waits = LIMITS.retry * (1 + 2) if is_lossy else 0.0
        assert story.back("p0") < waits + NORMAL_S


@every_flow
def test_control_without_a_decline_notice_the_source_waits_for_its_lease(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "DeclineNotices", _NoNotices)
    story = play(make(flow, faults=[Fault(FaultKind.REFUSE, who="d0", at_event=1)]))
    assert story.back("p0") > HOLD_S - NORMAL_S or story.ends[0][0] is None


@every_flow
def test_cancelled_at_the_source(flow: Flow) -> None:
    """The target is told at once; one that the source has never heard of gives up by itself."""
    worst = _worst(flow, Fault(FaultKind.CANCEL_SOURCE))
    assert {source for source, _ in worst.ends} == {Outcome.CANCELLED, Outcome.DELIVERED}
    assert worst.back["p0"] < NORMAL_S
    assert worst.met["d0"] < NORMAL_S
    assert worst.back["d0"] < GIVE_UP_S + NORMAL_S


@every_flow
def test_source_restarted_on_the_same_address(flow: Flow) -> None:
    """The new incarnation answers the next question to the old one; the target then knows that the old one is gone."""
    restarted_s = 0.2
    worst = _worst(flow, Fault(FaultKind.RESTART, who="p0"))
    assert worst.met["d0"] < restarted_s + 2 * LIMITS.retry + HOP_S
    assert worst.back["d0"] < restarted_s + LIMITS.retry + GIVE_UP_S + NORMAL_S
    assert worst.counted["for an earlier incarnation"]


@every_flow
def test_target_restarted_on_the_same_address(flow: Flow) -> None:
    """To the source it is a death: the new incarnation has no part in what the old one had."""
    # At every event: a source whose writes fail sends nothing more, and where the target counts what is written, only one event
    # lies between the last acknowledged byte and the release.
    worst = _worst(flow, Fault(FaultKind.RESTART, who="d0"), step=1)
    assert worst.back["p0"] < HOLD_S + NORMAL_S
    assert worst.counted["for an earlier incarnation"]


@every_flow
@pytest.mark.parametrize("who", ["p0", "d0"])
def test_clock_jumps_ahead(flow: Flow, who: str) -> None:
    """A deadline may be reached at once, and then only that: the other side is notified, and no memory stays away.

    A source that expires in its queue knows no target yet: in push that target waits for `transfer_timeout`.
    """
    short = _worst(flow, Fault(FaultKind.CLOCK_JUMP, who=who, for_s=LIMITS.queue_timeout - 1))
    assert max(short.back.values()) < NORMAL_S
    long = _worst(flow, Fault(FaultKind.CLOCK_JUMP, who=who, for_s=1e6))
    assert max(long.met.values()) < NORMAL_S
    assert long.back["p0"] < NORMAL_S
    assert long.back["d0"] < NORMAL_S + (GIVE_UP_S if who == "p0" and flow.mode is Mode.PUSH else 0)


@every_flow
def test_source_engine_hangs(flow: Flow) -> None:
    """Its agents beat all the time, and vouch for nothing: the target gives up as if they were silent."""
    hangs = Fault(FaultKind.SILENT_ENGINE, who="p0", for_s=STOPPED_S)
    worst = _worst(flow, hangs)
    assert worst.met["p0"] < STOPPED_S + NORMAL_S, "its blocks are with the engine that hangs"
    assert worst.back["p0"] < STOPPED_S + HOLD_S + NORMAL_S
    if flow.mode is Mode.PULL:
        # Either nothing is left for its engine to do, or no target has the request: then it has waited for too long here.
        assert worst.ends == {BOTH_DELIVERED, (Outcome.EXPIRED, None)}
    else:
        assert worst.back["d0"] < GIVE_UP_S + BEAT_S + NORMAL_S
        assert first_broken(at_every_event(make(flow), hangs), PLANTS["target-trusts-agents"].bugs) == {"silent engine"}


@every_flow
def test_target_engine_hangs(flow: Flow) -> None:
    """Sources that wait until it has memory for them release theirs, as if it were silent."""
    hangs = Fault(FaultKind.SILENT_ENGINE, who="d0", for_s=STOPPED_S)
    worst = _worst(flow, hangs)
    assert worst.back["p0"] < HOLD_S + BEAT_S + NORMAL_S
    assert worst.met["d0"] < STOPPED_S + NORMAL_S
    assert worst.back["d0"] < STOPPED_S + GIVE_UP_S + NORMAL_S


@every_read
def test_target_engine_hangs_would_keep_source_blocks_if_its_agents_counted(flow: Flow) -> None:
    """Its memory is full when it hangs, so that a source is held for it."""
    first, second = request(flow), request(flow, at_s=0.01)
    script = make(flow, first, second, decode_blocks=3, decode_s=0.2)
    hangs = msgspec.structs.replace(script, faults=(Fault(FaultKind.SILENT_ENGINE, 0.1, who="d0", for_s=STOPPED_S),))
    story = play(hangs)
    assert not story.rules
    assert story.back("p0") < HOLD_S + BEAT_S + NORMAL_S
    assert play(hangs, PLANTS["source-trusts-agents"].bugs).rules == {"silent engine"}


@every_flow
def test_engine_is_stuck(flow: Flow) -> None:
    """It takes its steps and never gets to the request: the cap ends what it holds of its peers."""
    source = _worst(flow, Fault(FaultKind.STUCK_ENGINE, who="p0", for_s=STOPPED_S))
    assert source.back["d0"] < LIMITS.hold_cap + NORMAL_S
    target = _worst(flow, Fault(FaultKind.STUCK_ENGINE, who="d0", for_s=STOPPED_S))
    assert target.back["p0"] < LIMITS.queue_timeout + NORMAL_S


@every_flow
def test_bad_grant_numbers(flow: Flow) -> None:
    """The two sides agree on a number again after a round trip each."""
    worst = _worst(flow, Fault(FaultKind.BAD_GRANT, who="d0", number=3), step=1)
    assert worst.ends == {BOTH_DELIVERED}
    assert max(worst.back.values()) < 4 * LIMITS.retry + NORMAL_S


@every_flow
def test_frames_replayed(flow: Flow) -> None:
    """What was recorded starts nothing, ends nothing and frees nothing a second time."""
    links = (("p0", "d0"), ("d0", "p0"))
    replays = (Fault(FaultKind.REPLAY, who=who, other=other, for_s=1.0, number=30) for who, other in links)
    worst = _worst(flow, *replays)
    assert worst.ends == {BOTH_DELIVERED}
    assert max(worst.back.values()) < 2 * NORMAL_S


@every_flow
def test_preempted_at_the_source(flow: Flow) -> None:
    """What was announced is void, and computed and moved again."""
    worst = _worst(flow, Fault(FaultKind.PREEMPT, who="p0"), step=2)
    assert worst.ends == {BOTH_DELIVERED}
    assert worst.back["d0"] < 2 * NORMAL_S


@every_flow
def test_one_rank_fails(flow: Flow) -> None:
    """Both sides fail together as soon as the other ranks are quiet."""
    writer = "p0" if flow.source_writes else "d0"
    worst = _worst(flow, Fault(FaultKind.COPY_FAILS, who=writer, number=1))
    assert worst.ends == {BOTH_DELIVERED, (Outcome.FAILED, Outcome.FAILED)}
    assert max(worst.back.values()) < NORMAL_S


@every_flow
def test_a_transport_moves_less_than_it_reports(flow: Flow) -> None:
    """The count of bytes shows it, and nothing else does: both sides fail together, with both counts."""
    writer = "p0" if flow.source_writes else "d0"
    worst = _worst(flow, Fault(FaultKind.COPY_FAILS, who=writer, other="short", number=1))
    assert worst.ends == {BOTH_DELIVERED, (Outcome.FAILED, Outcome.FAILED)}
    assert max(worst.back.values()) < NORMAL_S


@every_read
def test_control_a_count_that_is_believed_lands_a_cache_with_a_hole(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = RankAgent._complete

    def as_posted(agent: RankAgent, copy: Any, moving: Any, completion: Any) -> None:
        complete(agent, copy, moving, msgspec.structs.replace(completion, moved_bytes=moving.planned))

    monkeypatch.setattr(RankAgent, "_complete", as_posted)
    short = Fault(FaultKind.COPY_FAILS, who="d0", other="short", number=1)
    assert "foreign byte" in first_broken(at_every_event(make(flow), short))


@every_write
def test_the_reply_to_the_last_byte_of_a_write_is_lost(flow: Flow) -> None:
    """Where the target counts bytes it has delivered, and the source alone has failed; else both fail."""
    worst = _worst(flow, Fault(FaultKind.COPY_FAILS, who="p0", other="last", number=1))
    failed = (Outcome.FAILED, Outcome.DELIVERED if flow.counts_arrivals else Outcome.FAILED)
    assert worst.ends == {BOTH_DELIVERED, failed}
    assert worst.back["d0"] < NORMAL_S + _fence_s(flow)
    assert worst.back["p0"] < NORMAL_S


@every_push
@pytest.mark.parametrize("late_s", [0.0, 0.05, 0.2])
def test_refused_at_the_source(flow: Flow, late_s: float) -> None:
    """Its engine refuses the request, before or after the grant has come: both sides end at once."""
    script = make(flow, request(flow, prefill_delay_s=late_s))
    refused = 0
    for story in map(play, at_every_event(script, Fault(FaultKind.REFUSE, who="p0", number=1))):
        assert not story.rules, story.result.violations
        assert story.ends[0] in (BOTH_DELIVERED, (Outcome.FAILED, Outcome.FAILED))
        refused += story.ends[0] != BOTH_DELIVERED
        assert max(story.back("p0"), story.back("d0")) < late_s + NORMAL_S
    assert refused


@every_flow
@pytest.mark.parametrize("who", ["p0", "d0"])
def test_one_rank_stands_still(flow: Flow, who: str) -> None:
    """It is waited for by the deadline of the state; its memory comes back when it goes on, and not before."""
    script = make(flow, rank_lag_s=0.005)
    short = Fault(FaultKind.PAUSE_RANK, who=who, number=1, for_s=0.5)
    long = Fault(FaultKind.PAUSE_RANK, who=who, number=1, for_s=LONG_S)
    for story in map(play, at_every_event(script, short, step=4)):
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]
        assert max(story.back("p0"), story.back("d0")) < 0.5 + NORMAL_S
    for story in map(play, at_every_event(script, long, step=4)):
        assert not story.rules
        assert max(story.back("p0"), story.back("d0")) < LONG_S + HOLD_S + NORMAL_S


@every_flow
@pytest.mark.parametrize("who", ["p0", "d0"])
def test_one_rank_dies(flow: Flow, who: str) -> None:
    """With orders and reports in flight; its instance ends when it notices that, and the other side's memory comes back."""
    other = "d0" if who == "p0" else "p0"
    dies = Fault(FaultKind.CRASH_RANK, who=who, number=1, for_s=LONG_S)
    stories = [play(script) for script in at_every_event(make(flow, rank_lag_s=0.005), dies, step=8)]
    assert not any(story.rules for story in stories)
    assert any(story.ends != [BOTH_DELIVERED] for story in stories), "some were struck in the middle"
    assert max(story.back(other) for story in stories) < max(GIVE_UP_S + _fence_s(flow), HOLD_S) + HOP_S + NORMAL_S


@every_push
def test_control_a_rank_that_died_unnoticed_is_found(flow: Flow) -> None:
    script = make(flow, rank_lag_s=0.005)
    scripts = at_every_event(script, Fault(FaultKind.CRASH_RANK, who="p0", number=1, for_s=LONG_S), step=8)
    assert first_broken(scripts, PLANTS["rank-loss-ignored"].bugs)


@every_flow
@pytest.mark.parametrize("who", ["p0", "d0"])
def test_stray_messages(flow: Flow, who: str) -> None:
    """Of other grants, generations and counts, too early, or of an instance that has nothing to do with it: nothing changes."""
    stray = Fault(FaultKind.STRAY, who=who, number=20)
    for story in map(play, at_every_event(make(flow, prefills=2, decodes=2), stray, step=8)):
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]


@every_flow
@pytest.mark.parametrize("who", ["p0", "d0"])
def test_agent_stands_still(flow: Flow, who: str) -> None:
    """Its engine and its ranks go on: what they report, and what peers send, is handled when the agent goes on."""
    script = make(flow, rank_lag_s=0.005, has_driver=True)
    short = Fault(FaultKind.STALL_AGENT, who=who, for_s=0.3)
    for story in _struck_in_time(script, short):
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]
        assert max(story.back("p0"), story.back("d0")) < 0.3 + 2 * NORMAL_S, "ranks and threads take longer"
    for story in _struck_in_time(script, Fault(FaultKind.STALL_AGENT, who=who, for_s=LONG_S)):
        assert not story.rules


def _struck_in_time(script: Script, fault: Fault) -> list[Story]:
    """Runs with the fault at every eighth event, without those when all is over: a thread has turns although it has no work."""
    stories = [play(each) for each in at_every_event(script, fault, step=8)]
    in_time = [story for story in stories if story.said("FAULT ") and story.fault_at < 1.0]
    assert len(in_time) > 3
    return in_time


@every_flow
def test_transport_queue_full(flow: Flow) -> None:
    """What is refused is posted again; only when nothing is taken for transfer_timeout, both sides fail."""
    writer = "p0" if flow.source_writes else "d0"
    short = _worst(flow, *(Fault(FaultKind.QUEUE_FULL, who=writer, number=rank, for_s=0.5) for rank in range(2)))
    assert short.ends == {BOTH_DELIVERED}
    assert max(short.back.values()) < 0.5 + 0.05 + NORMAL_S
    long = _worst(flow, *(Fault(FaultKind.QUEUE_FULL, who=writer, number=rank, for_s=LONG_S) for rank in range(2)))
    assert long.ends == {BOTH_DELIVERED, (Outcome.FAILED, Outcome.FAILED)}
    assert max(long.back.values()) < GIVE_UP_S + 0.05 + NORMAL_S


@every_flow
def test_data_path_stands_still(flow: Flow) -> None:
    """While messages pass and the engines work, bytes that stand still are waited for."""
    writer = "p0" if flow.source_writes else "d0"
    for for_s in (0.5, LONG_S):
        worst = _worst(flow, *(Fault(FaultKind.STALL, who=writer, number=rank, for_s=for_s) for rank in range(2)))
        assert worst.ends == {BOTH_DELIVERED}
        assert max(worst.back.values()) < for_s + NORMAL_S


@every_push
def test_source_gets_its_half_late(flow: Flow) -> None:
    """The grant waits for it; when the target has given up before, the prefill ends at once, and computes nothing."""
    late = play(make(flow, request(flow, prefill_delay_s=1.0)))
    assert not late.rules
    assert late.ends == [BOTH_DELIVERED]
    too_late = play(make(flow, request(flow, prefill_delay_s=GIVE_UP_S + 1.0)), prepare=disturbed)
    assert not too_late.rules
    assert too_late.ends == [(Outcome.CANCELLED, Outcome.EXPIRED)]
    assert "p0" not in too_late.back_at, "it never took a block"


@every_push
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_two_targets_of_one_request(flow: Flow, delay_s: float) -> None:
    """The source takes the first of them and refuses the other, which fails at once; neither gets bytes of the other."""
    story = play(make(flow, request(flow, second_decode=1, decode_delay_s=delay_s), decodes=2))
    assert not story.rules
    ends = [story.run.cluster.instances[address].engine.outcomes[1] for address in ("p0", "d0", "d1")]
    assert ends[0] is Outcome.DELIVERED
    assert sorted(ends[1:]) == [Outcome.DELIVERED, Outcome.FAILED]
    failed = story.times("TargetEnded(", "it belongs to another target")
    assert len(failed) == 1
    assert failed[0] < delay_s + NORMAL_S
    assert not story.out


@every_flow
def test_more_peers_and_hand_offs_than_are_remembered(flow: Flow) -> None:
    """What was forgotten is asked for again: every request is served."""
    requests = [request(flow, at_s=0.3 * number, prefill=number % 4, decode=number // 4) for number in range(16)]
    story = play(make(flow, *requests, prefills=4, decodes=4, most_peers=3, is_forgetful=True))
    assert not story.rules
    assert story.ends == [BOTH_DELIVERED] * 16
    assert max(instance.coordinator.peers for instance in story.run.all_instances) == 3


@every_write
def test_source_that_does_not_stop(flow: Flow) -> None:
    """Its session is torn down after stop_timeout, the memory registered anew after as much again; not a write lands late."""
    stalls = [Fault(FaultKind.STALL, who="p0", number=rank, for_s=6.0) for rank in range(2)]
    still = Fault(FaultKind.PAUSE, who="p0", for_s=LONG_S)
    assert _worst(flow, *stalls, still).met["d0"] < GIVE_UP_S + _fence_s(flow) + HOP_S
    lost = Fault(FaultKind.LOSE_REVOKE, who="d0")
    assert _worst(flow, *stalls, still, lost).met["d0"] < GIVE_UP_S + 2 * LIMITS.stop_timeout + HOP_S


def _full(flow: Flow, seed: int) -> Script:
    """Both pools hold one request and a bit, many come at once, and their targets come in another order."""
    requests = [request(flow, at_s=0.001 * number, decode_delay_s=0.2 * (number % 3)) for number in range(8)]
    return make(flow, *requests, seed=seed, prefill_blocks=7, decode_blocks=4, decode_s=0.2)


@every_flow
def test_both_allocators_full(flow: Flow) -> None:
    """Everybody waits, and everybody is served."""
    for seed in range(4):
        story = play(_full(flow, seed))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED] * 8


class _NoReserve(SourceEngine):
    """Lets prefills without a grant take the last blocks."""

    def may_start(self, request: Prefill) -> bool:
        return len(self.pool.free) >= request.prompt.tokens


@every_push
def test_both_allocators_full_would_deadlock_without_a_reserve(flow: Flow) -> None:
    """A prefill without a grant holds the last blocks, and its target waits behind one whose prefill waits for them."""
    crossed = request(flow, decode_delay_s=0.01), request(flow, at_s=0.002)
    script = make(flow, *crossed, prefill_blocks=3, decode_blocks=3)
    assert play(script).ends == [BOTH_DELIVERED, BOTH_DELIVERED]
    assert first_broken([script], Bugs(source_engine=_NoReserve)) == {"spurious failure"}, "only a deadline ends it"


def test_every_promise_names_tests_that_exist() -> None:
    """A row of docs/promises.md without a test, or with one that is gone, is an empty promise."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "promises.md").read_text()
    named = set(re.findall(r"`(tests/(?:sim|e2e|unit|rows)/[\w/]+\.py)::(\w+)(?:::(\w+))?`", text))
    assert len(named) > 20
    for path, *names in named:
        nodes = ast.walk(ast.parse((root / path).read_text()))
        found = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
        assert {name for name in names if name} <= found, path
    table = text.partition("## One row per fault")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert all("`tests/" in row for row in rows), rows
