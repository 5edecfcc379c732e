"""The policy `recompute`: an engine that computes a failed hand-off anew, in the blocks that were returned to it."""

from __future__ import annotations

import dataclasses

import pytest
from scenario import Flow, at_every_event, every_flow, every_write, make, play

from kvbaton.agent.engine_port import TargetEnded
from kvbaton.core.handoff import Outcome
from kvbaton.sim.engine import Fetch, TargetEngine
from kvbaton.sim.instance import Bugs
from kvbaton.sim.memory import TaggedCell
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.script import Fault, FaultKind, Script


class Recomputing(TargetEngine):
    """Keeps the blocks of a hand-off that failed, computes the prompt in them, and checks every cell when it has decoded."""

    recomputed = 0

    def _on_ended(self, event: TargetEnded) -> None:
        request = self.requests.get(event.key)
        if request is None or not request.blocks or event.outcome is Outcome.CANCELLED:
            super()._on_ended(event)
            return
        self._record(request.prompt, event.outcome)
        request.is_landed = True
        self._allocations += 1
        for offset, block in enumerate(request.blocks):
            self.pool.holder[block] = self._allocations
            for rank, memory in enumerate(self.memories):
                for layer in range(self.layers):
                    token = len(request.cached) + offset
                    memory.put(block, layer, TaggedCell(request.prompt.content(token), token, layer, rank, -1))
        self.world.after(5.0, self.process, lambda: self._decoded_anew(request))

    def _decoded_anew(self, request: Fetch) -> None:
        Recomputing.recomputed += 1
        for offset, block in enumerate(request.blocks):
            self._check_block(request.prompt, len(request.cached) + offset, block, None, "foreign byte")
        self._decoded(request)


RECOMPUTING = Bugs(target_engine=Recomputing)


@every_flow
@pytest.mark.parametrize(
    "fault",
    [Fault(FaultKind.CANCEL_SOURCE), Fault(FaultKind.CRASH, who="p0", for_s=20.0), Fault(FaultKind.COPY_FAILS, who="p0")],
    ids=lambda fault: str(fault.kind),
)
def test_a_failed_handoff_can_be_computed_anew(flow: Flow, fault: Fault) -> None:
    Recomputing.recomputed = 0
    for script in at_every_event(make(flow), fault, step=2):
        story = play(script, RECOMPUTING)
        assert not story.rules
        assert not story.out
    is_idle_fault = fault.kind is FaultKind.COPY_FAILS and not flow.source_writes
    assert is_idle_fault or Recomputing.recomputed > 0


def _deaf_and_stalled(flow: Flow) -> Script:
    """The target hears nothing and gives up, while copies of the source are still to come."""
    faults = (
        Fault(FaultKind.CUT, at_s=0.006, who="p0", other="d0", for_s=9.0),
        Fault(FaultKind.STALL, at_s=0.006, who="p0", for_s=3.5),
    )
    return make(flow, faults=faults)


@every_write
def test_what_is_computed_anew_stays_untouched(flow: Flow) -> None:
    Recomputing.recomputed = 0
    assert not play(_deaf_and_stalled(flow), RECOMPUTING).rules
    assert Recomputing.recomputed == 1
    hasty = dataclasses.replace(PLANTS["freed-before-acknowledgement"].bugs, target_engine=Recomputing)
    assert play(_deaf_and_stalled(flow), hasty).rules & {"epoch", "foreign byte"}
