"""Drills about peers that contradict themselves, fall silent, or answer about what is over."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.sim.contradictions import TAKEN_BACK, Contradiction
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.script import Fault, FaultKind, Script

__all__ = ["PEERS"]


def _source_contradicts_itself(rng: random.Random) -> Script:
    """One of two sources is wrong about its spans, or takes a finished prefill back. What the other one hands over goes on."""
    requests = tuple(
        make_request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), chunk=1, prefill=number % 2, at_s=0.05 * number)
        for number in range(rng.randint(2, 4))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    kinds = [kind for kind in Contradiction if kind < min(TAKEN_BACK)]
    wrong = Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=int(rng.choice(kinds)), is_whole=True)
    return structs.replace(
        script,
        requests=requests,
        faults=(wrong,),
        prefills=2,
        integrity=rng.choice(list(Integrity)),
        move_s=rng.choice((0.002, 0.02)),
        rank_lag_s=rng.choice((0.0, 0.0, 0.01)),
    )


def _too_patient(rng: random.Random) -> Script:
    """One of two targets would wait for longer than sources keep anything: none of them takes it, and the other one goes on."""
    requests = tuple(
        make_request(rng, rng.choice((Mode.PUSH, Mode.PULL)), tokens=2, decode=number % 2, at_s=0.1 * number)
        for number in range(rng.randint(2, 4))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return structs.replace(script, requests=requests, decodes=2, strangers=("d0^",), move_s=0.01, router_cancels=0.0)


def _source_takes_back(rng: random.Random) -> Script:
    """One of two sources refuses what it has accepted, or confirms nothing, or is wrong about how the aux record travels. Of
    several hand-offs it takes each back in another way.
    """
    kinds = rng.sample(TAKEN_BACK, 3)
    requests = tuple(
        make_request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=rng.randint(2, 4), chunk=1, at_s=0.3 * number)
        for number in range(len(kinds))
    )
    beside = make_request(rng, rng.choice(list(Mode)), prefill=1, at_s=rng.uniform(0.0, 0.6))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    wrong = [
        Fault(FaultKind.STRAY, max(0.0, each.at_s - 0.01), who="p0", other="contradiction", number=int(kind), is_whole=True)
        for each, kind in zip(requests, kinds, strict=True)
    ]
    return structs.replace(
        script,
        requests=(*requests, beside),
        faults=tuple(wrong),
        prefills=2,
        integrity=rng.choice(list(Integrity)),
        aux_channel=rng.choice(list(AuxChannel)),
        move_s=rng.choice((0.002, 0.02)),
        rank_lag_s=rng.choice((0.0, 0.0, 0.01)),
    )


def _silent_while_queued(rng: random.Random) -> Script:
    """A target is full, and receives nothing from its source for longer than it would wait for one that has its grant."""
    requests = tuple(make_request(rng, rng.choice(list(Mode)), tokens=4, at_s=0.01 * number) for number in range(2))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    cut = Fault(FaultKind.CUT, rng.uniform(0.4, 1.0), who="p0", other="d0", for_s=3.0)
    return structs.replace(
        script, requests=requests, faults=(cut,), decode_blocks=4, decode_s=4.5, move_s=0.002, step_s=0.002, router_cancels=0.0
    )


def _dialled_for_nothing(rng: random.Random) -> Script:
    """A request names a process that has died, and is cancelled while its target asks at the address; others go on there."""
    named = make_request(rng, Mode.PULL, tokens=1, decode_delay_s=0.8)
    long = make_request(rng, Mode.PUSH, tokens=6, chunk=1, at_s=0.5)
    script = make_stage(rng, writes=rng.random() < 0.5, request=named)
    faults = (
        Fault(FaultKind.RESTART, 0.1, who="p0"),
        Fault(FaultKind.CUT, 0.75, who="p0", other="d0", for_s=rng.choice((0.6, 1.0))),
        Fault(FaultKind.CANCEL_TARGET, rng.uniform(0.83, 1.0), number=0),
    )
    return structs.replace(script, requests=(named, long), faults=faults, step_s=0.1, move_s=0.01, router_cancels=0.0)


def _stopped_then_refused(rng: random.Random) -> Script:
    """A target cancels a hand-off and refuses the next one of the same id. The answer about the first comes in between."""
    again = {"retries": 1, "retries_once": True, "reuse_id": True, "retry_after_s": rng.choice((0.005, 0.02, 0.05))}
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1, **again)
    script = make_stage(rng, writes=False, request=request)
    at_s = rng.uniform(0.05, 0.3)
    faults = (
        Fault(FaultKind.SLOW, at_s, who="p0", other="d0", for_s=0.02, number=1),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
        Fault(FaultKind.REFUSE, at_s + 2e-4, who="d0", number=1),
        Fault(FaultKind.CUT, at_s + 0.004, who="d0", other="p0", for_s=0.7),
    )
    return structs.replace(script, faults=faults, step_s=rng.choice((0.05, 0.1)), move_s=0.002, router_cancels=0.0)


def _stale_together(rng: random.Random) -> Script:
    """Several grants are under way to one source when it refuses some of their numbers: each gets a number of its own."""
    requests = tuple(
        make_request(rng, rng.choice(list(Mode)), tokens=2, at_s=0.3 * (number // 4)) for number in range(rng.randint(4, 8))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    forged = Fault(FaultKind.BAD_GRANT, rng.choice((0.0, 0.2)), who="d0", number=rng.randint(2, 5))
    return structs.replace(script, requests=requests, faults=(forged,), move_s=0.01, prefill_blocks=40, decode_blocks=40)


def _refused_without_a_number(rng: random.Random) -> Script:
    """A source that writes, of an older release, does not name the number that it refuses: of a forged grant beside the true
    one. The target ends one of its hand-offs while the next answer, or its own next message, is late or lost.
    """
    delay_s = rng.choice((0.0, 0.04))  # The second: much is computed, and written at once, when the grant comes.
    requests = tuple(make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode_delay_s=delay_s) for _ in range(rng.randint(1, 4)))
    script = make_stage(rng, writes=True, request=requests[0])
    at_s = delay_s + rng.uniform(0.001, 0.006)
    late = Fault(FaultKind.SLOW, at_s, who="p0", other="d0", for_s=0.05, number=1)
    lost = Fault(FaultKind.CUT, at_s, who="d0", other="p0", for_s=rng.choice((0.002, 0.004, 0.01)))
    faults = (
        Fault(FaultKind.BAD_GRANT, 0.0, who="d0", number=rng.randint(2, 5)),
        Fault(FaultKind.STRAY, 0.0, who="p0", other="release"),
        rng.choice((late, lost)),
        Fault(FaultKind.CANCEL_TARGET, at_s + rng.uniform(0.001, 0.02), number=0),
    )
    return structs.replace(
        script,
        requests=requests,
        faults=faults,
        move_s=0.02,
        step_s=0.005,
        prefill_blocks=40,
        decode_blocks=40,
        router_cancels=0.0,
    )


def _cancelled_while_summed(rng: random.Random) -> Script:
    """A hand-off ends while the reports of one rank are under way, and the same id is tried again: they are not of that one."""
    again = {"retries": 1, "retries_once": True, "reuse_id": True, "retry_after_s": 0.01}
    request = make_request(rng, Mode.PUSH, tokens=rng.randint(1, 2), **again)
    script = structs.replace(make_stage(rng, writes=rng.random() < 0.8, request=request), ranks=2, step_s=0.005, move_s=0.002)
    at_s = rng.uniform(0.004, 0.025)
    faults = (
        Fault(FaultKind.PAUSE_RANK, at_s, who="d0", for_s=rng.choice((0.2, 0.4)), number=rng.randint(0, 1), is_whole=True),
        Fault(FaultKind.CANCEL_TARGET, at_s + rng.uniform(0.02, 0.08), number=0),
    )
    if rng.random() < 0.3:
        # Or what the source confirms is under way when the hand-off ends.
        faults = (Fault(FaultKind.SLOW, at_s, who="p0", other="d0", for_s=0.15, number=1), faults[1])
    return structs.replace(
        script,
        faults=faults,
        rank_lag_s=rng.choice((0.001, 0.005)),
        integrity=rng.choice((Integrity.FULL, Integrity.SAMPLED)),
        router_cancels=0.0,
    )


def _no_peer_there(rng: random.Random) -> Script:
    """At one of two addresses something answers that is no peer: requests for it fail by name at once, the others go on."""
    requests = tuple(
        make_request(rng, rng.choice(list(Mode)), tokens=2, prefill=number % 2, at_s=0.01 + rng.choice((0.0, 0.1)) * number)
        for number in range(rng.randint(2, 5))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    foreign = Fault(FaultKind.STRAY, 0.0, who="p1", other="no peer", is_whole=True)
    refused = Fault(FaultKind.REFUSE, rng.choice((0.005, 0.05)), who="d0", number=1)
    return structs.replace(
        script, requests=requests, faults=(foreign, refused)[: rng.randint(1, 2)], prefills=2, move_s=0.01, router_cancels=0.0
    )


PEERS: tuple[Drill, ...] = (
    _too_patient,
    _source_contradicts_itself,
    _source_contradicts_itself,
    _source_contradicts_itself,
    _silent_while_queued,
    _dialled_for_nothing,
    _stopped_then_refused,
    _stale_together,
    _refused_without_a_number,
    _refused_without_a_number,
    _refused_without_a_number,
    _cancelled_while_summed,
    _cancelled_while_summed,
    _no_peer_there,
    _source_takes_back,
    _source_takes_back,
    _source_takes_back,
)
