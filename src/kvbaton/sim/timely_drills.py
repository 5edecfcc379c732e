"""Drills about messages and calls that cross each other."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.script import Fault, FaultKind, Script

__all__ = ["TIMELY"]


def _retracted_and_granted(rng: random.Random) -> Script:
    """A prefill is preempted at about the moment at which its grant comes."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode_delay_s=rng.choice((0.05, 0.1)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    preempted = Fault(FaultKind.PREEMPT, request.decode_delay_s + rng.uniform(-0.01, 0.03), who="p0")
    return structs.replace(script, faults=(preempted,), step_s=0.02, move_s=0.01)


TIMELY: tuple[Drill, ...] = (_retracted_and_granted,)
