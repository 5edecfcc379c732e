"""What only a GPU can show: a batch starts after what was queued on a stream before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from contract_kinds import find_kind
from transport_peer import POISON
from transport_rig import Rig, make_runs

from kvbaton.transport.cuda import queued_so_far
from kvbaton.transport.cuda.region import GpuMemory

MIB = 1 << 20

CUDA = find_kind("cuda")
BUSY_CYCLES = 400_000_000

pytestmark = pytest.mark.skipif(bool(CUDA.why_skipped()), reason="needs kvbaton[cuda] and an NVIDIA GPU")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One rig for both tests."""
    made = Rig(CUDA)
    try:
        yield made
    finally:
        made.take_down()


def fill_later(memory: GpuMemory, value: int) -> Any:
    """Queue a fill of all of it on a stream that is busy for a while; gives the stream."""
    stream = memory.torch.cuda.Stream()
    with memory.torch.cuda.stream(stream):
        memory.torch.cuda._sleep(BUSY_CYCLES)
        memory.tensor.fill_(value)
    return stream


@pytest.mark.parametrize("waits", [True, False], ids=["after", "control"])
def test_a_batch_comes_after_what_was_queued_before_it(rig: Rig, waits: bool) -> None:
    target, source = rig.pair(MIB)
    memory: Any = target.memory
    runs = make_runs((0, 0, MIB))
    assert target.read(source, runs).error == ""
    stream = fill_later(memory, POISON)
    target.post(source, runs, queued_so_far(stream) if waits else None)
    assert target.wait()[0].error == ""
    stream.synchronize()
    assert target.holds(source, runs) is waits
