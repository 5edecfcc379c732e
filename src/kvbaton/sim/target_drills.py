"""Drills about what a target meets rarely."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.sim.contradictions import IGNORED, OUT_OF_TURN, Contradiction
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


def _source_answers_out_of_turn(rng: random.Random) -> Script:
    """A source confirms before it is asked, or reports that it has stopped, and goes on; it sends an aux message without a
    record, or ends what it has accepted as if it had never got the grant.
    """
    kind = rng.choice(OUT_OF_TURN)
    # What a source that writes confirms counts without a question.
    modes = (Mode.PULL,) if kind is Contradiction.CONFIRMED_EARLY else (Mode.PUSH, Mode.PUSH, Mode.PULL)
    request = make_request(rng, rng.choice(modes), chunk=1, tokens=rng.randint(2, 4))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    wrong = Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=int(kind), is_whole=kind not in IGNORED)
    return structs.replace(
        script,
        faults=(wrong,),
        integrity=rng.choice((Integrity.OFF, Integrity.FULL)),
        aux_channel=AuxChannel.DATA if kind is Contradiction.NO_AUX else rng.choice(list(AuxChannel)),
        move_s=0.02,
    )


def _bytes_may_land(rng: random.Random) -> Script:
    """A source ends while it is read, or while it writes, and states that bytes may still be on their way."""
    request = make_request(rng, Mode.PUSH, chunk=1)
    script = make_stage(rng, writes=rng.random() < 0.4, request=request)
    faults = (
        Fault(FaultKind.STRAY, 0.0, who="p0", other="release"),
        Fault(FaultKind.CANCEL_SOURCE, rng.uniform(0.03, 0.1), number=0),
    )
    return structs.replace(script, faults=faults, step_s=0.005, move_s=0.05, router_cancels=0.0)


def _far_ahead(rng: random.Random) -> Script:
    """A source once names the last number but one as used: it does not name what it refuses, and the next is far ahead."""
    requests = tuple(make_request(rng, Mode.PUSH, chunk=1, tokens=2, at_s=0.3 * number) for number in range(2))
    script = make_stage(rng, writes=True, request=requests[0])
    kind = Contradiction.REFUSED_UP_TO_THE_LAST
    faults = (
        Fault(FaultKind.STRAY, 0.0, who="p0", other="release"),
        Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=int(kind), is_whole=True),
        Fault(FaultKind.STRAY, 0.29, who="p0", other="contradiction", number=int(Contradiction.ELSEWHERE), is_whole=True),
    )
    return structs.replace(script, requests=requests, faults=faults, move_s=0.005, step_s=0.005, router_cancels=0.0)


def _ranks_report_again(rng: random.Random) -> Script:
    """While spans are moved or written, and summed, ranks report what they have reported, or what is not asked for."""
    requests = tuple(make_request(rng, rng.choice(list(Mode)), chunk=1, at_s=0.01 * number) for number in range(2))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    faults = tuple(
        Fault(FaultKind.STRAY, rng.uniform(0.02, 0.2), who="d0", other="engine", number=rng.choice((3, 5))) for _ in range(16)
    )
    integrity = rng.choice((Integrity.OFF, Integrity.FULL))
    return structs.replace(script, requests=requests, faults=faults, step_s=0.01, move_s=0.02, integrity=integrity)


def _retracted_before_it_is_summed(rng: random.Random) -> Script:
    """A prefill is preempted when a part of it is in at its target, which sums everything at the end."""
    request = make_request(rng, Mode.PUSH, chunk=1)
    script = make_stage(rng, writes=False, request=request)
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.05, 0.09), who="p0")
    # The target is the third instance: of those, targets sum what is worth it, and sources everything at once.
    return structs.replace(script, faults=(preempted,), prefills=2, integrity=Integrity.FULL, step_s=0.02, move_s=0.005)


TARGETS: tuple[Drill, ...] = (
    _cancelled_while_aux_is_read,
    _asked_for_its_card,
    _preempted_before_the_grant,
    _source_answers_out_of_turn,
    _source_answers_out_of_turn,
    _source_answers_out_of_turn,
    _bytes_may_land,
    _far_ahead,
    _ranks_report_again,
    _retracted_before_it_is_summed,
)
