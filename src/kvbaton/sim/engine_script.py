"""Random runs with the embedded engine of production: unequal shapes, both roles in one instance, too few blocks."""

from __future__ import annotations

import random

import msgspec

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.sim.script import CacheScript, Fault, FaultKind, LoadScript, RequestScript, Script
from kvbaton.sim.tag_model import CONTEXT_TOKENS
from kvbaton.transport.base import LateWrites

__all__ = ["make_engine_script"]

_MOST_OUTPUTS = 8
_MOST_TOKENS = CONTEXT_TOKENS - _MOST_OUTPUTS
_BLOCK_TOKENS = (2, 3, 4)
_LINKS = (
    FaultKind.CUT,
    FaultKind.SEVER,
    FaultKind.CLOG,
    FaultKind.LOSE,
    FaultKind.DOUBLE,
    FaultKind.DELAY,
    FaultKind.SLOW,
    FaultKind.CORRUPT_FRAME,
)
_AT_ONE = (
    FaultKind.CRASH,
    FaultKind.RESTART,
    FaultKind.PAUSE,
    FaultKind.PAUSE_RANK,
    FaultKind.CRASH_RANK,
    FaultKind.CRASH_LEADER,
    FaultKind.TWIN,
    FaultKind.COPY_FAILS,
    FaultKind.STALL,
    FaultKind.REFUSE,
    FaultKind.SILENT_ENGINE,
    FaultKind.STALL_AGENT,
    FaultKind.CORRUPT,
)
_OF_CLIENTS = (FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET)
_DURATIONS = (0.05, 0.5, 2.0, 5.0)


def make_engine_script(seed: int) -> Script:
    """The run of a seed."""
    rng = random.Random(f"engine {seed}")
    late_writes = rng.choice(list(LateWrites))
    prefills, decodes = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    mode = rng.choice(list(Mode))
    is_short = rng.random() < 0.6
    requests = tuple(_request(rng, prefills, decodes, mode) for _ in range(rng.randint(2, 7)))
    caches = tuple(_cache(rng, is_short=is_short) for _ in range(prefills + decodes))
    script = Script(
        seed=seed,
        late_writes=late_writes,
        unfenced_writes=late_writes is LateWrites.UNFENCED and rng.random() < 0.5,
        one_host=rng.random() < 0.5,
        ranks=1,
        layers=rng.choice((1, 2)),
        prefills=prefills,
        decodes=decodes,
        prefill_blocks=0,
        decode_blocks=0,
        requests=requests,
        faults=(),
        move_s=rng.choice((0.0002, 0.002, 0.005)),
        step_s=rng.choice((0.002, 0.01)),
        integrity=rng.choice(list(Integrity)),
        aux_channel=rng.choice(list(AuxChannel)),
        rank_lag_s=rng.choice((0.0005, 0.001, 0.01)),
        has_driver=True,
        caches=caches,
        recomputes=rng.random() < 0.3,
    )
    loads = tuple(_load(rng, script) for _ in range(rng.randint(0, 2 * len(caches))))
    faults = tuple(_fault(rng, script) for _ in range(rng.choice((0, 0, 1, 2, 3))))
    if faults:
        # Instances with both roles wait for each other's memory, and through it a fault reaches all that waits there.
        requests = tuple(msgspec.structs.replace(request, is_turned=False) for request in requests)
    elif any(request.is_turned for request in requests):
        # Room for two of the largest requests, and little more: with less, some may wait in a circle (docs/promises.md).
        caches = tuple(
            msgspec.structs.replace(cache, blocks=max(cache.blocks, 2 * -(-CONTEXT_TOKENS // cache.block_tokens)))
            for cache in caches
        )
    script = msgspec.structs.replace(script, requests=requests, loads=loads, faults=faults, caches=caches)
    if rng.random() < 0.4:
        return _with_rare_fault(script)
    recipes = (_mutual,) if mode is Mode.PULL else (_crossed, _crowded, _crowded, _mutual)
    return rng.choice(recipes)(rng, script)


def _writes_unfenced(script: Script) -> bool:
    """Whether sources write without a fence: another process at its address is taken for the death of such a writer."""
    return script.unfenced_writes and script.requests[0].mode is Mode.PUSH


def _with_rare_fault(script: Script) -> Script:
    """With one of the faults that only runs with engines draw, if the run may have any."""
    rng = random.Random(f"rare {script.seed}")
    if any(request.is_turned for request in script.requests):
        return script
    kinds = [FaultKind.CORRUPT_FRAME, FaultKind.CRASH_LEADER]
    kinds += [] if _writes_unfenced(script) else [FaultKind.TWIN]
    who, other = rng.sample((script.addresses[0], script.addresses[-1]), 2)
    at_s, for_s = rng.uniform(0.0, 0.15), rng.choice(_DURATIONS)
    fault = Fault(rng.choice(kinds), at_s, who=who, other=other, for_s=for_s, number=rng.randint(1, 3))
    return msgspec.structs.replace(script, faults=(*script.faults, fault))


def _mutual(rng: random.Random, script: Script) -> Script:
    """Two instances hand over to each other, and neither has room for more than two of the requests."""
    caches = tuple(CacheScript(rng.choice((1, 2)), 2, rng.randint(14, 17)) for _ in range(2))
    requests = tuple(
        RequestScript(
            at_s=rng.uniform(0.0, 0.004),
            prefill=0,
            decode=0,
            tokens=rng.randint(9, 12),
            chunk=1,
            mode=script.requests[0].mode,
            outputs=rng.randint(1, 2),
            is_turned=bool(number % 2),
        )
        for number in range(rng.choice((4, 6, 8)))
    )
    return msgspec.structs.replace(script, prefills=1, decodes=1, caches=caches, loads=(), requests=requests, faults=())


def _crowded(rng: random.Random, script: Script) -> Script:
    """Sources that compute long prompts while older requests grow, until there is no block left: prefills are preempted."""
    caches = tuple(CacheScript(rng.choice((1, 2)), 2, rng.randint(22, 26), step_tokens=1) for _ in script.addresses)
    loads = tuple(LoadScript(0.0, who, 2, CONTEXT_TOKENS - 2) for who in script.addresses for _ in range(rng.randint(1, 2)))
    requests = tuple(
        msgspec.structs.replace(
            request,
            at_s=rng.uniform(2, 14) * script.step_s,
            tokens=(tokens := rng.randint(10, _MOST_TOKENS - 1)),
            shared=min(request.shared, tokens),
            # Both roles would need room for two of these, and with that nothing is preempted.
            is_turned=False,
        )
        for request in script.requests
    )
    return msgspec.structs.replace(script, caches=caches, loads=loads, requests=requests)


def _crossed(rng: random.Random, script: Script) -> Script:
    """Large requests that reach a source and its target, each with room for one of them, in opposite orders."""
    caches = tuple(CacheScript(rng.choice((1, 2)), 2, rng.randint(14, 15)) for _ in script.addresses)
    late_s = rng.uniform(0.03, 0.06)
    requests = tuple(
        RequestScript(
            at_s=rng.uniform(0.0, 0.01),
            prefill=0,
            decode=0,
            tokens=rng.randint(13, _MOST_TOKENS - 1),
            chunk=1,
            mode=Mode.PUSH,
            decode_delay_s=0.0 if number % 2 else late_s,
            prefill_delay_s=late_s if number % 2 else 0.0,
            outputs=rng.randint(1, 3),
        )
        for number in range(rng.randint(2, 4))
    )
    return msgspec.structs.replace(script, caches=caches, loads=(), requests=requests, faults=())


def _cache(rng: random.Random, *, is_short: bool) -> CacheScript:
    """A cache; a short one has room for one of the largest requests, and little more."""
    block_tokens = rng.choice(_BLOCK_TOKENS)
    largest = -(-CONTEXT_TOKENS // block_tokens)
    blocks = rng.randint(largest + 1, 2 * largest) if is_short else 4 * largest
    return CacheScript(rng.choice((1, 2)), block_tokens, blocks, step_tokens=rng.choice((1, 5)))


def _request(rng: random.Random, prefills: int, decodes: int, mode: Mode) -> RequestScript:
    tokens = rng.randint(1, _MOST_TOKENS - 1)
    return RequestScript(
        at_s=rng.uniform(0.0, 0.1),
        prefill=rng.randrange(prefills),
        decode=rng.randrange(decodes),
        tokens=tokens,
        chunk=1,
        mode=mode,
        prefix=rng.randrange(2),
        shared=rng.randint(0, tokens) if rng.random() < 0.6 else 0,
        decode_delay_s=rng.choice((0.0, 0.0, 0.005, 0.05)),
        retries=rng.choice((0, 0, 1)),
        reuse_id=rng.random() < 0.4,
        outputs=rng.randint(1, _MOST_OUTPUTS),
        is_turned=rng.random() < 0.3,
    )


def _load(rng: random.Random, script: Script) -> LoadScript:
    tokens = rng.randint(1, 4)
    return LoadScript(rng.uniform(0.0, 0.05), rng.choice(script.addresses), tokens, CONTEXT_TOKENS - tokens)


def _fault(rng: random.Random, script: Script) -> Fault:
    is_of_client = rng.random() < 0.4
    kind = rng.choice(_OF_CLIENTS if is_of_client else (*_LINKS, *_AT_ONE))
    if kind is FaultKind.TWIN and _writes_unfenced(script):
        kind = FaultKind.RESTART
    who, number = rng.choice(script.addresses), rng.randrange(len(script.requests))
    request = script.requests[number]
    # A client leaves while its cache is under way.
    under_way_s = request.at_s + request.decode_delay_s + rng.uniform(0.0, 0.06)
    return Fault(
        kind=kind,
        at_s=under_way_s if is_of_client else rng.uniform(0.0, 0.3),
        who=who,
        other=rng.choice([address for address in script.addresses if address[0] != who[0]]),
        for_s=rng.choice(_DURATIONS),
        number=number if is_of_client else rng.randint(1, 3),
    )
