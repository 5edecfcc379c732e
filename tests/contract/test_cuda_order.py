"""What only a GPU can show: a batch starts after what was queued on a stream before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_memory import has_gpu
from transport_peer import POISON
from transport_rig import Rig, make_runs

from kvbaton.transport.cuda import queued_so_far

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not has_gpu(), reason="needs kvbaton[cuda] and an NVIDIA GPU")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One rig for both tests."""
    made = Rig("cuda")
    try:
        yield made
    finally:
        made.take_down()


@pytest.mark.parametrize("waits", [True, False], ids=["after", "control"])
def test_a_batch_comes_after_what_was_queued_before_it(rig: Rig, waits: bool) -> None:
    target, source = rig.pair(MIB)
    memory: Any = target.memory
    runs = make_runs((0, 0, MIB))
    assert target.read(source, runs).error == ""
    stream = memory.fill_later(POISON)
    target.post(source, runs, queued_so_far(stream) if waits else None)
    assert target.wait()[0].error == ""
    stream.synchronize()
    assert target.holds(source, runs) is waits
