"""Both halves of the vLLM connector in the simulator: ranks and stages, steps that overlap, preemption, retries, threads."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import msgspec
import pytest

from kvbaton.core.handoff import Integrity, Mode
from kvbaton.engines.vllm.computed_spans import ComputedSpans
from kvbaton.sim import virtual_threads
from kvbaton.sim.drills import drill_of_seed, script_of_seed
from kvbaton.sim.instance import Bugs
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.run import Run, run_script
from kvbaton.sim.script import CacheScript, Fault, FaultKind, LoadScript, RequestScript, Script, VllmScript
from kvbaton.sim.tag_model import CONTEXT_TOKENS, TagCacheShape
from kvbaton.sim.virtual_threads import Signal, VirtualThread, VirtualThreadStuck
from kvbaton.sim.vllm_engine import VllmEngine
from kvbaton.sim.vllm_script import make_vllm_script
from kvbaton.sim.vllm_workers import VllmClasses
from kvbaton.sim.world import SimProcess, World
from kvbaton.transport.base import LateWrites

DELIVERED = ("delivered", "delivered")
ONE, TP2, PP2 = CacheScript(1, 4, 30), CacheScript(2, 3, 30), CacheScript(2, 2, 30)
SET_UPS = {
    "one rank": msgspec.structs.replace(ONE, vllm=VllmScript()),
    "two ranks, async": msgspec.structs.replace(TP2, vllm=VllmScript(is_async=True, has_fence=False)),
    "two stages": msgspec.structs.replace(PP2, step_tokens=3, vllm=VllmScript(stages=2, has_hooks=False)),
    "two stages of two ranks, async": CacheScript(4, 2, 30, step_tokens=3, vllm=VllmScript(stages=2, is_async=True)),
    "embedded": ONE,
}


def script(mode: Mode, caches: tuple[CacheScript, CacheScript], **changes: object) -> Script:
    """Four requests, each of which begins as the one before."""
    requests = tuple(RequestScript(0.02 * number, 0, 0, 7 + number, 1, mode, shared=6, outputs=4) for number in range(4))
    made = Script(
        seed=3,
        late_writes=LateWrites.IMPOSSIBLE,
        unfenced_writes=False,
        one_host=True,
        ranks=1,
        layers=3,
        prefills=1,
        decodes=1,
        prefill_blocks=0,
        decode_blocks=0,
        requests=requests,
        faults=(),
        integrity=Integrity.FULL,
        rank_lag_s=0.001,
        has_driver=True,
        caches=caches,
    )
    return msgspec.structs.replace(made, **changes)


def engines(run: Run) -> list[VllmEngine]:
    return [each.engine for each in run.all_instances if isinstance(each.engine, VllmEngine)]


@pytest.mark.parametrize("mode", list(Mode), ids=str)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(SET_UPS, SET_UPS))[:-1])
def test_every_pair_of_set_ups_hands_over_every_cell(mode: Mode, source: str, target: str) -> None:
    result = run_script(script(mode, (SET_UPS[source], SET_UPS[target])))
    assert not result.violations
    assert result.outcomes == {DELIVERED: 4}


class _OneLayerLate(ComputedSpans):
    """Announces a layer together with the one that its ranks compute next."""

    def computed(self, step: int, layers: object) -> None:
        numbers = list(layers)  # type: ignore[call-overload]
        super().computed(step, [*numbers, *(layer + 1 for layer in numbers if layer + 1 in self._holders)])


def test_control_a_layer_that_is_announced_before_it_is_computed_is_found() -> None:
    found: Counter[str] = Counter()
    for seed in range(8):
        made = script(Mode.PUSH, (SET_UPS["one rank"], SET_UPS["one rank"]), seed=seed, integrity=Integrity.OFF, step_s=0.01)
        result = run_script(made, Bugs(vllm=VllmClasses(spans=_OneLayerLate)))
        found += Counter(violation.rule for violation in result.violations)
    assert found["foreign byte"]


def test_too_few_blocks_preempt_sources_and_targets_and_every_answer_is_right() -> None:
    """Requests that grow take the blocks of prefills that are announced, and of requests that decode."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        requests = tuple(RequestScript(0.002 * (4 + 3 * number), 0, 0, 14, 1, Mode.PUSH, outputs=6) for number in range(4))
        loads = tuple(LoadScript(0.0, who, 2, CONTEXT_TOKENS - 4) for who in ("p0", "p0", "d0", "d0"))
        vllm = VllmScript(is_async=seed % 2 == 1, stages=1 + seed % 3 // 2)
        caches = (
            CacheScript(vllm.stages, 2, 21 + seed, step_tokens=3, vllm=vllm),
            CacheScript(2, 2, 21 + seed, step_tokens=3, vllm=VllmScript(has_fence=False)),
        )
        run = Run(script(Mode.PUSH, caches, requests=requests, loads=loads, seed=seed))
        result = run.run()
        assert not result.violations
        assert result.outcomes == {DELIVERED: 4}
        source, target = engines(run)
        seen += Counter(retracted=source.retracted_total, at_source=source.preempted_total, at_target=target.preempted_total)
    assert min(seen["retracted"], seen["at_source"], seen["at_target"]) > 0, seen


def test_a_prefix_is_found_at_the_source_and_at_the_target() -> None:
    run = Run(script(Mode.PULL, (SET_UPS["two stages"], SET_UPS["two ranks, async"])))
    assert not run.run().violations
    assert all(engine.cached_tokens_total > 0 for engine in engines(run))


def test_a_rank_that_dies_ends_its_instance_and_the_next_one_serves() -> None:
    fault = Fault(FaultKind.CRASH_RANK, 0.03, who="d0", for_s=0.5, number=1)
    run = Run(script(Mode.PUSH, (SET_UPS["one rank"], SET_UPS["two ranks, async"]), faults=(fault,)))
    assert not run.run().violations
    assert len(run.all_instances) == 3
    assert all(client.is_over for client in run.probes)


def test_a_prefill_that_was_given_up_can_come_again_while_the_agents_stand_still() -> None:
    """The end of the first attempt comes when the second one is there: it must not pass for that of the second."""
    scripts = [made for seed in range(200) if len((made := make_vllm_script(seed)).loads) == 14]
    assert len(scripts) > 5
    bugs, broken = PLANTS["vllm-retry-taken-for-ended"].bugs, Counter[str]()
    for made in scripts[:6]:
        assert not run_script(made).violations
        broken += Counter(violation.rule for violation in run_script(made, bugs).violations)
    assert set(broken) == {"one outcome"}


def test_random_runs_have_every_set_up_and_both_engines() -> None:
    scripts = [script_of_seed(seed) for seed in range(2000) if drill_of_seed(seed) == "vllm"]
    assert len(scripts) == 125
    set_ups = [cache.vllm for each in scripts for cache in each.caches]
    assert None in set_ups, "an embedded engine on the other side"
    assert all(any(cache.vllm for cache in each.caches) for each in scripts)
    vllms = [vllm for vllm in set_ups if vllm is not None]
    for name in ("stages", "is_async", "has_fence", "has_hooks"):
        assert len({getattr(vllm, name) for vllm in vllms}) == 2, name
    assert {cache.ranks for each in scripts for cache in each.caches if cache.vllm} == {1, 2, 4}
    assert {request.mode for each in scripts for request in each.requests} == set(Mode)


def test_runs_with_the_connector_read_back() -> None:
    made = make_vllm_script(6)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Script) == made


def test_a_run_leaves_no_thread_even_where_an_instance_has_died() -> None:
    before = threading.active_count()
    fault = Fault(FaultKind.CRASH, 0.03, who="d0", for_s=50.0)
    assert not run_script(script(Mode.PUSH, (SET_UPS["one rank"], SET_UPS["two stages"]), faults=(fault,))).violations
    assert threading.active_count() == before


def test_the_cells_of_a_pipeline_are_cut_over_stages_and_ranks() -> None:
    shape = TagCacheShape(ranks=4, blocks=5, layers=3, block_tokens=2, heads=2, stages=2)
    assert str(shape.shape) == "pp2,tp2"
    assert [tuple(shape.layers_of(rank)) for rank in range(4)] == [(0,), (0,), (1, 2), (1, 2)]
    assert [tuple(shape.heads_of(rank)) for rank in range(4)] == [(0,), (1,), (0,), (1,)]
    cells = sum(shape.cells_of(rank) for rank in range(4))
    assert cells == shape.cells_of_token * shape.blocks * shape.block_tokens
    assert [shape.layout(rank).layers for rank in (0, 3)] == [(0,), (1, 2)]


# Threads on virtual time.


def raised(error: Exception) -> None:
    raise error


def test_threads_run_in_the_order_of_the_worlds_events() -> None:
    world, seen = World(1), list[tuple[str, float]]()
    threads = [VirtualThread(world, SimProcess(name), lambda: 0.0, raised) for name in "ab"]
    signal = Signal(threads[1])

    def first() -> None:
        threads[0].wait(1.0)
        seen.append(("first", world.now))
        signal.set()

    def second() -> None:
        assert signal.wait(5.0)
        seen.append(("second", world.now))
        signal.clear()
        assert not signal.wait(2.0)
        seen.append(("timed out", world.now))

    for thread, work in zip(threads, (first, second), strict=True):
        thread.start(work)
    world.run(10.0, 100)
    for thread in threads:
        thread.close()
    assert seen == [("first", 1.0), ("second", 1.0), ("timed out", 3.0)]


def test_a_thread_stands_still_with_its_process_and_dies_with_it() -> None:
    world, seen = World(1), list[float]()
    held_until = 3.0
    process = SimProcess("a")
    thread = VirtualThread(world, process, lambda: held_until, raised)

    def work() -> None:
        while True:
            seen.append(world.now)
            thread.wait(1.0)

    thread.start(work)
    world.run(4.5, 100)
    assert seen == [3.0, 4.0]
    process.paused_until = 7.0
    world.run(7.5, 100)
    assert seen == [3.0, 4.0, 7.0]
    process.is_alive = False
    world.run(20.0, 100)
    assert seen == [3.0, 4.0, 7.0]
    thread.close()


def test_what_a_thread_raises_is_reported() -> None:
    world, failed = World(1), list[Exception]()
    thread = VirtualThread(world, SimProcess("a"), lambda: 0.0, failed.append)
    thread.start(lambda: raised(KeyError("x")))
    world.run(1.0, 100)
    thread.close()
    assert [type(error) for error in failed] == [KeyError]


def test_a_thread_that_waits_outside_of_virtual_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_threads, "_TURN_S", 0.05)
    world, outside = World(1), threading.Event()
    thread = VirtualThread(world, SimProcess("p0#1"), lambda: 0.0, raised)

    def work() -> None:
        outside.wait(60.0)
        thread.wait(1.0)

    thread.start(work)
    with pytest.raises(VirtualThreadStuck, match=r"p0#1, at 0\.0+ s.* has not passed the baton back"):
        world.run(1.0, 100)
    thread.close()
    outside.set()
    stuck: threading.Thread = vars(thread)["_thread"]
    stuck.join(60.0)
    assert not stuck.is_alive()
