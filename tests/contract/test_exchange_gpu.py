"""What an exchange promises for memory of a GPU, beyond MoRI's behaviours: on a stand-in, and on a GPU where there is one.

The stand-in's memory is shared with a second process by a handle, as CUDA IPC shares it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from test_exchange_contract import HeldTable

from gpu_memories import GPU, MAIN, STAND_IN, PlacedMemory, SharedDriver, place, use_stand_in, why_not_here
from gpu_stand_in import HostCopier
from kvbaton.errors import ConfigError, RangeError, TransportError
from kvbaton.transport.base import Direction, TransportSettings
from kvbaton.transport.exchange.base import MemoryHandle, TransferRequest
from kvbaton.transport.exchange.gpu import ExchangeGpu, GpuSources
from kvbaton.transport.exchange.service import MemoryExchange

_READ, _WRITE = Direction.READ, Direction.WRITE
_LIMIT_S = 30.0


@pytest.fixture(params=[STAND_IN, GPU])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if why := why_not_here(name):
        pytest.skip(why)
    if name == STAND_IN:
        use_stand_in(monkeypatch.setattr)
    return name


@pytest.fixture
def open_exchange() -> Iterator[Callable[[str], MemoryExchange]]:
    opened: list[MemoryExchange] = []

    def make(name: str) -> MemoryExchange:
        opened.append(MemoryExchange(name, TransportSettings()))
        return opened[-1]

    yield make
    for exchange in opened:
        exchange.check()
        exchange.close()


class _Side:
    """An exchange with one memory."""

    def __init__(self, exchange: MemoryExchange, kind: str, value: int, size: int = 1 << 16) -> None:
        self.exchange = exchange
        self.memory: PlacedMemory = place(kind, np.full(size, value, np.uint8))
        self.handle = exchange.register(self.memory.address, size)


def _runs(*runs: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    return np.array(runs, np.uint64)


def _move(
    direction: Direction, here: _Side, there: _Side, runs: npt.NDArray[np.uint64], remote: MemoryHandle | None = None
) -> str:
    link = here.exchange.connect(there.exchange.endpoint())
    transfer = link.post(TransferRequest(direction, here.handle, remote or there.handle, runs, 7))
    assert transfer.wait(_LIMIT_S)
    return transfer.error


def _poll(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.001)
    return True


@pytest.mark.parametrize("forgets", [False, True], ids=["as it is", "control"])
def test_no_byte_changes_after_a_withdrawal(kind: str, open_exchange: Callable[[str], MemoryExchange], forgets: bool) -> None:
    """A write of many slices is under way when the target is withdrawn; what it holds from then on is a pattern of its own."""
    owner, writer = open_exchange("owner"), open_exchange("writer")
    table = owner._state.table = HeldTable(forgets)
    owner._state.slice_bytes = 1 << 12
    size = 1 << 20
    target, source = _Side(owner, kind, 0, size), _Side(writer, kind, 1, size)
    request = TransferRequest(_WRITE, source.handle, target.handle, _runs((0, 0, size)))
    transfer = writer.connect(owner.endpoint()).post(request)
    assert table.is_held.wait(_LIMIT_S)
    owner.withdraw(target.handle)
    target.memory.fill(5)
    table.go.set()
    assert transfer.wait(_LIMIT_S)
    kept = bool((target.memory.array == 5).all())
    assert (kept, bool(transfer.error)) == ((False, False) if forgets else (True, True))


@pytest.mark.parametrize("direction", [_READ, _WRITE])
def test_a_source_that_is_withdrawn_during_the_copy_is_an_error(
    kind: str, open_exchange: Callable[[str], MemoryExchange], direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = _Side(open_exchange("here"), kind, 1), _Side(open_exchange("there"), kind, 2)
    source = there if direction is _READ else here
    whole = ExchangeGpu.copy

    def copy(self: ExchangeGpu, *arguments: object) -> int:
        moved = whole(self, *arguments)  # type: ignore[arg-type]
        source.exchange.withdraw(source.handle)
        return moved

    assert _move(direction, here, there, _runs((0, 0, 4096))) == ""
    monkeypatch.setattr(ExchangeGpu, "copy", copy)
    assert "RangeError" in _move(direction, here, there, _runs((0, 0, 4096)))
    assert not there.exchange.has_notice("here", 8)


@pytest.mark.parametrize("direction", [_READ, _WRITE])
@pytest.mark.parametrize("is_gpu_here", [True, False], ids=["GPU here", "GPU there"])
def test_main_memory_and_memory_of_a_gpu_do_not_mix(
    kind: str, open_exchange: Callable[[str], MemoryExchange], direction: Direction, is_gpu_here: bool
) -> None:
    kinds = (kind, MAIN) if is_gpu_here else (MAIN, kind)
    here, there = (_Side(open_exchange(name), each, 3) for name, each in zip(("here", "there"), kinds, strict=True))
    with pytest.raises(TransportError, match="both must be main memory"):
        _move(direction, here, there, _runs((0, 0, 64)))
    if direction is _WRITE or not is_gpu_here:
        # An initiator that denies it: the owner of a memory looks at its own table, and has none of a GPU on its board.
        lie = msgspec.structs.replace(there.handle, gpu_owner=here.handle.gpu_owner, gpu_parts=here.handle.gpu_parts)
        for runs in (_runs((0, 0, 64)), _runs((0, 0, 16), (64, 64, 64)), _runs(*((at, at, 1) for at in range(0, 200, 2)))):
            assert "RangeError" in _move(direction, here, there, runs, lie)
    assert (here.memory.array == 3).all()
    assert (there.memory.array == 3).all()
    assert _move(direction, here, here, _runs((0, 64, 64))) == ""


def test_parts_with_gaps_and_other_hosts_are_refused_before_anything_is_mapped(
    kind: str, open_exchange: Callable[[str], MemoryExchange]
) -> None:
    here, there = _Side(open_exchange("here"), kind, 1), _Side(open_exchange("there"), kind, 2)
    gpu = here.exchange._state.gpu
    assert gpu is not None
    host = here.handle.gpu_owner.partition(" ")[0]
    sources, unknown = GpuSources(), msgspec.structs.replace(there.handle, stamp=1, gpu_owner=f"{host} 1 1")
    late = f"{unknown.memory_bytes},{unknown.gpu_parts.partition(',')[2]}"  # behind as many bytes as it has
    for wrong, error, text in (
        (
            msgspec.structs.replace(unknown, memory_bytes=1 << 17),
            TransportError,
            "parts end at 65536, and the region has 131072",
        ),
        (msgspec.structs.replace(unknown, memory_bytes=2 * unknown.memory_bytes, gpu_parts=late), RangeError, "gaps"),
        (msgspec.structs.replace(unknown, gpu_owner="elsewhere 1 1"), TransportError, "another host"),
        (msgspec.structs.replace(unknown, gpu_owner=here.handle.gpu_owner), RangeError, "not registered"),
        (msgspec.structs.replace(unknown, gpu_parts="1,2"), TransportError, "cannot be read"),
        (msgspec.structs.replace(unknown, memory_bytes=16), TransportError, "does not fit"),
    ):
        with pytest.raises(error, match=text):
            sources.find(gpu, wrong)


def test_memory_of_a_second_gpu_is_refused(open_exchange: Callable[[str], MemoryExchange], kind: str) -> None:
    exchange = open_exchange("here")
    memory, other = (place(kind, np.zeros(64, np.uint8)) for _ in range(2))
    exchange.register(memory.address, 64)
    with pytest.raises(ConfigError, match="on GPU 0"):
        exchange.register(other.address, 64, 1)
    assert exchange.stats()["memories"] == 1


def test_mappings_are_closed_with_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a peer had allocated stays allocated while it is mapped."""
    use_stand_in(monkeypatch.setattr)
    memory = place(STAND_IN, np.zeros(64, np.uint8))
    gpu = ExchangeGpu(0, "host 1 1", 1.0, SharedDriver(), HostCopier())
    parts = gpu.share(memory.address, 64)
    sources, handle = GpuSources(), MemoryHandle(0, 1, 64, "host 2 2", parts)
    for _ in range(3):
        sources.find(gpu, handle)
        sources.find(gpu, msgspec.structs.replace(handle, stamp=2))
    assert sum(SharedDriver.mapped.values()) == 2
    sources.forget(2)
    assert sum(SharedDriver.mapped.values()) == 1
    sources.close()
    sources.close()
    assert sum(SharedDriver.mapped.values()) == 0
    with pytest.raises(TransportError, match="closed"):
        sources.find(gpu, handle)


def test_an_exchange_that_is_dropped_forgets_its_memories(kind: str) -> None:
    from kvbaton.transport.exchange.gpu import _SHARED_HERE

    before = len(_SHARED_HERE)
    exchange = MemoryExchange("dropped", TransportSettings())
    memory = place(kind, np.zeros(64, np.uint8))
    exchange.register(memory.address, 64)
    assert len(_SHARED_HERE) == before + 1
    del exchange
    gc.collect()
    assert len(_SHARED_HERE) == before
