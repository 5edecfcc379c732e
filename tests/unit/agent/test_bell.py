"""The bell of the agents' thread: it rings now, or soon, until it is cleared; and no ringing is lost between threads."""

from __future__ import annotations

import gc
import resource
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_rig import AUX, Side, key_of

from kvbaton.agent import bell as bell_module
from kvbaton.agent.bell import SOON_S, TimerBell
from kvbaton.agent.engine_port import Offer, SpansReady
from kvbaton.core.handoff import Span
from kvbaton.errors import ConfigError
from kvbaton.transport.memory import MemoryHub

PATIENCE_MS = 20_000


@pytest.fixture
def bell() -> Iterator[TimerBell]:
    bell = TimerBell()
    yield bell
    bell.close()


def rings(bell: TimerBell, within_ms: int = PATIENCE_MS) -> bool:
    poll = select.poll()
    for fd in bell.fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_ms))


def test_it_rings_until_it_is_cleared_and_again_when_it_is_set_again(bell: TimerBell) -> None:
    assert not rings(bell, 0)
    for ring in (bell.set, bell.set_soon, bell.set):
        ring()
        assert rings(bell)
        assert rings(bell, 0), "to look changes nothing"
        bell.clear()
        assert not rings(bell, 0)


def test_what_is_to_ring_soon_rings_now_when_something_else_does(bell: TimerBell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell, "_soon", bell_module._Spec(0, 0, 3600, 0))
    bell.set_soon()
    assert not rings(bell, 50)
    bell.set()
    assert rings(bell)
    bell.set_soon()
    assert rings(bell), "what rings is not put off"


def test_a_cleared_bell_does_not_ring_for_what_was_to_come(bell: TimerBell) -> None:
    for _ in range(50):
        bell.set_soon()
        bell.clear()
    assert not rings(bell, 50)


@pytest.mark.parametrize("soon", [False, True], ids=["now", "soon"])
def test_no_ringing_is_lost_between_threads(bell: TimerBell, soon: bool) -> None:
    """As the driver uses it: what is to be done is put down before it rings, and looked for after it was cleared."""
    waiting: list[int] = []
    count, taken = 20_000, 0

    def engine() -> None:
        for number in range(count):
            waiting.append(number)
            (bell.set_soon if soon else bell.set)()

    thread = threading.Thread(target=engine)
    thread.start()
    while taken < count:
        assert rings(bell), f"{taken} of {count} were taken, {len(waiting)} wait, and it does not ring"
        bell.clear()
        taken += len([waiting.pop() for _ in range(len(waiting))])
    thread.join()
    assert not waiting


def _in_between(
    bell: TimerBell, monkeypatch: pytest.MonkeyPatch, call: str, other: Callable[[], None]
) -> list[threading.Thread]:
    """Have another thread call `other` where the bell is about to make this call of the system; once."""
    real, threads = getattr(bell, call), []

    def interrupted(*args: Any) -> int:
        monkeypatch.setattr(bell, call, real)
        threads.append(threading.Thread(target=other))
        threads[0].start()
        threads[0].join(0.1)
        return int(real(*args))

    monkeypatch.setattr(bell, call, interrupted)
    return threads


@pytest.mark.parametrize("comes", ["set", "set_soon", "clear"])
@pytest.mark.parametrize(
    ("was", "done", "call"),
    [
        ("clear", "set", "_write"),
        ("clear", "set_soon", "_settime"),
        ("set_soon", "set", "_write"),
        ("set", "clear", "_read"),
        ("set_soon", "clear", "_settime"),
    ],
)
def test_calls_that_fall_into_each_other_leave_a_bell_that_works(
    bell: TimerBell, monkeypatch: pytest.MonkeyPatch, was: str, done: str, call: str, comes: str
) -> None:
    """Else it never rings again, or never stops: what it was last ordered to do and what the system does are one."""
    getattr(bell, was)()
    threads = _in_between(bell, monkeypatch, call, getattr(bell, comes))
    getattr(bell, done)()
    threads[0].join()
    for ring in (bell.set, bell.set_soon, bell.set):
        bell.clear()
        assert not rings(bell, 20)
        ring()
        assert rings(bell)


def test_soon_is_shorter_than_what_is_waited_for(bell: TimerBell) -> None:
    assert list(bell._soon) == [0, 0, 0, SOON_S * 1e9]
    assert 0 < SOON_S <= 0.001, "a layer of a large model takes longer"


class _Recorder:
    """A bell that rings at once, and notes how it was rung."""

    def __init__(self, bell: TimerBell) -> None:
        self._bell = bell
        self.fds, self.clear, self.close = bell.fds, bell.clear, bell.close
        self.rung: list[str] = []

    def set(self) -> None:
        self.rung.append("now")
        self._bell.set()

    def set_soon(self) -> None:
        self.rung.append("soon")
        self._bell.set()


def test_spans_ring_soon_and_everything_else_at_once() -> None:
    """Each of them has to ring: agents that are not woken wait until something else happens."""
    side = Side(MemoryHub())
    assert isinstance(side.driver._bell, TimerBell)
    bell = _Recorder(side.driver._bell)
    side.driver._bell = bell
    key, span = key_of("rung"), Span(0, 0, 1, 0, 1)
    calls: dict[str, Callable[[], None]] = {
        "spans_ready": lambda: side.driver.spans_ready(key, ((1,),), (span,)),
        "spans_ready_all": lambda: side.driver.spans_ready_all([SpansReady(key, ((1,),), (span,))]),
        "offer": lambda: side.driver.offer(Offer(key, ((1,),), 1, AUX)),
        "expect_target": lambda: side.driver.expect_target(key, "prompt"),
        "retract": lambda: side.driver.retract(key),
        "cancel": lambda: side.driver.cancel(key),
        "close": side.driver.close,
    }
    how = {}
    for name, call in calls.items():
        bell.rung.clear()
        call()
        how[name] = list(bell.rung)
    assert how == {name: ["soon" if name.startswith("spans") else "now"] for name in calls}


def test_a_closed_bell_takes_everything_and_has_no_file() -> None:
    gc.collect()  # what earlier tests have left is closed now, and not while files are counted
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    bell = TimerBell()
    bell.set()
    bell.close()
    bell.close()
    bell.set()
    bell.clear()
    bell.set_soon()
    assert not bell.fds
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_without_a_timer_it_is_refused_with_the_reason() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(ConfigError, match="Too many open files; raise `ulimit -n`"):
            TimerBell()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
