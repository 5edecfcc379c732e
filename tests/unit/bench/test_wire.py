"""The wire benchmark: that it moves and checks bytes, and notices wrong ones."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from kvbaton.bench.wire.pages import content, contiguous_runs, is_copied, scattered_runs
from kvbaton.bench.wire.run import WireBench, run_wire_bench, subjects_of
from kvbaton.errors import ConfigError
from kvbaton.transport.base import AfterEvent, Batch, Completion, Direction, Region, Ticket, Transport, TransportSettings
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.local import LocalTransport
from kvbaton.transport.table import TRANSPORTS

KIB, MIB = 1 << 10, 1 << 20


def test_a_small_run_measures_ours_beside_their_peers() -> None:
    bench = WireBench((64 * KIB,), (2 * MIB,), (1, 2), "scattered", ("local", "tcp", "socket"), rounds=1, idle_s=0.0)
    report = run_wire_bench(bench)
    assert report.problems == []
    assert {row.name for row in report.rows} == {
        f"{name}: 64 KiB{peers}" for name in ("local", "tcp", "socket") for peers in ("", " x 2 peers")
    }
    assert {row.peer for row in report.rows if row.name.startswith("tcp")} == {"socket"}
    assert all(row.value > 0 for row in report.rows)


def test_batches_of_several_sizes_are_told_apart() -> None:
    bench = WireBench((64 * KIB,), (MIB, 2 * MIB), (1,), "scattered", ("local",), rounds=2, idle_s=0.0)
    report = run_wire_bench(bench)
    assert report.problems == []
    blocks = {row.name: (row.settings["batch_bytes"], row.settings["blocks"]) for row in report.rows}
    assert blocks == {"local: 64 KiB in 1 MiB": (MIB, 16), "local: 64 KiB in 2 MiB": (2 * MIB, 32)}
    assert [sorted(each) for each in report.rounds] == [sorted(blocks)] * 2


@pytest.mark.parametrize("direction", list(Direction))
def test_a_turn_of_several_batches_has_every_byte_of_each_checked(direction: Direction) -> None:
    subjects = ("tcp", "socket") if direction is Direction.READ else ("tcp",)
    bench = WireBench((64 * KIB,), (MIB,), (2,), subjects=subjects, rounds=2, idle_s=0.0, direction=direction)
    report = run_wire_bench(replace(bench, turn_bytes=4 * MIB + 5))
    assert report.problems == []
    assert {row.settings["blocks"] for row in report.rows if row.unit == "GB/s"} == {16}


def test_control_a_batch_that_is_not_the_last_of_a_turn_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Batch] = []

    class Forgetful(LocalTransport):
        def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
            posted.append(batch)
            assert isinstance(batch.runs, np.ndarray)
            is_second = len(posted) % 4 == 2
            return super().post(Batch(batch.peer, batch.direction, batch.runs[:-1]) if is_second else batch, after)

    monkeypatch.setitem(TRANSPORTS, "local", replace(TRANSPORTS["local"], opener=Forgetful))
    bench = WireBench((64 * KIB,), (MIB,), (1,), "scattered", ("local",), rounds=1, idle_s=0.0, turn_bytes=4 * MIB)
    assert len(run_wire_bench(bench).problems) == 2
    assert len(posted) == 8


@pytest.mark.parametrize("make", [scattered_runs, contiguous_runs])
def test_wrong_bytes_would_be_noticed(make: type) -> None:
    runs = make(64 * KIB, 4 * KIB, 3)
    source, target = content(1, 128 * KIB), np.zeros(128 * KIB, np.uint8)
    for at, to, count in runs.tolist():
        target[to : to + count] = source[at : at + count]
    assert is_copied(runs, source, target)
    target[int(runs[5, 1]) + 17] ^= 1
    assert not is_copied(runs, source, target)


def test_control_bytes_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_dropping(region: Region, settings: TransportSettings) -> Transport:
        return FaultyTransport(LocalTransport(region, settings), region, Faults(drop_writes=True))

    monkeypatch.setitem(TRANSPORTS, "local", replace(TRANSPORTS["local"], opener=open_dropping))
    bench = WireBench((64 * KIB,), (MIB,), (1,), "scattered", ("local",), rounds=1, idle_s=0.0)
    assert any("wrong bytes" in problem for problem in run_wire_bench(bench).problems)


def test_control_a_byte_beside_the_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sloppy(LocalTransport):
        def poll(self) -> list[Completion]:
            found = super().poll()
            self._region.view[len(self._region.view) - 1] = 1
            return found

    monkeypatch.setitem(TRANSPORTS, "local", replace(TRANSPORTS["local"], opener=Sloppy))
    bench = WireBench((64 * KIB,), (MIB,), (1,), "contiguous", ("local",), rounds=1, idle_s=0.0)
    assert any("wrong bytes" in problem for problem in run_wire_bench(bench).problems)


def test_any_number_of_peers_and_blocks_that_do_not_fit_are_left_out() -> None:
    told: list[str] = []
    bench = WireBench((4 * KIB, MIB), (2 * MIB,), (3,), "scattered", ("tcp", "socket"), rounds=1, idle_s=0.1)
    report = run_wire_bench(bench, told.append)
    assert report.problems == []
    assert {row.name for row in report.rows if row.unit == "GB/s"} == {"tcp: 4 KiB x 3 peers", "socket: 4 KiB x 3 peers"}
    assert "blocks of 1 MiB in batches of 2 MiB, 3 peers: left out, there is no block for each peer" in told
    assert any(row.name == "all 2 in one process: idle here" for row in report.rows)


def test_each_transport_stands_beside_its_peer() -> None:
    assert subjects_of("tcp") == ("tcp", "tcp, encrypted", "socket")
    assert subjects_of("local") == ("local", "local, process_vm_readv", "memcpy")
    with pytest.raises(ConfigError, match="'pigeon'"):
        subjects_of("pigeon")


def test_what_only_reads_is_not_asked_to_write() -> None:
    with pytest.raises(ConfigError, match="local, memcpy: none of them writes; those that do are tcp, tcp, encrypted, nixl"):
        WireBench(subjects=("local", "memcpy"), direction=Direction.WRITE)
    told: list[str] = []
    bench = WireBench((64 * KIB,), (MIB,), (1,), subjects=("local", "nixl"), rounds=1, idle_s=0.0, direction=Direction.WRITE)
    with contextlib.suppress(ConfigError):  # without NIXL nothing is left
        run_wire_bench(bench, told.append)
    assert "local is left out: it only reads, the owner of the target memory copies" in told


def test_tcp_is_measured_in_both_directions() -> None:
    for direction in Direction:
        bench = WireBench((64 * KIB,), (MIB,), (2,), subjects=("tcp",), rounds=2, idle_s=0.0, direction=direction)
        report = run_wire_bench(bench)
        assert report.problems == []
        assert {row.settings["direction"] for row in report.rows if row.unit == "GB/s"} == {direction.value}


def test_writes_of_the_drop_in_stand_beside_reads_of_local_in_the_same_run() -> None:
    subjects = ("mori", "local, process_vm_readv")
    bench = WireBench((64 * KIB,), (MIB,), (2,), subjects=subjects, rounds=2, idle_s=0.0, direction=Direction.WRITE)
    report = run_wire_bench(bench)
    assert report.problems == []
    rates = {row.name: (row.peer, row.settings["direction"]) for row in report.rows if row.unit == "GB/s"}
    assert rates == {
        "mori: 64 KiB x 2 peers": ("local, process_vm_readv", "write"),
        "local, process_vm_readv: 64 KiB x 2 peers": ("", "read"),
    }


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown subject 'pigeon'"):
        WireBench(subjects=("pigeon",))
    with pytest.raises(ConfigError, match="batch_bytes"):
        WireBench(batch_bytes=(128 * MIB, KIB))
