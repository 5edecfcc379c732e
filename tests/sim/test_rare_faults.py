"""Rare faults: a second process at an address, ranks without their leader, corrupt frames, lost hosts, early bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scenario import (
    BOTH_DELIVERED,
    FLOWS,
    HOP_S,
    Flow,
    Story,
    at_every_event,
    disturbed,
    every_flow,
    first_broken,
    make,
    play,
    request,
)

from kvbaton.core.auth import Session
from kvbaton.core.handoff import AuxChannel, Integrity, Mode, Outcome
from kvbaton.sim.contradictions import UNASKED, Contradiction
from kvbaton.sim.engine import SourceEngine
from kvbaton.sim.exhaustive import flow_script
from kvbaton.sim.instance import Bugs
from kvbaton.sim.memory import RankMemory, TaggedCell
from kvbaton.sim.rank_processes import RankProcess
from kvbaton.sim.run import LIMITS, Run
from kvbaton.sim.script import Fault, FaultKind, RequestScript, Script
from kvbaton.sim.world import World
from kvbaton.transport.base import LateWrites

NORMAL_S = 0.5
"""Longer than a hand-off of these runs takes when nothing is wrong."""
NEVER_S = 10_000.0
GIVE_UP_S, HOLD_S, BEAT_S = LIMITS.transfer_timeout, LIMITS.defer_timeout, LIMITS.beat_s
READS = Flow(Mode.PUSH, LateWrites.IMPOSSIBLE)

every_side = pytest.mark.parametrize("who", ["p0", "d0"])


def _fence_s(flow: Flow) -> float:
    return flow.fences * LIMITS.stop_timeout


every_safe_flow = pytest.mark.parametrize("flow", [flow for flow in FLOWS if not flow.unfenced_writes], ids=str)


@every_safe_flow
@every_side
def test_two_processes_at_one_address(who: str, flow: Flow) -> None:
    """The first goes on, sends and copies, and gets no answer any more: it ends everything by its own limits."""
    fault = Fault(FaultKind.TWIN, who=who, for_s=20.0)
    ends, longest_s = set(), 0.0
    for script in at_every_event(make(flow, move_s=0.02), fault, step=4):
        story, kept_until = _play_beside(script, who)
        assert not story.rules, (script.faults, story.result.violations)
        assert len(story.run.all_instances) == 3
        longest_s = max(longest_s, kept_until - story.fault_at)
        ends.add(story.ends[0])
        other = "d0" if who == "p0" else "p0"
        assert story.back(other) < max(HOLD_S, GIVE_UP_S + _fence_s(flow)) + NORMAL_S
    assert 0.0 < longest_s < max(HOLD_S, GIVE_UP_S + _fence_s(flow)) + NORMAL_S
    assert BOTH_DELIVERED in ends
    assert len(ends) > 1, "some were disturbed"


def test_with_unfenced_writes_a_process_that_lives_on_beside_another_writes_into_freed_blocks() -> None:
    """What `--unfenced-writes` does not promise: another process at its address is taken for the death of a writer."""
    script = flow_script("push, unfenced, writes, target during prefill, 2 ranks")
    assert first_broken(at_every_event(script, Fault(FaultKind.TWIN, who="p0", for_s=9.0), step=5)) == {"epoch"}


def _play_beside(script: Script, who: str) -> tuple[Story, float]:
    """Play it, and see until when the process that was first at an address has blocks."""
    kept_until = 0.0

    def prepare(run: Run) -> None:
        (first,) = (each for each in run.all_instances if each.address == who)

        def look() -> None:
            nonlocal kept_until
            if first.process.is_alive and first.engine.blocks_out():
                kept_until = run.world.now

        run.world.on_event.append(look)

    return play(script, prepare=prepare), kept_until


@every_flow
@pytest.mark.parametrize("one_host", [False, True], ids=["two hosts", "one host"])
@every_side
def test_a_rank_outlives_its_leader(who: str, one_host: bool, flow: Flow) -> None:
    """It goes on with what it was ordered to copy until it reads that its channel is closed, and then it is gone."""
    lag_s = 0.1
    outlived = 0
    for script in at_every_event(
        make(flow, rank_lag_s=lag_s, one_host=one_host, move_s=0.02),
        Fault(FaultKind.CRASH_LEADER, who=who, for_s=20.0),
        step=4,
    ):
        story = play(script)
        assert not story.rules, (script.faults, story.result.violations)
        first = next(each for each in story.run.all_instances if each.address == who)
        assert not any(each.is_alive for each in first.rank_processes)
        ended_s = [each.died_at - first.process.died_at for each in first.rank_processes]
        assert max(ended_s) <= lag_s + HOP_S
        outlived += max(ended_s) > 0.0
        survivor, limit_s = ("d0", GIVE_UP_S + _fence_s(flow)) if who == "p0" else ("p0", HOLD_S)
        assert story.back(survivor) < limit_s + NORMAL_S + 4 * lag_s
    assert outlived


def test_control_a_rank_that_does_not_notice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankProcess, "die", lambda _: None)
    with pytest.raises(AssertionError):
        test_a_rank_outlives_its_leader("p0", False, READS)


@every_flow
@every_side
def test_a_host_never_comes_back(who: str, flow: Flow) -> None:
    """Its peers end what they had with it by their limits, and serve others as before."""
    beside = request(flow, prefill=int(who == "p0"), decode=int(who == "d0"))
    later = [msgspec.structs.replace(beside, at_s=at_s) for at_s in (0.0, 1.0, HOLD_S + 1.0)]
    script = make(flow, request(flow), *later, prefills=1 + (who == "p0"), decodes=1 + (who == "d0"))
    survivor = "d0" if who == "p0" else "p0"
    for each in at_every_event(script, Fault(FaultKind.CRASH, who=who, for_s=NEVER_S), step=16):
        story = play(each)
        assert not story.rules, (each.faults, story.result.violations)
        assert story.ends[1:] == [BOTH_DELIVERED] * len(later)
        # The last request is served meanwhile, and its blocks count too.
        limit_s = max(GIVE_UP_S + _fence_s(flow) if who == "p0" else HOLD_S, later[-1].at_s)
        assert story.back(survivor) < limit_s + NORMAL_S


@every_flow
@pytest.mark.parametrize("ends", [("p0", "d0"), ("d0", "p0")], ids=["of the source", "of the target"])
def test_corrupt_control_frame(ends: tuple[str, str], flow: Flow) -> None:
    """A seal shows it: the connection ends, with all that was on its way, and messages are sent again over the next one."""
    who, other = ends
    ended = 0
    for script in at_every_event(make(flow), Fault(FaultKind.CORRUPT_FRAME, who=who, other=other, number=1), step=3):
        story = play(script)
        assert not story.rules, (script.faults, story.result.violations)
        assert story.ends[0] == BOTH_DELIVERED
        assert max(story.back("p0"), story.back("d0")) < LIMITS.retry + BEAT_S + NORMAL_S
        ended += story.said("END of the connection")
    assert ended


def test_control_corrupt_frames_that_open_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_opens", lambda *_: True)
    fault = Fault(FaultKind.CORRUPT_FRAME, who="p0", other="d0", number=1)
    scripts = at_every_event(make(READS), fault)
    assert first_broken(scripts)


class _LateMemory:
    """What the engine computes is in memory a while after it has announced it."""

    def __init__(self, world: World, memory: RankMemory, late_s: float) -> None:
        self._world, self._memory, self._late_s = world, memory, late_s

    def put(self, block: int, layer: int, cell: TaggedCell) -> None:
        self._world.after(self._late_s, None, lambda: self._memory.put(block, layer, cell))

    def fill(self, block: int, cell: TaggedCell) -> None:
        self._memory.fill(block, cell)


@pytest.mark.parametrize(
    ("integrity", "late_s", "served"),
    [(Integrity.OFF, 0.02, True), (Integrity.FULL, 0.003, False), (Integrity.FULL, 5.0, True)],
    ids=["unchecked", "visible between sum and read", "never visible in time"],
)
def test_bytes_announced_before_they_are_visible(integrity: Integrity, late_s: float, served: bool) -> None:
    """An error of the engine, which nothing between two processes can rule out: sums show it only where they differ."""

    class _AnnouncesEarly(SourceEngine):
        def start(self) -> None:
            super().start()
            late: Any = [_LateMemory(self.world, memory, late_s) for memory in self.memories]
            self.memories = late

    story = play(make(READS, integrity=integrity), Bugs(source_engine=_AnnouncesEarly), prepare=disturbed)
    assert ("foreign byte" in story.rules) is served
    if not served:
        assert story.said("checksum of span")


def _beside(flow: Flow) -> tuple[RequestScript, ...]:
    """One request of each of two sources, to one target."""
    return tuple(request(flow, prefill=number, chunk=1) for number in range(2))


# Those that have to change nothing have tests of their own. The last one is about refused numbers, and these runs have none.
CONTRADICTED = set(Contradiction) - {*UNASKED, Contradiction.ELSEWHERE, Contradiction.REFUSED_WITHIN_REACH}


@every_flow
@pytest.mark.parametrize("kind", sorted(CONTRADICTED), ids=str)
def test_a_source_contradicts_itself(kind: Contradiction, flow: Flow) -> None:
    """A target cannot know which of two statements is true: it delivers nothing, and what others hand over goes on."""
    if kind is Contradiction.CONFIRMED_AND_RETRACTED and flow.mode is Mode.PULL:
        pytest.skip("in pull it is delivered when it is confirmed, and the retraction comes too late to contradict that")
    wrong = Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=int(kind), is_whole=True)
    story = play(make(flow, *_beside(flow), faults=[wrong], prefills=2, integrity=Integrity.FULL))
    assert not story.rules, story.result.violations
    assert story.ends[1] == BOTH_DELIVERED
    assert Outcome.DELIVERED not in story.ends[0]
    assert story.said("d0", "TargetEnded", "transfer_id='t0.")
    assert story.back("d0") < LIMITS.queue_timeout + HOLD_S + _fence_s(flow) + NORMAL_S, "the cap, where it only waits"
    control = play(make(flow, *_beside(flow), prefills=2, integrity=Integrity.FULL))
    assert control.ends == [BOTH_DELIVERED, BOTH_DELIVERED]


@every_flow
@pytest.mark.parametrize("kind", UNASKED, ids=str)
def test_an_answer_that_was_not_asked_for_changes_nothing(kind: Contradiction, flow: Flow) -> None:
    """But for the confirmation of a source that writes, which confirms by itself: false sums in it fail the hand-off."""
    wrong = Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=int(kind), is_whole=True)
    story = play(make(flow, *_beside(flow), faults=[wrong], prefills=2, integrity=Integrity.FULL))
    assert not story.rules, story.result.violations
    is_answer = kind is Contradiction.CONFIRMED_EARLY and flow.source_writes
    assert story.ends == [(Outcome.FAILED, Outcome.FAILED) if is_answer else BOTH_DELIVERED, BOTH_DELIVERED]


@every_flow
def test_where_a_pointer_leads_elsewhere_the_aux_record_comes_in_a_message(flow: Flow) -> None:
    wrong = Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=int(Contradiction.ELSEWHERE), is_whole=True)
    story = play(make(flow, *_beside(flow), faults=[wrong], prefills=2, aux_channel=AuxChannel.DATA))
    assert not story.rules, story.result.violations
    assert story.ends == [BOTH_DELIVERED, BOTH_DELIVERED]
    assert story.times("p0", "AuxSent", "pointer=None"), "asked for again, and sent"


@every_flow
def test_what_answers_at_an_address_is_no_peer(flow: Flow) -> None:
    """A request for it fails at once and by name; what others hand over goes on."""
    foreign = Fault(FaultKind.STRAY, 0.0, who="p1", other="no peer", is_whole=True)
    story = play(make(flow, *_beside(flow), faults=[foreign], prefills=2))
    assert not story.rules, story.result.violations
    assert story.ends[0] == BOTH_DELIVERED
    assert story.ends[1][1] is Outcome.FAILED
    (ended,) = story.times("d0", "TargetEnded", "transfer_id='t1.")
    assert ended < NORMAL_S
