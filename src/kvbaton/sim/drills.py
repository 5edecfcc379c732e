"""Drills: small runs built round one kind of trouble, only its timing left to chance. Random runs meet these too rarely.

The run of two seeds in three is a drill. They are in ten lists, of which two have almost every fourth seed, two every eighth,
`NOTICES`, `RANKS` and `TIMELY` together every 16th, `SOURCES` every 32nd, and `PEERS` and `TARGETS` together also every 32nd:
one that is added to a list changes the runs of that list only, or of those that share its seeds.
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.sim.drill_stage import Drill
from kvbaton.sim.drill_stage import make_request as _request
from kvbaton.sim.drill_stage import make_stage as _stage
from kvbaton.sim.drill_stage import moving_between as _moving
from kvbaton.sim.engine_script import make_engine_script
from kvbaton.sim.exhaustive import FLOWS, flow_script, single_faults
from kvbaton.sim.notice_drills import NOTICES
from kvbaton.sim.peer_drills import PEERS
from kvbaton.sim.rank_drills import RANKS
from kvbaton.sim.script import Fault, FaultKind, Script, make_script
from kvbaton.sim.source_drills import SOURCES
from kvbaton.sim.stamp_drills import STAMPS
from kvbaton.sim.target_drills import TARGETS
from kvbaton.sim.timely_drills import TIMELY
from kvbaton.sim.vllm_script import make_vllm_script
from kvbaton.transport.base import LateWrites

__all__ = [
    "CORNERS",
    "DRILLS",
    "EDGES",
    "NOTICES",
    "PEERS",
    "RANKS",
    "SCENES",
    "SOURCES",
    "STAMPS",
    "TARGETS",
    "TIMELY",
    "drill_of_seed",
    "script_of_seed",
]

_FLOW_S = 0.05
"""About how long an undisturbed flow takes when its target has the request."""

_STRAY_FRAMES = frozenset({FaultKind.REPLAY, FaultKind.TWIN, FaultKind.BAD_GRANT, FaultKind.STRAY})
"""Faults that make frames of their own."""


def script_of_seed(seed: int) -> Script:
    """The run of a seed; the same on every machine."""
    return _with_stamps(_with_sockets(_script_of_seed(seed)))


def _script_of_seed(seed: int) -> Script:
    if _has_engines(seed):
        return make_engine_script(seed)
    if _has_vllm(seed):
        return make_vllm_script(seed)
    if not (drills := _drills_of(seed)):
        return make_script(seed)
    rng = random.Random(f"drill {seed}")
    return msgspec.structs.replace(rng.choice(drills)(rng), seed=seed)


def _with_sockets(script: Script) -> Script:
    """Let the control sockets of production carry the messages of some runs with a driver, and of random ones.

    Not where frames come from elsewhere than a peer at its own connection: no other frame would be let in.
    """
    # Fewer of vLLM's: what its plants break has nothing to do with connections, and takes many runs to show.
    share = 0.15 if any(cache.vllm is not None for cache in script.caches) else 0.5
    has_sockets = random.Random(f"sockets {script.seed}").random() < share
    has_strays = any(fault.kind in _STRAY_FRAMES for fault in script.faults)
    if not has_sockets or has_strays or not (script.has_driver or script.seed % 16 == 0):
        return script
    if not script.has_driver:
        # Ranks in processes of their own have no area for aux records.
        lag_s = script.rank_lag_s or 0.001
        script = msgspec.structs.replace(script, has_driver=True, rank_lag_s=lag_s, aux_channel=AuxChannel.CONTROL)
    return msgspec.structs.replace(script, has_sockets=True)


def _with_stamps(script: Script) -> Script:
    """Let targets of one host look at stamps in two thirds of the runs; in one third a source has but one of them."""
    slots = random.Random(f"stamps {script.seed}").choice((0, 1, 64))
    return script if script.stamp_slots or not script.one_host else msgspec.structs.replace(script, stamp_slots=slots)


def drill_of_seed(seed: int) -> str:
    """Which drill the run of a seed is; "random" for none."""
    if _has_engines(seed):
        return "engines"
    if _has_vllm(seed):
        return "vllm"
    drills = _drills_of(seed)
    return random.Random(f"drill {seed}").choice(drills).__name__ if drills else "random"


def _has_engines(seed: int) -> bool:
    """Whether instances run the embedded engine of production: in every sixteenth run, because it needs more time."""
    return seed % 16 == 14


def _has_vllm(seed: int) -> bool:
    """Whether instances run the vLLM connector of production: in every sixteenth run, too."""
    return seed % 16 == 6


def _drills_of(seed: int) -> tuple[Drill, ...]:
    """Of 32 seeds in a row: so many for each list that no drill has far fewer seeds than others."""
    place = seed % 32
    if place in (5, 15, 21):
        return NOTICES + RANKS + TIMELY + STAMPS
    if place in (8, 31):
        return PEERS + TARGETS
    if place == 17:
        return TARGETS
    if place == 29:
        return PEERS
    if place in (7, 23, 24):
        return SOURCES
    if place % 8 == 4:
        return CORNERS
    return EDGES if place % 8 == 2 else {1: SCENES, 3: DRILLS}.get(place % 4, ())


def _answers_to_an_earlier_attempt(rng: random.Random) -> Script:
    """A hand-off ends and is tried again under the same transfer id while the first one's last messages are on their way."""
    request = _request(rng, Mode.PUSH, retries=3, reuse_id=True, retry_after_s=rng.choice((0.1, 0.3)))
    script = msgspec.structs.replace(_stage(rng, writes=True, request=request), step_s=rng.choice((0.05, 0.1)))
    at_s = rng.uniform(*_moving(script))
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET))
    faults = (
        Fault(FaultKind.SLOW, at_s, who="p0", other="d0", for_s=rng.uniform(0.1, 0.3), number=rng.randint(1, 2)),
        Fault(kind, at_s + 1e-4, number=0),
    )
    return msgspec.structs.replace(script, faults=faults)


def _stopped_before(rng: random.Random) -> Script:
    """A target cancels a hand-off, and another one of the same id after it, to which the answers to the first are late."""
    at_s = rng.uniform(0.02, 0.2)
    first = _request(rng, Mode.PUSH, chunk=1)
    again = _request(rng, Mode.PUSH, chunk=1, tokens=6, at_s=at_s + rng.uniform(0.4, 0.7), steal_id=0)
    script = msgspec.structs.replace(_stage(rng, writes=True, request=first), step_s=rng.choice((0.05, 0.1)))
    again_s = again.at_s + rng.uniform(0.1, 0.4)
    faults = (
        Fault(FaultKind.SLOW, at_s, who="p0", other="d0", for_s=0.35, number=rng.randint(2, 3)),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
        Fault(FaultKind.SLOW, again_s, who="d0", other="p0", for_s=0.3, number=2),
        Fault(FaultKind.CANCEL_TARGET, again_s + 1e-4, number=1),
    )
    return msgspec.structs.replace(script, requests=(first, again), faults=faults, router_cancels=0.0)


def _source_releases_unnoticed(rng: random.Random) -> Script:
    """The source frees what is being read, and its target is not notified for a while."""
    request = _request(rng, rng.choice(list(Mode)))
    script = msgspec.structs.replace(_stage(rng, writes=False, request=request), router_cancels=0.0)
    at_s = rng.uniform(*_moving(script))
    faults = (
        Fault(FaultKind.CUT, at_s, who="p0", other="d0", for_s=rng.uniform(0.2, 1.8)),
        Fault(FaultKind.CANCEL_SOURCE, at_s + 1e-4, number=0),
    )
    return msgspec.structs.replace(script, faults=faults)


def _target_gives_up_unnoticed(rng: random.Random) -> Script:
    """The target takes its blocks back while the source writes and gets no message of it."""
    request = _request(rng, Mode.PUSH, retries=1)
    script = msgspec.structs.replace(_stage(rng, writes=True, request=request), step_s=0.2)
    at_s = rng.uniform(*_moving(script))
    faults = (
        Fault(FaultKind.CUT, at_s, who="d0", other="p0", for_s=rng.choice((1.0, 3.0))),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
        Fault(FaultKind.LOSE_REVOKE, at_s, who="d0", number=1),
    )
    return msgspec.structs.replace(script, faults=faults[: rng.randint(2, 3)])


def _restart_with_mail(rng: random.Random) -> Script:
    """A source restarts while grants for its earlier life are still on their way, and the same id is tried again at once."""
    request = _request(rng, Mode.PUSH, retries=3, reuse_id=True, retry_after_s=0.05)
    script = msgspec.structs.replace(_stage(rng, writes=True, request=request), step_s=rng.choice((0.01, 0.1)))
    at_s = rng.uniform(0.002, 0.01)
    faults = (
        Fault(FaultKind.SLOW, at_s, who="d0", other="p0", for_s=1.0, number=rng.randint(1, 2)),
        Fault(FaultKind.RESTART, at_s + rng.uniform(0.0, 0.05), who="p0"),
    )
    # On one host a target notices the death by itself, long before a grant that is late arrives.
    return msgspec.structs.replace(script, faults=faults, one_host=rng.random() < 0.1)


def _cards_of_the_dead(rng: random.Random) -> Script:
    """A source answers its target, dies, and its card arrives when its successor has long been at work for that target."""
    first = _request(rng, Mode.PUSH, retries=0)
    later = tuple(_request(rng, Mode.PUSH, at_s=rng.uniform(0.25, 0.5), retries=2) for _ in range(2))
    script = msgspec.structs.replace(_stage(rng, writes=True, request=first), step_s=rng.choice((0.05, 0.1)))
    slow_s = rng.uniform(0.05, 0.2)
    faults = (
        Fault(FaultKind.SLOW, 0.0, who="p0", other="d0", for_s=slow_s, number=rng.randint(2, 3)),
        Fault(FaultKind.RESTART, slow_s * rng.uniform(0.2, 1.0), who="p0"),
    )
    return msgspec.structs.replace(script, requests=(first, *later), faults=faults)


def _corrupted(rng: random.Random) -> Script:
    """A bit flips on the way; a target that checks every byte notices."""
    request = _request(rng, rng.choice(list(Mode)))
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    writes = request.mode is Mode.PUSH and (script.unfenced_writes or script.late_writes is LateWrites.REVOCABLE)
    fault = Fault(
        FaultKind.CORRUPT, rng.uniform(0.0, _moving(script)[1]), who="p0" if writes else "d0", number=rng.randint(0, 1)
    )
    return msgspec.structs.replace(script, faults=(fault,), integrity=Integrity.FULL)


def _long_queue(rng: random.Random) -> Script:
    """Nothing goes wrong; the target is just full for longer than a source keeps blocks for a silent peer."""
    count = rng.randint(5, 8)
    requests = tuple(_request(rng, rng.choice(list(Mode)), tokens=4, at_s=0.01 * number) for number in range(count))
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return msgspec.structs.replace(script, requests=requests, decode_blocks=8, move_s=0.002, decode_s=2.0)


_STOPPED = (FaultKind.SILENT_ENGINE, FaultKind.STUCK_ENGINE)


def _source_engine_stops(rng: random.Random) -> Script:
    """A prefill engine does nothing for longer than anything waits for it, most often in mid-prefill. Its agents beat."""
    request = _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), decode_delay_s=rng.choice((0.0, 0.005)))
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=request), step_s=0.05)
    fault = Fault(rng.choice(_STOPPED), rng.uniform(0.0, 0.2), who="p0", for_s=36.0)
    return msgspec.structs.replace(script, faults=(fault,), router_cancels=0.3)


def _target_engine_stops(rng: random.Random) -> Script:
    """A decode engine does nothing for as long, while its memory is full and finished prefills are held for it."""
    requests = tuple(_request(rng, rng.choice(list(Mode)), tokens=4, at_s=0.01 * number) for number in range(3))
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    fault = Fault(rng.choice(_STOPPED), rng.uniform(0.0, 1.0), who="d0", for_s=36.0)
    return msgspec.structs.replace(
        script, requests=requests, decode_blocks=4, move_s=0.002, decode_s=2.0, faults=(fault,), router_cancels=0.3
    )


def _replayed(rng: random.Random) -> Script:
    """Frames of earlier attempts arrive again while the same transfer id is tried anew."""
    request = _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), retries=3, reuse_id=True, retry_after_s=0.1)
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.7, request=request), step_s=rng.choice((0.01, 0.05)))
    at_s = rng.uniform(*_moving(script))
    ended = Fault(rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET)), at_s, number=0)
    links = (("p0", "d0"), ("d0", "p0"))
    replays = (Fault(FaultKind.REPLAY, at_s, who=who, other=other, for_s=2.0, number=40) for who, other in links)
    return msgspec.structs.replace(script, faults=(ended, *replays))


def _bad_grants(rng: random.Random) -> Script:
    """Grants with numbers that no target has reached, among those of a few requests."""
    requests = tuple(_request(rng, rng.choice(list(Mode)), at_s=0.1 * number, retries=1) for number in range(rng.randint(1, 3)))
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    fault = Fault(FaultKind.BAD_GRANT, rng.uniform(0.0, 0.1), who="d0", number=rng.randint(1, 3))
    return msgspec.structs.replace(script, requests=requests, faults=(fault,))


def _retracted_under_way(rng: random.Random) -> Script:
    """A prefill is preempted while orders to ranks and their reports are under way; nothing else happens."""
    request = _request(rng, Mode.PUSH, tokens=rng.choice((2, 2, 3, 5)), chunk=1)
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.6, request=request), ranks=rng.choice((1, 1, 2)))
    step_s = rng.choice((0.01, 0.02, 0.05))
    prefill_s = -(-request.tokens // request.chunk) * script.layers * step_s
    preempted = tuple(
        Fault(FaultKind.PREEMPT, prefill_s * rng.uniform(0.3, 1.0), who="p0") for _ in range(rng.choice((1, 1, 2)))
    )
    return msgspec.structs.replace(
        script,
        faults=preempted,
        step_s=step_s,
        move_s=rng.choice((0.01, 0.05)),
        uneven=8.0,
        rank_lag_s=rng.choice((0.02, 0.05, 0.2)),
        integrity=rng.choice((Integrity.OFF, Integrity.OFF, Integrity.FULL)),
    )


def _rank_stands_still(rng: random.Random) -> Script:
    """One rank does nothing for a while, in the middle of a hand-off that is preempted, cancelled, or goes well otherwise."""
    request = _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), retries=rng.choice((0, 1)))
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=request), step_s=0.02, ranks=2)
    at_s = rng.uniform(*_moving(script))
    who = rng.choice(("p0", "d0"))
    paused = Fault(FaultKind.PAUSE_RANK, at_s, who=who, for_s=rng.choice((0.1, 1.0, 5.0)), number=rng.randint(0, 1))
    kind = rng.choice((FaultKind.PREEMPT, FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET, FaultKind.CRASH))
    then = Fault(kind, at_s + rng.uniform(0.0, 0.1), who="p0", for_s=1.0)
    return msgspec.structs.replace(script, faults=(paused, then), rank_lag_s=rng.choice((0.001, 0.05)))


def _cancelled_while_granted(rng: random.Random) -> Script:
    """A source ends what its target has queued, while the grant is on its way; the same id is tried again at once."""
    first = _request(rng, Mode.PUSH, tokens=4, retries=0)
    second = _request(rng, Mode.PUSH, tokens=4, at_s=0.05, retries=3, reuse_id=True, retry_after_s=rng.choice((0.005, 0.05)))
    script = _stage(rng, writes=True, request=first)
    freed_s = rng.uniform(0.8, 1.2)
    slow_s = freed_s - rng.uniform(0.0, 0.2)
    faults = (
        Fault(FaultKind.SLOW, slow_s, who="d0", other="p0", for_s=0.4, number=1),
        Fault(FaultKind.SLOW, slow_s, who="p0", other="d0", for_s=0.4, number=1),
        Fault(FaultKind.CANCEL_SOURCE, freed_s - rng.uniform(0.0, 0.2), number=1),
    )
    return msgspec.structs.replace(
        script, requests=(first, second), decode_blocks=4, decode_s=freed_s - 0.3, faults=faults, router_cancels=0.0
    )


def _released_again(rng: random.Random) -> Script:
    """The release of one hand-off arrives again while the next one of the same id is being confirmed."""
    request = _request(rng, rng.choice(list(Mode)), tokens=2, chunk=2, retries=0)
    again = msgspec.structs.replace(request, at_s=rng.uniform(0.3, 0.6), steal_id=0)
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    slow = Fault(FaultKind.SLOW, 0.25, who="p0", other="d0", for_s=1.0, number=1)
    replays = Fault(FaultKind.REPLAY, again.at_s, who="d0", other="p0", for_s=1.0, number=60)
    return msgspec.structs.replace(script, requests=(request, again), faults=(slow, replays))


def _slow_prefill(rng: random.Random) -> Script:
    """Nothing goes wrong; a prefill just takes longer than a silent peer is waited for. Heartbeats show that it goes on."""
    request = _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), decode_delay_s=rng.choice((0.0, 0.005, 1.0)))
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    steps = -(-request.tokens // request.chunk) * script.layers
    return msgspec.structs.replace(
        script, step_s=rng.uniform(3.0, 6.0) / steps, move_s=0.002, integrity=rng.choice(list(Integrity)), aux_channel=_aux(rng)
    )


def _slow_moves(rng: random.Random) -> Script:
    """Nothing goes wrong; the bytes just take longer than a hand-off without progress lives."""
    request = _request(rng, rng.choice(list(Mode)), tokens=6, chunk=rng.choice((1, 6)))
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    return msgspec.structs.replace(script, move_s=0.3, layers=2, integrity=rng.choice(list(Integrity)), aux_channel=_aux(rng))


def _neighbour_fenced(rng: random.Random) -> Script:
    """One of two sources does not stop when it is asked to, and is fenced. What the other one hands over goes on."""
    first = _request(rng, Mode.PUSH)
    others = tuple(_request(rng, rng.choice(list(Mode)), prefill=1, at_s=rng.uniform(0.0, 1.5)) for _ in range(3))
    script = msgspec.structs.replace(_stage(rng, writes=True, request=first), prefills=2, step_s=0.05)
    at_s = rng.uniform(*_moving(script))
    faults = (
        Fault(FaultKind.CUT, at_s, who="d0", other="p0", for_s=rng.choice((1.0, 3.0))),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
    )
    return msgspec.structs.replace(script, requests=(first, *others), faults=faults, ranks=rng.choice((1, 2)))


def _refused_and_taken(rng: random.Random) -> Script:
    """A target refuses a request, its notice is late or lost, and the same id is tried again."""
    request = _request(rng, Mode.PUSH, retries=2, reuse_id=True, retry_after_s=rng.choice((0.01, 0.05, 0.3)))
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    refused = Fault(FaultKind.REFUSE, 0.0, who="d0", number=1)
    lost = Fault(rng.choice((FaultKind.LOSE, FaultKind.DOUBLE)), 0.0, who="d0", other="p0", number=rng.randint(1, 3))
    return msgspec.structs.replace(script, faults=(refused, lost)[: rng.randint(1, 2)], step_s=0.05)


def _much_to_remember(rng: random.Random) -> Script:
    """Nothing goes wrong; there are just more hand-offs and peers than the instances remember."""
    requests = tuple(
        _request(rng, rng.choice(list(Mode)), tokens=2, prefill=rng.randrange(2), decode=rng.randrange(2), at_s=0.15 * number)
        for number in range(16)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return msgspec.structs.replace(
        script, requests=requests, prefills=2, decodes=2, move_s=0.002, step_s=0.002, is_forgetful=True, aux_channel=_aux(rng)
    )


def _aux(rng: random.Random) -> AuxChannel:
    return rng.choice(list(AuxChannel))


def _one_fault(rng: random.Random) -> Script:
    """A flow of `kvbaton sim --exhaustive`, and one of its single faults, at any time."""
    script = flow_script(rng.choice(list(FLOWS)))
    faults = list(single_faults(script, -1))
    lost = [fault for fault in faults if fault.kind is FaultKind.LOSE]
    fault = rng.choice(lost if rng.random() < 0.6 else faults)
    at_s = rng.uniform(0.0, script.requests[0].decode_delay_s + _FLOW_S)
    return msgspec.structs.replace(script, faults=(msgspec.structs.replace(fault, at_s=at_s),))


def _both_full(rng: random.Random) -> Script:
    """Nothing goes wrong; both pools hold one request, and the target gets its halves in another order than the source."""
    delays_s = [0.01, *(rng.choice((0.0, 0.05)) for _ in range(rng.randint(1, 3)))]
    requests = tuple(
        _request(rng, Mode.PUSH, tokens=3, at_s=0.002 * number, decode_delay_s=delay_s)
        for number, delay_s in enumerate(delays_s)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return msgspec.structs.replace(script, requests=requests, prefill_blocks=3, decode_blocks=3, move_s=0.002, step_s=0.002)


def _one_lost(rng: random.Random) -> Script:
    """One message of a slower hand-off is lost."""
    request = _request(rng, rng.choice(list(Mode)), tokens=rng.randint(2, 4), decode_delay_s=rng.choice((0.0, 0.005, 0.3)))
    script = _stage(rng, writes=rng.random() < 0.6, request=request)
    who, other = rng.choice((("p0", "d0"), ("d0", "p0")))
    lost = Fault(FaultKind.LOSE, rng.uniform(0.0, 1.1) * _moving(script)[1], who=who, other=other, number=1)
    return msgspec.structs.replace(
        script, faults=(lost,), move_s=rng.choice((0.002, 0.02)), integrity=rng.choice(list(Integrity)), aux_channel=_aux(rng)
    )


def _target_first(rng: random.Random) -> Script:
    """The source gets its half of a request later than the target: grants wait there. The client may leave in between."""
    requests = tuple(
        _request(
            rng,
            Mode.PUSH,
            tokens=rng.randint(2, 4),
            at_s=0.05 * number,
            prefill_delay_s=rng.choice((0.01, 0.1, 0.5)),
            retries=rng.choice((0, 2)),
            reuse_id=rng.random() < 0.5,
            retry_after_s=rng.choice((0.05, 0.3)),
        )
        for number in range(rng.randint(1, 3))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    kind = rng.choice((FaultKind.CANCEL_TARGET, FaultKind.CANCEL_TARGET, FaultKind.CANCEL_SOURCE))
    faults = (Fault(kind, rng.uniform(0.0, 0.6), number=0),)[: rng.randint(0, 1)]
    return msgspec.structs.replace(script, requests=requests, faults=faults, move_s=0.01, router_cancels=rng.choice((0.0, 0.7)))


def _declined(rng: random.Random) -> Script:
    """A target refuses one hand-off, or all of a request, before or after the source has its half. Notices may be lost.

    Another request, which the target has yet to get, goes on.
    """
    delay_s = rng.choice((0.0, 0.0, 0.05, 0.5))
    is_whole = rng.random() < 0.6
    count = rng.randint(2, 4) if is_whole else rng.randint(1, 2)
    at_s = rng.choice((0.0, 0.3))
    neighbour = _request(rng, Mode.PUSH, tokens=2, at_s=at_s, decode_delay_s=rng.choice((0.4, 0.6)))
    requests = tuple(
        _request(
            rng,
            Mode.PUSH,
            tokens=rng.randint(2, 4),
            at_s=at_s,
            prefill_delay_s=delay_s,
            decode_delay_s=0.0 if delay_s else rng.choice((0.0, 0.005, 0.3)),
            transfer_id="whole" if is_whole else None,
            prompt_index=number if is_whole else 0,
        )
        for number in range(count)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    refused = Fault(FaultKind.REFUSE, max(0.0, at_s - 0.001), who="d0", number=1, is_whole=is_whole)
    lost = Fault(FaultKind.LOSE, at_s, who=rng.choice(("d0", "d0", "p0")), number=rng.randint(1, 2))
    lost = msgspec.structs.replace(lost, other="p0" if lost.who == "d0" else "d0")
    return msgspec.structs.replace(
        script,
        requests=(*requests, neighbour),
        faults=(refused, lost)[: rng.randint(1, 2)],
        step_s=0.02,
        router_cancels=0.0,
    )


def _two_targets(rng: random.Random) -> Script:
    """A router in doubt sends one request to two targets: the source takes one of them. Either may be cancelled."""
    requests = tuple(
        _request(
            rng,
            Mode.PUSH,
            tokens=rng.randint(2, 4),
            at_s=0.3 * number,
            decode=number % 2,
            second_decode=1 - number % 2,
            decode_delay_s=rng.choice((0.0, 0.05)),
            prefill_delay_s=rng.choice((0.0, 0.0, 0.05)),
        )
        for number in range(rng.randint(1, 3))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    slow = Fault(FaultKind.SLOW, 0.0, who="d0", other="p0", for_s=0.3, number=1)
    return msgspec.structs.replace(
        script, requests=requests, decodes=2, faults=(slow,)[: rng.randint(0, 1)], move_s=0.01, step_s=0.02, router_cancels=0.0
    )


def _granted_anew(rng: random.Random) -> Script:
    """A target ends a hand-off, its source is not notified, and the target grants blocks for the same id again."""
    request = _request(rng, Mode.PUSH, tokens=6, chunk=1, retries=3, reuse_id=True, retry_after_s=rng.choice((0.01, 0.1)))
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=request), step_s=rng.choice((0.05, 0.1)))
    at_s = rng.uniform(*_moving(script)) * 0.7
    faults = (
        Fault(FaultKind.LOSE, at_s, who="d0", other="p0", number=rng.choice((1, 1, 2))),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
    )
    return msgspec.structs.replace(script, faults=faults, router_cancels=0.0)


def _cancelled_and_tried_again(rng: random.Random) -> Script:
    """A client leaves and comes back with the same transfer id: what is left of the first attempt does no harm to the next."""
    request = _request(
        rng,
        rng.choice(list(Mode)),
        retries=3,
        retries_once=True,
        reuse_id=True,
        retry_after_s=rng.choice((0.02, 0.3)),
        decode_delay_s=rng.choice((0.0, 0.1)),
    )
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=request), move_s=0.01, step_s=0.02)
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET))
    cancelled = Fault(kind, rng.uniform(0.0, 1.2) * _moving(script)[1], number=0)
    who, other = rng.choice((("p0", "d0"), ("d0", "p0")))
    replayed = Fault(FaultKind.REPLAY, cancelled.at_s + 0.05, who=who, other=other, for_s=1.0, number=rng.choice((0, 30)))
    return msgspec.structs.replace(script, faults=(cancelled, replayed)[: rng.randint(1, 2)])


def _replayed_afterwards(rng: random.Random) -> Script:
    """Everything that was sent for a few hand-offs arrives again, when some are over and others go on."""
    requests = tuple(_request(rng, Mode.PUSH, tokens=2, at_s=0.2 * number) for number in range(rng.randint(2, 4)))
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    links = (("p0", "d0"), ("d0", "p0"))
    at_s = rng.uniform(0.3, 1.0)
    faults = tuple(Fault(FaultKind.REPLAY, at_s, who=who, other=other, for_s=rng.choice((0.1, 1.0))) for who, other in links)
    return msgspec.structs.replace(script, requests=requests, faults=faults, move_s=0.01, one_host=False)


def _queue_full(rng: random.Random) -> Script:
    """A transport takes nothing for a while, or for longer than a hand-off without progress lives."""
    request = _request(rng, rng.choice(list(Mode)), tokens=rng.randint(2, 4))
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=request), ranks=rng.choice((1, 2)))
    is_writing = request.mode is Mode.PUSH and (script.unfenced_writes or script.late_writes is LateWrites.REVOCABLE)
    who = "p0" if is_writing else "d0"
    full = Fault(
        FaultKind.QUEUE_FULL,
        rng.uniform(0.0, 0.8) * _moving(script)[1],
        who=who,
        for_s=rng.choice((0.1, 0.4, 9.0)),
        number=rng.randint(0, 1),
    )
    return msgspec.structs.replace(script, faults=(full,), rank_lag_s=rng.choice((0.0, 0.001)))


def _copy_fails(rng: random.Random) -> Script:
    """One batch of a copy fails while others of it are in flight, and more is announced."""
    request = _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=6, chunk=1, retries=1)
    script = msgspec.structs.replace(
        _stage(rng, writes=rng.random() < 0.5, request=request), step_s=0.02, ranks=rng.choice((1, 2))
    )
    at_s = rng.uniform(0.0, 0.8) * _moving(script)[1]
    faults = tuple(Fault(FaultKind.COPY_FAILS, at_s, who=who, number=rng.randint(0, 1)) for who in ("p0", "d0"))
    return msgspec.structs.replace(script, faults=faults, uneven=8.0, rank_lag_s=rng.choice((0.0, 0.01, 0.05)))


def _retracted_twice(rng: random.Random) -> Script:
    """A prefill is preempted again while its target still waits for the reads of what was retracted first."""
    request = _request(rng, Mode.PUSH, tokens=rng.randint(3, 6), chunk=1)
    script = msgspec.structs.replace(_stage(rng, writes=False, request=request), step_s=0.01, move_s=rng.choice((0.05, 0.1)))
    first_s = rng.uniform(0.02, 0.05)
    preempted = [Fault(FaultKind.PREEMPT, first_s, who="p0")]
    preempted += [Fault(FaultKind.PREEMPT, first_s + rng.uniform(0.01, 0.2), who="p0") for _ in range(rng.randint(1, 2))]
    return msgspec.structs.replace(
        script,
        faults=tuple(preempted),
        uneven=8.0,
        ranks=rng.choice((1, 2)),
        rank_lag_s=rng.choice((0.0, 0.01)),
        integrity=rng.choice((Integrity.OFF, Integrity.FULL)),
    )


def _left_in_the_queue(rng: random.Random) -> Script:
    """The engine of a source never gets to a request, and its target is gone: only the queue's own limit ends that."""
    request = _request(rng, Mode.PUSH, tokens=2, decode_delay_s=0.01)
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    gone = Fault(FaultKind.CRASH, rng.choice((0.0, 0.02)), who="d0", for_s=36.0)
    stuck = Fault(FaultKind.STUCK_ENGINE, 0.0, who="p0", for_s=36.0)
    return msgspec.structs.replace(script, faults=(stuck, gone), router_cancels=0.0)


def _few_cards(rng: random.Random) -> Script:
    """Nothing goes wrong; there are just more peers than cards are kept of them, one after the other."""
    requests = tuple(
        _request(rng, rng.choice(list(Mode)), tokens=2, prefill=rng.randrange(4), decode=rng.randrange(4), at_s=0.3 * number)
        for number in range(16)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return msgspec.structs.replace(
        script,
        requests=requests,
        prefills=4,
        decodes=4,
        move_s=0.002,
        step_s=0.002,
        most_peers=3,
        is_forgetful=rng.random() < 0.5,
    )


def _crowd(rng: random.Random) -> Script:
    """A hundred requests between eight sources and eight targets that remember little; some are cancelled or preempted."""
    requests = tuple(
        _request(
            rng,
            rng.choice(list(Mode)),
            tokens=rng.randint(1, 3),
            prefill=rng.randrange(8),
            decode=rng.randrange(8),
            at_s=rng.uniform(0.0, 1.0),
            decode_delay_s=rng.choice((0.0, 0.05)),
        )
        for _ in range(100)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    kinds = (FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET)
    cancelled = tuple(Fault(rng.choice(kinds), rng.uniform(0.0, 1.2), number=rng.randrange(100)) for _ in range(10))
    preempted = tuple(Fault(FaultKind.PREEMPT, rng.uniform(0.0, 1.2), who=f"p{rng.randrange(8)}") for _ in range(5))
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(*cancelled, *preempted)[:: rng.choice((1, 100))],
        prefills=8,
        decodes=8,
        ranks=1,
        layers=1,
        prefill_blocks=12,
        decode_blocks=8,
        move_s=0.002,
        step_s=0.01,
        is_forgetful=True,
    )


def _strays(rng: random.Random) -> Script:
    """Nothing goes wrong; among the messages are just some about other grants, generations and counts, or of third parties."""
    requests = tuple(
        _request(
            rng,
            rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)),
            tokens=rng.randint(2, 4),
            prefill=rng.randrange(2),
            decode=rng.randrange(2),
            at_s=0.1 * number,
            decode_delay_s=rng.choice((0.0, 0.005, 0.1)),
        )
        for number in range(rng.randint(2, 5))
    )
    script = _stage(rng, writes=rng.random() < 0.6, request=requests[0])
    faults = tuple(Fault(FaultKind.STRAY, 0.0, who=who, number=rng.randint(2, 8)) for who in ("p0", "p1", "d0", "d1"))
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.0, 0.3), who="p0")
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(*faults, preempted)[: rng.randint(4, 5)],
        prefills=2,
        decodes=2,
        integrity=rng.choice(list(Integrity)),
        aux_channel=_aux(rng),
        rank_lag_s=rng.choice((0.0, 0.01, 0.05)),
        move_s=rng.choice((0.01, 0.05)),
        step_s=rng.choice((0.01, 0.05)),
        decode_blocks=rng.choice((4, 24)),
        decode_s=0.5,
    )


def _all_cached(rng: random.Random) -> Script:
    """Nothing goes wrong; of later requests the target has everything, or all but a token, in its cache."""
    tokens = rng.randint(2, 4)
    requests = tuple(
        _request(rng, rng.choice(list(Mode)), tokens=tokens, shared=tokens - (number == 2), at_s=0.4 * number)
        for number in range(3)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return msgspec.structs.replace(
        script, requests=requests, move_s=0.01, integrity=rng.choice(list(Integrity)), aux_channel=_aux(rng)
    )


def _one_queue_full(rng: random.Random) -> Script:
    """The transport of one rank takes nothing any more, while that of the other one goes on slowly."""
    request = _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=6, chunk=1)
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=request), ranks=2, layers=2, move_s=0.3)
    is_writing = request.mode is Mode.PUSH and (script.unfenced_writes or script.late_writes is LateWrites.REVOCABLE)
    at_s = _moving(script)[0] + rng.uniform(0.0, 0.5)
    full = Fault(FaultKind.QUEUE_FULL, at_s, who="p0" if is_writing else "d0", for_s=9.0, number=rng.randint(0, 1))
    return msgspec.structs.replace(script, faults=(full,), step_s=0.05, rank_lag_s=rng.choice((0.0, 0.001)))


def _dies_on_one_host(rng: random.Random) -> Script:
    """One side dies and does not come back for long; on one host the other side need not wait for a limit to notice."""
    count = rng.randint(1, 3)
    requests = tuple(
        _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=6, chunk=1, at_s=0.02 * number)
        for number in range(count)
    )
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=requests[0]), one_host=True)
    dies = Fault(FaultKind.CRASH, rng.uniform(0.0, 0.3), who=rng.choice(("p0", "p0", "d0")), for_s=36.0)
    return msgspec.structs.replace(
        script, requests=requests, faults=(dies,), step_s=0.1, decode_blocks=rng.choice((6, 24)), router_cancels=0.0
    )


def _rank_dies(rng: random.Random) -> Script:
    """One rank of either side dies with orders and reports in flight, and takes its instance along when that notices it."""
    request = _request(
        rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), retries=2, retry_after_s=0.3, reuse_id=rng.random() < 0.5
    )
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.5, request=request), step_s=0.02, ranks=2)
    dies = Fault(
        FaultKind.CRASH_RANK,
        rng.uniform(0.0, 1.0) * _moving(script)[1],
        who=rng.choice(("p0", "d0")),
        for_s=rng.choice((0.5, 5.0)),
        number=rng.randint(0, 1),
    )
    preempted = Fault(FaultKind.PREEMPT, dies.at_s - 0.005, who="p0")
    return msgspec.structs.replace(
        script,
        faults=(dies, preempted)[: rng.randint(1, 2)],
        rank_lag_s=rng.choice((0.005, 0.05)),
        integrity=rng.choice((Integrity.OFF, Integrity.FULL)),
    )


def _taken_after_all(rng: random.Random) -> Script:
    """A target refuses a request, its notices are lost, and it takes the next try: then no notice is repeated."""
    request = _request(rng, Mode.PUSH, retries=2, reuse_id=True, retry_after_s=rng.choice((0.01, 0.04)))
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    refused = Fault(FaultKind.REFUSE, 0.0, who="d0", number=1)
    lost = Fault(FaultKind.LOSE, 0.0, who="d0", other="p0", number=rng.randint(1, 3))
    return msgspec.structs.replace(script, faults=(refused, lost), step_s=0.1)


def _on_threads(rng: random.Random) -> Script:
    """Any other drill, with engines and agents on threads of their own; the agent's may stand still for a while."""
    script = rng.choice(SCENES + DRILLS)(rng)
    while script.aux_channel is not AuxChannel.CONTROL:
        script = rng.choice(SCENES + DRILLS)(rng)
    return msgspec.structs.replace(script, has_driver=True, rank_lag_s=script.rank_lag_s or rng.choice((0.0005, 0.002)))


def _agent_stands_still(rng: random.Random) -> Script:
    """The agent's thread of one side does nothing for a while: calls of its engine, frames and reports pile up."""
    requests = tuple(
        _request(rng, rng.choice(list(Mode)), tokens=rng.randint(3, 6), chunk=1, at_s=0.02 * number)
        for number in range(rng.randint(1, 4))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    at_s = rng.choice((0.0, 0.015, rng.uniform(0.0, 0.2)))
    stalls = Fault(FaultKind.STALL_AGENT, at_s, who=rng.choice(("p0", "p0", "d0")), for_s=rng.choice((0.1, 0.3)))
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(stalls,),
        has_driver=True,
        rank_lag_s=0.001,
        step_s=rng.choice((0.002, 0.01)),
        move_s=0.005,
        integrity=rng.choice((Integrity.OFF, Integrity.FULL)),
    )


def _together(rng: random.Random) -> Script:
    """Nothing goes wrong; several requests for one pair, whose instances have not met, come at the same moment."""
    requests = tuple(_request(rng, Mode.PUSH, tokens=rng.randint(1, 4)) for _ in range(rng.randint(2, 4)))
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return msgspec.structs.replace(script, requests=requests, move_s=0.01, aux_channel=_aux(rng))


def _out_of_order(rng: random.Random) -> Script:
    """Messages of a source overtake each other, and none is lost."""
    request = _request(rng, Mode.PUSH, tokens=6, chunk=rng.choice((1, 2)))
    script = _stage(rng, writes=rng.random() < 0.6, request=request)
    slow = Fault(FaultKind.SLOW, 0.004, who="p0", other="d0", for_s=1.5, number=1)
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.05, 0.4), who="p0")
    return msgspec.structs.replace(
        script,
        faults=(slow, preempted)[: rng.randint(1, 2)],
        step_s=rng.choice((0.02, 0.05)),
        move_s=rng.choice((0.01, 0.05)),
        integrity=rng.choice((Integrity.OFF, Integrity.FULL)),
        rank_lag_s=rng.choice((0.0, 0.0, 0.02)),
    )


def _aux_fails(rng: random.Random) -> Script:
    """Where the source writes, a target posts nothing but the read of the aux record. That fails, or is corrupted."""
    requests = tuple(_request(rng, Mode.PUSH, tokens=rng.randint(2, 4), at_s=0.1 * number) for number in range(2))
    script = _stage(rng, writes=True, request=requests[0])
    kind = rng.choice((FaultKind.COPY_FAILS, FaultKind.CORRUPT, FaultKind.QUEUE_FULL))
    fault = Fault(kind, 0.0, who="d0", number=0, for_s=0.4)
    return msgspec.structs.replace(script, requests=requests, faults=(fault,), move_s=0.01, aux_channel=AuxChannel.DATA)


def _stolen_id(rng: random.Random) -> Script:
    """Two clients choose one transfer id for different prompts, each with a target of its own: one of them is served."""
    delays_s = {"prefill_delay_s": rng.choice((0.0, 0.1)), "decode_delay_s": rng.choice((0.0, 0.3))}
    first = _request(rng, Mode.PUSH, tokens=rng.randint(2, 4), transfer_id="same", **delays_s)
    again = _request(
        rng, Mode.PUSH, tokens=rng.randint(2, 4), decode=1, at_s=rng.choice((0.0, 0.05, 0.2)), prefill_delay_s=1.0, steal_id=0
    )
    again = msgspec.structs.replace(again, transfer_id="same")
    script = _stage(rng, writes=rng.random() < 0.5, request=first)
    return msgspec.structs.replace(
        script,
        requests=(first, again),
        decodes=2,
        decode_blocks=rng.choice((3, 24)),
        step_s=0.05,
        move_s=0.01,
        router_cancels=0.0,
    )


def _granted_unnoticed(rng: random.Random) -> Script:
    """A target that was full for a while has blocks at last, and its grants are lost: its source beats without one."""
    first = _request(rng, Mode.PUSH, tokens=4)
    second = _request(rng, Mode.PUSH, tokens=4, at_s=0.01)
    script = _stage(rng, writes=rng.random() < 0.5, request=first)
    freed_s = rng.uniform(0.8, 1.0)
    cut = Fault(FaultKind.CUT, freed_s - 0.2, who="d0", other="p0", for_s=rng.choice((0.45, 1.2)))
    return msgspec.structs.replace(
        script, requests=(first, second), faults=(cut,), decode_blocks=4, decode_s=freed_s - 0.2, move_s=0.01, step_s=0.01
    )


def _declined_when_parked(rng: random.Random) -> Script:
    """A target has granted one prompt of a request, which its source has yet to get, when it refuses the request as a whole."""
    delay_s = rng.choice((0.3, 0.6))
    requests = tuple(
        _request(
            rng,
            Mode.PUSH,
            tokens=rng.randint(2, 4),
            at_s=0.06 * number,
            prefill_delay_s=delay_s,
            transfer_id="whole",
            prompt_index=number,
        )
        for number in range(3)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    refused = Fault(FaultKind.REFUSE, rng.choice((0.03, 0.09)), who="d0", number=1, is_whole=True)
    return msgspec.structs.replace(script, requests=requests, faults=(refused,), step_s=0.02, router_cancels=0.0)


def _one_rank_fences_late(rng: random.Random) -> Script:
    """A source does not stop when it is asked to, and of the ranks of its target one is late with the fence."""
    request = _request(rng, Mode.PUSH)
    script = msgspec.structs.replace(_stage(rng, writes=True, request=request), step_s=0.2, ranks=2)
    at_s = rng.uniform(*_moving(script))
    faults = (
        Fault(FaultKind.CUT, at_s, who="d0", other="p0", for_s=3.0),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
        Fault(FaultKind.PAUSE_RANK, at_s + 0.3, who="d0", for_s=rng.choice((0.4, 1.5)), number=rng.randint(0, 1)),
    )
    return msgspec.structs.replace(script, faults=faults, rank_lag_s=rng.choice((0.01, 0.05)), router_cancels=0.0)


def _stops_for_long(rng: random.Random) -> Script:
    """A hand-off ends while a rank stands still for longer than any limit: its blocks wait for that rank, and for no clock."""
    request = _request(rng, Mode.PUSH, tokens=6, chunk=1)
    script = msgspec.structs.replace(_stage(rng, writes=rng.random() < 0.7, request=request), step_s=0.02, ranks=2)
    at_s = rng.uniform(0.03, 0.12)
    paused = Fault(FaultKind.PAUSE_RANK, at_s, who=rng.choice(("p0", "p0", "d0")), for_s=9.0, number=rng.randint(0, 1))
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET))
    then = Fault(kind, at_s + rng.uniform(0.0, 0.05), number=0)
    return msgspec.structs.replace(script, faults=(paused, then), rank_lag_s=rng.choice((0.001, 0.05)))


def _strangers(rng: random.Random) -> Script:
    """One instance serves another model: what is sent between it and the others fails by name at once, the rest goes on."""
    requests = tuple(
        _request(
            rng,
            rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)),
            tokens=rng.randint(2, 4),
            prefill=rng.randrange(2),
            decode=rng.randrange(2),
            at_s=rng.choice((0.0, 0.1)) * number,
            decode_delay_s=rng.choice((0.0, 0.005, 0.1)),
            prefill_delay_s=rng.choice((0.0, 0.0, 0.1)),
        )
        for number in range(rng.randint(3, 6))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    refused = Fault(FaultKind.REFUSE, rng.choice((0.0, 0.1)), who=rng.choice(("d0", "d1")), number=rng.randint(1, 2))
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(refused,)[: rng.randint(0, 1)],
        prefills=2,
        decodes=2,
        strangers=(rng.choice(("p0", "p1", "d0", "d1")),),
        move_s=0.01,
        router_cancels=0.0,
    )


def _comes_back_as_another(rng: random.Random) -> Script:
    """A source restarts with another model, while requests for it are refused at their target, or wait there."""
    requests = tuple(
        _request(
            rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=2, prefill=rng.choice((0, 0, 0, 1)), at_s=0.12 * number
        )
        for number in range(8)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    faults = (
        Fault(FaultKind.RESTART, rng.uniform(0.1, 0.4), who="p0"),
        Fault(FaultKind.REFUSE, rng.uniform(0.0, 0.5), who="d0", number=rng.randint(1, 2)),
        Fault(FaultKind.REFUSE, rng.uniform(0.3, 0.8), who="d0", number=1),
        Fault(FaultKind.CUT, rng.uniform(0.0, 0.5), who="d0", other="p0", for_s=rng.choice((0.1, 0.3))),
    )
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=faults[: rng.randint(2, 4)],
        prefills=2,
        strangers=("p0+",),
        move_s=0.01,
        step_s=0.005,
        one_host=rng.random() < 0.3,
        router_cancels=0.0,
    )


def _late_cards(rng: random.Random) -> Script:
    """A source answers and dies, and its card is late. Meanwhile requests name its successor, or are refused."""
    first = _request(rng, Mode.PUSH, tokens=3, retries=rng.choice((0, 1)), retry_after_s=0.3)
    later = tuple(
        _request(rng, rng.choice((Mode.PULL, Mode.PULL, Mode.PUSH)), tokens=2, at_s=rng.uniform(0.22, 0.6))
        for _ in range(rng.randint(2, 4))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=first)
    if rng.random() < 0.5:
        # It names the process that is about to die.
        later += (_request(rng, Mode.PULL, tokens=1, decode_delay_s=rng.uniform(0.25, 0.8)),)
    is_cut = rng.random() < 0.7
    slow_s = 0.008 if is_cut else rng.uniform(0.05, 0.15)
    faults = (
        Fault(FaultKind.SLOW, 0.0, who="p0", other="d0", for_s=slow_s, number=rng.randint(1, 2)),
        Fault(FaultKind.RESTART, slow_s * (1.0 if is_cut else rng.uniform(0.3, 1.0)), who="p0"),
        Fault(FaultKind.CUT, slow_s + (0.0 if is_cut else 0.15), who="d0", other="p0", for_s=rng.choice((0.3, 0.6, 1.2))),
        Fault(FaultKind.REFUSE, rng.uniform(0.0, 0.6), who="d0", number=1),
        Fault(FaultKind.REFUSE, rng.uniform(0.2, 0.7), who="d0", number=1),
    )
    count = rng.randint(3, 5) if is_cut else rng.randint(2, 5)
    return msgspec.structs.replace(
        script,
        requests=(first, *later),
        faults=faults[:count],
        one_host=rng.random() < 0.2,
        step_s=0.002,
        move_s=0.01,
        router_cancels=rng.choice((0.0, 0.7)),
    )


def _notices_of_the_dead(rng: random.Random) -> Script:
    """A target refuses requests of a source that has died, and of another one that it does not reach: the first is given up
    when its successor answers, the other is notified in the end.
    """
    known = tuple(_request(rng, Mode.PUSH, tokens=1, prefill=number) for number in range(2))
    refused = tuple(
        _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=2, prefill=number % 2, at_s=0.3 + 0.02 * number)
        for number in range(rng.randint(2, 5))
    )
    later = _request(rng, Mode.PUSH, tokens=2, at_s=rng.uniform(0.5, 0.7))
    script = _stage(rng, writes=rng.random() < 0.5, request=known[0])
    faults = (
        Fault(FaultKind.RESTART, rng.uniform(0.28, 0.34), who="p0"),
        Fault(FaultKind.REFUSE, 0.25, who="d0", number=1),
        Fault(FaultKind.REFUSE, 0.25, who="d0", number=1),
        Fault(FaultKind.REFUSE, 0.25, who="d0", number=1),
        Fault(FaultKind.CUT, 0.25, who="d0", other="p1", for_s=rng.choice((0.5, 1.0))),
        Fault(FaultKind.CUT, 0.25, who="p1", other="d0", for_s=0.5),
    )
    return msgspec.structs.replace(
        script,
        requests=(*known, *refused, later),
        faults=faults[: rng.randint(3, 6)],
        prefills=2,
        one_host=rng.random() < 0.3,
        move_s=0.005,
        step_s=0.005,
        router_cancels=0.0,
    )


def _neighbour_dies(rng: random.Random) -> Script:
    """One of two sources restarts, and is replaced or found dead. What the other one hands over goes on."""
    long = tuple(_request(rng, Mode.PUSH, tokens=6, chunk=1, prefill=1, at_s=0.1 * number) for number in range(2))
    others = tuple(
        _request(rng, rng.choice(list(Mode)), tokens=rng.choice((1, 6)), chunk=1, at_s=at_s) for at_s in (0.0, 0.05, 0.5, 0.7)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=long[0])
    dies = Fault(rng.choice((FaultKind.RESTART, FaultKind.CRASH)), rng.uniform(0.1, 0.45), who="p0", for_s=2.0)
    return msgspec.structs.replace(
        script,
        requests=(*long, *others),
        faults=(dies,),
        prefills=2,
        layers=2,
        step_s=0.1,
        move_s=rng.choice((0.02, 0.1)),
        rank_lag_s=rng.choice((0.0, 0.01)),
        router_cancels=0.0,
    )


def _busy_peers(rng: random.Random) -> Script:
    """More peers than cards are kept of them, while hand-offs with some go on: their cards stay, the longest unused goes."""
    long = _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=6, chunk=1)
    others = tuple(
        _request(
            rng, rng.choice(list(Mode)), tokens=1, prefill=rng.randint(1, 3), decode=rng.randrange(3), at_s=0.05 + 0.45 * number
        )
        for number in range(8)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=long)
    return msgspec.structs.replace(
        script,
        requests=(long, *others),
        prefills=4,
        decodes=3,
        layers=2,
        move_s=0.02,
        step_s=0.12,
        most_peers=rng.choice((2, 3)),
    )


def _no_room_for_peers(rng: random.Random) -> Script:
    """So few cards are kept that a peer is refused while hand-offs with others go on; later ones are taken."""
    requests = tuple(
        _request(rng, Mode.PUSH, tokens=3, prefill=rng.randrange(3), decode=rng.randrange(2), at_s=0.03 * number, retries=2)
        for number in range(5)
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    names = ("p0", "p1", "p2", "d0", "d1")
    excuses = tuple(Fault(FaultKind.COPY_FAILS, 0.0, who=name) for name in names)
    refused = tuple(Fault(FaultKind.REFUSE, rng.uniform(0.0, 0.2), who=name, number=1) for name in names[3:])
    cut = Fault(FaultKind.CUT, rng.uniform(0.0, 0.2), who=rng.choice(names[3:]), other=rng.choice(names[:3]), for_s=0.3)
    return msgspec.structs.replace(
        script, requests=requests, faults=(*excuses, *refused, cut), prefills=3, decodes=2, step_s=0.02, most_peers=1
    )


def _forgotten_meanwhile(rng: random.Random) -> Script:
    """A source that keeps one card has forgotten a target, which is about to notify another source, and asks for its card."""
    ends = ((1, 0, 0.0), (1, 0, 0.2), (0, 0, 0.3), (0, 1, 0.45), (0, 0, 0.6))
    requests = tuple(
        _request(rng, Mode.PUSH, tokens=rng.randint(1, 2), prefill=prefill, decode=decode, at_s=at_s)
        for prefill, decode, at_s in ends
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    faults = (
        Fault(FaultKind.REFUSE, 0.15, who="d0", number=1),
        Fault(FaultKind.CUT, 0.15, who="d0", other="p1", for_s=rng.choice((0.6, 1.2))),
    )
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=faults,
        prefills=2,
        decodes=2,
        most_peers=1,
        move_s=0.005,
        step_s=0.005,
        router_cancels=0.0,
    )


def _another_release(rng: random.Random) -> Script:
    """A source of another release answers: its refusals and cards say less, or more, than ours, and mean the same."""
    script = _two_targets(rng)
    other = Fault(FaultKind.STRAY, 0.0, who="p0", other="release")
    return msgspec.structs.replace(script, faults=(other,))


def _engine_errs(rng: random.Random) -> Script:
    """Engines call twice, too late, or for what they never asked for: nothing of that changes what is live."""
    requests = tuple(
        _request(
            rng,
            rng.choice(list(Mode)),
            tokens=rng.randint(2, 4),
            chunk=1,
            at_s=0.03 * number,
            decode_delay_s=rng.choice((0.0, 0.05)),
            prefill_delay_s=rng.choice((0.0, 0.05)),
        )
        for number in range(rng.randint(1, 4))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    faults = tuple(
        Fault(FaultKind.STRAY, rng.uniform(0.0, 0.3), who=rng.choice(("p0", "d0")), other="engine", number=rng.randrange(6))
        for _ in range(12)
    )
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=faults,
        step_s=0.01,
        move_s=0.02,
        decode_blocks=rng.choice((4, 24)),
        integrity=rng.choice(list(Integrity)),
        aux_channel=_aux(rng),
    )


def _engine_contradicts_itself(rng: random.Random) -> Script:
    """A prefill engine offers less or more of a cache than it has reported: that hand-off fails by name, the others go on."""
    script = _engine_errs(rng)
    wrong = Fault(FaultKind.STRAY, rng.uniform(0.0, 0.15), who="p0", other="engine", number=0, is_whole=True)
    return msgspec.structs.replace(script, faults=(*script.faults[:3], wrong))


def _aux_under_way(rng: random.Random) -> Script:
    """A hand-off ends while its aux record is being read, or one of the two sides has no area to read it from or to."""
    requests = tuple(
        _request(
            rng, rng.choice(list(Mode)), tokens=rng.randint(1, 3), chunk=2, at_s=0.05 * number, retries=1, retry_after_s=0.02
        )
        for number in range(rng.randint(2, 3))
    )
    script = msgspec.structs.replace(
        _stage(rng, writes=rng.random() < 0.5, request=requests[0]), move_s=rng.choice((0.03, 0.1))
    )
    if rng.random() < 0.35:
        areas = rng.choice((("p0",), ("d0",), ("p0", "d0")))
        return msgspec.structs.replace(script, requests=requests, aux_channel=AuxChannel.DATA, without_area=areas)
    kinds = (FaultKind.CANCEL_TARGET, FaultKind.CANCEL_TARGET, FaultKind.CANCEL_SOURCE, FaultKind.CUT)
    faults = tuple(
        Fault(rng.choice(kinds), rng.uniform(0.0, 0.25), who="p0", other="d0", for_s=2.5, number=number)
        for number in range(len(requests))
    )
    return msgspec.structs.replace(script, requests=requests, faults=faults, aux_channel=AuxChannel.DATA)


def _every_grant_stale(rng: random.Random) -> Script:
    """Whatever number a target gives its grants, its source refuses it: that ends, by name. Afterwards all is well."""
    request = _request(rng, rng.choice(list(Mode)), tokens=2)
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    later = _request(rng, request.mode, tokens=2, at_s=0.6)
    faults = (
        Fault(FaultKind.BAD_GRANT, 0.0, who="d0", number=rng.choice((24, 40))),
        # Of a release that does not name the number that it refuses; otherwise the refusal would be about another one.
        Fault(FaultKind.STRAY, 0.0, who="p0", other="release"),
    )
    return msgspec.structs.replace(script, requests=(request, later), faults=faults, move_s=0.01)


def _many_beside_one(rng: random.Random) -> Script:
    """Nothing goes wrong; while one hand-off goes on for long, many others come and go, and leave their alarms behind."""
    long = _request(rng, rng.choice(list(Mode)), tokens=6, chunk=1)
    others = tuple(
        _request(rng, rng.choice(list(Mode)), tokens=1, at_s=0.02 + 0.012 * number) for number in range(rng.randint(75, 90))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=long)
    return msgspec.structs.replace(
        script, requests=(long, *others), ranks=1, layers=1, move_s=0.002, step_s=0.25, decode_s=0.01, prefill_blocks=40
    )


def _fenced_between(rng: random.Random) -> Script:
    """A source that does not stop is fenced rank by rank, while its target begins to read something else from it."""
    first = _request(rng, Mode.PUSH, tokens=4, chunk=1)
    later = tuple(_request(rng, Mode.PULL, tokens=2, at_s=rng.uniform(0.0, 1.2)) for _ in range(4))
    script = msgspec.structs.replace(_stage(rng, writes=True, request=first), step_s=0.2, ranks=2)
    at_s = rng.uniform(0.1, 0.5)
    faults = (
        Fault(FaultKind.CUT, at_s, who="d0", other="p0", for_s=0.45),
        Fault(FaultKind.CANCEL_TARGET, at_s + 1e-4, number=0),
        Fault(FaultKind.PAUSE_RANK, at_s + 0.3, who="d0", for_s=rng.choice((0.4, 1.0)), number=rng.randint(0, 1)),
        Fault(FaultKind.STALL, at_s, who="p0", for_s=2.0, number=rng.randint(0, 1)),
    )
    return msgspec.structs.replace(
        script,
        requests=(first, *later),
        faults=faults,
        rank_lag_s=rng.choice((0.01, 0.05, 0.1)),
        integrity=rng.choice(list(Integrity)),
        router_cancels=0.0,
    )


def _writer_replaced(rng: random.Random) -> Script:
    """Another process answers at the address of a source that lives on and writes; its target's ranks are late with the fence.

    Requests that follow get the blocks that the target frees.
    """
    first = _request(rng, Mode.PUSH, tokens=6, chunk=1)
    later = tuple(_request(rng, Mode.PUSH, tokens=2, at_s=0.3 * number) for number in range(1, 4))
    script = msgspec.structs.replace(_stage(rng, writes=True, request=first), late_writes=LateWrites.REVOCABLE)
    replaced = Fault(FaultKind.TWIN, rng.uniform(0.02, 0.3), who="p0", for_s=9.0)
    return msgspec.structs.replace(
        script,
        requests=(first, *later),
        faults=(replaced,),
        unfenced_writes=False,
        decode_blocks=9,
        step_s=rng.choice((0.02, 0.1)),
        move_s=rng.choice((0.05, 0.2)),
        rank_lag_s=rng.choice((0.0, 0.05, 0.1)),
        router_cancels=0.0,
    )


def _asked_too_early(rng: random.Random) -> Script:
    """Sources that write are asked for a confirmation although they never are, while they still sum and write."""
    requests = tuple(_request(rng, Mode.PUSH, tokens=rng.randint(1, 3), chunk=1, at_s=0.1 * number) for number in range(3))
    script = _stage(rng, writes=True, request=requests[0])
    strays = Fault(FaultKind.STRAY, 0.0, who="p0", number=30)
    return msgspec.structs.replace(
        script,
        requests=requests,
        faults=(strays,),
        integrity=rng.choice((Integrity.FULL, Integrity.SAMPLED)),
        rank_lag_s=rng.choice((0.005, 0.02)),
        move_s=rng.choice((0.05, 0.2)),
        step_s=0.005,
    )


def _lost_among_others(rng: random.Random) -> Script:
    """One message is lost among those of many hand-offs of a pair, all of which are answered."""
    requests = tuple(
        _request(rng, rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)), tokens=rng.randint(1, 3), at_s=0.011 * number)
        for number in range(rng.randint(12, 20))
    )
    script = _stage(rng, writes=rng.random() < 0.5, request=requests[0])
    who, other = rng.choice((("p0", "d0"), ("d0", "p0"), ("d0", "p0")))
    lost = Fault(FaultKind.LOSE, rng.uniform(0.01, 0.2), who=who, other=other, number=1)
    return msgspec.structs.replace(
        script, requests=requests, faults=(lost,), ranks=1, move_s=0.002, step_s=0.002, prefill_blocks=40, decode_blocks=40
    )


def _behind_others(rng: random.Random) -> Script:
    """Nothing goes wrong; a source with room for one request answers about that one, while others wait behind it."""
    first = _request(rng, Mode.PUSH, tokens=6, chunk=1)
    others = tuple(_request(rng, Mode.PUSH, tokens=rng.randint(1, 6), at_s=0.01 * number) for number in range(1, 4))
    script = _stage(rng, writes=rng.random() < 0.5, request=first)
    return msgspec.structs.replace(
        script, requests=(first, *others), prefill_blocks=6, move_s=0.002, step_s=rng.choice((0.03, 0.06))
    )


def _sums_fail(rng: random.Random) -> Script:
    """Of several spans that were summed together one could not be."""
    request = _request(rng, Mode.PUSH, tokens=rng.randint(2, 4), retries=1, decode_delay_s=rng.choice((0.0, 0.1, 0.1)))
    script = _stage(rng, writes=rng.random() < 0.5, request=request)
    fails = Fault(FaultKind.COPY_FAILS, 0.0, who=rng.choice(("p0", "d0")), is_whole=True)
    return msgspec.structs.replace(
        script, faults=(fails,), integrity=Integrity.FULL, layers=2, rank_lag_s=rng.choice((0.0, 0.02)), step_s=0.002
    )


def _both_ways(rng: random.Random) -> Script:
    """Two instances with both roles hand off to each other under the same transfer id: neither takes one for the other."""
    script = make_engine_script(rng.randrange(1 << 30))
    while script.requests[0].mode is not Mode.PUSH or script.faults:
        script = make_engine_script(rng.randrange(1 << 30))
    first = msgspec.structs.replace(script.requests[0], prefill=0, decode=0, is_turned=False, transfer_id="same", retries=0)
    again = msgspec.structs.replace(first, is_turned=True, at_s=first.at_s + rng.choice((0.0, 0.005)))
    caches = tuple(msgspec.structs.replace(each, blocks=60) for each in script.caches)
    return msgspec.structs.replace(script, requests=(first, again), loads=(), caches=caches)


def _stolen_early(rng: random.Random) -> Script:
    """A grant for another prompt of the same transfer id waits at a source when its own request comes."""
    first = _request(rng, Mode.PUSH, tokens=rng.randint(2, 4), transfer_id="same", prefill_delay_s=0.1, decode_delay_s=0.3)
    again = _request(rng, Mode.PUSH, tokens=rng.randint(2, 4), decode=1, steal_id=0, transfer_id="same", prefill_delay_s=1.0)
    script = _stage(rng, writes=rng.random() < 0.5, request=first)
    return msgspec.structs.replace(script, requests=(first, again), decodes=2, step_s=0.05, move_s=0.01, router_cancels=0.0)


def _gaps(rng: random.Random) -> Script:
    """Announcements overtake each other while what was retracted still moves: then spans with gaps between them are moved."""
    request = _request(rng, Mode.PUSH, tokens=rng.choice((2, 4)), chunk=2)
    script = _stage(rng, writes=False, request=request)
    preempted = Fault(FaultKind.PREEMPT, rng.uniform(0.015, 0.04), who="p0")
    slow = Fault(FaultKind.SLOW, preempted.at_s, who="p0", other="d0", for_s=0.3, number=1)
    return msgspec.structs.replace(
        script, faults=(preempted, slow), layers=4, step_s=0.004, move_s=0.4, uneven=2.0, rank_lag_s=rng.choice((0.0, 0.01))
    )


CORNERS: tuple[Drill, ...] = (
    _strangers,
    _strangers,
    _comes_back_as_another,
    _comes_back_as_another,
    _late_cards,
    _late_cards,
    _writer_replaced,
    _notices_of_the_dead,
    _notices_of_the_dead,
    _neighbour_dies,
    _neighbour_dies,
    _busy_peers,
    _no_room_for_peers,
    _no_room_for_peers,
    _forgotten_meanwhile,
    _another_release,
    _engine_errs,
    _engine_errs,
    _engine_contradicts_itself,
    _aux_under_way,
    _aux_under_way,
    _every_grant_stale,
    _many_beside_one,
    _fenced_between,
    _asked_too_early,
    _lost_among_others,
    _behind_others,
    _sums_fail,
    _both_ways,
    _stolen_early,
    _gaps,
)
"""Drills about peers that do not fit, cards that are late, engines that err, and whatever else is met once in a long while."""

EDGES: tuple[Drill, ...] = (
    _strays,
    _strays,
    _strays,
    _all_cached,
    _one_queue_full,
    _dies_on_one_host,
    _granted_unnoticed,
    _declined_when_parked,
    _one_rank_fences_late,
    _stops_for_long,
    _together,
    _out_of_order,
    _out_of_order,
    _aux_fails,
    _stolen_id,
    _rank_dies,
    _rank_dies,
    _taken_after_all,
    _on_threads,
    _on_threads,
    _on_threads,
    _agent_stands_still,
    _agent_stands_still,
    _agent_stands_still,
)
"""Drills about what hand-offs have to ignore, and about limits that are met one at a time."""

SCENES: tuple[Drill, ...] = (
    _one_fault,
    _one_fault,
    _both_full,
    _one_lost,
    _one_lost,
    _target_first,
    _target_first,
    _declined,
    _declined,
    _two_targets,
    _two_targets,
    _granted_anew,
    _cancelled_and_tried_again,
    _cancelled_and_tried_again,
    _replayed_afterwards,
    _queue_full,
    _queue_full,
    _copy_fails,
    _copy_fails,
    _retracted_twice,
    _left_in_the_queue,
    _few_cards,
    _crowd,
)
"""Drills about one message, one peer or one limit; one that is listed twice has twice as many seeds."""

DRILLS: tuple[Drill, ...] = (
    _answers_to_an_earlier_attempt,
    _stopped_before,
    _source_releases_unnoticed,
    _target_gives_up_unnoticed,
    _restart_with_mail,
    _cards_of_the_dead,
    _long_queue,
    _corrupted,
    _source_engine_stops,
    _target_engine_stops,
    _bad_grants,
    _replayed,
    _retracted_under_way,
    _retracted_under_way,
    _cancelled_while_granted,
    _released_again,
    _rank_stands_still,
    _slow_prefill,
    _slow_moves,
    _neighbour_fenced,
    _refused_and_taken,
    _much_to_remember,
)
"""All drills; one that is listed twice has twice as many seeds."""
