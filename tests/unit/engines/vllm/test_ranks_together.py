"""Workers of two instances in threads, with real agents and transports: several ranks hand over, and report the same ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from test_shaped_caches import Instance, block_lists, expected
from vllm_rig import key_of

from kvbaton.agent.engine_port import Allocation, Offer, SourceRequest
from kvbaton.core.handoff import Aux, Integrity, Mode
from kvbaton.core.topology import Shape
from kvbaton.engines.instance import ModelIdentity
from kvbaton.engines.vllm.device import EngineDevice, HostDevice
from kvbaton.engines.vllm.instance import WorkerInstance
from kvbaton.engines.vllm.orders import (
    ComputedChunk,
    Order,
    SourceBegins,
    SourceCancels,
    SourceOffers,
    SourceRetracts,
    StepOrders,
    TargetAllocates,
    TargetBegins,
)
from kvbaton.engines.vllm.settings import ConnectorSettings
from kvbaton.engines.vllm.worker_half import Finished
from kvbaton.launch.ports import PortPicker

T = TypeVar("T")
KEY, TOKENS, WAIT_S = key_of(), 10, 30.0


class Exchange:
    """Lets threads gather, as vLLM's process groups let workers."""

    def __init__(self, shape: Shape, rank: int, meeting: threading.Barrier, board: list[list[Any]]) -> None:
        self.shape, self.rank, self._meeting, self._board = shape, rank, meeting, board
        self._turn = 0

    def gather(self, value: T) -> list[T]:
        self._board[self._turn][self.rank] = value
        self._meeting.wait(WAIT_S)
        self._turn += 1
        return list(self._board[self._turn - 1])


class Workers:
    """All workers of one instance; `step` runs one step on all of them, each in a thread."""

    def __init__(
        self,
        model: str,
        shape: str,
        role: Any,
        mode: Mode,
        seed: int | None,
        drop: str = "",
        device: Callable[[], EngineDevice] = HostDevice,
    ) -> None:
        self.caches = Instance(model, Shape.parse(shape), seed=seed)
        for each in self.caches.registered:
            each.device = device()
        self.settings = ConnectorSettings(
            control_port=PortPicker().pick(), mode=mode, poison=True, drop=drop, integrity=Integrity.FULL
        )
        size = self.caches.shape.ranks
        meeting, board = threading.Barrier(size), [[None] * size for _ in range(2)]
        self.pool = ThreadPoolExecutor(size)
        make: Callable[[int], WorkerInstance] = lambda rank: WorkerInstance(  # noqa: E731
            self.settings,
            self.caches.registered[rank],
            ModelIdentity("m", "f"),
            role,
            Exchange(self.caches.shape, rank, meeting, board),
        )
        self.ranks = list(self.pool.map(make, range(size)))
        self.number = 0
        self.reported: list[Finished] = []

    def step(self, *orders: Order, chunks: tuple[ComputedChunk, ...] = (), has_forward: bool = False) -> list[Finished]:
        self.number += 1
        given = StepOrders(orders, chunks, has_forward, (), self.number)

        def run(rank: int) -> Finished:
            worker = self.ranks[rank]
            worker.half.begin_step(given)
            for layer in worker.caches.layouts[rank].layers if has_forward else ():
                worker.half.layer_computed(layer)
            worker.half.forward_done()
            return worker.end_step()

        finished = list(self.pool.map(run, range(len(self.ranks))))
        ids = [(each.sending, each.receiving, each.failed) for each in finished]
        assert ids == [ids[0]] * len(ids), "every rank reports the same in the same step"
        self.reported.append(finished[0])
        return finished

    def until(self, is_there: Callable[[Finished], bool]) -> Finished:
        """Step until such a report was made; it is taken once."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for finished in self.reported:
                if is_there(finished):
                    self.reported.clear()
                    return finished
            self.step()
        raise AssertionError("nothing was reported")

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.pool.shutdown()


@contextmanager
def pair(model: str, shapes: tuple[str, str], mode: Mode, drop: str = "") -> Iterator[tuple[Workers, Workers]]:
    source = Workers(model, shapes[0], "prefill", mode, 7)
    target = Workers(model, shapes[1], "decode", mode, None, drop)
    try:
        for worker in (*source.ranks, *target.ranks):
            worker.start()
        yield source, target
    finally:
        target.close()
        source.close()


def hand_over(source: Workers, target: Workers, mode: Mode, blocks: Any) -> None:
    wanted = SourceRequest(KEY, "p", source.settings.control_address, None, mode)
    offer = Offer(KEY, blocks, TOKENS, Aux(1, 0.0))
    chunks = (
        ComputedChunk("s", KEY, blocks, 0, 8),
        ComputedChunk("s", KEY, blocks, 8, TOKENS),
    )
    source.step(SourceBegins("s", KEY, "p"))
    allocates = (TargetBegins("t", wanted), TargetAllocates("t", Allocation(wanted, blocks, TOKENS, 0)))
    if mode is Mode.PUSH:
        target.step(*allocates)
        for chunk in chunks:
            source.step(chunks=(chunk,), has_forward=True)
        source.step(SourceOffers("s", offer))
    else:
        source.step(SourceOffers("s", offer))
        target.step(*allocates)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ("full", ("tp2", "tp2")),
        ("full", ("tp1", "pp2")),
        ("mla", ("tp2", "tp1")),
        ("windows", ("pp2", "tp2")),
        ("mamba", ("tp2", "pp2,tp2")),
    ],
    ids=str,
)
def test_several_ranks_hand_over_and_report_together(model: str, shapes: tuple[str, str], mode: Mode) -> None:
    blocks = block_lists(model)
    with pair(model, shapes, mode) as (source, target):
        hand_over(source, target, mode, blocks)
        finished = target.until(lambda each: bool(each.receiving))
        assert (finished.receiving, finished.failed) == ({"t"}, set())
        record = finished.report.landed["t"]
        assert record["bytes_moved"] == record["bytes_planned"] > 0
        source.until(lambda each: each.sending == {"s"})
        found = {
            name: value
            for name, value in target.caches.read().items()
            if name[4][0] in {number for ids in blocks for number in ids}
        }
        wanted = expected(source.caches, target.caches, blocks)
        moved = {name: value for name, value in wanted.items() if value}
        assert moved.items() <= found.items()


def test_a_control_leaves_the_poison_where_the_cache_was() -> None:
    with pair("full", ("tp2", "tp1"), Mode.PULL, "heads") as (source, target):
        hand_over(source, target, Mode.PULL, block_lists("full"))
        target.until(lambda each: bool(each.receiving))
        wanted, found = expected(source.caches, target.caches, block_lists("full")), target.caches.read()
        lost = {name for name, value in wanted.items() if value and found[name] != value}
        assert {name[4][1] for name in lost} == {3}


def test_every_rank_waits_until_retracted_blocks_are_drained() -> None:
    with pair("full", ("tp2", "tp1"), Mode.PUSH) as (source, target):
        blocks = block_lists("full")
        wanted = SourceRequest(KEY, "p", source.settings.control_address, None, Mode.PUSH)
        source.step(SourceBegins("s", KEY, "p"))
        target.step(TargetBegins("t", wanted), TargetAllocates("t", Allocation(wanted, blocks, TOKENS, 0)))
        source.step(chunks=(ComputedChunk("s", KEY, blocks, 0, 8),), has_forward=True)
        source.step(SourceRetracts("s", KEY))
        hand_over_again = (ComputedChunk("s", KEY, blocks, 0, TOKENS),)
        source.step(chunks=hand_over_again, has_forward=True)
        source.step(SourceOffers("s", Offer(KEY, blocks, TOKENS, Aux(1, 0.0))))
        target.until(lambda each: each.receiving == {"t"} and not each.failed)
        source.until(lambda each: each.sending == {"s"})


def test_a_prefill_that_is_cancelled_is_reported_by_every_rank() -> None:
    with pair("full", ("pp2", "tp1"), Mode.PUSH) as (source, _):
        source.step(SourceBegins("s", KEY, "p"))
        source.step(SourceCancels("s", KEY))
        source.until(lambda each: each.sending == {"s"})
