"""A selector looks before it sleeps only where its waits are short, and never for longer than it was allowed to."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator

import pytest

from kvbaton.transport import busy_selector
from kvbaton.transport.busy_selector import BusyMachine, BusySelector
from kvbaton.transport.runs import load_loops

LONGEST_S = 0.001
MANY = 32


class Waits:
    """A clock that only waits move, and a record of the looks: each wait takes as long as was set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wait_s = 0.0
        self.looks: list[int] = []

    def clock(self) -> float:
        """What the selector measures waits by: it asks at the beginning and at the end of each."""
        self.now += self.wait_s
        return self.now

    def look(self, _epoll: int, longest_ns: int) -> int:
        """Note how long it may take."""
        self.looks.append(longest_ns)
        return 0


class Rung:
    """A descriptor that is readable at will."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Make it readable."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable."""
        os.eventfd_read(self.fd)


@pytest.fixture
def rung() -> Iterator[Rung]:
    bell = Rung()
    yield bell
    os.close(bell.fd)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def selector(waits: Waits, rung: Rung) -> Iterator[BusySelector]:
    with BusySelector(LONGEST_S, clock=waits.clock, look=waits.look) as selector:
        selector.register(rung.fd, selectors.EVENT_READ)
        yield selector


def wait_for_ready(selector: BusySelector, waits: Waits, rung: Rung, wait_s: float, times: int = MANY) -> None:
    """Wait so often for what is ready by then, so long by the clock of the selector."""
    waits.wait_s = wait_s
    rung.ring()
    for _ in range(times):
        assert [key.fd for key, _ in selector.select(1.0)] == [rung.fd]
    rung.clear()


class TestWhetherItLooks:
    def test_the_first_wait_sleeps_at_once(self, selector: BusySelector, waits: Waits) -> None:
        assert not selector.is_busy
        assert selector.select(0.001) == []
        assert waits.looks == []

    def test_it_looks_once_waits_are_short(self, selector: BusySelector, waits: Waits, rung: Rung) -> None:
        wait_for_ready(selector, waits, rung, LONGEST_S / 2)
        assert selector.is_busy
        assert waits.looks[-1] == int(LONGEST_S * 1e9)

    def test_control_long_waits_never_make_it_look(self, selector: BusySelector, waits: Waits, rung: Rung) -> None:
        wait_for_ready(selector, waits, rung, 2 * LONGEST_S)
        assert not selector.is_busy
        assert waits.looks == []

    def test_it_stops_looking_when_waits_become_long(self, selector: BusySelector, waits: Waits, rung: Rung) -> None:
        wait_for_ready(selector, waits, rung, LONGEST_S / 2)
        wait_for_ready(selector, waits, rung, 2 * LONGEST_S)
        waits.looks.clear()
        wait_for_ready(selector, waits, rung, 2 * LONGEST_S)
        assert waits.looks == []

    def test_it_stops_looking_when_nothing_comes(self, selector: BusySelector, waits: Waits, rung: Rung) -> None:
        wait_for_ready(selector, waits, rung, LONGEST_S / 2)
        waits.wait_s = 0.0
        for _ in range(MANY):
            assert selector.select(0.0001) == []
        assert not selector.is_busy

    def test_one_long_wait_among_short_ones_does_not_end_it(self, selector: BusySelector, waits: Waits, rung: Rung) -> None:
        wait_for_ready(selector, waits, rung, LONGEST_S / 2)
        wait_for_ready(selector, waits, rung, 2 * LONGEST_S, times=1)
        assert selector.is_busy


class TestHowLongItLooks:
    def test_no_longer_than_the_wait_may_take(self, selector: BusySelector, waits: Waits, rung: Rung) -> None:
        wait_for_ready(selector, waits, rung, LONGEST_S / 2)
        selector.select(LONGEST_S / 4)
        assert waits.looks[-1] == int(LONGEST_S / 4 * 1e9)

    def test_a_wait_without_an_end_looks_as_long_as_any(self, selector: BusySelector, waits: Waits, rung: Rung) -> None:
        wait_for_ready(selector, waits, rung, LONGEST_S / 2)
        rung.ring()
        selector.select()
        assert waits.looks[-1] == int(LONGEST_S * 1e9)

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0])
    def test_a_question_that_does_not_wait_does_not_look(
        self, selector: BusySelector, waits: Waits, rung: Rung, timeout_s: float
    ) -> None:
        wait_for_ready(selector, waits, rung, LONGEST_S / 2)
        waits.looks.clear()
        assert selector.select(timeout_s) == []
        assert waits.looks == []

    def test_zero_never_looks(self, waits: Waits, rung: Rung) -> None:
        with BusySelector(0.0, clock=waits.clock, look=waits.look) as selector:
            selector.register(rung.fd, selectors.EVENT_READ)
            wait_for_ready(selector, waits, rung, 0.0)
            assert not selector.is_busy
        assert waits.looks == []


class TestWithoutTheLoop:
    def test_without_a_compiler_it_sleeps(self, monkeypatch: pytest.MonkeyPatch, waits: Waits, rung: Rung) -> None:
        monkeypatch.setattr(busy_selector, "load_loops", lambda: None)
        self._sleeps(waits, rung)

    def test_on_one_processor_it_sleeps(self, monkeypatch: pytest.MonkeyPatch, waits: Waits, rung: Rung) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        self._sleeps(waits, rung)

    def _sleeps(self, waits: Waits, rung: Rung) -> None:
        with BusySelector(LONGEST_S, clock=waits.clock) as selector:
            selector.register(rung.fd, selectors.EVENT_READ)
            wait_for_ready(selector, waits, rung, 0.0)
            assert not selector.is_busy


@pytest.mark.skipif(load_loops() is None, reason="no C compiler")
class TestTheLoop:
    def test_it_returns_when_something_is_ready(self, rung: Rung) -> None:
        loops = load_loops()
        assert loops is not None
        with selectors.EpollSelector() as selector:
            selector.register(rung.fd, selectors.EVENT_READ)
            rung.ring()
            assert loops.busy_poll(selector.fileno(), 10**18) == 1

    @pytest.mark.parametrize("longest_ns", [-1, 0, 1, 200_000])
    def test_it_ends_when_nothing_is(self, rung: Rung, longest_ns: int) -> None:
        loops = load_loops()
        assert loops is not None
        with selectors.EpollSelector() as selector:
            selector.register(rung.fd, selectors.EVENT_READ)
            assert loops.busy_poll(selector.fileno(), longest_ns) == 0

    def test_it_ends_at_once_for_what_is_no_epoll(self, rung: Rung) -> None:
        loops = load_loops()
        assert loops is not None
        assert loops.busy_poll(rung.fd, 10**18) == -1
        assert loops.busy_poll(-1, 10**18) == -1

    def test_a_selector_of_this_machine_finds_what_is_ready(self, waits: Waits, rung: Rung) -> None:
        selector = BusyMachine(LONGEST_S).selector()
        selector.register(rung.fd, selectors.EVENT_READ)
        assert isinstance(selector, BusySelector)
        wait_for_ready(selector, waits, rung, 0.0)
        selector.close()
