"""`kvbaton bench wire --direction write` over real libraries: every byte is checked, and a missing one is noticed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from kvbaton.bench.wire.run import WireBench, run_wire_bench
from kvbaton.transport.base import Direction, Region, Transport, TransportSettings
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.nixl import NixlTransport
from kvbaton.transport.table import TRANSPORTS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not find_spec("nixl"), reason="needs nixl; see make test-compat"),
]

KIB, MIB = 1 << 10, 1 << 20
WRITERS = ("nixl", "mooncake", "raw nixl", "raw nixl, its thread", "raw mooncake")


def bench(*subjects: str, peers: tuple[int, ...] = (1,)) -> WireBench:
    return WireBench((64 * KIB,), (2 * MIB,), peers, "scattered", subjects, rounds=1, idle_s=0.0, direction=Direction.WRITE)


@pytest.mark.timeout(200)
def test_every_writer_moves_the_same_blocks() -> None:
    told: list[str] = []
    report = run_wire_bench(bench("local", *WRITERS, peers=(1, 2)), told.append)
    assert report.problems == []
    left_out = {line.partition(" is left out")[0] for line in told if "is left out" in line}
    measured = set(WRITERS) - left_out
    assert {"nixl", "raw nixl", "raw nixl, its thread"} <= measured
    assert {row.name for row in report.rows} == {f"{name}: 64 KiB{more}" for name in measured for more in ("", " x 2 peers")}
    assert {row.peer for row in report.rows if row.name.startswith("nixl")} == {"raw nixl"}
    assert {row.settings["direction"] for row in report.rows} == {"write"}


@pytest.mark.timeout(200)
def test_control_bytes_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_dropping(region: Region, settings: TransportSettings) -> Transport:
        return FaultyTransport(NixlTransport(region, settings), region, Faults(drop_writes=True))

    monkeypatch.setitem(TRANSPORTS, "nixl", replace(TRANSPORTS["nixl"], opener=open_dropping))
    assert any("wrong bytes" in problem for problem in run_wire_bench(bench("nixl")).problems)
