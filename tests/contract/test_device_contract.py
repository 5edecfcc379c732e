"""What every device that queues its work has to keep: reported when computed, copied after what was queued, poisoned before.

The same suite runs on a stand-in, without a GPU, and on an NVIDIA GPU where there is one.
"""

from __future__ import annotations

import select
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from device_rig import BLOCKS, CHANNELS, DEVICE_KINDS, HEADS, LAYERS, TOKENS, DeviceRig, StandInRig, wait_until, why_no_gpu

from kvbaton.core.handoff import Incarnation
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.plan import pair_layouts, plan_runs
from kvbaton.core.topology import Shape
from kvbaton.engines.vllm.device import Gate, OpenGate, QueueGate
from kvbaton.engines.vllm.tensors import POISON_BYTE, LayerSpec, RegisteredCache, instance_caches, read_tensors
from kvbaton.errors import LocalError
from kvbaton.transport.base import Batch, Direction, PeerRank, Runs, Transport, TransportSettings
from kvbaton.transport.cuda.staging import DeviceMemory
from kvbaton.transport.tcp import TcpTransport

PEER = PeerRank(Incarnation("source"))
SPEC = LayerSpec(TOKENS, (HeadRange(0, HEADS),), HEADS)
MakeRig = Callable[..., DeviceRig]


class Calls:
    """Notes what was called, in order; `refuses` makes a call fail."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.refuses = ""
        self.failed = threading.Event()

    def through(self, gate: Gate, name: str) -> None:
        """Have a call made when the device has come so far."""
        gate.when_computed(lambda: self._make(name), self.failed.set)

    def _make(self, name: str) -> None:
        self.made.append(name)
        if name == self.refuses:
            raise LocalError("the agents have stopped")


def _kinds() -> list[Any]:
    skips = {"cuda": why_no_gpu()}
    return [
        pytest.param(made, id=name, marks=[pytest.mark.skip(reason=skips[name])] if skips.get(name) else [])
        for name, made in DEVICE_KINDS.items()
    ]


@pytest.fixture(params=_kinds())
def make(request: pytest.FixtureRequest) -> MakeRig:
    """Makes a device with caches."""
    made: MakeRig = request.param
    return made


@pytest.fixture
def rig(make: MakeRig) -> DeviceRig:
    """One with the layout that vLLM has on GPUs."""
    return make(tokens_first=True)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def gate(rig: DeviceRig) -> Iterator[QueueGate]:
    """What vLLM's thread reports computed layers to."""
    with closing(rig.device.gate()) as made:
        yield made


def registered(rig: DeviceRig) -> RegisteredCache:
    tensors = {f"layer.{index}": cache for index, cache in enumerate(rig.caches)}
    return RegisteredCache(read_tensors(tensors), dict.fromkeys(tensors, SPEC), rig.device)  # type: ignore[arg-type]


def layout_of(cache: RegisteredCache) -> Layout:
    return instance_caches(Shape(), [cache.caches]).layouts[0]


# Reported when computed.


def test_a_layer_is_reported_when_it_is_computed_not_when_it_is_queued(rig: DeviceRig, gate: QueueGate, calls: Calls) -> None:
    rig.hold()
    calls.through(gate, "layer 0")
    assert calls.made == []
    assert gate.pending == 1
    rig.go_on()
    wait_until(lambda: calls.made == ["layer 0"])
    wait_until(lambda: gate.pending == 0)


def test_control_without_the_gate_it_is_reported_at_once(rig: DeviceRig, calls: Calls) -> None:
    rig.hold()
    calls.through(OpenGate(), "layer 0")
    assert calls.made == ["layer 0"]
    rig.go_on()


def test_layers_are_reported_in_the_order_in_which_they_were_queued(rig: DeviceRig, gate: QueueGate, calls: Calls) -> None:
    rig.hold()
    names = [f"layer {number}" for number in range(5)]
    for name in names:
        calls.through(gate, name)
    assert calls.made == []
    rig.go_on()
    wait_until(lambda: calls.made == names)


def test_a_report_that_is_refused_is_given_up_and_the_next_one_made(gate: QueueGate, calls: Calls) -> None:
    calls.refuses = "layer 0"
    calls.through(gate, "layer 0")
    assert calls.failed.wait(30)
    calls.through(gate, "layer 1")
    wait_until(lambda: calls.made == ["layer 0", "layer 1"])


def test_a_device_that_has_failed_reports_nothing(calls: Calls) -> None:
    rig = StandInRig(tokens_first=True)
    rig.device.failure = "an illegal memory access was encountered"
    with closing(rig.device.gate()) as gate:
        calls.through(gate, "layer 0")
        assert calls.failed.wait(30)
        assert calls.made == []


def test_close_ends_the_thread_and_may_be_repeated(rig: DeviceRig) -> None:
    before = threading.active_count()
    gate = rig.device.gate()
    assert threading.active_count() == before + 1
    gate.close()
    gate.close()
    assert threading.active_count() == before


# Copied after what was queued.


class Copying:
    """A target on the device, and a source on another like it, joined by tcp with staging."""

    def __init__(self, source: DeviceRig, target: DeviceRig, kept: ExitStack) -> None:
        self.source, self.target = source, target
        there, here = registered(source), registered(target)
        self.layouts = (layout_of(there), layout_of(here))
        self.here = here
        self._far = kept.enter_context(closing(TcpTransport(there.region, TransportSettings(incarnation=PEER.incarnation))))
        self._near = kept.enter_context(closing(TcpTransport(here.region, TransportSettings(timeout_s=20.0))))
        self._near.connect(PEER, self._far.endpoint())
        self.ordered: Transport = target.device.ordered(self._near)

    def runs(self, source_blocks: tuple[int, ...], target_blocks: tuple[int, ...]) -> Runs:
        tokens = TOKENS * len(source_blocks)
        return plan_runs(pair_layouts(*self.layouts), (source_blocks,), (target_blocks,), 0, tokens)

    def post(self, transport: Transport, runs: Runs) -> None:
        transport.post(Batch(PEER, Direction.READ, runs))

    def wait(self) -> None:
        assert select.select([self._near.wakeup_fd], [], [], 30)[0]
        (completion,) = self._near.poll()
        assert completion.error == ""

    @property
    def plain(self) -> Transport:
        return self._near


@pytest.fixture
def kept() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def filled(rig: DeviceRig, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    contents = [rng.integers(1, 40, (BLOCKS, HEADS, TOKENS, CHANNELS), np.uint8) for _ in range(LAYERS)]
    for layer, content in enumerate(contents):
        rig.set_content(layer, content)
    return contents


@pytest.mark.parametrize("source_first", [True, False], ids=["from LBNHC", "from LBHNC"])
@pytest.mark.parametrize("target_first", [True, False], ids=["to LBNHC", "to LBHNC"])
def test_caches_arrive_whatever_order_their_axes_have(
    make: MakeRig, kept: ExitStack, source_first: bool, target_first: bool
) -> None:
    source, target = make(tokens_first=source_first), make(tokens_first=target_first)
    contents = filled(source, 1)
    copying = Copying(source, target, kept)
    copying.post(copying.plain, copying.runs((4, 1), (0, 3)))
    copying.wait()
    for layer, content in enumerate(contents):
        now = target.content(layer)
        assert np.array_equal(now[[0, 3]], content[[4, 1]])
        assert not now[[1, 2, 4, 5]].any()


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "control"])
def test_a_copy_comes_after_the_step_that_still_writes_to_its_blocks(make: MakeRig, kept: ExitStack, is_ordered: bool) -> None:
    source, target = make(tokens_first=True), make(tokens_first=True)
    contents = filled(source, 2)
    copying = Copying(source, target, kept)
    with closing(target.device.gate()) as gate:
        copying.post(copying.plain, copying.runs((0,), (5,)))  # the first copy compiles; the next ones are quick
        copying.wait()
        target.hold()
        target.write_later(0, 2, 77)
        gate.allocating()
        copying.post(copying.ordered if is_ordered else copying.plain, copying.runs((1,), (2,)))
        if not is_ordered:
            copying.wait()
        target.go_on()
        if is_ordered:
            copying.wait()
    assert np.array_equal(target.content(0)[2], contents[0][1]) is is_ordered


def test_poison_is_there_before_the_copy_and_only_where_it_belongs(make: MakeRig, kept: ExitStack) -> None:
    source, target = make(tokens_first=True), make(tokens_first=True)
    contents = filled(source, 3)
    copying = Copying(source, target, kept)
    with closing(target.device.gate()) as gate:
        target.hold()
        copying.here.poison(copying.layouts[1], ((1, 2),), 0)
        gate.allocating()
        copying.post(copying.ordered, copying.runs((0,), (1,)))
        target.go_on()
        copying.wait()
    for layer, content in enumerate(contents):
        now = target.content(layer)
        assert np.array_equal(now[1], content[0])
        assert (now[2] == POISON_BYTE).all()
        assert not now[[0, 3, 4, 5]].any()


# Checksums.


def test_sums_are_those_of_the_bytes_where_they_lie(rig: DeviceRig) -> None:
    filled(rig, 4)
    region = registered(rig).region
    memory = DeviceMemory(region, lambda each: each.open_staging())  # type: ignore[arg-type]
    pieces = np.array([[3, 40], [100, 1], [0, 64]], np.int64)
    whole = memory.read(0, 200)
    expected = zlib.crc32(whole[3:43] + whole[100:101] + whole[:64], 9)
    assert memory.sums(pieces, [len(pieces)], 9) == [expected]
    memory.write(3, b"\xff")
    assert memory.sums(pieces, [len(pieces)], 9) != [expected]
