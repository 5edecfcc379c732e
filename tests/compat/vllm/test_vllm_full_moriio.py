"""Two vLLM servers with vLLM's own MoRIIOConnector, unchanged, on the drop-in for MoRI: behind our router, behind the real
vllm-router and behind vLLM's toy proxy, and with many requests at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from vllm_moriio import FRONTS, StockStand, prompts_of, stock_stand

from kvbaton.core.handoff import Mode

pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=list(Mode), ids=str)
def stock(request: pytest.FixtureRequest) -> Iterator[StockStand]:
    with stock_stand(request.param) as running:
        yield running


def test_64_at_once(stock: StockStand) -> None:
    with stock.behind("kvbaton") as url:
        assert Counter(stock.verdicts(url, prompts_of(64, 90, "many"), 4)) == {"equal": 64}


@pytest.mark.parametrize("front", FRONTS)
def test_answers_are_those_of_one_server(stock: StockStand, front: str) -> None:
    before = stock.counts.totals()[1]
    with stock.behind(front) as url:
        verdicts = [
            *stock.verdicts(url, prompts_of(10, 200, f"{front} one"), 6, front),
            *stock.verdicts(url, prompts_of(10, 200, f"{front} two"), 6, front),
        ]
    assert Counter(verdicts) == {"equal": 20}
    assert stock.counts.totals()[1] >= before + 20, "every request stored something through the drop-in"


def test_256_at_once(stock: StockStand) -> None:
    """Short prompts: a server on CPUs computes all in one step, and the stock connector reaps what a step of 60 s holds up."""
    before = stock.counts.counts()
    with stock.behind("kvbaton") as url:
        verdicts = Counter(stock.verdicts(url, prompts_of(256, 15, "very many"), 2))
    after = stock.counts.counts()
    moved = {name: after[name] - before[name] for name in after}
    assert verdicts == {"equal": 256}, moved
    assert moved["posted_total"] == moved["succeeded_total"] >= 256, moved
