"""`kvbaton sim`: deterministic fault simulation of the hand-off protocol."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress
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
    plant
        arm one known mistake; it must be found.
    list_plants
        show the known mistakes.
    """
    from kvbaton.errors import ConfigError
    from kvbaton.sim.plants import PLANTS

    if list_plants:
        return _list_plants()
    if plant is not None and plant not in PLANTS:
        raise ConfigError(f"unknown plant {plant!r}; known are {', '.join(PLANTS)}")
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; it must be at least 1")
    if exhaustive and (seed is not None or script is not None):
        raise ConfigError("--exhaustive tries every fault; it does not go with --seed or --script")
    if seed is not None and script is not None:
        raise ConfigError("--seed and --script each name one run; give one of them")
    if replay and seed is None and script is None:
        raise ConfigError("--replay shows one run; name it with --seed or --script")
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


def _parse(text: str) -> Script:
    import msgspec

    from kvbaton.errors import ConfigError
    from kvbaton.sim.script import Script

    try:
        return msgspec.json.decode(text, type=Script)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--script is not a script: {error}") from error


def _many(seeds: int, first_seed: int, plant: str | None, exhaustive: bool) -> Campaign:
    from kvbaton.sim.campaign import run_exhaustive, run_seeds

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("every single fault" if exhaustive else "random seeds", total=None if exhaustive else seeds)

        def on_progress(runs: int) -> None:
            progress.update(task, completed=runs)

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
    if not campaign.violations:
        console.print("[bold green]every rule held[/]" if plant is None else f"[bold red]{plant} was not found[/]")


def _list_plants() -> int:
    from kvbaton.sim.plants import PLANTS

    table = Table("plant", "the mistake", "the rule that it breaks")
    for name, plant in PLANTS.items():
        table.add_row(name, plant.mistake, plant.rule)
    Console().print(table)
    return 0
