"""Drills about what a source meets rarely: a prefill that is preempted before its target is there, or before anything of it is
computed; a request that its engine refuses; a copy that fails while it is being stopped; sums that take many turns.
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.engine_script import make_engine_script
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.transport.base import LateWrites

__all__ = ["SOURCES"]


def _computed_in_vain(rng: random.Random) -> Script:
    """A prefill is preempted before its target has granted anything, or when that has, and nothing is computed yet."""
    is_early = rng.random() < 0.5
    delay_s = 0.0 if is_early else rng.choice((0.2, 0.4))
    request = make_request(rng, Mode.PUSH, tokens=rng.randint(3, 6), chunk=1, decode_delay_s=delay_s)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    at_s = rng.uniform(0.01, 0.045) if is_early else rng.uniform(0.06, delay_s)
    preempted = tuple(Fault(FaultKind.PREEMPT, at_s + 0.055 * number, who="p0") for number in range(rng.randint(1, 2)))
    return msgspec.structs.replace(script, faults=preempted, step_s=0.05, move_s=0.01)


def _offered_whole(rng: random.Random) -> Script:
    """Nothing goes wrong; an engine just reports nothing before the whole cache is complete, whenever its grant comes."""
    requests = tuple(
        make_request(
            rng,
            Mode.PUSH,
            tokens=rng.randint(1, 4),
            at_s=0.1 * number,
            is_streamed=False,
            decode_delay_s=rng.choice((0.0, 0.0, 0.3)),
        )
        for number in range(rng.randint(1, 3))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    # An operator may allow writes where the transport has none.
    is_allowed = script.unfenced_writes or script.late_writes is LateWrites.IMPOSSIBLE
    integrity = rng.choice(list(Integrity))
    return msgspec.structs.replace(script, requests=requests, move_s=0.01, integrity=integrity, unfenced_writes=is_allowed)


def _refused_at_source(rng: random.Random) -> Script:
    """A prefill engine refuses a request before its grant has come, or after: the target does not wait for a limit."""
    request = make_request(
        rng,
        Mode.PUSH,
        decode_delay_s=rng.choice((0.0, 0.05, 0.5)),
        retries=rng.choice((0, 1)),
        reuse_id=rng.random() < 0.5,
        prefill_delay_s=rng.choice((0.0, 0.0, 0.1)),
        retry_after_s=rng.choice((0.1, 0.7)),
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    refused = Fault(FaultKind.REFUSE, 0.0, who="p0", number=1)
    return msgspec.structs.replace(script, faults=(refused,), router_cancels=0.0)


def _fails_while_stopped(rng: random.Random) -> Script:
    """A copy fails on one rank while the order to stop it is under way there, and another rank still has it open."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=rng.randint(1, 3))
    script = make_stage(rng, writes=rng.random() < 0.7, request=request)
    at_s = rng.uniform(0.03, 0.12)
    who = rng.choice(("p0", "p0", "d0"))
    fails = Fault(FaultKind.COPY_FAILS, at_s, who=who, number=rng.randint(0, 1))
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET, FaultKind.PREEMPT))
    stopped = Fault(kind, at_s + rng.uniform(0.0, 0.1), who="p0", number=0)
    calls = tuple(Fault(FaultKind.STRAY, stopped.at_s + 0.02 * number, who="p0", other="engine") for number in range(1, 4))
    return msgspec.structs.replace(
        script,
        faults=(fails, stopped, *calls),
        ranks=2,
        step_s=0.02,
        move_s=0.03,
        uneven=8.0,
        rank_lag_s=rng.choice((0.02, 0.05, 0.1)),
    )


def _sums_in_turns(rng: random.Random) -> Script:
    """Nothing goes wrong; ranks just sum so little at a time that one span takes several turns, and hand-offs take turns."""
    requests = tuple(
        make_request(rng, rng.choice(list(Mode)), tokens=rng.randint(2, 6), chunk=rng.choice((1, 3, 6)), at_s=0.002 * number)
        for number in range(rng.randint(1, 4))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.0, 0.05), who="p0")
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(preempted,)[: rng.randint(0, 1)],
        integrity=Integrity.FULL,
        aux_channel=rng.choice(list(AuxChannel)),
        layers=2,
        move_s=0.002,
        few_cells=rng.randint(1, 4),
        rank_lag_s=rng.choice((0.0, 0.001)),
    )


def _aux_asked_for_again(rng: random.Random) -> Script:
    """A target could not read an aux record and has asked for it in a message; then what it sent before arrives again."""
    request = make_request(rng, Mode.PUSH, tokens=rng.randint(2, 4))
    script = make_stage(rng, writes=True, request=request)
    fails = Fault(rng.choice((FaultKind.COPY_FAILS, FaultKind.CORRUPT)), 0.0, who="d0", number=0)
    replays = Fault(FaultKind.REPLAY, rng.uniform(0.0, 0.3), who="d0", other="p0", for_s=rng.choice((0.05, 0.3)), number=40)
    return msgspec.structs.replace(
        script, faults=(fails, replays), move_s=rng.choice((0.02, 0.05)), step_s=0.005, aux_channel=AuxChannel.DATA
    )


def _called_too_early(rng: random.Random) -> Script:
    """A grant waits for the engine's own request, and the engine calls for what it has not asked for, or is over."""
    requests = tuple(
        make_request(rng, Mode.PUSH, tokens=rng.randint(2, 4), at_s=0.05 * number, prefill_delay_s=rng.choice((0.1, 0.3)))
        for number in range(rng.randint(1, 3))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    calls = tuple(
        Fault(FaultKind.STRAY, rng.uniform(0.0, 0.4), who="p0", other="engine", number=rng.randrange(6)) for _ in range(8)
    )
    return msgspec.structs.replace(script, requests=requests, faults=calls, move_s=0.02)


def _full_for_a_moment(rng: random.Random) -> Script:
    """A transport takes nothing for a moment, while one batch after the other is to be posted: none is lost, or asked about
    again and again.
    """
    requests = tuple(
        make_request(
            rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=6, chunk=rng.choice((1, 2, 6)), at_s=0.02 * number
        )
        for number in range(rng.randint(1, 2))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    is_writing = requests[0].mode is Mode.PUSH and (script.unfenced_writes or script.late_writes is LateWrites.REVOCABLE)
    full = Fault(
        FaultKind.QUEUE_FULL,
        rng.uniform(0.0, 0.1),
        who="p0" if is_writing else "d0",
        for_s=rng.choice((0.02, 0.1, 0.4)),
        number=rng.randint(0, 1),
    )
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(full,),
        layers=2,
        step_s=0.005,
        move_s=rng.choice((0.002, 0.02)),
        few_cells=rng.choice((0, 1, 2)),
        rank_lag_s=rng.choice((0.0, 0.001)),
    )


def _wanted_after_all(rng: random.Random) -> Script:
    """A target refuses a request of which its source has yet to get its half, and then takes it up: it queues for memory, and
    nothing but its heartbeats shows that.
    """
    first = make_request(rng, Mode.PUSH, tokens=4)
    again = make_request(
        rng,
        Mode.PUSH,
        tokens=4,
        at_s=0.1,
        prefill_delay_s=rng.choice((0.8, 1.2)),
        retries=1,
        retry_after_s=0.1,
        reuse_id=True,
        transfer_id=rng.choice((None, "whole")),
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    refused = Fault(FaultKind.REFUSE, 0.09, who="d0", number=1, is_whole=again.transfer_id is not None)
    return msgspec.structs.replace(
        script, requests=(first, again), faults=(refused,), decode_blocks=4, decode_s=2.5, move_s=0.005, router_cancels=0.0
    )


def _overtaken(rng: random.Random) -> Script:
    """Heartbeats of a target that queued are late, and arrive when it has granted what they name without a grant."""
    first = make_request(rng, Mode.PUSH, tokens=2)
    queued = make_request(rng, Mode.PUSH, tokens=4, at_s=0.05)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    freed_s = rng.uniform(0.3, 0.5)
    late = Fault(FaultKind.DELAY, rng.uniform(0.1, 0.3), who="d0", other="p0", for_s=rng.uniform(0.4, 0.8))
    return msgspec.structs.replace(
        script, requests=(first, queued), faults=(late,), decode_blocks=4, decode_s=freed_s, move_s=0.06, step_s=0.02
    )


def _target_of_another_release(rng: random.Random) -> Script:
    """A target of another release leaves out how many tokens it has blocks for, and claims that what it stops was delivered."""
    requests = tuple(make_request(rng, rng.choice(list(Mode)), at_s=0.1 * number) for number in range(rng.randint(1, 3)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    other = Fault(FaultKind.STRAY, 0.0, who="d0", other="release")
    cancelled = Fault(FaultKind.CANCEL_TARGET, rng.uniform(0.0, 0.3), number=0)
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(other, cancelled)[: rng.randint(1, 2)],
        integrity=rng.choice((Integrity.OFF, Integrity.FULL)),
        router_cancels=0.0,
    )


def _shut_down(rng: random.Random) -> Script:
    """One of two instances is stopped in good order, whatever its hand-offs are doing, and comes back."""
    requests = tuple(
        make_request(
            rng,
            rng.choice(list(Mode)),
            at_s=0.04 * number,
            retries=2,
            prefill_delay_s=rng.choice((0.0, 0.3)),
            decode_delay_s=rng.choice((0.0, 0.0, 0.3)),
        )
        for number in range(rng.randint(1, 4))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    stopped = Fault(FaultKind.RESTART, rng.uniform(0.0, 0.4), who=rng.choice(("p0", "d0")), is_whole=True)
    return msgspec.structs.replace(
        script, requests=requests, faults=(stopped,), one_host=False, decode_blocks=rng.choice((6, 24)), step_s=0.02
    )


def _preempted_again(rng: random.Random) -> Script:
    """A prefill is preempted again and again, while its target still reads, or waits for the reads, of what was void before."""
    request = make_request(rng, Mode.PUSH, tokens=rng.randint(3, 6), chunk=rng.choice((1, 3)))
    script = make_stage(rng, writes=False, request=request)
    first_s = rng.uniform(0.01, 0.04)
    preempted = tuple(Fault(FaultKind.PREEMPT, first_s + 0.02 * number, who="p0") for number in range(rng.randint(2, 4)))
    return msgspec.structs.replace(
        script, faults=preempted, step_s=0.004, move_s=0.2, uneven=4.0, integrity=rng.choice((Integrity.OFF, Integrity.FULL))
    )


def _asked_while_computing(rng: random.Random) -> Script:
    """A source is asked for a confirmation of what it is still computing, whichever side moves it."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    strays = Fault(FaultKind.STRAY, 0.0, who="p0", number=30)
    return msgspec.structs.replace(script, faults=(strays,), move_s=0.002, step_s=0.02)


def _declined_beside(rng: random.Random) -> Script:
    """A target refuses a request as a whole while its source computes one prompt of it, which that target has granted; another
    one is done, and so are prompts of other requests, or they go on.
    """
    requests = tuple(
        make_request(
            rng,
            Mode.PUSH,
            tokens=6,
            chunk=1,
            at_s=0.3 + 0.06 * number,
            transfer_id="whole",
            prompt_index=number,
            decode_delay_s=0.001,
        )
        for number in range(rng.randint(2, 3))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    refused = Fault(FaultKind.REFUSE, 0.06 * len(requests) + 0.23, who="d0", number=1, is_whole=True)
    done = make_request(rng, Mode.PUSH, tokens=1, transfer_id="whole", prompt_index=7)
    others = make_request(rng, Mode.PUSH, tokens=1), make_request(rng, Mode.PUSH, tokens=2, at_s=0.3, decode_delay_s=0.4)
    return msgspec.structs.replace(
        script,
        requests=(*requests, done, *others),
        faults=(refused,),
        step_s=0.03,
        move_s=0.02,
        router_cancels=0.0,
    )


def _offered_late(rng: random.Random) -> Script:
    """Nothing goes wrong; a prefill is offered when the first token is there, which takes longer than its last bytes."""
    requests = tuple(
        make_request(rng, Mode.PUSH, tokens=rng.randint(2, 4), at_s=0.1 * number, offer_after_s=rng.choice((0.1, 0.2)))
        for number in range(rng.randint(1, 3))
    )
    script = make_stage(rng, writes=True, request=requests[0])
    return msgspec.structs.replace(
        script,
        requests=requests,
        move_s=rng.choice((0.001, 0.01)),
        integrity=rng.choice((Integrity.OFF, Integrity.OFF, Integrity.FULL)),
        aux_channel=rng.choice(list(AuxChannel)),
        rank_lag_s=rng.choice((0.0, 0.0, 0.005)),
    )


def _declined_long_ago(rng: random.Random) -> Script:
    """A target refuses a request of which its source gets its half so late that this counts no more; or another one of the same
    transfer id comes before, which the target takes.
    """
    is_old = rng.random() < 0.5
    is_whole = is_old and rng.random() < 0.5
    first = make_request(rng, Mode.PUSH, tokens=4, prefill_delay_s=4.6 if is_old else 2.0)
    again = make_request(rng, Mode.PUSH, tokens=3, at_s=rng.choice((0.2, 0.5)) if not is_old else 6.0, steal_id=0)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    refused = Fault(FaultKind.REFUSE, 0.0, who="d0", number=1, is_whole=is_whole)
    return msgspec.structs.replace(
        script, requests=(first, again), faults=(refused,), move_s=0.005, step_s=0.01, router_cancels=0.0
    )


def _refused_and_asked_for(rng: random.Random) -> Script:
    """A prefill engine refuses a request, and takes another one of the same transfer id before any grant has come."""
    first = make_request(rng, Mode.PUSH, tokens=3, decode_delay_s=rng.choice((0.3, 0.6)))
    again = make_request(rng, Mode.PUSH, tokens=4, at_s=0.1, steal_id=0)
    third = make_request(rng, Mode.PUSH, tokens=4, at_s=1.0, steal_id=0, prefill_delay_s=0.2)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    refused = Fault(FaultKind.REFUSE, 0.0, who="p0", number=1)
    return msgspec.structs.replace(script, requests=(first, again, third), faults=(refused,), move_s=0.01, router_cancels=0.0)


def _stopped_far_ahead(rng: random.Random) -> Script:
    """Targets cancel, and send stops of grants that they have not made: with numbers that they may reach, or never will."""
    requests = tuple(
        make_request(rng, rng.choice(list(Mode)), tokens=6, chunk=1, at_s=0.05 * number, decode=number % 2)
        for number in range(rng.randint(2, 4))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    strays = tuple(Fault(FaultKind.STRAY, 0.0, who=f"d{number}", number=30) for number in range(2))
    cancelled = tuple(
        Fault(FaultKind.CANCEL_TARGET, each.at_s + rng.uniform(0.05, 0.2), number=number)
        for number, each in enumerate(requests)
    )
    return msgspec.structs.replace(
        script, requests=requests, faults=(*strays, *cancelled), decodes=2, step_s=0.04, router_cancels=0.0
    )


def _stopped_by_one_refused(rng: random.Random) -> Script:
    """A source keeps one card only, and has forgotten a target when that grants again: it is refused while another one is
    served, and stops what it has granted.
    """
    known = make_request(rng, Mode.PUSH, tokens=1, chunk=1)
    long = make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode=1, at_s=0.4)
    again = make_request(rng, Mode.PUSH, tokens=2, at_s=0.6)
    script = make_stage(rng, writes=rng.random() < 0.5, request=known)
    excuses = tuple(Fault(FaultKind.COPY_FAILS, 3.0, who=name) for name in ("p0", "d0", "d1"))
    cancelled = Fault(FaultKind.CANCEL_TARGET, rng.uniform(0.65, 0.8), number=2)
    if rng.random() < 0.4:
        cancelled = Fault(FaultKind.REFUSE, 0.5, who="d0", number=1)
    return msgspec.structs.replace(
        script,
        requests=(known, long, again),
        faults=(*excuses, cancelled),
        decodes=2,
        step_s=0.1,
        move_s=0.01,
        most_peers=1,
        router_cancels=0.0,
    )


def _target_dies_meanwhile(rng: random.Random) -> Script:
    """A target dies, and its source cannot stop: one of its ranks stands still. It goes on to show others that it lives."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1)
    other = make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode=1)
    script = make_stage(rng, writes=True, request=request)
    at_s = rng.uniform(0.05, 0.2)
    paused = Fault(FaultKind.PAUSE_RANK, at_s, who="p0", for_s=1.5, number=rng.randint(0, 1))
    died = Fault(FaultKind.RESTART, at_s + rng.uniform(0.0, 0.05), who="d0")
    return msgspec.structs.replace(
        script,
        requests=(request, other),
        faults=(paused, died),
        one_host=True,
        decodes=2,
        ranks=2,
        step_s=0.05,
        move_s=0.05,
        rank_lag_s=rng.choice((0.001, 0.02)),
    )


def _hung_up_on(rng: random.Random) -> Script:
    """A source is not reached for longer than anything waits for it, while its target takes something from another one, or
    finds that one to be none of its own.
    """
    unreached = make_request(rng, rng.choice(list(Mode)), tokens=1)
    slow = make_request(rng, Mode.PUSH, tokens=6, chunk=1, prefill=1, at_s=rng.uniform(0.05, 0.3))
    script = make_stage(rng, writes=rng.random() < 0.5, request=unreached)
    cut = Fault(FaultKind.CUT, 0.0, who="d0", other="p0", for_s=6.0)
    refused = Fault(FaultKind.REFUSE, 0.0, who="d0", number=1)
    return msgspec.structs.replace(
        script,
        requests=(unreached, slow),
        faults=(cut, refused)[: rng.randint(1, 2)],
        strangers=("p1",) if rng.random() < 0.3 else (),
        prefills=2,
        layers=2,
        step_s=0.4,
        move_s=0.01,
        router_cancels=0.0,
    )


def _back_as_another_release(rng: random.Random) -> Script:
    """A source comes back as another release, whose cards do not state which question they answer."""
    first = make_request(rng, Mode.PUSH, tokens=2)
    later = tuple(make_request(rng, rng.choice(list(Mode)), tokens=2, at_s=0.55 + 0.1 * number) for number in range(2))
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    restarted = Fault(FaultKind.RESTART, 0.3, who="p0")
    others = tuple(Fault(FaultKind.STRAY, at_s, who="p0", other="release") for at_s in (0.0, 0.51))
    return msgspec.structs.replace(script, requests=(first, *later), faults=(*others, restarted), one_host=False)


def _in_haste(rng: random.Random) -> Script:
    """Nothing goes wrong; one of two targets of a source just waits for less long than the other one."""
    requests = tuple(
        make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode=number % 2, at_s=rng.uniform(0.0, 0.2))
        for number in range(rng.randint(2, 4))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    hasty = (rng.choice(("d0", "d1")),)
    return msgspec.structs.replace(script, requests=requests, decodes=2, hasty=hasty, step_s=0.1, move_s=0.01)


def _sums_of_blocks(rng: random.Random) -> Script:
    """Nothing goes wrong; engines of production have their caches summed a cell at a time, whose pieces have more."""
    script = make_engine_script(rng.randrange(1 << 30))
    while script.faults:
        script = make_engine_script(rng.randrange(1 << 30))
    return msgspec.structs.replace(
        script, integrity=rng.choice((Integrity.FULL, Integrity.SAMPLED)), few_cells=rng.randint(1, 3)
    )


def _wanted_in_the_end(rng: random.Random) -> Script:
    """A target refuses a prompt, another one of the same transfer id ends at the source, and then the target takes the first:
    it queues for memory, and how the other one ended is no answer to its heartbeats.
    """
    first = make_request(rng, Mode.PUSH, tokens=4)
    refused = make_request(rng, Mode.PUSH, tokens=3, at_s=0.1, prefill_delay_s=3.0)
    other = make_request(rng, Mode.PUSH, tokens=2, at_s=0.2, steal_id=1, decode=1, decode_delay_s=1.0)
    wanted = make_request(rng, Mode.PUSH, tokens=3, at_s=rng.uniform(0.5, 0.8), steal_id=1, prefill_delay_s=2.5)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    faults = (
        Fault(FaultKind.REFUSE, 0.09, who="d0", number=1),
        Fault(FaultKind.CANCEL_SOURCE, rng.uniform(0.3, 0.45), number=2),
    )
    return msgspec.structs.replace(
        script,
        requests=(first, refused, other, wanted),
        faults=faults,
        decodes=2,
        decode_blocks=4,
        decode_s=2.5,
        move_s=0.005,
        router_cancels=0.0,
    )


def _stop_overtakes(rng: random.Random) -> Script:
    """The grant of what a target cancels is late, and its stop comes first; then another request has the same transfer id, and
    the stop comes again.
    """
    known = make_request(rng, Mode.PUSH, tokens=1, chunk=1)
    stopped = make_request(rng, Mode.PUSH, tokens=6, chunk=1, at_s=0.3)
    again = make_request(rng, Mode.PUSH, tokens=5, chunk=1, at_s=0.6, steal_id=1, decode_delay_s=0.5)
    script = make_stage(rng, writes=rng.random() < 0.5, request=known)
    faults = (
        Fault(FaultKind.SLOW, 0.299, who="d0", other="p0", for_s=rng.choice((0.15, 0.6)), number=1),
        Fault(FaultKind.CANCEL_TARGET, rng.uniform(0.305, 0.4), number=1),
        Fault(FaultKind.REPLAY, 0.62, who="d0", other="p0", for_s=0.3, number=40),
    )
    return msgspec.structs.replace(
        script, requests=(known, stopped, again), faults=faults, step_s=0.05, move_s=0.01, router_cancels=0.0
    )


def _offered_wrongly(rng: random.Random) -> Script:
    """A prefill engine offers a cache while it reports spans that are not all of it: that hand-off fails by name."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode_delay_s=rng.choice((0.0, 0.3)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    wrong = Fault(FaultKind.STRAY, rng.uniform(0.03, 0.11), who="p0", other="engine", is_whole=True)
    return msgspec.structs.replace(script, faults=(wrong,), step_s=0.02, router_cancels=0.0)


def _declined_by_the_other(rng: random.Random) -> Script:
    """A router in doubt sends requests to two targets: one grants them, or will, and the other one declines them, or all of
    their transfer id. What the first one has goes on, whether the source's own half of it has come or not.
    """
    late_s = rng.choice((0.0, 0.3))
    requests = tuple(
        make_request(
            rng,
            Mode.PUSH,
            tokens=6,
            chunk=1,
            at_s=0.3 + 0.6 * number,
            decode=0,
            second_decode=1,
            prefill_delay_s=late_s,
        )
        for number in range(2)
    )
    known = tuple(make_request(rng, Mode.PUSH, tokens=1, chunk=1, decode=number) for number in range(2))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    declined = tuple(
        Fault(FaultKind.REFUSE, each.at_s - 0.05, who="d1", number=1, is_whole=number % 2 == 0)
        for number, each in enumerate(requests)
    )
    slow = tuple(Fault(FaultKind.SLOW, each.at_s - 0.01, who="d1", other="p0", for_s=0.05, number=1) for each in requests)
    return msgspec.structs.replace(
        script, requests=(*known, *requests), faults=(*declined, *slow), decodes=2, step_s=0.02, move_s=0.01, router_cancels=0.0
    )


def _too_many_wait(rng: random.Random) -> Script:
    """Targets grant much more than a source has requests for: what is too much is refused, and the rest is taken up."""
    requests = tuple(
        make_request(
            rng,
            Mode.PUSH,
            tokens=2,
            at_s=0.05 * number,
            prefill_delay_s=rng.choice((0.0, 0.1, 0.2)),
            decode=number % 2,
            retries=1,
        )
        for number in range(rng.randint(4, 6))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    # What is refused fails, and no copy has to: this is what such a failure is put down to.
    excuses = tuple(Fault(FaultKind.COPY_FAILS, 0.0, who=name) for name in ("p0", "d0", "d1"))
    return msgspec.structs.replace(
        script, requests=requests, faults=excuses, decodes=2, move_s=0.01, most_parked=rng.randint(1, 2), router_cancels=0.0
    )


def _stolen_while_it_queues(rng: random.Random) -> Script:
    """A target queues for memory when another one grants a different prompt of its transfer id: the first is waited for."""
    first = make_request(rng, Mode.PUSH, tokens=rng.randint(2, 4), at_s=0.05, transfer_id="same")
    before = make_request(rng, Mode.PUSH, tokens=4)
    at_s = rng.uniform(0.6, 1.2)
    other = make_request(rng, Mode.PUSH, tokens=2, decode=1, at_s=at_s, prefill_delay_s=2.0, steal_id=0, transfer_id="same")
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    return msgspec.structs.replace(
        script,
        requests=(first, before, other),
        decodes=2,
        decode_blocks=4,
        decode_s=rng.uniform(1.0, 1.5),
        step_s=0.02,
        move_s=0.005,
        router_cancels=0.0,
    )


def _asked_before_its_grant(rng: random.Random) -> Script:
    """A target queues for memory, and messages come in its name that it has no grant for; a prompt that it has not, too."""
    first = make_request(rng, Mode.PUSH, tokens=4)
    queued = make_request(rng, Mode.PUSH, tokens=4, at_s=0.05)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    strays = Fault(FaultKind.STRAY, 0.1, who="d0", number=40)
    return msgspec.structs.replace(
        script, requests=(first, queued), faults=(strays,), decode_blocks=4, decode_s=2.5, move_s=0.005
    )


def _given_up_on_the_way(rng: random.Random) -> Script:
    """What a source writes is given up with bytes on their way: the link is down when it is preempted or cancelled."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=2, retries=1, retry_after_s=0.3, reuse_id=rng.random() < 0.5)
    script = make_stage(rng, writes=True, request=request)
    at_s = rng.uniform(0.05, 0.1)
    severed = Fault(FaultKind.SEVER, at_s, who="p0", other="d0", for_s=0.6)
    kind = rng.choice((FaultKind.PREEMPT, FaultKind.PREEMPT, FaultKind.CANCEL_SOURCE))
    ended = Fault(kind, at_s + 0.05, who="p0", number=0)
    return msgspec.structs.replace(
        script,
        faults=(severed, ended),
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        layers=1,
        step_s=0.07,
        move_s=0.05,
    )


def _written_in_vain(rng: random.Random) -> Script:
    """A prefill is preempted when some of it is written, to a target that counts the bytes: none of them counts any more."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=2)
    script = make_stage(rng, writes=True, request=request)
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.1, 0.2), who="p0")
    return msgspec.structs.replace(
        script,
        faults=(preempted,),
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        step_s=0.07,
        move_s=rng.choice((0.005, 0.05)),
    )


def _over_before_it_was_claimed(rng: random.Random) -> Script:
    """A request is cancelled at its source while its target queues for memory, which learns of that, or cancels it, too."""
    first = make_request(rng, Mode.PUSH, tokens=4)
    queued = make_request(rng, Mode.PUSH, tokens=4, at_s=0.05)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    at_s = rng.uniform(0.1, 0.4)
    faults = (
        Fault(FaultKind.CANCEL_SOURCE, at_s, number=1),
        Fault(FaultKind.CANCEL_TARGET, at_s + rng.choice((0.0, 0.01, 0.6)), number=1),
    )
    return msgspec.structs.replace(
        script,
        requests=(first, queued),
        faults=faults,
        decode_blocks=4,
        decode_s=1.5,
        move_s=0.005,
        step_s=rng.choice((0.02, 0.1)),
        router_cancels=0.0,
    )


def _used_again_unnoticed(rng: random.Random) -> Script:
    """A target does not learn that its hand-off has ended at the source, which has begun another one of that id elsewhere."""
    first = make_request(rng, Mode.PUSH, tokens=6, chunk=1, transfer_id="same")
    again = make_request(rng, Mode.PUSH, tokens=6, chunk=1, decode=1, at_s=0.2, steal_id=0, transfer_id="same")
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    at_s = rng.uniform(0.1, 0.15)
    faults = (
        Fault(FaultKind.CUT, at_s, who="p0", other="d0", for_s=0.1),
        Fault(FaultKind.CANCEL_SOURCE, at_s + 0.01, number=0),
    )
    return msgspec.structs.replace(
        script, requests=(first, again), faults=faults, decodes=2, step_s=0.1, move_s=0.05, router_cancels=0.0
    )


def _asked_by_another(rng: random.Random) -> Script:
    """What one target asks about and releases, another one of the same source does, too; answers are slow."""
    requests = tuple(
        make_request(rng, rng.choice((Mode.PUSH, Mode.PULL)), tokens=2, decode=number % 2, at_s=0.1 * number)
        for number in range(rng.randint(6, 8))
    )
    script = make_stage(rng, writes=False, request=requests[0])
    strays = tuple(Fault(FaultKind.STRAY, 0.0, who=name, number=40) for name in ("d0", "d1"))
    slow = tuple(Fault(FaultKind.SLOW, 0.1, who="p0", other=name, for_s=2.0, number=1) for name in ("d0", "d1"))
    return msgspec.structs.replace(script, requests=requests, faults=(*strays, *slow), decodes=2, move_s=0.002, step_s=0.005)


def _granted_while_stopping(rng: random.Random) -> Script:
    """A write fails with bytes on their way, and its source cannot stop: a rank stands still. The target has it fenced, and
    grants the same transfer id again before the source is quiet.
    """
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1, retries=2, retry_after_s=0.1, reuse_id=True)
    script = make_stage(rng, writes=True, request=request)
    at_s = rng.uniform(0.03, 0.1)
    faults = (
        Fault(FaultKind.COPY_FAILS, at_s, who="p0", number=0),
        Fault(FaultKind.PAUSE_RANK, at_s, who="p0", for_s=6.0, number=1),
        Fault(FaultKind.CANCEL_TARGET, at_s + 0.15, number=0),
    )
    return msgspec.structs.replace(
        script,
        faults=faults,
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        one_host=False,
        ranks=2,
        step_s=0.05,
        move_s=0.05,
        rank_lag_s=0.001,
        router_cancels=0.0,
    )


def _another_prompt_declined(rng: random.Random) -> Script:
    """A target declines a prompt while its source has another one of the same transfer id, which that target has yet to get."""
    known = make_request(rng, Mode.PUSH, tokens=1, chunk=1)
    declined = make_request(rng, Mode.PUSH, tokens=3, at_s=0.4, prefill_delay_s=2.0)
    other = make_request(rng, Mode.PUSH, tokens=6, chunk=1, at_s=0.35, steal_id=1, decode_delay_s=rng.choice((0.3, 0.6)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=known)
    refused = Fault(FaultKind.REFUSE, 0.39, who="d0", number=1)
    return msgspec.structs.replace(
        script, requests=(known, declined, other), faults=(refused,), step_s=0.02, move_s=0.01, router_cancels=0.0
    )


SOURCES: tuple[Drill, ...] = (
    _computed_in_vain,
    _offered_whole,
    _refused_at_source,
    _fails_while_stopped,
    _sums_in_turns,
    _aux_asked_for_again,
    _called_too_early,
    _full_for_a_moment,
    _wanted_after_all,
    _overtaken,
    _target_of_another_release,
    _shut_down,
    _preempted_again,
    _asked_while_computing,
    _declined_beside,
    _offered_late,
    _offered_late,
    _declined_long_ago,
    _refused_and_asked_for,
    _stopped_far_ahead,
    _stopped_by_one_refused,
    _target_dies_meanwhile,
    _hung_up_on,
    _back_as_another_release,
    _in_haste,
    _sums_of_blocks,
    _wanted_in_the_end,
    _stop_overtakes,
    _offered_wrongly,
    _declined_by_the_other,
    _asked_before_its_grant,
    _given_up_on_the_way,
    _granted_while_stopping,
    _another_prompt_declined,
    _too_many_wait,
    _too_many_wait,
    _stolen_while_it_queues,
    _overtaken,
    _written_in_vain,
    _over_before_it_was_claimed,
    _asked_by_another,
    _used_again_unnoticed,
    _used_again_unnoticed,
)
"""Drills about what a source meets rarely."""
