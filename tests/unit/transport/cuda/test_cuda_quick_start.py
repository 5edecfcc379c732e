"""Plans that C starts: it queues what Python would, or leaves them to Python. A driver of this process stands in for CUDA's."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from test_cuda_strips import SIZE, aligned, rows, strips, whole

from kvbaton.core.strips import NO_SLOT, Plan, Strip, TokenPattern, unroll
from kvbaton.errors import TransportError
from kvbaton.transport.checks import check_plan
from kvbaton.transport.cuda.launch import TILES, Placement, Segment
from kvbaton.transport.cuda.quick_start import MOST_ROWS, EndFlag, Kernels, QuickStart
from kvbaton.transport.cuda.strip_launch import StripLaunch, strip_launches
from kvbaton.transport.runs import load_loops

PATIENCE_S = 30.0
ROOM = 1 << 16
VOID, WORD = ctypes.c_void_p, ctypes.c_uint64
KINDS = [(piece, tokens, even) for piece in TILES for tokens in (False, True) for even in (False, True)]


@dataclass
class Driver:
    """Copies tables, notes launches, and writes the number when it is released."""

    refuses: int = 0
    holds: bool = False
    launched: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    tables: list[bytes] = field(default_factory=list)
    inside: int = 0
    held: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        number = ctypes.c_uint
        kinds = (
            (self._enter, (VOID,)),
            (self._leave, (VOID,)),
            (self._bring, (WORD, VOID, ctypes.c_size_t, VOID)),
            (self._launch, (VOID, *(number,) * 7, VOID, ctypes.POINTER(VOID), VOID)),
            (self._write, (VOID, WORD, ctypes.c_uint32, number)),
        )
        self._kept = [ctypes.CFUNCTYPE(ctypes.c_int, *types)(call) for call, types in kinds]
        self.calls = [ctypes.cast(call, VOID).value or 0 for call in self._kept]

    def release(self) -> None:
        while self.held:
            address, value = self.held.pop(0)
            ctypes.c_int32.from_address(address).value = value

    def _enter(self, context: Any) -> int:
        assert context == 7
        self.inside += 1
        return 0

    def _leave(self, _: Any) -> int:
        self.inside -= 1
        return 0

    def _bring(self, target: int, source: int, count: int, stream: int) -> int:
        assert (self.inside, stream) == (1, 9)
        ctypes.memmove(target, source, count)
        self.tables.append(ctypes.string_at(source, count))
        return 0

    def _launch(self, function: int, x: int, y: int, z: int, threads: int, b: int, c: int, shared: int, *rest: Any) -> int:
        assert (y, z, b, c, shared, rest[0]) == (1, 1, 1, 1, 0, 9)
        numbers = [WORD.from_address(rest[1][n]).value for n in range(13)]
        self.launched.append((function, x, threads, numbers))
        return self.refuses

    def _write(self, stream: int, address: int, value: int, flags: int) -> int:
        assert (stream, flags, self.inside) == (9, 0, 1)
        self.held.append((address, value))
        if not self.holds:
            self.release()
        return 0


@dataclass
class Rig:
    driver: Driver
    flag: EndFlag
    quick: QuickStart
    on_gpu: npt.NDArray[np.uint8]
    wakeup: tuple[int, int]
    keep: list[Any]

    def start(self, plan: Plan, source: Placement, target: Placement) -> bool:
        table = check_plan(plan, SIZE, SIZE, load_loops())
        begun = self.quick.start(table, source, target, self.wakeup[1], SIZE)
        assert begun in (0, plan.wire_bytes)
        return begun > 0

    def check_and_start(self, plan: Plan, source: Placement, target: Placement, size: int = SIZE) -> int:
        return self.quick.check_and_start(plan, (size, size), source, target, self.wakeup[1], SIZE)

    def woken(self) -> bool:
        return bool(select.select([self.wakeup[0]], [], [], PATIENCE_S)[0]) and os.read(self.wakeup[0], 8) == b"\0"


def launch_kind(piece: int, tokens: bool, even: bool) -> StripLaunch:
    return StripLaunch(piece, 1, 1, tokens, 1, even, piece, (0, 0), NO_SLOT[:, :2], NO_SLOT, NO_SLOT[:0])


@pytest.fixture
def rig() -> Iterator[Rig]:
    if load_loops() is None:
        pytest.skip("needs a C compiler")
    number, pinned, on_gpu = np.zeros(1, np.int32), aligned(ROOM), aligned(ROOM)
    flag = EndFlag.open(int(number.ctypes.data))
    assert flag is not None
    driver = Driver()
    kernels = Kernels()
    quick = QuickStart(driver.calls, 7, 9, (int(on_gpu.ctypes.data), ROOM), flag, kernels)
    quick.use(int(pinned.ctypes.data))
    for function, kind in enumerate(KINDS, 1):
        kernels.keep(launch_kind(*kind), SimpleNamespace(function=function, metadata=SimpleNamespace(shared=0)))
    wakeup = os.pipe()
    yield Rig(driver, flag, quick, on_gpu, wakeup, [number, pinned])
    flag.close()
    for fd in wakeup:
        os.close(fd)


def as_launch(rig: Rig, called: tuple[int, int, int, list[int]]) -> StripLaunch:
    """What a launch of the driver would copy."""
    function, programs, threads, numbers = called
    piece, tokens, even = KINDS[function - 1]
    pieces, places, most, items, per_item, source_step, target_step, run = numbers[5:]
    assert items == 1
    base = int(rig.on_gpu.ctypes.data)
    table = [np.frombuffer(rig.on_gpu, np.int64, offset=at - base) for at in numbers[2:4]]
    slots = pieces // (places * most * per_item)
    shape = (table[0][: 2 * slots].reshape(-1, 2).copy(), table[1][: 3 * places].reshape(-1, 3).copy())
    launch = StripLaunch(piece, pieces, most, tokens, per_item, even, run, (source_step, target_step), *shape, NO_SLOT[:0])
    assert (launch.programs, 32 * launch.tile.warps) == (programs, threads)
    return launch


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strips())
def test_it_queues_what_python_would(rig: Rig, strip: Strip) -> None:
    if int(unroll(Plan((strip,)))[:, :2].max()) + 4096 > SIZE:
        return
    source, target, rig.driver.launched = aligned(SIZE), aligned(SIZE), []
    places, plan = (whole(source), whole(target)), Plan((strip,))
    [expected] = strip_launches(plan, *places) or []
    if not rig.start(plan, *places):
        # Several items, or places that are cut.
        assert len(expected.items) or len(set(strip.places[:, 2].tolist())) > 1
        assert rig.flag.was_seen()
        return
    assert rig.woken()
    assert rig.flag.was_seen()
    [called] = rig.driver.launched
    found = as_launch(rig, called)
    assert (found.constants, found.numbers) == (expected.constants, expected.numbers)
    assert np.array_equal(found.slots, expected.slots)
    assert np.array_equal(found.places, expected.places)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strips())
def test_a_plan_that_was_not_checked_is_queued_the_same_way_or_left_to_python(rig: Rig, strip: Strip) -> None:
    if int(unroll(Plan((strip,)))[:, :2].max()) + 4096 > SIZE:
        return
    in_order = Strip(strip.slots, strip.places[np.argsort(strip.places[:, 1])], strip.pattern)
    memory = aligned(SIZE)
    place = whole(memory)
    for plan in (Plan((strip,)), Plan((in_order,))):
        rig.driver.launched = []
        passes = load_loops().passes(check_plan(plan, SIZE, SIZE), SIZE, SIZE)  # type: ignore[union-attr]
        is_started = rig.start(plan, place, place)
        assert not is_started or rig.woken()
        wanted, tables = rig.driver.launched, rig.driver.tables
        rig.driver.launched, rig.driver.tables = [], []
        assert rig.check_and_start(plan, place, place) == (plan.wire_bytes if is_started and passes else 0)
        assert rig.driver.launched == (wanted if passes else [])
        if is_started and passes:
            assert rig.woken()
            assert rig.driver.tables == tables[-1:]
        assert rig.flag.was_seen()


def _wrong() -> dict[str, Plan]:
    """Plans that C does not take: wrong ones, and some that it does not see to be right."""
    page, token = rows((0, 0, 4096)), TokenPattern(rows((0, 0, 64)), 64, 64)
    far = SIZE - 4096 + 16
    return {
        "none": Plan(()),
        "beyond the source": Plan((Strip(NO_SLOT, rows((far, 0, 4096))),)),
        "beyond the target": Plan((Strip(rows((0, far, 0)), page),)),
        "below zero": Plan((Strip(rows((-16, 0, 0)), page),)),
        "overlapping": Plan((Strip(rows((0, 0, 0), (0, 16, 0)), page),)),
        "places that overlap": Plan((Strip(NO_SLOT, rows((0, 0, 64), (64, 32, 64))),)),
        "empty": Plan((Strip(NO_SLOT, rows((0, 0, 0))),)),
        "no items": Plan((Strip(NO_SLOT, rows((0, 0, 64)), TokenPattern(rows(), 64, 64)),)),
        "no slots": Plan((Strip(rows(), page),)),
        "no places": Plan((Strip(NO_SLOT, rows()),)),
        "a step below zero": Plan((Strip(NO_SLOT, rows((0, 0, 2)), TokenPattern(rows((0, 0, 64)), -64, 64)),)),
        "a step too far": Plan((Strip(NO_SLOT, rows((0, 0, 2)), TokenPattern(rows((0, 0, 64)), 1 << 70, 64)),)),
        "a step out of the region": Plan((Strip(NO_SLOT, rows((0, 0, 2)), TokenPattern(rows((0, 0, 64)), 1 << 63, 64)),)),
        "other numbers": Plan((Strip(NO_SLOT, page.astype(np.int32)),)),
        "bytes in another order": Plan((Strip(NO_SLOT, page.astype(">i8")),)),
        "two columns": Plan((Strip(NO_SLOT, page[:, :2].copy()),)),
        "one dimension": Plan((Strip(NO_SLOT, page[0]),)),
        "columns apart": Plan((Strip(NO_SLOT, np.asfortranarray(np.concatenate([page, page + rows((4096, 4096, 0))]))),)),
        "too many strips": Plan(tuple(Strip(rows((n * 4096, n * 4096, 0)), page) for n in range(9))),
        "too many rows": Plan((Strip(NO_SLOT, rows(*((n * 16, n * 16, 16) for n in range(MOST_ROWS)))),)),
        "tokens for bytes": Plan((Strip(NO_SLOT, rows((0, 0, 1 << 20)), token),)),
    }


@pytest.mark.parametrize("name", _wrong())
def test_what_is_not_seen_to_be_right_is_not_queued(rig: Rig, name: str) -> None:
    place = whole(aligned(SIZE))
    assert rig.check_and_start(_wrong()[name], place, place) == 0
    assert (rig.driver.launched, rig.driver.tables) == ([], [])
    assert rig.flag.was_seen()
    assert rig.check_and_start(Plan((Strip(NO_SLOT, rows((0, 0, 4096))),)), place, place) == 4096
    assert rig.woken()


def test_each_region_has_its_own_size(rig: Rig) -> None:
    place, plan = whole(aligned(SIZE)), Plan((Strip(NO_SLOT, rows((4096, 0, 4096))),))
    for sizes, begun in (((8192, 4096), 4096), ((8191, 8192), 0), ((8192, 4095), 0)):
        assert rig.quick.check_and_start(plan, sizes, place, place, rig.wakeup[1], SIZE) == begun


@pytest.mark.parametrize("lingers", [False, True])
def test_a_copy_that_takes_as_long_as_those_before_has_a_byte_before_its_end(rig: Rig, lingers: bool) -> None:
    loops, number = rig.flag.loops, ctypes.c_int32.from_address(rig.flag.address)
    wanted = 0

    def begin(wire_bytes: int) -> None:
        nonlocal wanted
        wanted += 1
        loops.wait_for_flag(rig.flag.waiter, rig.flag.address, wanted, rig.wakeup[1], wire_bytes)

    def end() -> None:
        number.value = wanted
        assert rig.woken()
        assert loops.seen_flag(rig.flag.waiter) == wanted

    def linger_until_end() -> bool:
        with ThreadPoolExecutor(1) as other:
            lingering = other.submit(loops.linger, rig.flag.waiter, int(PATIENCE_S * 1e9))
            while loops.is_near(rig.flag.waiter) and not lingering.done():
                pass
            number.value = wanted
            return bool(lingering.result(PATIENCE_S))

    for _ in range(50):  # the length of a wait is a matter of the machine: one of these comes near half a millisecond
        began = time.monotonic()
        begin(1 << 20)
        assert not select.select([rig.wakeup[0]], [], [], 0.02)[0], "nothing was known, or it would take too long"
        assert not loops.is_near(rig.flag.waiter)
        end()
        begin(int((1 << 20) * 0.0005 / (time.monotonic() - began)))
        is_early = bool(select.select([rig.wakeup[0]], [], [], 0.1)[0])
        if is_early:
            assert loops.seen_flag(rig.flag.waiter) == wanted - 1
            assert os.read(rig.wakeup[0], 8) == b"\0"
            assert loops.is_near(rig.flag.waiter)
            if not lingers:
                assert not rig.flag.linger(), "the end did not come"
                assert not loops.is_near(rig.flag.waiter), "one wait for each early byte"
            else:
                assert linger_until_end()
                assert loops.seen_flag(rig.flag.waiter) == wanted
                assert not select.select([rig.wakeup[0]], [], [], 0)[0], "the end has no byte of its own"
                return
        end()
        if is_early:
            return
    pytest.fail("no byte came before the end")


def test_several_strips_are_one_table_and_one_number(rig: Rig) -> None:
    memory = aligned(SIZE)
    place = whole(memory)
    token = TokenPattern(rows((16, 32, 128)), 256, 128)
    plan = Plan((Strip(NO_SLOT, rows((0, 0, 4096))), Strip(rows((65536, 8192, 0)), rows((0, 0, 4), (4096, 4096, 4)), token)))
    assert rig.start(plan, place, place)
    assert rig.woken()
    assert len(rig.driver.launched) == 2
    assert len(rig.driver.tables) == 1
    launches = strip_launches(plan, place, place)
    assert launches is not None
    for called, expected in zip(rig.driver.launched, launches, strict=True):
        assert as_launch(rig, called).numbers == expected.numbers


def test_segments_are_found_and_a_slot_that_leaves_one_is_left_to_python(rig: Rig) -> None:
    parts = Placement([Segment(0, 4096, 1 << 20), Segment(8192, 4096, 1 << 16)])
    flat = Placement([Segment(0, SIZE, 1 << 30)])
    plan = Plan((Strip(rows((0, 0, 0), (8192, 4096, 0)), rows((0, 0, 1024), (3072, 1024, 1024))),))
    assert rig.start(plan, parts, flat)
    [expected] = strip_launches(plan, parts, flat) or []
    assert np.array_equal(as_launch(rig, rig.driver.launched[0]).slots, expected.slots)
    for place in ((3584, 0, 1024), (4096, 0, 16), (12288, 0, 16)):
        assert not rig.start(Plan((Strip(NO_SLOT, rows(place)),)), parts, flat)
    assert not rig.start(Plan((Strip(NO_SLOT, rows((0, 0, 16))),)), Placement([Segment(4096, 4096, 1 << 20)]), flat)


def test_the_end_is_seen_when_the_number_is_written_not_before(rig: Rig) -> None:
    place = whole(aligned(SIZE))
    rig.driver.holds = True
    assert rig.start(Plan((Strip(NO_SLOT, rows((0, 0, 4096))),)), place, place)
    assert not rig.flag.was_seen()
    assert not select.select([rig.wakeup[0]], [], [], 0.02)[0]
    rig.driver.release()
    assert rig.woken()
    assert rig.flag.was_seen()


def test_an_error_of_the_driver_is_raised_and_nothing_is_waited_for(rig: Rig) -> None:
    place = whole(aligned(SIZE))
    rig.driver.refuses = 719
    with pytest.raises(TransportError, match="719"):
        rig.start(Plan((Strip(NO_SLOT, rows((0, 0, 4096))),)), place, place)
    assert rig.flag.was_seen()
    assert rig.driver.inside == 0
    rig.driver.refuses = 0
    assert rig.start(Plan((Strip(NO_SLOT, rows((0, 0, 4096))),)), place, place)
    assert rig.woken()


def test_a_wait_that_is_stopped_writes_its_byte_and_its_number_does_not_come_again(rig: Rig) -> None:
    place, plan = whole(aligned(SIZE)), Plan((Strip(NO_SLOT, rows((0, 0, 4096))),))
    rig.driver.holds = True
    assert rig.start(plan, place, place)
    rig.flag.stop()
    assert rig.woken()
    assert rig.flag.was_seen()
    assert rig.start(plan, place, place)
    late, own = rig.driver.held
    rig.driver.held = [late]
    rig.driver.release()
    assert not rig.flag.was_seen()
    rig.driver.held = [own]
    rig.driver.release()
    assert rig.woken()
    assert rig.flag.was_seen()


def test_a_kernel_that_is_not_compiled_and_a_table_that_is_too_long_are_left_to_python(rig: Rig) -> None:
    place = whole(aligned(SIZE))
    fresh = QuickStart(rig.driver.calls, 7, 9, (int(rig.on_gpu.ctypes.data), ROOM), rig.flag, Kernels())
    fresh.use(int(rig.keep[1].ctypes.data))
    rig.quick, learnt = fresh, rig.quick
    assert not rig.start(Plan((Strip(NO_SLOT, rows((0, 0, 4096))),)), place, place)
    rig.quick = learnt
    many = rows(*((n * 16, n * 16, 16) for n in range(ROOM // 24 + 1)))
    assert not rig.start(Plan((Strip(NO_SLOT, many),)), place, place)
    assert rig.driver.launched == []


def test_more_bytes_than_one_batch_may_have_are_not_begun(rig: Rig) -> None:
    place = whole(aligned(SIZE))
    table = check_plan(Plan((Strip(NO_SLOT, rows((0, 0, 4096))),)), SIZE, SIZE, load_loops())
    assert not rig.quick.start(table, place, place, rig.wakeup[1], 4095)
    assert rig.quick.start(table, place, place, rig.wakeup[1], 4096) == 4096
    assert rig.woken()


def test_what_is_not_on_lines_is_left_to_python(rig: Rig) -> None:
    place = whole(aligned(SIZE))
    for strip in (
        Strip(NO_SLOT, rows((8, 0, 64))),
        Strip(NO_SLOT, rows((0, 0, 40))),
        Strip(rows((4, 0, 0)), rows((0, 0, 64))),
        Strip(NO_SLOT, rows((0, 0, 2)), TokenPattern(rows((0, 0, 16)), 24, 16)),
        Strip(NO_SLOT, rows((0, 0, 2)), TokenPattern(rows((0, 0, 20)), 32, 32)),
    ):
        assert not rig.start(Plan((strip,)), place, place)
