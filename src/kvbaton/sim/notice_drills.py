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
    request = make_request(
        rng,
        Mode.PUSH,
        retries=2,
        reuse_id=True,
        retry_after_s=rng.choice((0.01, 0.05, 0.2)),
        prefill_delay_s=rng.choice((0.0, 0.0, 0.2)),
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    faults = (
        Fault(FaultKind.REFUSE, 0.0, who="d0", number=2, is_whole=rng.random() < 0.5),
        Fault(FaultKind.SLOW, 0.0, who="d0", other="p0", for_s=rng.choice((0.05, 0.15, 0.3)), number=rng.randint(1, 3)),
    )
    return structs.replace(script, faults=faults[: rng.randint(1, 2)])


def _declined_twice(rng: random.Random) -> Script:
    """A target declines all of a transfer id, and then one prompt of it, before its source has answered the first notice."""
    request = make_request(rng, Mode.PUSH, retries=2, reuse_id=True, retry_after_s=0.01, prefill_delay_s=rng.choice((0.0, 0.4)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    faults = (
        Fault(FaultKind.CUT, 0.0, who="d0", other="p0", for_s=rng.choice((0.1, 0.3))),
        Fault(FaultKind.REFUSE, 0.0, who="d0", number=2, is_whole=True),
        Fault(FaultKind.REFUSE, 0.005, who="d0", number=1),
    )
    return structs.replace(script, faults=faults)


def _ended_by_one_notice(rng: random.Random) -> Script:
    """A prefill ends at once because its target has declined everything; the next one comes before that shows interest."""
    request = make_request(rng, Mode.PUSH, retries=2, reuse_id=True, retry_after_s=0.05, prefill_delay_s=rng.uniform(0.05, 0.1))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    faults = (
        Fault(FaultKind.REFUSE, 0.0, who="d0", number=2, is_whole=True),
        Fault(FaultKind.CUT, 0.04, who="d0", other="p0", for_s=rng.choice((0.2, 0.4))),
    )
    return structs.replace(script, faults=faults)


def _waits_for_what_it_declined(rng: random.Random) -> Script:
    """A target declines a transfer id, and waits for blocks for the next try of it, when that has yet to reach the source."""
    busy = make_request(rng, Mode.PUSH, tokens=6)
    request = make_request(
        rng, Mode.PUSH, tokens=4, at_s=0.5, prefill_delay_s=0.5, retries=2, reuse_id=True, retry_after_s=rng.choice((0.05, 0.6))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    refused = Fault(FaultKind.REFUSE, 0.45, who="d0", number=2, is_whole=rng.random() < 0.7)
    return structs.replace(
        script, requests=(busy, request), faults=(refused,), decode_blocks=8, decode_s=3.0, move_s=0.01, router_cancels=0.0
    )


def _declined_where_no_peer_is(rng: random.Random) -> Script:
    """A target declines a request whose source is at an address where something else answers, and asks there no more."""
    request = make_request(rng, Mode.PUSH, tokens=2, prefill=1, at_s=0.05)
    other = make_request(rng, rng.choice(list(Mode)), tokens=2, at_s=rng.choice((0.0, 0.06)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    faults = (
        Fault(FaultKind.STRAY, 0.0, who="p1", other="no peer", is_whole=True),
        Fault(FaultKind.REFUSE, 0.04, who="d0", number=1, is_whole=rng.random() < 0.5),
    )
    return structs.replace(script, requests=(request, other), faults=faults, prefills=2, move_s=0.01, router_cancels=0.0)


def _declined_by_name(rng: random.Random) -> Script:
    """A target declines what names its source, which has been replaced since; the card that comes may be that of either."""
    first = make_request(rng, Mode.PUSH, tokens=2, prefill=rng.choice((0, 0, 1)), at_s=0.0)
    named = make_request(rng, Mode.PULL, tokens=2, at_s=0.05, decode_delay_s=rng.uniform(0.1, 0.3))
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    faults = (
        Fault(FaultKind.REFUSE, 0.04, who="d0", number=1, is_whole=rng.random() < 0.5),
        Fault(FaultKind.RESTART, rng.uniform(0.08, 0.2), who="p0"),
        Fault(FaultKind.SLOW, 0.0, who="p0", other="d0", for_s=rng.choice((0.1, 0.3)), number=rng.randint(1, 2)),
    )
    return structs.replace(
        script,
        requests=(first, named),
        faults=faults[: rng.randint(2, 3)],
        prefills=2,
        move_s=0.005,
        step_s=0.002,
        one_host=False,
        router_cancels=0.0,
    )


def _declined_prompt_by_prompt(rng: random.Random) -> Script:
    """A target declines two prompts of a transfer id one after the other, before its source has answered the first notice."""
    request = make_request(rng, Mode.PUSH, tokens=3, retries=2, reuse_id=True, retry_after_s=0.01, prefill_delay_s=0.4)
    other = make_request(rng, Mode.PUSH, tokens=4, at_s=rng.uniform(0.02, 0.2), steal_id=0, prefill_delay_s=0.4)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    faults = (
        Fault(FaultKind.CUT, 0.0, who="d0", other="p0", for_s=rng.choice((0.3, 0.8))),
        Fault(FaultKind.REFUSE, 0.0, who="d0", number=2),
        Fault(FaultKind.REFUSE, 0.01, who="d0", number=2),
        Fault(FaultKind.REFUSE, 0.02, who="d0", number=1),
    )
    return structs.replace(script, requests=(request, other), faults=faults, router_cancels=0.0)


def _declined_at_two(rng: random.Random) -> Script:
    """A target declines requests of two sources that it does not know: one answers, and one does not, or is no peer."""
    requests = tuple(
        make_request(rng, Mode.PUSH, tokens=2, prefill=number % 2, at_s=0.01 * number, prefill_delay_s=rng.choice((0.0, 0.3)))
        for number in range(4)
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    late = Fault(FaultKind.CUT, 0.0, who="d0", other="p0", for_s=rng.choice((0.2, 0.6)))
    faults = (
        *(Fault(FaultKind.REFUSE, 0.0, who="d0", number=1, is_whole=rng.random() < 0.5) for _ in range(4)),
        late,
        Fault(FaultKind.STRAY, 0.0, who="p1", other="no peer", is_whole=True),
    )
    return structs.replace(
        script, requests=requests, faults=faults[: rng.randint(5, 6)], prefills=2, move_s=0.01, router_cancels=0.0
    )


def _declined_before_a_late_card(rng: random.Random) -> Script:
    """A target declines what names its source; then a card comes late, of the process that was there before that source."""
    first = make_request(rng, Mode.PUSH, tokens=2, at_s=0.0)
    named = make_request(rng, Mode.PULL, tokens=1, chunk=1, at_s=rng.uniform(0.225, 0.24), decode_delay_s=0.005)
    script = make_stage(rng, writes=rng.random() < 0.5, request=first)
    faults = (
        Fault(FaultKind.SLOW, 0.0, who="p0", other="d0", for_s=rng.choice((0.15, 0.3)), number=1),
        Fault(FaultKind.RESTART, rng.uniform(0.01, 0.02), who="p0"),
        Fault(FaultKind.CANCEL_TARGET, 0.02, number=0),
        Fault(FaultKind.CUT, 0.03, who="d0", other="p0", for_s=0.8),
        Fault(FaultKind.REFUSE, 0.2, who="d0", number=1, is_whole=rng.random() < 0.5),
    )
    return structs.replace(
        script, requests=(first, named), faults=faults, move_s=0.005, step_s=0.002, one_host=False, router_cancels=0.0
    )


def _notified_again(rng: random.Random) -> Script:
    """A target declines everything of a transfer id. Its source ends what it is asked for by that, and is notified again."""
    first = make_request(rng, Mode.PUSH, tokens=1)
    again = {"retries": 1, "retries_once": True, "reuse_id": True, "retry_after_s": 0.5}
    request = make_request(rng, Mode.PUSH, tokens=2, at_s=0.5, prefill_delay_s=rng.uniform(0.05, 0.25), **again)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    faults = (
        Fault(FaultKind.REFUSE, 0.45, who="d0", number=2, is_whole=True),
        Fault(FaultKind.CUT, 0.48, who="p0", other="d0", for_s=rng.uniform(0.3, 0.8)),
    )
    return structs.replace(script, requests=(first, request), faults=faults, move_s=0.005, router_cancels=0.0)


def _declined_long_ago(rng: random.Random) -> Script:
    """A target declines everything of a transfer id, and much later the source is asked for it; or it is declined anew."""
    at_s = rng.uniform(4.6, 5.2)
    late = make_request(rng, Mode.PUSH, tokens=2, prefill_delay_s=at_s, transfer_id="once")
    early = make_request(rng, Mode.PUSH, tokens=2, prefill_delay_s=0.2, transfer_id="again")
    anew = structs.replace(early, at_s=at_s)
    script = make_stage(rng, writes=rng.random() < 0.5, request=late)
    is_whole = rng.random() < 0.8
    faults = tuple(Fault(FaultKind.REFUSE, when, who="d0", number=2, is_whole=is_whole) for when in (0.0, 0.0, at_s - 0.1))
    return structs.replace(script, requests=(late, early, anew), faults=faults, move_s=0.005, router_cancels=0.0)


def _declined_at_another(rng: random.Random) -> Script:
    """A target declines a request at one source, and its next try at another: the answer of the first is none of the second."""
    known = tuple(make_request(rng, Mode.PUSH, tokens=1, prefill=number) for number in range(2))
    one = make_request(rng, Mode.PUSH, tokens=2, at_s=0.5, transfer_id="moved", prefill_delay_s=rng.choice((0.0, 0.5)))
    other = structs.replace(one, at_s=0.52, prefill=1)
    script = make_stage(rng, writes=rng.random() < 0.5, request=one)
    refused = Fault(FaultKind.REFUSE, 0.45, who="d0", number=1, is_whole=rng.random() < 0.5)
    faults = (
        refused,
        refused,
        Fault(FaultKind.SLOW, 0.48, who="p0", other="d0", for_s=rng.uniform(0.03, 0.2), number=1),
        Fault(FaultKind.CUT, 0.51, who="d0", other="p1", for_s=rng.uniform(0.3, 0.8)),
    )
    return structs.replace(script, requests=(*known, one, other), faults=faults, prefills=2, move_s=0.005, router_cancels=0.0)


def _declined_for_many_prompts(rng: random.Random) -> Script:
    """A target declines everything of a request with more prompts than its source excepts from that, and may take others."""
    again = {"retries": 1, "retries_once": True, "retry_after_s": 0.3}
    request = make_request(rng, Mode.PUSH, tokens=1, transfer_id="many", prefill_delay_s=0.05, **again)
    requests = [structs.replace(request, prompt_index=number, at_s=0.1 * number) for number in range(rng.randint(8, 10))]
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    refused = Fault(FaultKind.REFUSE, 0.0, who="d0", number=rng.choice((1, 2, 2)), is_whole=True)
    return structs.replace(script, requests=tuple(requests), faults=(refused,), move_s=0.005, router_cancels=0.0)


NOTICES: tuple[Drill, ...] = (
    _declined_and_asked_again,
    _declined_twice,
    _ended_by_one_notice,
    _waits_for_what_it_declined,
    _declined_where_no_peer_is,
    _declined_by_name,
    _declined_prompt_by_prompt,
    _declined_at_two,
    _declined_before_a_late_card,
    _notified_again,
    _declined_long_ago,
    _declined_at_another,
    _declined_for_many_prompts,
)
