"""The rows and the plot of the benchmark of servers, from rounds that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbaton.bench.plots import plot_servers_bench
from kvbaton.bench.report import BenchReport
from kvbaton.bench.servers import SINGLE, Round, ServersBench, added_s, name_of, rows_of, run_servers_bench
from kvbaton.cli.bench import serve
from kvbaton.core.handoff import Mode
from kvbaton.engines.table import find_engine
from kvbaton.errors import ConfigError

PUSH, NIXL = "kvbaton push", "nixl"
VLLM = find_engine("vllm")
VARIANTS = (SINGLE, PUSH, NIXL)


def one_round(index: int) -> Round:
    """One server takes 1 s more in each round; push adds 0.1 s to that, NIXL 0.4 s."""
    taken: Round = {}
    for variant, added in ((SINGLE, 0.0), (PUSH, 0.1), (NIXL, 0.4)):
        taken[name_of("first token", variant, 128)] = [1.0 + index + added]
        taken[name_of("prefill answered", variant, 128)] = [2.0 + index if variant == PUSH else 0.9 + index]
        taken[name_of("cpu", variant, 128)] = [2.0 + added]
        taken[name_of("idle cores", variant)] = [2.0 if variant == NIXL else 0.02]
    taken[name_of("exposed", PUSH, 128)] = [0.04]
    taken[name_of("stage wire", PUSH, 128)] = [0.03]
    taken[name_of("stage first step", PUSH, 128)] = [0.01]
    return taken


ROUNDS = [one_round(index) for index in range(3)]


def test_what_is_added_is_a_difference_within_each_round() -> None:
    assert added_s(ROUNDS, PUSH, 128, 50) == pytest.approx(0.1)
    assert added_s(ROUNDS, NIXL, 128, 99) == pytest.approx(0.4)


def test_rows_stand_beside_the_peer() -> None:
    rows = {row.name: row for row in rows_of((128,), VARIANTS, ROUNDS, NIXL)}
    push = rows[f"added to it, p50, {PUSH}"]
    assert (push.unit, push.peer) == ("ms", NIXL)
    assert (push.value, push.ratio) == pytest.approx((100, 0.25))
    assert rows[f"after the prefill answer, {NIXL}"].value == pytest.approx(500)
    assert f"after the prefill answer, {PUSH}" not in rows, "push asks both at once"
    assert rows[f"idle, {NIXL}"].value == pytest.approx(200)
    assert rows[f"hand-over, 128 tokens, {PUSH}"].value == pytest.approx(40)
    assert rows[f"  wire, 128 tokens, {PUSH}"].ratio == pytest.approx(0.75)
    assert f"hand-over, 128 tokens, {NIXL}" not in rows


def test_without_a_peer_one_server_is_what_stands_beside() -> None:
    rows = {row.name: row for row in rows_of((128,), (SINGLE, PUSH), ROUNDS)}
    push = rows[f"added to it, p50, {PUSH}"]
    assert push.peer == SINGLE
    assert push.ratio == pytest.approx(0.05)


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are not tested: matplotlib is not installed")
    report = BenchReport(list(rows_of((128,), VARIANTS, ROUNDS, NIXL)), {}, ROUNDS)
    paths = plot_servers_bench(report, (128,), VARIANTS, tmp_path / "bench.json")
    assert [path.name for path in paths] == ["bench.png", "bench.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"lengths": ()}, {"lengths": (0,)}, {"lengths": (4000,)}])
def test_settings_that_cannot_be_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))} is"):
        run_servers_bench(ServersBench(VLLM, "tiny", **wrong), print)  # type: ignore[arg-type]


def test_how_many_servers_it_takes() -> None:
    assert ServersBench(VLLM, peer="nixl").servers == 7
    assert ServersBench(VLLM, modes=(Mode.PUSH,)).variants == (SINGLE, PUSH)


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: object) -> BenchReport:
        raise AssertionError("servers were started for nothing")

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("kvbaton.bench.servers.run_servers_bench", run)
    with pytest.raises(ConfigError, match="--plot needs matplotlib"):
        serve(engine="vllm", plot=tmp_path / "picture")
