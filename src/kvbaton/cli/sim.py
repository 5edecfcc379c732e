"""`kvbaton sim`: deterministic fault simulation of the hand-off protocol."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvbaton.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from kvbaton.sim.campaign import Campaign
    from kvbaton.sim.script import Script

__all__ = ["sim"]

_FOUND = 1
_SHOWN = 5


def sim(
    *,
    seeds: int = 200,
    first_seed: int = 0,
    seed: int | None = None,
    replay: Annotated[bool, Parameter(negative=())] = False,
    script: str | None = None,
    exhaustive: Annotated[bool, Parameter(negative=())] = False,
    exchange: Annotated[bool, Parameter(negative=())] = False,
    plant: str | None = None,
    list_plants: Annotated[bool, Parameter(negative=())] = False,
    json: JsonOption = False,
) -> int:
    """Run the production coordinators and agents on a simulated clock, network and memory, under faults.

    Exits with 0 when every rule held in every run, with 1 when one was broken, with 2 when it could not be run.

    Parameters
    ----------
    seeds
        how many random runs.
    first_seed
        the first seed.
    seed
        run only this one.
    replay
        show the timeline of a single run (with --seed or --script).
    script
        run exactly this script, as printed with a violation.
    exhaustive
        instead of random runs, every single fault at every stage of every flow.
    exchange
        instead of hand-offs, simulate the exchange under the drop-in for MoRI: writes, notices, memories that are withdrawn.
    plant
        arm one known mistake; it must be found. One of the exchange implies --exchange.
    list_plants
        show the known mistakes.
    """
    from kvbaton.errors import ConfigError
    from kvbaton.sim.exchange import EXCHANGE_PLANTS
    from kvbaton.sim.plants import PLANTS

    if list_plants:
        return _list_plants()
    if plant is not None and plant not in {**PLANTS, **EXCHANGE_PLANTS}:
        raise ConfigError(f"unknown plant {plant!r}; known are {', '.join((*PLANTS, *EXCHANGE_PLANTS))}")
    exchange = exchange or plant in EXCHANGE_PLANTS
    if exchange and plant in PLANTS:
        raise ConfigError(f"--plant {plant} is a mistake of hand-offs; with --exchange use {' or '.join(EXCHANGE_PLANTS)}")
    if exchange and (replay or script is not None or exhaustive):
        raise ConfigError("runs of the exchange are named by their seeds alone: leave out --replay, --script and --exhaustive")
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; it must be at least 1")
    if exhaustive and (seed is not None or script is not None):
        raise ConfigError("--exhaustive tries every fault; it does not go with --seed or --script")
    if seed is not None and script is not None:
        raise ConfigError("--seed and --script each name one run; give one of them")
    if replay and seed is None and script is None:
        raise ConfigError("--replay shows one run; name it with --seed or --script")
    if exchange:
        chosen = (first_seed, seeds) if seed is None else (seed, 1)
        return _exchange(*chosen, plant, json)
    with _without_logs():
        if seed is not None or script is not None:
            campaign = _one(seed, script, plant, replay and not json)
        else:
            campaign = _many(seeds, first_seed, plant, exhaustive)
        settings = {"seeds": seeds, "first_seed": first_seed, "seed": seed, "exhaustive": exhaustive}
        _show(campaign, settings, plant, json)
    return _FOUND if campaign.violations else 0


@contextmanager
def _without_logs() -> Iterator[None]:
    """Thousands of simulated failures are no news."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _one(seed: int | None, text: str | None, plant: str | None, replay: bool) -> Campaign:
    from kvbaton.sim.campaign import Campaign, bugs_of
    from kvbaton.sim.drills import script_of_seed
    from kvbaton.sim.run import run_script

    chosen = _parse(text) if text is not None else script_of_seed(seed or 0)
    result = run_script(chosen, bugs_of(plant), keep_timeline=replay)
    for at_s, line in result.timeline:
        sys.stdout.write(f"{at_s:10.4f}  {line}\n")
    campaign = Campaign()
    campaign.add(result)
    return campaign


def _exchange(first: int, seeds: int, plant: str | None, as_json: bool) -> int:
    from kvbaton.sim.exchange import run_exchange_seeds

    with _without_logs(), _progress("random seeds", seeds) as on_progress:
        campaign = run_exchange_seeds(first, seeds, plant, on_progress)
    found = campaign.violations[:_SHOWN]
    if as_json:
        settings = {"seeds": seeds, "first_seed": first, "exchange": True}
        violations = [{"seed": each.seed, "step": each.step, "rule": each.rule} for each in found]
        counts = dict(sorted(campaign.counts.items()))
        print_json("sim", not found, settings, seeds=campaign.runs, calls=counts, violations=violations, plant=plant)
        return _FOUND if found else 0
    console = Console()
    calls = ", ".join(f"{count} {outcome}" for outcome, count in sorted(campaign.counts.items()))
    console.print(f"{campaign.runs} runs of the exchange: {calls or 'none complete'}", highlight=False)
    planted = "--exchange" if plant is None else f"--plant {plant}"
    for each in found:
        console.print(f"[bold red]{each.rule}[/] (seed {each.seed}, step {each.step})", highlight=False)
        console.print(f"  kvbaton sim {planted} --seed {each.seed}", markup=False, highlight=False)
    _conclude(console, bool(found), plant)
    return _FOUND if found else 0


def _conclude(console: Console, is_found: bool, plant: str | None) -> None:
    if not is_found:
        console.print("[bold green]every rule held[/]" if plant is None else f"[bold red]{plant} was not found[/]")


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of the runs are done, and how long the others will take, on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda runs: progress.update(task, completed=runs)


def _parse(text: str) -> Script:
    import msgspec

    from kvbaton.errors import ConfigError
    from kvbaton.sim.script import Script

    try:
        return msgspec.json.decode(text, type=Script)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--script is not a script: {error}") from error


def _many(seeds: int, first_seed: int, plant: str | None, exhaustive: bool) -> Campaign:
    from kvbaton.sim.campaign import count_exhaustive, run_exhaustive, run_seeds

    what, total = ("every single fault", count_exhaustive()) if exhaustive else ("random seeds", seeds)
    with _progress(what, total) as on_progress:
        if exhaustive:
            return run_exhaustive(plant, on_progress, stop_at_first=plant is not None)
        return run_seeds(first_seed, seeds, plant, on_progress, stop_at_first=plant is not None)


def _show(campaign: Campaign, settings: dict[str, Any], plant: str | None, as_json: bool) -> None:
    import msgspec

    from kvbaton.sim.campaign import bugs_of, shrink

    violations = [
        {
            "seed": script.seed,
            "rule": violation.rule,
            "detail": violation.detail,
            "script": msgspec.json.encode(shrink(script, violation.rule, bugs_of(plant))).decode(),
        }
        for script, violation in campaign.violations[:_SHOWN]
    ]
    if as_json:
        facts = {"seeds": campaign.runs, "events": campaign.events, "faults": dict(sorted(campaign.faults.items()))}
        print_json("sim", not campaign.violations, settings, **facts, violations=violations, plant=plant)
        return
    console = Console()
    faults = sum(campaign.faults.values())
    runs = "1 run" if campaign.runs == 1 else f"{campaign.runs} runs"
    console.print(f"{runs}, {campaign.events} events, {faults} faults", highlight=False)
    for found in violations:
        console.print(f"[bold red]{found['rule']}[/] (seed {found['seed']}): ", end="")
        console.print(found["detail"], markup=False, highlight=False, soft_wrap=True)
        planted = "" if plant is None else f" --plant {plant}"
        replay = f"  kvbaton sim{planted} --replay --script '{found['script']}'"
        console.print(replay, markup=False, highlight=False, soft_wrap=True)
    _conclude(console, bool(campaign.violations), plant)


def _list_plants() -> int:
    from kvbaton.sim.exchange import EXCHANGE_PLANTS
    from kvbaton.sim.plants import PLANTS

    table = Table("plant", "the mistake", "the rule that it breaks")
    for name, plant in PLANTS.items():
        table.add_row(name, plant.mistake, plant.rule)
    for name, bugs in EXCHANGE_PLANTS.items():
        table.add_row(name, bugs.mistake, bugs.rule)
    Console().print(table)
    return 0
