"""Keeps the parts of a fleet running: performs what `kvbaton.launch.restarts` decides, and reports each restart in one line.

A part goes through this loop: it runs; it dies, and what it left behind is ended at once, because its helpers still hold its
ports; it waits for its back-off; it is started again with the same command line, ports and key; it answers on its health URL. A
part that dies again before it answers, or does not answer in time, counts as one more death. All waiting is done in the calling
thread, in short steps, so that Ctrl-C ends a back-off at once and two parts can be in a back-off side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvbaton.launch.fleet import Death, Fleet
from kvbaton.launch.restarts import RestartSchedule

__all__ = ["Supervisor"]

_WATCH_S = 0.2


class Supervisor:
    """Restarts parts of a fleet that was healthy once. `report` gets one line for each death and each recovery."""

    def __init__(self, fleet: Fleet, schedule: RestartSchedule, healthy_within_s: float, report: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._schedule = schedule
        self._healthy_within_s = healthy_within_s
        self._report = report
        self._restart_at: dict[str, float] = {}
        self._healthy_by: dict[str, float] = {}

    def watch(self) -> Death:
        """Restart parts until one dies that may not be restarted any more; the last death of that part."""
        while (death := self.step(time.monotonic())) is None:
            time.sleep(_WATCH_S)
        return death

    def step(self, now: float) -> Death | None:
        """Look at every part once, and do what is due at `now`; the death that ends the set-up, if there is one."""
        for death in self._fleet.deaths():
            if death.name in self._restart_at:
                if now >= self._restart_at[death.name]:
                    self._restart(death.name, now)
            elif not self._plan_restart(death, now):
                return death
        self._check_restarted(now)
        return None

    def _plan_restart(self, death: Death, now: float) -> bool:
        wait_s = self._schedule.on_death(death.name, now)
        self._healthy_by.pop(death.name, None)
        if wait_s is None:
            return False
        policy = self._schedule.policy
        number = f"restart {self._schedule.restarts(death.name)} of {policy.limit} within {policy.window_s / 60:g} minutes"
        self._restart_at[death.name] = now + wait_s
        self._report(f"{death}; restarting it in {wait_s:g} s ({number})")
        self._fleet.end_leftovers(death.name)
        return True

    def _restart(self, name: str, now: float) -> None:
        del self._restart_at[name]
        try:
            self._fleet.restart(name)
        except OSError as error:
            # No memory or no process left. The old death is found again in the next step, and counts once more.
            self._report(f"{name} could not be started: {error}")
        else:
            self._healthy_by[name] = now + self._healthy_within_s

    def _check_restarted(self, now: float) -> None:
        for name, healthy_by in list(self._healthy_by.items()):
            if self._fleet.is_healthy(name):
                del self._healthy_by[name]
                self._report(f"{name} (pid {self._fleet.pid(name)}) is healthy again")
            elif now > healthy_by:
                del self._healthy_by[name]
                self._report(f"{name} is not healthy {self._healthy_within_s:g} s after its restart; ending it")
                self._fleet.kill(name)
