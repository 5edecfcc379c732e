"""The benchmark of running streams: what it counts and reports, not how fast anything is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvbaton.bench import streams as streams_module
from kvbaton.bench.streams import Arriving, StreamsBench, gaps_between, run_streams_bench
from kvbaton.engines.table import find_engine
from kvbaton.errors import ConfigError, LocalError


def test_a_time_between_tokens_counts_only_while_all_streams_run() -> None:
    assert gaps_between([[0.0, 1.0, 3.0, 6.0], [1.0, 2.0, 4.0]]) == [2.0, 1.0, 2.0]


def test_one_stream_counts_from_its_first_token_to_its_last() -> None:
    assert gaps_between([[5.0, 6.0, 8.0]]) == [1.0, 2.0]


def test_streams_that_never_ran_together_are_no_measurement() -> None:
    with pytest.raises(LocalError, match="--stream-tokens"):
        gaps_between([[0.0, 1.0], [2.0, 3.0]])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"streams": 0}, "--streams"),
        ({"rounds": 0}, "--rounds"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"stream_tokens": 2}, "--stream-tokens"),
        ({"per_s": 0.0}, "--per-s"),
        ({"per_s": float("nan")}, "--per-s"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        StreamsBench(**change)


def test_no_more_than_so_many_answers_are_waited_for_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_MOST_PENDING", 3)
    asked = 0

    async def run() -> int:
        over = asyncio.get_running_loop().create_future()
        may_answer = asyncio.Event()

        async def ask() -> None:
            nonlocal asked
            asked += 1
            await may_answer.wait()

        asking = asyncio.create_task(streams_module._ask_while(over, ask, per_s=1000.0))
        while asked < 3:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0.001)
        over.set_result([])
        may_answer.set()
        return await asking

    assert asyncio.run(run()) == 0
    assert asked == 3


def test_a_request_that_fails_ends_the_measurement() -> None:
    async def run() -> None:
        over: asyncio.Future[list[list[float]]] = asyncio.get_running_loop().create_future()

        async def ask() -> None:
            raise LocalError("no answer")

        await streams_module._ask_while(over, ask, per_s=1000.0)

    with pytest.raises(LocalError, match="no answer"):
        asyncio.run(run())


@pytest.mark.e2e
def test_each_kind_of_load_is_measured_in_every_round() -> None:
    bench = StreamsBench("tiny", streams=1, stream_tokens=60, rounds=2)  # two of a tiny model may not run at the same time
    report = run_streams_bench(bench, find_engine("embedded"), print)
    assert len(report.rounds) == 2
    for one in report.rounds:
        assert set(one) == {*Arriving, *(f"{kind} answered per second" for kind in Arriving)}
        assert all(one[kind] for kind in Arriving)
        assert one["nothing else answered per second"] == [0.0]
    assert [(row.name, row.peer) for row in report.rows] == [
        ("between tokens p50, prefills alone", "nothing else"),
        ("between tokens p99, prefills alone", "nothing else"),
        ("between tokens p50, hand-offs", "prefills alone"),
        ("between tokens p99, hand-offs", "prefills alone"),
    ]
