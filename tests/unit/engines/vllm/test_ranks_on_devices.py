"""Ranks whose devices queue their work: layers count when every device has computed them, blocks when every rank is there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from test_ranks_together import TOKENS, Workers, hand_over
from test_shaped_caches import BLOCK_TOKENS, Instance, block_lists, expected, move
from vllm_rig import LAYERS, ScriptedPort, key_of, layer_groups

from kvbaton.agent.engine_port import Allocation, Offer, SourceRequest, TargetEnded
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, Mode, Outcome
from kvbaton.core.layout import SLIDING, SLIDING_PAGES
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.timeline import Side
from kvbaton.core.topology import Shape
from kvbaton.engines.vllm import specs
from kvbaton.engines.vllm.computed_spans import ComputedSpans
from kvbaton.engines.vllm.device import BlockRows, DeviceEvent, HostDevice, OpenGate, QueueGate, QueueingDevice
from kvbaton.engines.vllm.orders import (
    ComputedChunk,
    Order,
    SourceBegins,
    SourceCancels,
    SourceOffers,
    SourceRetracts,
    SourceWithdraws,
    StepOrders,
    TargetAllocates,
    TargetBegins,
    TargetCancels,
)
from kvbaton.engines.vllm.rank_links import LayersDone, StepReached
from kvbaton.engines.vllm.reached_steps import ReachedSteps
from kvbaton.engines.vllm.worker_half import FollowerHalf, WorkerHalf
from kvbaton.errors import LocalError
from kvbaton.transport.base import Region

KEY = key_of()
CHUNK = ComputedChunk("s", KEY, ((1, 2, 3),), 0, 10)
WANTED = SourceRequest(KEY, "p", ControlAddress.of("127.0.0.1", 7001))
ALLOCATION = Allocation(WANTED, ((4, 5, 6),), 10, 0)


class QueuedEvent:
    """Comes when its device is let go on."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def query(self) -> bool:
        return self.come.is_set()

    def synchronize(self) -> None:
        assert self.come.wait(30.0), "the device was never let go on"


class MainMemoryQueue(QueueingDevice):
    """A device over main memory; while it is held, what is queued stays undone."""

    kinds: tuple[str, ...] = ()
    reorders_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False
        self.marks = 0
        self._queue: deque[QueuedEvent] = deque()

    def mark(self) -> DeviceEvent:
        self.marks += 1
        event = QueuedEvent()
        if self.is_held:
            self._queue.append(event)
        else:
            event.come.set()
        return event

    def go_on(self) -> None:
        self.is_held = False
        while self._queue:
            self._queue.popleft().come.set()

    def region(self, ranges: Sequence[tuple[int, int]]) -> Region:
        return HostDevice().region(ranges)

    def fill_blocks(self, rows: BlockRows, chosen: Sequence[int], byte: int) -> None:
        HostDevice().fill_blocks(rows, chosen, byte)
        self.allocating()


class Links:
    """The end of another rank, without a socket."""

    rank, is_lost = 1, False

    def __init__(self) -> None:
        self.sent: list[LayersDone | StepReached] = []
        self.news = threading.Event()

    def send(self, message: LayersDone | StepReached) -> None:
        self.sent.append(message)
        self.news.set()

    def receive(self, timeout_s: float) -> None:
        del timeout_s


def settled(gate: QueueGate) -> None:
    """Wait until the gate has made every call that it can."""
    done = threading.Event()
    gate.when_computed(done.set, done.set)
    assert done.wait(30.0)


def step(number: int, *orders: Order, chunks: tuple[ComputedChunk, ...] = ()) -> StepOrders:
    return StepOrders(orders, chunks, bool(chunks), (), number)


@pytest.fixture
def device() -> MainMemoryQueue:
    return MainMemoryQueue()


@pytest.fixture
def gate(device: MainMemoryQueue) -> Iterator[QueueGate]:
    with closing(device.gate()) as made:
        yield made


class First:
    """The worker of rank 0 over a scripted port; another rank holds every layer too, or none does."""

    def __init__(self, gate: QueueGate | OpenGate, ranks: int = 1, *, has_drafts: bool = False) -> None:
        self.port = ScriptedPort()
        self.spans = ComputedSpans(self.port, dict.fromkeys(range(LAYERS), ranks), lambda given: given)
        self.reached = ReachedSteps(range(1, ranks))
        self.half = WorkerHalf(
            self.port, self.spans, layer_groups(), self.port.news, 5.0, gate=gate, reached=self.reached, has_drafts=has_drafts
        )

    def compute(self, number: int) -> None:
        self.half.begin_step(step(number, chunks=(CHUNK,)))
        for layer in range(LAYERS):
            self.half.layer_computed(layer)
        self.half.forward_done()

    def announced(self) -> int:
        return sum(name == "spans_ready" for name in self.port.names())


def test_a_layer_is_announced_when_both_devices_have_computed_it(device: MainMemoryQueue, gate: QueueGate) -> None:
    first = First(gate, ranks=2)
    first.half.begin_step(step(1, SourceBegins("s", KEY, "p")))
    device.is_held = True
    first.compute(2)
    first.spans.computed(2, range(LAYERS))
    assert first.announced() == 0
    device.go_on()
    settled(gate)
    assert first.announced() > 0


def test_control_without_a_gate_it_would_be_announced_while_it_is_queued() -> None:
    first = First(OpenGate(), ranks=2)
    first.half.begin_step(step(1, SourceBegins("s", KEY, "p")))
    first.compute(2)
    first.spans.computed(2, range(LAYERS))
    assert first.announced() > 0


@pytest.mark.parametrize(
    "ends",
    [SourceRetracts("s", KEY), SourceCancels("s", KEY), SourceWithdraws("s", KEY)],
    ids=lambda order: type(order).__name__,
)
def test_nothing_is_announced_of_what_ended_while_the_device_computed_it(
    device: MainMemoryQueue, gate: QueueGate, ends: Order
) -> None:
    first = First(gate)
    first.half.begin_step(step(1, SourceBegins("s", KEY, "p")))
    device.is_held = True
    first.compute(2)
    first.half.begin_step(step(3, ends))
    device.go_on()
    settled(gate)
    assert first.announced() == 0


def test_an_offer_announces_what_the_gate_still_holds_once(device: MainMemoryQueue, gate: QueueGate) -> None:
    first = First(gate)
    first.half.begin_step(step(1, SourceBegins("s", KEY, "p")))
    device.is_held = True
    first.compute(2)
    first.half.begin_step(step(3, SourceOffers("s", Offer(KEY, ((1, 2, 3),), 10, Aux(1, 0.0)))))
    assert first.port.names() == ["expect_target", "spans_ready", "offer"]
    device.go_on()
    settled(gate)
    assert first.announced() == 1


def test_with_drafts_an_offer_waits_for_the_device(device: MainMemoryQueue, gate: QueueGate) -> None:
    first = First(gate, has_drafts=True)
    first.half.begin_step(step(1, SourceBegins("s", KEY, "p")))
    device.is_held = True
    first.compute(2)
    first.half.begin_step(step(3, SourceOffers("s", Offer(KEY, ((1, 2, 3),), 10, Aux(1, 0.0)))))
    assert first.port.names() == ["expect_target"]
    device.go_on()
    settled(gate)
    assert first.port.names()[-1] == "offer"
    assert first.announced() > 0


def test_a_device_that_has_failed_ends_the_sources_of_the_step(device: MainMemoryQueue, gate: QueueGate) -> None:
    def fail(*_: object) -> None:
        raise LocalError("the agents have stopped")

    first = First(gate)
    first.half.begin_step(step(1, SourceBegins("s", KEY, "p")))
    first.spans.computed = fail  # type: ignore[method-assign, assignment]
    first.compute(2)
    settled(gate)
    assert ("cancel", (KEY, Side.SOURCE)) in first.port.calls


def test_another_rank_reports_a_layer_when_its_device_has_computed_it(device: MainMemoryQueue, gate: QueueGate) -> None:
    links = Links()
    half = FollowerHalf(links, layer_groups(), gate)  # type: ignore[arg-type]
    device.is_held = True
    half.begin_step(step(1, chunks=(CHUNK,)))
    for layer in range(LAYERS):
        half.layer_computed(layer)
    half.forward_done()
    assert links.sent == []
    device.go_on()
    settled(gate)
    reported = [layer for message in links.sent if isinstance(message, LayersDone) for layer in message.layers]
    assert reported == list(range(LAYERS))


def test_another_rank_marks_its_queue_before_it_reports_that_it_has_reached_a_step(
    device: MainMemoryQueue, gate: QueueGate
) -> None:
    links = Links()
    half = FollowerHalf(links, layer_groups(), gate)  # type: ignore[arg-type]
    device.is_held = True
    half.begin_step(step(1))
    assert (links.sent, device.last_allocation) == ([], None)
    half.begin_step(step(2, TargetBegins("t", WANTED), TargetAllocates("t", ALLOCATION)))
    assert links.sent == [StepReached(1, 2)]
    assert device.last_allocation is not None
    assert not device.last_allocation.query()


# Blocks are granted when every rank has reached their step.


def allocated(first: First, number: int = 1) -> None:
    first.half.begin_step(step(number, TargetBegins("t", WANTED), TargetAllocates("t", ALLOCATION)))


def test_blocks_are_passed_on_when_the_last_rank_has_reached_their_step() -> None:
    first = First(OpenGate(), ranks=3)
    allocated(first, 4)
    first.reached.reached(1, 4)
    first.reached.reached(2, 3)
    assert "allocated" not in first.port.names()
    first.reached.reached(2, 4)
    assert first.port.names().count("allocated") == 1
    first.reached.reached(2, 5)
    assert first.port.names().count("allocated") == 1


def test_ranks_may_be_ahead_of_the_first_one() -> None:
    first = First(OpenGate(), ranks=2)
    first.reached.reached(1, 7)
    allocated(first, 7)
    assert "allocated" in first.port.names()


def test_control_an_instance_of_one_rank_waits_for_no_other() -> None:
    first = First(OpenGate())
    allocated(first)
    assert "allocated" in first.port.names()


@pytest.mark.parametrize("end", ["cancelled", "ended"])
def test_blocks_of_a_target_that_has_ended_are_not_passed_on(end: str) -> None:
    first = First(OpenGate(), ranks=2)
    allocated(first, 4)
    if end == "cancelled":
        first.half.begin_step(step(5, TargetCancels("t", KEY)))
    else:
        first.port.push(TargetEnded(KEY, Outcome.FAILED, "too late"))
        assert first.half.end_step().failed == {"t"}
    first.reached.reached(1, 5)
    assert "allocated" not in first.port.names()


def test_agents_that_refuse_the_blocks_do_not_end_the_thread_that_reports_ranks() -> None:
    first = First(OpenGate(), ranks=2)
    allocated(first, 4)
    first.port.is_stuck = True
    first.reached.reached(1, 4)
    first.port.is_stuck = False
    first.reached.reached(1, 5)
    assert "allocated" not in first.port.names()


# All of it together.


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("shapes", [("tp2", "tp2"), ("pp2", "tp1"), ("tp1", "pp2,tp2")], ids=str)
def test_ranks_on_devices_hand_over(shapes: tuple[str, str], mode: Mode) -> None:
    blocks = block_lists("windows")
    made: list[Workers] = []
    try:
        for shape, role, seed in zip(shapes, ("prefill", "decode"), (7, None), strict=True):
            made.append(Workers("windows", shape, role, mode, seed, device=MainMemoryQueue))
            for worker in made[-1].ranks:
                worker.start()
        source, target = made
        hand_over(source, target, mode, blocks)
        finished = target.until(lambda each: bool(each.receiving))
        assert (finished.receiving, finished.failed) == ({"t"}, set())
        source.until(lambda each: each.sending == {"s"})
        found, wanted = target.caches.read(), expected(source.caches, target.caches, blocks)
        assert {name: found[name] for name, value in wanted.items() if value} == {
            name: value for name, value in wanted.items() if value
        }
    finally:
        for each in reversed(made):
            each.close()


class PlainDevice(MainMemoryQueue):
    """One that keeps tokens in the order of their shape, as GPUs do: single tokens can be moved."""

    reorders_blocks = False


@pytest.mark.parametrize("kind", [SLIDING_PAGES, SLIDING])
def test_blocks_of_a_window_arrive_whole_where_tokens_could_be_moved_singly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM caches each of them as a prefix of other prompts. With the other kind, the control, one is filled in part only."""
    monkeypatch.setitem(specs._KINDS, "SlidingWindowSpec", kind)
    monkeypatch.setattr(specs, "SLIDING_PAGES", kind)
    made = [Instance("windows", Shape(), seed=seed, device=PlainDevice) for seed in (7, None)]
    source, target = (each.caches.layouts[0] for each in made)
    group = next(each for each in target.groups if each.window)
    first, end = group.needed(0, TOKENS, TOKENS)
    assert end == TOKENS
    assert (first % group.block_tokens == 0) is (kind == SLIDING_PAGES)
    assert first <= TOKENS - group.window
    runs = plan_runs(pair_layouts(source, target), block_lists("windows"), block_lists("windows"), 0, TOKENS)
    assert runs.shape[0] > 0


@pytest.mark.parametrize("role", ["INDEXER", "control"])
def test_blocks_of_an_index_arrive_whole_where_tokens_could_be_moved_singly(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the values of all tokens of a block are their scales. Moved as tokens, the control, the last block lacks some."""
    monkeypatch.setattr(specs, "_INDEXER", role)
    source, target = (Instance("index", Shape(), seed=seed, device=PlainDevice) for seed in (7, None))
    assert TOKENS % BLOCK_TOKENS
    move(source, target, block_lists("index"), TOKENS)
    found, wanted = target.read(), expected(source, target, block_lists("index"))
    names = sorted(target.caches.numbers, key=target.caches.numbers.__getitem__)
    lacking = {("indexer" in names[name[2]], name[4][2]) for name, value in wanted.items() if value != found[name]}
    assert {token for is_index, token in lacking if not is_index} == set(range(TOKENS % BLOCK_TOKENS, BLOCK_TOKENS))
    assert any(is_index for is_index, _ in lacking) is (role == "control")
