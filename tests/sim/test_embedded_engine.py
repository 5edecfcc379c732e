"""The embedded engine of production in the simulator: unequal shapes, preemption, prefix caches, both roles."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest

from kvbaton.core.handoff import Integrity, Mode
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.sim.drills import drill_of_seed, script_of_seed
from kvbaton.sim.embedded_engine import EmbeddedEngine
from kvbaton.sim.engine_script import make_engine_script
from kvbaton.sim.memory import FREED
from kvbaton.sim.run import Run, run_script
from kvbaton.sim.script import CacheScript, LoadScript, RequestScript, Script
from kvbaton.sim.tag_model import CONTEXT_TOKENS, TagCache, TagCacheShape, TagModel, answer_to, tags_of
from kvbaton.transport.base import LateWrites

DELIVERED = ("delivered", "delivered")
SHAPES = [(1, 4), (2, 4), (2, 3), (1, 2)]
"""Ranks, and tokens per block."""


def script(mode: Mode, late_writes: LateWrites, source: tuple[int, int], target: tuple[int, int], **changes: object) -> Script:
    """Four requests, the second half of which begin as the first do, and one the other way."""
    shared = [RequestScript(0.02 * number, 0, 0, 7 + number, 1, mode, shared=6, outputs=4) for number in range(4)]
    turned = msgspec.structs.replace(shared[3], at_s=0.1, shared=0, tokens=11, is_turned=True)
    made = Script(
        seed=3,
        late_writes=late_writes,
        unfenced_writes=False,
        one_host=True,
        ranks=1,
        layers=2,
        prefills=1,
        decodes=1,
        prefill_blocks=0,
        decode_blocks=0,
        requests=(*shared, turned),
        faults=(),
        integrity=Integrity.FULL,
        rank_lag_s=0.001,
        has_driver=True,
        caches=(CacheScript(*source, blocks=30), CacheScript(*target, blocks=30)),
    )
    return msgspec.structs.replace(made, **changes)


def engines(run: Run) -> list[EmbeddedEngine]:
    return [each.engine for each in run.all_instances if isinstance(each.engine, EmbeddedEngine)]


@pytest.mark.parametrize("mode", list(Mode), ids=str)
@pytest.mark.parametrize("late_writes", [LateWrites.IMPOSSIBLE, LateWrites.REVOCABLE], ids=str)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(SHAPES, SHAPES)), ids=str)
def test_every_pair_of_shapes_hands_over_every_cell(
    mode: Mode, late_writes: LateWrites, source: tuple[int, int], target: tuple[int, int]
) -> None:
    result = run_script(script(mode, late_writes, source, target))
    assert not result.violations
    assert result.outcomes == {DELIVERED: 5}


@pytest.mark.parametrize("mode", list(Mode), ids=str)
def test_control_a_rank_that_names_other_heads_than_it_has_is_found(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = TagCacheShape.layout

    def swapped(self: TagCacheShape, rank: int) -> Layout:
        other = layout(self, self.ranks - 1 - rank)
        assert self.ranks == 1 or other.groups[0].planes[0].heads == (HeadRange(self.ranks - 1 - rank, 1),)
        return other

    monkeypatch.setattr(TagCacheShape, "layout", swapped)
    result = run_script(script(mode, LateWrites.IMPOSSIBLE, (1, 4), (2, 4), integrity=Integrity.OFF))
    assert {violation.rule for violation in result.violations} == {"foreign byte"}


def test_control_a_block_of_another_prompt_is_found_by_the_model_that_reads_it() -> None:
    shape = TagCacheShape(ranks=2, blocks=8, layers=2, block_tokens=2, heads=2)
    cache, prompt = TagCache(shape), [5, 6, 7, 8]
    for position, tag in enumerate(tags_of(prompt)):
        for layer in range(shape.layers):
            cache.write(layer, position // 2, position % 2, position, tag, 1)
    assert not cache.problem([0, 1], tags_of(prompt))
    assert "wanted" in cache.problem([0, 1], tags_of([5, 6, 7, 9]))
    assert "wanted" in cache.problem([1, 0], tags_of(prompt)), "a token has a place"
    assert answer_to(prompt, 2) != answer_to([5, 6, 7, 9], 2)
    found: list[str] = []
    model = TagModel(found.append)
    model.learn(tags_of(prompt))
    span = TokenSpan(np.array([9], np.int32), 4, np.array([0, 1, 2], np.int32))
    model.forward([span], cache)
    assert not found
    cache.memories[1].cells[shape.cell(1, 1, 0, 1, 0)] = FREED
    model.forward([span], cache)
    assert len(found) == 1, "one value of one head of one token was not there"


def test_too_few_blocks_preempt_sources_and_targets_and_every_answer_is_right() -> None:
    """A load that grows takes the blocks of prefills that are announced, and of requests that decode."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        requests = tuple(RequestScript(0.002 * (4 + 3 * number), 0, 0, 14, 1, Mode.PUSH, outputs=6) for number in range(4))
        loads = tuple(LoadScript(0.0, who, 2, CONTEXT_TOKENS - 2) for who in ("p0", "p0", "d0"))
        caches = (CacheScript(1, 2, 22 + seed, step_tokens=1), CacheScript(2, 2, 22 + seed, step_tokens=1))
        base = script(
            Mode.PUSH, LateWrites.IMPOSSIBLE, (1, 2), (2, 2), requests=requests, loads=loads, caches=caches, seed=seed
        )
        run = Run(base)
        result = run.run()
        assert not result.violations
        assert result.outcomes == {DELIVERED: 4}
        source, target = engines(run)
        seen += Counter(retracted=source.retracted_total, at_source=source.preempted_total, at_target=target.preempted_total)
    assert min(seen["retracted"], seen["at_source"], seen["at_target"]) > 0, seen


def test_a_prefix_is_found_at_the_source_and_at_the_target() -> None:
    run = Run(script(Mode.PULL, LateWrites.IMPOSSIBLE, (1, 2), (1, 3)))
    assert not run.run().violations
    assert all(engine.cached_tokens_total > 0 for engine in engines(run))


def test_random_runs_have_engines_of_every_shape_and_both_modes() -> None:
    scripts = [script_of_seed(seed) for seed in range(2000) if drill_of_seed(seed) == "engines"]
    assert len(scripts) == 125
    assert all(each.has_driver and len(each.caches) == len(each.addresses) for each in scripts)
    assert {each.requests[0].mode for each in scripts} == set(Mode)
    pairs = {(each.caches[0].ranks, each.caches[-1].ranks) for each in scripts}
    assert pairs == {(1, 1), (1, 2), (2, 1), (2, 2)}
    turned = {request.mode for each in scripts for request in each.requests if request.is_turned}
    assert turned == set(Mode), "both roles in one instance"
    assert any(each.loads for each in scripts)
    assert any(each.recomputes and each.faults for each in scripts)


def test_runs_with_engines_read_back() -> None:
    made = make_engine_script(1)
    again = msgspec.json.decode(msgspec.json.encode(made), type=Script)
    assert again == made
