"""Hand-offs that a stamp confirms: every fault at every event, what a source need not do any more, and known mistakes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from msgspec import structs
from scenario import BOTH_DELIVERED, FLOWS, HOP_S, Flow, Story, at_every_event, every_read, first_broken, make, play, request

from kvbaton.core.handoff import Integrity, Mode, Outcome
from kvbaton.sim.exhaustive import flow_script, single_faults
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.run import Run
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.sim.stamp_drills import STAMPS

LONG_S = 9.0
PULL = next(flow for flow in FLOWS if flow.mode is Mode.PULL)
STAMPED = [name for name in PLANTS if "stamp" in name]


def stamped(flow: Flow, **changes: object) -> Script:
    """A hand-off between two processes of one host, whose target looks at the stamp."""
    return structs.replace(make(flow), one_host=True, stamp_slots=4, **changes)


def count_stamped(run: Run) -> int:
    return sum(instance.coordinator.target.stamped_total for instance in run.all_instances)


@every_read
def test_nothing_is_asked_on_one_host(flow: Flow) -> None:
    story = play(stamped(flow))
    assert not story.rules
    assert story.ends == [BOTH_DELIVERED]
    assert count_stamped(story.run) == 1
    assert not story.said("ConfirmAsk")
    assert not story.said("Confirmed(")


@every_read
@pytest.mark.parametrize("integrity", [Integrity.SAMPLED, Integrity.FULL])
def test_checksums_go_with_the_stamp(flow: Flow, integrity: Integrity) -> None:
    story = play(stamped(flow, integrity=integrity))
    assert not story.rules
    assert story.ends == [BOTH_DELIVERED]
    assert count_stamped(story.run) == 1
    assert not story.said("ConfirmAsk")
    assert len(story.times("Prefilled(")) == 2
    assert len(story.times("Prefilled(", "stamp=None", "sums=()", "sums_follow=True")) == 1
    assert len(story.times("Prefilled(", "stamp=Stamp(", "SpanSum(", "sums_follow=False")) == 1


@every_read
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_changed_is_found_under_a_stamp(flow: Flow, ranks: int) -> None:
    corrupt = Fault(FaultKind.CORRUPT, 0.0, who="d0", number=0)
    story = play(stamped(flow, integrity=Integrity.FULL, ranks=ranks, faults=(corrupt,)))
    assert not story.rules
    assert story.ends[0][1] is Outcome.FAILED
    assert sum(instance.coordinator.target.mismatches_total for instance in story.run.all_instances) == 1
    assert not story.said("ConfirmAsk")


@every_read
@pytest.mark.parametrize("integrity", [Integrity.OFF, Integrity.FULL])
@pytest.mark.parametrize("changes", [{"one_host": False}, {"stamp_slots": 0}], ids=["two hosts", "no slots"])
def test_control_elsewhere_the_source_is_asked(flow: Flow, changes: dict[str, object], integrity: Integrity) -> None:
    story = play(structs.replace(stamped(flow, integrity=integrity), **changes))
    assert not story.rules
    assert story.ends == [BOTH_DELIVERED]
    assert count_stamped(story.run) == 0
    assert story.said("Confirmed(")
    assert story.said("Confirmed(", "SpanSum(") is (integrity is Integrity.FULL)
    assert not story.said("Prefilled(", "SpanSum(")


@every_read
def test_a_stamp_that_is_lost_with_its_checksums_is_asked_for(flow: Flow) -> None:
    script = stamped(flow, integrity=Integrity.FULL)
    second_at = play(script).times("Prefilled(", "sums_follow=False")[0]
    story = play(structs.replace(script, faults=(Fault(FaultKind.CUT, second_at - 5e-5, who="p0", other="d0", for_s=0.02),)))
    assert not story.rules
    assert story.ends == [BOTH_DELIVERED]
    assert count_stamped(story.run) == 1, "the probe afterwards"
    assert story.said("Confirmed(", "SpanSum(")


@every_read
@pytest.mark.parametrize("kind", [FaultKind.PAUSE, FaultKind.CUT, FaultKind.CRASH])
def test_a_source_that_falls_silent_behind_its_last_message_is_not_waited_for(flow: Flow, kind: FaultKind) -> None:
    """Its bytes are read without it; only a dead one's are not, and what of them was read by then counts."""
    script = stamped(flow)
    last_at = play(script).times("AuxSent")[0]
    silent = Fault(kind, last_at + 0.0015, who="p0", other="d0", for_s=LONG_S)
    story = play(structs.replace(script, faults=(silent,)))
    assert not story.rules
    if kind is FaultKind.CRASH:
        return
    assert story.ends[0][1] is Outcome.DELIVERED
    assert story.times("Landed")[0] < last_at + 10 * HOP_S
    asked = play(structs.replace(script, faults=(silent,), stamp_slots=0))
    assert not asked.rules
    assert asked.ends[0][1] is not Outcome.DELIVERED, "without a stamp it has to answer, and does not in time"


def test_a_source_that_has_ended_is_not_believed() -> None:
    """Its blocks may be another request's by now: the target finds no stamp, asks, and gets the reason."""
    rng, ended = random.Random(1), 0
    for _ in range(40):
        story = play(structs.replace(STAMPS[0](rng), seed=rng.randrange(1000)))
        assert not story.rules
        ended += story.ends[0] == (Outcome.CANCELLED, Outcome.FAILED)
    assert ended > 10


def _stories(name: str) -> Iterator[Script]:
    """What shows a mistake about stamps: each drill a few times, and a hand-off with sums over a transport that corrupts."""
    rng = random.Random(name)
    for number in range(200):
        yield structs.replace(STAMPS[number % len(STAMPS)](rng), seed=number)
    corrupt = Fault(FaultKind.CORRUPT, 0.0, who="d0", number=0)
    yield stamped(PULL, integrity=Integrity.FULL, faults=(corrupt,))
    yield stamped(PULL, integrity=Integrity.FULL)


@pytest.mark.parametrize("name", STAMPED)
def test_control_each_known_mistake_is_found(name: str) -> None:
    assert first_broken(_stories(name), PLANTS[name].bugs)


def test_control_without_a_mistake_nothing_is() -> None:
    assert not first_broken(_stories("none"))


@pytest.mark.sim
@pytest.mark.sampled(1)
@pytest.mark.timeout(600)
@every_read
@pytest.mark.parametrize("integrity", [Integrity.OFF, Integrity.FULL])
def test_every_single_fault_while_a_stamp_may_stand(flow: Flow, integrity: Integrity) -> None:
    script = structs.replace(
        stamped(flow, integrity=integrity), requests=(request(flow), request(flow, at_s=0.01, tokens=2)), ranks=1
    )
    events = play(script).result.events
    for event in range(1, events + 1, 5):
        for fault in single_faults(script, event):
            story: Story = play(structs.replace(script, faults=(fault,)))
            assert not story.rules, (fault, story.result.violations)


@pytest.mark.parametrize(
    "name", ["push, impossible, target first, 1 rank, stamps", "pull, impossible, target first, 1 rank, stamps"]
)
def test_flows_of_the_exhaustive_runs_are_stamped(name: str) -> None:
    story = play(flow_script(name))
    assert not story.rules
    assert count_stamped(story.run) == 2
    release = Fault(FaultKind.LOSE, who="d0", other="p0", number=1)
    for script in at_every_event(flow_script(name), release, step=3):
        assert not play(script).rules
