"""What drills are built on: one source, one target, one request."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from kvbaton.core.handoff import Mode
from kvbaton.sim.script import RequestScript, Script
from kvbaton.transport.base import LateWrites

__all__ = ["Drill", "make_request", "make_stage", "moving_between"]

Drill = Callable[[random.Random], Script]


def make_stage(rng: random.Random, *, writes: bool, request: RequestScript) -> Script:
    """One source, one target, one request, copies that take a while."""
    unfenced = writes and rng.random() < 0.5
    reading = rng.choice((LateWrites.IMPOSSIBLE, LateWrites.UNFENCED))
    writing = LateWrites.UNFENCED if unfenced else LateWrites.REVOCABLE
    return Script(
        seed=0,
        late_writes=writing if writes else reading,
        unfenced_writes=unfenced,
        one_host=rng.random() < 0.5,
        ranks=rng.choice((1, 2)),
        layers=rng.choice((1, 2)),
        prefills=1,
        decodes=1,
        prefill_blocks=24,
        decode_blocks=24,
        requests=(request,),
        faults=(),
        move_s=rng.choice((0.02, 0.05)),
        step_s=rng.choice((0.002, 0.01)),
    )


def make_request(rng: random.Random, mode: Mode, **changes: object) -> RequestScript:
    """A small request between the first two instances."""
    request = RequestScript(0.0, 0, 0, tokens=rng.randint(4, 6), chunk=rng.randint(1, 2), mode=mode)
    return msgspec.structs.replace(request, **changes)


def moving_between(script: Script) -> tuple[float, float]:
    """From when to when the bytes of the only request move, roughly."""
    request = script.requests[0]
    prefill_s = -(-request.tokens // request.chunk) * script.layers * script.step_s
    start_s = 0.005 if request.mode is Mode.PUSH else prefill_s + 0.005
    return start_s, max(prefill_s, start_s) + request.tokens * script.layers * script.move_s
