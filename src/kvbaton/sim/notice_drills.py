"""Drills about what a target declines, and what it takes after all."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.script import Fault, FaultKind, Script

__all__ = ["NOTICES"]


def _declined_and_asked_again(rng: random.Random) -> Script:
    """A target declines a hand-off, its notice is on its way for a while, and then it takes the same one after all."""
    request = make_request(rng, Mode.PUSH, retries=2, reuse_id=True, retry_after_s=rng.choice((0.01, 0.05, 0.2)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    faults = (
        Fault(FaultKind.REFUSE, 0.0, who="d0", number=1),
        Fault(FaultKind.SLOW, 0.0, who="d0", other="p0", for_s=rng.choice((0.05, 0.15, 0.3)), number=rng.randint(1, 3)),
    )
    return structs.replace(script, faults=faults, router_cancels=0.0)


NOTICES: tuple[Drill, ...] = (_declined_and_asked_again,)
