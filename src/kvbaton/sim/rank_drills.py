"""Drills about what ranks meet rarely."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.script import Fault, FaultKind, Script

__all__ = ["RANKS"]


def _stopped_while_full(rng: random.Random) -> Script:
    """A hand-off is cancelled while batches of it wait for a transport that takes nothing."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=rng.choice((1, 2, 6)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    at_s = rng.uniform(0.0, 0.05)
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET, FaultKind.PREEMPT))
    faults = (
        Fault(FaultKind.QUEUE_FULL, at_s, who=rng.choice(("p0", "d0")), for_s=rng.choice((0.1, 0.4)), number=0),
        Fault(kind, at_s + rng.uniform(0.0, 0.2), who="p0", number=0),
    )
    return structs.replace(script, faults=faults, rank_lag_s=rng.choice((0.0, 0.01, 0.05)))


RANKS: tuple[Drill, ...] = (_stopped_while_full,)
