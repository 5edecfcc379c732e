"""Threads on virtual time: for code of production that waits in the middle of a call.

Theory of operation. The worker of an engine waits inside of its calls: for blocks that drain, for what the first rank reports.
Such code cannot be cut into events without being written anew, so each worker has a real thread; but only one of them, or the
world, runs at any time. A thread that waits passes the baton back to the world, which passes it on when the thread's time has
come, or the signal it waits for is set. So the order is that of the world's events, and a seed is one run.

A thread is of a process: while that stands still the thread does not run, and when it dies the thread never runs again. `close`
ends it wherever it is, without its own code noticing any more than that of a process that is killed.

The baton is real, and so are the deadlines of its waits: code that waits for something outside of virtual time, and keeps the
baton meanwhile, would stop the whole run. That is a `VirtualThreadStuck`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from kvbaton.errors import Bug
from kvbaton.sim.world import SimProcess, World

__all__ = ["Signal", "VirtualThread", "VirtualThreadStuck"]

_SHORTEST_S = 1e-6
"""Time goes on in every wait: what is left of a limit can be too small to be added to the time of day."""


_TURN_S = 120.0
"""How long a thread may keep the baton, in real time: a turn takes a millisecond, on a machine that may be busy with others."""

_RUN_S = 3600.0
"""How long a thread waits for its next turn, in real time: longer than any run takes."""


class VirtualThreadStuck(Bug):
    """A thread has not passed the baton back: its code waits for something that virtual time does not bring about."""


class _Killed(BaseException):
    """The thread ends here. No `Exception`: nothing that the code of production catches."""


class VirtualThread:
    """One thread, which runs `work` from `start` on. It does not run while `held_until` lies ahead."""

    def __init__(
        self, world: World, process: SimProcess, held_until: Callable[[], float], fail: Callable[[Exception], None]
    ) -> None:
        self._world = world
        self._process = process
        self._held_until = held_until
        self._fail = fail
        self._turn = 0
        # Locks, not semaphores: they are what a switch of threads costs least with, and the baton is one.
        self._baton = threading.Lock()
        self._given_back = threading.Lock()
        self._baton.acquire()
        self._given_back.acquire()
        self._is_closing = False
        self._is_over = False
        self._is_stuck = False
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Let it begin soon."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="kvbaton-virtual", daemon=True)
        self._thread.start()
        self.wake()

    def close(self) -> None:
        """End it, wherever it waits. Idempotent."""
        if self._thread is None or not self._thread.is_alive() or self._is_closing:
            return
        self._is_closing = True
        if self._baton.locked():
            self._baton.release()
        if not self._is_stuck:
            self._thread.join(_TURN_S)
            if self._thread.is_alive():
                self._give_up("ended")

    def wake(self) -> None:
        """Called by others: end the wait that the thread is in."""
        self._world.at(self._world.now, self._process, partial(self._go_on, self._turn))

    def wait(self, seconds: float) -> None:
        """Called by the thread itself: pass the baton back until `wake`, or until that time is over."""
        seconds = max(seconds, _SHORTEST_S) / self._process.clock.rate
        self._world.after(seconds, self._process, partial(self._go_on, self._turn))
        self._given_back.release()
        self._take_baton()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._take_baton()
            work()
        except _Killed:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it is an error of ours
            self._fail(error)
        self._is_over = True
        self._given_back.release()

    def _take_baton(self) -> None:
        # Without a turn for that long, the world is gone: nothing is left to report it to.
        if self._is_closing or not self._baton.acquire(timeout=_RUN_S) or self._is_closing:
            raise _Killed

    def _go_on(self, turn: int) -> None:
        if turn != self._turn or self._is_over:
            return
        if self._world.now < (held_until := self._held_until()):
            self._world.at(held_until, self._process, partial(self._go_on, turn))
            return
        self._turn += 1
        self._baton.release()
        if not self._given_back.acquire(timeout=_TURN_S):
            self._give_up("passed the baton back")

    def _give_up(self, missed: str) -> NoReturn:
        # It is left to itself until it comes to a wait of its own, and ends there: there is no other way to end a thread.
        self._is_stuck = True
        where = f"{self._process.name}, at {self._world.now:.6f} s of virtual time, after {self._world.events_total} events"
        raise VirtualThreadStuck(
            f"{where}: a virtual thread has not {missed} within {_TURN_S:g} s; find what its code waits for, "
            "and let it wait for that with VirtualThread.wait or Signal.wait"
        )


class Signal:
    """What one virtual thread waits for, in the place of a `threading.Event`."""

    def __init__(self, thread: VirtualThread) -> None:
        self._thread = thread
        self._is_set = False
        self._is_waited_for = False

    def set(self) -> None:
        """End the wait, or the next one before it begins."""
        self._is_set = True
        if self._is_waited_for:
            self._thread.wake()

    def clear(self) -> None:
        """What has come is about to be taken."""
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Wait at most so long; whether it is set. Called by its thread alone."""
        if not self._is_set:
            self._is_waited_for = True
            self._thread.wait(timeout)
            self._is_waited_for = False
        return self._is_set
