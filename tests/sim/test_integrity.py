"""Checksums, and aux records by data, under simulation: nothing that changed on its way is served, and nothing else fails."""

from __future__ import annotations

import pytest
from scenario import BOTH_DELIVERED, Flow, at_every_event, every_flow, first_broken, make, play

from kvbaton.core.handoff import AuxChannel, Integrity, Outcome
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.script import Fault, FaultKind

BOTH_FAILED = (Outcome.FAILED, Outcome.FAILED)


def _corrupting(flow: Flow) -> Fault:
    return Fault(FaultKind.CORRUPT, who="p0" if flow.source_writes else "d0", number=1)


@every_flow
def test_a_corrupt_byte_fails_the_request_and_is_never_served(flow: Flow) -> None:
    """The fault strikes at every stage: whatever is still to be moved then arrives wrong, once."""
    ends = set()
    for script in at_every_event(make(flow, integrity=Integrity.FULL), _corrupting(flow), step=2):
        story = play(script)
        assert not story.rules, story.result.violations
        assert (story.ends[0] == BOTH_FAILED) == story.said("checksum of span"), story.ends
        ends.add(story.ends[0])
    assert ends == {BOTH_DELIVERED, BOTH_FAILED}


@every_flow
def test_control_a_corrupt_byte_is_served_when_the_sums_are_not_compared(flow: Flow) -> None:
    scripts = at_every_event(make(flow, integrity=Integrity.FULL), _corrupting(flow), step=2)
    assert first_broken(scripts, PLANTS["sums-not-compared"].bugs) == {"corrupt byte"}


@every_flow
@pytest.mark.parametrize("integrity", list(Integrity), ids=str)
def test_without_a_fault_checksums_change_nothing(flow: Flow, integrity: Integrity) -> None:
    story = play(make(flow, integrity=integrity))
    assert not story.rules
    assert story.ends == [BOTH_DELIVERED]
    assert story.said("sums=(SpanSum(") is (integrity is not Integrity.OFF)


@every_flow
def test_preempted_while_being_summed(flow: Flow) -> None:
    """Sums of a generation that is void are void with it."""
    for script in at_every_event(make(flow, integrity=Integrity.FULL), Fault(FaultKind.PREEMPT, who="p0"), step=2):
        story = play(script)
        assert not story.rules, story.result.violations
        assert story.ends == [BOTH_DELIVERED]


@every_flow
def test_aux_by_data_arrives_or_comes_by_message(flow: Flow) -> None:
    """A record that is corrupt, or whose read fails, costs a message and nothing else."""
    quiet = make(flow, aux_channel=AuxChannel.DATA)
    story = play(quiet)
    assert story.ends == [BOTH_DELIVERED]
    assert story.said("pointer=AuxPointer(")
    assert not story.said("aux=Aux(", "AuxSent")
    fell_back = 0
    for script in at_every_event(quiet, Fault(FaultKind.CORRUPT, who="d0", number=0), step=2):
        story = play(script)
        assert not story.rules, story.result.violations
        assert story.ends == [BOTH_DELIVERED]
        fell_back += story.said("AuxSent", "aux=Aux(")
    assert fell_back
