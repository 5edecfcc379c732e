"""The agent's thread of an instance, as production runs it: `Driver` with its queues, turns and order, on a virtual clock.

The engine calls the driver's port and drains its events when it is woken; the driver has a turn when a command, a frame or a
report has come, or something is due. What is simulated is the thread itself: it gets its turns a little later than it could,
and can stand still while the engine goes on. A turn reads so few frames, and carries out so few commands between two looks at
the heartbeats, that both limits are met.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvbaton.agent.bell import SOON_S
from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.driver import Driver
from kvbaton.sim.world import SimProcess, World

__all__ = ["AgentThread", "SimDriver", "ThreadBell"]

_LATE_S = 2e-4
"""How much later than it could a thread has its turn at most."""

_ENGINE_S = 5e-4
"""How long an engine needs at most to notice that it was woken."""


_FAILED_S = 0.05
"""How long the thread waits where its wait has failed."""


class ThreadBell:
    """Wakes the thread instead of a file descriptor."""

    fds = ()

    def __init__(self, wake: Callable[[float], None]) -> None:
        self._wake = wake

    def set(self) -> None:
        """Have a turn."""
        self._wake(0.0)

    def set_soon(self) -> None:
        """Have a turn when the bell of production rings at the latest."""
        self._wake(SOON_S)

    def clear(self) -> None:
        """Nothing waits to be noticed: a turn takes all that has come."""

    def close(self) -> None:
        """Nothing to give back."""


class SimDriver(Driver):
    """The driver of production, whose turns an `AgentThread` gives it; an error of its own is reported to `fail`."""

    commands_per_beat = 2
    fail: Callable[[Exception], None]

    def _guarded(self, work: Callable[[], None]) -> bool:
        return super()._guarded(partial(self._noted, work))

    def _noted(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.fail(error)
            raise

    @property
    def coordinator(self) -> Coordinator:
        """What decides."""
        return self._coordinator

    def take_turn(self, rest: Callable[[float], float]) -> float:
        """What the thread does between two waits, and what the control sockets do then; for how long it may wait."""
        self._guarded(self._turn)
        waits_s: list[float] = []
        self._guarded(lambda: waits_s.append(rest(self._timeout_s())))
        return min(waits_s, default=_FAILED_S)


class AgentThread:
    """One driver and its turns: `on_turn` is called after each, `step` when the engine has noticed that it was woken."""

    def __init__(self, world: World, process: SimProcess, on_turn: Callable[[], None], step: Callable[[], None]) -> None:
        self._world = world
        self._process = process
        self._on_turn = on_turn
        self._step = step
        self.driver: SimDriver
        self.rest: Callable[[float], float] = lambda timeout_s: timeout_s
        """What the control sockets do while the thread waits; for how long it may."""
        self.paused_until = 0.0
        self._turn_at = float("inf")
        self._is_stepping = False

    def wake(self, after_s: float = 0.0) -> None:
        """Something has come: have a turn soon."""
        self._have_turn(self._world.now + after_s + self._world.random.uniform(0.0, _LATE_S))

    def news(self) -> None:
        """There are events, or the engine may be asleep: have it take a step soon."""
        if not self._is_stepping:
            self._is_stepping = True
            self._world.after(self._world.random.uniform(0.0, _ENGINE_S), self._process, self._wake_engine)

    def _wake_engine(self) -> None:
        self._is_stepping = False
        self._step()

    def _have_turn(self, when: float) -> None:
        if when < self._turn_at:
            self._turn_at = when
            self._world.at(when, self._process, self._on_time)

    def _on_time(self) -> None:
        now = self._world.now
        if now + 1e-12 < self._turn_at:
            return
        self._turn_at = float("inf")
        if now < self.paused_until:
            self._have_turn(self.paused_until)
            return
        wait_s = self.driver.take_turn(self.rest)
        self._on_turn()
        self._have_turn(now + max(wait_s / self._process.clock.rate, 1e-6))
