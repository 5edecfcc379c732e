"""Drills about messages and calls that cross each other."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.transport.base import LateWrites

__all__ = ["TIMELY"]


def _retracted_and_granted(rng: random.Random) -> Script:
    """A prefill is preempted at about the moment at which its grant comes."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode_delay_s=rng.choice((0.05, 0.1)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    preempted = Fault(FaultKind.PREEMPT, request.decode_delay_s + rng.uniform(-0.01, 0.03), who="p0")
    return structs.replace(script, faults=(preempted,), step_s=0.02, move_s=0.01)


def _replayed_at_the_edge(rng: random.Random) -> Script:
    """More hand-offs than a source remembers numbers of, one after the other; then all that was sent arrives again."""
    count = rng.randint(10, 14)
    requests = tuple(make_request(rng, Mode.PUSH, tokens=1, chunk=1, at_s=0.05 * number) for number in range(count))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    replayed = Fault(FaultKind.REPLAY, 0.05 * count, who="d0", other="p0", for_s=0.2)
    return structs.replace(
        script, requests=requests, faults=(replayed,), move_s=0.002, step_s=0.002, one_host=False, is_forgetful=True
    )


def _afraid_of_late_bytes(rng: random.Random) -> Script:
    """A source of another release ends, or is stopped, and states each time that bytes of it may still land."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=rng.randint(1, 3), retries=1, retry_after_s=0.3)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET, FaultKind.CANCEL_TARGET))
    faults = (
        Fault(FaultKind.STRAY, 0.0, who="p0", other="release"),
        Fault(kind, rng.uniform(0.01, 0.2), number=0),
    )
    return structs.replace(script, faults=faults, router_cancels=0.0)


def _refused_after_the_grant(rng: random.Random) -> Script:
    """A source's engine refuses a request whose grant came before it."""
    request = make_request(rng, Mode.PUSH, prefill_delay_s=rng.uniform(0.05, 0.3), retries=1, retry_after_s=0.2)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    return structs.replace(script, faults=(Fault(FaultKind.REFUSE, 0.0, who="p0", number=1),), router_cancels=0.0)


def _counted(script: Script) -> Script:
    """The same, over a transport that can fence a writer, and counts what it writes."""
    return structs.replace(script, late_writes=LateWrites.REVOCABLE, unfenced_writes=False)


def _last_reply_is_lost(rng: random.Random) -> Script:
    """A write fails at its source when its last byte is in; where the target counts bytes, it has delivered by then."""
    request = make_request(rng, Mode.PUSH, chunk=rng.choice((1, 6)), retries=1, retry_after_s=0.2)
    script = _counted(make_stage(rng, writes=True, request=request))
    last = [Fault(FaultKind.COPY_FAILS, 0.0, who="p0", other="last", number=rank) for rank in range(script.ranks)]
    faults = (*last[: rng.randint(1, 2)], *last[: rng.randint(0, 2)])
    return structs.replace(script, faults=faults, move_s=rng.choice((0.01, 0.05)))


def _gone_after_delivery(rng: random.Random) -> Script:
    """A target has counted what a source writes, has released it, and is gone before the source has the last reply."""
    request = make_request(rng, Mode.PUSH, tokens=3, chunk=3)
    script = _counted(make_stage(rng, writes=True, request=request))
    kind = rng.choice((FaultKind.CUT, FaultKind.PAUSE, FaultKind.CRASH))
    faults = (
        Fault(FaultKind.STALL, rng.uniform(0.05, 0.15), who="p0", for_s=20.0, number=0),
        Fault(kind, rng.uniform(0.3, 0.6), who="d0", other="p0", for_s=rng.choice((5.0, 20.0))),
    )
    return structs.replace(script, faults=faults, move_s=0.05, ranks=1, layers=1)


TIMELY: tuple[Drill, ...] = (
    _retracted_and_granted,
    _replayed_at_the_edge,
    _afraid_of_late_bytes,
    _refused_after_the_grant,
    _last_reply_is_lost,
    _gone_after_delivery,
)
