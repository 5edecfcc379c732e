"""Drills about stamps: what ends, dies or is used again while a target reads under one, and releases that get lost."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import Integrity, Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage, moving_between
from kvbaton.sim.script import Fault, FaultKind, RequestScript, Script
from kvbaton.transport.base import LateWrites

__all__ = ["STAMPS"]


def _stage(rng: random.Random, request: RequestScript, slots: int) -> Script:
    """One host, and a target that reads: then it looks at stamps."""
    script = make_stage(rng, writes=False, request=request)
    return structs.replace(script, one_host=True, stamp_slots=slots, late_writes=LateWrites.IMPOSSIBLE)


def _cancelled_under_its_stamp(rng: random.Random) -> Script:
    """A source is cancelled while its complete cache is read; the next request gets the blocks at once."""
    request = make_request(rng, rng.choice(list(Mode)), tokens=6)
    script = _stage(rng, request, rng.choice((1, 64)))
    start_s, end_s = moving_between(script)
    at_s = rng.uniform(start_s, end_s)
    following = tuple(make_request(rng, request.mode, tokens=6, at_s=at_s + 0.001 * number) for number in (1, 2))
    cut = Fault(FaultKind.CUT, at_s - 0.0005, who="p0", other="d0", for_s=rng.choice((0.2, 1.0)))
    faults = (Fault(FaultKind.CANCEL_SOURCE, at_s, number=0), cut)[: rng.randint(1, 2)]
    return structs.replace(script, requests=(request, *following), faults=faults, prefill_blocks=13, router_cancels=0.0)


def _slot_used_again(rng: random.Random) -> Script:
    """A source is cancelled, and its message about that held up; another hand-off, to another target, gets its only slot."""
    request = make_request(rng, Mode.PULL, tokens=6, chunk=6)
    script = _stage(rng, request, 1)
    start_s, end_s = moving_between(script)
    at_s = rng.uniform(start_s, (start_s + end_s) / 2)
    other = make_request(rng, Mode.PULL, tokens=2, chunk=2, decode=1, at_s=at_s + 0.001, decode_delay_s=0.0)
    faults = (
        Fault(FaultKind.CUT, at_s - 0.0005, who="p0", other="d0", for_s=1.0),
        Fault(FaultKind.CANCEL_SOURCE, at_s, number=0),
        # What the other target reads takes so long that its stamp stands when the first one looks.
        Fault(FaultKind.STALL, at_s, who="d1", for_s=1.0),
    )
    return structs.replace(script, requests=(request, other), faults=faults, decodes=2, router_cancels=0.0)


def _release_of_a_stamp_lost(rng: random.Random) -> Script:
    """The release of what was delivered by its stamp is lost, and sent again with it."""
    request = make_request(rng, rng.choice(list(Mode)))
    script = _stage(rng, request, rng.choice((1, 64)))
    _, end_s = moving_between(script)
    lost = Fault(FaultKind.CUT, end_s - rng.uniform(0.0, 0.02), who="d0", other="p0", for_s=rng.choice((0.3, 1.5)))
    return structs.replace(script, faults=(lost,))


def _stamp_lost_with_its_sums(rng: random.Random) -> Script:
    """Ranks are slow to sum, and what was promised with the last checksum is lost."""
    request = make_request(rng, rng.choice(list(Mode)))
    script = _stage(rng, request, rng.choice((1, 64)))
    lag_s, prefill_s = rng.choice((0.02, 0.05)), -(-request.tokens // request.chunk) * script.layers * script.step_s
    at_s = prefill_s + rng.uniform(0.0, 2 * lag_s)
    return structs.replace(
        script,
        integrity=rng.choice((Integrity.SAMPLED, Integrity.FULL)),
        ranks=2,
        rank_lag_s=lag_s,
        move_s=rng.choice((0.0005, 0.02)),
        faults=(Fault(FaultKind.LOSE, at_s, who="p0", other="d0", number=rng.choice((1, 2))),),
    )


def _dead_under_its_stamp(rng: random.Random) -> Script:
    """The process of a source dies, or stands still, while its stamp stands and the last bytes are read."""
    request = make_request(rng, rng.choice(list(Mode)), retries=1, retry_after_s=0.3)
    script = _stage(rng, request, rng.choice((1, 64)))
    _, end_s = moving_between(script)
    kind = rng.choice((FaultKind.CRASH, FaultKind.RESTART, FaultKind.PAUSE, FaultKind.STALL_AGENT))
    struck = Fault(kind, end_s + rng.uniform(-0.05, 0.005), who="p0", for_s=rng.choice((0.3, 1.0)))
    return structs.replace(script, faults=(struck,))


def _more_than_slots(rng: random.Random) -> Script:
    """More caches are complete at a time than a source has slots: the others are asked about."""
    requests = tuple(make_request(rng, Mode.PULL, tokens=2, chunk=2, at_s=0.001 * number) for number in range(5))
    script = _stage(rng, requests[0], 2)
    stray = Fault(FaultKind.STRAY, 0.0, who="p0", number=4)
    return structs.replace(script, requests=requests, faults=(stray,) if rng.random() < 0.5 else ())


STAMPS: tuple[Drill, ...] = (
    _cancelled_under_its_stamp,
    _slot_used_again,
    _release_of_a_stamp_lost,
    _stamp_lost_with_its_sums,
    _dead_under_its_stamp,
    _more_than_slots,
)
