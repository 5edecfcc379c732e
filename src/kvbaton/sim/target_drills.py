"""Drills about what a target meets rarely."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec import structs

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.sim.contradictions import UNASKED, Contradiction
from kvbaton.sim.drill_stage import Drill, make_request, make_stage, moving_between
from kvbaton.sim.engine_script import make_engine_script
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.transport.base import LateWrites

__all__ = ["TARGETS"]

_WRONG = (Contradiction.NO_AUX, Contradiction.ELSEWHERE, Contradiction.EMPTY_SPAN, Contradiction.OVER_BEFORE_THE_GRANT)
_ABOUT_SPANS = (Contradiction.LEFT_OUT, Contradiction.LEFT_OUT, Contradiction.OTHER_SPAN, Contradiction.OTHER_LENGTH)
_NUMBERED_WRONGLY = (
    Contradiction.REFUSED_UP_TO_THE_LAST,
    Contradiction.ELSEWHERE,  # of its aux records, which go in messages: this one is not disturbed
    Contradiction.REFUSED_UP_TO_THE_LAST,
    Contradiction.REFUSED_WITHIN_REACH,
)


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


def _one_after_the_other(script: Script, mode: Mode, kinds: Sequence[Contradiction], *, is_whole: bool) -> Script:
    """The same script with a request for each of these contradictions of the source."""
    first = structs.replace(script.requests[0], mode=mode)
    requests = tuple(structs.replace(first, at_s=0.3 * number) for number in range(len(kinds)))
    faults = tuple(
        Fault(FaultKind.STRAY, max(0.0, each.at_s - 0.01), who="p0", other="contradiction", number=int(kind), is_whole=is_whole)
        for each, kind in zip(requests, kinds, strict=True)
    )
    return structs.replace(script, requests=requests, faults=faults, router_cancels=0.0)


def _source_answers_unasked(rng: random.Random) -> Script:
    """A source confirms before it is asked, or reports that it has stopped, and goes on: that changes nothing."""
    request = make_request(rng, Mode.PULL, chunk=1, tokens=rng.randint(2, 4))
    # What a source that writes confirms counts without a question: so it is read.
    script = structs.replace(make_stage(rng, writes=rng.random() < 0.5, request=request), move_s=0.02, integrity=Integrity.FULL)
    return _one_after_the_other(script, Mode.PULL, UNASKED, is_whole=False)


def _source_answers_wrongly(rng: random.Random) -> Script:
    """A source sends an aux message without a record, points at no record, announces a span of nothing, and ends what it has
    accepted as if it had never got the grant.
    """
    request = make_request(rng, Mode.PUSH, chunk=1, tokens=rng.randint(2, 4))
    script = make_stage(rng, writes=rng.random() < 0.3, request=request)
    script = structs.replace(script, move_s=0.005, step_s=0.02, aux_channel=AuxChannel.DATA)
    return _one_after_the_other(script, Mode.PUSH, rng.sample(_WRONG, len(_WRONG)), is_whole=True)


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
    """A source names the last number but one as used. It does not name what it refuses, and the next number is far ahead of
    those that it has used, or as far as it can be.
    """
    request = make_request(rng, Mode.PUSH, chunk=1, tokens=2)
    script = structs.replace(make_stage(rng, writes=True, request=request), move_s=0.005, step_s=0.005)
    script = _one_after_the_other(script, Mode.PUSH, _NUMBERED_WRONGLY, is_whole=True)
    release = Fault(FaultKind.STRAY, 0.0, who="p0", other="release")
    return structs.replace(script, faults=(release, *script.faults))


def _ranks_report_again(rng: random.Random) -> Script:
    """While spans are written, or read, and summed, ranks report what they have reported, or what is not asked for."""
    requests = tuple(make_request(rng, mode, chunk=1, at_s=0.15 * number) for number, mode in enumerate((Mode.PUSH, Mode.PULL)))
    script = make_stage(rng, writes=True, request=requests[0])
    faults = tuple(
        Fault(FaultKind.STRAY, rng.uniform(0.02, 0.4), who="d0", other="engine", number=rng.choice((3, 5))) for _ in range(24)
    )
    return structs.replace(
        script,
        requests=requests,
        faults=faults,
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        ranks=2,
        uneven=3.0,
        step_s=0.01,
        move_s=0.02,
        integrity=rng.choice((Integrity.OFF, Integrity.FULL)),
    )


def _retracted_before_it_is_summed(rng: random.Random) -> Script:
    """A prefill is preempted when a part of it is in at its target, which sums everything at the end."""
    request = make_request(rng, Mode.PUSH, chunk=1)
    script = make_stage(rng, writes=False, request=request)
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.05, 0.09), who="p0")
    # The target is the third instance: of those, targets sum what is worth it, and sources everything at once.
    return structs.replace(script, faults=(preempted,), prefills=2, integrity=Integrity.FULL, step_s=0.02, move_s=0.005)


def _retracted_when_confirmed(rng: random.Random) -> Script:
    """A source that writes confirms everything, and then retracts it, while its target waits for the last bytes, or sums."""
    requests = tuple(make_request(rng, Mode.PUSH, tokens=rng.randint(1, 4), at_s=0.1 * number) for number in range(3))
    script = make_stage(rng, writes=True, request=requests[0])
    kind = int(Contradiction.CONFIRMED_AND_RETRACTED)
    wrong = Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=kind, is_whole=True)
    return structs.replace(
        script,
        requests=requests,
        faults=(wrong,),
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        integrity=rng.choice(list(Integrity)),
    )


def _led_to_the_last_number(rng: random.Random) -> Script:
    """A source refuses all numbers but the last one there is, while more and more is asked of it."""
    requests = tuple(make_request(rng, Mode.PUSH, tokens=1, at_s=0.003 * number) for number in range(rng.randint(4, 6)))
    script = make_stage(rng, writes=False, request=requests[0])
    last = int(Contradiction.REFUSED_UP_TO_THE_LAST)
    wrong = Fault(FaultKind.STRAY, 0.0, who="p0", other="contradiction", number=last, is_whole=True)
    # Back from there, two grants may share a number for a moment, as those of a target do that forgets how far it has counted.
    return structs.replace(
        script, requests=requests, faults=(wrong,), is_forgetful=True, step_s=0.001, prefill_blocks=40, decode_blocks=40
    )


def _reader_loses_its_source(rng: random.Random) -> Script:
    """A source that could write dies, or ends, in the middle of a hand-off that its target reads: there is nothing to fence."""
    request = make_request(rng, Mode.PULL, tokens=6)
    script = structs.replace(make_stage(rng, writes=True, request=request), step_s=0.002, move_s=0.1)
    at_s = moving_between(script)[0] + rng.uniform(0.01, 0.08)
    ended = (Fault(FaultKind.STRAY, 0.0, who="p0", other="release"), Fault(FaultKind.CANCEL_SOURCE, at_s, number=0))
    dead = (Fault(FaultKind.RESTART, at_s, who="p0"),)
    return structs.replace(
        script,
        faults=rng.choice((ended, ended, dead)),
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        one_host=True,
    )


def _fenced_after_a_while(rng: random.Random) -> Script:
    """A target stops a source that writes, and learns only after a while that bytes of it may land: each fence has its time."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1)
    script = structs.replace(make_stage(rng, writes=True, request=request), step_s=0.02, move_s=0.01)
    at_s = rng.uniform(0.03, 0.1)
    faults = (
        Fault(FaultKind.STRAY, 0.0, who="p0", other="release"),
        Fault(FaultKind.SLOW, at_s, who="p0", other="d0", for_s=rng.uniform(0.05, 0.3), number=2),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
        Fault(FaultKind.LOSE_REVOKE, at_s, who="d0", number=1),
    )
    return structs.replace(
        script,
        faults=faults,
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        rank_lag_s=rng.choice((0.0, 0.01)),
        router_cancels=0.0,
    )


def _retracted_unannounced(rng: random.Random) -> Script:
    """What a source announces is lost, and some of it has been written when it is preempted: none of that counts any more."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=2)
    script = make_stage(rng, writes=True, request=request)
    faults = (
        Fault(FaultKind.LOSE, 0.03, who="p0", other="d0", number=1),
        Fault(FaultKind.PREEMPT, rng.uniform(0.09, 0.13), who="p0"),
    )
    return structs.replace(
        script,
        faults=faults,
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        layers=1,
        step_s=0.07,
        move_s=0.005,
    )


def _refused_while_live(rng: random.Random) -> Script:
    """A router sends a request again that is live, and the target refuses all of its transfer id: the live one goes on."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1)
    at_s = rng.uniform(0.06, 0.2)
    again = structs.replace(request, at_s=at_s, steal_id=0)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    refused = Fault(FaultKind.REFUSE, at_s - 0.01, who="d0", number=1, is_whole=True)
    return structs.replace(script, requests=(request, again), faults=(refused,), step_s=0.05, move_s=0.01, router_cancels=0.0)


def _asked_by_one_of_two(rng: random.Random) -> Script:
    """One of two sources has forgotten its target, and asks for its card; the other one has a grant, and is not disturbed."""
    first = make_request(rng, Mode.PUSH, tokens=1)
    others = tuple(structs.replace(first, decode=number, at_s=0.1 * number) for number in (1, 2))
    beside = make_request(rng, Mode.PUSH, tokens=2, prefill=1, at_s=0.35, prefill_delay_s=rng.uniform(0.2, 0.8))
    again = make_request(rng, rng.choice(list(Mode)), tokens=2, at_s=0.45)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    return structs.replace(
        script,
        requests=(first, *others, beside, again),
        prefills=2,
        decodes=3,
        most_peers=2,
        move_s=0.002,
        step_s=0.002,
        router_cancels=0.0,
    )


def _source_leaves_out(rng: random.Random) -> Script:
    """A source leaves a span out of all that it announces and counts, whether it writes or is read; then it names one twice."""
    request = make_request(rng, Mode.PUSH, chunk=1, tokens=rng.randint(2, 4))
    script = structs.replace(make_stage(rng, writes=rng.random() < 0.7, request=request), move_s=0.005, step_s=0.005)
    script = _one_after_the_other(script, Mode.PUSH, _ABOUT_SPANS, is_whole=True)
    modes = (Mode.PUSH, Mode.PULL, *rng.sample(list(Mode), 2))
    requests = tuple(structs.replace(each, mode=mode) for each, mode in zip(script.requests, modes, strict=True))
    return structs.replace(script, requests=requests, integrity=rng.choice((Integrity.OFF, Integrity.OFF, Integrity.FULL)))


def _fenced_while_one_waits(rng: random.Random) -> Script:
    """A target fences a source that does not stop, while another hand-off of that source waits for blocks: that one goes on."""
    first = make_request(rng, Mode.PUSH, tokens=6, chunk=1)
    waiting = make_request(rng, rng.choice(list(Mode)), tokens=4, at_s=rng.uniform(0.02, 0.1))
    script = structs.replace(make_stage(rng, writes=True, request=first), step_s=0.02, move_s=0.01)
    at_s = rng.uniform(0.12, 0.2)
    faults = (
        Fault(FaultKind.CUT, at_s, who="p0", other="d0", for_s=rng.uniform(0.6, 1.2)),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
    )
    return structs.replace(
        script,
        requests=(first, waiting),
        faults=faults,
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        decode_blocks=6,
        rank_lag_s=rng.choice((0.0, 0.01)),
        router_cancels=0.0,
    )


def _granted_while_fenced(rng: random.Random) -> Script:
    """A target fences a source that does not stop, and grants it more before all ranks have reported that: this one goes on."""
    first = make_request(rng, Mode.PUSH, tokens=6, chunk=1)
    at_s = rng.uniform(0.05, 0.1)
    others = tuple(make_request(rng, Mode.PUSH, tokens=2, at_s=at_s + 0.5 + rng.uniform(0.0, 0.2)) for _ in range(4))
    script = make_stage(rng, writes=True, request=first)
    faults = (
        Fault(FaultKind.CUT, at_s, who="p0", other="d0", for_s=rng.uniform(0.6, 0.8)),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
    )
    return structs.replace(
        script,
        requests=(first, *others),
        faults=faults,
        late_writes=LateWrites.REVOCABLE,
        unfenced_writes=False,
        rank_lag_s=0.1,
        step_s=0.02,
        move_s=0.01,
        router_cancels=0.0,
    )


TARGETS: tuple[Drill, ...] = (
    _cancelled_while_aux_is_read,
    _asked_for_its_card,
    _preempted_before_the_grant,
    _source_answers_unasked,
    _source_answers_unasked,
    _source_answers_wrongly,
    _bytes_may_land,
    _far_ahead,
    _ranks_report_again,
    _ranks_report_again,
    _retracted_before_it_is_summed,
    _retracted_when_confirmed,
    _led_to_the_last_number,
    _reader_loses_its_source,
    _fenced_after_a_while,
    _refused_while_live,
    _asked_by_one_of_two,
    _source_leaves_out,
    _fenced_while_one_waits,
    _retracted_unannounced,
    _granted_while_fenced,
)
