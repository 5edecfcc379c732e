"""Many runs: over seeds or over every single fault, on all cores; and ever smaller ones of a script that breaks a rule."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from kvbaton.sim.drills import script_of_seed
from kvbaton.sim.exhaustive import FLOWS, flow_scripts
from kvbaton.sim.instance import Bugs
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.run import Result, run_script
from kvbaton.sim.script import Script
from kvbaton.sim.world import Violation

__all__ = ["PARTS", "Campaign", "bugs_of", "count_exhaustive", "run_exhaustive", "run_seeds", "shrink"]

PARTS = 8
"""Into so many parts, each with faults at every stage, the exhaustive runs of a flow are cut."""

_SEEDS_PER_TASK = 16
"""Which kind of run a seed is repeats with as many seeds: every task has as many of the slow ones."""

_FAULTS_PER_TASK = 48
"""About a second: so much at most one core is idle at the end, and so often it is shown how far it is."""

_MAX_SHRINK_RUNS = 400

OnProgress = Callable[[int], None]


@dataclass(slots=True)
class Campaign:
    """What came of many runs. `violations` holds the script and the first broken rule of each bad run."""

    runs: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[Script, Violation]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count one run."""
        self.runs += 1
        self.events += result.events
        self.faults += result.faults
        if result.violations:
            self.violations.append((result.script, result.violations[0]))

    def merge(self, other: Campaign) -> None:
        """Count the runs of another campaign."""
        self.runs += other.runs
        self.events += other.events
        self.faults += other.faults
        self.violations += other.violations


def run_seeds(first: int, count: int, plant: str | None, on_progress: OnProgress, *, stop_at_first: bool = False) -> Campaign:
    """Run the scripts of `count` seeds from `first` on."""
    starts = range(first, first + count, _SEEDS_PER_TASK)
    tasks: list[_Task] = [(start, min(_SEEDS_PER_TASK, first + count - start), plant) for start in starts]
    return _run_tasks(_seed_task, tasks, on_progress, stop_at_first)


def run_exhaustive(
    plant: str | None, on_progress: OnProgress, *, stop_at_first: bool = False, parts: Sequence[int] = range(PARTS)
) -> Campaign:
    """Run every single fault at every stage of every flow, or some of the parts of that."""
    tasks: list[_Task] = []
    for flow in FLOWS:
        for part in parts:
            starts = range(part, len(_scripts_of(flow)), PARTS * _FAULTS_PER_TASK)
            tasks += [(flow, start, plant) for start in starts]
    return _run_tasks(_flow_task, tasks, on_progress, stop_at_first)


def count_exhaustive(parts: Sequence[int] = range(PARTS)) -> int:
    """How many runs `run_exhaustive` has."""
    return sum(len(_scripts_of(flow)[part::PARTS]) for flow in FLOWS for part in parts)


@lru_cache(maxsize=len(FLOWS))
def _scripts_of(flow: str) -> list[Script]:
    return list(flow_scripts(flow))


_Task = tuple[int | str, int, str | None]


def _run_tasks(work: Callable[[_Task], Campaign], tasks: list[_Task], on_progress: OnProgress, stop_at_first: bool) -> Campaign:
    if len(tasks) == 1:
        return work(tasks[0])
    total = Campaign()
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(min(cores, len(tasks)), initializer=_prepare_worker) as pool:
        for part in pool.imap(work, tasks):
            total.merge(part)
            on_progress(total.runs)
            if stop_at_first and total.violations:
                break
    return total


def _prepare_worker() -> None:
    logging.disable(logging.CRITICAL)
    # What is imported stays, and the objects of a run are all gone at once: it is enough to look for garbage between tasks.
    gc.freeze()
    gc.disable()


def bugs_of(plant: str | None) -> Bugs:
    """The classes of a run with this planted bug; without one, those of production."""
    return Bugs() if plant is None else PLANTS[plant].bugs


def _seed_task(task: _Task) -> Campaign:
    first, count, plant = task
    assert isinstance(first, int)  # noqa: S101
    return _run_all((script_of_seed(seed) for seed in range(first, first + count)), plant)


def _flow_task(task: _Task) -> Campaign:
    flow, start, plant = task
    return _run_all(_scripts_of(str(flow))[start : start + PARTS * _FAULTS_PER_TASK : PARTS], plant)


def _run_all(scripts: Iterable[Script], plant: str | None) -> Campaign:
    campaign = Campaign()
    bugs = bugs_of(plant)
    for script in scripts:
        campaign.add(run_script(script, bugs))
    if not gc.isenabled():
        gc.collect()
    return campaign


def shrink(script: Script, rule: str, bugs: Bugs) -> Script:
    """The smallest script found, within a bounded number of runs, that still breaks `rule`."""
    runs = 0
    is_smaller = True
    while is_smaller and runs < _MAX_SHRINK_RUNS:
        is_smaller = False
        for candidate in _smaller(script):
            runs += 1
            if _breaks(candidate, rule, bugs):
                script, is_smaller = candidate, True
                break
            if runs >= _MAX_SHRINK_RUNS:
                break
    return script


def _breaks(script: Script, rule: str, bugs: Bugs) -> bool:
    return any(violation.rule == rule for violation in run_script(script, bugs).violations)


def _smaller(script: Script) -> Iterator[Script]:
    for index in range(len(script.faults)):
        faults = script.faults[:index] + script.faults[index + 1 :]
        yield msgspec.structs.replace(script, faults=faults)
    for index in range(len(script.requests) if len(script.requests) > 1 else 0):
        requests = script.requests[:index] + script.requests[index + 1 :]
        yield msgspec.structs.replace(script, requests=requests)
    for index in range(len(script.loads)):
        yield msgspec.structs.replace(script, loads=script.loads[:index] + script.loads[index + 1 :])
    if script.ranks > 1:
        yield msgspec.structs.replace(script, ranks=1)
    stages = max((cache.vllm.stages for cache in script.caches if cache.vllm is not None), default=1)
    if script.layers > stages:
        yield msgspec.structs.replace(script, layers=stages)
