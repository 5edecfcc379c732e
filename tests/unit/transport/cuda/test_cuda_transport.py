"""The transport without a GPU: what it shares, what it opens, what it refuses, and what it gives back."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from gpu_stand_in import HostCopier, HostDriver, HostTensor
from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import NO_SLOT, Plan, Strip, TokenPattern, unroll
from kvbaton.errors import ConfigError, RangeError, TransportError
from kvbaton.transport.base import Batch, Completion, Direction, Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.cuda import CudaTransport, DeviceRegion
from kvbaton.transport.cuda.region import read_parts
from kvbaton.transport.cuda.strip_launch import StripLaunch
from kvbaton.transport.neighbour import Neighbour, start_ticks

PEER = PeerRank(Incarnation("source"))
PATIENCE_S = 30.0


@dataclass
class Pair:
    """A target, and a source that is this process too."""

    source: npt.NDArray[np.uint8]
    target: npt.NDArray[np.uint8]
    driver: HostDriver
    copier: HostCopier
    transport: CudaTransport
    endpoint: Endpoint

    def read(self, runs: Runs | Plan) -> Completion:
        self.transport.post(Batch(PEER, Direction.READ, runs))
        assert select.select([self.transport.wakeup_fd], [], [], PATIENCE_S)[0]
        return self.transport.poll()[0]


def runs_of(*rows: tuple[int, int, int]) -> Runs:
    return np.array(rows, np.uint64).reshape(-1, 3)


def changed(endpoint: Endpoint, **details: str | int) -> Endpoint:
    return msgspec.structs.replace(endpoint, details=endpoint.details | details)


def part_of(endpoint: Endpoint, number: int, value: str) -> Endpoint:
    fields = str(endpoint.details["parts"]).split(",")
    fields[number] = value
    return changed(endpoint, parts=",".join(fields))


def open_pair(starter: HostCopier | None) -> Iterator[Pair]:
    source, target = np.arange(4096, dtype=np.uint32).view(np.uint8), np.zeros(16384, np.uint8)
    driver, copier = HostDriver(source, target), HostCopier()
    settings = TransportSettings(timeout_s=0.05)
    serving = CudaTransport(HostTensor(source).region, settings, HostDriver(source), (HostCopier(), None))
    transport = CudaTransport(HostTensor(target).region, settings, driver, (copier, starter))
    transport.connect(PEER, serving.endpoint())
    yield Pair(source, target, driver, copier, transport, serving.endpoint())
    transport.close()
    serving.close()


def connect_dead(pair: Pair) -> None:
    """Connect the peer as a process that then dies."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = changed(pair.endpoint, pid=process.pid, start_ticks=start_ticks(process.pid))
    pair.transport.revoke(PEER)
    pair.transport.connect(PEER, other)
    process.kill()
    process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield from open_pair(None)


def test_one_launch_per_batch(pair: Pair) -> None:
    runs = runs_of(*((n * 256, (63 - n) * 256, 256) for n in range(64)))
    completion = pair.read(runs)
    assert (completion.error, completion.moved_bytes) == ("", 64 * 256)
    assert len(pair.copier.launched) == 1
    assert np.array_equal(pair.target.reshape(64, 256), pair.source.reshape(64, 256)[::-1])


def test_a_batch_is_in_flight_until_the_gpu_is_done_however_long_it_takes(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.copier.late = 3
    assert pair.read(runs_of((0, 0, 256))).error == ""
    assert pair.copier.late < 0
    assert "stays in flight" in caplog.text


def plan_of(pages: int, leave_out: int = 0) -> Plan:
    """Two layers of pages of four tokens, in reverse."""
    places = [(n * 1024, (pages - 1 - n) * 256, 4) for n in range(pages - leave_out)]
    token = TokenPattern(np.array([[0, 0, 64]]), 256, 64)
    return Plan((Strip(np.array([[0, 0, 0], [pages * 1024, pages * 256, 0]]), np.array(places), token),))


class TestPlans:
    """Plans are launched as they are, by the mover or by `post`."""

    @pytest.fixture(params=["mover", "begun"])
    def starter(self, request: pytest.FixtureRequest) -> HostCopier | None:
        return HostCopier() if request.param == "begun" else None

    @pytest.fixture
    def planned(self, starter: HostCopier | None) -> Iterator[Pair]:
        yield from open_pair(starter)

    @pytest.mark.parametrize("leave_out", [0, 1])
    def test_a_plan_is_one_launch_with_short_tables(self, planned: Pair, starter: HostCopier | None, leave_out: int) -> None:
        runs = unroll(plan_of(8))
        expected = np.zeros_like(planned.target)
        for at, to, count in runs.tolist():
            expected[to : to + count] = planned.source[at : at + count]
        completion = planned.read(plan_of(8, leave_out))
        assert (completion.error, completion.moved_bytes) == ("", (8 - leave_out) * 2 * 256)
        assert np.array_equal(planned.target, expected) == (leave_out == 0)
        [launch] = (starter or planned.copier).launched
        assert isinstance(launch, StripLaunch)
        assert sum(len(table) for table in launch.tables) == 2 + 8 - leave_out

    def test_one_that_leaves_the_region_is_refused(self, planned: Pair) -> None:
        with pytest.raises(RangeError):
            planned.read(plan_of(9))
        assert planned.read(plan_of(8)).error == ""

    def test_what_does_not_lie_on_lines_is_copied_all_the_same(self, planned: Pair) -> None:
        plan = Plan((Strip(NO_SLOT, np.array([[3, 1, 100], [200, 400, 7]])),))
        assert planned.read(plan).moved_bytes == 107
        assert np.array_equal(planned.target[1:101], planned.source[3:103])
        assert np.array_equal(planned.target[400:407], planned.source[200:207])


class TestBegun:
    """What `post` launches itself."""

    @pytest.fixture
    def starter(self) -> HostCopier:
        return HostCopier()

    @pytest.fixture
    def pair(self, starter: HostCopier) -> Iterator[Pair]:
        yield from open_pair(starter)

    def test_it_completes_when_the_gpu_is_done(self, pair: Pair, starter: HostCopier) -> None:
        starter.late = 2
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        assert pair.transport.poll() == []
        assert pair.transport.poll() == []
        [completion] = pair.transport.poll()
        assert (completion.error, completion.moved_bytes) == ("", 256)
        assert pair.copier.launched == []

    def test_a_second_one_goes_to_the_mover(self, pair: Pair, starter: HostCopier) -> None:
        starter.late = 1 << 30
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        second = pair.transport.post(Batch(PEER, Direction.READ, runs_of((256, 256, 256))))
        deadline = time.monotonic() + PATIENCE_S
        done: list[Completion] = []
        while not done and time.monotonic() < deadline:
            done = pair.transport.poll()
        assert [completion.ticket for completion in done] == [second]
        starter.late = 0
        assert [completion.moved_bytes for completion in pair.transport.poll()] == [256]

    def test_one_whose_gpu_fails_ends_with_its_error_and_the_next_is_tried(self, pair: Pair, starter: HostCopier) -> None:
        starter.fails = "GPU 0 failed during a copy: illegal address"
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        assert "illegal address" in pair.transport.poll()[0].error
        starter.fails = ""
        assert pair.read(runs_of((0, 0, 256))).error == ""

    def test_after_one_that_failed_a_waiting_caller_is_woken_by_the_next(self, pair: Pair, starter: HostCopier) -> None:
        starter.fails = "GPU 0 failed during a copy: illegal address"
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((256, 256, 256))), lambda: False)
        done: list[Completion] = []
        while len(done) < 2:
            assert select.select([pair.transport.wakeup_fd], [], [], PATIENCE_S)[0]
            done += pair.transport.poll()
        assert ["illegal address" in completion.error for completion in done] == [True, False]
        starter.compiles = True
        assert pair.read(runs_of((0, 0, 256))).error == ""
        assert not select.select([pair.transport.wakeup_fd], [], [], 0)[0]

    @pytest.mark.parametrize("runs", [runs_of((0, 0, 256)), plan_of(8)])
    def test_what_has_to_be_compiled_is_left_to_the_mover(self, pair: Pair, starter: HostCopier, runs: Runs | Plan) -> None:
        starter.compiles = True
        assert pair.read(runs).error == ""
        assert starter.launched == []
        assert len(pair.copier.launched) == 1

    def test_poll_and_post_do_not_wait_for_a_revoke(self, pair: Pair, starter: HostCopier) -> None:
        starter.late = 1 << 30
        ticket = pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        pair.transport.revoke(PEER)
        with pytest.raises(TransportError, match="not connected"):
            pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        assert pair.transport.poll() == []
        starter.late = 0
        assert select.select([pair.transport.wakeup_fd], [], [], PATIENCE_S)[0]
        [completion] = pair.transport.poll()
        assert (completion.ticket, "revoked" in completion.error) == (ticket, True)

    def test_closing_after_the_gpu_has_failed_ends_it_too(self, pair: Pair, starter: HostCopier) -> None:
        starter.late = 1 << 30
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        starter.fails = "GPU 0 failed during a copy: illegal address"
        pair.transport.close()
        assert "closed" in pair.transport.poll()[0].error

    def test_an_event_that_has_not_come_keeps_it_from_being_launched(self, pair: Pair, starter: HostCopier) -> None:
        has_come = False
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))), lambda: has_come)
        assert starter.launched == []
        has_come = True
        assert select.select([pair.transport.wakeup_fd], [], [], PATIENCE_S)[0]
        assert pair.transport.poll()[0].error == ""
        assert len(pair.copier.launched) == 1
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))), lambda: True)
        assert len(starter.launched) == 1

    def test_a_dead_process_is_lost_and_nothing_is_launched(self, pair: Pair, starter: HostCopier) -> None:
        connect_dead(pair)
        assert pair.read(runs_of((0, 0, 256))).error.startswith("PeerLost")
        assert starter.launched == pair.copier.launched == []

    def test_a_revoke_waits_for_it_and_it_fails(self, pair: Pair, starter: HostCopier) -> None:
        starter.late = 2
        pair.transport.post(Batch(PEER, Direction.READ, runs_of((0, 0, 256))))
        pair.transport.revoke(PEER)
        deadline = time.monotonic() + PATIENCE_S
        while pair.driver.opened.total() and time.monotonic() < deadline:
            time.sleep(0)
        assert starter.late < 0
        assert "revoked" in pair.transport.poll()[0].error


def test_a_dead_process_is_lost_and_nothing_is_launched(pair: Pair) -> None:
    connect_dead(pair)
    assert pair.read(runs_of((0, 0, 256))).error.startswith("PeerLost")
    assert pair.copier.launched == []


def test_a_revoked_peer_is_unmapped_and_close_unmaps_the_rest(pair: Pair) -> None:
    address = pair.source.ctypes.data
    assert pair.driver.opened[address] == 1
    pair.transport.revoke(PEER)
    pair.transport.connect(PEER, pair.endpoint)
    assert pair.read(runs_of((0, 0, 16))).error == ""
    assert pair.driver.opened[address] == 1
    pair.transport.connect(PeerRank(PEER.incarnation, 1), pair.endpoint)
    assert pair.driver.opened[address] == 2
    pair.transport.close()
    assert pair.driver.opened[address] == 0
    assert pair.driver.closed


def test_a_peer_that_is_refused_leaves_nothing_mapped(pair: Pair) -> None:
    with pytest.raises(TransportError, match="connected already"):
        pair.transport.connect(PEER, changed(pair.endpoint, gpu="cd" * 16))
    assert pair.driver.opened.total() == 1


@pytest.mark.parametrize(
    ("number", "value", "words"),
    [
        (0, "x", "parts cannot be read"),
        (0, "-1", "does not fit"),
        (0, "8", "does not fit"),
        (1, "0", "does not fit"),
        (1, "99999", "does not fit"),
        (1, "8192", "parts end at 8192, and the region has 16384 bytes"),
        (2, "-8", "does not fit"),
        (2, "8", "of an allocation that has 16384 bytes"),
        (3, "00", "a handle of 1 bytes"),
        (3, "zz", "parts cannot be read"),
        (3, b"4096".ljust(64).hex(), "no allocation holds"),
    ],
)
def test_what_no_honest_peer_says_is_refused(pair: Pair, number: int, value: str, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        pair.transport.connect(PeerRank(PEER.incarnation, 1), part_of(pair.endpoint, number, value))
    assert pair.driver.opened.total() == 1


def test_too_many_parts_and_parts_that_overlap_are_refused() -> None:
    handle = "00" * 64
    with pytest.raises(TransportError, match="parts cannot be read"):
        read_parts(";".join(f"{n},1,0,{handle}" for n in range(5000)), 5000)
    with pytest.raises(TransportError, match="offset 5"):
        read_parts(f"0,10,0,{handle};5,10,0,{handle}", 100)


def test_another_host_and_a_recycled_pid_are_refused(pair: Pair) -> None:
    other = PeerRank(PEER.incarnation, 1)
    with pytest.raises(TransportError, match="another host"):
        pair.transport.connect(other, changed(pair.endpoint, host_id="elsewhere"))
    with pytest.raises(TransportError, match="another one now"):
        pair.transport.connect(other, changed(pair.endpoint, start_ticks=1))


def test_main_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPU memory"):
        CudaTransport(Region.of(bytearray(8)), TransportSettings())


class TestRegions:
    """Several tensors, in allocations of their own or in one."""

    def test_tensors_of_one_allocation_are_one_part(self) -> None:
        memory = np.zeros(4096, np.uint8)
        region = DeviceRegion.of_tensors(HostTensor(memory[2048:]), HostTensor(memory[:2048]))
        assert (region.address, region.region_bytes, len(region.spans)) == (memory.ctypes.data, 4096, 1)
        assert not region.view

    def test_layers_in_allocations_of_their_own_are_read_across_a_gap(self) -> None:
        memory, target = np.random.default_rng(1).integers(0, 200, 4096, dtype=np.uint8), np.zeros(4096, np.uint8)
        layers = memory[:1024], memory[3072:]
        region = DeviceRegion.of_tensors(*(HostTensor(layer) for layer in layers))
        serving = CudaTransport(region, TransportSettings(), HostDriver(*layers), (HostCopier(), None))
        assert len(read_parts(str(serving.endpoint().details["parts"]), region.region_bytes)) == 2
        driver, copier = HostDriver(*layers, target), HostCopier()
        transport = CudaTransport(HostTensor(target).region, TransportSettings(), driver, (copier, None))
        transport.connect(PEER, serving.endpoint())
        pair = Pair(memory, target, driver, copier, transport, serving.endpoint())
        with pytest.raises(RangeError, match="run 1: source offset 1000 with 2200 bytes lies in a gap"):
            pair.read(runs_of((0, 0, 8), (1000, 1000, 2200)))
        assert pair.read(runs_of((0, 0, 1024), (3072, 1024, 1024))).error == ""
        assert np.array_equal(target[:2048], np.concatenate(layers))
        transport.close()
        assert driver.opened.total() == 0
        serving.close()

    @pytest.mark.parametrize(
        "tensors",
        [
            [],
            [HostTensor(np.zeros(8, np.uint8), "cpu")],
            [HostTensor(np.zeros((8, 8), np.uint8)[:, :4])],
            [HostTensor(np.zeros(0, np.uint8))],
            [HostTensor(np.zeros(8, np.uint8)), HostTensor(np.zeros(8, np.uint8), index=1)],
        ],
    )
    def test_what_is_no_region_is_refused(self, tensors: list[HostTensor]) -> None:
        with pytest.raises(ConfigError):
            DeviceRegion.of_tensors(*tensors)


def test_a_process_is_named_by_host_pid_and_start() -> None:
    here = Neighbour.here()
    assert here.pid == os.getpid()
    assert Neighbour.of(Endpoint("cuda", 1, here.details())) == here
    here.confirm()
