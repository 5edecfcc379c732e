"""The benchmark of running streams: what it counts and reports, not how fast anything is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvbaton.bench import streams as streams_module
from kvbaton.bench.servers import Variant
from kvbaton.bench.streams import (
    Arriving,
    StreamsBench,
    gaps_between,
    rows_beside,
    run_server_streams_bench,
    run_streams_bench,
)
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


def one_round(scale: float) -> dict[str, list[float]]:
    """Ours takes 1, 2 and 3 ms beside nothing, prefills and hand-offs; the peer ten times that."""
    taken: dict[str, list[float]] = {}
    for name, base in (("kvbaton push", 0.001), ("nixl", 0.01)):
        for factor, kind in enumerate(Arriving, 1):
            taken[f"{name}, {kind}"] = [base * factor * scale] * 4
            taken[f"{name}, {kind} answered per second"] = [0.0 if kind is Arriving.NOTHING else 20.0]
            taken[f"{name}, {kind} processor seconds"] = [2.0]
    return taken


def test_hand_offs_of_ours_stand_beside_those_of_the_peer() -> None:
    bench = StreamsBench(peer="nixl", rounds=3)
    rows = rows_beside(bench, ["kvbaton push", "nixl"], [one_round(scale) for scale in (1.0, 5.0, 1.0)])
    shown = {row.name: (row.value, row.peer, row.ratio, row.settings["answered_per_s"]) for row in rows}
    assert len(rows) == 12
    assert shown["between tokens p50, kvbaton push, hand-offs"] == pytest.approx((3.0, "nixl, hand-offs", 0.1, 20.0))
    assert shown["between tokens p99, nixl, hand-offs"] == pytest.approx((30.0, "nixl, prefills alone", 1.5, 20.0))
    assert shown["between tokens p50, nixl, prefills alone"] == pytest.approx((20.0, "nixl, nothing else", 2.0, 20.0))
    assert shown["between tokens p50, kvbaton push, nothing else"][2:] == (1.0, 0.0)
    alone = rows_beside(StreamsBench(rounds=1), ["kvbaton push"], [one_round(1.0)])
    assert [row.peer for row in alone if row.name.endswith("hand-offs")] == ["kvbaton push, prefills alone"] * 2


def test_decode_servers_that_need_a_prefill_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="--engine is sglang"):
        run_server_streams_bench(StreamsBench(), find_engine("sglang"), print)


class Paused:
    """Processes that note whether they may run."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def resume(self) -> None:
        self._log.append(f"resume {self._name}")

    def pause(self) -> None:
        self._log.append(f"pause {self._name}")

    def cpu_s(self) -> float:
        return 0.0


class Pair:
    """Answers every hand-off at once."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, *_: object) -> None:
        self.asked += 1


def test_pairs_take_turns_and_the_other_one_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    pairs = {name: Pair() for name in ("ours", "theirs")}
    posted: list[str] = []

    async def token_times(_session: object, url: str, body: dict[str, Any]) -> list[float]:
        assert url.endswith("decode")
        assert body["max_tokens"] == 9
        await asyncio.sleep(0.005)
        return [1.0, 2.0, 4.0]

    async def post(_session: object, url: str, _body: object) -> None:
        posted.append(url)

    monkeypatch.setattr(streams_module, "token_times", token_times)
    monkeypatch.setattr(streams_module, "post", post)
    monkeypatch.setattr(streams_module, "SETTLE_S", 0.0)
    variants: list[Variant] = [
        Variant(name, 2, pairs[name], Paused(log, name), urls=(f"{name} prefill", f"{name} decode"))  # type: ignore[arg-type]
        for name in pairs
    ]
    bench = StreamsBench(streams=2, stream_tokens=9, per_s=1000.0, rounds=2)
    rounds = asyncio.run(streams_module._measure_servers(bench, variants, range(5), lambda _: None))
    assert len(rounds) == 2
    assert rounds[0]["ours, nothing else"] == [1.0, 2.0] * 2
    assert rounds[0]["ours, nothing else answered per second"] == [0.0]
    assert all(f"{name}, {kind} processor seconds" in rounds[1] for name in pairs for kind in Arriving)
    turns = [log[at : at + 2] for at in range(0, len(log), 2)]
    assert turns == [[f"resume {name}", f"pause {name}"] for name in ("theirs", "ours", "ours", "theirs", "theirs", "ours")]
    assert min(pair.asked for pair in pairs.values()) >= 3
    assert set(posted) == {"ours prefill", "theirs prefill"}
