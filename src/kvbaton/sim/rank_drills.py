"""Drills about what ranks meet rarely."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import Integrity, Mode
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


def _full_for_long(rng: random.Random) -> Script:
    """A transport is full for longer than a hand-off may stand still, and takes a batch now and then."""
    request = make_request(rng, Mode.PUSH, tokens=8, chunk=1)
    writes = rng.random() < 0.5
    script, who = make_stage(rng, writes=writes, request=request), "p0" if writes else "d0"
    full = [Fault(FaultKind.QUEUE_FULL, 0.005, who=who, for_s=10.0, number=rank, is_whole=True) for rank in range(script.ranks)]
    return structs.replace(script, faults=tuple(full), move_s=0.01, step_s=0.002)


def _moves_less(rng: random.Random) -> Script:
    """A transport completes a batch of which a part is missing, and its count of bytes is all that shows it."""
    request = make_request(rng, rng.choice(list(Mode)), tokens=6, chunk=rng.choice((3, 6)), retries=1, retry_after_s=0.1)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    short = [Fault(FaultKind.COPY_FAILS, 0.0, who=who, other="short", number=0) for who in ("p0", "d0")]
    integrity = rng.choice((Integrity.OFF, Integrity.OFF, Integrity.FULL))
    return structs.replace(script, faults=tuple(short), integrity=integrity)


def _changed_on_the_way(rng: random.Random) -> Script:
    """A byte changes in transit, read or written, and everything is summed: the hand-off fails, and the next one does not."""
    request = make_request(rng, rng.choice(list(Mode)), retries=1, retry_after_s=0.1)
    writes = rng.random() < 0.6
    script, who = make_stage(rng, writes=writes, request=request), "p0" if writes and request.mode is Mode.PUSH else "d0"
    changed = Fault(FaultKind.CORRUPT, rng.uniform(0.0, 0.05), who=who, number=rng.randint(0, 1))
    return structs.replace(script, faults=(changed,), integrity=Integrity.FULL)


RANKS: tuple[Drill, ...] = (_stopped_while_full, _full_for_long, _moves_less, _changed_on_the_way)
