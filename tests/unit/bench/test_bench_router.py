"""The benchmark of the router: what it reports, not how fast it is."""

from __future__ import annotations

import shutil

import pytest

from kvbaton.bench.router import RouterBench, run_router_bench
from kvbaton.errors import ConfigError


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_every_mode_and_kind_is_measured_without_an_error() -> None:
    report = run_router_bench(RouterBench((2,), (1,), rounds=1, seconds=0.3, peers=False), print)
    (series,) = report.rounds
    assert report.problems == []
    for mode in ("push", "pull"):
        for kind in ("JSON", "streams"):
            (rate,) = series[f"{kind}, 2 clients, {mode}, kvbaton, 1 process, per second"]
            assert rate > 0
        assert series[f"streams/s, 2048 clients, {mode}"][0] > 0
    assert {row.ratio for row in report.rows} == {0.0}


@pytest.mark.parametrize(
    ("settings", "option"), [({"rounds": 0}, "--rounds"), ({"clients": ()}, "--clients"), ({"processes": (0,)}, "--processes")]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        RouterBench(**settings)  # type: ignore[arg-type]
