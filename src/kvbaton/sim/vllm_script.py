"""Random runs of instances with vLLM's connector: they are those of the embedded engine, with another engine in most instances.

Pipelines and ranks of unequal numbers, steps that overlap, chunks that end in the middle of a block, pools that run out of
blocks on either side, clients that leave, and every fault of a link, a process or a rank.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from kvbaton.core.handoff import Integrity, Mode
from kvbaton.sim.engine_script import make_engine_script
from kvbaton.sim.script import CacheScript, Fault, FaultKind, LoadScript, RequestScript, Script, VllmScript
from kvbaton.sim.tag_model import CONTEXT_TOKENS

__all__ = ["make_vllm_script"]

_WITHDRAWN = 0.08
_CROWDED = 0.1
_BEHIND = 0.08
_LAYERS = 3
"""As many as make stages of unequal sizes."""


def make_vllm_script(seed: int) -> Script:
    """The run of a seed."""
    rng = random.Random(f"vllm {seed}")
    script = make_engine_script(seed)
    drawn = rng.random()
    if drawn < _WITHDRAWN:
        return _withdrawn(rng, script)
    if drawn < _WITHDRAWN + _CROWDED:
        return _crowded(rng, script)
    if drawn < _WITHDRAWN + _CROWDED + _BEHIND:
        return _behind(rng, script)
    if any(request.is_turned for request in script.requests):
        script = _with_room(script)
    caches = tuple(_with_vllm(rng, cache) for cache in script.caches)
    if all(cache.vllm is None for cache in caches):
        caches = (_with_vllm(rng, caches[0], always=True), *caches[1:])
    has_stages = any(cache.vllm is not None and cache.vllm.stages > 1 for cache in caches)
    return msgspec.structs.replace(script, caches=caches, layers=_LAYERS if has_stages else script.layers)


def _with_vllm(rng: random.Random, cache: CacheScript, *, always: bool = False) -> CacheScript:
    """The same cache in a vLLM, mostly; the embedded engine stays in some, as the other side of a hand-off."""
    if not always and rng.random() < 0.2:
        return cache
    stages = rng.choice((1, 1, 2))
    vllm = VllmScript(stages=stages, is_async=rng.random() < 0.5, has_fence=rng.random() < 0.5, has_hooks=rng.random() < 0.7)
    step_tokens = rng.choice((1, 3, 5, 8))
    return msgspec.structs.replace(cache, ranks=cache.ranks * stages, step_tokens=step_tokens, vllm=vllm)


def _with_room(script: Script) -> Script:
    """Room for everything at once: vLLM reserves nothing for what an instance with both roles fetches (docs/promises.md)."""
    count = len(script.requests) + len(script.loads)
    caches = tuple(
        msgspec.structs.replace(cache, blocks=max(cache.blocks, count * -(-CONTEXT_TOKENS // cache.block_tokens)))
        for cache in script.caches
    )
    return msgspec.structs.replace(script, caches=caches)


def _of_one_pair(script: Script, **changes: Any) -> Script:
    """The run with one source and one target, which fails what cannot be handed over, and whatever else is changed."""
    return msgspec.structs.replace(script, prefills=1, decodes=1, recomputes=False, **changes)


def _crowded(rng: random.Random, script: Script) -> Script:
    """More prefills at once than a source has blocks for: it preempts some that it has begun to stream, and computes them anew.

    Requests of its own take blocks one by one meanwhile, so that others soon have those of a prefill that was preempted.
    """
    caches = (
        CacheScript(rng.choice((1, 2)), 2, rng.randint(20, 24), step_tokens=8, vllm=VllmScript(has_fence=rng.random() < 0.3)),
        CacheScript(rng.choice((1, 2)), 2, 32, step_tokens=8),
    )
    requests = tuple(
        RequestScript(
            rng.uniform(0.0, 0.02), 0, 0, rng.randint(10, 14), 1, Mode.PUSH, prefix=rng.randrange(2), outputs=rng.randint(1, 4)
        )
        for _ in range(rng.randint(4, 7))
    )
    return _of_one_pair(
        script,
        layers=rng.choice((1, 2)),
        caches=caches,
        loads=(LoadScript(0.0, "p0", 2, 22),) * rng.randint(1, 3),
        requests=requests,
        faults=(),
        step_s=0.002,
        move_s=rng.choice((0.002, 0.005)),
        integrity=Integrity.OFF,
    )


def _behind(rng: random.Random, script: Script) -> Script:
    """A target gives blocks of a request that has ended to the next one, while one of its ranks still computes that step."""
    caches = (
        CacheScript(rng.choice((1, 2)), 2, 48, step_tokens=8),
        CacheScript(2, 2, rng.randint(18, 24), step_tokens=8, vllm=VllmScript(is_async=True, has_fence=False)),
    )
    requests = tuple(
        RequestScript(0.01 * number + rng.uniform(0.0, 0.01), 0, 0, rng.randint(6, 14), 1, Mode.PUSH, outputs=rng.randint(1, 3))
        for number in range(rng.randint(7, 10))
    )
    loads = tuple(
        LoadScript(0.015 * number + rng.uniform(0.0, 0.01), "d0", rng.randint(2, 8), rng.randint(2, 6))
        for number in range(rng.randint(8, 14))
    )
    return _of_one_pair(
        script,
        layers=1,
        caches=caches,
        loads=loads,
        requests=requests,
        faults=(),
        step_s=0.01,
        move_s=0.0002,
        rank_lag_s=0.0005,
        integrity=Integrity.OFF,
    )


def _withdrawn(rng: random.Random, script: Script) -> Script:
    """A prefill that waits for room until it is given up, and comes again under the same id while the agents stand still.

    The room of the source is taken by requests of its own, one after the other, and the target stands still and grants nothing.
    The last of those requests ends when the prefill comes again: then that one begins at once.
    """
    tokens = 12
    blocks = -(-CONTEXT_TOKENS // 2) + tokens // 2
    caches = (
        CacheScript(1, 2, blocks, step_tokens=8, vllm=VllmScript(is_async=rng.random() < 0.5)),
        CacheScript(rng.choice((1, 2)), 2, 24, step_tokens=8, vllm=VllmScript()),
    )
    loads = tuple(LoadScript(0.3 * number, "p0", 2, 10) for number in range(14))
    request = RequestScript(0.05, 0, 0, tokens, 1, Mode.PUSH, retries=1, reuse_id=True, outputs=2)
    faults = (
        Fault(FaultKind.PAUSE, 0.0, who="d0", for_s=5.0),
        Fault(FaultKind.STALL_AGENT, rng.uniform(3.9, 4.1), who="p0", for_s=rng.choice((0.5, 1.0, 2.0))),
    )
    return _of_one_pair(
        script,
        layers=1,
        caches=caches,
        loads=loads,
        requests=(request,),
        faults=faults,
        step_s=rng.uniform(0.04, 0.08),
    )
