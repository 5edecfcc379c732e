"""Mutation gate of `agent/` and `core/`: one small change at a time, which the simulator or a unit test has to notice.

`python tools/mutants.py [MODULE...]` runs every mutant of these modules (default: all), and keeps a report. Each mutant runs in
a child of its own, forked from this process when everything is imported: the changed function is compiled and put in place of
the real one. There it meets the deck (undisturbed flows and seeds of `kvbaton sim`; those that reach the changed line, cheap
ones first, at most `--runs`) until a rule is broken, then all other runs of the first `--wide` seeds that reach that line, and
then the unit tests of its module, which have to pass without it first. What was found is kept in `--work` as it comes: a run
that was ended continues there (`--fresh` starts over, `--retry` tries what survived again). `--for-s` ends it after so long.

`--draw N` takes about N mutants instead of all: of each module its share, at least `_LEAST` of them, by a seed. The report then
is one of a sample, and states so.

`--again` takes the mutants that the kept report names, as far as the code still has them: a draw changes with the code, and two
reports can be compared only over the same mutants.

`--sample N` takes N mutants that the kept report has as found by the simulator, each with the run that found it, and fails when
neither that run nor another one finds it any more.

`tools/equivalent_mutants.toml` names the mutants that change nothing a peer, an engine or an operator could notice, with the
reason; they do not count. Exit code 1 when a mutant survives that is not listed there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mutant_sites import Site, find_sites, mutate

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_SOURCE = _ROOT / "src" / "kvbaton"
_REPORT = _ROOT / "benchmarks" / "mutants" / "report.json"
_EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
_TABLES = {"_source": "SOURCE", "_target": "TARGET", "_copy": "COPY"}
_LEAST = 3
_BEST = 6
"""How many of the runs that have found most mutants are asked first."""

_ENDLESS_S = 60.0
_UNIT_S = 240.0

_FIRST = ("agent/target.py", "agent/source.py", "core/lifecycle.py", "core/grants.py")
_SIMULATED = (
    *_FIRST,
    "agent/coordinator.py",
    "agent/rank.py",
    "agent/timers.py",
    "agent/decline_notices.py",
    "agent/card_requests.py",
)
"""What the simulator runs in full; of the rest it runs parts."""

_TESTS = {
    "agent/target.py": (
        "agent/test_target",
        "agent/test_hard_ends",
        "agent/test_coordinator",
        "agent/test_sums",
        "agent/test_stamped_handoffs",
        "agent/test_aux_by_data",
        "agent/test_counted_writes",
        "agent/test_lost_writers",
    ),
    "agent/source.py": (
        "agent/test_source",
        "agent/test_source_holds",
        "agent/test_hard_ends",
        "agent/test_coordinator",
        "agent/test_declined_whole",
        "agent/test_sums",
        "agent/test_stamped_handoffs",
        "agent/test_aux_by_data",
        "agent/test_counted_writes",
    ),
    "agent/coordinator.py": (
        "agent/test_coordinator",
        "agent/test_peers",
        "agent/test_source",
        "agent/test_target",
        "agent/test_decline_notices",
        "agent/test_source_holds",
        "agent/test_lost_writers",
    ),
    "agent/rank.py": ("agent/test_rank", "agent/test_backlog", "agent/test_summing", "agent/test_rank_shapes"),
    "agent/timers.py": ("agent/test_alarms", "agent/test_target"),
    "agent/decline_notices.py": (
        "agent/test_decline_notices",
        "agent/test_declined_whole",
        "agent/test_target",
        "agent/test_source_holds",
    ),
    "agent/card_requests.py": (
        "agent/test_card_requests",
        "agent/test_coordinator",
        "agent/test_decline_notices",
        "agent/test_target",
    ),
    "agent/driver.py": (
        "agent/test_driver",
        "agent/test_driver_steps",
        "agent/test_driver_threads",
        "agent/test_driver_writes",
    ),
    "agent/sockets.py": ("agent/test_sockets", "agent/test_driver"),
    "agent/rank_sets.py": ("agent/test_rank_sets", "agent/test_process"),
    "agent/channel.py": ("agent/test_channel", "agent/test_process"),
    "core/layout.py": ("core/test_layout", "core/test_layout_tensors"),
    "core/tensors.py": ("core/test_layout_tensors", "core/test_layout"),
    "core/pair.py": ("core/test_plan", "core/test_legs", "core/test_hand_offs_by_shape"),
    "core/segments.py": ("core/test_plan", "core/test_hand_offs_by_shape"),
    "core/plan.py": ("core/test_plan", "core/test_hand_offs_by_shape"),
    "core/legs.py": ("core/test_legs", "core/test_hand_offs_by_shape"),
    "core/checks.py": ("core/test_checks", "core/test_leg_sums"),
    "core/topology.py": ("core/test_topology", "core/test_card"),
    "core/card.py": ("core/test_card",),
    "core/addresses.py": ("core/test_addresses",),
    "core/auth.py": ("core/test_auth",),
    "core/aux_area.py": ("core/test_aux_area",),
    "core/bounded.py": ("core/test_bounded",),
    "core/messages.py": ("core/test_messages",),
    "core/lifecycle.py": ("core/test_lifecycle", "core/test_diagram", "agent/test_source_holds"),
    "core/grants.py": ("core/test_grants",),
    "core/handoff.py": ("core/test_handoff", "core/test_handoff_checks"),
}
"""The tests that are most likely to notice a change of a module, which are run first."""


class Mutant(NamedTuple):
    """One change of one module."""

    module: str
    number: int
    site: Site

    @property
    def name(self) -> str:
        """The name that is kept: the module, then the site."""
        return f"{self.module} {self.site.name}"


class Deck:
    """The runs of the simulator that mutants meet, and which lines and table rows each of them reaches."""

    def __init__(self, seeds: int, wide: int, work: Path) -> None:
        from kvbaton.sim.exhaustive import FLOWS

        # Drills are cheap, and reach what random runs reach too rarely: ten of eleven runs are, of all lists.
        parts = ((8, 0), (8, 3), (8, 1), (8, 2), (8, 7), (8, 5), (8, 4), (8, 2), (32, 8), (32, 24), (32, 24))
        chosen = [every * number + first for number, (every, first) in zip(range(seeds), itertools.cycle(parts), strict=False)]
        self.labels = [f"flow {name}" for name in FLOWS] + [f"seed {seed}" for seed in chosen]
        self._wide = [f"seed {seed}" for seed in sorted(set(range(wide)) - set(chosen))]
        self._file = work / "reached.jsonl"
        self._reached: dict[str, set[str]] = {}
        self.found_by: Counter[str] = Counter()
        """How many mutants each run has found."""

    def measure(self, jobs: int) -> None:
        """Find out what every run reaches, in `jobs` children, unless that is kept, and have cheap runs first."""
        kept = self._kept()
        new = [label for label in (*self.labels, *self._wide) if label not in kept]
        parts = [partial(self._measure_part, new[job::jobs]) for job in range(jobs)]
        _run_children(parts, self._file.with_name("measured.jsonl"), jobs)
        kept = self._kept()
        if problem := next((problem for _, _, problem in kept.values() if problem), ""):
            # It would find every mutant that reaches it.
            lines = self._file.read_text().splitlines(keepends=True)
            self._file.write_text("".join(line for line in lines if not json.loads(line)["problem"]))
            raise SystemExit(problem)
        self._reached = {label: set(kept[label][1]) for label in (*self.labels, *self._wide)}
        self._wide.sort(key=lambda label: kept[label][0])
        # Of every kind of run the cheapest first, then of every kind the next one: a mutant meets all kinds early.
        self.labels.sort(key=lambda label: kept[label][0])
        turns: Counter[str] = Counter()
        turn_of: dict[str, int] = {}
        for label in self.labels:
            kind = _kind(label)
            turn_of[label], turns[kind] = turns[kind], turns[kind] + 1
        self.labels.sort(key=lambda label: turn_of[label])

    def _kept(self) -> dict[str, tuple[int, list[str], str]]:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return {each["run"]: (each["events"], each["places"], each["problem"]) for each in map(json.loads, lines)}

    def _measure_part(self, labels: list[str]) -> dict[str, Any]:
        # A line for each as it comes: a run that is ended in the middle does not begin anew.
        with self._file.open("ab", buffering=0) as file:
            for label in labels:
                events, places, problem = _reached_by(label)
                line = {"run": label, "events": events, "places": sorted(places), "problem": problem}
                file.write(json.dumps(line).encode() + b"\n")
                if problem:
                    break
        return {"measured": len(labels)}

    def reaching(self, places: Iterable[str], near: Iterable[str]) -> list[str]:
        """The runs that reach one of these places, first those that found most other mutants, or take rare turns `near` it.

        A guard that is forced to one value matters only where it has the other one: there the lines behind it are reached, or
        left out, as in few other runs.
        """
        wanted, around = set(places), set(near)
        reaching = [label for label in self.labels if not wanted.isdisjoint(self._reached[label])]
        met = {label: around & self._reached[label] for label in reaching}
        count = Counter(place for places_met in met.values() for place in places_met)
        rare = sorted(reaching, key=lambda label: -sum(1 / count[place] for place in met[label]))
        best = [label for label, _ in self.found_by.most_common() if label in met][:_BEST]
        mixed = [label for pair in zip(rare, reaching, strict=True) for label in pair]
        return list(dict.fromkeys(best + mixed))

    def reaching_too(self, places: Iterable[str]) -> list[str]:
        """The other runs of the first seeds that reach one of these places, cheap ones first."""
        wanted = set(places)
        return [label for label in self._wide if not wanted.isdisjoint(self._reached[label])]


def _kind(label: str) -> str:
    """The flow, or the drill, or that it is a random run."""
    from kvbaton.sim.drills import drill_of_seed

    kind, _, name = label.partition(" ")
    return name if kind == "flow" else drill_of_seed(int(name))


def _script(label: str) -> Any:
    from kvbaton.sim.drills import script_of_seed
    from kvbaton.sim.exhaustive import flow_script

    kind, _, name = label.partition(" ")
    return script_of_seed(int(name)) if kind == "seed" else flow_script(name)


def _reached_by(label: str) -> tuple[int, set[str], str]:
    """The events of one run, the lines and rows that it reaches, and what is wrong with it without a mutant.

    A function is traced until all its lines were seen.
    """
    from kvbaton.core.lifecycle import Table
    from kvbaton.sim.run import run_script

    reached: set[str] = set()
    unseen: dict[types.CodeType, set[int]] = {}
    prefix = str(_SOURCE)

    def lines(frame: types.FrameType, event: str, argument: object) -> Any:
        del argument
        left = unseen[frame.f_code]
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            reached.add(f"{frame.f_code.co_filename[len(prefix) + 1 :]}:{frame.f_lineno}")
        return lines if left else None

    def calls(frame: types.FrameType, event: str, argument: object) -> Any:
        del event, argument
        code = frame.f_code
        if code not in unseen:
            path = code.co_filename
            is_ours = path.startswith((f"{prefix}/agent", f"{prefix}/core"))
            unseen[code] = {line for _, _, line in code.co_lines() if line is not None} if is_ours else set()
        return lines if unseen[code] else None

    step = Table.step

    def noted(table: Any, state: Any, event: Any) -> Any:
        reached.add(f"{table.name}:{state}:{event}")
        return step(table, state, event)

    Table.step = noted  # type: ignore[assignment,method-assign]
    sys.settrace(calls)
    try:
        result = run_script(_script(label))
    finally:
        sys.settrace(None)
        Table.step = step  # type: ignore[method-assign]
    first = result.violations[0] if result.violations else None
    problem = "" if first is None else f"without a mutant, {label} breaks {first.rule!r}: {first.detail}"
    return result.events, reached, problem


# In the child: put a change in place, and look whether it is noticed.


def _install(mutant: Mutant) -> tuple[set[str], set[str]]:
    """Put the changed function in place of the real one.

    Returns the places that a run has to reach to meet the change, and those of the whole function.
    """
    module = importlib.import_module("kvbaton." + mutant.module.removesuffix(".py").replace("/", "."))
    path = _SOURCE / mutant.module
    code = compile(mutate(path.read_text(), mutant.number), str(path), "exec")
    owner: Any = module
    for name in mutant.site.function.split("."):
        owner = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    function: Any = getattr(owner, "__wrapped__", owner)
    function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
    near = {f"{mutant.module}:{line}" for _, _, line in function.__code__.co_lines() if line is not None}
    function.__code__ = _code_of(code, mutant.site.function)
    if mutant.site.function in _TABLES:
        places = _rebuild(module, mutant.site.function)
        return places, places
    return {f"{mutant.module}:{mutant.site.line}"}, near


def _code_of(code: types.CodeType, name: str) -> types.CodeType:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == name:
                return constant
            with contextlib.suppress(LookupError):
                return _code_of(constant, name)
    raise LookupError(name)


def _rebuild(module: Any, builder: str) -> set[str]:
    """Fill the table that is in use with what its changed builder makes."""
    table, changed = getattr(module, _TABLES[builder]), getattr(module, builder)()
    keys = {key for key in table.rows.keys() | changed.rows.keys() if table.rows.get(key) != changed.rows.get(key)}
    keys |= table.late ^ changed.late
    for name in ("rows", "late", "terminal"):
        object.__setattr__(table, name, getattr(changed, name))
    return {f"{table.name}:{state}:{event}" for state, event in keys}


class _Endless(BaseException):
    pass


def _on_alarm(number: int, frame: object) -> None:
    del number, frame
    raise _Endless


def _simulate(labels: Iterable[str]) -> dict[str, Any] | None:
    """The first run that notices something, and the rule that it found broken."""
    from kvbaton.sim.run import run_script

    for runs, label in enumerate(labels, 1):
        signal.setitimer(signal.ITIMER_VIRTUAL, _ENDLESS_S)
        try:
            violations = run_script(_script(label)).violations
        except Exception as error:  # noqa: BLE001 - a mutant may raise anything
            return {"by": "sim", "rule": "exception", "run": label, "runs": runs, "detail": repr(error)[:200]}
        if violations:
            first = violations[0]
            return {"by": "sim", "rule": first.rule, "run": label, "runs": runs, "detail": first.detail[:200]}
    return None


def _test(module: str, *, is_deep: bool) -> dict[str, Any] | None:
    """The first unit test that fails."""
    import pytest

    # Tests read what is logged; only the simulator is to be quiet.
    logging.disable(logging.NOTSET)

    class Watch:
        failed = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

    base = _ROOT / "tests" / "unit"
    first = [str(base / f"{name}.py") for name in _TESTS.get(module, ())]
    own = base / module.split("/")[0]
    rest = [str(path) for path in sorted(own.glob("test_*.py")) if str(path) not in first]
    for files in (first, rest if is_deep or not first else []):
        watch = Watch()
        arguments = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(_ROOT), *files]
        if files and pytest.main(arguments, plugins=[watch]) not in (0, 5):
            return {"by": "unit", "rule": watch.failed or "collection"}
    return None


def _examine(mutant: Mutant, deck: Deck, options: argparse.Namespace, known: str) -> dict[str, Any]:
    """What notices this mutant; runs in the child."""
    signal.signal(signal.SIGVTALRM, _on_alarm)
    began = time.process_time()
    found: dict[str, Any] | None
    reaching: list[str] = []
    try:
        try:
            places, near = _install(mutant)
            reaching = [known] if known else deck.reaching(places, near)[: options.runs] + deck.reaching_too(places)
            found = _simulate(reaching)
        except Exception as error:  # noqa: BLE001 - a mutant may raise anything
            found = {"by": "sim", "rule": "exception", "run": "import", "runs": 0, "detail": repr(error)[:200]}
        if found is None and options.unit:
            signal.setitimer(signal.ITIMER_VIRTUAL, _UNIT_S)
            found = _test(mutant.module, is_deep=options.deep)
    except _Endless:
        found = {"by": "sim", "rule": "endless"}
    found = found or {"by": None}
    return {**found, "reaching": len(reaching), "cpu_s": round(time.process_time() - began, 2)}


# In the parent.


def _check_control(modules: Iterable[str], options: argparse.Namespace) -> None:
    """Run the unit tests of these modules without a mutant: one that fails by itself would notice everything."""
    results = options.work / "control.jsonl"
    passed = _read(results)
    left = [partial(_control, module, options) for module in modules if module not in passed]
    _run_children(left, results, options.jobs)
    for module, result in _read(results).items():
        if result["rule"]:
            results.unlink()
            raise SystemExit(f"without a mutant of {module}, {result['rule']} fails: make it pass first")


def _control(module: str, options: argparse.Namespace) -> dict[str, Any]:
    failed = _test(module, is_deep=options.deep)
    return {"mutant": module, "rule": "" if failed is None else failed["rule"]}


def _fork(work: Callable[[], dict[str, Any]], results: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.nice(5)
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(quiet, number)
        sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(os.dup(quiet), "w"))
        line = json.dumps(work()).encode() + b"\n"
        with results.open("ab", buffering=0) as file:
            file.write(line)
        status = 0
    finally:
        os._exit(status)
    raise AssertionError("unreachable")


def _run_children(works: Iterable[Callable[[], dict[str, Any]]], results: Path, jobs: int) -> None:
    """Do all of it, `jobs` children at a time; each result is a line of `results`. Raises SystemExit when one has none."""
    running: set[int] = set()
    left = iter(works)
    while True:
        while len(running) < jobs and (work := next(left, None)) is not None:
            running.add(_fork(work, results))
        if not running:
            return
        pid, status = os.wait()
        running.discard(pid)
        if status:
            for other in running:
                os.kill(other, signal.SIGTERM)
            raise SystemExit(f"a child that works for {results.name} has ended without a result")


def _run_all(mutants: list[Mutant], deck: Deck, options: argparse.Namespace, results: Path, known: dict[str, str]) -> None:
    """Examine mutants in `options.jobs` children at a time, until all are done or the time is up."""
    until = time.monotonic() + options.for_s
    running: dict[int, Mutant] = {}
    left = iter(mutants)
    done = 0
    while True:
        while len(running) < options.jobs and time.monotonic() < until and (mutant := next(left, None)) is not None:

            def work(mutant: Mutant = mutant) -> dict[str, Any]:
                return {"mutant": mutant.name, **_examine(mutant, deck, options, known.get(mutant.name, ""))}

            running[_fork(work, results)] = mutant
        if not running:
            return
        pid, status = os.wait()
        mutant = running.pop(pid)
        done += 1
        if status:
            with results.open("ab", buffering=0) as file:
                file.write(json.dumps({"mutant": mutant.name, "by": "sim", "rule": "crash", "cpu_s": 0}).encode() + b"\n")
        deck.found_by = Counter(
            each["run"] for each in _read(results).values() if each.get("run", "").startswith(("flow", "seed"))
        )
        if sys.stderr.isatty() or done % 50 == 0:
            sys.stderr.write(f"\r{done} of {len(mutants)} ")


def _all_mutants(modules: Iterable[str]) -> Iterator[Mutant]:
    for module in modules:
        for number, site in enumerate(find_sites((_SOURCE / module).read_text())):
            if site.function:
                yield Mutant(module, number, site)


def _modules() -> list[str]:
    found = [f"{part}/{path.name}" for part in ("agent", "core") for path in sorted((_SOURCE / part).glob("*.py"))]
    return [*_SIMULATED, *(module for module in found if module not in _SIMULATED)]


def _equivalent() -> dict[str, str]:
    if not _EQUIVALENT.exists():
        return {}
    listed = tomllib.loads(_EQUIVALENT.read_text())["mutant"]
    return {each["name"]: each["reason"] for each in listed}


def _read(results: Path) -> dict[str, dict[str, Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {each["mutant"]: each for each in map(json.loads, lines)}


def _report(mutants: list[Mutant], found: dict[str, dict[str, Any]], equivalent: dict[str, str]) -> dict[str, Any]:
    modules: dict[str, Counter[str]] = defaultdict(Counter)
    survivors: list[dict[str, Any]] = []
    unit: list[dict[str, Any]] = []
    killed: list[dict[str, Any]] = []
    rules: Counter[str] = Counter()
    for mutant in mutants:
        result = found.get(mutant.name)
        kind = "not run" if result is None else str(result["by"] or "survived")
        if mutant.name in equivalent and kind in ("survived", "not run"):
            kind = "equivalent"
        modules[mutant.module][kind] += 1
        entry = {"mutant": mutant.name, "line": mutant.site.line}
        if kind == "survived" and result is not None:
            survivors.append({**entry, "reaching": result.get("reaching")})
        elif kind == "unit" and result is not None:
            unit.append({**entry, "test": result["rule"], "reaching": result.get("reaching")})
        elif kind == "sim" and result is not None:
            rules[result["rule"]] += 1
            killed.append({**entry, "rule": result["rule"], "run": result.get("run", "")})
    total = sum((counts for counts in modules.values()), Counter[str]())
    simulated = sum((counts for module, counts in modules.items() if module in _SIMULATED), Counter[str]())
    return {
        "counts": dict(total),
        "score_sim": _share(total, "sim"),
        "score_sim_of_simulated": _share(simulated, "sim"),
        "score_all": _share(total, "sim", "unit"),
        "modules": {module: dict(counts) for module, counts in modules.items()},
        "rules": dict(rules.most_common()),
        "survivors": survivors,
        "unit_only": unit,
        "equivalent": [{"mutant": name, "reason": reason} for name, reason in sorted(equivalent.items())],
        "found": killed,
    }


def _share(counts: Counter[str], *kinds: str) -> float | None:
    """How many of the mutants that ran, and are not equivalent, were noticed by these."""
    ran = counts["sim"] + counts["unit"] + counts["survived"]
    return round(sum(counts[kind] for kind in kinds) / ran, 4) if ran else None


def _commit() -> str:
    """Which commit the mutants are of, with a mark when the tree has changes."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """A sample in which every module has its share, in the order of the whole."""
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_module[mutant.module].append(mutant)
    drawn: set[str] = set()
    for module, own in by_module.items():
        share = max(_LEAST, round(count * len(own) / len(mutants)))
        drawn |= {each.name for each in random.Random(f"{module} {seed}").sample(own, min(share, len(own)))}
    return [mutant for mutant in mutants if mutant.name in drawn]


def _named_in_report(mutants: list[Mutant]) -> list[Mutant]:
    """Those that the kept report is about; without those that were equivalent when it was made."""
    kept = json.loads(_REPORT.read_text())
    names = {each["mutant"] for part in ("survivors", "unit_only", "found") for each in kept[part]}
    return [mutant for mutant in mutants if mutant.name in names]


def _sample(mutants: list[Mutant], count: int) -> tuple[list[Mutant], dict[str, str]]:
    if not _REPORT.exists():
        sys.stdout.write(f"no report is kept in {_REPORT}: nothing to take a sample of; make test-mutants makes one\n")
        return [], {}
    kept = {each["mutant"]: each["run"] for each in json.loads(_REPORT.read_text())["found"]}
    runs = {name: run for name, run in kept.items() if run.startswith(("flow", "seed"))}
    able = [mutant for mutant in mutants if mutant.name in runs]
    chosen = random.Random(f"sample {count}").sample(able, min(count, len(able)))
    return chosen, runs


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="such as agent/target.py; default: all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds the deck has")
    parser.add_argument("--runs", type=int, default=250, help="how many runs of the deck a mutant meets at most")
    parser.add_argument("--wide", type=int, default=0, help="what these do not find meets so many seeds from 0 on, too")
    parser.add_argument("--for-s", type=float, default=float("inf"), help="start no mutant after so long")
    parser.add_argument("--work", type=Path, default=_ROOT / "build" / "mutants")
    parser.add_argument("--report", type=Path, default=_REPORT)
    parser.add_argument("--unit", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--deep", action="store_true", help="all unit tests of agent and core, not only the likely ones")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--retry", choices=("survived", "unit"), help="try again what survived, or what only unit tests found")
    parser.add_argument("--only", default="", help="a regular expression that the names of mutants have to match")
    parser.add_argument("--every", type=int, default=1, help="only every so-many-th mutant")
    parser.add_argument("--draw", type=int, default=0, help="about so many mutants, drawn by --draw-seed, instead of all")
    parser.add_argument("--draw-seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="the mutants of the kept report, instead of all")
    parser.add_argument("--sample", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in ("kvbaton.sim.campaign", "kvbaton.agent.driver", "hypothesis", "pytest"):
        importlib.import_module(name)
    options.work.mkdir(parents=True, exist_ok=True)
    results = options.work / "results.jsonl"
    every = [each for each in _all_mutants(options.modules or _modules()) if re.search(options.only, each.name)]
    every = every[:: options.every]
    total = len(every)
    if options.again:
        every = _named_in_report(every)
    elif options.draw:
        every = _draw(every, options.draw, options.draw_seed)
    known: dict[str, str] = {}
    deck = Deck(options.seeds, options.wide, options.work)
    if options.sample:
        mutants, known = _sample(every, options.sample)
        results = options.work / "sample.jsonl"
        options.unit, options.fresh = False, True
    else:
        mutants = every
        deck.measure(options.jobs)
        if options.unit:
            _check_control(dict.fromkeys(mutant.module for mutant in mutants), options)
    if options.fresh:
        results.unlink(missing_ok=True)
    found, equivalent = _read(results), _equivalent()
    again = {"survived": (None,), "unit": (None, "unit")}.get(options.retry, ())
    todo = [each for each in mutants if each.name not in equivalent]
    todo = [each for each in todo if each.name not in found or found[each.name]["by"] in again]
    _run_all(todo, deck, options, results, known)
    if options.sample and (missed := [each for each in todo if _read(results)[each.name]["by"] is None]):
        # A change of scripts or rules may turn one run into another: any run of the deck may find them.
        deck.measure(options.jobs)
        _run_all(missed, deck, options, results, {})
    drawn = {"drawn": len(every), "draw_seed": options.draw_seed} if options.draw or options.again else {}
    kept = {"commit": _commit(), "mutants": total, **drawn}
    report: dict[str, Any] = {**kept, **_report(mutants, _read(results), equivalent)}
    if not options.sample:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report, indent=1) + "\n")
    for each in report["survivors"]:
        sys.stdout.write(f"survived: {each['mutant']} (line {each['line']})\n")
    counts = ", ".join(f"{count} {kind}" for kind, count in report["counts"].items())
    scores = f"{report['score_sim']}, of what it runs in full {report['score_sim_of_simulated']}"
    sys.stdout.write(f"{counts}; score of the simulator {scores}, with unit tests {report['score_all']}\n")
    return 1 if report["survivors"] else 0


if __name__ == "__main__":
    sys.exit(main())
