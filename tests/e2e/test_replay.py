"""Fault schedules of the simulator on real processes: a few of them; `tools/replay.py` runs them for hours.

The rules are the simulator's: every request ends, with its cache or with a named error; one that no fault has reached is
served; every byte that landed is the right one, when it lands and when it is freed; no hand-off, block or port is left; and
when all faults are over, every pair hands off again.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hosts import can_have_two_hosts
from replay import ROUNDS, replay_round

from kvbaton.bench.replay.instance import PLANTS

pytestmark = pytest.mark.e2e

NAMES = ["p0", "p1", "d0", "d1"]
SEEDS = (24, 117, 133, 259, 303, 307, 318, 365)
"""Schedules with several faults that are soon over: together crashes, pauses, cuts, lost, late and doubled messages, copies
that fail or are refused, preemption, aborts, ranks that die and agents' threads that stand still."""
CALM = 6
"""A schedule without any fault: what goes wrong then is the plant's."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [0, 2, 4, 6])
@pytest.mark.parametrize("kind", ROUNDS)
def test_every_rule_holds_on_real_processes(kind: str, first: int) -> None:
    if kind == "hosts" and not can_have_two_hosts():
        pytest.skip("needs root, ip, tc and /dev/net/tun")
    seeds = iter(SEEDS[first : first + 2])
    results = replay_round(kind, first, NAMES, seeds, count=2, until=math.inf, scale=1.5)
    assert [finding for result in results for finding in result.findings] == []
    assert sum(sum(result.faults.values()) for result in results) > 0
    assert sum(result.probes for result in results) >= 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_is_found_by_the_rule_that_it_breaks(plant: str) -> None:
    (result,) = replay_round(
        "local", 0, ["p0", "d0"], itertools.repeat(CALM), count=1, until=math.inf, scale=0.5, slack_s=3.0, plant=plant
    )
    assert PLANTS[plant] in {finding.rule for finding in result.findings}, result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["rank processes", "hosts"])
def test_writes_that_are_dropped_are_found_in_every_kind_of_round(kind: str) -> None:
    if kind == "hosts" and not can_have_two_hosts():
        pytest.skip("needs root, ip, tc and /dev/net/tun")
    (result,) = replay_round(
        kind, 0, ["p0", "d0"], itertools.repeat(CALM), count=1, until=math.inf, scale=1.5, plant="drop-writes"
    )
    assert {finding.rule for finding in result.findings} == {"foreign byte"}, result
