"""The owner's side of the exchange, under faults that seeds decide; and the plants that its checks must find."""

from __future__ import annotations

from collections import Counter

import pytest

from kvbaton.sim.exchange import EXCHANGE_PLANTS, ExchangeViolation, run_exchange

_SEEDS = 60


def test_every_rule_holds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(_SEEDS):
        counts.update(run_exchange(seed))
    assert min(counts[each] for each in ("ok", "refused", "withdrawn")) > _SEEDS


def _first_violation(plant: str) -> str:
    for seed in range(_SEEDS):
        try:
            run_exchange(seed, EXCHANGE_PLANTS[plant])
        except ExchangeViolation as violation:
            return str(violation)
    return "none"


@pytest.mark.parametrize(
    ("plant", "rule"),
    [("late-store", "changed after the memory was withdrawn"), ("early-notice", "notice is here before the bytes")],
)
def test_plants_are_found(plant: str, rule: str) -> None:
    assert rule in _first_violation(plant)


def test_runs_are_repeatable() -> None:
    assert run_exchange(5) == run_exchange(5)
