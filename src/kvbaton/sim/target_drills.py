"""Drills about what a target meets rarely."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import AuxChannel, Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.engine_script import make_engine_script
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.transport.base import LateWrites

__all__ = ["TARGETS"]


def _cancelled_while_aux_is_read(rng: random.Random) -> Script:
    """A hand-off is cancelled while its aux record is being read, and the source is not notified for a while."""
    request = make_request(rng, Mode.PUSH, tokens=2, chunk=2)
    script = structs.replace(make_stage(rng, writes=True, request=request), step_s=0.005, move_s=rng.choice((0.05, 0.1)))
    at_s = rng.uniform(0.02, script.move_s)
    faults = (
        Fault(FaultKind.CUT, at_s, who="d0", other="p0", for_s=0.3),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
    )
    return structs.replace(script, faults=faults, aux_channel=AuxChannel.DATA, router_cancels=0.0)


def _asked_for_its_card(rng: random.Random) -> Script:
    """A target to which everything is announced, and which has yet to read it, is asked for its card by the source."""
    script = make_engine_script(rng.randrange(1 << 30))
    while script.requests[0].mode is not Mode.PUSH or script.faults:
        script = make_engine_script(rng.randrange(1 << 30))
    first = structs.replace(script.requests[0], prefill=0, decode=0, is_turned=False, at_s=0.0, retries=0)
    again = structs.replace(first, is_turned=True, at_s=rng.uniform(0.05, 0.5))
    caches = tuple(structs.replace(each, blocks=60) for each in script.caches)
    return structs.replace(
        script,
        requests=(first, again),
        loads=(),
        caches=caches,
        late_writes=LateWrites.IMPOSSIBLE,
        unfenced_writes=False,
        move_s=rng.choice((0.02, 0.05)),
    )


def _preempted_before_the_grant(rng: random.Random) -> Script:
    """A prefill is preempted when much of it is computed and nothing is granted: what its target gets then is the new one."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode_delay_s=0.4)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.03, 0.2), who="p0")
    return structs.replace(script, faults=(preempted,), step_s=0.02, move_s=0.005)


TARGETS: tuple[Drill, ...] = (_cancelled_while_aux_is_read, _asked_for_its_card, _preempted_before_the_grant)
