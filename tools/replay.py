"""Fault schedules of the simulator on real processes, one after another, for as long as it is given.

    replay.py [--for-s 60] [--seed 1] [--log FILE] [--plant NAME] [--scale 1.5] [--prefills 3] [--decodes 3]

Several prefill and decode instances run in rounds: on this host over `local`, with their ranks in processes of their own, and,
where namespaces can be made, each on a host of its own over `tcp`, with real packets between them that can be cut. Within a
round the same processes play one script after another, so that what a script leaves behind is found by the next. Exits with 1
when a rule did not hold. The log is one JSON object; a further run with the same `--log` continues it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests" / "e2e"))

from hosts import Host, Switch, can_have_two_hosts, hosts

from kvbaton.bench.replay.house import House, HouseLinks, HousePlace
from kvbaton.bench.replay.instance import PLANTS, ReplaySettings
from kvbaton.bench.replay.run import SLACK_S, Finding, Replay, Replayed, limits_for
from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import AuxChannel, Integrity
from kvbaton.sim.script import Fault, FaultKind, Script, make_script

__all__ = ["ROUNDS", "main", "replay_round", "replayed_script"]

_ROOT = Path(__file__).parents[1]
_BLOCKS = 96
_MOST_TOKENS = 16 * 8
_KEY = "the key of instances that are gone after the replay"
_DELAY_S = 0.0005
_MORE_FAULTS = 0.4

ROUNDS = ("local", "rank processes", "hosts")
"""How the instances of a round live."""


class PacketLinks(HouseLinks):
    """Links between hosts of their own, cut packet by packet."""

    def __init__(self, switch: Switch, places: dict[str, Host]) -> None:
        self._switch = switch
        self._places = places
        self._cuts: Counter[tuple[str, str]] = Counter()

    def cut(self, sender: str, receiver: str) -> None:
        self._cuts[sender, receiver] += 1
        self._apply()

    def join(self, sender: str, receiver: str) -> None:
        self._cuts[sender, receiver] -= 1
        self._apply()

    def _apply(self) -> None:
        self._switch.join()
        for sender, receiver in +self._cuts:
            self._switch.stop(self._places[sender], self._places[receiver])


def replayed_script(seed: int) -> Script:
    """The script of a seed, sometimes with a fault that random runs of the simulator leave to its drills."""
    script = make_script(seed)
    rng = random.Random(f"more {seed}")
    if rng.random() >= _MORE_FAULTS:
        return script
    kind = rng.choice((FaultKind.CRASH_RANK, FaultKind.STALL_AGENT))
    more = Fault(kind, rng.uniform(0.0, 2.0), who=rng.choice(script.addresses), for_s=rng.choice((0.05, 0.5, 2.0, 5.0)))
    return msgspec.structs.replace(script, faults=(*script.faults, more))


@contextmanager
def _house(kind: str, number: int, names: list[str], scale: float, plant: str) -> Iterator[tuple[House, HouseLinks | None]]:
    rng = random.Random(f"round {number}")
    integrity, aux_channel = rng.choice(list(Integrity)), rng.choice(list(AuxChannel))
    if plant == "drop-writes":
        # Checksums would notice it first, and then nothing wrong lands.
        integrity = Integrity.OFF
    settings = ReplaySettings(
        _BLOCKS,
        _MOST_TOKENS,
        "tcp" if kind == "hosts" else "local",
        HandoffSettings(integrity=integrity, aux_channel=aux_channel),
        limits=limits_for(scale),
        has_rank_process=kind == "rank processes",
        step_s=rng.choice((0.001, 0.005, 0.02)),
        cluster_key=_KEY if kind == "hosts" else "",
    )
    # A mistake of targets is one of the first target, the others are right.
    plants = {name: plant for name in names if plant and name == ("p0" if plant == "stay-cut" else "d0")}
    with ExitStack() as parts:
        if kind != "hosts":
            yield parts.enter_context(House(names, settings, plants)), None
            return
        switch, (_, *made) = parts.enter_context(hosts(len(names)))
        switch.delay_s = _DELAY_S
        by_name = dict(zip(names, made, strict=True))
        places = {name: HousePlace(host.ipv4, tuple(host.named_command())) for name, host in by_name.items()}
        yield parts.enter_context(House(names, settings, plants, places)), PacketLinks(switch, by_name)


def replay_round(
    kind: str,
    number: int,
    names: list[str],
    seeds: Iterator[int],
    *,
    count: int,
    until: float,
    scale: float,
    plant: str = "",
    slack_s: float = SLACK_S,
) -> list[Replayed]:
    """One round of at most `count` scripts, until `until`; its last result also has what its end showed."""
    results: list[Replayed] = []
    with _house(kind, number, names, scale, plant) as (house, links):
        while len(results) < count and time.monotonic() < until:
            seed = next(seeds)
            results.append(Replay(replayed_script(seed), house, links, scale, shift=seed, slack_s=slack_s).run())
            last = results[-1]
            print(  # noqa: T201
                f"{kind}, seed {seed}: {last.seconds:.1f} s, {last.delivered} of {last.requests} delivered, "
                f"{sum(last.faults.values())} faults, {'; '.join(f'{f.rule}: {f.detail}' for f in last.findings) or 'clean'}",
                flush=True,
            )
            if last.findings:
                # What it left behind would be found again by every script that follows.
                return results
        results[-1].findings += [Finding("an orderly end", each) for each in house.stop()]
    return results


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    scripts = [script for each in rounds for script in each["scripts"]]

    def together(name: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for script in scripts:
            total.update(script[name])
        return dict(total.most_common())

    return {
        "rounds": dict(Counter(each["kind"] for each in rounds)),
        "scripts": len(scripts),
        "seconds": round(sum(script["seconds"] for script in scripts)),
        "requests": sum(script["requests"] for script in scripts),
        "delivered": sum(script["delivered"] for script in scripts),
        "probes": sum(script["probes"] for script in scripts),
        "faults": together("faults"),
        "left_out": together("left_out"),
        "outcomes": together("outcomes"),
        "reasons": together("reasons"),
        "findings": [{"seed": each["seed"], **finding} for each in scripts for finding in each["findings"]],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--plant", choices=sorted(PLANTS), default="")
    parser.add_argument("--scale", type=float, default=1.5)
    parser.add_argument("--prefills", type=int, default=3)
    parser.add_argument("--decodes", type=int, default=3)
    parser.add_argument("--per-round", type=int, default=8)
    parser.add_argument("--round", choices=ROUNDS, help="one kind of round only")
    chosen = parser.parse_args(arguments)
    names = [f"p{i}" for i in range(chosen.prefills)] + [f"d{i}" for i in range(chosen.decodes)]
    kinds = [chosen.round] if chosen.round else [kind for kind in ROUNDS if kind != "hosts" or can_have_two_hosts()]
    rounds: list[dict[str, Any]] = []
    if chosen.log is not None and chosen.log.exists():
        rounds = json.loads(chosen.log.read_text())["rounds"]
    first = chosen.seed + sum(len(each["scripts"]) for each in rounds)
    seeds = iter(range(first, first + 1_000_000))
    until = time.monotonic() + chosen.for_s
    has_findings = False
    while time.monotonic() < until:
        number = len(rounds)
        kind = kinds[number % len(kinds)]
        results = replay_round(
            kind, number, names, seeds, count=chosen.per_round, until=until, scale=chosen.scale, plant=chosen.plant
        )
        has_findings |= any(result.findings for result in results)
        rounds.append({"kind": kind, "commit": _commit(), "scale": chosen.scale, "scripts": msgspec.to_builtins(results)})
        if chosen.log is not None:
            chosen.log.parent.mkdir(parents=True, exist_ok=True)
            chosen.log.write_text(json.dumps({"summary": _summary(rounds), "rounds": rounds}, indent=1) + "\n")
    print(json.dumps(_summary(rounds), indent=1))  # noqa: T201
    return int(has_findings)


if __name__ == "__main__":
    sys.exit(main())
